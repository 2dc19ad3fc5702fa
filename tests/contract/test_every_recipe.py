"""What every recipe promises: its rows can be built without data, under its own rules, and say where they belong."""

import pytest

from deat import recipes
from deat.recipes.paper_numbers import PAPER_TABLES

CASES = [(name, method) for name in recipes.list_recipes() for method in recipes.get_recipe(name).methods]
MODELS = ("preact_resnet18", "wide_resnet34_10", "densenet121_12")
ISSUED = "cifar10-standard cifar10-fast training-process u-fgsm imagenet alpha-gamma ablation quick front long-front"


def rows_of(name, methods=()):
    recipe = recipes.get_recipe(name)
    return recipe.make_rows(methods, data=recipe.data or "folder:photos")


def test_the_papers_setups_are_all_there():
    assert set(ISSUED.split()) <= set(recipes.list_recipes())


@pytest.mark.parametrize(("name", "method"), CASES)
def test_every_row_is_a_run_that_can_be_built(name, method):
    recipe = recipes.get_recipe(name)
    for row in rows_of(name, [method]):
        assert row.check() is row
        assert row.request.method == method
        assert row.request.rules == recipe.rules
        assert row.training_cost > 0
        assert row.evaluation.attacks[0] == "natural"
        # Without held-out images there is nothing to choose an epoch by, and the test set must not.
        assert row.evaluation.epoch in ("last", "averaged") or row.settings.get("val_attack", "cw-20") == "cw-20"


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_rows_have_names_of_their_own_and_a_place_in_the_paper(name):
    rows = rows_of(name)
    assert len({row.label for row in rows}) == len(rows)
    for row in rows:
        if row.paper_row is not None:
            table, paper_row = row.paper_row
            assert paper_row in PAPER_TABLES[table].rows


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_a_recipe_tells_its_settings_and_its_place(name):
    recipe = recipes.get_recipe(name)
    assert len(recipe.description) > 100
    assert recipe.paper
    assert recipe.summary


@pytest.mark.parametrize("name", recipes.list_recipes())
def test_a_recipe_takes_any_method_and_model(name):
    (row, *_) = recipes.get_recipe(name).make_rows(["m+f+mart"], ["timm:anything"], "digits")
    assert (row.request.method, row.request.model, row.request.data) == ("m+f+mart", "timm:anything", "digits")
    assert "m+f+mart" in row.label


def test_other_data_have_no_number_in_the_paper_but_the_same_images_in_a_folder_do():
    recipe = recipes.get_recipe("cifar10-standard")
    assert all(row.paper_row is None for row in recipe.make_rows(data="digits"))
    assert all(row.paper_row for row in recipe.make_rows(data="folder:cifar10.tar"))


@pytest.mark.parametrize("name", ["cifar10-fast", "cifar10-standard"])
def test_a_card_tells_the_model_that_the_rest_of_the_papers_table_needs(name):
    recipe = recipes.get_recipe(name)
    labels = {row.paper_row[0] for model in MODELS for row in recipe.make_rows(["m+deat"], [model]) if row.paper_row[0]}
    wanted = {row.split()[0] for label in labels for row in PAPER_TABLES[label].rows} - set(recipe.models)
    assert len(wanted) == 1
    assert all(f"--model {model}" in recipe.description for model in wanted)
