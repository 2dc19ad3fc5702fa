"""Verdicts and labels survive the way into a file and back; a file that was tampered with says so."""

import json
from random import Random

import pytest

import deat
from deat.evaluation.results import load_evaluation, pack_bits, pack_labels, unpack_bits, unpack_labels
from deat.report.load import load_run_results
from helpers.runs import make_run


@pytest.mark.parametrize("images", [0, 1, 7, 8, 9, 1000])
def test_verdicts_and_labels_come_back_as_they_were(images: int) -> None:
    draw = Random(images)
    hits, labels = [draw.random() < 0.5 for _ in range(images)], [draw.randrange(12) for _ in range(images)]
    assert unpack_bits(pack_bits(hits)) == hits
    assert unpack_labels(pack_labels(labels), images) == labels
    assert unpack_labels(pack_labels(sorted(labels)), images) == sorted(labels)


def test_what_is_packed_can_be_read_without_deat() -> None:
    assert pack_bits([True] * 9 + [False]) == "10:ff80"
    assert pack_labels([0, 0, 0, 1, 0]) == "0*3 1 0"


def test_ten_thousand_verdicts_take_a_quarter_of_the_room_and_sorted_labels_none_to_speak_of() -> None:
    assert len(pack_bits([True] * 10_000)) == 2506
    assert len(pack_labels([label for label in range(10) for _ in range(1000)])) < 100


def test_files_with_a_digit_for_each_verdict_and_a_list_of_labels_are_still_read(tmp_path) -> None:
    folder = make_run(tmp_path / "run", shares={"natural": 0.9, "pgd-20": 0.5})
    new = load_evaluation(folder / "evaluation.json")
    told = json.loads((folder / "evaluation.json").read_text())
    for attack in told["attacks"]:
        attack["correct"] = "".join("1" if hit else "0" for hit in new.verdicts[attack["name"]])
    (folder / "evaluation.json").write_text(json.dumps({**told, "schema": 1, "labels": new.labels}))
    assert load_evaluation(folder / "evaluation.json") == new


@pytest.mark.parametrize(
    "bad",
    [{"labels": "0*999999999999"}, {"labels": "0*-1 1*3"}, {"labels": "x"}, {"attacks": [{"correct": "80000000:ff"}]}],
    ids=str,
)
def test_a_file_that_was_tampered_with_is_refused_and_fills_no_memory(bad: dict[str, object], tmp_path) -> None:
    from deat.errors import DataError

    folder = make_run(tmp_path / "run", shares={"natural": 0.9})
    told = json.loads((folder / "evaluation.json").read_text())
    if "attacks" in bad:
        told["attacks"][0] |= bad["attacks"][0]  # type: ignore[index]
    else:
        told |= bad
    (folder / "evaluation.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match="deat wrote"):
        load_run_results(folder)
    with pytest.raises(DataError, match=r"evaluation\.json' is not an evaluation\.json that deat wrote"):
        deat.load_evaluation(str(folder / "evaluation.json"))
