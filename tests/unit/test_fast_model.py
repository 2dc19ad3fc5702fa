"""The fast model of attacks on a GPU: its choice of engine and precision, and its CUDA graphs, simulated on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation import fast_model
from deat.evaluation.evaluator import evaluate
from deat.evaluation.fast_model import (
    COMPILE_MIN_PASSES,
    GraphedNetwork,
    LowPrecisionModel,
    choose_attack_engine,
    padded_size,
)
from deat.models import add_normalization
from helpers.eval_nets import THREAT, digits, undefended
from helpers.recorded import count_recordings


class SimulatedGraphs:
    """Graphs on the CPU: they read and write their own tensors, and their activations are in their slot's pool."""

    recorded = warmed_up = 0

    def __init__(self, net: Any, x: Tensor, pool: dict[str, Any], warm_up: bool) -> None:
        SimulatedGraphs.recorded += 1
        SimulatedGraphs.warmed_up += warm_up
        self.net, self.x, self.pool = net, x.detach().clone(), pool
        self.logits = net(self.x).detach().clone()

    def forward(self, x: Tensor) -> None:
        self.x[: len(x)] = x
        self.logits.copy_(self.net(self.x).detach())
        self.pool.update(owner=self, images=self.x.clone())

    def backward(self, grad_output: Tensor) -> Tensor:
        assert self.pool.pop("owner", None) is self, (
            "another graph, or a backward pass, has overwritten the activations"
        )
        images = self.pool["images"].requires_grad_()
        with torch.enable_grad():
            logits = self.net(images)[: len(grad_output)]
        return torch.autograd.grad(logits, images, grad_output)[0][: len(grad_output)]


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(fast_model, "_GraphPair", SimulatedGraphs)
    monkeypatch.setattr(fast_model, "MAX_RECORDED_BATCH", 32)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", dict)
    SimulatedGraphs.recorded = SimulatedGraphs.warmed_up = 0
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def input_gradient(net: Any, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x)
    return grad


def images(n: int) -> Tensor:
    return torch.rand(n, 3, 2, 2, dtype=torch.float64)


def test_batches_of_any_length_have_the_network_s_logits_and_gradients(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    for n in (70, 70, 65, 33, 32, 31, 1, 96, 70):
        x = images(n)
        assert torch.allclose(input_gradient(graphed, x), input_gradient(net, x))
        with torch.no_grad():
            assert torch.allclose(graphed(x), net(x))
    assert (SimulatedGraphs.recorded, SimulatedGraphs.warmed_up) == (4, 1), (
        "one size, in three slots for full parts and one for the remainder"
    )


def test_a_backward_pass_is_correct_after_other_forward_passes(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    first, second = images(40), images(50)
    for _ in range(3):
        graphed(first), graphed(second)
    x = first.clone().requires_grad_()
    logits = graphed(x).square().sum()
    with torch.no_grad():
        graphed(second), graphed(first + 1)
    (grad,) = torch.autograd.grad(logits, x)
    assert torch.allclose(grad, input_gradient(net, first))
    assert torch.allclose(input_gradient(graphed, first), input_gradient(net, first)), (
        "activations that a backward pass had overwritten were used"
    )


def test_each_size_of_a_remainder_is_recorded_once(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_model, "MAX_RECORDED_BATCH", 256)
    graphed = GraphedNetwork(net)
    for n in (300, 600, 301, 520, 310):
        x = images(n)
        assert torch.allclose(input_gradient(graphed, x), input_gradient(net, x))
    assert SimulatedGraphs.recorded == 3, (
        "two full parts, and a remainder of 64 images; a remainder of 128 came up once"
    )


def test_padded_batches_have_the_memory_format_of_full_ones(net: nn.Module) -> None:
    layouts = {}
    whole = images(32).contiguous(memory_format=torch.channels_last)
    for n in (32, 31, 20, 1):
        layouts[n] = fast_model._pad_batch(whole[:n], torch.Size((32, 3, 2, 2))).stride()
    assert set(layouts.values()) == {whole.stride()}
    assert fast_model._pad_batch(images(5), torch.Size((32, 3, 2, 2))).is_contiguous()


def test_a_size_in_another_memory_format_is_warmed_up_again(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    for _ in range(3):
        graphed(images(32))
    graphed(images(96).contiguous(memory_format=torch.channels_last))
    assert (SimulatedGraphs.recorded, SimulatedGraphs.warmed_up) == (3, 2), "once in each memory format"


def test_a_second_backward_pass_of_one_forward_pass_is_correct(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    x = images(20)
    graphed(x)
    x.requires_grad_()
    logits = graphed(x).square()
    for column in range(3):
        (grad,) = torch.autograd.grad(logits[:, column].sum(), x, retain_graph=True)
        assert torch.allclose(grad, input_gradient(lambda v, column=column: net(v)[:, column], x))
    assert count_recordings(graphed) == 1


def test_an_empty_batch_has_no_logits(net: nn.Module) -> None:
    assert GraphedNetwork(net)(images(0)).shape == (0, 3)


def test_two_gradients_of_the_same_images_are_both_correct(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    x = images(20)
    for _ in range(3):
        with torch.no_grad():
            graphed(x)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        sums = graphed(one).square().sum(), graphed(other).square().sum()
        (second,) = torch.autograd.grad(sums[1], other)
        (first,) = torch.autograd.grad(sums[0], one)
        assert torch.allclose(first, input_gradient(net, x))
        assert torch.allclose(second, input_gradient(net, x))
    assert SimulatedGraphs.recorded == 1


def test_a_size_is_recorded_when_it_comes_up_again(net: nn.Module) -> None:
    graphed = GraphedNetwork(net)
    graphed(images(10))
    assert count_recordings(graphed) == 0
    graphed(images(12))  # padded to the same size
    assert count_recordings(graphed) == 1


def test_batches_are_padded_by_a_quarter_at_most() -> None:
    sizes = [padded_size(n) for n in range(1, 5000)]
    assert all(n <= size <= max(32, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 40


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_tf32_and_fp16_need_a_gpu(precision: str) -> None:
    with pytest.raises(UsageError, match=f"{precision} need a CUDA device; use 'auto', 'bf16' or 'fp32'"):
        evaluate(undefended(), digits(4), threat=THREAT, attacks=["fgsm"], precision=precision)


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_an_engine_with_cuda_graphs_needs_a_gpu(engine: str) -> None:
    with pytest.raises(UsageError, match=f"'{engine}' needs a CUDA device .*use 'auto' or 'eager'"):
        evaluate(undefended(), digits(4), threat=THREAT, engine=engine)


def test_unknown_precisions_and_engines_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'fp61'.*Known: auto, bf16, fp16, fp32, tf32"):
        evaluate(undefended(), digits(4), threat=THREAT, attacks=["fgsm"], precision="fp61")
    with pytest.raises(UsageError, match=r"'fast'.*Known: auto, compile, eager, graph"):
        evaluate(undefended(), digits(4), threat=THREAT, engine="fast")


def test_the_eager_engine_gives_the_default_verdicts_on_a_cpu() -> None:
    default, eager = (evaluate(undefended(), digits(8), threat=THREAT, engine=name) for name in ("auto", "eager"))
    assert default.verdicts == eager.verdicts


@pytest.mark.parametrize(
    ("wanted", "device", "passes", "chosen"),
    [
        ("auto", "cpu", 10**9, "eager"),
        ("eager", "cpu", 10**9, "eager"),
        ("auto", "cuda", COMPILE_MIN_PASSES - 1, "graph"),
        ("auto", "cuda", COMPILE_MIN_PASSES, "compile"),
        ("eager", "cuda", 10**9, "eager"),
        ("graph", "cuda", 10**9, "graph"),
        ("compile", "cuda", 1, "compile"),
    ],
)
def test_the_auto_engine_uses_graphs_on_a_gpu_and_compiles_for_long_evaluations(
    wanted: str, device: str, passes: int, chosen: str
) -> None:
    assert choose_attack_engine(wanted, torch.device(device), passes) == chosen


def test_layers_replaced_for_speed_on_a_cpu_have_the_original_s_logits_and_gradients() -> None:
    torch.manual_seed(0)
    pooled = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    net = add_normalization(nn.Sequential(*pooled), [0.4, 0.5, 0.6], [0.2, 0.3, 0.1]).eval()
    x, calls = torch.rand(6, 3, 9, 9).contiguous(memory_format=torch.channels_last), []
    copied = LowPrecisionModel(net, "fp32", compiled=False)
    assert torch.allclose(copied(x), net(x), rtol=1e-6)
    assert torch.allclose(input_gradient(copied, x), input_gradient(net, x), rtol=1e-5)

    pooled[3].register_forward_hook(lambda *_: calls.append(1))
    LowPrecisionModel(net, "fp32", compiled=False)(x)
    assert calls == [1], "a layer with a hook of the user's stays"
