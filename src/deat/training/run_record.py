"""A training's result as the folder of a run: what it records of the training, and how it is written."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deat.data import Augment
from deat.errors import CheckpointError, UsageError
from deat.models.normalize import Normalized
from deat.models.weights import unwrap_model
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel
from deat.training.epoch_records import write_records
from deat.utils.json_checksum import add_checksum
from deat.utils.safe_write import write_atomic, write_json
from deat.utils.safetensors_files import Tensors, encode_tensors, read_weights_hash
from deat.version import get_versions

if TYPE_CHECKING:
    from deat.training.train_result import TrainResult
    from deat.training.trainer import Trainer

RUN_FILE = "run.json"
HISTORY_FILE = "history.jsonl"
SUMMARY_FILE = "report.md"
WEIGHTS_FILE = "model.safetensors"
BEST_WEIGHTS_KEY = "best_weights"
"""The key in run.json of the hash of the best epoch's weights, as their file has it."""
UNNAMED_DATA = "unnamed data"
"""The name in records of data that was passed in Python."""


def describe_training(trainer: "Trainer") -> dict[str, Any]:
    """Describe a training for run.json: settings, method, network, data, threat model and machine.

    Args:
        trainer: The trainer.

    Returns:
        JSON. The network has the name of its class, and data without a name `UNNAMED_DATA`.
    """
    model, source, engine = unwrap_model(trainer.model), trainer.train, trainer.engine
    network = model.net if isinstance(model, Normalized) else model
    augment = getattr(source, "augment", None)
    classes = getattr(getattr(source, "images", None), "classes", range(source.num_classes))
    return {
        "settings": trainer.config.describe(),
        "method": trainer.method.describe(),
        "schedule": repr(trainer.schedule),
        "model": {"name": type(network).__name__, "parameters": trainer.num_parameters},
        "data": {
            "name": trainer.data_name or UNNAMED_DATA,
            "digest": getattr(source, "digest", None),
            "train": source.num_examples,
            "held_out": trainer.validator.source.num_examples if trainer.validator else 0,
            "classes": list(map(str, classes)),
            "image": list(source.shape),
            "normalized_by": _get_normalization(model),
            "measured_on": 0,
            "augmented_by": asdict(augment) if isinstance(augment, Augment) else None,
            **describe_train_part(trainer),
        },
        "threat": trainer.threat.describe(),
        **describe_task(trainer.task),
        "device": engine.device.type,
        "precision": engine.precision,
        "engine": engine.name,
        "threads": trainer.threads,
        "processes": trainer.distributed.size,
    }


def describe_train_part(trainer: "Trainer") -> dict[str, Any]:
    """Describe the choice of training images as a part of a record; older records do not name it."""
    return {} if trainer.n_train is None else {"n_train": trainer.n_train}


def describe_task(task: Task) -> dict[str, Any]:
    """Describe a task as a part of a record; classification is the default, and older records do not name it."""
    return {} if task == CLASSIFICATION else {"task": task.describe()}


def _get_normalization(model: Any) -> tuple[list[float], list[float]] | None:
    if not isinstance(model, Normalized):
        return None
    return model.normalize.mean.flatten().tolist(), model.normalize.std.flatten().tolist()


def format_weights_note(num_epochs: int, *, averaged: bool = False) -> str:
    """Return what a file of weights says of itself: after how many epochs it was saved, and whether it is an average."""
    note = {"epoch": num_epochs, "step": 0, **({"averaged": True} if averaged else {})}
    return json.dumps(note)


def write_result_folder(result: "TrainResult", folder: Path, last: Tensors | None) -> None:
    """Write a result as the folder of a run; run.json comes last, so that a part of it is no run.

    Args:
        result: The result, whose record is that of `describe_training`.
        folder: A new or empty folder.
        last: The weights of the last epoch; None where they are gone.

    Raises:
        UsageError: If the folder has content.
        CheckpointError: If it cannot be written.
    """
    record = {"request": make_python_request(result.record), **result.record, "versions": get_versions()}
    summary = f"# {record['method']['name']} on {record['data']['name']}\n\nSaved from Python, by TrainResult.save.\n"
    summary += "".join(f"\n* {note}\n" for note in result.notes)
    weights: dict[str, tuple[str, Tensors]] = {}
    weights["best"] = (format_weights_note(result.best.epoch + 1, averaged=result.best.averaged), result.best.weights)
    note = format_weights_note(result.history[-1].epoch + 1)
    weights |= {which: (note, t) for which, t in (("last", last), ("averaged", result.averaged)) if t is not None}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{str(folder)!r} exists already and is not empty. Save to a new folder.")
        for which, (note, tensors) in weights.items():
            (folder / which).mkdir(parents=True, exist_ok=True)
            write_atomic(folder / which / WEIGHTS_FILE, encode_tensors(tensors, note))
        write_records(folder / HISTORY_FILE, result.history)
        write_atomic(folder / SUMMARY_FILE, summary.encode())
        write_run_json(folder, {**record, BEST_WEIGHTS_KEY: read_weights_hash(folder / "best" / WEIGHTS_FILE)})
    except OSError as error:
        raise CheckpointError(f"cannot write to {str(folder)!r}: {error.strerror}. Save to another folder.") from None


def write_run_json(folder: Path, record: Mapping[str, Any]) -> None:
    """Write run.json with a checksum of its content.

    Raises:
        OSError: The file cannot be written.
    """
    write_json(folder / RUN_FILE, add_checksum(dict(record)), make_folder=False)


def request_threat(threat: ThreatModel | Mapping[str, Any]) -> dict[str, Any]:
    """Return a threat model, or its description, as a request has it: norm and radius, or a union's text and rule."""
    description = threat.describe() if isinstance(threat, ThreatModel) else threat
    if "threats" in description:
        text = "+".join(f"{ball['norm']}:{ball['eps']!r}" for ball in description["threats"])
        return {"threat": text, "threat_rule": description["rule"]}
    return {"norm": description["norm"], "eps": description["eps"]}


def make_python_request(record: Mapping[str, Any]) -> dict[str, Any]:
    """Make the request in run.json of a training in Python, which has no command line.

    Args:
        record: What `describe_training` returns.

    Returns:
        The request. The network is empty, since it is code that is to be named again, and so is data without a name.
    """
    data = record["data"]
    return {
        "data": "" if data["name"] == UNNAMED_DATA else data["name"],
        "model": "",
        "method": record["method"]["name"],
        **request_threat(record["threat"]),
        "normalize": "data" if data["normalized_by"] else "none",
    }
