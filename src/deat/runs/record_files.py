"""What run.json and bench.json hold: the files' names, their keys, and how they are read, checked and written.

run.json describes one run: the request, what it was resolved to, and whether it can be resumed exactly
(`make_run_record`). bench.json describes a grid of runs (`BenchRecord`).
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from deat.checkpoint.encoding import build_dataclass
from deat.data.channel_stats import ChannelStats
from deat.data.csv_tables import TableEncoding
from deat.errors import CheckpointError, DeatError
from deat.methods.paper_vs_released_rules import CURRENT_RULE_SET_NAMES
from deat.models import Normalize
from deat.runs.resolve_request import Request, Run
from deat.tasks import CLASSIFICATION, Task, build_task
from deat.threat import Linf, ThreatModel, build_threat
from deat.training.config import TrainConfig, from_recorded_names
from deat.training.initial_weights import hash_weights
from deat.training.resume_checks import collect_resume_config, hash_json, list_inexactness_reasons
from deat.training.run_record import HISTORY_FILE as HISTORY_FILE
from deat.training.run_record import RUN_FILE as RUN_FILE
from deat.training.run_record import SUMMARY_FILE as SUMMARY_FILE
from deat.training.run_record import WEIGHTS_FILE as WEIGHTS_FILE
from deat.training.run_record import describe_training, write_run_json
from deat.training.trainer import Trainer
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.json_checksum import is_unchanged
from deat.utils.numbers import is_int_at_least
from deat.utils.safe_read import read_plain_text
from deat.utils.safe_write import write_json
from deat.utils.text import truncate_text
from deat.version import get_versions

TIMING_FILE = "timing.jsonl"
WATCH_FILE = "watch.jsonl"
FAILURE_FILE = "failure.json"
SCORES_FILE = "scores.json"
SHARED_CONFIG_FILE = "config.json"
"""What a shared run has beside run.json; it says whose epoch its weights are."""
RECORD_FILES = {RUN_FILE, HISTORY_FILE, TIMING_FILE, WATCH_FILE, FAILURE_FILE, SCORES_FILE, SUMMARY_FILE}
"""The records in a run's folder."""
EpochChoice = Literal["best", "last", "averaged"]
"""The epochs whose weights a run's folder has, each in a folder of this name."""
EVALUATION_FILE = "evaluation.json"
EXTRA_EVALUATION_FILES = {"last": "evaluation-last.json", "aa": "evaluation-aa.json"}
"""Evaluations that a run may have besides its main one: of its last epoch, and of AutoAttack on fewer images."""
EVALUATION_FILES = {"": EVALUATION_FILE, **EXTRA_EVALUATION_FILES}
"""Every evaluation of a run, by its name in the row's evaluation plan."""
BENCH_FILE = "bench.json"
MAX_RECORD_BYTES = 16 << 20
DAMAGED_RECORD_HINT = (
    "Put it back from a copy, or train again into another --out; weights in best/ and last/ can be evaluated as files, "
    "with --data and --model."
)
"""What to do about a damaged run.json."""


def make_run_record(run: Run, trainer: Trainer) -> dict[str, Any]:
    """Describe a run for run.json: the request, what it was resolved to, and whether it can be resumed exactly.

    Args:
        run: The resolved run.
        trainer: Its trainer.

    Returns:
        Everything in run.json but the "options" of `deat train` and the "versions" of deat and its libraries.
    """
    doubts, identity, training = list_inexactness_reasons(trainer), run.identity(trainer), describe_training(trainer)
    return {
        "digest": hash_json({**collect_resume_config(trainer), **identity}),
        "digest_of_init": hash_weights(run.start) if run.start else None,
        "exact": not doubts,
        "not_exact_because": doubts,
        "code": identity["code"],
        **{name: identity[name] for name in ("plugins",) if name in identity},
        "request": {name: anonymize_paths(value) for name, value in asdict(run.request).items()},
        **training,
        "model": {**training["model"], "name": anonymize_paths(run.model_name)},
        "data": {
            **training["data"],
            **identity["images"],
            "normalized_by": run.normalization,
            "measured_on": run.statistics.images if run.statistics else 0,
            "augmented_by": asdict(run.augment) if run.augment else None,
            **({"table": asdict(run.splits.table)} if run.splits.table else {}),
        },
        "watch": identity["watch"],
    }


def write_run_record(folder: Path, record: dict[str, Any]) -> None:
    """Write run.json with the versions of deat and its libraries.

    Raises:
        OSError: The file cannot be written.
    """
    write_run_json(folder, {**record, "versions": get_versions()})


def read_run_json(folder: Path) -> Any:
    """Read run.json without checking what it holds; a rule set has today's name.

    Raises:
        OSError, ValueError, RecursionError: The file cannot be read, or is not JSON.
    """
    record = json.loads(read_plain_text(folder / RUN_FILE))
    if isinstance(record, dict):
        _use_current_rule_set_name(record.get("request"))
    return record


def describe_record_change(folder: Path) -> str:
    """Say that run.json is not as deat wrote it; empty if it is, cannot be read, or is older than its checksum."""
    try:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(record, dict) or is_unchanged(record):
        return ""
    return (
        f"{str(folder / RUN_FILE)!r} was changed after deat wrote it: its checksum does not match. The data, the network and "
        "the threat model are those that it names now."
    )


def _use_current_rule_set_name(settings: Any) -> None:
    """Give the rule set in a part of a record the name that it has today."""
    if isinstance(settings, dict) and isinstance(name := settings.get("rules"), str):
        settings["rules"] = CURRENT_RULE_SET_NAMES.get(name, name)


def read_raw_record(folder: Path) -> dict[str, Any] | None:
    """Read run.json as a dict; None where it is missing or is not a run's record."""
    try:
        record = read_run_json(folder)
    except (OSError, ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and {"request", "method", "versions"} <= record.keys()
    return record if is_record and isinstance(record["request"], dict) else None


def recorded_init(folder: Path) -> str | None:
    """The initial weights that run.json names, as they are recorded."""
    init = (read_raw_record(folder) or {"request": {}})["request"].get("init")
    return init if isinstance(init, str) else None


def recorded_init_hash(folder: Path) -> str | None:
    """The hash of the initial weights in run.json; older records have none."""
    digest = (read_raw_record(folder) or {}).get("digest_of_init")
    return digest if isinstance(digest, str) else None


def is_trained_with_code(folder: Path, code: dict[str, str]) -> bool:
    """Whether a run was trained with this version of the user's files; True if run.json does not record it."""
    try:
        return bool(read_run_json(folder).get("code", code) == code)
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # a damaged record is reported where it is read in full


def check_run_format(record: Any) -> None:
    """Check the parts of run.json that reports read.

    Raises:
        KeyError, TypeError: A part is missing, or of another type.
    """
    _check_field_types(record, dict.fromkeys(("request", "settings", "method", "model", "data", "threat"), dict))
    _check_field_types(record["settings"], {"seed": int, "epochs": int, "batch_size": int})
    for part in (record["data"], record["model"], record["method"]):
        _check_optional_types(part, {"name": str, "schedule": dict, "play": dict, "ascent": dict})
    _check_optional_types(record["threat"], {"eps": float | int, "norm": str})
    _check_optional_types(record["settings"], {"val_attack": str})
    _check_optional_types(record, {"processes": int})


def _check_optional_types(record: dict[str, Any], field_types: dict[str, Any]) -> None:
    """Check the types of the fields that there are."""
    _check_field_types(record, {name: kind for name, kind in field_types.items() if record.get(name) is not None})


def _check_field_types(record: Any, field_types: dict[str, Any]) -> None:
    for name, kind in field_types.items():
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is {record[name]!r}")


@dataclass(frozen=True)
class RunRecord:
    """run.json, as far as a run is resumed or evaluated by it. Nothing in it is run as code."""

    request: Request
    config: TrainConfig
    options: dict[str, Any]
    """The flags of `deat train` that a resumed run keeps."""
    model: str
    norm: str
    eps: float
    classes: tuple[str, ...] = ()
    statistics: ChannelStats | None = None
    num_train_images: int = 0
    """The number of its training images, without those that were held out; 0 where it does not say."""
    image_shape: tuple[int, ...] = ()
    """Channels, height and width of an image; empty where it does not say."""
    threat: ThreatModel = field(default_factory=Linf)
    """The threat model, with the box, scale and mutable features of the data."""
    task: Task = CLASSIFICATION
    """What outputs and labels mean."""
    table: TableEncoding | None = None
    """How the columns of a table became numbers; None for other data, and where it does not say."""

    def with_original_split(self, run: Run) -> Run:
        """The run with as many training images as it began with, where its data has got a val/ of its own since."""
        images = len(run.splits.train)
        if run.dataset_val is None or not 0 < self.num_train_images < images:
            return run
        return replace(run, request=replace(run.request, held_out=images - self.num_train_images))


def read_record(folder: Path) -> RunRecord:
    """Read run.json.

    Args:
        folder: A run's folder.

    Returns:
        Its record, every part checked.

    Raises:
        CheckpointError: The file cannot be read, or a part of it is missing or of another type.
    """
    file = folder / RUN_FILE
    try:
        if file.stat().st_size > MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        record = read_run_json(folder)
        return parse_record(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, DeatError) as error:
        raise CheckpointError(
            f"{str(file)!r} is not a run's record ({_format_error(error)}). {DAMAGED_RECORD_HINT}"
        ) from None


def parse_record(record: Any) -> RunRecord:
    """Check the content of run.json, every part that a run is resumed or evaluated by.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, DeatError: A part is missing, or of another type.
    """
    request, config = _build_known_fields(Request, record["request"]), _parse_config(record.get("settings", {}))
    norm, eps = record["threat"]["norm"], record["threat"]["eps"]
    threat, task = build_threat(record["threat"]), build_task(record.get("task"))
    options = record.get("options", {})
    if not isinstance(record["model"]["name"], str) or not isinstance(options, dict):
        raise TypeError("its model or its options have another form")
    data = record.get("data", {})
    return RunRecord(
        request,
        config,
        options,
        record["model"]["name"],
        str(norm),
        float(eps),
        classes=tuple(map(str, data.get("classes", ()))),
        statistics=_parse_statistics(data),
        num_train_images=data["train"] if is_int_at_least(data.get("train"), 1) else 0,
        threat=threat,
        task=task,
        table=TableEncoding.from_record(data["table"]) if data.get("table") else None,
        image_shape=tuple(side for side in data.get("image", ()) if is_int_at_least(side, 1)),
    )


T = TypeVar("T", Request, TrainConfig)


def _parse_config(settings: Any) -> TrainConfig:
    settings = from_recorded_names(settings)
    # JSON has no tuples.
    parsed = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return _build_known_fields(TrainConfig, parsed)


def _parse_statistics(data: dict[str, Any]) -> ChannelStats | None:
    if data.get("normalized_by") is None:
        return None
    mean, std = data["normalized_by"]
    Normalize(mean, std, unit_range=False)  # raises for values that are no mean and standard deviation
    return ChannelStats(tuple(map(float, mean)), tuple(map(float, std)), int(data.get("measured_on", 0)))


def _build_known_fields(kind: type[T], values: Any) -> T:
    """A dataclass from a part of a record; fields that only another version of deat knows are left out."""
    known = {field.name for field in fields(kind)}
    return build_dataclass(kind, {name: value for name, value in values.items() if name in known})


def _format_error(error: Exception) -> str:
    return truncate_text(f"it has no {error}" if isinstance(error, KeyError) else str(error))


RunStatus = Literal["waiting", "running", "done", "failed"]


class BenchRunEntry(TypedDict):
    """One run of a row in bench.json.

    The folder is relative to bench.json. `why` says what went wrong, `attempts` how often the run was started in this
    bench, and `concurrent_jobs` how many runs shared the machine at most.
    """

    seed: int
    folder: str
    status: RunStatus
    why: str | None
    concurrent_jobs: int
    attempts: int


class BenchRowEntry(TypedDict):
    """One row in bench.json: a method and a model, how they are evaluated, and the place of the row in the paper."""

    name: str
    method: str
    model: str
    paper: dict[str, str] | None
    judging: dict[str, Any]
    runs: list[BenchRunEntry]


class BenchRecord(TypedDict):
    """The whole of bench.json."""

    recipe: str
    paper: dict[str, str | None]
    settings: dict[str, Any]
    rows: list[BenchRowEntry]


def new_bench_record(recipe: str, paper_table: str, settings: dict[str, Any]) -> BenchRecord:
    """bench.json of a bench without rows."""
    return {"recipe": recipe, "paper": {"table": paper_table}, "settings": settings, "rows": []}


def new_bench_row(
    name: str, request: Request, evaluation_plan: dict[str, Any], paper: tuple[str, str] | None
) -> BenchRowEntry:
    """A row of bench.json without runs.

    Args:
        name: The row's label.
        request: What its runs train.
        evaluation_plan: How its runs are evaluated.
        paper: The table and the row in the paper, if it has this row.
    """
    return {
        "name": name,
        "method": anonymize_paths(request.method),
        "model": anonymize_paths(request.model),
        "paper": {"table": paper[0], "row": paper[1]} if paper else None,
        "judging": evaluation_plan,
        "runs": [],
    }


def new_bench_run(seed: int, folder: str) -> BenchRunEntry:
    """A run of bench.json that was not started."""
    return {"seed": seed, "folder": folder, "status": "waiting", "why": None, "concurrent_jobs": 1, "attempts": 0}


def runs_by_folder(bench: BenchRecord) -> dict[str, BenchRunEntry]:
    """The runs of all rows, by their folder."""
    return {run["folder"]: run for row in bench["rows"] for run in row["runs"]}


def read_bench_record(folder: Path) -> BenchRecord:
    """Read bench.json and check its form; a rule set has today's name.

    Raises:
        OSError, ValueError, RecursionError: The file cannot be read, or is not JSON.
        KeyError, TypeError: A part is missing, or of another type.
    """
    bench: BenchRecord = json.loads(read_plain_text(folder / BENCH_FILE))
    _check_field_types(bench, {"recipe": str, "settings": dict, "paper": dict, "rows": list})
    for settings in (bench["settings"], bench["settings"].get("set")):
        _use_current_rule_set_name(settings)
    for row in bench["rows"]:
        _check_field_types(row, {"name": str, "method": str, "model": str, "runs": list})
        for run in row["runs"]:
            _check_field_types(run, {"seed": int, "folder": str, "status": str, "concurrent_jobs": int})
    return bench


def write_bench_record(folder: Path, bench: BenchRecord) -> None:
    """Write bench.json.

    Raises:
        OSError: The file cannot be written.
    """
    write_json(folder / BENCH_FILE, bench)
