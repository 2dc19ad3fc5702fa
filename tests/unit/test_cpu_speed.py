"""What makes training on a CPU fast, and that it computes the same."""

import resource

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deat
from deat.engine.cpu_bf16_workarounds import FastBf16Functions, may_have_slow_bf16_functions
from deat.engine.cpu_memory import _find_glibc, reused_memory
from helpers.nets import conv_net

BF16_ERROR = 2.0**-6


def depthwise_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(), nn.LazyLinear(4))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)


def gradient(net: nn.Module, x: torch.Tensor, engine: deat.Engine) -> torch.Tensor:
    """The gradient by the input, in the engine's precision."""
    x = x.clone().requires_grad_()
    with engine.autocast():
        loss = net(x).float().square().mean()
    return torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(("build", "shape"), [(depthwise_net, (2, 3, 6, 6)), (transformer, (2, 5, 16))])
def test_fast_functions_have_the_gradients_of_float32_up_to_rounding(build, shape):
    net, x = build(), torch.rand(shape, generator=torch.Generator().manual_seed(1))
    net(x)
    exact, half = deat.Engine(), deat.Engine(precision="bf16")
    exact.prepare(net)
    wanted = gradient(net, x, exact)
    half.prepare(net)
    found = gradient(net, x, half)
    assert not torch.equal(found, wanted), "it is computed in bf16"
    assert float((found - wanted).abs().max()) < 4 * BF16_ERROR * float(wanted.abs().max())


def test_depthwise_convolutions_are_as_exact_as_float32_inside_bf16():
    x, weight = torch.rand(2, 4, 5, 5).bfloat16(), torch.rand(4, 1, 3, 3)
    with torch.autocast("cpu", torch.bfloat16), FastBf16Functions():
        found = F.conv2d(x, weight, groups=4)
    assert torch.equal(found, F.conv2d(x.float(), weight, groups=4).bfloat16())


def test_networks_without_slow_functions_are_left_alone():
    assert may_have_slow_bf16_functions(depthwise_net())
    assert may_have_slow_bf16_functions(transformer())
    assert not may_have_slow_bf16_functions(conv_net(batch_norm=True))
    assert not may_have_slow_bf16_functions(deat.build_model("small"))


def test_float32_uses_the_functions_of_torch():
    net, x, engine = transformer(), torch.rand(2, 5, 16), deat.Engine()
    engine.prepare(net)
    expected = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(net(expected).square().mean(), expected)
    assert torch.equal(gradient(net, x, engine), wanted)


@pytest.mark.skipif(_find_glibc() is None, reason="needs glibc with its own thresholds")
def test_memory_that_is_freed_in_training_is_not_faulted_in_again():
    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(2**20) for _ in range(8)]
        del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with reused_memory():
        # Where earlier tests have left gaps in the heap, a first round may take other places than the next.
        assert min(faults() for _ in range(6)) < 1000, "32 MiB are 8,192 pages"
    assert faults() > 1000, "memory was returned to the system"
