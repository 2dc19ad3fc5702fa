"""Numbers over seeds: means and standard deviations of finished runs alone, with what qualifies them."""

import json
from dataclasses import asdict

import pytest

from deat.errors import DataError
from deat.evaluation.results import AttackResult, Evaluation
from deat.report.run_results import load_bench, load_run_results
from deat.training.epoch_records import EpochStats, EpochTiming, append_record

ATTACKS = ("natural", "pgd-20")


def write_run(path, seed, hits, *, backprops=40, name="evaluation.json"):
    path.mkdir(parents=True, exist_ok=True)
    about = {key: {} for key in ("request", "method", "model", "data", "threat")}
    (path / "run.json").write_text(json.dumps({**about, "settings": {"seed": seed, "batch_size": 32, "epochs": 2}}))
    judge(path, hits, name)
    for epoch in range(2):
        numbers = dict.fromkeys(EpochStats.__annotations__, 0) | {"epoch": epoch, "examples": 100, "measured": {}}
        append_record(path / "history.jsonl", EpochStats(**{**numbers, "backprops": backprops * (epoch + 1) // 2}))
        append_record(path / "timing.jsonl", EpochTiming(epoch, 30.0, 5.0, 1.0))


def judge(path, hits, name, attacks=ATTACKS):
    settings = {"cascade": False}
    results = [AttackResult(a, [i < n for i in range(10)], 0, 0.0, 0, 0) for a, n in zip(attacks, hits, strict=True)]
    Evaluation(results, [0] * 10, ["a"], settings).save(path / name)


def write_bench(root, rows):
    about = {"why": None, "concurrent_jobs": 1}
    found = [
        {"name": n, "method": n, "model": "small", "paper": p, "runs": [{**about, **run} for run in runs]}
        for n, p, runs in rows
    ]
    text = json.dumps({"recipe": "quick", "paper": {"table": "Table 3"}, "settings": {}, "rows": found})
    (root / "bench.json").write_text(text)


def test_mean_and_standard_deviation_are_over_finished_seeds(tmp_path):
    for seed, hits in enumerate([(10, 8), (9, 6), (1, 1)]):
        write_run(tmp_path / f"a/seed-{seed}", seed, hits)
    states = ("done", "done", "failed")
    runs = [{"seed": s, "folder": f"a/seed-{s}", "status": state} for s, state in enumerate(states)]
    runs[2]["why"] = "weights stopped being finite"
    write_bench(tmp_path, [("a", {"table": "t", "row": "small a"}, runs)])
    (row,) = load_bench(tmp_path).rows
    assert row.seed_statistics("natural").mean == pytest.approx(0.95)
    assert row.seed_statistics("pgd-20").sd == pytest.approx(0.1 * 2**0.5)
    assert row.seed_statistics("pgd-20").values == (0.8, 0.6)
    assert row.failure_summary == "seed 2: weights stopped being finite"
    assert (row.table, row.paper_row) == ("t", "small a")


def test_cost_is_in_backprops_backprops_a_batch_and_minutes_of_training(tmp_path):
    write_run(tmp_path / "run", 0, (10, 8), backprops=40)
    numbers = load_run_results(tmp_path / "run").metrics
    assert (numbers["backprops"], numbers["per_batch"], numbers["minutes"]) == (40, 10, 1.0)


def test_the_last_epoch_and_autoattack_on_fewer_images_stand_beside(tmp_path):
    write_run(tmp_path / "run", 0, (10, 8))
    judge(tmp_path / "run", (9, 9), "evaluation-last.json")
    judge(tmp_path / "run", (5, 4), "evaluation-aa.json", ("natural", "aa"))
    found = load_run_results(tmp_path / "run")
    assert found.metrics["natural"] == 1.0  # not the sample's
    assert (found.metrics["aa"], found.metrics["last pgd-20"]) == (0.4, 0.9)
    assert found.images_by_attack["aa"] == 10


def test_a_single_seed_has_no_standard_deviation_and_an_open_run_no_numbers(tmp_path):
    write_run(tmp_path / "a/seed-0", 0, (10, 8))
    runs = [
        {"seed": 0, "folder": "a/seed-0", "status": "done", "concurrent_jobs": 3},
        {"seed": 1, "folder": "a/seed-1", "status": "waiting"},
    ]
    write_bench(tmp_path, [("a", None, runs), ("b", None, [{**runs[1], "folder": "b/seed-1"}])])
    done, waiting = load_bench(tmp_path).rows
    assert done.seed_statistics("natural").sd is None
    assert done.ran_concurrently
    assert (
        len(done.finished_runs),
        waiting.finished_runs,
        waiting.seed_statistics("natural"),
        waiting.ran_concurrently,
    ) == (1, [], None, False)
    assert load_bench(tmp_path).columns == ["natural", "pgd-20", "worst", "backprops", "per_batch", "minutes"]


def test_warm_up_is_no_training_time(tmp_path):
    write_run(tmp_path / "run", 0, (10, 8))
    append_record(tmp_path / "run" / "timing.jsonl", EpochTiming(2, 30.0, 5.0, 1.0, warm_up_seconds=24.0))
    found = load_run_results(tmp_path / "run")
    assert (found.train_seconds, found.warm_up_seconds) == (66.0, 24.0)


def test_minutes_are_those_of_the_seeds_that_ran_alone_where_some_did(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"a/seed-{seed}", seed, (10, 8))
        append_record(tmp_path / f"a/seed-{seed}" / "timing.jsonl", EpochTiming(2, 60.0 * seed, 0.0, 1.0))
    runs = [
        {"seed": seed, "folder": f"a/seed-{seed}", "status": "done", "concurrent_jobs": jobs}
        for seed, jobs in enumerate((1, 1, 4))
    ]
    write_bench(tmp_path, [("a", None, runs)])
    (row,) = load_bench(tmp_path).rows
    assert (row.minutes, row.ran_concurrently) == (1.5, False)
    write_bench(tmp_path, [("a", None, [{**run, "concurrent_jobs": 2} for run in runs])])
    (row,) = load_bench(tmp_path).rows
    assert (row.minutes, row.ran_concurrently) == (2.0, True)


def test_a_torn_last_line_of_the_clock_is_dropped(tmp_path):
    write_run(tmp_path / "run", 0, (10, 8))
    with (tmp_path / "run" / "timing.jsonl").open("a") as file:
        file.write(json.dumps(asdict(EpochTiming(2, 30.0, 5.0, 1.0)))[:20])
    assert load_run_results(tmp_path / "run").train_seconds == 60


@pytest.mark.parametrize("text", [None, "{", "[]", '{"rows": []}'])
def test_what_is_no_bench_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "bench.json").write_text(text)
    with pytest.raises(DataError, match=r"bench\.json"):
        load_bench(tmp_path)
