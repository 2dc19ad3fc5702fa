"""Checkpoints of a trainer: saved after every epoch and on interruption, and restored exactly."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deat.checkpoint.encoding import decode_state, encode_state
from deat.checkpoint.store import (
    CHECKPOINT_NAME_PATTERN,
    CheckpointSearch,
    checkpoint_name,
    find_newest_checkpoint,
    list_checkpoints,
    list_manifest_files,
    prune_checkpoints,
    remove_temporary_files,
    write_checkpoint,
)
from deat.errors import CheckpointError, UsageError
from deat.training.best_epoch import ScoredEpoch, Snapshot
from deat.training.epoch_records import EpochStats, EpochTiming, EpochWatch
from deat.training.resume_checks import (
    check_resumable,
    check_state,
    collect_environment,
    collect_resume_config,
    hash_json,
    list_inexactness_reasons,
)
from deat.training.trainer import Trainer
from deat.utils.numbers import check_int
from deat.utils.safe_read import read_plain_text
from deat.utils.safetensors_files import Tensors, encode_tensors, read_tensors
from deat.utils.text import MessageHandler, show_as_warning
from deat.version import get_versions

STATE_SCHEMA_VERSION = 1
MAX_CONSECUTIVE_SAVE_FAILURES = 3
"""Training ends after this many consecutive saves have failed."""
NUM_RECENT_CHECKPOINTS = 2
TENSOR_FILE_STEMS = {
    "model": "model",
    "optimizer": "optim",
    "rng": "rng",
    "carry": "delta",
    "starts": "starts",
    "buffers": "buffers",
    "best": "best",
    "average": "average",
    "callbacks": "callbacks",
}
"""The parts of a state whose tensors are stored in a file, with its name."""
STATE_CLASSES = {kind.__name__: kind for kind in (EpochStats, EpochTiming, EpochWatch, ScoredEpoch, Snapshot)}


class Checkpoints:
    """Saves a trainer's state in a folder: the last two checkpoints and that of the best epoch.

    Every checkpoint is verified before it is used. Training that ends or is interrupted is saved at once.

    Args:
        path: The folder. It may not have checkpoints of another training.
        every: The number of epochs between two saves.
        extra_config: More settings that must be the same when training resumes, as JSON.
        code_files: For each entry of the configuration that is a hash of user code, the name of its file.
        notify: Shows a message about a problem that does not end training; by default a RuntimeWarning.
        on_saved: Called with the folder of each checkpoint that was written.

    Raises:
        UsageError: `every` is not a whole number >= 1.

    Example:
        >>> resumed = deat.Checkpoints("checkpoints", every=5).resume_or_start(trainer)
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        path: str | Path,
        every: int = 1,
        *,
        extra_config: dict[str, Any] | None = None,
        code_files: dict[str, str] | None = None,
        notify: MessageHandler | None = None,
        on_saved: Callable[[Path, Trainer], None] | None = None,
    ) -> None:
        check_int("every", every, 1)
        self.path, self.every, self.extra_config, self.code_files = Path(path), every, extra_config or {}, code_files
        self.notify, self.on_saved = notify or show_as_warning, on_saved
        self._saved_position: tuple[int, int, int] | None = None
        self._saved_names: list[str] = []
        self._best_name: str | None = None
        self._failures = 0

    def resume_or_start(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Save this trainer's checkpoints from now on, and resume from the newest one if there is any.

        Args:
            trainer: A new trainer.
            inexact: See `resume`.

        Returns:
            Whether training resumes.

        Raises:
            UsageError: See `resume`.
            CheckpointError: See `resume`.
        """
        trainer.checkpointer = self
        return self.resume(trainer, inexact=inexact)

    def on_train_begin(self, trainer: Trainer) -> None:
        """Save the initial state of a training that does not resume."""
        if self._saved_position is None:
            trainer.distributed.run_on_main(self._check_no_checkpoints)
            self._save(trainer)

    def _check_no_checkpoints(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            existing = list_checkpoints(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot save checkpoints in {str(self.path)!r}: {error.strerror}.") from None
        if existing:
            raise UsageError(f"{str(self.path)!r} has checkpoints already: resume, or choose another folder.")

    def save_if_due(self, trainer: Trainer, *, force: bool = False) -> None:
        """Save the state if the epoch is due; a save that fails is repeated after the next epoch.

        Args:
            trainer: The trainer.
            force: Save in any case, unless this state was saved already.

        Raises:
            CheckpointError: A forced save failed, or three saves in a row.
            NumericalError: The state has numbers that are not finite.
        """
        due = force or trainer.epoch % self.every == 0
        if not due or self._saved_position == _position(trainer):
            return
        try:
            self._save(trainer)
        except CheckpointError as error:
            self._failures += 1
            if force or self._failures >= MAX_CONSECUTIVE_SAVE_FAILURES:
                raise CheckpointError(f"{error}. {self._describe_last()}") from error
            self.notify(f"{error}. Training continues, and saves again after the next epoch.")
        else:
            self._failures = 0

    def resume(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Load the newest valid checkpoint into a trainer.

        Args:
            trainer: A new trainer.
            inexact: Also resume with another machine, thread count or version, which changes the numbers.

        Returns:
            False if there is no checkpoint.

        Raises:
            UsageError: The checkpoint is of another configuration, or of another environment without `inexact`.
            CheckpointError: No checkpoint is valid.
        """
        newest: str | None = trainer.distributed.run_on_main(self._newest_name)
        if newest is None:
            return False
        state = load_checkpoint(self.path / newest)
        trainer.use_recorded_precision(state["environment"].get("precision", ""))
        is_environment_changed = check_resumable(
            self.path, state, self._resume_config(trainer), collect_environment(trainer), inexact, self.code_files
        )
        parts = {"scored": [], "average": None, **state["state"]}  # older checkpoints do not have them
        if is_environment_changed:  # every draw has its own seed; generators of other devices have other states
            parts["rng"] = trainer.random_streams.state_dict()
        check_state(newest, parts, trainer)
        self._best_name = state.get("best_checkpoint")
        self._load_into(trainer, parts)
        self._saved_names, self._saved_position = [newest], _position(trainer)
        return True

    def _newest_name(self) -> str | None:
        newest = self._find_newest().newest
        return newest.name if newest else None

    def _find_newest(self) -> CheckpointSearch:
        """Find the newest valid checkpoint, delete temporary files and report damaged checkpoints."""
        if not self.path.is_dir():
            return CheckpointSearch()
        remove_temporary_files(self.path)
        search = find_newest_checkpoint(self.path)
        if search.newest is None and search.problems:
            raise CheckpointError(
                f"no checkpoint in {str(self.path)!r} is valid: {'; '.join(search.problems)}. Train again, with "
                "--overwrite or in another folder (--out, or checkpoints= of fit)."
            )
        for problem in search.problems:
            assert search.newest is not None
            self.notify(f"{problem}; using {search.newest.name}")
        return search

    def _load_into(self, trainer: Trainer, state: dict[str, Any]) -> None:
        try:
            if state["best"] == "this":
                stats = state["history"][-1]
                state["best"] = Snapshot(
                    stats.epoch, stats.val_natural, stats.val_robust, _clone_tensors(state["model"])
                )
            trainer.load_state_dict(state)
            for name, callback in _stateful_callbacks(trainer).items():
                if name in state["callbacks"]:
                    callback.load_state_dict(state["callbacks"][name])
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
            raise CheckpointError(
                f"a checkpoint in {str(self.path)!r} does not fit this training ({type(error).__name__}: {error})"
            ) from error

    def _save(self, trainer: Trainer) -> None:
        """Write the state in the main process; an error is raised in all processes."""
        state = trainer.state_dict()
        check_state_finite(trainer, state)
        name = trainer.distributed.run_on_main(lambda: self._write_checkpoint(trainer, state))
        self._saved_names = [*self._saved_names, name][-NUM_RECENT_CHECKPOINTS:]
        self._saved_position = _position(trainer)
        trainer.call_callbacks("on_checkpoint", self.path / name)

    def _write_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> str:
        name = checkpoint_name(self._next_number())
        best = self._best_name
        if _is_best_epoch(trainer):
            state["best"], best = "this", name
        config = self._resume_config(trainer)
        metadata = {
            "schema": STATE_SCHEMA_VERSION,
            "versions": get_versions(),
            "config": config,
            "config_digest": hash_json(config),
            "environment": collect_environment(trainer),
            "exact": not list_inexactness_reasons(trainer),
            "best_checkpoint": best,
        }
        state["callbacks"] = {name: callback.state_dict() for name, callback in _stateful_callbacks(trainer).items()}
        path = write_checkpoint(self.path, name, _encode_files(state, metadata))
        self._best_name = best
        if self.on_saved:
            self.on_saved(path, trainer)
        keep_names = {*self._saved_names[1 - NUM_RECENT_CHECKPOINTS :], name, *([best] if best else [])}
        not_deleted = prune_checkpoints(self.path, keep_names)
        if not_deleted:
            self.notify(f"cannot delete {', '.join(not_deleted)}; training continues")
        return name

    def _resume_config(self, trainer: Trainer) -> dict[str, Any]:
        return {**collect_resume_config(trainer), **self.extra_config}

    def _next_number(self) -> int:
        numbers = [-1]
        with suppress(OSError):
            matches = [CHECKPOINT_NAME_PATTERN.fullmatch(path.name) for path in list_checkpoints(self.path)]
            numbers += [int(match[1]) for match in matches if match]
        return max(numbers) + 1

    def _describe_last(self) -> str:
        saved = [self.path / name for name in self._saved_names if (self.path / name).is_dir()]
        return f"The last valid checkpoint is {saved[-1]}." if saved else "There is no valid checkpoint."


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint that was verified.

    Args:
        path: The checkpoint's folder.

    Returns:
        Its metadata (versions, configuration, environment), and the trainer's state under "state".

    Raises:
        CheckpointError: The files are not those of a checkpoint, or weights are not finite.
    """
    metadata, files = _read_state_json(path), list_manifest_files(path)  # files outside the manifest are ignored
    tensors: dict[str, dict[str, Tensor]] = {part: {} for part in TENSOR_FILE_STEMS}
    for part, file in TENSOR_FILE_STEMS.items():
        if f"{file}.safetensors" in files:
            tensors[part] = read_tensors(path / f"{file}.safetensors")
    encoded = metadata["state"]
    try:
        state = {part: decode_state(value, tensors.get(part, {}), STATE_CLASSES) for part, value in encoded.items()}
        bad = [name for part in ("model", "optimizer") for name in _non_finite_names(tensors[part])]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if bad:
        raise CheckpointError(f"{path.name} has numbers that are not finite ({', '.join(bad[:3])}): it is not used")
    return {**metadata, "state": state}


def load_checkpoint_weights(folder: Path, epoch: str) -> Tensors:
    """Load a network's weights from a folder of checkpoints.

    Args:
        folder: A folder with checkpoints of :class:`Checkpoints`.
        epoch: "best" for those of the best epoch, "last" for the newest ones, "averaged" for their moving average.

    Raises:
        CheckpointError: No checkpoint is valid, or no epoch is finished.
    """
    search = find_newest_checkpoint(folder)
    if search.newest is None:
        raise CheckpointError(f"no checkpoint in {str(folder)!r} is valid: {'; '.join(search.problems)}.")
    state = load_checkpoint(search.newest)["state"]
    if not state["history"]:
        raise CheckpointError(
            f"no epoch of the training in {str(folder)!r} is finished yet, so it has no trained weights."
        )
    if epoch == "averaged":
        return _averaged_weights(folder, state)
    best = state["best"]
    return dict(best.weights if epoch == "best" and isinstance(best, Snapshot) else state["model"])


def _averaged_weights(folder: Path, state: dict[str, Any]) -> Tensors:
    average = state.get("average")
    if average is None:
        raise CheckpointError(f"the training in {str(folder)!r} does not average weights. Take those of another epoch.")
    return {name: average["averages"][name].to(weights.dtype) for name, weights in state["model"].items()}


def check_state_finite(trainer: Trainer, state: dict[str, Any]) -> None:
    """Check that a state has only finite numbers, before it is saved.

    Args:
        trainer: The trainer.
        state: Its state_dict().

    Raises:
        NumericalError: A weight, a value of the optimizer or the epoch's loss is not finite.
    """
    if trainer.batches_done:
        trainer.read_meter()
    _, optimizer = encode_state(state["optimizer"], STATE_CLASSES)
    bad = [*_non_finite_names(state["model"]), *_non_finite_names(optimizer)]
    if bad:
        at = (
            f"in epoch {trainer.epoch + 1}, batch {trainer.batches_done}"
            if trainer.batches_done
            else f"after epoch {trainer.epoch}"
        )
        raise trainer.numerical_error(
            f"{', '.join(bad[:3])} stopped being finite {at}; it was not saved. Lower the learning rate."
        )


def _encode_files(state: dict[str, Any], metadata: dict[str, Any]) -> dict[str, bytes]:
    """Encode all files of a checkpoint but the manifest, by name."""
    encoded, files = {}, {}
    for part, value in state.items():
        encoded[part], tensors = encode_state(value, STATE_CLASSES)
        if part in TENSOR_FILE_STEMS and (tensors or part in ("model", "optimizer", "rng")):
            note = json.dumps({"epoch": state["epoch"], "step": state["step"]}) if part == "model" else None
            files[f"{TENSOR_FILE_STEMS[part]}.safetensors"] = encode_tensors(tensors, note)
        elif tensors:
            raise CheckpointError(f"{part} of the trainer's state holds tensors, which have no file")
    text = json.dumps({**metadata, "state": encoded}, allow_nan=False) + "\n"
    return {**files, "state.json": text.encode()}


def _read_state_json(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(read_plain_text(path / "state.json"))
        schema = metadata["schema"]
        is_complete = all(isinstance(metadata[name], dict) for name in ("config", "environment", "state"))
        is_complete &= (
            CHECKPOINT_NAME_PATTERN.fullmatch(metadata.get("best_checkpoint") or checkpoint_name(0)) is not None
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if not isinstance(schema, int) or schema > STATE_SCHEMA_VERSION:
        versions = metadata.get("versions", {})
        by = f" by deat {versions['deat']}" if isinstance(versions, dict) and "deat" in versions else ""
        raise CheckpointError(
            f"{path.name} was written{by} with schema {schema!r}; this deat reads up to {STATE_SCHEMA_VERSION}. Upgrade deat."
        )
    if schema < 1 or not is_complete:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's")
    return dict(metadata)


def _stateful_callbacks(trainer: Trainer) -> dict[str, Any]:
    """Return the callbacks that have a state, by their class name and number."""
    stateful: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            stateful[f"{name}-{sum(key.startswith(f'{name}-') for key in stateful)}"] = callback
    return stateful


def _is_best_epoch(trainer: Trainer) -> bool:
    """Return whether the trainer's weights, not their average, are those of the best epoch."""
    best = trainer.best.snapshot_or_none
    is_last = bool(best and not trainer.batches_done and trainer.history and best.epoch == trainer.history[-1].epoch)
    return is_last and not (best and best.averaged)


def _position(trainer: Trainer) -> tuple[int, int, int]:
    """Return the position of training; backprops distinguish an epoch from its repetition after a rollback."""
    return trainer.epoch, trainer.batches_done, trainer.game.cost.backprops


def _non_finite_names(tensors: dict[str, Tensor]) -> list[str]:
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    if not floats:
        return []
    finite = torch.stack([t.detach().isfinite().all() for t in floats.values()]).tolist()
    return [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]


def _clone_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
