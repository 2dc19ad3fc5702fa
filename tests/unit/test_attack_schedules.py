"""Schedules of k: pure rules on the host whose state is JSON."""

import copy
import json
import math
import warnings
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deat.attack_schedules import (
    AccuracyAbove,
    AdversaryGap,
    EveryEpochs,
    Fixed,
    GradientMagnitude,
    LinearRamp,
    Schedule,
)
from deat.core.batch_buffers import Budget
from deat.core.epoch_sums import EpochRecord
from deat.errors import NumericalError, UsageError

SCHEDULES = {
    "fixed": Fixed(k=3, alpha=0.1, stop_threshold=3),
    "every epochs": EveryEpochs(period=3, alpha=0.1),
    "accuracy above": AccuracyAbove(percent=40, alpha=0.1, max_steps=3),
    "gradient magnitude": GradientMagnitude(alpha=0.1, max_steps=7),
    "ramped": GradientMagnitude(alpha=0.02, max_steps=2, ramp=0.1),
    "linear": LinearRamp(first=2, last=10, epochs=20, stretch=0.25, alpha=0.1),
    "gap": AdversaryGap(max_steps=7, alpha=0.1, epochs=20),
    "falling level": LinearRamp(
        first=10, last=10, epochs=20, alpha=0.1, stop_threshold=0.5, stop_threshold_until=5 / 6
    ),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
M_PLUS = GradientMagnitude(gamma=1.01, max_steps=7, alpha=10 / 255)


def record(
    epoch: int, magnitude: float = 1.0, accuracy: float = 0.5, gap: float = 0.02, rise: float = 3
) -> EpochRecord:
    measured = {"largest_rise": rise, "reached_rise": (1 - gap) * rise}
    return EpochRecord(epoch, 1.0, accuracy, magnitude, 100, measured=measured)


def ks(schedule: Schedule, magnitudes: list[float]) -> list[int]:
    state, found = schedule.init(), []
    for epoch, magnitude in enumerate(magnitudes):
        found.append(schedule.budget(state, epoch).k)
        state = schedule.observe(state, record(epoch, magnitude))
    return found


@every_schedule
def test_schedule_is_pure_and_its_state_is_json(schedule):
    state = schedule.init()
    for epoch in range(8):
        before = copy.deepcopy(state)
        assert schedule.budget(state, epoch) == schedule.budget(state, epoch)
        later = schedule.observe(state, record(epoch, 2.0**epoch))
        assert later == schedule.observe(state, record(epoch, 2.0**epoch))
        assert state == before
        state = json.loads(json.dumps(later))
        assert state == later


def test_a_schedule_that_does_not_say_k_cannot_be_made_and_one_that_says_nothing_else_can():
    class Constant(Schedule):
        def k_at(self, state: dict[str, object], epoch: int) -> int:
            return 2

    with pytest.raises(TypeError, match="k_at"):
        Schedule()
    schedule = Constant(alpha=0.1)
    assert schedule.budget(schedule.observe(schedule.init(), record(0)), 1) == Budget(2, 0.1, 0.0)


@every_schedule
def test_observed_state_is_a_new_object(schedule):
    state = schedule.init()
    assert schedule.observe(state, record(0)) is not state
    assert schedule.init() is not schedule.init()


@every_schedule
def test_schedule_is_frozen_and_gives_whole_k(schedule):
    with pytest.raises(FrozenInstanceError):
        schedule.alpha = 1.0
    budget = schedule.budget(schedule.init(), 0)
    assert isinstance(budget, Budget)
    assert type(budget.k) is int


@pytest.mark.promise("P33")
@every_schedule
@pytest.mark.parametrize("magnitude", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_magnitude_that_is_not_finite_raises(schedule, magnitude, epoch):
    state = {"k": 1, "threshold": 1.0}
    with pytest.raises(NumericalError, match=f"epoch {epoch + 1}"):
        schedule.observe(state, record(epoch, magnitude))


@pytest.mark.promise("P33")
def test_zero_magnitude_warns_from_the_second_epoch_on():
    state = M_PLUS.observe(M_PLUS.init(), record(0, 0.0))  # warnings are errors here
    with pytest.warns(RuntimeWarning, match="epoch 2 is zero"):
        state = M_PLUS.observe(state, record(1, 0.0))
    with pytest.warns(RuntimeWarning, match="epoch 3 is zero"):
        after = M_PLUS.observe(state, record(2, 0.0))
    assert after["k"] == state["k"] == 1


def test_only_m_plus_minds_a_zero_magnitude():
    for schedule in (
        Fixed(k=0),
        EveryEpochs(period=2, alpha=0.1),
        AccuracyAbove(percent=40, alpha=0.1),
        LinearRamp(first=1, last=2, epochs=3, alpha=0.1),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert schedule.observe(schedule.init(), record(3, 0.0)).keys() == schedule.init().keys()


def test_m_plus_ignores_the_first_magnitude_and_sets_its_threshold_by_the_second():
    state = M_PLUS.init()
    assert state == {"k": 0, "threshold": None}
    state = M_PLUS.observe(state, record(0, 1e9))
    assert state == {"k": 1, "threshold": None}
    state = M_PLUS.observe(state, record(1, 100.0))
    assert state == {"k": 1, "threshold": 101.0}


def test_m_plus_grows_only_strictly_above_its_threshold_and_never_lowers_it():
    state = {"k": 1, "threshold": 101.0}
    assert M_PLUS.observe(state, record(2, 101.0)) == state
    assert M_PLUS.observe(state, record(2, 1.0)) == state
    grown = M_PLUS.observe(state, record(2, 102.0))
    assert grown == {"k": 2, "threshold": pytest.approx(103.02)}


def test_m_plus_at_its_cap_changes_nothing():
    state = {"k": 7, "threshold": 1.0}
    assert M_PLUS.observe(state, record(9, 1e6)) == state
    assert ks(GradientMagnitude(max_steps=1, alpha=0.1), [1.0, 1.0, 9.0, 99.0]) == [0, 1, 1, 1]
    assert ks(GradientMagnitude(alpha=0.1), [2.0**t for t in range(30)])[-1] == 28  # no cap at all


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40), st.integers(1, 9), st.floats(0.5, 2.0))
def test_m_plus_never_falls_never_jumps_and_never_passes_its_cap(magnitudes, cap, gamma):
    found = ks(GradientMagnitude(gamma=gamma, max_steps=cap, alpha=0.1), magnitudes)
    assert found[0] == 0
    assert all(b - a in (0, 1) for a, b in pairwise(found))
    assert max(found) <= cap


SPIKE = [5.0, 655.1, 519.4, 386.8, 1.5]


def told(schedule: Schedule, magnitudes: list[float], accuracy: float = 0.5) -> str | None:
    """What a schedule says of itself after epochs with these l_X."""
    state, records = schedule.init(), [record(t, magnitude, accuracy) for t, magnitude in enumerate(magnitudes)]
    for seen in records:
        state = schedule.observe(state, seen)
    return schedule.explain_no_growth(state, records)


def test_m_plus_that_never_raised_k_says_by_which_magnitudes_and_what_helps():
    said = told(M_PLUS, SPIKE)
    assert said.startswith(
        "k stayed at 1: l_X was 655.1 in epoch 2, which set its threshold to 661.7, "
        "and since then at most 519.4 (epoch 3)"
    )
    assert all(
        way in said
        for way in ("natural training", "--gamma", "deat.configure_method", "below 0.793, k would have grown", "free-4")
    )
    helped = GradientMagnitude(gamma=0.79, max_steps=7, alpha=10 / 255)
    assert told(helped, SPIKE) is None
    assert max(ks(helped, SPIKE)) == 2


QUIET = {
    "k was raised": (M_PLUS, [5.0, 10.0, 11.0, 1.0]),
    "k was raised after the last epoch": (M_PLUS, [5.0, 10.0, 11.0]),
    "no epoch was compared yet": (M_PLUS, [5.0, 10.0]),
    "k may not be raised": (GradientMagnitude(max_steps=1, alpha=0.1), SPIKE),
    "the ramp raised it": (GradientMagnitude(alpha=0.1, ramp=0.2, max_steps=7), SPIKE),
    "a k of its own": (Fixed(k=1, alpha=0.1), SPIKE),
    "epochs raise it": (EveryEpochs(period=9, alpha=0.1), SPIKE),
    "linear": (LinearRamp(first=1, last=1, epochs=5, alpha=0.1), SPIKE),
}


@pytest.mark.parametrize(("schedule", "magnitudes"), QUIET.values(), ids=QUIET.keys())
def test_a_schedule_that_raised_k_or_may_not_says_nothing(schedule, magnitudes):
    assert told(schedule, magnitudes) is None


def test_m_plus_without_any_gradient_says_no_more_than_its_warnings():
    with pytest.warns(RuntimeWarning, match="is zero"):
        assert told(M_PLUS, [1.0, 0.0, 0.0]) is None


def test_a_mark_of_accuracy_that_was_never_passed_is_reported():
    above = AccuracyAbove(percent=40, alpha=0.1)
    said = told(above, SPIKE, accuracy=0.4)
    assert said.startswith("k stayed at 0, so there was no adversary: it grows above 40 % training accuracy, and 40.0%")
    assert told(above, SPIKE, accuracy=0.41) is None
    assert told(above, SPIKE[:1], accuracy=0.1) is None


def ks_of_gaps(schedule: Schedule, gaps: list[float], rises: list[float] | None = None) -> list[int]:
    """k in every epoch; the loss is 1 throughout."""
    state, found = schedule.init(), []
    for epoch, (gap, rise) in enumerate(zip(gaps, rises or [3.0] * len(gaps), strict=True)):
        found.append(schedule.budget(state, epoch).k)
        state = schedule.observe(state, record(epoch, gap=gap, rise=rise))
    return found


def test_auto_waits_for_half_of_training_and_then_follows_the_gap_both_ways():
    schedule = AdversaryGap(max_steps=7, alpha=0.1, epochs=12)
    gaps = [0.5] * 8 + [0.02] + [0.009] * 3
    assert ks_of_gaps(schedule, gaps, [0.5] * 2 + [3.0] * 10) == [0, 0, 0, 1, 1, 1, 3, 4, 5, 5, 4, 3]


def test_auto_needs_a_rise_above_the_loss_to_attack_early_and_keeps_attacking():
    schedule = AdversaryGap(max_steps=7, alpha=0.1, epochs=12)
    assert ks_of_gaps(schedule, [0.5] * 6, [1.0] * 6) == [0] * 6
    assert ks_of_gaps(schedule, [0.5] * 6, [1.0, 1.1, 0.1, 0.1, 0.1, 0.1]) == [0, 0, 1, 1, 1, 1]


def test_auto_stays_at_its_tolerance_and_at_a_quarter_of_it():
    schedule = AdversaryGap(max_steps=7, alpha=0.1, epochs=2, tolerance=0.25)
    for gap, after in ((0.2500001, 4), (0.25, 3), (0.0625, 3), (0.0624999, 2)):
        assert schedule.observe({"k": 3}, record(1, gap=gap, rise=1))["k"] == after


@pytest.mark.parametrize(("max_steps", "late"), [(1, 1), (2, 1), (3, 1), (7, 3), (10, 5)])
def test_auto_stays_between_one_step_and_its_largest_k(max_steps, late):
    schedule = AdversaryGap(max_steps=max_steps, alpha=0.1, epochs=20)
    grown, fallen = ks_of_gaps(schedule, [0.9] * 20), ks_of_gaps(schedule, [0.0] * 20)
    assert grown[10] == fallen[10] == late
    assert (max(grown), grown[-1]) == (max_steps, max_steps)
    assert (min(fallen[10:]), fallen[-1]) == (1, 1)


@pytest.mark.parametrize(("epochs", "expected"), [(1, [3]), (2, [0, 3]), (3, [0, 3, 4])])
def test_auto_has_an_adversary_in_the_shortest_training(epochs, expected):
    assert ks_of_gaps(AdversaryGap(max_steps=7, alpha=0.1, epochs=epochs), [0.5] * epochs) == expected


def test_auto_says_which_measurements_its_method_has_to_declare():
    with pytest.raises(UsageError, match=r"reached_rise.*auto_steps"):
        SCHEDULES["gap"].observe({"k": 1}, EpochRecord(3, 1.0, 0.5, 1.0, 100))


def test_auto_that_does_not_know_the_epochs_says_so():
    with pytest.raises(UsageError, match="number of epochs"):
        AdversaryGap(max_steps=7, alpha=0.1).budget({"k": 0}, 0)


def test_auto_without_any_gradient_warns_and_asks_for_no_more_steps():
    with pytest.warns(RuntimeWarning, match="is zero"):
        state = SCHEDULES["gap"].observe({"k": 4}, record(12, magnitude=0.0, rise=0.0))
    assert state == {"k": 3}


def test_the_bounds_of_auto_s_cost_are_no_growth_and_growth_in_every_epoch():
    schedule = AdversaryGap(max_steps=4, alpha=0.1, epochs=8)
    bounds = []
    for grows in (False, True):
        state, found = schedule.init(), []
        for epoch in range(8):
            found.append(schedule.budget(state, epoch).k)
            state = schedule.observe(state, schedule.bounding_record(epoch, 8, grows))
        bounds.append(found)
    assert bounds == [[0, 0, 0, 0, 2, 1, 1, 1], [0, 1, 1, 1, 2, 3, 4, 4]]


def test_ramp_grows_k_past_the_cap_until_k_steps_cover_it():
    ramped = GradientMagnitude(alpha=2 / 255, ramp=8 / 255, max_steps=2)
    assert ks(ramped, [5.0, 4.0, 3.0, 2.0, 1.0, 0.9, 0.8]) == [0, 1, 1, 2, 3, 4, 4]
    state = {"k": 1, "threshold": 100.0}
    assert ramped.observe(state, record(2, 10.0))["threshold"] == pytest.approx(10.1)  # a forced growth sets it too
    assert ks(GradientMagnitude(alpha=10 / 255, ramp=8 / 255), [5.0, 4.0, 3.0, 2.0, 1.0]) == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("eps", [1 / 255, 8 / 255, 0.15, 0.3, 12.0])
def test_ramp_of_quarter_steps_stops_at_4_for_every_radius(eps):
    ramped = GradientMagnitude(alpha_eps=0.25, ramp_eps=1.0).bind(eps, 9)
    assert ks(ramped, [1.0] * 9) == [0, 1, 1, 2, 3, 4, 4, 4, 4]


def test_step_covers_the_stretch_and_is_at_least_alpha():
    stretched = GradientMagnitude(alpha=2 / 255, stretch=8 / 255, max_steps=7)
    sizes = [stretched.budget({"k": k, "threshold": 1.0}, 5).step_size * 255 for k in range(8)]
    assert sizes == pytest.approx([2, 8, 4, 8 / 3, 2, 2, 2, 2])


def test_linear_shrinks_its_step_as_k_grows():
    amata = LinearRamp(first=2, last=10, epochs=9, stretch=20 / 255)
    budgets = [amata.budget({}, epoch) for epoch in range(9)]
    assert [b.k for b in budgets] == list(range(2, 11))
    assert all(b.k * b.step_size == pytest.approx(20 / 255) for b in budgets)


def test_linear_without_reaching_last_spreads_over_all_epochs():
    assert [LinearRamp(first=0, last=4, epochs=4, reaches_last=False, alpha=0.1).budget({}, t).k for t in range(4)] == [
        0,
        1,
        2,
        3,
    ]
    assert [LinearRamp(first=0, last=4, epochs=5, alpha=0.1).budget({}, t).k for t in range(5)] == [0, 1, 2, 3, 4]
    assert LinearRamp(first=2, last=5, epochs=1, alpha=0.1).budget({}, 0).k == 2


def test_linear_that_does_not_know_the_epochs_says_so():
    with pytest.raises(UsageError, match="number of epochs"):
        LinearRamp(first=2, last=10, alpha=0.1).budget({}, 0)


def test_falling_level_reaches_zero_at_its_fraction_of_training():
    dat = LinearRamp(first=10, last=10, epochs=120, alpha=0.25, stop_threshold=0.5, stop_threshold_until=5 / 6)
    levels = [dat.budget({}, epoch).stop_threshold for epoch in (0, 50, 100, 119)]
    assert levels == pytest.approx([0.5, 0.25, 0.0, 0.0])


def test_every_epochs_counts_floor_of_t_over_period():
    assert [EveryEpochs(period=3, alpha=0.1).budget({}, t).k for t in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert EveryEpochs(period=1, max_steps=4, alpha=0.1).budget({}, 99).k == 4


def test_accuracy_above_grows_after_an_epoch_above_the_mark():
    schedule = AccuracyAbove(percent=40, max_steps=2, alpha=0.1)
    state = schedule.init()
    for epoch, (accuracy, expected) in enumerate([(0.39, 0), (0.4, 0), (0.41, 1), (0.3, 1), (0.9, 2), (0.9, 2)]):
        state = schedule.observe(state, record(epoch, accuracy=accuracy))
        assert state == {"k": expected}


@pytest.mark.parametrize("schedule", [Fixed(k=3, alpha_eps=0.25), LinearRamp(first=2, last=10, stretch_eps=2.5)])
def test_lengths_in_units_of_eps_give_no_budget_before_they_are_bound(schedule):
    with pytest.raises(UsageError, match=r"units of eps.*method\.bind\(threat, epochs\)"):
        schedule.step_size(1)
    assert not schedule.is_absolute
    assert schedule.bind(0.1, 5).is_absolute


def test_absolute_lengths_are_not_bound_again():
    with pytest.raises(UsageError, match="absolute"):
        Fixed(k=3, alpha=0.1).bind(8 / 255, 5)
    with pytest.raises(UsageError, match="absolute"):
        Fixed(k=3, alpha_eps=0.25).bind(0.1, 5).bind(0.1, 5)


@pytest.mark.parametrize(
    "lengths",
    [
        {"alpha": 0.1, "alpha_eps": 0.25},
        {"stretch": 0.1, "stretch_eps": 1.0},
        {"alpha": 0.1, "stretch_eps": 1.0},
        {"alpha_eps": 0.25, "ramp": 0.1},
    ],
)
def test_lengths_of_both_units_are_refused_with_what_to_give_where(lengths):
    with pytest.raises(UsageError) as caught:
        GradientMagnitude(**lengths)
    assert all(word in str(caught.value) for word in (*lengths, "alpha_eps and stretch_eps", "alpha and stretch"))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Fixed(k=1),
        lambda: EveryEpochs(period=1),
        lambda: AccuracyAbove(percent=40),
        lambda: GradientMagnitude(ramp=0.1),
        lambda: LinearRamp(first=1, last=2),
    ],
)
def test_a_schedule_with_an_adversary_and_without_a_step_size_is_refused_with_both_ways_to_give_one(build):
    with pytest.raises(UsageError, match=r"no step size.*alpha_eps=0\.25.*alpha=2/255"):
        build()


def test_natural_training_needs_no_step_size():
    assert Fixed(k=0).budget({}, 0) == Budget(0, 0.0)
    assert Fixed(k=0).bind(0.1, 5).budget({}, 0) == Budget(0, 0.0)


def test_a_schedule_shows_the_lengths_that_it_was_given():
    assert repr(Fixed(k=3, alpha_eps=0.25)) == "Fixed(alpha_eps=0.25, stop_threshold=0.0, k=3)"
    assert repr(Fixed(k=3, alpha_eps=0.25).bind(2.0, 9)) == "Fixed(alpha=0.5, stop_threshold=0.0, stretch=0.0, k=3)"
    assert "ramp_eps=1.0" in repr(GradientMagnitude(alpha_eps=0.25, ramp_eps=1.0))


def test_bind_makes_every_length_absolute_and_leaves_the_rest():
    declared = GradientMagnitude(
        alpha_eps=0.25, stretch_eps=1.0, ramp_eps=2.0, stop_threshold=3.0, gamma=1.1, max_steps=5
    )
    bound = declared.bind(0.1, 50)
    assert (bound.alpha, bound.stretch, bound.ramp) == pytest.approx((0.025, 0.1, 0.2))
    assert (bound.stop_threshold, bound.gamma, bound.max_steps) == (3.0, 1.1, 5)
    linear = LinearRamp(first=2, last=10, stretch_eps=2.5, stop_threshold=0.5).bind(0.1, 50)
    assert (linear.stretch, linear.epochs, linear.stop_threshold) == (0.25, 50, 0.5)


def test_ramp_that_k_steps_reach_but_for_rounding_is_reached():
    assert 49 * (1 / 49) < 1
    ramped = GradientMagnitude(alpha=1 / 49, ramp=1.0, max_steps=2)
    assert ramped.observe({"k": 49, "threshold": 9.0}, record(60))["k"] == 49
    assert ramped.observe({"k": 48, "threshold": 9.0}, record(60))["k"] == 49


def test_linear_growth_ends_at_its_last_k():
    assert LinearRamp(first=2, last=10, epochs=5, alpha=0.1).budget({}, 99).k == 10


@pytest.mark.parametrize(
    ("build", "says"),
    [
        *[
            (lambda g=g: GradientMagnitude(gamma=g, alpha=0.1), "gamma")
            for g in (0, -1.0, math.nan, math.inf, "1", True)
        ],
        *[(lambda c=c: GradientMagnitude(max_steps=c, alpha=0.1), "max_steps") for c in (0, -1, 2.5, 7.0, True)],
        *[(lambda c=c: EveryEpochs(period=1, max_steps=c, alpha=0.1), "max_steps") for c in (0, 4.0)],
        (lambda: AccuracyAbove(percent=40, max_steps=0, alpha=0.1), "max_steps"),
        *[(lambda a=a: Fixed(k=1, alpha=a), "alpha") for a in (-0.1, math.nan, math.inf, "0.1")],
        (lambda: Fixed(k=1, alpha=0.1, stop_threshold=-1), "stop_threshold"),
        (lambda: Fixed(k=1, stretch=math.nan), "stretch"),
        (lambda: GradientMagnitude(ramp=-1.0, alpha=0.1), "ramp"),
        *[(lambda k=k: Fixed(k=k, alpha=0.1), "k must") for k in (-1, 0.5, 2.0, math.nan)],
        *[(lambda p=p: EveryEpochs(period=p, alpha=0.1), "period") for p in (0, -3, 1.5)],
        *[(lambda p=p: AccuracyAbove(percent=p, alpha=0.1), "percent") for p in (-1, 101, math.nan)],
        (lambda: LinearRamp(first=-1, last=2, alpha=0.1), "first"),
        (lambda: AdversaryGap(max_steps=0, alpha=0.1), "max_steps"),
        *[(lambda t=t: AdversaryGap(max_steps=7, tolerance=t, alpha=0.1), "tolerance") for t in (0, 1, math.nan)],
        (lambda: LinearRamp(first=5, last=4, alpha=0.1), "last"),
    ],
)
def test_number_that_is_not_accepted_is_refused_by_name(build, says):
    with pytest.raises(UsageError, match=says):
        build()
