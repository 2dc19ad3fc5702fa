"""Several threats at once on the command line: train, evaluate, report, and the words for what cannot be."""

import json
import warnings

import pytest

import deat
from deat.cli.main import main
from deat.recipes import get_recipe
from deat.recipes.overrides import apply_overrides
from deat.threat import UNION_RULES

THREAT = "linf:0.1+l2:0.5+l1:1.5"


def run(*words: object) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one epoch makes poor networks
        return main([str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run against a union, evaluated in every ball."""
    path = tmp_path_factory.mktemp("union") / "run"
    quick = ("--epochs", 1, "--n-train", 200, "--baseline", "no", "--test-images", 20, "--val-attack", "pgd-2")
    threat = ("--threat", THREAT, "--threat-rule", "error")
    assert run("train", *threat, *quick, "--method", "fgsm", "--watch", "none", "--out", path) == 0
    assert run("evaluate", path, "--attacks", "natural,pgd-2", "--n", 20) in (0, 6)
    return path


def test_a_run_records_the_balls_and_the_rule_and_is_loaded_with_them(folder):
    record = json.loads((folder / "run.json").read_text())
    assert record["threat"]["rule"] == "error"
    assert [ball["norm"] for ball in record["threat"]["threats"]] == ["linf", "l2", "l1"]
    assert deat.load_run(folder).threat == deat.Union("linf:0.1", "l2:0.5", "l1:1.5", rule="error")


def test_an_evaluation_has_every_ball_and_another_threat_takes_their_place(folder, tmp_path):
    evaluation = deat.load_evaluation(folder / "evaluation.json")
    assert list(evaluation.balls) == ["linf", "l2", "l1"]
    out = tmp_path / "other.json"
    assert run("evaluate", folder, "--attacks", "pgd-2", "--n", 10, "--threat", "l2:0.5+l1:1", "--out", out) in (0, 6)
    assert list(deat.load_evaluation(out).balls) == ["l2", "l1"]
    assert run("evaluate", folder, "--attacks", "pgd-2", "--n", 10, "--norm", "l2", "--eps", 0.5, "--out", out) in (
        0,
        6,
    )
    assert deat.load_evaluation(out).settings["threat"] == {"norm": "l2", "eps": 0.5}


def test_the_report_has_the_union_and_each_ball(folder, tmp_path):
    assert run("report", folder, "--out", tmp_path / "report", "--no-figures", "--gallery", 2, "--sweep", 10) == 0
    table = (tmp_path / "report" / "table.md").read_text()
    assert "Each ball of the union" in table
    for ball in ("linf eps 0.1", "l2 eps 0.5", "l1 eps 1.5"):
        assert f"| fgsm | {ball} |" in table
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Each ball of the union" in page
    assert "no single radius" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--threat", THREAT, "--eps", "0.1"], "leave --norm and --eps out"),
        (["--threat-rule", "random"], "add --threat"),
        (["--threat", "linf:0.1", "--threat-rule", "random"], "for several balls"),
        (["--threat", "linf:0.1+linf:0.2"], "two linf balls"),
        (["--threat", THREAT, "--method", "yopo-5-3"], "first layer alone"),
        (["--threat", THREAT, "--alpha", "0.1"], "alpha_eps"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(words, told, tmp_path, capsys):
    assert run("train", "--out", tmp_path / "run", *words) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_list_shows_the_norms_and_every_rule(capsys):
    assert run("list", "threats", "--json") == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert names[:3] == ["linf:EPS", "l2:EPS", "l1:EPS"]
    assert names[4:] == [f"--threat-rule {rule}" for rule in UNION_RULES]


def test_a_recipe_takes_a_union_in_place_of_its_own_radius():
    settings = {"threat": THREAT, "threat_rule": "random", "alpha": "auto"}  # the recipe's alpha is for Linf
    rows = apply_overrides(get_recipe("cifar10-fast").make_rows(["m+deat", "pgd-7"]), settings)
    assert {(row.request.norm, row.request.eps, row.request.threat) for row in rows} == {(None, None, THREAT)}
    assert all(row.check() for row in rows)
