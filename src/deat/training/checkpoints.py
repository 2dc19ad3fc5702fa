"""A trainer's state on the disk: kept after every epoch and on interruption, and taken up again exactly."""

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deat.checkpoint.state import join, split
from deat.checkpoint.store import NAME, Search, files_of, listed, name_of, prune, remove_temporaries, search, write
from deat.errors import CheckpointError, UsageError
from deat.training.best_epoch import Snapshot
from deat.training.records import EpochStats, EpochTiming, EpochWatch
from deat.training.resume_checks import (
    check_kinds,
    check_same,
    config_of,
    digest,
    environment_of,
    reasons_against_exactness,
)
from deat.training.trainer import Trainer
from deat.utils.numbers import check_whole
from deat.utils.tensor_files import dump, read
from deat.version import versions

SCHEMA = 1
FAILURES = 3
"""Saves that may fail one after the other before training ends."""
KEPT = 2
FILES = {
    "model": "model",
    "optimizer": "optim",
    "rng": "rng",
    "carry": "delta",
    "buffers": "buffers",
    "best": "best",
    "callbacks": "callbacks",
}
"""The parts of a state whose tensors have a file of their own."""
KINDS = {kind.__name__: kind for kind in (EpochStats, EpochTiming, EpochWatch, Snapshot)}

Say = Callable[[str], None]


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
        extra: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        say: Say | None = None,
        published: Callable[[Path, Trainer], None] | None = None,
    ) -> None:
        check_whole("every", every, 1)
        self.path, self.every, self.extra, self.files = Path(path), every, extra or {}, files
        self.say, self.published = say or _warn, published
        self._saved: tuple[int, int, int] | None = None
        self._valid: list[str] = []
        self._best: str | None = None
        self._failures = 0

    def follow(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Keep this trainer's checkpoints from now on, first going on from the newest; whether there was one."""
        trainer.keeper = self
        return self.resume(trainer, inexact=inexact)

    def begin(self, trainer: Trainer) -> None:
        """Keep the state that training begins with, so that there always is one to go on from."""
        if self._saved is None:
            trainer.ranks.by_main(self._check_empty)
            self._save(trainer)

    def _check_empty(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            taken = listed(self.path)
        except OSError as error:
            raise CheckpointError(f"cannot keep checkpoints in {str(self.path)!r}: {error.strerror}.") from None
        if taken:
            raise UsageError(f"{str(self.path)!r} holds checkpoints already: resume, or choose another folder.")

    def keep(self, trainer: Trainer, *, now: bool = False) -> None:
        """Save an epoch that is due, or whatever has not been saved yet; a save that fails is tried again."""
        due = now or trainer.epoch % self.every == 0
        if not due or self._saved == _position(trainer):
            return
        try:
            self._save(trainer)
        except CheckpointError as error:
            self._failures += 1
            if now or self._failures >= FAILURES:
                raise CheckpointError(f"{error}. {self._last()}") from error
            self.say(f"{error}. Training goes on from memory, and the next epoch is saved again.")
        else:
            self._failures = 0

    def resume(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Put the newest whole checkpoint into the trainer; False where there is none at all.

        One of another configuration is refused. So is one of another machine, thread count or version, unless
        inexact says that the run need not be the one that an uninterrupted training would have given.
        """
        newest: str | None = trainer.ranks.by_main(self._newest)
        if newest is None:
            return False
        state = load(self.path / newest)
        moved = check_same(self.path, state, self._config(trainer), environment_of(trainer), inexact, self.files)
        trees = dict(state["state"])
        if moved:  # every draw is seeded anew, and another device's generator has another kind of state
            trees["rng"] = trainer.streams.state_dict()
        check_kinds(newest, trees, trainer)
        self._best = state.get("best_checkpoint")
        self._put(trainer, trees)
        self._valid, self._saved = [newest], _position(trainer)
        return True

    def _newest(self) -> str | None:
        newest = self._search().newest
        return newest.name if newest else None

    def _search(self) -> Search:
        """The newest whole checkpoint; what killed writers left is removed, and what is damaged is said."""
        if not self.path.is_dir():
            return Search()
        remove_temporaries(self.path)
        found = search(self.path)
        if found.newest is None and found.problems:
            raise CheckpointError(
                f"no checkpoint in {str(self.path)!r} is whole: {'; '.join(found.problems)}. Train again, with "
                "--overwrite or in another folder (--out, or checkpoints= of fit)."
            )
        for problem in found.problems:
            assert found.newest is not None
            self.say(f"{problem}; going back to {found.newest.name}")
        return found

    def _put(self, trainer: Trainer, state: dict[str, Any]) -> None:
        try:
            if state["best"] == "this":
                stats = state["history"][-1]
                state["best"] = Snapshot(stats.epoch, stats.val_natural, stats.val_robust, _copied(state["model"]))
            trainer.load_state_dict(state)
            for name, callback in _stateful(trainer).items():
                if name in state["callbacks"]:
                    callback.load_state_dict(state["callbacks"][name])
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OSError) as error:
            raise CheckpointError(
                f"a checkpoint in {str(self.path)!r} does not fit this training ({type(error).__name__}: {error})"
            ) from error

    def _save(self, trainer: Trainer) -> None:
        """Let the first process write what all of them have; whether it could is then known to all."""
        state = trainer.state_dict()
        check_finite(trainer, state)
        name = trainer.ranks.by_main(lambda: self._write(trainer, state))
        self._valid, self._saved = [*self._valid, name][-KEPT:], _position(trainer)

    def _write(self, trainer: Trainer, state: dict[str, Any]) -> str:
        name = name_of(self._next_number())
        best = self._best
        if _is_best(trainer):
            state["best"], best = "this", name
        about = {
            "schema": SCHEMA,
            "versions": versions(),
            "config": (config := self._config(trainer)),
            "config_digest": digest(config),
            "environment": environment_of(trainer),
            "exact": not reasons_against_exactness(trainer),
            "best_checkpoint": best,
        }
        state["callbacks"] = {name: callback.state_dict() for name, callback in _stateful(trainer).items()}
        path = write(self.path, name, _files(state, about))
        self._best = best
        if self.published:
            self.published(path, trainer)
        left = prune(self.path, {*self._valid[1 - KEPT :], name, *([best] if best else [])})
        if left:
            self.say(f"cannot delete {', '.join(left)}; training goes on")
        return name

    def _config(self, trainer: Trainer) -> dict[str, Any]:
        return {**config_of(trainer), **self.extra}

    def _next_number(self) -> int:
        numbers = [-1]
        with suppress(OSError):
            numbers += [int(match[1]) for path in listed(self.path) if (match := NAME.fullmatch(path.name))]
        return max(numbers) + 1

    def _last(self) -> str:
        held = [self.path / name for name in self._valid if (self.path / name).is_dir()]
        return f"The last whole checkpoint is {held[-1]}." if held else "There is no whole checkpoint."


def load(path: Path) -> dict[str, Any]:
    """A verified checkpoint's account, its state put together again under `state`."""
    about, files = _state_json(path), files_of(path)  # what its manifest does not name is not looked at
    tensors: dict[str, dict[str, Tensor]] = {part: {} for part in FILES}
    for part, file in FILES.items():
        if f"{file}.safetensors" in files:
            tensors[part] = read(path / f"{file}.safetensors")
    shapes = about["state"]
    try:
        state = {part: join(shape, tensors.get(part, {}), KINDS) for part, shape in shapes.items()}
        bad = [name for part in ("model", "optimizer") for name in _non_finite(tensors[part])]
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if bad:
        raise CheckpointError(f"{path.name} holds numbers that are not finite ({', '.join(bad[:3])}): it is not used")
    return {**about, "state": state}


def check_finite(trainer: Trainer, state: dict[str, Any]) -> None:
    """Raise rather than let a NaN or an infinity reach the disk."""
    if trainer.step:
        trainer.check_meter()
    _, optimizer = split(state["optimizer"], KINDS)
    bad = [*_non_finite(state["model"]), *_non_finite(optimizer)]
    if bad:
        at = f"in epoch {trainer.epoch + 1}, batch {trainer.step}" if trainer.step else f"after epoch {trainer.epoch}"
        raise trainer.numerical_error(
            f"{', '.join(bad[:3])} stopped being finite {at}; it was not saved. Lower the learning rate."
        )


def _files(state: dict[str, Any], about: dict[str, Any]) -> dict[str, bytes]:
    """Every file of a checkpoint but its manifest."""
    shapes, files = {}, {}
    for part, value in state.items():
        shapes[part], tensors = split(value, KINDS)
        if part in FILES and (tensors or part in ("model", "optimizer", "rng")):
            note = json.dumps({"epoch": state["epoch"], "step": state["step"]}) if part == "model" else None
            files[f"{FILES[part]}.safetensors"] = dump(tensors, note)
        elif tensors:
            raise CheckpointError(f"{part} of the trainer's state holds tensors, which have no file")
    text = json.dumps({**about, "state": shapes}, allow_nan=False) + "\n"
    return {**files, "state.json": text.encode()}


def _state_json(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / "state.json").read_text(encoding="utf-8"))
        schema = about["schema"]
        named = all(isinstance(about[name], dict) for name in ("config", "environment", "state"))
        named &= NAME.fullmatch(about.get("best_checkpoint") or name_of(0)) is not None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's ({error})") from None
    if not isinstance(schema, int) or schema > SCHEMA:
        made = about.get("versions", {})
        by = f" by deat {made['deat']}" if isinstance(made, dict) and "deat" in made else ""
        raise CheckpointError(
            f"{path.name} was written{by} with schema {schema!r}; this deat reads up to {SCHEMA}. Upgrade deat."
        )
    if schema < 1 or not named:
        raise CheckpointError(f"{path.name}/state.json is not a checkpoint's")
    return dict(about)


def _stateful(trainer: Trainer) -> dict[str, Any]:
    """The callbacks that have a state to go on from, by name."""
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            name = type(callback).__name__
            found[f"{name}-{sum(key.startswith(f'{name}-') for key in found)}"] = callback
    return found


def _is_best(trainer: Trainer) -> bool:
    """Whether the trainer's weights are those of the best epoch."""
    held = trainer.best.held
    return bool(held and not trainer.step and trainer.history and held.epoch == trainer.history[-1].epoch)


def _position(trainer: Trainer) -> tuple[int, int, int]:
    """Where training is; a rollback returns to an epoch, but never to what was spent."""
    return trainer.epoch, trainer.step, trainer.game.cost.backprops


def _non_finite(tensors: dict[str, Tensor]) -> list[str]:
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    if not floats:
        return []
    finite = torch.stack([t.detach().isfinite().all() for t in floats.values()]).tolist()
    return [name for name, good in zip(floats, finite, strict=True) if not good]


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
