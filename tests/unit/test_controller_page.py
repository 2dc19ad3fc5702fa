"""The page of rules that choose k: its statistics, and that it is made of the records beside it."""

import json
from pathlib import Path

import pytest

import deat
from helpers.bench_scripts import importable_bench

FOLDER = Path(__file__).parents[2] / "docs/results/controller"


@pytest.fixture(autouse=True)
def _bench(monkeypatch):
    with importable_bench(monkeypatch):
        yield


def run(method: str, seed: int, backprops: int, robust: float) -> dict:
    return {"method": method, "seed": seed, "backprops": backprops, "accuracy": {"pgd-20": robust}}


def test_the_page_is_that_of_the_records_beside_it():
    from controller_results_page import render

    findings = (FOLDER / "findings.md").read_text() if (FOLDER / "findings.md").is_file() else ""
    assert (FOLDER / "README.md").read_text() == render(FOLDER) + (findings and "\n" + findings)


@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(2.776445, 4, 0.05), (0.0, 4, 1.0), (4.604095, 4, 0.01), (-12.7062, 1, 0.05)]
)
def test_p_values_are_those_of_student_s_t(t, freedom, p):
    from controller_results_page import two_sided_p

    assert two_sided_p(t, freedom) == pytest.approx(p, abs=1e-5)


def test_a_family_is_interpolated_at_equal_backprops_and_not_beyond():
    from controller_results_page import Runs, Start

    records = [run("auto+deat", seed, cost, 0.30) for seed, cost in enumerate((15, 20, 25))]
    records += [run("deat-2", seed, 20, 0.30 - 0.01 * seed) for seed in range(3)]
    records += [run("deat-3", seed, 10, 0.20 - 0.01 * seed) for seed in range(3)]
    found = Runs(Start(None, 1, 0.1, 1, ramps=(2, 3)), records).compare_at_equal_backprops(
        "auto+deat", ["deat-2", "deat-3"]
    )
    assert found is not None
    assert found.seeds == 2, "the third one costs more than every ramp"
    assert found.mean == pytest.approx((5.0 + 1.0) / 2)


def follow(name: str, gaps: list[float]) -> list[int]:
    from controller_rules import get_method

    schedule = get_method(name).bind(deat.Linf(0.1), len(gaps))
    state, ks = schedule.init(), []
    for epoch, gap in enumerate(gaps):
        ks.append(schedule.budget(state, epoch).k)
        measured = {"largest_rise": 3.0, "reached_rise": 3 * (1 - gap)}
        state = schedule.observe(state, deat.EpochRecord(epoch, 1.0, 0.5, 1.0, 10, measured=measured))
    return ks


def test_the_other_rules_follow_the_gap_from_the_second_epoch_on_or_what_is_given():
    gaps = [1.0, 0.3, 0.1, 0.03, 0.3]
    assert follow("gap", gaps) == [0, 1, 2, 2, 1]
    assert follow("k 4 0 0 2 1", gaps) == [4, 0, 0, 2, 1]


@pytest.mark.parametrize("folder", ["cifar10", "digits"])
def test_the_recorded_k_are_those_that_deat_s_auto_chooses_by_what_was_measured(folder):
    paths = sorted((FOLDER / folder / "runs").glob("*-auto+deat-seed*.json"))
    assert paths
    for path in paths:
        run = json.loads(path.read_text())
        schedule = deat.get_method("auto").bind(deat.Linf(0.1), len(run["k"]))
        state, ks = schedule.init(), []
        for epoch, (loss, measured) in enumerate(zip(run["loss"], run["measured"], strict=True)):
            ks.append(schedule.budget(state, epoch).k)
            state = schedule.observe(state, deat.EpochRecord(epoch, loss, 0.5, 1.0, 10, measured=measured))
        assert ks == run["k"], path.name
