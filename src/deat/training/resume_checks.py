"""Whether a training that goes on is the one that was interrupted: its configuration, and where it runs."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deat.checkpoint.state import matches_type
from deat.core.meter import EpochRecord
from deat.data import Augment, InMemorySource, Source, StreamingSource
from deat.errors import CheckpointError, UsageError
from deat.models.weights import get_state_dict
from deat.training.best_epoch import Snapshot
from deat.training.config import CURRENT_NAMES
from deat.training.records import EpochStats
from deat.training.trainer import Trainer
from deat.version import get_versions

Json = dict[str, Any]
SETTINGS_WITHOUT_EFFECT = ("workers", "threads", "device", "engine", "deterministic", "sync_bn")
"""Settings that change no number by themselves; what they come to is compared as the environment."""
OPTIONAL_KEYS = ("data.augment", "data.content", "data.held_out_content", "compiled", "steps", "cpu", "gpu")
"""What not every checkpoint says of itself; it is compared where both sides do."""
HASH_MESSAGES = {
    "data.content": ("other training images or labels than before", "data.train"),
    "data.held_out_content": ("other held-out images or labels than before", "data.held_out"),
    "images.digest": ("the data set has other images or labels than before", ""),
    "model.tensors": ("weights of other names or sizes than before", "model.parameters"),
}
"""What differs where a hash does, and by which name it is counted."""
MORE_EPOCHS_HINT = (
    " To train further than it was meant to, start that run from these weights: --init RUN and an --out of its own, or "
    "in Python fit with the trained model and another checkpoints folder."
)
"""What is said to those who ask for other epochs, by which the learning rates of all of them would change."""


def collect_resume_config(trainer: Trainer) -> dict[str, Any]:
    """What determines a training's numbers, as JSON."""
    settings = {name: v for name, v in trainer.config.describe().items() if name not in SETTINGS_WITHOUT_EFFECT}
    tensors = {name: [list(t.shape), str(t.dtype)] for name, t in get_state_dict(trainer.model).items()}
    found = {
        "method": trainer.method.describe(),
        "threat": {"norm": trainer.threat.name, "eps": trainer.threat.eps},
        "settings": settings,
        "model": {"parameters": trainer.num_parameters, "tensors": hash_json(tensors)[:16]},
        "optimizer": type(trainer.optimizer).__name__.removeprefix("Device"),
        "data": {
            "train": trainer.train.num_examples,
            "classes": trainer.train.num_classes,
            "batch_size": trainer.train.batch_size,
            "held_out": trainer.val.num_examples if trainer.val else 0,
            **_augment_entry(trainer.train),
            **_content_hashes(trainer),
        },
    }
    if trainer.custom_param_groups is not None:
        found["own_optimizer"] = {str(i): group for i, group in enumerate(trainer.custom_param_groups)}
    return dict(json.loads(json.dumps(found)))


def collect_environment(trainer: Trainer) -> dict[str, Any]:
    """Where a training runs, as far as its last bits depend on it."""
    made, device = get_versions(), trainer.engine.device.type
    return {
        "device": device,
        "precision": trainer.engine.precision,
        "deterministic": trainer.config.deterministic,
        "compiled": trainer.config.engine == "compile",  # moves that are recorded have the bits of eager ones
        "steps": type(trainer.optimizer).__name__,  # but not the optimiser's
        **_processor_name(trainer.engine.device),
        "threads": trainer.threads if device == "cpu" else None,
        "processes": trainer.distributed.size,
        **({"sync_bn": True} if trainer.config.sync_bn and trainer.distributed.is_multiprocess else {}),
        "torch": made["torch"],
        "deat": made["deat"],
    }


def list_inexactness_reasons(trainer: Trainer) -> list[str]:
    """Why a training that goes on may differ from an uninterrupted one; empty where it may not."""
    if trainer.engine.device.type == "cpu":
        return []
    doubts = {
        "a GPU without --deterministic": not trainer.config.deterministic,
        "--engine compile on a GPU": trainer.config.engine == "compile",
        "--engine auto, which may begin to compile in the middle of a run": trainer.may_compile,
    }
    return [reason for reason, stands in doubts.items() if stands]


def hash_json(value: Any) -> str:
    """A hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def list_differences(before: Json, now: Json, code_files: Mapping[str, str] | None = None) -> list[str]:
    """Every difference in words, such as "settings.lr: 0.1, now 0.2"; files are what hashes of code stand for."""
    old, new = dict(_flatten(before)), dict(_flatten(now))
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if _format_leaf(old, name) != _format_leaf(new, name)
        and (name not in OPTIONAL_KEYS or (name in old and name in new))
    ]
    whole = "data.content" in names  # which says what the set's own hash would say again
    return [
        _describe_difference(name, old, new, code_files or {})
        for name in names
        if not (whole and name == "images.digest")
    ]


def _describe_difference(name: str, old: Json, new: Json, code_files: Mapping[str, str]) -> str:
    """One difference; of what is known by its hash alone, that there is one."""
    if name in code_files and name in old and name in new:
        return f"{name}: the file of {code_files[name]} was edited since, or is another one"
    if name in HASH_MESSAGES and name in old and name in new:
        what, count = HASH_MESSAGES[name]
        counts = (
            f" ({_format_leaf(old, count)} then, {_format_leaf(new, count)} now)"
            if count in old and count in new
            else ""
        )
        return f"{name}: {what}{counts}"
    return f"{_current_name(name)}: {_format_leaf(old, name)}, now {_format_leaf(new, name)}"


def _current_name(name: str) -> str:
    """A recorded setting's name as people give it now."""
    group, _, field = name.partition(".")
    return f"{group}.{CURRENT_NAMES.get(field, field)}" if group == "settings" else name


def check_resumable(
    path: Path, state: Json, config: Json, environment: Json, inexact: bool, code_files: Mapping[str, str] | None
) -> bool:
    """Refuse to go on with another training than the one that is kept in a folder; whether it goes on elsewhere."""
    changed = list_differences(state["config"], config, code_files)
    if changed:
        raise different_config_error(path, changed)
    moved = list_differences(state["environment"], environment)
    if moved and not inexact:
        raise UsageError(
            f"the run in {str(path)!r} cannot go on exactly here: {'; '.join(moved)}. Restore that, or add --inexact "
            "(inexact=True) and accept other numbers than an uninterrupted run's."
        )
    return bool(moved)


def different_config_error(path: Path, changed: list[str]) -> UsageError:
    """The refusal to go on with a run that these differences make another one."""
    longer = any(line.startswith("settings.epochs: ") for line in changed)
    return UsageError(
        f"the run in {str(path)!r} has another configuration: {'; '.join(changed)}. Go on with the same settings, or "
        f"start a run of its own.{MORE_EPOCHS_HINT if longer else ''}"
    )


def _processor_name(device: torch.device) -> dict[str, str]:
    """What computes: a CPU's widest instructions, which torch chooses its code by, or a GPU's name."""
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device)}
    return {"cpu": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {}


def _content_hashes(trainer: Trainer) -> dict[str, str]:
    """The hashes of the training and the held-out data, where a source has one."""
    sources = {"content": trainer.train, "held_out_content": trainer.val}
    found = {name: getattr(source, "digest", None) for name, source in sources.items()}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _augment_entry(source: Source) -> dict[str, str]:
    """What is done to images at random, where a source of ours does it; a loader's own doings are not known."""
    if not isinstance(source, InMemorySource | StreamingSource):
        return {}
    how = source.augment
    return {"augment": (repr(how) if isinstance(how, Augment) else "crops and flips") if how else "none"}


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _format_leaf(leaves: dict[str, Any], name: str) -> str:
    return json.dumps(leaves[name]) if name in leaves else "none"


State = dict[str, Any]
MOMENTUM_KEY = "momentum_buffer"


def check_state(name: str, state: State, trainer: Trainer) -> None:
    """Raise where a part of a state is none that this trainer could go on from."""
    for part, is_good in STATE_CHECKS.items():
        try:
            good = is_good(state[part], state, trainer)
        except Exception:  # whatever a rule says to a state that is not its own
            good = False
        if not good:
            found = repr(state[part])[:80] if part in state else "missing"
            raise CheckpointError(f"{name}/state.json is not a checkpoint's: its {part} is {found}. It is not used.")


def _is_count(value: Any, *_: Any) -> bool:
    return matches_type(value, int) and value >= 0


def _is_finite_non_negative(value: Any, *_: Any) -> bool:
    return matches_type(value, float) and math.isfinite(value) and value >= 0


def _is_step(value: Any, state: State, trainer: Trainer) -> bool:
    return _is_count(value) and value <= len(trainer.train)


def _is_step_lengths(value: Any, state: State, trainer: Trainer) -> bool:
    return bool(value.keys() == {"alpha", "stretch"}) and all(map(_is_finite_non_negative, value.values()))


def _is_cost(value: Any, state: State, trainer: Trainer) -> bool:
    return bool(value.keys() == vars(trainer.game.cost).keys()) and all(map(_is_count, value.values()))


def _is_history(value: Any, state: State, trainer: Trainer) -> bool:
    told = [stats.epoch for stats in value if isinstance(stats, EpochStats)]
    return isinstance(value, list) and len(told) == len(value) and told == list(range(state["epoch"]))


def _is_schedule_state(value: Any, state: State, trainer: Trainer) -> bool:
    """Whether the schedule, which is a pure rule, can play and observe an epoch from there."""
    epoch = min(state["epoch"], trainer.config.epochs - 1)
    seen = EpochRecord(epoch, loss=1.0, accuracy=0.5, magnitude=1.0, examples=1)
    trainer.schedule.observe(value, seen)
    k = trainer.schedule.budget(value, epoch).k
    return _is_count(k) and matches_type(value.get("threshold"), float | None)


def _is_best_snapshot(value: Any, state: State, trainer: Trainer) -> bool:
    if value is None or value == "this":
        return (value is None) == (not state["history"])
    shapes = {name: tensor.shape for name, tensor in get_state_dict(trainer.model).items()}
    return isinstance(value, Snapshot) and {name: t.shape for name, t in value.weights.items()} == shapes


def _is_optimizer_state(value: Any, state: State, trainer: Trainer) -> bool:
    """Whether groups are those of this optimiser, and every weight has the same entries, of its own shape."""
    held, weights = trainer.optimizer.state_dict()["param_groups"], trainer.optimizer.param_groups
    groups, entries = value["param_groups"], value["state"]
    shapes = dict(enumerate(p.shape for group in weights for p in group["params"]))
    alike = len(groups) == len(held) and all(map(_is_param_group, groups, held))
    known = len({frozenset(entry) for entry in entries.values()}) <= 1
    return (
        alike
        and known
        and all(_is_state_entry(name, v, shapes[i]) for i, e in entries.items() for name, v in e.items())
    )


def _is_param_group(group: Any, expected: Any) -> bool:
    return bool(group.keys() == expected.keys()) and all(
        _value_type(group[name]) is _value_type(expected[name]) for name in expected
    )


def _value_type(value: Any) -> type[Any]:
    """A value's type; numbers are all of one."""
    return float if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) else type(value)


def _is_state_entry(name: str, value: Any, shape: torch.Size) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape in (shape, torch.Size())
    return value is None or (name != MOMENTUM_KEY and isinstance(value, bool | int | float))


def _is_rng_state(value: Any, state: State, trainer: Trainer) -> bool:
    torch.Generator().set_state(value["torch"])  # which refuses any other
    return True


STATE_CHECKS: dict[str, Callable[[Any, State, Trainer], bool]] = {
    "epoch": _is_count,
    "step": _is_step,
    "stopping": lambda value, *_: isinstance(value, bool),
    "lengths": _is_step_lengths,
    "schedule": _is_schedule_state,
    "cost": _is_cost,
    "active": _is_count,
    "val_passes": _is_count,
    "seconds": _is_finite_non_negative,
    "history": _is_history,
    "best": _is_best_snapshot,
    "rng": _is_rng_state,
    "optimizer": _is_optimizer_state,
    "callbacks": lambda value, *_: isinstance(value, dict),
}
