"""The page of rules that choose k: its statistics, and that it is made of the records beside it."""

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

    records = [run("late gap", seed, cost, 0.30) for seed, cost in enumerate((15, 20, 25))]
    records += [run("deat-2", seed, 20, 0.30 - 0.01 * seed) for seed in range(3)]
    records += [run("deat-3", seed, 10, 0.20 - 0.01 * seed) for seed in range(3)]
    found = Runs(Start(None, 1, 0.1, 1, ramps=(2, 3)), records).compare_at_equal_backprops(
        "late gap", ["deat-2", "deat-3"]
    )
    assert found is not None
    assert found.seeds == 2, "the third one costs more than every ramp"
    assert found.mean == pytest.approx((5.0 + 1.0) / 2)


def test_the_rule_keeps_k_low_then_follows_the_gap_both_ways():
    from controller_rules import get_method

    schedule = get_method("late gap").bind(deat.Linf(0.1), 12)
    state, ks = schedule.init(), []
    for epoch in range(12):
        ks.append(schedule.budget(state, epoch).k)
        largest = 0.5 if epoch < 2 else 3.0
        gap = 0.5 if epoch < 8 else 0.02 if epoch < 9 else 0.001
        measured = {"largest_rise": largest, "reached_rise": (1 - gap) * largest}
        state = schedule.observe(state, deat.EpochRecord(epoch, 1.0, 0.5, 1.0, 10, measured=measured))
    assert ks == [0, 0, 0, 1, 1, 1, 3, 4, 5, 5, 4, 3]
