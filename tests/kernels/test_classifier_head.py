"""A network's end and its loss by our own kernels, interpreted, and what stands beside them in a graph."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import deat
from deat.engine.kernels import classifier_head, conv_streams, cross_entropy, graph_pass
from deat.engine.kernels.conv_streams import start_conv2d, wait_for_conv2d
from helpers.end_cases import End, compare_ends, compare_entropies
from helpers.kernels_cases import distance

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it for real")
HALF = torch.float16
ENDS = [
    End(),
    End(bias=False, wide=True),
    End(channels=600, sides=(7, 7), images=3),
    End(channels=130, sides=(1, 1), classes=2, images=1),
    End(classes=33, sides=(5, 3), images=70),
]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (classifier_head, cross_entropy):
        monkeypatch.setattr(room, "on_gpu", lambda x: True)
    monkeypatch.setattr(classifier_head, "_matches_compute_dtype", lambda dtype, weight: True)


@pytest.mark.parametrize("case", ENDS, ids=str)
def test_the_end_of_a_network_agrees_with_torch(case: End, as_on_a_gpu: None) -> None:
    torchs, ours = compare_ends(case, HALF, "cpu")
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 2e-3


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("images", "classes"), [(5, 10), (33, 2), (7, 1000)])
def test_cross_entropy_agrees_with_torch(images: int, classes: int, mean: bool, as_on_a_gpu: None) -> None:
    torchs, ours = compare_entropies(images, classes, HALF, "cpu", mean)
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 1e-3


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_labels_that_do_not_count_count_nothing(
    serves: bool, mean: bool, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "is_supported", lambda logits, y: serves)
    logits, y = torch.randn(4, 3, dtype=HALF).requires_grad_(), torch.tensor([0, -100, 2, 1])
    ours, torchs = (
        cross_entropy.fused_cross_entropy(logits, y, mean=mean),
        F.cross_entropy(logits.float(), y, reduction="none"),
    )
    torchs = torchs.mean() if mean else torchs
    assert torch.allclose(ours, torchs, atol=1e-3)
    one, other = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, torchs))
    assert torch.allclose(one, other, atol=1e-3)


def test_labels_that_no_class_has_are_not_taken_for_others(as_on_a_gpu: None) -> None:
    losses = cross_entropy.fused_cross_entropy(torch.randn(3, 3, dtype=HALF), torch.tensor([0, 3, -1]))
    assert losses.isnan().tolist() == [False, True, True]


def test_gradients_by_weights_that_do_not_learn_are_not_computed(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deat.engine.kernels.classifier_head_triton.head_weight_gradient", lambda *args: pytest.fail("nobody asked")
    )
    x = torch.rand(2, 8, 3, 3, dtype=HALF).contiguous(memory_format=torch.channels_last).requires_grad_()
    classifier_head.pooled_linear(x, torch.rand(4, 8, dtype=HALF)).sum().backward()
    assert x.grad is not None


ASIDE = {
    "too many classes": (
        torch.rand(2, 8, 3, 3, dtype=HALF),
        torch.rand(classifier_head.MAX_CLASSES + 1, 8, dtype=HALF),
    ),
    "another type": (torch.rand(2, 8, 3, 3), torch.rand(4, 8)),
    "no images": (torch.rand(0, 8, 3, 3, dtype=HALF), torch.rand(4, 8, dtype=HALF)),
}


@pytest.mark.parametrize("name", ASIDE)
def test_ends_that_our_kernels_do_not_take_are_torchs(
    name: str, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        classifier_head.PooledLinearFunction, "apply", lambda *args: pytest.fail("it should stand aside")
    )
    x, weight = ASIDE[name]
    assert torch.equal(classifier_head.pooled_linear(x, weight), F.linear(x.mean((2, 3)), weight))


def fused_graph(net: nn.Module, *inputs: Tensor) -> fx.Graph:
    """A network's graph, fused, once it has agreed with the network."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, given: list[Any]) -> Any:
        graphs.append(graph)
        assert graph_pass.fuse_graph(graph)
        return graph.forward

    torch._dynamo.reset()
    net.eval()
    expected = net(*inputs)
    assert torch.allclose(torch.compile(net, backend=backend)(*inputs), expected, rtol=1e-9)
    (graph,) = graphs
    return graph.graph


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes]


@pytest.mark.parametrize("model", ["preact_resnet18", "resnet50", "wide_resnet34_10"])
def test_shortcuts_begin_before_the_convolutions_they_run_beside(model: str) -> None:
    net = deat.build_model(model).double()
    asked = targets(fused_graph(net, torch.rand(2, 3, 32, 32, dtype=torch.float64)))
    layers = [name for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d)]
    shortcuts = sum("shortcut" in name or "downsample" in name for name in layers)
    assert asked.count(start_conv2d) == asked.count(wait_for_conv2d) == shortcuts > 0
    at = [place for place, target in enumerate(asked) if target is start_conv2d]
    for place in at:
        until = asked.index(wait_for_conv2d, place)
        assert asked[place:until].count(conv_streams.conv2d) >= 2


class Wired(nn.Module):
    def __init__(self, wire: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(8, 8, 3, padding=1, dtype=torch.float64) for _ in range(4))
        self.n = nn.BatchNorm2d(8, dtype=torch.float64)
        self.wire = wire

    def forward(self, x: Tensor) -> Tensor:
        return self.wire(self, self.n(self.a(x)))


def changed_meanwhile(net: Wired, x: Tensor) -> Tensor:
    y = net.c(net.b(x))
    x.mul_(2)
    return y + net.d(x)


def needed_soon(net: Wired, x: Tensor) -> Tensor:
    return net.c(net.b(x) + net.d(x))


def changed_before_it_is_needed(net: Wired, x: Tensor) -> Tensor:
    short, y = net.d(x), net.c(net.b(x))
    x.mul_(2)
    return y + short


def without_gradients(net: Wired, x: Tensor) -> Tensor:
    y = net.c(net.b(x))
    with torch.no_grad():
        short = net.d(x)
    return y + short


@pytest.mark.parametrize("wire", [changed_meanwhile, needed_soon, changed_before_it_is_needed, without_gradients])
def test_a_convolution_stays_where_it_is(wire: Any) -> None:
    graph = fused_graph(Wired(wire), torch.rand(2, 8, 4, 4, dtype=torch.float64))
    assert start_conv2d not in targets(graph)


def test_a_convolution_whose_weight_does_not_learn_stays_where_it_is() -> None:
    net, x = Wired(lambda net, x: net.c(net.b(x)) + net.d(x)), torch.rand(2, 8, 4, 4, dtype=torch.float64)
    assert start_conv2d in targets(fused_graph(net, x))
    torch._dynamo.reset()
    assert start_conv2d not in targets(fused_graph(net.requires_grad_(False), x.requires_grad_()))


def test_a_branch_is_waited_for_before_its_result_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            said.append(f"{self.name} waits for {other.name}")

    main, beside = Stream("main"), Stream("branch")
    monkeypatch.setattr(conv_streams, "on_gpu", lambda x: True)
    monkeypatch.setattr(conv_streams, "get_side_stream", lambda device, use: beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: (said.append(f"on {stream.name}"), nullcontext())[1])
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: said.append(f"kept for {stream.name}"))
    x, weight = torch.rand(1, 2, 4, 4, requires_grad=True), torch.rand(2, 2, 1, 1)
    y = wait_for_conv2d(start_conv2d(x, weight))
    assert torch.equal(y, torch.conv2d(x, weight))
    assert said == ["branch waits for main", "on branch", "kept for branch", "main waits for branch", "kept for main"]
    y.sum().backward()
    assert [grad.shape for grad in conv_streams._gradients_in_use] == [y.shape], (
        "whoever adds to it must see that it is read"
    )
    start_conv2d(x, weight)
    assert not conv_streams._gradients_in_use


POOLS = {
    "mean": lambda x: x.mean((2, 3)),
    "mean from behind": lambda x: torch.mean(x, [-1, -2]),
    "pool": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "pool of pairs": lambda x: torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1),
    "layers": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
}
OTHERS = {
    "over channels": lambda x: x.mean((1, 2)).repeat(1, 2)[:, :8],
    "keeps sides": lambda x: x.mean((2, 3), keepdim=True)[:, :, 0, 0],
    "larger pool": lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1)[:, :8],
    "asked for twice": lambda x: (lambda mean: mean * mean)(x.mean((2, 3))),
}


class Pooling(nn.Module):
    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3).double(), nn.BatchNorm2d(8).double()
        self.linear, self.pool = nn.Linear(8, 4).double(), pool

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.pool(F.relu(self.norm(self.conv(x)))))


@pytest.mark.parametrize("name", [*POOLS, *OTHERS])
def test_means_over_pixels_are_found_before_a_linear_layer(name: str) -> None:
    graph = fused_graph(Pooling((POOLS | OTHERS)[name]), torch.rand(2, 3, 8, 8, dtype=torch.float64))
    assert (classifier_head.pooled_linear in targets(graph)) == (name in POOLS)


class Judged(nn.Module):
    def __init__(self, half: torch.dtype, end: Any = Tensor.clone, **options: Any) -> None:
        super().__init__()
        self.norm, self.half, self.end, self.options = nn.BatchNorm2d(4).double(), half, end, options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.norm(x).mean((2, 3)).to(self.half)
        return self.end(F.cross_entropy(logits.float(), y, **self.options))


@pytest.mark.parametrize(
    ("net", "found"),
    [
        (Judged(torch.bfloat16, reduction="none"), {}),
        (Judged(torch.bfloat16, lambda losses: losses.mean(), reduction="none"), {"mean": True}),
        (Judged(torch.bfloat16, lambda losses: losses.mean() + losses[0], reduction="none"), {}),
        (Judged(torch.bfloat16, lambda losses: losses.mean(0), reduction="none"), {}),
        (Judged(torch.float64, reduction="none"), None),
        (Judged(torch.bfloat16), None),
        (Judged(torch.bfloat16, reduction="none", label_smoothing=0.1), None),
    ],
)
def test_cross_entropies_of_halves_are_found_and_so_are_their_means(
    net: nn.Module, found: dict[str, bool] | None
) -> None:
    graph = fused_graph(net, torch.rand(2, 4, 3, 3, dtype=torch.float64), torch.tensor([1, 3]))
    asked = [node.kwargs for node in graph.nodes if node.target is cross_entropy.fused_cross_entropy]
    assert asked == ([] if found is None else [found])
