"""run.json read back: what a run says of itself, believed as data and never as code."""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from deat.checkpoint.state import built
from deat.data.statistics import Statistics
from deat.errors import CheckpointError, DeatError, UsageError, shortened
from deat.models import Normalize
from deat.models.weights import locate
from deat.runs.request import Request, Run
from deat.runs.run_dir import RUN, held_record
from deat.threat import threat as find_threat
from deat.training.config import Settings
from deat.training.messages import flag
from deat.training.model_checks import content_of
from deat.training.resume_checks import other_configuration
from deat.utils.numbers import is_whole
from deat.utils.paths import at_home, tidy
from deat.utils.user_code import is_file_spec

LARGEST = 16 << 20
T = TypeVar("T", Request, Settings)


@dataclass(frozen=True)
class Record:
    """A run's request, settings and options; its network's name, its threat model, classes and normalisation."""

    request: Request
    settings: Settings
    options: dict[str, Any]
    model: str
    norm: str
    eps: float
    classes: tuple[str, ...] = ()
    statistics: Statistics | None = None
    trained_on: int = 0
    """The number of its training images, without those that were held out; 0 where it does not say."""

    def as_begun(self, run: Run) -> Run:
        """The run with as many training images as it began with, where its data has got a val/ of its own since."""
        images = len(run.corpus.train)
        if run.own_val is None or not 0 < self.trained_on < images:
            return run
        return replace(run, request=replace(run.request, held_out=images - self.trained_on))


REPAIR = (
    "Put it back from a copy, or train again into another --out; weights in best/ and last/ can be judged as files, "
    "with --data and --model."
)
"""What to do about a record that is damaged."""


def read_record(folder: Path) -> Record:
    """The record of a run's folder; whatever is not of the expected kind is refused by name."""
    file = folder / RUN
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError("it is too large")
        found = json.loads(file.read_text(encoding="utf-8"))
        request, settings = _built(Request, found["request"]), _settings(found.get("settings", {}))
        norm, eps = found["threat"]["norm"], found["threat"]["eps"]
        find_threat(f"{norm}:{eps!r}")
        options = found.get("options", {})
        if not isinstance(found["model"]["name"], str) or not isinstance(options, dict):
            raise TypeError("its model or its options have another form")
        data = found.get("data", {})
        classes, statistics = tuple(map(str, data.get("classes", ()))), _statistics(data)
        trained_on = data["train"] if is_whole(data.get("train"), 1) else 0
        model = found["model"]["name"]
        return Record(request, settings, options, model, str(norm), float(eps), classes, statistics, trained_on)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, DeatError) as error:
        raise CheckpointError(f"{str(file)!r} is not a run's record ({_shown(error)}). {REPAIR}") from None


def confirmed(what: str, recorded: str, given: str | None) -> str:
    """The name of a method or model; one that is code must be given by the user: a file's word is not enough."""
    if given is not None:
        return given
    if is_file_spec(recorded):
        raise UsageError(f"this run's {what} is {recorded!r}, which is code. Say so yourself: {flag(what, recorded)}")
    return recorded


def recorded_root(request: Request) -> str | None:
    """The data root that a record names, as a path of this user's."""
    return at_home(request.data_root) if request.data_root else None


def started_from(folder: Path) -> str | None:
    """The weights that a run's record says it began with, as they are recorded."""
    found = (held_record(folder) or {"request": {}})["request"].get("init")
    return found if isinstance(found, str) else None


def check_start(folder: Path, given: str | None) -> None:
    """Refuse weights to start from that are not those which the run in a folder began with, by name and content."""
    before = started_from(folder)
    if _place(before) != _place(given):
        names = [json.dumps(tidy(name)) if name else "none" for name in (before, given)]
        raise other_configuration(folder, [f"init: {names[0]}, now {names[1]}"])
    held = digest_of_start(folder)
    if given and held and _is_there(given) and content_of(given) != held:
        raise UsageError(
            f"{given!r} holds other weights than the run in {str(folder)!r} began with. Put those back, or start a run "
            "of its own (--out). A run without a baseline needs them no more: `deat resume` goes on with it."
        )


def _is_there(weights: str) -> bool:
    try:
        return locate(Path(weights)).is_file()
    except CheckpointError:  # a run's folder that is begun anew has none for a while
        return False


def digest_of_start(folder: Path) -> str | None:
    """The hash of the weights that a run's record says it began with; older ones have none."""
    found = (held_record(folder) or {}).get("digest_of_init")
    return found if isinstance(found, str) else None


def _place(weights: str | None) -> Path | None:
    return Path(at_home(weights)).expanduser().resolve() if weights else None


def _settings(found: Any) -> Settings:
    listed = found.get("milestones")  # JSON has no tuples
    return _built(Settings, {**found, "milestones": tuple(listed)} if isinstance(listed, list) else found)


def _statistics(data: dict[str, Any]) -> Statistics | None:
    if data.get("normalized_by") is None:
        return None
    mean, std = data["normalized_by"]
    Normalize(mean, std)  # which refuses what is none
    return Statistics(tuple(map(float, mean)), tuple(map(float, std)), int(data.get("measured_on", 0)))


def _built(kind: type[T], found: Any) -> T:
    """A dataclass from a record's account of it; what it does not know was written by another deat."""
    known = {field.name for field in fields(kind)}
    return built(kind, {name: value for name, value in found.items() if name in known})


def _shown(error: Exception) -> str:
    return shortened(f"it has no {error}" if isinstance(error, KeyError) else str(error))
