"""Our kernels, run one program after the other by Triton's interpreter: what they compute, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deat.engine.kernels import batch_norm
from deat.engine.kernels.first_conv import PADDED_CHANNELS, pad_channels
from helpers.kernels_cases import Case, cases, compare, distance

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        batch_norm, "_is_supported_tensor", lambda x: x.is_contiguous(memory_format=torch.channels_last)
    )
    monkeypatch.setattr(batch_norm, "SUMS_LAUNCH", batch_norm.LaunchShape(16, 4, 8))
    monkeypatch.setattr(batch_norm, "OUTPUT_LAUNCH", batch_norm.LaunchShape(16, 4, 8))


@pytest.mark.parametrize("case", cases(torch.float64, channels=(8, 80)), ids=str)
def test_fused_batch_norm_agrees_with_torch(case: Case) -> None:
    torchs, ours = compare(case, "cpu", 6)
    assert len(torchs) == len(ours)
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 1e-12


def test_sums_are_taken_about_the_first_row_so_that_small_spreads_far_from_zero_survive() -> None:
    x = (1000 + 0.01 * torch.randn(8, 8, 5, 5, dtype=torch.float64)).float()
    x = x.contiguous(memory_format=torch.channels_last)
    y, _ = batch_norm.fused_batch_norm(x, None, None, None, torch.ones(8), torch.zeros(8), True, 0.1, 0.0)
    assert y.std().item() == pytest.approx(1.0, abs=1e-2)


def test_a_second_backward_finds_what_the_first_one_found() -> None:
    x = torch.randn(4, 8, 5, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    leaves = x, *(torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y, _ = batch_norm.fused_batch_norm(x, None, None, None, *leaves[1:], True, relu=True)
    first = [grad.clone() for grad in torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)]
    second = torch.autograd.grad(y.square().sum(), leaves)
    assert all(torch.allclose(one, other) for one, other in zip(first, second, strict=True))


def test_kernels_stand_aside_where_every_bit_must_repeat() -> None:
    x = torch.randn(4, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    assert batch_norm.is_supported(x, None, None, torch.ones(8), torch.zeros(8))
    torch.use_deterministic_algorithms(True)
    try:
        assert not batch_norm.is_supported(x, None, None, torch.ones(8), torch.zeros(8))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("standardised", [False, True])
def test_channels_of_zeros_are_added_and_taken_away(channels: int, standardised: bool) -> None:
    x = torch.randn(5, channels, 6, 7, dtype=torch.float64, requires_grad=True)
    shift, scale = (torch.rand(1, channels, 1, 1, dtype=torch.float64) + 0.5 for _ in range(2))
    shift, scale = (shift, scale) if standardised else (0 * shift, 0 * scale + 1)
    wide = pad_channels(x, torch.float32, *((shift, scale) if standardised else ()))
    assert wide.shape == (5, PADDED_CHANNELS, 6, 7)
    assert torch.equal(wide[:, :channels], ((x - shift) / scale).float())
    assert not wide[:, channels:].any()
    (grad,) = torch.autograd.grad(wide, x, torch.ones_like(wide))
    assert torch.allclose(grad, torch.ones_like(x) / scale)


def test_one_pass_of_a_linf_step_is_the_step() -> None:
    from deat.engine.kernels.linf_step_triton import linf_projected_step
    from deat.threat import Linf

    x, grad = torch.rand(3, 3, 9, 9), torch.randn(3, 3, 9, 9)
    grad[0] = 0
    delta, alpha = 0.1 * torch.rand_like(x) - 0.05, torch.tensor(4 / 255)
    moved = Linf(8 / 255).pgd_step(x, delta, grad, alpha)
    assert torch.equal(linf_projected_step(x, delta, grad, alpha, out=torch.empty_like(x), eps=8 / 255), moved)
    assert torch.equal(linf_projected_step(x, delta, grad, alpha, out=delta, eps=8 / 255), delta)
    assert torch.equal(delta, moved), "in its place"
    grad[1] = float("nan")
    assert linf_projected_step(x, delta, grad, alpha, out=torch.empty_like(x), eps=8 / 255)[1].isnan().all()


def test_every_kernel_can_be_built_for_a_gpu() -> None:
    script = Path(__file__).with_name("building.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    built = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
