"""Learning rates: pure functions of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deat.errors import UsageError
from deat.training.lr_schedules import LR_SCHEDULES, ConstantLR, CosineLR, CyclicLR, MultiStepLR, get_lr_schedule


def lrs(name: str, epochs: int, batches: int, **options) -> list[float]:
    shape = get_lr_schedule(name, 0.2, epochs, **options)
    return [shape.at(step, epochs * batches)[0] for step in range(epochs * batches)]


@pytest.mark.parametrize(
    ("name", "kind"), list(zip(LR_SCHEDULES, (CyclicLR, MultiStepLR, CosineLR, ConstantLR), strict=True))
)
def test_every_name_builds_its_shape(name, kind):
    assert isinstance(get_lr_schedule(name, 0.1, 10), kind)


def test_flat_never_changes():
    assert set(lrs("flat", 3, 5)) == {0.2}


def test_multistep_decays_at_whole_epochs_even_when_half_is_none():
    expected = [0.2] * 5 * 3 + [0.02] * 3 * 3 + [0.002] * 3 * 3
    assert lrs("multistep", 11, 3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, [1]), (2, [1, 0.01]), (3, [1, 0.1, 0.01]), (5, [1, 1, 0.1, 0.1, 0.01])]
)
def test_multistep_begins_at_its_full_rate_in_short_trainings_too(epochs, expected):
    assert lrs("multistep", epochs, 1) == pytest.approx([0.2 * e for e in expected])


@given(st.integers(1, 60), st.integers(1, 50))
def test_multistep_never_rises_and_starts_full(epochs, batches):
    found = lrs("multistep", epochs, batches)
    assert found[0] == 0.2
    assert found == sorted(found, reverse=True)


def test_cyclic_equals_torch_s_own_triangle_and_momentum():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.2, momentum=0.9)
    torchs = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.0, 0.2, step_size_up=10, step_size_down=10)
    ours = get_lr_schedule("cyclic", 0.2, 4, momentum=(0.9, 0.8))
    for step in range(20):
        group = optimizer.param_groups[0]
        lr, momentum = ours.at(step, 20)
        assert (lr, momentum) == pytest.approx((group["lr"], group["momentum"]), abs=1e-12)
        optimizer.step()
        torchs.step()


@given(st.floats(0.05, 0.95), st.integers(1, 200))
def test_cyclic_stays_between_zero_and_its_peak(peak, total):
    shape = CyclicLR(0.2, peak)
    for step in range(total + 1):
        lr, momentum = shape.at(step, total)
        assert -1e-12 <= lr <= 0.2 + 1e-12
        assert 0.8 - 1e-12 <= momentum <= 0.9 + 1e-12


def test_cyclic_peaks_at_the_given_step():
    found = lrs("cyclic", 10, 10, peak=0.3)
    assert found.index(max(found)) == 30
    assert max(found) == pytest.approx(0.2)
    assert get_lr_schedule("cyclic", 0.2, 10, momentum=None).at(3, 100)[1] is None


def test_cosine_falls_from_lr_to_zero():
    found = CosineLR(0.2)
    values = [found.at(step, 100)[0] for step in (0, 25, 50, 100)]
    assert values == pytest.approx([0.2, 0.1 * (1 + math.sqrt(0.5)), 0.1, 0.0])


def test_unknown_shape_suggests_a_known_one():
    with pytest.raises(UsageError, match="cosine"):
        get_lr_schedule("cosin", 0.1, 10)
