"""The recipes' numbers, as the paper gives them."""

import pytest

from deat import recipes
from deat.cli.bench import BenchCommand, plan_cells
from deat.methods import get_method
from deat.methods.change_settings import configure_method
from deat.threat import Linf
from deat.training.config import TrainConfig
from deat.training.training_cost import backprop_bounds


def rows_of(name, methods=(), model=None):
    recipe = recipes.get_recipe(name)
    found = recipe.make_rows(methods, [model] if model else [], recipe.data or "folder:photos")
    return {row.label.removesuffix(f" {model}"): row for row in found}


@pytest.mark.parametrize(("model", "lr"), [("preact_resnet18", 0.05), ("densenet121_12", 0.01)])
def test_standard_setup(model, lr):
    row = rows_of("cifar10-standard", ["m+deat"], model)["m+deat"]
    settings = TrainConfig(**row.settings)
    assert (settings.epochs, settings.batch_size, settings.lr, settings.milestones) == (50, 128, lr, (25, 40))
    assert (settings.momentum, settings.weight_decay, settings.lr_schedule) == (0.9, 5e-4, "multistep")
    assert (row.request.held_out, settings.val_attack, row.evaluation.epoch) == (1000, "cw-20", "best")
    assert row.evaluation.attacks == ("natural", "pgd-100", "cw-20", "aa")


def test_fast_setup():
    rows = rows_of("cifar10-fast")
    assert {label: row.settings["epochs"] for label, row in rows.items()} == {
        **{"deat-3": 12, "deat-40%": 11, "m+deat": 11, "free-4": 10, "free-8": 10, "pgd-7": 10},
        **{"fgsm": 10, "fgsm 15 epochs": 15},
    }
    for row in rows.values():
        settings = TrainConfig(**row.settings)
        assert (settings.lr, settings.lr_schedule, settings.peak, settings.cycle_momentum) == (0.1, "cyclic", 0.5, True)
        assert (settings.precision, row.request.held_out, row.evaluation.epoch) == ("bf16", 0, "last")
    assert rows["m+deat"].request.gamma == 1.0
    assert rows["m+deat"].request.alpha == rows["deat-3"].request.alpha == 10 / 255
    assert rows_of("cifar10-fast", ["m+deat"], "wide_resnet34_10")["m+deat"].request.gamma == 1.01


def test_training_process_spends_what_the_papers_cost_table_says():
    rows = rows_of("training-process")
    costs = {}
    for label, row in rows.items():
        chosen, epochs = get_method(row.request.method, rules=row.request.rules), row.settings["epochs"]
        costs[label] = backprop_bounds(chosen, chosen.bind(Linf(8 / 255), epochs), epochs)
        assert row.settings["val_attack"] == "pgd-20"
    for label, cost in {"fgsm": 20, "pgd-7": 80, "free-4": 40, "free-8": 80, "deat-3": 22}.items():
        assert costs[label] == (cost, cost)
    assert costs["deat-40%"][0] <= 25 <= costs["deat-40%"][1]


def test_u_fgsm_is_compared_under_three_setups():
    recipe = recipes.get_recipe("u-fgsm")
    setups = {
        (row.request.model, row.settings["epochs"]) for row in recipe.make_rows() if row.request.method == "m+deat"
    }
    assert setups == {("preact_resnet18", 11), ("preact_resnet18", 50), ("wide_resnet34_10", 11)}


@pytest.mark.parametrize(("asked", "standard"), [(None, [0]), ("0,1,2", [0, 1, 2])])
def test_u_fgsm_has_three_seeds_under_fast_and_one_under_the_standard_setup_as_the_paper_does(asked, standard):
    cells, _ = plan_cells(recipes.get_recipe("u-fgsm"), BenchCommand("u-fgsm", seeds=asked))
    found = {cell.row.label: [c.seed for c in cells if c.row.label == cell.row.label] for cell in cells}
    assert {name for name in found if "standard" in name} == {"m+deat standard", "fgsm standard"}
    assert all(seeds == (standard if "standard" in name else [0, 1, 2]) for name, seeds in found.items())


def test_imagenet_carries_delta_and_measures_in_pixel_space():
    rows = rows_of("imagenet")
    assert set(rows) == {"free-4", "amata-2-4", "m+deat gamma 1.1", "m+deat gamma 1.01"}
    for row in rows.values():
        settings = TrainConfig(**row.settings)
        assert (row.request.eps, settings.batch_size, settings.weight_decay) == (4 / 255, 256, 1e-4)
        assert (row.evaluation.attacks, row.evaluation.epoch) == (("natural", "pgd-10-last", "pgd-50-last"), "last")
    free, guided = (
        configure_method(get_method(r.request.method, rules="released"), Linf(4 / 255), **r.request.method_options)
        for r in (rows["free-4"], rows["m+deat gamma 1.1"])
    )
    assert free.attack.persistent
    assert guided.attack.persistent
    assert free.schedule.bind(4 / 255, 23).alpha == pytest.approx(4 / 255)
    assert guided.schedule.bind(4 / 255, 23).alpha == pytest.approx(6 / 255)
    assert (guided.schedule.gamma, guided.schedule.max_steps, guided.probe.space) == (1.1, 3, "pixel")


def test_alpha_gamma_is_twelve_rows_of_five_seeds():
    rows = rows_of("alpha-gamma").values()
    found = {(round(row.request.alpha * 255), row.request.gamma) for row in rows}
    assert found == {(alpha, gamma) for alpha in (8, 10, 12, 14) for gamma in (1.1, 1.01, 1.001)}
    assert len(recipes.get_recipe("alpha-gamma").seeds) == 5


def test_ablation_changes_one_thing_in_each_of_its_seven_rows():
    rows = rows_of("ablation")
    default = rows.pop("m+deat")
    assert len(rows) == 6
    for row in rows.values():
        old, new = ({**vars(r.request), **r.settings} for r in (default, row))
        assert sorted(name for name in old if old[name] != new[name]) == sorted(row.varied_settings)
        assert len(row.varied_settings) == 1


def test_quick_evaluates_digits_by_four_attacks():
    (row, *_) = recipes.get_recipe("quick").make_rows()
    assert (row.request.data, row.evaluation.attacks) == ("digits", ("natural", "fgsm", "pgd-20", "cw-20"))


def test_quick_says_with_which_flag_it_takes_three_minutes():
    quick = recipes.get_recipe("quick")
    for text in (quick.summary, quick.description):
        assert "three minutes on two cores (--jobs 2)" in " ".join(text.split())


def test_rows_of_a_recipe_are_selected_by_their_label() -> None:
    command = BenchCommand("front", rows="deat-3*at 16, fgsm *", seeds="1")
    cells, _ = plan_cells(recipes.get_recipe("front"), command)
    names = [cell.name for cell in cells]
    assert names == [f"{row}, seed 1" for row in ("deat-3 at 16", "deat-3 smoothed at 16", "fgsm at 16", "fgsm at 32")]
