"""Folders of `deat.fit(checkpoints=...)`, which have checkpoints and no run.json, read as runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deat.checkpoint.store import find_newest_checkpoint
from deat.errors import CheckpointError
from deat.models.saved_normalization import NORMALIZATION_NAMES, split_normalization
from deat.training.checkpoints import load_checkpoint
from deat.training.epoch_records import EpochStats
from deat.training.run_record import UNNAMED_DATA, make_python_request

UNNAMED_NETWORK = "unnamed network"
"""The name in records of a network that was passed in Python and whose class is not known."""


@dataclass(frozen=True)
class CheckpointFolder:
    """What the newest checkpoint in a folder says of its training.

    Attributes:
        record: The content that run.json would have; names of the data and the network are not known.
        history: The statistics of each epoch.
        seconds: The duration of training, without validation.
    """

    record: dict[str, Any]
    history: list[EpochStats]
    seconds: float


def read_checkpoint_folder(folder: Path) -> CheckpointFolder:
    """Read the newest checkpoint in a folder.

    Args:
        folder: A folder with checkpoints.

    Raises:
        CheckpointError: No checkpoint is valid.
    """
    search = find_newest_checkpoint(folder)
    if search.newest is None:
        raise CheckpointError(f"no checkpoint in {str(folder)!r} is valid: {'; '.join(search.problems)}.")
    checkpoint = load_checkpoint(search.newest)
    try:
        state, record = checkpoint["state"], _make_record(checkpoint)
        return CheckpointFolder(record, list(state["history"]), float(state["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(search.newest)!r} is not a checkpoint of deat's ({error!r}).") from None


def _make_record(checkpoint: dict[str, Any]) -> dict[str, Any]:
    config, environment = checkpoint["config"], checkpoint["environment"]
    data = config["data"]
    normalization = split_normalization(checkpoint["state"]["model"])[1]
    record = {
        "settings": config["settings"],
        "method": config["method"],
        "model": {"name": UNNAMED_NETWORK, "parameters": config["model"]["parameters"]},
        "data": {
            "name": UNNAMED_DATA,
            "digest": data.get("content"),
            "train": data["train"],
            "held_out": data["held_out"],
            "classes": list(map(str, range(data["classes"]))),
            "normalized_by": [normalization[name] for name in NORMALIZATION_NAMES] if normalization else None,
        },
        "threat": config["threat"],
        **({"task": config["task"]} if "task" in config else {}),
        "device": environment["device"],
        "threads": environment.get("threads"),
        "processes": environment.get("processes"),
        "versions": checkpoint["versions"],
    }
    return {"request": make_python_request(record), **record}
