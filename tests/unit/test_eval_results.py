"""How sure an accuracy is, and evaluation.json."""

import json
from dataclasses import replace

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
    unpack_bits,
    unpack_labels,
)
from deat.evaluation.sanity import Flag
from helpers.eval_attackers import Own
from helpers.eval_nets import THREAT, digits, robust, softmax
from helpers.nets import conv_net, images


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
def test_wilson_s_interval_has_the_known_values(hits, n, low, high):
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


def made() -> Evaluation:
    """An evaluation put together by hand: three classes, one of them without an image."""
    results = [
        AttackResult("natural", [True, True, True, False], 0, 0.5, 4, 0),
        AttackResult("fgsm", [True, False, True, False], 0, 0.7, 10, 3),
        AttackResult("pgd-20", [False, True, True, False], 2, 1.5, 67, 60),
    ]
    settings = {"cascade": False, "attacks": {}, "threat": {"norm": "linf", "eps": 0.1}, "sample": False}
    flags = [Flag("one_step_wins", "what <was> | seen", "what to do")]
    return Evaluation(results, [0, 0, 2, 2], ["a", "b", "c"], settings, flags)


def test_accuracies_intervals_and_additions_are_those_computed_by_hand():
    found = made()
    assert found.verdicts["worst"] == [False, False, True, False]
    assert found.accuracy == {"natural": 0.75, "fgsm": 0.5, "pgd-20": 0.5, "worst": 0.25}
    assert found.intervals == {
        name: wilson_interval(hits, 4) for name, hits in zip(found.accuracy, (3, 2, 2, 1), strict=True)
    }
    assert found.newly_fooled == {"natural": 1, "fgsm": 1, "pgd-20": 1}


def test_an_evaluation_shows_itself_in_one_line_with_accuracies_and_flags():
    found = made()
    assert repr(found) == (
        "Evaluation(4 images: natural 75.00%, fgsm 50.00%, pgd-20 50.00%, worst 25.00%; flags: one_step_wins)"
    )
    assert "True" not in repr(found.results)
    assert "flags: none)" in repr(replace(found, flags=[]))
    assert "flags: not checked)" in repr(replace(found, flags=[], settings={**found.settings, "sanity": False}))


def test_per_class_counts_have_their_own_intervals_and_a_class_without_images_knows_nothing():
    found = made()
    assert found.per_class() == {
        "a": (0, 2, wilson_interval(0, 2)),
        "b": (0, 0, (0.0, 1.0)),
        "c": (1, 2, wilson_interval(1, 2)),
    }
    assert found.per_class("natural") == {
        "a": (2, 2, wilson_interval(2, 2)),
        "b": (0, 0, (0.0, 1.0)),
        "c": (1, 2, wilson_interval(1, 2)),
    }


def test_per_class_counts_sum_to_the_whole():
    found = evaluate(robust(), digits(200), threat=THREAT, attacks=["natural", "pgd-5"], sanity=False)
    assert list(found.per_class()) == [str(c) for c in range(10)]
    for name in ("natural", "pgd-5", "worst"):
        rows = found.per_class(name).values()
        assert sum(hits for hits, _, _ in rows) == sum(found.verdicts[name])
        assert sum(count for _, count, _ in rows) == 200


def test_classes_have_the_data_s_own_names():
    test = deat.load_data("digits").test
    named = deat.data.ImageSet(test.images, test.labels, tuple(f"digit {c}" for c in range(10)))
    found = evaluate(robust(), named, threat=THREAT, attacks=["natural"], n=50, sanity=False)
    assert list(found.per_class()) == [f"digit {c}" for c in range(10)]


def test_an_evaluation_read_back_from_its_file_is_the_same(tmp_path):
    for number, found in enumerate([made(), evaluate(robust(), digits(30), threat=THREAT, n=20, block=8)]):
        path = tmp_path / "deep" / f"{number}.json"
        found.save(path)
        again = load_evaluation(path)
        assert again == found
        assert again.as_json() == found.as_json()
        assert len(list(path.parent.iterdir())) == number + 1


def test_the_file_is_strict_json_with_everything_a_reader_needs(tmp_path):
    found = evaluate(robust(), digits(30), threat=THREAT, attacks=["natural", "pgd-3", Own("mine")], n=20, block=8)
    found.save(tmp_path / "evaluation.json")
    text = (tmp_path / "evaluation.json").read_text()
    told = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert json.dumps(found.as_json(), allow_nan=False)
    assert (told["schema"], told["images"]) == (SCHEMA_VERSION, 20)
    assert unpack_labels(told["labels"], 20) == digits(20)[1].tolist()
    assert told["settings"]["threat"] == {"norm": "linf", "eps": 0.15}
    settings = told["settings"]
    expected = {"seed": 0, "block": 8, "cascade": False, "sample": True, "available": 30}
    assert {name: settings[name] for name in expected} == expected
    assert settings["attacks"]["pgd-3"]["steps"] == 3
    assert settings["attacks"]["pgd-3"]["alpha"] == pytest.approx(0.0375)
    assert settings["versions"]["torch"] == torch.__version__
    for entry in told["attacks"]:
        assert unpack_bits(entry["correct"]) == found.verdicts[entry["name"]]
        assert min(entry["seconds"], entry["forwards"]) > 0
    assert told["attacks"][1]["backwards"] > 0
    for name, rows in told["per_class"].items():
        assert sum(row["correct"] for row in rows.values()) == sum(found.verdicts[name])


PAIR = [float]
"""Wilson's interval."""
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
}
"""evaluation.json of schema 2: {str: kind} is an object of any names, [kind] a list of any length."""


def misfits(value, shape, at="") -> list[str]:
    """Where a value is not of a shape."""
    if isinstance(shape, dict) and isinstance(value, dict):
        known = dict.fromkeys(value, shape[str]) if str in shape else shape
        wrong = [f"{at}.{key}" for key in value.keys() ^ known.keys()]
        return wrong + [
            m for key in value.keys() & known.keys() for m in misfits(value[key], known[key], f"{at}.{key}")
        ]
    if isinstance(shape, list) and isinstance(value, list):
        return [m for i, held in enumerate(value) for m in misfits(held, shape[0], f"{at}.{i}")]
    kinds = shape if isinstance(shape, tuple) else (shape,)
    fits = object in kinds or type(value) in kinds or (value is None and None in kinds)
    return [] if fits else [at]


@pytest.mark.parametrize("net", [robust, lambda: softmax(robust())])
@pytest.mark.parametrize("cascade", [False, True])
def test_what_is_written_has_the_shape_of_its_schema(net, cascade, tmp_path):
    asked = ["natural", "fgsm", "pgd-3", "apgd-ce", Own("mine")]
    file = tmp_path / "evaluation.json"
    evaluate(net(), digits(20), threat=THREAT, attacks=asked, n=12, block=8, cascade=cascade, save=file)
    told = json.loads(file.read_text())
    assert told["schema"] == 2
    assert misfits(told, SHAPE) == []


def test_what_has_another_shape_is_seen_to():
    told = made().as_json()
    told["settings"] = {**dict.fromkeys(SETTINGS), "extra": 1}
    told["labels"], told["flags"] = [0], [{"name": "x", "seen": 3, "advice": ""}]
    found = set(misfits(told, SHAPE))
    assert {".settings.extra", ".settings.seed", ".settings.threat", ".labels", ".flags.0.seen"} <= found
    assert ".accuracy.natural" not in found


@pytest.mark.parametrize("net", [robust(), softmax(robust())])
@pytest.mark.parametrize("sanity", [False, True])
def test_a_record_says_whether_sanity_was_checked(net, sanity, tmp_path):
    found = evaluate(net, digits(20), threat=THREAT, attacks="natural", sanity=sanity, save=tmp_path / "found.json")
    assert (
        found.settings["sanity"]
        is found.sanity_checked
        is load_evaluation(tmp_path / "found.json").sanity_checked
        is sanity
    )
    assert sanity or found.flags == []
    assert made().sanity_checked, "files from before do not tell"


def test_a_record_from_python_says_what_is_known_of_model_data_device_and_images(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    found = evaluate(robust(), digits(20), threat=THREAT, attacks="natural").settings
    assert found["about"] == {"model": "Sequential", "data": "tuple"}
    assert (found["device"], found["image"]) == ("cpu", [1, 8, 8])
    told = {"data": "folder:/home/somebody/photos", "model": "mine", "epochs": 3}
    found = evaluate(robust(), digits(20), threat=THREAT, attacks="natural", about=told).settings
    assert found["about"] == {"data": "folder:~/photos", "model": "mine", "epochs": 3}


@pytest.mark.parametrize("schema", [3, 99])
def test_a_file_of_a_later_schema_is_refused_with_a_hint_to_upgrade(schema, tmp_path):
    made().save(tmp_path / "found.json")
    told = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "found.json").write_text(json.dumps({**told, "schema": schema}))
    with pytest.raises(DataError, match=rf"found\.json' has schema {schema}; this deat reads up to 2. Upgrade deat"):
        load_evaluation(tmp_path / "found.json")


LARGE = {
    "bytes": b"\xff" * 3_000_000,
    "no JSON": b"x" * 3_000_000,
    "text for a schema": json.dumps({"schema": "x" * 3_000_000}).encode(),
    "text for all": json.dumps("x" * 3_000_000).encode(),
}


@pytest.mark.parametrize("held", LARGE.values(), ids=LARGE.keys())
def test_a_file_that_is_no_evaluation_is_refused_in_one_short_line(held, tmp_path):
    (tmp_path / "e.json").write_bytes(held)
    with pytest.raises(DataError, match=r"is not an evaluation\.json that deat wrote") as refused:
        load_evaluation(tmp_path / "e.json")
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    for place in (tmp_path / "e.json", str(tmp_path)):
        with pytest.raises(DataError, match="there is no file"):
            load_evaluation(place)


@pytest.mark.parametrize("schema", [0, -1, "2", 2.0, True, None])
def test_a_file_of_no_schema_is_none_of_ours(schema, tmp_path):
    made().save(tmp_path / "found.json")
    told = json.loads((tmp_path / "found.json").read_text())
    for held in ({**told, "schema": schema}, {key: value for key, value in told.items() if key != "schema"}):
        (tmp_path / "found.json").write_text(json.dumps(held))
        with pytest.raises(DataError, match=r"is not an evaluation\.json that deat wrote"):
            load_evaluation(tmp_path / "found.json")


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "evaluation.json"
    path.write_text("old")
    made().save(path)
    assert load_evaluation(path) == made()


def test_twenty_images_give_a_wide_interval_and_a_sample_says_so():
    found = evaluate(robust(), digits(400), threat=THREAT, attacks=["natural", "pgd-3"], n=20, sanity=False)
    assert len(found.labels) == 20
    assert (found.settings["sample"], found.settings["available"]) == (True, 400)
    low, high = found.intervals["worst"]
    assert high - low > 0.25
    whole = evaluate(robust(), digits(20), threat=THREAT, attacks=["natural", "pgd-3"], n=400, sanity=False)
    assert (whole.settings["sample"], whole.settings["available"]) == (False, 20)


def test_the_record_names_the_model_by_its_weights_and_layers():
    told = [
        evaluate(net, images(4), threat=THREAT, attacks=["natural"], sanity=False).settings["model"]
        for net in (conv_net(), conv_net(), conv_net(seed=1), torch.nn.Sequential(conv_net(), torch.nn.ReLU()))
    ]
    assert told[0] == told[1]
    assert len(set(told)) == 3
