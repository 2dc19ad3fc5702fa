"""Mirrored weights, made by Triton's interpreter: a convolution's gradient by its input is a convolution with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deat.kernels import forked, mirror
from deat.kernels.mirror import Mirrors, can_be_mirrored, mirrored

LAST = torch.channels_last


def weight_of(outputs: int, inputs: int, side: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(outputs, inputs, side, side).to(dtype).contiguous(memory_format=LAST)


@pytest.fixture
def interpreted() -> None:
    pytest.importorskip("triton", reason="needs Triton, which is for Linux")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs it for real")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_weights_are_mirrored_at_once_and_follow_what_they_mirror(dtype: torch.dtype) -> None:
    weights = [weight_of(8, 8, 3, dtype), weight_of(72, 136, 3, dtype), weight_of(16, 64, 5, dtype)]
    mirrors = Mirrors(weights)
    for _ in range(2):
        for weight in weights:
            assert torch.equal(mirrored(weight), weight.flip((2, 3)).transpose(0, 1))  # type: ignore[arg-type]
            weight.mul_(2).sub_(1)
        mirrors.refresh()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("side", "padding"), [(3, 0), (3, 1), (3, (1,)), (3, 2), (5, 2)])
def test_a_gradient_by_way_of_the_mirror_is_the_gradient(
    side: int, padding: int | tuple[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_on_gpu", lambda x: True)
    monkeypatch.setattr(forked, "_gradient", None)
    weight, x = weight_of(16, 8, side), torch.randn(2, 8, 9, 7, requires_grad=True)
    Mirrors([weight])
    ours = forked.conv2d(x, weight, None, 1, padding)
    torchs = torch.conv2d(x, weight, None, 1, padding)
    dy = torch.randn_like(torchs)
    assert torch.equal(ours, torchs)
    (one,), (other,) = (torch.autograd.grad(y, x, dy) for y in (ours, torchs))
    assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "how",
    [
        {"stride": (1,), "padding": (1,)},
        {"stride": 2},
        {"dilation": 2},
        {"padding": 3},
        {"padding": "same"},
        {"groups": 2},
    ],
    ids=str,
)
def test_a_weight_that_is_used_in_another_way_than_its_layer_does_goes_without_its_mirror(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_on_gpu", lambda x: True)
    weight, x = weight_of(16, 8), torch.randn(2, 16 if "groups" in how else 8, 9, 7, requires_grad=True)
    Mirrors([weight])
    (one,), (other,) = (
        torch.autograd.grad(conv(x, weight, None, **how).square().sum(), x) for conv in (forked.conv2d, torch.conv2d)
    )
    assert torch.allclose(one, other, atol=1e-3)


@pytest.mark.usefixtures("interpreted")
def test_weights_that_are_not_channels_last_have_no_mirror() -> None:
    weight = torch.randn(8, 16, 3, 3)
    Mirrors([weight])
    assert mirrored(weight) is None


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Conv2d(128, 136, 3, padding=1, bias=False), True),
        (nn.Conv2d(128, 128, (5, 3), padding=(2, 1), bias=False), True),
        (nn.Conv2d(128, 128, 3, padding=1), False),
        (nn.Conv2d(128, 128, 3, padding="same", bias=False), False),
        (nn.Conv2d(128, 128, 3, padding=3, bias=False), False),
        (nn.Conv2d(128, 128, 3, stride=2, bias=False), False),
        (nn.Conv2d(128, 128, 3, dilation=2, bias=False), False),
        (nn.Conv2d(128, 128, 3, groups=2, bias=False), False),
        (nn.Conv2d(128, 128, 3, padding_mode="reflect", bias=False), False),
        (nn.Conv2d(128, 128, 1, bias=False), False),
        (nn.Conv2d(64, 128, 3, bias=False), False),
        (nn.Conv2d(128, 130, 3, bias=False), False),
        (nn.Linear(128, 128), False),
    ],
    ids=str,
)
def test_only_plain_convolutions_of_many_channels_are_mirrored(layer: nn.Module, fits: bool) -> None:
    assert can_be_mirrored(layer) == fits
    assert mirror.CHANNELS == 128
