"""Fusing changes what a network calls, and nothing of what it computes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deat
from deat.engine.kernels import graph_pass
from deat.engine.kernels.batch_norm import fused_batch_norm
from deat.models import densenet, imagenet_resnet

Net = Callable[[Tensor], Tensor]
IMAGE = torch.linspace(0, 1, 2 * 3 * 32 * 32, dtype=torch.float64).view(2, 3, 32, 32)


class Blocks(nn.Module):
    """Convolutions and batch norms, wired up by a function of the module and an image."""

    def __init__(self, wire: Callable[["Blocks", Tensor], Tensor], **options: object) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.a, self.b = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.n, self.m = (nn.BatchNorm2d(6, **options) for _ in range(2))  # type: ignore[arg-type]
        self.wire = wire

    def forward(self, x: Tensor) -> Tensor:
        return self.wire(self, self.stem(x))


def before(net: Blocks, x: Tensor) -> Tensor:
    total = net.a(x) + x
    return F.relu(net.n(total)) + total


def before_in_place(net: Blocks, x: Tensor) -> Tensor:
    total = net.a(x)
    total += x
    return F.relu(net.n(total), inplace=True) * total


def behind(net: Blocks, x: Tensor) -> Tensor:
    return F.relu(net.n(net.a(x)) + x)


def behind_two_norms(net: Blocks, x: Tensor) -> Tensor:
    out = net.n(net.a(x))
    out += net.m(net.b(x))
    return out.relu_()


def behind_one_norm_asked_twice(net: Blocks, x: Tensor) -> Tensor:
    out = net.n(net.a(x))
    return F.relu(out + net.n(net.b(x)))


def beside_a_later_user(net: Blocks, x: Tensor) -> Tensor:
    return net.a(F.relu(net.n(x))) * x


def a_sum_that_is_asked_for_earlier(net: Blocks, x: Tensor) -> Tensor:
    total = net.a(x) + x
    return net.b(total) + F.relu(net.n(total))


def one_sum_for_two_norms(net: Blocks, x: Tensor) -> Tensor:
    total = net.a(x) + x
    return F.relu(net.n(total)) * net.m(total)


def changed_in_place_afterwards(net: Blocks, x: Tensor) -> Tensor:
    y = net.n(x.clone())
    x = x.mul_(2)
    return F.relu(y + x)


def a_term_changed_in_place_before_the_norm(net: Blocks, x: Tensor) -> Tensor:
    z = net.b(x)
    total = net.a(x) + z
    z.mul_(2)
    return F.relu(net.n(total)) + z


def a_part_of_a_term_changed_in_place_before_the_norm(net: Blocks, x: Tensor) -> Tensor:
    z = net.b(x)
    total = net.a(x) + z
    z[:, :2] = 0
    return F.relu(net.n(total)) + z


def an_activation_in_place_before_the_norm(net: Blocks, x: Tensor) -> Tensor:
    z = net.b(x)
    total = net.a(x) + z
    z = F.leaky_relu(z, 0.5, True)
    return F.relu(net.n(total)) + z


def a_norm_added_to_itself(net: Blocks, x: Tensor) -> Tensor:
    y = net.n(net.a(x))
    return F.relu(y + y)


def a_norm_of_nothing_but_numbers(net: Blocks, x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(net.a(x), net.n.running_mean, net.n.running_var, training=net.training))


def inputs_by_name(net: Blocks, x: Tensor) -> Tensor:
    x = F.conv2d(input=net.n(x), weight=net.a.weight, padding=1)
    return F.relu(F.batch_norm(input=x, running_mean=None, running_var=None, training=True))


def shapes_that_differ(net: Blocks, x: Tensor) -> Tensor:
    return F.relu(net.n(x + x.mean((2, 3), keepdim=True)))


def no_relu(net: Blocks, x: Tensor) -> Tensor:
    return net.n(net.a(x))


WIRINGS = (
    *(before, before_in_place, behind, behind_two_norms, beside_a_later_user, a_sum_that_is_asked_for_earlier),
    *(one_sum_for_two_norms, changed_in_place_afterwards, shapes_that_differ, no_relu),
    *(a_term_changed_in_place_before_the_norm, a_part_of_a_term_changed_in_place_before_the_norm),
    *(an_activation_in_place_before_the_norm, a_norm_added_to_itself, a_norm_of_nothing_but_numbers),
    *(inputs_by_name, behind_one_norm_asked_twice),
)


def compared(net: nn.Module, x: Tensor = IMAGE) -> int:
    """Fused, it answers, learns and counts as it did; how many batch norms were fused."""
    torch._dynamo.reset()
    found: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        found.append(graph_pass.fuse_graph(graph))
        return graph.forward

    other = copy.deepcopy(net)
    for one in (net, torch.compile(other, backend=backend)):
        for _ in range(2):
            image = x.clone().requires_grad_()
            answer = one(image)
            answer.square().mean().backward()
    assert torch.equal(net(x), other(x))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.allclose(p.grad, q.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert all(torch.equal(p, q) for p, q in zip(net.buffers(), other.buffers(), strict=True))
    return sum(found)


@pytest.mark.parametrize("wire", WIRINGS, ids=lambda wire: wire.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_every_wiring_computes_what_it_did(wire: Callable[[Blocks, Tensor], Tensor], training: bool) -> None:
    torch.manual_seed(0)
    assert compared(Blocks(wire).double().train(training)) >= 1


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 0.1}])
def test_every_kind_of_batch_norm_computes_what_it_did(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    assert compared(Blocks(before, **options).double()) == 1


def short_network(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network of the registry with two blocks a stage: the third and later ones are wired as the second is."""
    monkeypatch.setattr(densenet, "LAYERS_PER_BLOCK", (2,) * 4)
    net = deat.build_model(name, normalize=((0.5,) * 3, (0.25,) * 3))
    for module in net.modules():
        if isinstance(module, imagenet_resnet.ResNet):
            for stage in (module.layer1, module.layer2, module.layer3, module.layer4):
                del stage[2:]
    return net.double()


@pytest.mark.parametrize(("name", "side"), [("preact_resnet18", 16), ("densenet121_12", 16), ("resnet50", 32)])
def test_networks_of_the_registry_compute_what_they_did(name: str, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = short_network(name, monkeypatch)
    assert compared(net, IMAGE[..., :side, :side]) == sum(isinstance(m, nn.BatchNorm2d) for m in net.modules())


def test_sums_and_relus_are_fused_where_no_process_else_needs_them() -> None:
    torch._dynamo.reset()
    calls: list[tuple[bool, bool, bool]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graph_pass.fuse_graph(graph)
        for node in graph.graph.nodes:
            if node.target is fused_batch_norm:
                calls.append((node.args[1] is not None, node.kwargs["residual"] is not None, node.kwargs["relu"]))
        return graph.forward

    for wire in (before, behind, behind_two_norms, a_sum_that_is_asked_for_earlier, shapes_that_differ):
        torch.compile(Blocks(wire).double(), backend=backend)(IMAGE)
    alone, with_relu, summed, added = (False,) * 3, (False, False, True), (True, False, True), (False, True, True)
    assert calls[:2] == [summed, added]
    assert sorted(calls[2:4]) == [alone, added]  # of two, one is the other's sum
    assert calls[4:] == [with_relu, with_relu]


def test_a_network_without_batch_norm_is_left_to_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[fx.GraphModule] = []
    monkeypatch.setattr(
        torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: asked.append(graph) or graph
    )
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()
    assert torch.compile(net, backend=graph_pass.fused_backend)(IMAGE).shape == (2, 4, 30, 30)
    assert [torch.conv2d in {node.target for node in graph.graph.nodes} for graph in asked] == [True], "not as it was"


def test_a_network_that_checkpoints_its_activations_is_left_to_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    asked: list[object] = []
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: asked.append(name) or graph)
    net = Blocks(lambda net, x: net.m(checkpoint(lambda z: F.relu(net.n(net.a(z))), x, use_reentrant=False))).double()
    torch.compile(net, backend=graph_pass.fused_backend)(IMAGE)
    assert asked == ["inductor"]


def test_batches_are_counted_once_for_each_call_and_each_count_is_launched_once() -> None:
    torch._dynamo.reset()
    counted: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graph_pass.fuse_graph(graph)
        for node in graph.graph.nodes:
            counted.extend(node.args[0] if node.target is torch._foreach_add_ else ())
        return graph.forward

    net = Blocks(before).double()
    torch.compile(lambda x: net(x) + net(2 * x), backend=backend)(IMAGE)
    assert net.n.num_batches_tracked == 2
    assert len(counted) == len(set(counted)) == 1, "on a GPU one launch would write twice at once"


def test_images_that_change_after_they_were_standardised_are_convolved_as_they_were() -> None:
    conv, norm = nn.Conv2d(3, 6, 3).double(), nn.BatchNorm2d(6).double().eval()
    mean = torch.full((3, 1, 1), 0.5).double()

    def answer(x: Tensor) -> Tensor:
        x = 1 * x
        standard = (x - mean) / mean
        x.mul_(2)
        return norm(conv(standard)) + x.mean()

    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        assert graph_pass.fuse_graph(graph) == 1
        return graph.forward

    assert torch.allclose(torch.compile(answer, backend=backend)(IMAGE), answer(IMAGE))
