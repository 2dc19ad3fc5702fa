"""All evaluations of a run are kept, the strongest one speaks, and nothing is called robust that was not attacked."""

import json
from pathlib import Path
from typing import Any

import pytest

import deat
from deat.cli.main import main
from deat.errors import DataError, UsageError
from deat.evaluation.results import AttackResult, Evaluation, load_evaluation
from deat.report.choose_evaluations import StoredEvaluation, choose_evaluations, load_stored_evaluations
from deat.report.page_data import build_winner_cards
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table
from deat.report.run_results import load_run_results
from helpers.nets import conv_net, images

STEPS = {"natural": 0, "fgsm": 1, "pgd-1x3": 1, "pgd-20": 20}
RECORD = {"threat": {"norm": "linf", "eps": 0.1}, "request": {"data": "digits"}}


def make(
    hits: dict[str, str],
    *,
    eps: float = 0.1,
    epoch: str = "best",
    model: str = "a",
    cascade: bool = False,
    seed: int = 0,
) -> Evaluation:
    """An evaluation whose verdicts are written as digits."""
    results = [AttackResult(name, [c == "1" for c in text], 0, 0.0, 0, 0) for name, text in hits.items()]
    n = len(results[0].correct)
    attacks = {
        name: {"name": name, "restarts": 3 if "x3" in name else 1, **({"steps": STEPS[name]} if name in STEPS else {})}
        for name in hits
    }
    settings = {
        "about": {"epoch": epoch, "data": "digits"},
        "attacks": attacks,
        "cascade": cascade,
        "model": model,
        "sample": n < 8,
        "seed": seed,
        "block": 500,
        "threat": {"norm": "linf", "eps": eps},
    }
    return Evaluation(results, [0, 1] * (n // 2), ["a", "b"], settings)


def choose(*evaluations: Evaluation) -> Any:
    """What a report chooses of these, the newest first."""
    stored = [StoredEvaluation(f"evaluation-{9 - n}.json", one) for n, one in enumerate(evaluations)]
    return choose_evaluations(stored, RECORD)


def uses(chosen: Any) -> list[str]:
    return [one.use for one in chosen.stored]


@pytest.mark.parametrize("attack", ["natural", "fgsm"])
def test_there_is_no_worst_case_without_an_attack_of_more_than_one_step(attack: str) -> None:
    evaluation = make({attack: "1110"})
    assert list(evaluation.accuracy) == list(evaluation.intervals) == [attack]
    assert "worst" not in repr(evaluation)
    assert "worst" not in evaluation.as_json()["accuracy"]
    with pytest.raises(UsageError, match="pgd-20 or aa"):
        _ = evaluation.worst


@pytest.mark.parametrize("attack", ["pgd-1x3", "pgd-20", "aa", "mine"])
def test_there_is_one_with_restarts_with_steps_and_with_attacks_of_others(attack: str) -> None:
    assert make({"natural": "1110", attack: "1000"}).worst == 0.25


def test_an_evaluation_with_an_attack_speaks_before_one_without_and_more_images_before_fewer() -> None:
    clean = make({"natural": "11111111"})
    few, many = make({"natural": "1111", "pgd-20": "0000"}), make({"natural": "111110", "pgd-20": "111000"})
    assert choose(clean, few).main is few
    chosen = choose(clean, few, many)
    assert chosen.main is many
    assert uses(chosen) == ["not used: 8 examples, not 6", "not used: 4 examples, not 6", "shown"]


def test_the_worst_case_is_over_all_evaluations_of_the_same_weights_images_and_radius() -> None:
    chosen = choose(make({"natural": "1111"}), make({"pgd-20": "0111"}), make({"natural": "1111", "aa": "1011"}))
    assert chosen.main.accuracy == {"natural": 1.0, "pgd-20": 0.75, "aa": 0.75, "worst": 0.5}
    assert uses(chosen) == ["combined"] * 3


def test_a_second_result_of_an_attack_and_a_cascade_count_in_the_worst_case_alone() -> None:
    first = make({"natural": "1111", "pgd-20": "0111"})
    chosen = choose(first, make({"pgd-20": "1011"}, seed=1), make({"natural": "1111", "cw-20": "1101"}, cascade=True))
    assert chosen.main.accuracy == {"natural": 1.0, "pgd-20": 0.75, "worst": 0.25}
    names = [result.name for result in chosen.main.results]
    assert names == ["natural", "pgd-20", "pgd-20 with seed 1", "cw-20 in a cascade"]


@pytest.mark.parametrize(
    ("other", "use"),
    [
        ({"eps": 0.3}, "not used: another radius or norm"),
        ({"model": "b"}, "not used: other weights"),
        ({"epoch": "last", "model": "b"}, "shown beside: the last epoch"),
    ],
)
def test_what_cannot_be_combined_is_left_out_and_reported(other: dict[str, Any], use: str) -> None:
    own = make({"natural": "1111", "pgd-20": "0111"})
    chosen = choose(own, make({"natural": "1111", "pgd-20": "0000"}, **other))
    assert chosen.main is own
    assert uses(chosen) == ["shown", use]


def test_autoattack_on_fewer_images_is_shown_beside_and_takes_the_worst_case_away(tmp_path: Path) -> None:
    own, aa = make({"natural": "111111", "pgd-20": "111000"}), make({"natural": "1111", "aa": "1000"})
    chosen = choose(own, aa)
    assert (chosen.main, chosen.extra) == (own, {"aa": aa})
    assert uses(chosen)[1] == "shown beside: 4 examples, not 6"


def test_of_two_trainings_in_a_folder_the_newer_weights_speak() -> None:
    old, new = make({"natural": "1111", "pgd-20": "1111"}, model="old"), make({"natural": "1111", "pgd-20": "1000"})
    assert choose(new, old).main is new


def test_files_are_read_from_the_newest_to_the_oldest(tmp_path: Path) -> None:
    for name in ("evaluation-2.json", "evaluation-10.json", "evaluation.json", "evaluation-aa.json"):
        make({"natural": "11"}).save(tmp_path / name)
    (tmp_path / "evaluation.txt").write_text("notes")
    files = [one.file for one in load_stored_evaluations(tmp_path)]
    assert files == ["evaluation.json", "evaluation-10.json", "evaluation-2.json", "evaluation-aa.json"]


def test_a_damaged_copy_is_named(tmp_path: Path) -> None:
    make({"natural": "11"}).save(tmp_path / "evaluation.json")
    (tmp_path / "evaluation-1.json").write_text("{")
    with pytest.raises(DataError, match=r"evaluation-1\.json"):
        load_stored_evaluations(tmp_path)


def test_an_evaluation_is_replaced_by_one_that_contains_it_and_kept_beside_any_other(tmp_path: Path) -> None:
    file = tmp_path / "evaluation.json"
    clean = make({"natural": "1111"})
    attacked = make({"natural": "1111", "pgd-20": "1100"})
    for evaluation in (clean, clean, attacked):
        evaluation.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]
    last = make({"natural": "1111"}, epoch="last")
    for evaluation in (clean, last, clean, last):
        evaluation.save(file)
    kept = {p.name: list(load_evaluation(p).accuracy) for p in tmp_path.iterdir()}
    assert set(kept) == {"evaluation.json", "evaluation-1.json", "evaluation-2.json", "evaluation-3.json"}
    assert "pgd-20" in kept["evaluation-1.json"]


def test_evaluate_keeps_what_is_in_the_file_that_it_saves_to(tmp_path: Path) -> None:
    net, data = conv_net(), images(8)
    for attacks in (["natural", "pgd-2"], ["natural"]):
        deat.evaluate(net, data, threat="linf:0.1", attacks=attacks, sanity=False, save=tmp_path / "evaluation.json")
    assert list(load_evaluation(tmp_path / "evaluation-1.json").accuracy) == ["natural", "pgd-2", "worst"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was attacked and then evaluated without an attack."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    options = ["--epochs", "1", "--held-out", "40", "--val-attack", "fgsm", "--watch", "none", "--baseline", "no"]
    assert main(["train", "--out", str(folder), "--test-images", "30", *options]) == 0
    assert main(["evaluate", str(folder), "--attacks", "natural,pgd-3", "--n", "40"]) in (0, 6)
    assert main(["evaluate", str(folder), "--attacks", "natural"]) in (0, 6)
    return folder


def test_a_later_evaluation_without_an_attack_hides_nothing(run: Path, tmp_path: Path) -> None:
    attacked = load_evaluation(run / "evaluation-1.json")
    metrics = load_run_results(run).metrics
    assert {name: metrics[name] for name in attacked.accuracy} == attacked.accuracy
    assert set(deat.load_run(run).evaluations) == {"evaluation.json", "evaluation-1.json"}
    report = deat.report(run, out=tmp_path / "r", figures=False, gallery=0)
    page = report.page.read_text()
    for text in (report.table, page):
        assert "not used: 400 examples, not 40" in text
        assert "Measured by deat train" in text
    (row,) = report.numbers["rows"]
    assert [one["images"] for one in row["evaluations"]["0"]] == [400, 40]
    assert row["scores"]["0"][0]["images"] == 30


def test_nothing_is_called_robust_that_was_not_attacked(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("run.json", "history.jsonl"):
        (folder / name).write_bytes((run / name).read_bytes())
    (folder / "evaluation.json").write_bytes((run / "evaluation.json").read_bytes())
    winners = build_winner_cards(build_results_table(load_report_data([str(folder)]), None))
    assert [card["title"] for card in winners["cards"]] == ["Best on clean examples"]
    assert "no row is called robust" in winners["note"]
    report = deat.report(folder, out=tmp_path / "r", figures=False, gallery=0)
    assert "Most robust" not in report.page.read_text()
    assert "| worst |" not in report.table
    assert "No worst case is shown" in report.table
    assert "worst" not in json.dumps(report.numbers["rows"])
