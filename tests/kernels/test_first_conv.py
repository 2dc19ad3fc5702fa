"""Our first convolution, run one program after the other by Triton's interpreter, in the half it knows: float16."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deat.engine.kernels import first_conv
from helpers.kernels_cases import distance
from helpers.stem_cases import Stem, compare

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it for real")

HALF = torch.float16
CASES = [
    Stem(),
    Stem(last=True),
    Stem(dtype=HALF),
    Stem(standardised=False, bias=False, last=True),
    Stem(channels=1, kernel=(1, 1), padding=0, out=24),
    Stem(channels=4, kernel=(5, 5), padding=2, out=96),
    Stem(channels=1, kernel=(5, 5), padding=(2, 2), out=24, standardised=False),
    Stem(channels=4, kernel=(1, 1), padding=0, last=True, bias=False),
    Stem(kernel=(3, 5), padding=(0, 3), out=96),
    Stem(kernel=(5, 3), padding=(4, 0), out=17, shape=(3, 2, 5)),
    Stem(channels=7, padding=2, shape=(1, 1, 1)),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from deat.engine.kernels import first_conv_triton

    monkeypatch.setattr(first_conv, "on_gpu", lambda x: True)
    monkeypatch.setattr(first_conv_triton, "FORWARD_TILE_PIXELS", 32)
    monkeypatch.setattr(first_conv_triton, "BACKWARD_TILE_PIXELS", 32)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: HALF)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The paddings that our own convolution was asked for."""
    asked: list[Any] = []
    apply = first_conv.FirstConvFunction.apply
    monkeypatch.setattr(first_conv.FirstConvFunction, "apply", lambda *args: (asked.append(args[3]), apply(*args))[1])  # type: ignore[no-untyped-call]
    return asked


def draw(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_first_convolution_agrees_with_torch(case: Stem, direct: list[Any]) -> None:
    torchs, ours = compare(case, HALF, "cpu")
    assert direct
    assert ours[0].is_contiguous(memory_format=torch.channels_last)
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 1e-3


def test_a_gradient_in_another_order_of_memory_is_the_same() -> None:
    x, weight = draw(2, 3, 6, 6).requires_grad_(), draw(8, 3, 3, 3)
    y = first_conv.conv2d_few_channels(x, weight, None, 1, 1)
    dy = draw(*y.shape)
    one, other = (
        torch.autograd.grad(y, x, grad, retain_graph=True)[0]
        for grad in (dy, dy.contiguous(memory_format=torch.channels_last))
    )
    assert torch.equal(one, other)


def test_images_that_lie_apart_in_memory_get_their_gradient() -> None:
    rows, weight = draw(2, 3, 6, 12).requires_grad_(), draw(8, 3, 3, 3)
    y = first_conv.conv2d_few_channels(rows[..., ::2], weight, None, 1, 1)
    (ours,) = torch.autograd.grad(y.float().sum(), rows)
    (torchs,) = torch.autograd.grad(torch.conv2d(rows[..., ::2], weight, None, 1, 1).float().sum(), rows)
    assert distance(torchs, ours) < 1e-3


@pytest.mark.parametrize("unasked", ["_input_gradient", "_weight_gradient"])
def test_gradients_that_nothing_asks_for_are_not_computed(unasked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_conv, unasked, lambda *args: pytest.fail("nobody asked"))
    x, weight = draw(2, 3, 6, 6), draw(8, 3, 3, 3)
    leaf = (weight if unasked == "_input_gradient" else x).requires_grad_()
    first_conv.conv2d_few_channels(x, weight, None, 1, 1).float().square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.any()


ASIDE: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "stride": ((8, 4, 3, 3), (2, 1)),
    "stride by one side": ((8, 4, 3, 3), ((1, 2), 1)),
    "dilation": ((8, 4, 3, 3), (1, 1, 2)),
    "groups": ((8, 2, 3, 3), (1, 1, 1, 2)),
    "padding by name": ((8, 4, 3, 3), (1, "same")),
    "large kernel": ((8, 4, 7, 7), (1, 3)),
    "large padding": ((8, 4, 3, 3), (1, 3)),
}


@pytest.mark.parametrize("name", ASIDE)
def test_what_our_kernels_do_not_take_goes_another_way(name: str, direct: list[Any]) -> None:
    shape, rest = ASIDE[name]
    x, weight = draw(2, 4, 8, 8).requires_grad_(), draw(*shape).requires_grad_()
    answers = []
    for conv2d in (torch.conv2d, first_conv.conv2d_few_channels):
        y = conv2d(x, weight, None, *rest)
        answers.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, weight))])
    assert not direct
    assert max(distance(one, other) for one, other in zip(*answers, strict=True)) < 1e-2


def test_images_too_large_to_be_counted_in_32_bits_go_another_way() -> None:
    weight = torch.empty(64, 3, 3, 3, device="meta")
    assert first_conv.is_supported(torch.empty(128, 3, 224, 224, device="meta"), weight, None, (1, 1))
    assert not first_conv.is_supported(torch.empty(1024, 3, 224, 224, device="meta"), weight, None, (1, 1))
    few = torch.empty(4, 3, 3, 3, device="meta")  # a weight's gradient is taken of images of eight channels
    assert first_conv.is_supported(torch.empty(1024, 3, 500, 500, device="meta"), few, None, (1, 1))
    assert not first_conv.is_supported(torch.empty(1024, 3, 512, 512, device="meta"), few, None, (1, 1))
    apart = torch.empty_strided((128, 3, 32, 32), (2**25, 1, 96, 3), device="meta")
    assert not first_conv.is_supported(apart, weight, None, (1, 1))
