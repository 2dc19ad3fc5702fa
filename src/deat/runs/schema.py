"""run.json read back: what a run says of itself, believed as data and never as code."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from deat.checkpoint.state import build_dataclass
from deat.data.statistics import ChannelStats
from deat.errors import CheckpointError, DeatError, UsageError, truncate_text
from deat.models import Normalize
from deat.models.weights import find_weights_file
from deat.runs.request import Request, Run
from deat.runs.run_dir import RUN_FILE, read_raw_record
from deat.threat import parse_threat
from deat.training.config import TrainConfig, from_recorded_names
from deat.training.messages import format_code_flag
from deat.training.model_checks import hash_weights
from deat.training.resume_checks import different_config_error
from deat.utils.numbers import is_int_at_least
from deat.utils.paths import anonymize_paths, restore_user_paths
from deat.utils.user_code import is_file_spec

MAX_RECORD_BYTES = 16 << 20
T = TypeVar("T", Request, TrainConfig)


@dataclass(frozen=True)
class RunRecord:
    """A run's request, settings and options; its network's name, its threat model, classes and normalisation."""

    request: Request
    config: TrainConfig
    options: dict[str, Any]
    model: str
    norm: str
    eps: float
    classes: tuple[str, ...] = ()
    statistics: ChannelStats | None = None
    num_train_images: int = 0
    """The number of its training images, without those that were held out; 0 where it does not say."""

    def with_original_split(self, run: Run) -> Run:
        """The run with as many training images as it began with, where its data has got a val/ of its own since."""
        images = len(run.splits.train)
        if run.dataset_val is None or not 0 < self.num_train_images < images:
            return run
        return replace(run, request=replace(run.request, held_out=images - self.num_train_images))


DAMAGED_RECORD_HINT = (
    "Put it back from a copy, or train again into another --out; weights in best/ and last/ can be judged as files, "
    "with --data and --model."
)
"""What to do about a record that is damaged."""


def read_record(folder: Path) -> RunRecord:
    """The record of a run's folder; whatever is not of the expected kind is refused by name."""
    file = folder / RUN_FILE
    try:
        if file.stat().st_size > MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        found = json.loads(file.read_text(encoding="utf-8"))
        request, settings = _build_known_fields(Request, found["request"]), _parse_config(found.get("settings", {}))
        norm, eps = found["threat"]["norm"], found["threat"]["eps"]
        parse_threat(f"{norm}:{eps!r}")
        options = found.get("options", {})
        if not isinstance(found["model"]["name"], str) or not isinstance(options, dict):
            raise TypeError("its model or its options have another form")
        data = found.get("data", {})
        classes, statistics = tuple(map(str, data.get("classes", ()))), _parse_statistics(data)
        trained_on = data["train"] if is_int_at_least(data.get("train"), 1) else 0
        model = found["model"]["name"]
        return RunRecord(request, settings, options, model, str(norm), float(eps), classes, statistics, trained_on)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, DeatError) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a run's record ({_format_error(error)}). {DAMAGED_RECORD_HINT}"
        ) from None


def confirm_code(what: str, recorded: str, given_spec: str | None) -> str:
    """The name of a method or model; one that is code must be given by the user: a file's word is not enough."""
    if given_spec is not None:
        return given_spec
    if is_file_spec(recorded):
        raise UsageError(
            f"this run's {what} is {recorded!r}, which is code. Say so yourself: {format_code_flag(what, recorded)}"
        )
    return recorded


def recorded_data_root(request: Request) -> str | None:
    """The data root that a record names, as a path of this user's."""
    return restore_user_paths(request.data_root) if request.data_root else None


def recorded_init(folder: Path) -> str | None:
    """The weights that a run's record says it began with, as they are recorded."""
    found = (read_raw_record(folder) or {"request": {}})["request"].get("init")
    return found if isinstance(found, str) else None


def check_init_weights(folder: Path, init: str | None) -> None:
    """Refuse weights to start from that are not those which the run in a folder began with, by name and content."""
    before = recorded_init(folder)
    if _resolve_weights_path(before) != _resolve_weights_path(init):
        names = [json.dumps(anonymize_paths(name)) if name else "none" for name in (before, init)]
        raise different_config_error(folder, [f"init: {names[0]}, now {names[1]}"])
    held = recorded_init_hash(folder)
    if init and held and _weights_exist(init) and hash_weights(init) != held:
        raise UsageError(
            f"{init!r} holds other weights than the run in {str(folder)!r} began with. Put those back, or start a run "
            "of its own (--out). A run without a baseline needs them no more: `deat resume` goes on with it."
        )


def _weights_exist(weights: str) -> bool:
    try:
        return find_weights_file(Path(weights)).is_file()
    except CheckpointError:  # a run's folder that is begun anew has none for a while
        return False


def recorded_init_hash(folder: Path) -> str | None:
    """The hash of the weights that a run's record says it began with; older ones have none."""
    found = (read_raw_record(folder) or {}).get("digest_of_init")
    return found if isinstance(found, str) else None


def _resolve_weights_path(weights: str | None) -> Path | None:
    return Path(restore_user_paths(weights)).expanduser().resolve() if weights else None


def _parse_config(recorded: Any) -> TrainConfig:
    settings = from_recorded_names(recorded)
    milestones = settings.get("milestones")  # JSON has no tuples
    return _build_known_fields(
        TrainConfig, {**settings, "milestones": tuple(milestones)} if isinstance(milestones, list) else settings
    )


def _parse_statistics(data: dict[str, Any]) -> ChannelStats | None:
    if data.get("normalized_by") is None:
        return None
    mean, std = data["normalized_by"]
    Normalize(mean, std)  # which refuses what is none
    return ChannelStats(tuple(map(float, mean)), tuple(map(float, std)), int(data.get("measured_on", 0)))


def _build_known_fields(kind: type[T], found: Any) -> T:
    """A dataclass from a record's account of it; what it does not know was written by another deat."""
    known = {field.name for field in fields(kind)}
    return build_dataclass(kind, {name: value for name, value in found.items() if name in known})


def _format_error(error: Exception) -> str:
    return truncate_text(f"it has no {error}" if isinstance(error, KeyError) else str(error))
