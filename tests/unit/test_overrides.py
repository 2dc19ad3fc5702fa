"""`--set`: any setting of a recipe, read by its type; what nobody knows or nobody has is refused."""

import pytest

from deat import recipes
from deat.errors import UsageError
from deat.recipes import apply_overrides
from deat.recipes.overrides import parse_overrides


def rows_of(name, methods=()):
    return recipes.get_recipe(name).make_rows(methods, data="folder:photos")


@pytest.mark.parametrize(
    ("name", "text", "part", "value"),
    [
        ("epochs", "5", "settings", 5),
        ("lr", "1/50", "settings", 0.02),
        ("milestones", "3,4", "settings", (3, 4)),
        ("cycle_momentum", "no", "settings", False),
        ("eps", "4/255", "request", 4 / 255),
        ("rules", "literal", "request", "literal"),
        ("size", "96", "request", 96),
        ("held_out", "auto", "request", None),
        ("attacks", "natural,pgd-5", "evaluation", ("natural", "pgd-5")),
        ("n", "100", "evaluation", 100),
        ("epoch", "last", "evaluation", "last"),
    ],
)
def test_a_setting_is_read_by_its_type(name, text, part, value):
    for row in apply_overrides(rows_of("cifar10-standard"), {name: text}):
        held = getattr(row, part)
        assert (held[name] if part == "settings" else getattr(held, name)) == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"epoks": "5"}, ["unknown setting 'epoks'", "epochs"]),
        ({"epochs": "many"}, ["epochs", "whole number"]),
        ({"persistent": "perhaps"}, ["perhaps", "true"]),
        ({"eps": "8//255"}, ["8//255"]),
        ({"seed": "3"}, ["--seeds"]),
        ({"method": "pgd-7"}, ["--methods"]),
        ({"attacks": "pgd"}, ["unknown attack 'pgd'"]),
        ({"epoch": "first"}, ["first", "last"]),
        ({"n": "0"}, ["n must be"]),
        ({"aa_n": "0"}, ["aa_n"]),
        ({"aa_whole": "0"}, ["aa_whole", "aa_n"]),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_can(given, words):
    with pytest.raises(UsageError) as error:
        apply_overrides(rows_of("cifar10-standard"), given)
    assert all(word in str(error.value) for word in words)


def test_bad_values_are_refused_without_data():
    (row, *_) = apply_overrides(rows_of("cifar10-fast"), {"lr": "-1"})
    with pytest.raises(UsageError, match="lr"):
        row.check()


def test_milestones_keep_their_place_when_epochs_change():
    (row, *_) = apply_overrides(rows_of("imagenet", ["free-4"]), {"epochs": "69"})
    assert row.settings["milestones"] == (24, 48)
    (row, *_) = apply_overrides(rows_of("cifar10-standard", ["free-4"]), {"epochs": "10", "milestones": "9"})
    assert row.settings["milestones"] == (9,)


def test_a_methods_own_setting_reaches_the_rows_that_have_it():
    rows = {row.label: row.request.gamma for row in apply_overrides(rows_of("cifar10-standard"), {"gamma": "1.2"})}
    assert rows["m+deat"] == rows["m+mart"] == 1.2
    assert rows["pgd-7"] is None
    with pytest.raises(UsageError, match=r"pgd-7.*gamma"):
        apply_overrides(rows_of("cifar10-standard", ["pgd-7"]), {"gamma": "1.2"})


def test_rows_about_a_setting_go_when_it_is_set_for_all():
    assert len(apply_overrides(rows_of("ablation"), {"alpha": "9/255"})) == 5
    assert [row.label for row in apply_overrides(rows_of("cifar10-fast", ["fgsm"]), {"epochs": "3"})] == ["fgsm"]


@pytest.mark.parametrize(
    ("recipe", "given", "labels"),
    [
        ("alpha-gamma", {"gamma": "1.05"}, [f"m+deat alpha {alpha} gamma 1.05" for alpha in (8, 10, 12, 14)]),
        ("alpha-gamma", {"alpha": "9/255"}, [f"m+deat alpha 9/255 gamma {gamma}" for gamma in (1.1, 1.01, 1.001)]),
        ("alpha-gamma", {"alpha": "9/255", "gamma": "1.05"}, ["m+deat alpha 9/255 gamma 1.05"]),
        ("imagenet", {"gamma": "1.05"}, ["free-4", "amata-2-4", "m+deat gamma 1.05"]),
    ],
)
def test_rows_about_several_settings_stay_one_for_each_value_that_is_left(recipe, given, labels):
    rows = apply_overrides(rows_of(recipe), given)
    assert [row.label for row in rows] == labels
    assert {row.request.gamma for row in rows if "gamma" in given and "m+" in row.label} <= {1.05}
    assert not any(row.paper_row for row in rows if "m+" in row.label)


def test_set_takes_key_and_value():
    assert parse_overrides(["lr=0.1", "weight-decay = 1e-4"]) == {"lr": "0.1", "weight_decay": "1e-4"}
    with pytest.raises(UsageError, match="key=value"):
        parse_overrides(["epochs"])


def test_a_budget_of_backprops_buys_as_many_epochs_as_cannot_exceed_it():
    rows = {row.label: row for row in recipes.get_recipe("quick").make_rows(["natural", "pgd-7", "m+deat"])}
    batches = 20
    runs = {label: row.resolve(0, budget=80 * batches + 7) for label, row in rows.items()}
    assert {label: run.config.epochs for label, run in runs.items()} == {"natural": 80, "pgd-7": 10, "m+deat": 14}
    with pytest.raises(UsageError, match="160"):
        rows["pgd-7"].resolve(0, budget=159)
