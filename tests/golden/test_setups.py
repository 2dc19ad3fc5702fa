"""The learning rates of the paper's two setups, at the steps where they turn."""

import pytest

from deat.training.lr_schedules import get_lr_schedule

BATCHES = 391


def test_standard_setup_decays_at_steps_9775_and_15640_of_fifty_epochs():
    multistep = get_lr_schedule("multistep", 0.05, 50)
    rates = [multistep.at(step, 50 * BATCHES)[0] for step in (0, 9774, 9775, 15639, 15640, 19549)]
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005], rel=1e-12)


def test_fast_setup_is_a_triangle_whose_momentum_moves_against_it():
    cyclic = get_lr_schedule("cyclic", 0.1, 12, peak=0.5, momentum=(0.9, 0.8))
    total = 12 * BATCHES
    points = [cyclic.at(step, total) for step in (0, total // 4, total // 2, total)]
    assert [lr for lr, _ in points] == pytest.approx([0, 0.05, 0.1, 0], abs=1e-12)
    assert [momentum for _, momentum in points] == pytest.approx([0.9, 0.85, 0.8, 0.9], rel=1e-12)
