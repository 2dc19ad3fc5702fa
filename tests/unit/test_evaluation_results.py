"""Accuracies and their intervals, and evaluation.json."""

import json
from dataclasses import replace
from random import Random

import pytest
import torch

import deat
from deat.errors import DataError
from deat.evaluation.evaluator import evaluate
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.results import (
    SCHEMA_VERSION,
    AttackResult,
    Evaluation,
    load_evaluation,
    pack_bits,
    pack_labels,
    unpack_bits,
    unpack_labels,
)
from deat.evaluation.sanity import Flag
from deat.report.run_results import load_run_results
from helpers.eval_attackers import Own
from helpers.eval_nets import THREAT, digits, robust, softmax
from helpers.nets import conv_net, images
from helpers.runs import make_run


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (5, 10, 0.2365931, 0.7634069),
        (10, 10, 0.7224672, 1.0),
        (1, 1, 0.2065493, 1.0),
        (8000, 10_000, 0.7920456, 0.8077240),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_s_interval_has_known_values(hits, n, low, high):
    assert wilson_interval(hits, n) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 20, 400, 10_000])
def test_wilson_s_interval_solves_its_quadratic_and_is_symmetric(n):
    z = 1.959963984540054
    for hits in {0, 1, n // 3, n // 2, n}:
        low, high = wilson_interval(hits, n)
        assert 0 <= low <= hits / n <= high <= 1
        assert (1 - high, 1 - low) == pytest.approx(wilson_interval(n - hits, n), abs=1e-12)
        for bound in (low, high):
            assert (hits / n - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / n, abs=1e-12)


def make_evaluation() -> Evaluation:
    """An evaluation made by hand: three classes, one of them without an image."""
    results = [
        AttackResult("natural", [True, True, True, False], 0, 0.5, 4, 0),
        AttackResult("fgsm", [True, False, True, False], 0, 0.7, 10, 3),
        AttackResult("pgd-20", [False, True, True, False], 2, 1.5, 67, 60),
    ]
    settings = {"cascade": False, "attacks": {}, "threat": {"norm": "linf", "eps": 0.1}, "sample": False}
    flags = [Flag("one_step_wins", "what <was> | seen", "what to do")]
    return Evaluation(results, [0, 0, 2, 2], ["a", "b", "c"], settings, flags)


def test_accuracies_intervals_and_newly_fooled_images_are_those_computed_by_hand():
    evaluation = make_evaluation()
    assert evaluation.verdicts["worst"] == [False, False, True, False]
    assert evaluation.accuracy == {"natural": 0.75, "fgsm": 0.5, "pgd-20": 0.5, "worst": 0.25}
    assert evaluation.intervals == {
        name: wilson_interval(hits, 4) for name, hits in zip(evaluation.accuracy, (3, 2, 2, 1), strict=True)
    }
    assert evaluation.newly_fooled == {"natural": 1, "fgsm": 1, "pgd-20": 1}


def test_the_repr_of_an_evaluation_is_one_line_with_accuracies_and_flags():
    evaluation = make_evaluation()
    assert repr(evaluation) == (
        "Evaluation(4 images: natural 75.00%, fgsm 50.00%, pgd-20 50.00%, worst 25.00%; flags: one_step_wins)"
    )
    assert "True" not in repr(evaluation.results)
    assert "flags: none)" in repr(replace(evaluation, flags=[]))
    assert "flags: not checked)" in repr(
        replace(evaluation, flags=[], settings={**evaluation.settings, "sanity": False})
    )


def test_per_class_counts_have_their_own_intervals_also_for_a_class_without_images():
    evaluation = make_evaluation()
    assert evaluation.per_class() == {
        "a": (0, 2, wilson_interval(0, 2)),
        "b": (0, 0, (0.0, 1.0)),
        "c": (1, 2, wilson_interval(1, 2)),
    }
    assert evaluation.per_class("natural") == {
        "a": (2, 2, wilson_interval(2, 2)),
        "b": (0, 0, (0.0, 1.0)),
        "c": (1, 2, wilson_interval(1, 2)),
    }


def test_per_class_counts_sum_to_those_of_all_images():
    evaluation = evaluate(robust(), digits(200), threat=THREAT, attacks=["natural", "pgd-5"], sanity=False)
    assert list(evaluation.per_class()) == [str(c) for c in range(10)]
    for name in ("natural", "pgd-5", "worst"):
        rows = evaluation.per_class(name).values()
        assert sum(hits for hits, _, _ in rows) == sum(evaluation.verdicts[name])
        assert sum(count for _, count, _ in rows) == 200


def test_classes_have_the_names_that_the_data_gives_them():
    test = deat.load_data("digits").test
    named = deat.data.ImageSet(test.images, test.labels, tuple(f"digit {c}" for c in range(10)))
    evaluation = evaluate(robust(), named, threat=THREAT, attacks=["natural"], n=50, sanity=False)
    assert list(evaluation.per_class()) == [f"digit {c}" for c in range(10)]


def test_an_evaluation_read_back_from_its_file_is_the_same(tmp_path):
    for number, evaluation in enumerate(
        [make_evaluation(), evaluate(robust(), digits(30), threat=THREAT, n=20, block=8)]
    ):
        path = tmp_path / "deep" / f"{number}.json"
        evaluation.save(path)
        again = load_evaluation(path)
        assert again == evaluation
        assert again.as_json() == evaluation.as_json()
        assert len(list(path.parent.iterdir())) == number + 1


def test_the_file_is_strict_json_with_every_setting_and_verdict(tmp_path):
    evaluation = evaluate(robust(), digits(30), threat=THREAT, attacks=["natural", "pgd-3", Own("mine")], n=20, block=8)
    evaluation.save(tmp_path / "evaluation.json")
    text = (tmp_path / "evaluation.json").read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert json.dumps(evaluation.as_json(), allow_nan=False)
    assert (data["schema"], data["images"]) == (SCHEMA_VERSION, 20)
    assert unpack_labels(data["labels"], 20) == digits(20)[1].tolist()
    assert data["settings"]["threat"] == {"norm": "linf", "eps": 0.15}
    settings = data["settings"]
    expected = {"seed": 0, "block": 8, "cascade": False, "sample": True, "available": 30}
    assert {name: settings[name] for name in expected} == expected
    assert settings["attacks"]["pgd-3"]["steps"] == 3
    assert settings["attacks"]["pgd-3"]["alpha"] == pytest.approx(0.0375)
    assert settings["versions"]["torch"] == torch.__version__
    for entry in data["attacks"]:
        assert unpack_bits(entry["correct"]) == evaluation.verdicts[entry["name"]]
        assert min(entry["seconds"], entry["forwards"]) > 0
    assert data["attacks"][1]["backwards"] > 0
    for name, rows in data["per_class"].items():
        assert sum(row["correct"] for row in rows.values()) == sum(evaluation.verdicts[name])


PAIR = [float]
COST = {"seconds": float, "forwards": int, "backwards": int}
ROW = {"correct": int, "images": int, "interval": PAIR}
SETTINGS = {
    "about": {str: (str, int, None)},
    "attacks": {str: {str: object}},
    "available": int,
    "block": int,
    "cascade": bool,
    "compiled": bool,
    "device": str,
    "image": [int],
    "model": str,
    "precision": str,
    "sample": bool,
    "sanity": bool,
    "seed": int,
    "threat": {"norm": str, "eps": float},
    "versions": {str: str},
}
SHAPE = {
    "schema": int,
    "images": int,
    "accuracy": {str: float},
    "intervals": {str: PAIR},
    "added": {str: int},
    "per_class": {str: {str: ROW}},
    "flags": [{"name": str, "seen": str, "advice": str, "link": str}],
    "settings": SETTINGS,
    "check_seconds": float,
    "attacks": [{"name": str, "correct": str, "invalid": int, "felled": {str: int}, **COST}],
    "labels": str,
    "classes": [str],
    "checksum": str,
}
"""evaluation.json of schema 2: {str: kind} is an object of any names, [kind] a list of any length."""


def find_misfits(value, shape, at="") -> list[str]:
    """The places where a value does not have a shape."""
    if isinstance(shape, dict) and isinstance(value, dict):
        known = dict.fromkeys(value, shape[str]) if str in shape else shape
        wrong = [f"{at}.{key}" for key in value.keys() ^ known.keys()]
        return wrong + [
            m for key in value.keys() & known.keys() for m in find_misfits(value[key], known[key], f"{at}.{key}")
        ]
    if isinstance(shape, list) and isinstance(value, list):
        return [m for i, item in enumerate(value) for m in find_misfits(item, shape[0], f"{at}.{i}")]
    kinds = shape if isinstance(shape, tuple) else (shape,)
    fits = object in kinds or type(value) in kinds or (value is None and None in kinds)
    return [] if fits else [at]


@pytest.mark.parametrize("net", [robust, lambda: softmax(robust())])
@pytest.mark.parametrize("cascade", [False, True])
def test_the_file_has_the_shape_of_its_schema(net, cascade, tmp_path):
    asked = ["natural", "fgsm", "pgd-3", "apgd-ce", Own("mine")]
    file = tmp_path / "evaluation.json"
    evaluate(net(), digits(20), threat=THREAT, attacks=asked, n=12, block=8, cascade=cascade, save=file)
    data = json.loads(file.read_text())
    assert data["schema"] == 2
    assert find_misfits(data, SHAPE) == []


def test_the_comparison_with_the_schema_finds_other_shapes():
    data = make_evaluation().as_json()
    data["settings"] = {**dict.fromkeys(SETTINGS), "extra": 1}
    data["labels"], data["flags"] = [0], [{"name": "x", "seen": 3, "advice": ""}]
    misfits = set(find_misfits(data, SHAPE))
    assert {".settings.extra", ".settings.seed", ".settings.threat", ".labels", ".flags.0.seen"} <= misfits
    assert ".accuracy.natural" not in misfits


@pytest.mark.parametrize("net", [robust(), softmax(robust())])
@pytest.mark.parametrize("sanity", [False, True])
def test_the_file_says_whether_the_sanity_checks_ran(net, sanity, tmp_path):
    evaluation = evaluate(net, digits(20), threat=THREAT, attacks="natural", sanity=sanity, save=tmp_path / "e.json")
    assert (
        evaluation.settings["sanity"]
        is evaluation.sanity_checked
        is load_evaluation(tmp_path / "e.json").sanity_checked
        is sanity
    )
    assert sanity or evaluation.flags == []
    assert make_evaluation().sanity_checked, "older files do not record it"


def test_an_evaluation_from_python_records_what_is_known_of_model_data_device_and_images(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = evaluate(robust(), digits(20), threat=THREAT, attacks="natural").settings
    assert settings["about"] == {"model": "Sequential", "data": "tuple"}
    assert (settings["device"], settings["image"]) == ("cpu", [1, 8, 8])
    about = {"data": "folder:/home/somebody/photos", "model": "mine", "epochs": 3}
    settings = evaluate(robust(), digits(20), threat=THREAT, attacks="natural", about=about).settings
    assert settings["about"] == {"data": "folder:~/photos", "model": "mine", "epochs": 3}


@pytest.mark.parametrize("schema", [3, 99])
def test_a_file_of_a_later_schema_is_refused_with_advice_to_upgrade(schema, tmp_path):
    make_evaluation().save(tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    (tmp_path / "e.json").write_text(json.dumps({**data, "schema": schema}))
    with pytest.raises(DataError, match=rf"e\.json'.*schema {schema}.*Upgrade deat"):
        load_evaluation(tmp_path / "e.json")


LARGE = {
    "bytes": b"\xff" * 3_000_000,
    "no JSON": b"x" * 3_000_000,
    "text for a schema": json.dumps({"schema": "x" * 3_000_000}).encode(),
    "text for all": json.dumps("x" * 3_000_000).encode(),
}


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE.keys())
def test_a_large_file_that_is_no_evaluation_is_refused_in_one_short_line(data, tmp_path):
    (tmp_path / "e.json").write_bytes(data)
    with pytest.raises(DataError, match=r"e\.json' is not an evaluation\.json") as refused:
        load_evaluation(tmp_path / "e.json")
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused_by_its_name(tmp_path):
    for path in (tmp_path / "e.json", str(tmp_path)):
        with pytest.raises(DataError, match=f"there is no file '{path}'"):
            load_evaluation(path)


@pytest.mark.parametrize("schema", [0, -1, "2", 2.0, True, None])
def test_a_file_without_a_known_schema_is_refused(schema, tmp_path):
    make_evaluation().save(tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text())
    without_schema = {key: value for key, value in data.items() if key != "schema"}
    for bad in ({**data, "schema": schema}, without_schema):
        (tmp_path / "e.json").write_text(json.dumps(bad))
        with pytest.raises(DataError, match=r"is not an evaluation\.json"):
            load_evaluation(tmp_path / "e.json")


def test_an_existing_file_is_replaced(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text("old")
    make_evaluation().save(path)
    assert load_evaluation(path) == make_evaluation()


def test_twenty_images_give_a_wide_interval_and_are_marked_as_a_sample():
    evaluation = evaluate(robust(), digits(400), threat=THREAT, attacks=["natural", "pgd-3"], n=20, sanity=False)
    assert len(evaluation.labels) == 20
    assert (evaluation.settings["sample"], evaluation.settings["available"]) == (True, 400)
    low, high = evaluation.intervals["worst"]
    assert high - low > 0.25
    whole = evaluate(robust(), digits(20), threat=THREAT, attacks=["natural", "pgd-3"], n=400, sanity=False)
    assert (whole.settings["sample"], whole.settings["available"]) == (False, 20)


def test_the_model_is_identified_by_its_weights_and_layers():
    hashes = [
        evaluate(net, images(4), threat=THREAT, attacks=["natural"], sanity=False).settings["model"]
        for net in (conv_net(), conv_net(), conv_net(seed=1), torch.nn.Sequential(conv_net(), torch.nn.ReLU()))
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("num_images", [0, 1, 7, 8, 9, 1000])
def test_packed_verdicts_and_labels_are_unpacked_unchanged(num_images):
    draw = Random(num_images)
    hits, labels = [draw.random() < 0.5 for _ in range(num_images)], [draw.randrange(12) for _ in range(num_images)]
    assert unpack_bits(pack_bits(hits)) == hits
    assert unpack_labels(pack_labels(labels), num_images) == labels
    assert unpack_labels(pack_labels(sorted(labels)), num_images) == sorted(labels)


def test_the_packed_format_is_as_documented():
    assert pack_bits([True] * 9 + [False]) == "10:ff80"
    assert pack_labels([0, 0, 0, 1, 0]) == "0*3 1 0"


def test_ten_thousand_packed_verdicts_take_a_quarter_of_the_space_and_sorted_labels_almost_none():
    assert len(pack_bits([True] * 10_000)) == 2506
    assert len(pack_labels([label for label in range(10) for _ in range(1000)])) < 100


def test_files_of_schema_1_without_packing_or_check_seconds_are_read(tmp_path):
    folder = make_run(tmp_path / "run", shares={"natural": 0.9, "pgd-20": 0.5})
    file = folder / "evaluation.json"
    evaluation = replace(load_evaluation(file), check_seconds=1.5)
    evaluation.save(file)
    assert load_evaluation(file) == evaluation
    data = json.loads(file.read_text())
    for attack in data["attacks"]:
        attack["correct"] = "".join("1" if hit else "0" for hit in evaluation.verdicts[attack["name"]])
    del data["check_seconds"], data["checksum"]
    file.write_text(json.dumps({**data, "schema": 1, "labels": evaluation.labels}))
    assert load_evaluation(file) == replace(evaluation, check_seconds=0.0)


@pytest.mark.parametrize(
    "bad",
    [{"labels": "0*999999999999"}, {"labels": "0*-1 1*3"}, {"labels": "x"}, {"attacks": [{"correct": "80000000:ff"}]}],
    ids=str,
)
def test_a_file_that_was_tampered_with_is_refused_and_fills_no_memory(bad, tmp_path):
    folder = make_run(tmp_path / "run", shares={"natural": 0.9})
    data = json.loads((folder / "evaluation.json").read_text())
    del data["checksum"]  # which would be all that is read
    if "attacks" in bad:
        data["attacks"][0] |= bad["attacks"][0]
    else:
        data |= bad
    (folder / "evaluation.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"evaluation\.json"):
        load_run_results(folder)
    with pytest.raises(DataError, match=r"evaluation\.json' is not an evaluation\.json"):
        deat.load_evaluation(str(folder / "evaluation.json"))
