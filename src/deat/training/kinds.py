"""Whether a checkpoint's state is one that a trainer gives: hashes say that it is whole, not that it makes sense."""

import math
from collections.abc import Callable
from typing import Any

import torch

from deat.checkpoint.kinds import fits
from deat.errors import CheckpointError
from deat.game.meter import EpochRecord
from deat.models.weights import tensors_of
from deat.training.history import EpochStats
from deat.training.result import Snapshot
from deat.training.trainer import Trainer

State = dict[str, Any]
MOMENTUM = "momentum_buffer"


def check_kinds(name: str, state: State, trainer: Trainer) -> None:
    """Raise where a part of a state is none that this trainer could go on from."""
    for part, is_good in CHECKS.items():
        try:
            good = is_good(state[part], state, trainer)
        except Exception:  # whatever a rule says to a state that is not its own
            good = False
        if not good:
            found = repr(state[part])[:80] if part in state else "missing"
            raise CheckpointError(f"{name}/state.json is not a checkpoint's: its {part} is {found}. It is not used.")


def _is_whole(value: Any, *_: Any) -> bool:
    return fits(value, int) and value >= 0


def _is_number(value: Any, *_: Any) -> bool:
    return fits(value, float) and math.isfinite(value) and value >= 0


def _is_step(value: Any, state: State, trainer: Trainer) -> bool:
    return _is_whole(value) and value <= len(trainer.train)


def _are_lengths(value: Any, state: State, trainer: Trainer) -> bool:
    return bool(value.keys() == {"alpha", "stretch"}) and all(map(_is_number, value.values()))


def _is_cost(value: Any, state: State, trainer: Trainer) -> bool:
    return bool(value.keys() == vars(trainer.game.cost).keys()) and all(map(_is_whole, value.values()))


def _is_history(value: Any, state: State, trainer: Trainer) -> bool:
    told = [stats.epoch for stats in value if isinstance(stats, EpochStats)]
    return isinstance(value, list) and len(told) == len(value) and told == list(range(state["epoch"]))


def _is_schedule(value: Any, state: State, trainer: Trainer) -> bool:
    """Whether the schedule, which is a pure rule, can play and observe an epoch from there."""
    epoch = min(state["epoch"], trainer.settings.epochs - 1)
    seen = EpochRecord(epoch, loss=1.0, accuracy=0.5, magnitude=1.0, examples=1)
    trainer.schedule.observe(value, seen)
    k = trainer.schedule.budget(value, epoch).k
    return _is_whole(k) and fits(value.get("threshold"), float | None)


def _is_best(value: Any, state: State, trainer: Trainer) -> bool:
    if value is None or value == "this":
        return (value is None) == (not state["history"])
    shapes = {name: tensor.shape for name, tensor in tensors_of(trainer.model).items()}
    return isinstance(value, Snapshot) and {name: t.shape for name, t in value.weights.items()} == shapes


def _is_optimizer(value: Any, state: State, trainer: Trainer) -> bool:
    """Whether groups are those of this optimiser, and every weight has the same entries, of its own shape."""
    held, weights = trainer.optimizer.state_dict()["param_groups"], trainer.optimizer.param_groups
    groups, entries = value["param_groups"], value["state"]
    shapes = dict(enumerate(p.shape for group in weights for p in group["params"]))
    alike = len(groups) == len(held) and all(map(_is_group, groups, held))
    known = len({frozenset(entry) for entry in entries.values()}) <= 1
    return alike and known and all(_is_entry(name, v, shapes[i]) for i, e in entries.items() for name, v in e.items())


def _is_group(group: Any, held: Any) -> bool:
    return bool(group.keys() == held.keys()) and all(_kind(group[name]) is _kind(held[name]) for name in held)


def _kind(value: Any) -> type[Any]:
    """A value's type; numbers are all of one."""
    return float if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) else type(value)


def _is_entry(name: str, value: Any, shape: torch.Size) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape in (shape, torch.Size())
    return value is None or (name != MOMENTUM and isinstance(value, bool | int | float))


def _is_random(value: Any, state: State, trainer: Trainer) -> bool:
    torch.Generator().set_state(value["torch"])  # which refuses any other
    return True


CHECKS: dict[str, Callable[[Any, State, Trainer], bool]] = {
    "epoch": _is_whole,
    "step": _is_step,
    "stopping": lambda value, *_: isinstance(value, bool),
    "lengths": _are_lengths,
    "schedule": _is_schedule,
    "cost": _is_cost,
    "active": _is_whole,
    "val_passes": _is_whole,
    "seconds": _is_number,
    "history": _is_history,
    "best": _is_best,
    "rng": _is_random,
    "optimizer": _is_optimizer,
    "callbacks": lambda value, *_: isinstance(value, dict),
}
