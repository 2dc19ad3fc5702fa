"""Damaged or edited results are never believed: evaluation.json, the resume log."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import deat
from deat.errors import DataError
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import load_evaluation
from helpers.eval_attackers import Fragile, Interrupted
from helpers.nets import conv_net, images

OPTIONS: dict[str, Any] = {"threat": "linf:0.1", "block": 4, "sanity": False}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An evaluation of twelve images."""
    path = tmp_path / "evaluation.json"
    evaluate(conv_net(), images(12), attacks=["natural", "pgd-2"], save=path, **OPTIONS)
    return path


def without_checksum(file: Path) -> dict[str, Any]:
    """The content as an older version wrote it."""
    data: dict[str, Any] = json.loads(file.read_text())
    del data["checksum"]
    return data


@pytest.mark.promise("P131")
def test_any_change_of_an_evaluation_is_detected(file: Path) -> None:
    text, draw = file.read_text(), Random(0)
    saved = load_evaluation(file)
    refused = 0
    for _ in range(200):
        place = draw.randrange(len(text))
        file.write_text(text[:place] + chr(ord(text[place]) ^ 1 << draw.randrange(7)) + text[place + 1 :])
        try:
            assert load_evaluation(file) == saved  # as where white space became other white space
        except (DataError, UnicodeDecodeError):
            refused += 1
    assert refused > 150


@pytest.mark.promise("P131")
@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["attacks"][1].update(correct="12:fff0"),
        lambda data: data["accuracy"].update({"pgd-2": 1.0}),
        lambda data: data["accuracy"].update({"pgd-50": 0.9}),
        lambda data: data.update(images=13),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_also_without_a_checksum(file: Path, edit: Any) -> None:
    data = without_checksum(file)
    file.write_text(json.dumps(data))
    assert load_evaluation(file).num_images == 12
    edit(data)
    file.write_text(json.dumps(data))
    with pytest.raises(DataError, match=r"edited.*evaluate again"):
        load_evaluation(file)


@pytest.mark.promise("P132")
def test_damaged_lines_of_a_resume_log_are_dropped_and_evaluated_again(tmp_path: Path) -> None:
    log, draw = tmp_path / "log.jsonl", Random(1)
    net, data = conv_net(), images(12)
    expected = evaluate(net, data, attacks=["fgsm", "pgd-2"], **OPTIONS)
    with pytest.raises(Interrupted):
        evaluate(net, data, attacks=[Fragile("fgsm"), Fragile("pgd-2", 2)], resume_log=log, **OPTIONS)
    lines = log.read_bytes()
    for _ in range(40):
        damaged = bytearray(lines)
        damaged[draw.randrange(len(lines))] ^= 1 << draw.randrange(8)
        log.write_bytes(damaged)
        found = evaluate(net, data, attacks=[Fragile("fgsm"), Fragile("pgd-2")], resume_log=log, **OPTIONS)
        assert found.verdicts == expected.verdicts


@pytest.mark.promise("P132")
@pytest.mark.parametrize(
    "edit",
    [
        lambda entry: entry.update({"corrict": entry.pop("correct")}),
        lambda entry: entry.update(correct=[1, 0]),
        lambda entry: entry.update(correct=None),
        lambda entry: entry.update(block="0"),
        lambda entry: entry.update(felled=[]),
        lambda entry: entry.pop("images"),
    ],
)
def test_lines_of_older_versions_with_other_keys_or_types_are_dropped(tmp_path: Path, edit: Any) -> None:
    log, net, data = tmp_path / "log.jsonl", conv_net(), images(12)
    with pytest.raises(Interrupted):
        evaluate(net, data, attacks=[Fragile("fgsm"), Fragile("pgd-2", 2)], resume_log=log, **OPTIONS)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        del entry["checksum"]
        edit(entry)
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = evaluate(net, data, attacks=["fgsm", "pgd-2"], resume_log=log, **OPTIONS)
    assert found.verdicts == evaluate(net, data, attacks=["fgsm", "pgd-2"], **OPTIONS).verdicts


@pytest.mark.promise("P133")
def test_weights_of_another_run_are_not_evaluated_as_those_of_a_run(tmp_path: Path) -> None:
    data = deat.load_data("digits").train
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        net = deat.build_model("small", num_classes=10, in_channels=1, image_size=8)
        result = deat.fit(net, data, threat="linf:0.1", epochs=1, seed=seed, device="cpu", val=0.1)
        result.save(tmp_path / name)
    assert deat.load_run(tmp_path / "a", model=net).path == tmp_path / "a"
    (tmp_path / "a/best/model.safetensors").write_bytes((tmp_path / "b/best/model.safetensors").read_bytes())
    with pytest.raises(deat.errors.CheckpointError, match="not the weights that this run wrote"):
        deat.load_run(tmp_path / "a", model=net)


@pytest.mark.promise("P134")
def test_an_edited_record_is_reported(tmp_path: Path) -> None:
    net = deat.build_model("small", num_classes=10, in_channels=1, image_size=8)
    result = deat.fit(net, deat.load_data("digits").train, threat="linf:0.1", epochs=1, device="cpu", val=0.1)
    result.save(tmp_path / "a")
    file = tmp_path / "a/run.json"
    file.write_text(file.read_text().replace('"eps": 0.1', '"eps": 0.05'))
    with pytest.warns(RuntimeWarning, match=r"was changed after deat wrote it"):
        assert deat.load_run(tmp_path / "a", model=net).threat.eps == 0.05
