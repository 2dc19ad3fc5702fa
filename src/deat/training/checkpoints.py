"""A trainer's state on the disk: kept after every epoch and on interruption, and taken up again exactly."""

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deat.checkpoint.state import decode_state, encode_state
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
from deat.training.best_epoch import Snapshot
from deat.training.records import EpochStats, EpochTiming, EpochWatch
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
from deat.utils.tensor_files import Tensors, encode_tensors, read_tensors
from deat.utils.text import MessageHandler
from deat.version import get_versions

STATE_SCHEMA_VERSION = 1
MAX_CONSECUTIVE_SAVE_FAILURES = 3
"""Saves that may fail one after the other before training ends."""
NUM_RECENT_CHECKPOINTS = 2
TENSOR_FILE_STEMS = {
    "model": "model",
    "optimizer": "optim",
    "rng": "rng",
    "carry": "delta",
    "buffers": "buffers",
    "best": "best",
    "callbacks": "callbacks",
}
"""The parts of a state whose tensors have a file of their own."""
STATE_CLASSES = {kind.__name__: kind for kind in (EpochStats, EpochTiming, EpochWatch, Snapshot)}


class Checkpoints:
    """Keeps a trainer's checkpoints in a folder: the last two and the best epoch's, each verified before it is used.

    every is the number of epochs between two saves; training that is interrupted or ends is saved at once. extra adds
    to what must be the same when a run goes on, and files say which file each hash in it is of; published is told of
    every checkpoint that was written.
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
        self.notify, self.on_saved = notify or _warn, on_saved
        self._saved_position: tuple[int, int, int] | None = None
        self._saved_names: list[str] = []
        self._best_name: str | None = None
        self._failures = 0

    def resume_or_start(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Keep this trainer's checkpoints from now on, first going on from the newest; whether there was one."""
        trainer.checkpointer = self
        return self.resume(trainer, inexact=inexact)

    def on_train_begin(self, trainer: Trainer) -> None:
        """Keep the state that training begins with, so that there always is one to go on from."""
        if self._saved_position is None:
            trainer.distributed.run_on_main(self._check_no_checkpoints)
            self._save(trainer)

    def _check_no_checkpoints(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = list_checkpoints(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {str(self.path)!r}: {error.strerror}.") from None
        if taken:
            raise UsageError(f"{str(self.path)!r} holds checkpoints already: resume, or choose another folder.")

    def save_if_due(self, trainer: Trainer, *, force: bool = False) -> None:
        """Save an epoch that is due, or whatever has not been saved yet; a save that fails is tried again."""
        due = force or trainer.epoch % self.every == 0
        if not due or self._saved_position == _position(trainer):
            return
        try:
            self._save(trainer)
        except CheckpointError as error:
            self._failures += 1
            if force or self._failures >= MAX_CONSECUTIVE_SAVE_FAILURES:
                raise CheckpointError(f"{error}. {self._describe_last()}") from error
            self.notify(f"{error}. Training goes on from memory, and the next epoch is saved again.")
        else:
            self._failures = 0

    def resume(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Put the newest whole checkpoint into the trainer; False where there is none at all.

        One of another configuration is refused. So is one of another machine, thread count or version, unless
        inexact says that the run need not be the one that an uninterrupted training would have given.
        """
        newest: str | None = trainer.distributed.run_on_main(self._newest_name)
        if newest is None:
            return False
        state = load_checkpoint(self.path / newest)
        moved = check_resumable(
            self.path, state, self._resume_config(trainer), collect_environment(trainer), inexact, self.code_files
        )
        trees = dict(state["state"])
        if moved:  # every draw is seeded anew, and another device's generator has another kind of state
            trees["rng"] = trainer.random_streams.state_dict()
        check_state(newest, trees, trainer)
        self._best_name = state.get("best_checkpoint")
        self._load_into(trainer, trees)
        self._saved_names, self._saved_position = [newest], _position(trainer)
        return True

    def _newest_name(self) -> str | None:
        newest = self._find_newest().newest
        return newest.name if newest else None

    def _find_newest(self) -> CheckpointSearch:
        """The newest whole checkpoint; what killed writers left is removed, and what is damaged is said."""
        if not self.path.is_dir():
            return CheckpointSearch()
        remove_temporary_files(self.path)
        found = find_newest_checkpoint(self.path)
        if found.newest is None and found.problems:
            raise CheckpointError(
                f"no checkpoint in {str(self.path)!r} is whole: {'; '.join(found.problems)}. Train again, with "
                "--overwrite or in another folder (--out, or checkpoints= of fit)."
            )
        for problem in found.problems:
            assert found.newest is not None
            self.notify(f"{problem}; going back to {found.newest.name}")
        return found

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
        """Let the first process write what all of them have; whether it could is then known to all."""
        state = trainer.state_dict()
        check_state_finite(trainer, state)
        name = trainer.distributed.run_on_main(lambda: self._write_checkpoint(trainer, state))
        self._saved_names, self._saved_position = (
            [*self._saved_names, name][-NUM_RECENT_CHECKPOINTS:],
            _position(trainer),
        )

    def _write_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> str:
        name = checkpoint_name(self._next_number())
        best = self._best_name
        if _is_best_epoch(trainer):
            state["best"], best = "this", name
        about = {
            "schema": STATE_SCHEMA_VERSION,
            "versions": get_versions(),
            "config": (config := self._resume_config(trainer)),
            "config_digest": hash_json(config),
            "environment": collect_environment(trainer),
            "exact": not list_inexactness_reasons(trainer),
            "best_checkpoint": best,
        }
        state["callbacks"] = {name: callback.state_dict() for name, callback in _stateful_callbacks(trainer).items()}
        path = write_checkpoint(self.path, name, _encode_files(state, about))
        self._best_name = best
        if self.on_saved:
            self.on_saved(path, trainer)
        left = prune_checkpoints(
            self.path, {*self._saved_names[1 - NUM_RECENT_CHECKPOINTS :], name, *([best] if best else [])}
        )
        if left:
            self.notify(f"cannot delete {', '.join(left)}; training goes on")
        return name

    def _resume_config(self, trainer: Trainer) -> dict[str, Any]:
        return {**collect_resume_config(trainer), **self.extra_config}

    def _next_number(self) -> int:
        numbers = [-1]
        with suppress(OSError):
            numbers += [
                int(match[1])
                for path in list_checkpoints(self.path)
                if (match := CHECKPOINT_NAME_PATTERN.fullmatch(path.name))
            ]
        return max(numbers) + 1

    def _describe_last(self) -> str:
        held = [self.path / name for name in self._saved_names if (self.path / name).is_dir()]
        return f"The last whole checkpoint is {held[-1]}." if held else "There is no whole checkpoint."


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A verified checkpoint's account, its state put together again under `state`."""
    about, files = _read_state_json(path), list_manifest_files(path)  # what its manifest does not name is not looked at
    tensors: dict[str, dict[str, Tensor]] = {part: {} for part in TENSOR_FILE_STEMS}
    for part, file in TENSOR_FILE_STEMS.items():
        if f"{file}.safetensors" in files:
            tensors[part] = read_tensors(path / f"{file}.safetensors")
    shapes = about["state"]
    try:
        state = {part: decode_state(shape, tensors.get(part, {}), STATE_CLASSES) for part, shape in shapes.items()}
        bad = [name for part in ("model", "optimizer") for name in _non_finite_names(tensors[part])]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if bad:
        raise CheckpointError(f"{path.name} holds numbers that are not finite ({', '.join(bad[:3])}): it is not used")
    return {**about, "state": state}


def load_checkpoint_weights(folder: Path, epoch: str) -> Tensors:
    """Load a network's weights from a folder of checkpoints.

    Args:
        folder: A folder with checkpoints of :class:`Checkpoints`.
        epoch: "best" for those of the best epoch, "last" for the newest ones.

    Raises:
        CheckpointError: No checkpoint is whole, or no epoch is finished.
    """
    search = find_newest_checkpoint(folder)
    if search.newest is None:
        raise CheckpointError(f"no checkpoint in {str(folder)!r} is whole: {'; '.join(search.problems)}.")
    state = load_checkpoint(search.newest)["state"]
    if not state["history"]:
        raise CheckpointError(
            f"no epoch of the training in {str(folder)!r} is finished yet, so it has no weights to give."
        )
    best = state["best"]
    return dict(best.weights if epoch == "best" and isinstance(best, Snapshot) else state["model"])


def check_state_finite(trainer: Trainer, state: dict[str, Any]) -> None:
    """Raise rather than let a NaN or an infinity reach the disk."""
    if trainer.step:
        trainer.read_meter()
    _, optimizer = encode_state(state["optimizer"], STATE_CLASSES)
    bad = [*_non_finite_names(state["model"]), *_non_finite_names(optimizer)]
    if bad:
        at = f"in epoch {trainer.epoch + 1}, batch {trainer.step}" if trainer.step else f"after epoch {trainer.epoch}"
        raise trainer.numerical_error(
            f"{', '.join(bad[:3])} stopped being finite {at}; it was not saved. Lower the learning rate."
        )


def _encode_files(state: dict[str, Any], about: dict[str, Any]) -> dict[str, bytes]:
    """Every file of a checkpoint but its manifest."""
    shapes, files = {}, {}
    for part, value in state.items():
        shapes[part], tensors = encode_state(value, STATE_CLASSES)
        if part in TENSOR_FILE_STEMS and (tensors or part in ("model", "optimizer", "rng")):
            note = json.dumps({"epoch": state["epoch"], "step": state["step"]}) if part == "model" else None
            files[f"{TENSOR_FILE_STEMS[part]}.safetensors"] = encode_tensors(tensors, note)
        elif tensors:
            raise CheckpointError(f"{part} of the trainer's state holds tensors, which have no file")
    text = json.dumps({**about, "state": shapes}, allow_nan=False) + "\n"
    return {**files, "state.json": text.encode()}


def _read_state_json(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / "state.json").read_text(encoding="utf-8"))
        schema = about["schema"]
        named = all(isinstance(about[name], dict) for name in ("config", "environment", "state"))
        named &= CHECKPOINT_NAME_PATTERN.fullmatch(about.get("best_checkpoint") or checkpoint_name(0)) is not None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if not isinstance(schema, int) or schema > STATE_SCHEMA_VERSION:
        made = about.get("versions", {})
        by = f" by deat {made['deat']}" if isinstance(made, dict) and "deat" in made else ""
        raise CheckpointError(
            f"{path.name} was written{by} with schema {schema!r}; this deat reads up to {STATE_SCHEMA_VERSION}. Upgrade deat."
        )
    if schema < 1 or not named:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's")
    return dict(about)


def _stateful_callbacks(trainer: Trainer) -> dict[str, Any]:
    """The callbacks that have a state to go on from, by name."""
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            found[f"{name}-{sum(key.startswith(f'{name}-') for key in found)}"] = callback
    return found


def _is_best_epoch(trainer: Trainer) -> bool:
    """Whether the trainer's weights are those of the best epoch."""
    held = trainer.best.snapshot_or_none
    return bool(held and not trainer.step and trainer.history and held.epoch == trainer.history[-1].epoch)


def _position(trainer: Trainer) -> tuple[int, int, int]:
    """Where training is; a rollback returns to an epoch, but never to what was spent."""
    return trainer.epoch, trainer.step, trainer.game.cost.backprops


def _non_finite_names(tensors: dict[str, Tensor]) -> list[str]:
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    if not floats:
        return []
    finite = torch.stack([t.detach().isfinite().all() for t in floats.values()]).tolist()
    return [name for name, good in zip(floats, finite, strict=True) if not good]


def _clone_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
