"""Names of methods, what they declare under each rule set, and what the errors say."""

import importlib
import re
from dataclasses import replace

import pytest

import deat
from deat.attack_schedules import AccuracyAbove, AdversaryGap, EveryEpochs, Fixed, GradientMagnitude, LinearRamp
from deat.core.example_stopping import StopWhenConverged, StopWhenFooled
from deat.core.measurements import FIRST_LOSS, LARGEST_RISE, REACHED_RISE
from deat.core.move_order import Craft, PenaliseGradient, Relay, Replay
from deat.core.training_losses import CrossEntropy, Mart, StartConsistency, Trades
from deat.errors import UsageError
from deat.methods import DEFAULT_RULES, LITERAL_RULES, RELEASED_RULES, method_registry
from deat.methods.change_settings import configure_method

EPS = deat.Linf(8 / 255)


def default(name: str) -> deat.Method:
    return deat.get_method(name)


def literal(name: str) -> deat.Method:
    return deat.get_method(name, rules="literal")


def released(name: str) -> deat.Method:
    return deat.get_method(name, rules="released")


# Names

NAMES = (
    "natural fgsm pgd-7 pgd-10 free-4 free-6 free-8 deat-3 deat-40% deat-55% trades mart fat-5 fat-10 dat yopo-5-3",
    "m+deat m+pgd m+trades m+mart m+fgsm f+trades f+mart yopo-3-5 amata-2-10 m+amata-2-10",
    "m+free m+yopo-5-3 m+f+trades",
)


@pytest.mark.parametrize("name", [name for line in NAMES for name in line.split()])
@pytest.mark.parametrize("rules", ["default", "literal", "released"])
def test_every_name_of_the_paper_is_a_method_of_that_name(name, rules):
    method = deat.get_method(name, rules=rules)
    assert isinstance(method, deat.Method)
    assert method.name == {"m+free": "m+free-8"}.get(name, name)


SPELLINGS = {
    "PGD-AT-7": "pgd-7",
    "pgd-at-10": "pgd-10",
    "PGD-AT": "pgd-7",
    "U-FGSM": "fgsm",
    "u-fgsm": "fgsm",
    "M+U-FGSM": "m+fgsm",
    "M+DEAT": "m+deat",
    "MDEAT": "m+deat",
    "M+ DEAT": "m+deat",
    " Free-8 ": "free-8",
    "FREE-AT-4": "free-4",
    "DEAT-40%": "deat-40%",
    "F+TRADES": "f+trades",
    "M+F+Trades": "m+f+trades",
    "YOPO-5-3": "yopo-5-3",
    "Amata-2-10": "amata-2-10",
    "AMATA": "amata-2-10",
    "DAT": "dat",
    "trades-10": "trades",
    "fat": "fat-5",
}


@pytest.mark.parametrize(("written", "name"), SPELLINGS.items())
def test_paper_spellings_in_any_case_are_accepted(written, name):
    assert deat.get_method(written) == deat.get_method(name)


def test_a_method_is_itself():
    method = default("m+deat")
    assert deat.get_method(method) is method


def test_numbers_in_names_reach_the_declaration():
    assert default("pgd-12").schedule.k == 12
    assert default("free-6").schedule.k == 5
    assert default("deat-4").schedule.period == 4
    assert default("deat-55%").schedule.percent == 55
    assert default("fat-8").schedule.k == 8
    assert (default("yopo-4-2").schedule.k, default("yopo-4-2").play.inner) == (3, 2)
    assert (default("amata-3-8").schedule.first, default("amata-3-8").schedule.last) == (3, 8)
    assert default("trades-5").schedule.k == 5
    assert default("trades-5").name == "trades-5"


REFUSED = {
    "m+natural": "adversary",
    "m+deat-3": "which already changes k",
    "m+deat-40%": "which already changes k",
    "m+dat": "already depends on the epoch",
    "m+m+deat": "which already changes k",
    "m+auto": "which already changes k",
    "auto+auto": "which already changes k",
    "auto+m+pgd": "which already changes k",
    "auto+deat-3": "which already changes k",
    "auto+natural": "adversary",
    "auto+dat": "level already depends",
    "m+free-1": "adversary",
    "f+free": "crafts before it updates",
    "f+deat-3": "crafts before it updates",
    "f+yopo-5-3": "crafts before it updates",
    "f+fat-5": "already has a rule",
    "f+f+trades": "already has a rule",
    "f+dat": "already has a rule",
    "f+natural": "adversary",
    "deat": "'m\\+deat'",
    "pdg-7": "Did you mean 'pgd-7'",
    "m+pdg": "Did you mean 'm\\+pgd'",
    "free-0": "at least once",
    "yopo-0-3": "at least one",
    "yopo-5-0": "at least one",
    "deat-0": "period",
    "deat-140%": "percent",
    "amata-10-2": "last",
    "": "unknown method",
    "m+": "unknown method",
}


@pytest.mark.parametrize(("name", "why"), REFUSED.items(), ids=lambda v: v or "empty")
def test_what_makes_no_sense_is_refused_with_the_reason(name, why):
    with pytest.raises(UsageError, match=why):
        deat.get_method(name)


@pytest.mark.parametrize("value", [7, None, deat.mplus])
def test_what_is_neither_a_name_nor_a_method_is_refused(value):
    with pytest.raises(UsageError, match="Give a name, such as m"):
        deat.get_method(value)


@pytest.mark.parametrize(("compose", "prefix"), [(deat.mplus, "m+"), (deat.friendly, "f+"), (deat.auto_steps, "auto+")])
def test_prefix_before_a_name_says_how_names_are_composed(compose, prefix):
    with pytest.raises(
        UsageError, match=re.escape("not 'pgd-7'") + ".*" + re.escape(f"deat.get_method('{prefix}NAME')")
    ):
        compose("pgd-7")


@pytest.mark.parametrize("tau", [-1, 0.5])
def test_friendly_refuses_what_is_no_number_of_steps_by_name(tau):
    with pytest.raises(UsageError, match="tau must be a whole number >= 0"):
        deat.friendly(deat.get_method("pgd-7"), tau)


def test_unknown_rule_set_names_those_that_exist():
    with pytest.raises(UsageError, match="default, literal, released"):
        deat.get_method("m+deat", rules="papre")


# Settings

FAMILIES = {
    "natural": (Craft, CrossEntropy, Fixed),
    "fgsm": (Craft, CrossEntropy, Fixed),
    "pgd-7": (Craft, CrossEntropy, Fixed),
    "free-8": (Replay, CrossEntropy, Fixed),
    "deat-3": (Replay, CrossEntropy, EveryEpochs),
    "deat-40%": (Replay, CrossEntropy, AccuracyAbove),
    "m+deat": (Replay, CrossEntropy, GradientMagnitude),
    "auto+deat": (Replay, CrossEntropy, AdversaryGap),
    "m+pgd": (Craft, CrossEntropy, GradientMagnitude),
    "m+fgsm": (Craft, CrossEntropy, GradientMagnitude),
    "trades": (Craft, Trades, Fixed),
    "m+trades": (Craft, Trades, GradientMagnitude),
    "f+trades": (Craft, Trades, Fixed),
    "mart": (Craft, Mart, Fixed),
    "m+mart": (Craft, Mart, GradientMagnitude),
    "f+mart": (Craft, Mart, Fixed),
    "fat-5": (Craft, CrossEntropy, Fixed),
    "yopo-5-3": (Relay, CrossEntropy, Fixed),
    "amata-2-10": (Craft, CrossEntropy, LinearRamp),
    "m+amata-2-10": (Craft, CrossEntropy, GradientMagnitude),
    "dat": (Craft, CrossEntropy, LinearRamp),
    "n-fgsm": (Craft, CrossEntropy, Fixed),
    "gradalign": (PenaliseGradient, CrossEntropy, Fixed),
    "fgsm-pgi": (Craft, StartConsistency, Fixed),
}


@pytest.mark.parametrize(("name", "kinds"), FAMILIES.items(), ids=FAMILIES.keys())
def test_method_is_made_of_its_family_s_parts(name, kinds):
    method = default(name)
    assert (type(method.play), type(method.objective), type(method.schedule)) == kinds


def test_every_registered_method_is_in_the_table_above():
    assert set(method_registry.list_methods()) == set(FAMILIES)


CAPS = {
    "m+deat": 7,
    "m+pgd": 7,
    "m+trades": 10,
    "m+mart": 10,
    "m+fgsm": 7,
    "m+pgd-5": 5,
    "m+free": 7,
    "m+free-4": 3,
    "m+yopo-5-3": 4,
    "m+amata-2-10": 10,
    "m+fat-5": 5,
    "m+f+trades": 10,
    "m+trades-6": 6,
}


@pytest.mark.parametrize(("name", "cap"), CAPS.items(), ids=CAPS.keys())
@pytest.mark.parametrize("rules", ["default", "released"])
def test_caps_on_k_are_the_same_by_default_and_in_the_released_code(name, cap, rules):
    schedule = deat.get_method(name, rules=rules).schedule
    assert schedule.max_steps == cap
    assert schedule.gamma == 1.01


ALPHAS = {
    "fgsm": 1.25,
    "deat-3": 1.25,
    "deat-40%": 1.25,
    "m+deat": 1.25,
    "m+fgsm": 1.25,
    "free-8": 1.0,
    "m+free": 1.0,
    "pgd-7": 0.25,
    "m+pgd": 0.25,
    "trades": 0.25,
    "m+trades": 0.25,
    "mart": 0.25,
    "f+mart": 0.25,
    "fat-5": 0.25,
    "yopo-5-3": 0.25,
    "dat": 0.25,
}


@pytest.mark.parametrize(("name", "alpha"), ALPHAS.items(), ids=ALPHAS.keys())
@pytest.mark.parametrize("threat", [EPS, deat.Linf(4 / 255), deat.L2(0.5), deat.L1(12)], ids=str)
def test_steps_are_declared_in_units_of_eps(name, alpha, threat):
    method = default(name)
    assert method.schedule.alpha_eps == alpha
    assert method.bind(threat, 50).alpha == pytest.approx(alpha * threat.eps)


STARTS = {
    "zero": ["free-8", "m+free", "amata-2-10", "m+amata-2-10"],
    "uniform": ["fgsm", "pgd-7", "deat-3", "m+deat", "m+pgd", "fat-5", "yopo-5-3", "dat"],
    "jitter": ["trades", "mart", "m+trades", "m+mart", "f+trades", "f+mart"],
}


@pytest.mark.parametrize(("name", "start"), [(n, start) for start, names in STARTS.items() for n in names])
def test_starts(name, start):
    assert default(name).attack.start == start
    assert not default(name).attack.persistent


def test_trades_crafts_with_kl_and_mart_with_cross_entropy_friendly_or_not():
    assert {default(n).attack.loss for n in ("trades", "f+trades", "m+trades")} == {"kl"}
    assert {default(n).attack.loss for n in ("mart", "f+mart", "m+mart", "pgd-7", "fat-5")} == {"ce"}
    assert default("trades").objective == Trades(beta=6.0)
    assert default("mart").objective == Mart(beta=6.0)


def test_friendly_methods_grant_three_steps_and_dat_stops_at_its_level():
    for name in ("fat-5", "f+trades", "f+mart", "m+fat-5", "m+f+trades"):
        method = default(name)
        assert method.attack.freeze == StopWhenFooled()
        assert method.schedule.stop_threshold == 3
    assert deat.friendly(default("pgd-7"), tau=1).schedule.stop_threshold == 1
    dat = default("dat")
    assert dat.attack.freeze == StopWhenConverged()
    assert dat.attack.batch_norm == "train"
    assert [dat.bind(EPS, 120).budget({}, t).stop_threshold for t in (0, 50, 100)] == pytest.approx([0.5, 0.25, 0])
    assert {dat.bind(EPS, 120).budget({}, t).k for t in range(120)} == {10}


def test_prefixes_commute_and_are_functions_of_methods():
    assert deat.get_method("m+f+pgd-5").schedule == deat.get_method("f+m+pgd-5").schedule
    assert deat.mplus(default("mart")) == default("m+mart")
    assert deat.friendly(default("trades")) == default("f+trades")
    assert deat.mplus(default("pgd-7"), gamma=1.1, max_steps=3).schedule.max_steps == 3
    with pytest.raises(UsageError, match="gamma"):
        deat.mplus(default("pgd-7"), gamma=0)
    with pytest.raises(UsageError, match="max_steps"):
        deat.mplus(default("pgd-7"), max_steps=0)


# The table of the two rule sets


@pytest.mark.parametrize(
    ("name", "by_default", "by_released"),
    [
        ("m+deat", ("joint", "epoch", "pixel"), ("joint", "epoch", "normalised")),
        ("deat-3", ("joint", "epoch", "pixel"), ("joint", "epoch", "normalised")),
        ("m+pgd", ("joint", "epoch", "pixel"), ("ascend", "epoch", "normalised")),
        ("m+fgsm", ("joint", "epoch", "pixel"), ("ascend", "epoch", "normalised")),
        ("m+trades", ("joint", "epoch", "pixel"), ("ascend", "last_batch", "normalised")),
        ("m+mart", ("joint", "epoch", "pixel"), ("ascend", "last_batch", "normalised")),
        ("m+f+trades", ("joint", "epoch", "pixel"), ("ascend", "last_batch", "normalised")),
    ],
)
def test_magnitude_comes_from_the_move_the_scope_and_the_space_of_the_rule_set(name, by_default, by_released):
    assert default(name).probe == deat.MagnitudeProbe(*by_default)
    assert released(name).probe == deat.MagnitudeProbe(*by_released)


@pytest.mark.parametrize("name", ["m+pgd", "m+trades", "m+mart", "m+fgsm", "m+fat-5", "m+f+trades"])
def test_craft_family_stretches_its_step_by_default_and_ramps_k_by_the_released_code(name):
    one, other = default(name).schedule, released(name).schedule
    assert (one.stretch_eps, one.ramp_eps) == (1.0, 0.0)
    assert (other.stretch_eps, other.ramp_eps) == (0.0, 1.0)


@pytest.mark.parametrize("name", ["m+pgd", "m+trades", "m+mart", "m+fgsm", "m+deat", "m+pgd-2", "m+f+trades"])
def test_the_literal_rules_are_algorithm_1_with_a_fixed_step_and_no_largest_k(name):
    one, text = default(name), literal(name)
    assert one.schedule.max_steps is not None
    assert text == replace(one, schedule=replace(one.schedule, max_steps=None, stretch_eps=0.0))
    bound = text.bind(EPS, 50)
    assert len({bound.step_size(k) for k in range(1, 40)}) == 1
    state, ks = bound.init(), []
    for epoch in range(40):
        ks.append(bound.budget(state, epoch).k)
        state = bound.observe(state, deat.EpochRecord(epoch, 1.0, 0.5, 2.0**epoch, 100))
    assert ks == [0, 1, 1, *range(2, 39)]


def test_a_largest_k_that_is_given_is_kept_under_the_literal_rules():
    assert deat.mplus(literal("pgd-7"), max_steps=3, rules="literal").schedule.max_steps == 3
    assert configure_method(literal("m+pgd"), max_steps=3).schedule.max_steps == 3


@pytest.mark.parametrize("name", [n for n in method_registry.list_methods() if not n.startswith("m+")])
def test_default_and_literal_rules_differ_in_m_plus_alone(name):
    assert default(name) == literal(name)


@pytest.mark.parametrize(
    ("name", "full_name"),
    [("auto", "auto+deat"), ("AUTO", "auto+deat"), ("g+auto", "g+auto+deat"), ("auto+pgd", "auto+pgd-7")],
)
def test_auto_is_short_for_replays_and_a_prefix_of_other_methods(name, full_name):
    assert default(name).name == default(full_name).name == full_name
    assert default(name) == default(full_name)


@pytest.mark.parametrize(
    ("name", "max_steps", "stretch_eps"),
    [
        ("auto", 7, 0.0),
        ("auto+free-4", 3, 0.0),
        ("auto+pgd", 7, 1.0),
        ("auto+trades", 10, 1.0),
        ("auto+yopo-5-3", 4, 0.0),
    ],
)
def test_auto_goes_to_the_method_s_own_k_with_steps_that_cross_the_ball_as_m_plus_does(name, max_steps, stretch_eps):
    for method in (default(name), literal(name), released(name)):
        assert (method.schedule.max_steps, method.schedule.stretch_eps) == (max_steps, stretch_eps)
    assert configure_method(name, max_steps=2).schedule.max_steps == 2
    assert deat.auto_steps(default("pgd-7"), max_steps=3).schedule.max_steps == 3


def test_auto_keeps_the_measurements_of_its_method():
    method = replace(default("pgd-7"), measurements=(FIRST_LOSS, LARGEST_RISE))
    assert deat.auto_steps(method).measurements == (FIRST_LOSS, LARGEST_RISE, REACHED_RISE)


@pytest.mark.parametrize("name", ["m+deat", "m+free", "m+yopo-5-3"])
def test_replays_neither_stretch_nor_ramp(name):
    for method in (default(name), released(name)):
        assert (method.schedule.stretch_eps, method.schedule.ramp_eps) == (0.0, 0.0)


def test_default_step_of_the_craft_family_is_the_larger_of_eps_over_k_and_alpha():
    schedule = default("m+pgd").bind(EPS, 50)
    steps = [schedule.budget({"k": k, "threshold": 1.0}, 9).step_size * 255 for k in range(1, 8)]
    assert steps == pytest.approx([8, 4, 8 / 3, 2, 2, 2, 2])
    fixed = released("m+pgd").bind(EPS, 50)
    steps = [fixed.budget({"k": k, "threshold": 1.0}, 9).step_size * 255 for k in range(1, 8)]
    assert steps == pytest.approx([2] * 7)
    coarse = default("m+fgsm").bind(EPS, 50)
    assert [coarse.step_size(k) * 255 for k in range(1, 8)] == pytest.approx([10] * 7)


@pytest.mark.parametrize("rules", ["default", "literal", "released"])
def test_m_amata_keeps_its_steps_at_two_and_a_half_eps_over_k(rules):
    schedule = deat.get_method("m+amata-2-10", rules=rules).bind(EPS, 50)
    steps = [schedule.budget({"k": k, "threshold": 1.0}, 9).step_size * 255 for k in range(1, 11)]
    assert steps == pytest.approx([20 / k for k in range(1, 11)])
    assert schedule.ramp == 0


@pytest.mark.parametrize("name", [n for n in method_registry.list_methods() if n != "natural"])
def test_epochs_with_k_0_are_clean_by_the_paper_and_noisy_by_the_released_code(name):
    assert not default(name).attack.random_start_at_k0
    assert released(name).attack.random_start_at_k0


def test_amata_reaches_its_last_k_by_the_paper_only():
    assert default("amata-2-10").bind(EPS, 50).budget({}, 49).k == 10
    assert released("amata-2-10").bind(EPS, 50).budget({}, 49).k == 9


def test_m_amata_says_that_it_does_not_use_the_first_k():
    with pytest.warns(
        UserWarning, match=r"m\+amata-5-10 is the same method as m\+amata-2-10.*A = 5 is not used"
    ) as caught:
        method = default("m+amata-5-10")
    assert len(caught) == 1
    assert method.name == "m+amata-5-10"  # the name in the records of runs
    assert method.schedule == default("m+amata-2-10").schedule  # warnings are errors here, so this one is silent
    with pytest.warns(UserWarning, match="A = 3 is not used"):
        default("f+m+amata-3-8")


def test_only_the_released_code_caps_deat_d_and_deat_p():
    assert (default("deat-3").schedule.max_steps, released("deat-3").schedule.max_steps) == (None, 4)
    assert (default("deat-40%").schedule.max_steps, released("deat-40%").schedule.max_steps) == (None, 3)


def test_nothing_else_forks():
    for name in ("natural", "pgd-7", "free-8", "trades", "mart", "fat-5", "yopo-5-3", "dat"):
        one, other = default(name).describe(), released(name).describe()
        for described in (one, other):
            described.pop("probe")
            described["ascent"].pop("noisy")
        assert one == other
    assert (DEFAULT_RULES.name, LITERAL_RULES.name, RELEASED_RULES.name) == ("default", "literal", "released")


# Single settings changed by hand


def test_tuned_alpha_is_the_same_at_every_k():
    stretched, tuned = default("m+pgd"), configure_method(default("m+pgd"), EPS, alpha=1 / 255)
    alphas = [[m.bind(EPS, 9).step_size(k) for k in (1, 2, 7)] for m in (stretched, tuned)]
    assert alphas[0] == pytest.approx([8 / 255, 4 / 255, 2 / 255])
    assert alphas[1] == pytest.approx([1 / 255] * 3)


def test_tuned_settings_reach_the_declaration_and_nothing_else_changes():
    tuned = configure_method(
        default("m+deat"), EPS, gamma=1.1, max_steps=3, alpha=12 / 255, start="zero", persistent=True
    )
    schedule = tuned.bind(EPS, 50)
    assert (schedule.gamma, schedule.max_steps, schedule.alpha) == (1.1, 3, pytest.approx(12 / 255))
    assert (tuned.attack.start, tuned.attack.persistent) == ("zero", True)
    assert (tuned.play, tuned.objective, tuned.probe) == (
        default("m+deat").play,
        CrossEntropy(),
        default("m+deat").probe,
    )
    assert configure_method(default("f+trades"), EPS, beta=3.0, tau=0, compact=True).objective == Trades(beta=3.0)
    assert configure_method(default("f+trades"), EPS, tau=0).schedule.stop_threshold == 0
    assert configure_method(default("pgd-7"), EPS) == default("pgd-7")


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("pgd-7", {"gamma": 1.1}, "gamma"),
        ("pgd-7", {"max_steps": 3}, "max_steps"),
        ("pgd-7", {"beta": 1.0}, "beta"),
        ("pgd-7", {"tau": 1}, "tau"),
        ("dat", {"tau": 1}, "tau"),
        ("m+deat", {"gamma": 0.0}, "gamma"),
        ("m+deat", {"gamma": float("nan")}, "gamma"),
        ("m+deat", {"max_steps": 0}, "max_steps"),
        ("m+deat", {"alpha": -0.1}, "alpha"),
        ("m+deat", {"alpha": float("nan")}, "alpha"),
        ("m+deat", {"start": "unifrom"}, "uniform"),
        ("m+deat", {"compact": True}, "compact"),
        ("trades", {"beta": -1.0}, "beta"),
        ("trades", {"beta": float("nan")}, "beta"),
        ("trades", {"beta": float("inf")}, "beta"),
        ("fat-5", {"tau": -1}, "level|tau"),
    ],
)
def test_setting_that_a_method_does_not_have_or_accept_is_refused(name, settings, says):
    with pytest.raises(UsageError, match=says):
        configure_method(default(name), EPS, **settings)


# Cards


def families() -> list[str]:
    """The modules that the registered methods were built in."""
    return sorted({entry.build.__module__ for entry in method_registry._METHODS.values()})


@pytest.mark.parametrize("family", families())
def test_family_file_opens_with_its_card(family):
    card = importlib.import_module(family).__doc__
    for heading in ("Idea:", "Settings:", "Cost:"):
        assert heading in card
    assert ("Citation:" in card) == (family != "deat.methods.natural")
    if "Citation:" in card:
        assert re.search(r"Citation: .*(19|20)\d\d", card, re.DOTALL)


def test_every_family_is_one_file_of_the_methods_folder():
    assert len(families()) == 11
    assert all(re.fullmatch(r"deat\.methods\.[a-z]+", family) for family in families())


@pytest.mark.parametrize("name", [*method_registry.list_methods(), "m+free-4", "m+f+trades"])
def test_records_have_lengths_in_units_of_eps_as_alpha_stretch_and_ramp(name):
    method = default(name)
    described, schedule = method.describe()["schedule"], method.schedule
    names = [name for name in schedule.LENGTHS if getattr(schedule, f"{name}_eps") is not None]
    assert {described[name] for name in set(schedule.LENGTHS) - set(names)} <= {0.0}
    assert [described[name] for name in names] == [getattr(schedule, f"{name}_eps") for name in names]
    assert not any(key.endswith("_eps") for key in described)


def test_a_record_of_a_method_has_the_keys_and_numbers_of_version_0_1():
    released = {"kind": "GradientMagnitude", "alpha": 0.25, "level": 0.0, "stretch": 0.0, "gamma": 1.01}
    assert list(deat.get_method("m+pgd", rules="released").describe()["schedule"].items()) == [
        *released.items(),
        *{"max_steps": 7, "ramp": 1.0}.items(),
    ]
    amata = default("amata-2-10").describe()["schedule"]
    assert (amata["alpha"], amata["stretch"]) == (0.0, 2.5)
    assert default("natural").describe()["schedule"] == {
        "kind": "Fixed",
        "alpha": 0.0,
        "level": 0.0,
        "stretch": 0.0,
        "k": 0,
    }


def test_a_record_says_that_a_carried_delta_is_unclipped_where_that_has_an_effect():
    recorded = {
        (rules, persistent): deat.configure_method(deat.get_method("free-4", rules=rules), persistent=persistent)
        .describe()["ascent"]
        .get("carries_unclipped")
        for rules in ("default", "released")
        for persistent in (False, True)
    }
    assert {key: value for key, value in recorded.items() if value is not None} == {("released", True): True}


def test_absolute_lengths_are_refused_where_a_method_is_declared():
    with pytest.raises(UsageError, match=r"'mine'.*alpha=0\.5.*absolute.*alpha_eps in place of alpha"):
        deat.Method("mine", Craft(), Fixed(k=1, alpha=0.5))


def test_a_named_method_is_tuned_and_a_step_that_crosses_an_image_is_refused():
    assert deat.configure_method("m+deat", gamma=0.9).schedule.gamma == 0.9
    assert deat.configure_method("pgd-7", "linf:8/255", alpha=2 / 255).schedule.alpha_eps == pytest.approx(0.25)
    assert deat.configure_method("pgd-7", "l2:2", alpha=1.5).schedule.alpha_eps == pytest.approx(0.75)
    with pytest.raises(UsageError, match=r"alpha 10 .*write 10/255"):
        deat.configure_method("pgd-7", "linf:8/255", alpha=10)
    with pytest.raises(UsageError, match="needs the threat"):
        deat.configure_method("pgd-7", alpha=2 / 255)


@pytest.mark.parametrize(
    ("part", "given", "words"),
    [
        ("play", lambda game, x, y, budget: None, ["the function", "deat.Craft"]),
        ("play", Craft, ["the class Craft", "deat.Craft()"]),
        ("schedule", 7, ["the schedule", "7", "Schedule"]),
        ("attack", "uniform", ["the attack", "'uniform'", "InnerAttack"]),
    ],
)
def test_a_part_of_another_kind_is_refused_where_a_method_is_declared(part, given, words):
    parts = {"play": Craft(), "schedule": Fixed(k=1, alpha_eps=1.0), part: given}
    with pytest.raises(UsageError) as refused:
        deat.Method("mine", **parts)
    assert all(word in str(refused.value) for word in ["'mine'", *words])


def test_a_method_put_together_in_python_is_described_by_the_docstring_of_its_own_play():
    class Twist(deat.Craft):
        """Crafts with a twist. It has more to say."""

    twist = deat.Method("twist", Twist(), deat.attack_schedules.Fixed(k=1, alpha_eps=1.0))
    assert deat.get_method(twist).summary == "Crafts with a twist"
    assert "Crafts with a twist" in repr(deat.get_method(twist))
    plain = deat.Method("plain", deat.Craft(), deat.attack_schedules.Fixed(k=1, alpha_eps=1.0))
    assert deat.get_method(plain) is plain
    given = deat.Method("given", Twist(), deat.attack_schedules.Fixed(k=1, alpha_eps=1.0), summary="mine")
    assert deat.get_method(given).summary == "mine"


def test_a_play_of_ones_own_is_refused_by_what_it_lacks():
    class Half:
        crafts_first = True

        def __call__(self, game, x, y, budget):
            raise NotImplementedError

    with pytest.raises(UsageError, match="has no can_record and no backprops"):
        deat.Method("half", Half(), Fixed(k=1, alpha_eps=0.5))
