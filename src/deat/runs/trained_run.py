"""Load a run again from its folder: to resume it, or to evaluate its weights."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from deat.checkpoint.store import list_checkpoints
from deat.data.streaming import AnyImageSet
from deat.errors import CheckpointError, DataError, UsageError
from deat.models import load_weights
from deat.models.weights import find_weights_file
from deat.runs.record_files import (
    RUN_FILE,
    SHARED_CONFIG_FILE,
    WEIGHTS_FILE,
    EpochChoice,
    RunRecord,
    read_raw_record,
    read_record,
    recorded_init,
    recorded_init_hash,
)
from deat.runs.resolve_request import Request, Run, resolve_request
from deat.runs.run_dir import has_checkpoint
from deat.threat import format_threat
from deat.training.config import resolve_device
from deat.training.initial_weights import hash_weights, read_channel_stats
from deat.training.messages import format_code_flag
from deat.training.resume_checks import different_config_error
from deat.training.run_record import BEST_WEIGHTS_KEY, request_threat
from deat.utils.anonymize_paths import anonymize_paths, restore_user_paths
from deat.utils.safetensors_files import read_weights_hash
from deat.utils.user_code import is_file_spec
from deat.utils.user_paths import expand_path


@dataclass(frozen=True)
class TrainedRun:
    """A network's weights, with the run that says which network, data and threat model they are for.

    `record` is that of the run's folder; a bare file of weights has none.
    """

    run: Run
    weights: Path
    record: RunRecord | None = None


def load_trained_run(
    path: Path,
    *,
    epoch: EpochChoice = "best",
    model: str | None = None,
    data: str | None = None,
    norm: str | None = None,
    eps: float | None = None,
    threat: str | None = None,
    normalize: str | None = None,
    size: int | None = None,
    data_root: str | None = None,
    device: str = "auto",
) -> TrainedRun:
    """Load a run, or a file of weights, to evaluate it.

    A run's folder says which data, network and threat model it is for; what is given here takes their place.

    Args:
        path: A run's folder, a safetensors file, or a folder of sharded weights.
        epoch: Which of a run's weights.
        model: The network. A run whose network is code needs it again: a file's word is not enough to run code.
        data: The data set, needed for a file of weights.
        norm: Another norm, with its `eps`.
        eps: Another radius.
        threat: Norm and radius as one text, in their place, or several of them joined by "+".
        normalize: The normalisation before the network, where its weights do not say.
        size: The side that images of a folder are resized to.
        data_root: The folder of data sets.
        device: Where the network runs.

    Returns:
        The resolved run and the file of its weights, which `load_run_model` reads.

    Raises:
        CheckpointError: The path, the record or the weights are missing or damaged.
        UsageError: The run's network is code and `model` is missing, or what is given does not fit the run.

    Example:
        trained = load_trained_run(Path("runs/digits-m+deat"), epoch="last")
        net = load_run_model(trained.run, trained.weights)
    """
    if not _path_exists(path):
        raise CheckpointError(f"there is no {str(path)!r}; give a run's folder or a file of weights.")
    record = read_record(path) if (path / RUN_FILE).is_file() else None
    if record is not None:
        if not record.request.data and data is None:
            raise UsageError(
                f"{str(path)!r} was trained in Python on data without a name: add --data, with its test part."
            )
        request, weights = _recorded_request(record, model, norm, eps, threat), find_run_weights(path, epoch)
        statistics = record.statistics
    else:
        if data is None:
            raise UsageError(
                f"{str(path)!r} does not say which data it is for: add --data, and --model if not the usual."
            )
        request, weights = Request(), find_weights_file(path)
        statistics = read_channel_stats(weights)
    if normalize == "none" and read_channel_stats(weights):
        raise UsageError(
            f"{str(path)!r} was trained behind a normalisation, without which it answers wrongly: leave --normalize "
            "none out."
        )
    replaced: dict[str, Any] = {"data": data, "model": model, "norm": norm, "eps": eps, "threat": threat}
    replaced |= {"data_root": data_root, "size": size, "normalize": normalize}
    request = replace(request, **{name: value for name, value in replaced.items() if value is not None})
    run = resolve_request(
        request,
        is_recorded=data_root is None,
        statistics=statistics,
        table=record.table if record else None,
        device=device,
        val_attack="none",
    )
    return TrainedRun(run, weights, record)


def load_run_model(run: Run, weights: Path) -> nn.Module:
    """The run's network with the weights of a file, on the run's device."""
    model = run.model()
    load_weights(model, weights)
    return model.to(resolve_device(run.config.device))


def get_test_split(run: Run) -> AnyImageSet:
    """The run's test images; a DataError where its data has none."""
    if run.splits.test is None:
        raise DataError(
            f"{run.splits.name} has no test images to evaluate on. Put a folder test/ or val/ beside train/."
        )
    return run.splits.test


def load_run_to_resume(
    record: RunRecord, *, method: str | None = None, model: str | None = None, data_root: str | None = None
) -> Run:
    """Resolve a recorded request again, to resume its training.

    Args:
        record: The run's record.
        method: The method, if it is code.
        model: The network, if it is code.
        data_root: The folder of data sets, if it has changed.

    Raises:
        UsageError: The method or the network is code and is not given.
    """
    request = replace(
        record.request,
        method=_confirm_code("method", record.request.method, method),
        model=_confirm_code("model", record.request.model, model),
        data=restore_user_paths(record.request.data),
        data_root=data_root or _recorded_data_root(record.request),
        download=False,  # nothing is fetched on a file's word
        init=restore_user_paths(record.request.init) if record.request.init else None,
    )
    run = resolve_request(request, is_recorded=not data_root, statistics=record.statistics, **asdict(record.config))
    return replace(record.with_original_split(run), goes_on=True)  # the checkpoint has the weights


def has_weights_to_resume(folder: Path, init: str | None) -> bool:
    """Whether a run's folder has a checkpoint to resume from; other initial weights than the run's are refused."""
    is_started = has_checkpoint(folder)
    if is_started:
        check_init_weights(folder, init)
    return is_started


def check_init_weights(folder: Path, init: str | None) -> None:
    """Refuse initial weights that are not those which the run in a folder began with, by name and content."""
    before = recorded_init(folder)
    if _resolve_weights_path(before) != _resolve_weights_path(init):
        names = [json.dumps(anonymize_paths(name)) if name else "none" for name in (before, init)]
        raise different_config_error(folder, [f"init: {names[0]}, now {names[1]}"])
    digest = recorded_init_hash(folder)
    if init and digest and _weights_exist(init) and hash_weights(init) != digest:
        raise UsageError(
            f"{init!r} holds other weights than the run in {str(folder)!r} began with. Put those back, or start a "
            "new run (another --out). A run without a baseline does not need them: `deat resume` resumes it."
        )


def _recorded_request(
    record: RunRecord, model: str | None, norm: str | None, eps: float | None, threat: str | None
) -> Request:
    """What a record says of the data, the network and the threat model; nothing of how the run was trained."""
    name = confirm_model(record, model)
    return Request(
        data=restore_user_paths(record.request.data),
        model=name,
        **_recorded_threat(record, norm, eps, threat),
        normalize=record.request.normalize,
        data_root=_recorded_data_root(record.request),
        size=record.request.size,
        task=record.request.task,
        target=record.request.target,
    )


def _recorded_threat(record: RunRecord, norm: str | None, eps: float | None, threat: str | None) -> dict[str, Any]:
    """What a record says of the threat model, apart from what the user gives in its place."""
    if threat is not None:
        return {}
    if eps is None and norm not in (None, record.norm):
        raise UsageError(f"norm {norm!r} needs an --eps of its own: the run's is for {format_threat(record.threat)}.")
    if len(record.threat.balls) == 1 or eps is None:
        return request_threat(record.threat)
    if norm is None:
        raise UsageError(
            f"eps {eps!r} needs a --norm of its own: the run's threat model is {format_threat(record.threat)}."
        )
    return {}


def confirm_model(record: RunRecord, given_spec: str | None) -> str:
    """Return the name of a run's network; one that is code must be given by the user."""
    if given_spec is None and not record.request.model:
        raise UsageError(
            f"this run was trained in Python, and its network ({record.model}) is code. Say so yourself: --model "
            "my_file.py:NAME, or a name of deat list models; in Python model=Net()."
        )
    return _confirm_code("model", record.model, given_spec)


def shared_epoch(folder: Path) -> EpochChoice | None:
    """Return the epoch whose weights a run has that was shared by `deat push`; None for a folder of another kind."""
    if not (folder / WEIGHTS_FILE).is_file():
        return None
    try:
        epoch = json.loads((folder / SHARED_CONFIG_FILE).read_text(encoding="utf-8"))["epoch"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return "last" if epoch == "last" else "best"


def find_run_weights(folder: Path, epoch: EpochChoice) -> Path:
    """Return the file of a run's weights of this epoch, and of no other; those of a shared run lie beside run.json."""
    file = folder / epoch / WEIGHTS_FILE
    if not file.is_file() and shared_epoch(folder) == epoch:
        return folder / WEIGHTS_FILE
    if not file.is_file():
        hint = " Only training with --ema (ema=) averages them." if epoch == "averaged" else ""
        others = " or ".join(f"--epoch {which}" for which in ("best", "last") if which != epoch)
        raise CheckpointError(f"{str(folder)!r} has no {epoch} weights.{hint} Try {others}.")
    if epoch == "best":
        _check_best_weights(folder, file)
    return file


def _check_best_weights(folder: Path, file: Path) -> None:
    """Refuse weights of another run that were put into best/; older records do not say which are the run's own."""
    recorded = (read_raw_record(folder) or {}).get(BEST_WEIGHTS_KEY)
    own = read_weights_hash(file)
    if recorded is None or own == recorded:
        return
    checkpoints = (read_weights_hash(path / WEIGHTS_FILE) for path in list_checkpoints(folder))
    if own is None or own not in checkpoints:  # a run that was killed may have newer weights than its record names
        raise CheckpointError(
            f"{str(file)!r} holds not the weights that this run wrote. Put its own back from a copy; evaluate other "
            "weights as a file, with --data and --model."
        )


def _confirm_code(what: str, recorded: str, given_spec: str | None) -> str:
    """The name of a method or model; one that is code must be given by the user: a file's word is not enough."""
    if given_spec is not None:
        return given_spec
    if is_file_spec(recorded):
        raise UsageError(
            f"this run's {what} is {recorded!r}, which is code. Say so yourself: {format_code_flag(what, recorded)}"
        )
    return recorded


def _recorded_data_root(request: Request) -> str | None:
    """The data root that a record names, as a path of this user's."""
    return restore_user_paths(request.data_root) if request.data_root else None


def _weights_exist(weights: str) -> bool:
    try:
        return find_weights_file(Path(weights)).is_file()
    except CheckpointError:  # a run's folder that is begun anew has none for a while
        return False


def _resolve_weights_path(weights: str | None) -> Path | None:
    return expand_path(restore_user_paths(weights)).resolve() if weights else None


def _path_exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long for anything to have it
        return False
