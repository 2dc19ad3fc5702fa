"""Checks before training resumes: its configuration, its environment and the state of the checkpoint."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deat.checkpoint.encoding import matches_type
from deat.data import Augment, BatchSource, InMemorySource, StreamingSource
from deat.errors import CheckpointError, UsageError
from deat.evaluation.results import unpack_bits
from deat.models.weights import get_state_dict
from deat.training.best_epoch import ScoredEpoch, Snapshot
from deat.training.config import CURRENT_NAMES
from deat.training.epoch_records import EpochStats
from deat.training.run_record import describe_task, describe_train_part
from deat.training.trainer import Trainer
from deat.utils.torch_contexts import cpu_model
from deat.version import get_versions

Json = dict[str, Any]
SETTINGS_WITHOUT_EFFECT = ("workers", "threads", "device", "engine", "deterministic", "sync_bn")
"""Settings that change no results by themselves; their effect is compared as the environment."""
OPTIONAL_KEYS = (
    "data.augment",
    "data.content",
    "data.held_out_content",
    "method.summary",
    "compiled",
    "steps",
    "cpu",
    "cpu_model",
    "gpu",
)
"""Entries that older checkpoints lack; they are compared if both sides have them."""
HASH_MESSAGES = {
    "data.content": ("other training images or labels than before", "data.train"),
    "data.held_out_content": ("other held-out images or labels than before", "data.held_out"),
    "images.digest": ("the data set has other images or labels than before", ""),
    "model.tensors": ("weights of other names or sizes than before", "model.parameters"),
}
"""For each entry that is a hash: what a difference means, and the entry that counts it."""
MORE_EPOCHS_HINT = (
    " To train for more epochs, start a new run from these weights: --init RUN with another --out, or in Python fit "
    "with the trained model and another checkpoints folder."
)
"""The hint for another number of epochs, which would change the learning rates of all epochs."""


def collect_resume_config(trainer: Trainer) -> dict[str, Any]:
    """Collect all that determines a training's results.

    Args:
        trainer: The trainer.

    Returns:
        The configuration, as JSON.
    """
    settings = {name: v for name, v in trainer.config.describe().items() if name not in SETTINGS_WITHOUT_EFFECT}
    tensors = {name: [list(t.shape), str(t.dtype)] for name, t in get_state_dict(trainer.model).items()}
    method = trainer.method.describe()
    del method["summary"]  # a docstring changes no results
    config = {
        "method": method,
        "threat": trainer.threat.describe(),
        **describe_task(trainer.task),
        "settings": settings,
        "model": {"parameters": trainer.num_parameters, "tensors": hash_json(tensors)[:16]},
        "optimizer": type(trainer.optimizer).__name__.removeprefix("Device"),
        "data": {
            "train": trainer.train.num_examples,
            "classes": trainer.train.num_classes,
            "batch_size": trainer.train.batch_size,
            "held_out": trainer.val.num_examples if trainer.val else 0,
            **describe_train_part(trainer),
            **_augment_entry(trainer.train),
            **_content_hashes(trainer),
        },
    }
    if trainer.custom_param_groups is not None:
        config["own_optimizer"] = {str(i): group for i, group in enumerate(trainer.custom_param_groups)}
    return dict(json.loads(json.dumps(config)))


def collect_environment(trainer: Trainer) -> dict[str, Any]:
    """Collect what the last bits of a training's results depend on, such as versions and the processor.

    Args:
        trainer: The trainer.

    Returns:
        The environment, as JSON.
    """
    versions, device = get_versions(), trainer.engine.device.type
    return {
        "device": device,
        "precision": trainer.engine.precision,
        "deterministic": trainer.config.deterministic,
        "compiled": trainer.config.engine == "compile",  # recorded moves give the same bits as eager ones,
        "steps": type(trainer.optimizer).__name__,  # but recorded optimizer steps do not
        **_processor_name(trainer.engine.device),
        "threads": trainer.threads if device == "cpu" else None,
        "processes": trainer.distributed.size,
        **({"sync_bn": True} if trainer.config.sync_bn and trainer.distributed.is_multiprocess else {}),
        "torch": versions["torch"],
        "deat": versions["deat"],
    }


def list_inexactness_reasons(trainer: Trainer) -> list[str]:
    """List why a resumed training may differ from an uninterrupted one.

    Args:
        trainer: The trainer.

    Returns:
        The reasons; empty if resuming is exact.
    """
    if trainer.engine.device.type == "cpu":
        return []
    reasons = {
        "a GPU without --deterministic": not trainer.config.deterministic,
        "--engine compile on a GPU": trainer.config.engine == "compile",
        "--engine auto, which may start to compile during a run": trainer.may_compile,
    }
    return [reason for reason, applies in reasons.items() if applies]


def hash_json(value: Any) -> str:
    """Hash a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def list_differences(before: Json, now: Json, code_files: Mapping[str, str] | None = None) -> list[str]:
    """Describe every difference between two configurations or environments.

    Args:
        before: The saved one.
        now: The present one.
        code_files: For each entry that is a hash of user code, the name of its file.

    Returns:
        A text for each difference, such as "settings.lr: 0.1, now 0.2".
    """
    old, new = dict(_flatten(before)), dict(_flatten(now))
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if _format_leaf(old, name) != _format_leaf(new, name)
        and (name not in OPTIONAL_KEYS or (name in old and name in new))
    ]
    if "data.content" in names:  # the data set's own hash would repeat it
        names = [name for name in names if name != "images.digest"]
    return [_describe_difference(name, old, new, code_files or {}) for name in names]


def _describe_difference(name: str, old: Json, new: Json, code_files: Mapping[str, str]) -> str:
    """Describe one difference; hashes are not shown."""
    if name in code_files and name in old and name in new:
        return f"{name}: the file of {code_files[name]} has changed, or is another one"
    if name in HASH_MESSAGES and name in old and name in new:
        message, count = HASH_MESSAGES[name]
        is_counted = count in old and count in new
        counts = f" ({_format_leaf(old, count)} then, {_format_leaf(new, count)} now)" if is_counted else ""
        return f"{name}: {message}{counts}"
    return f"{_current_name(name)}: {_format_leaf(old, name)}, now {_format_leaf(new, name)}"


def _current_name(name: str) -> str:
    """A recorded setting's name as users give it now."""
    group, _, field = name.partition(".")
    return f"{group}.{CURRENT_NAMES.get(field, field)}" if group == "settings" else name


def check_resumable(
    path: Path, state: Json, config: Json, environment: Json, inexact: bool, code_files: Mapping[str, str] | None
) -> bool:
    """Check that a training may resume from a checkpoint.

    Args:
        path: The folder of checkpoints, for messages.
        state: A checkpoint, as read by `load_checkpoint`.
        config: The present configuration.
        environment: The present environment.
        inexact: Accept another environment.
        code_files: For each entry of the configuration that is a hash of user code, the name of its file.

    Returns:
        Whether the environment differs.

    Raises:
        UsageError: The configuration differs, or the environment without `inexact`.
    """
    changed = list_differences(state["config"], config, code_files)
    if changed:
        raise different_config_error(path, changed)
    environment_changes = list_differences(state["environment"], environment)
    if environment_changes and not inexact:
        raise UsageError(
            f"the run in {str(path)!r} cannot be resumed exactly here: {'; '.join(environment_changes)}. Restore that, or add "
            "--inexact (inexact=True) and accept other numbers than an uninterrupted run's."
        )
    return bool(environment_changes)


def different_config_error(path: Path, changed: list[str]) -> UsageError:
    """Make the error for a run whose configuration differs from the saved one."""
    other_epochs = any(line.startswith("settings.epochs: ") for line in changed)
    return UsageError(
        f"the run in {str(path)!r} has another configuration: {'; '.join(changed)}. Resume with the same settings, or "
        f"start a new run.{MORE_EPOCHS_HINT if other_epochs else ''}"
    )


def _processor_name(device: torch.device) -> dict[str, str]:
    """Return the GPU's name, or the CPU's instruction set and model, by which torch's libraries choose their code."""
    if device.type == "cuda":
        return {"gpu": torch.cuda.get_device_name(device)}
    if device.type != "cpu":
        return {}
    return {"cpu": torch.backends.cpu.get_cpu_capability(), "cpu_model": cpu_model()}


def _content_hashes(trainer: Trainer) -> dict[str, str]:
    """Return the hashes of the training and the held-out data, of sources that have one."""
    sources = {"content": trainer.train, "held_out_content": trainer.val}
    hashes = {name: getattr(source, "digest", None) for name, source in sources.items()}
    return {name: value for name, value in hashes.items() if isinstance(value, str)}


def _augment_entry(source: BatchSource) -> dict[str, str]:
    """Return the augmentation of our own sources; that of a user's loader is unknown."""
    if not isinstance(source, InMemorySource | StreamingSource):
        return {}
    augment = source.augment
    if not augment:
        return {"augment": "none"}
    return {"augment": repr(augment) if isinstance(augment, Augment) else "crops and flips"}


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
    """Check every part of a checkpoint's state before a trainer loads it.

    Args:
        name: The checkpoint's name, for messages.
        state: The state.
        trainer: The trainer that is to load it.

    Raises:
        CheckpointError: A part is missing or does not fit the trainer.
    """
    for part, check in STATE_CHECKS.items():
        try:
            is_valid = check(state[part], state, trainer)
        except Exception:  # checks call user code, such as a schedule's, which may raise anything
            is_valid = False
        if not is_valid:
            value = repr(state[part])[:80] if part in state else "missing"
            raise CheckpointError(f"{name}/state.json is damaged: its {part} is {value}. The checkpoint is not used.")


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
    epochs = [stats.epoch for stats in value if isinstance(stats, EpochStats)]
    return isinstance(value, list) and len(epochs) == len(value) and epochs == list(range(state["epoch"]))


def _is_schedule_state(value: Any, state: State, trainer: Trainer) -> bool:
    """Return whether the schedule, which is a pure function, accepts the state."""
    epoch = min(state["epoch"], trainer.config.epochs - 1)
    trainer.schedule.observe(value, trainer.schedule.bounding_record(epoch, trainer.config.epochs, grows=False))
    k = trainer.schedule.budget(value, epoch).k
    return _is_count(k) and matches_type(value.get("threshold"), float | None)


def _is_best_snapshot(value: Any, state: State, trainer: Trainer) -> bool:
    if value is None or value == "this":
        return (value is None) == (not state["history"])
    shapes = {name: tensor.shape for name, tensor in get_state_dict(trainer.model).items()}
    return isinstance(value, Snapshot) and {name: t.shape for name, t in value.weights.items()} == shapes


def _is_scored(value: Any, state: State, trainer: Trainer) -> bool:
    """Return whether these are scores of finished epochs, in their order; raises for verdicts that cannot be read."""
    keys = [(scored.epoch, scored.averaged) for scored in value if isinstance(scored, ScoredEpoch)]
    for scored in value:
        unpack_bits(scored.correct or "")
    is_ordered = keys == sorted(set(keys)) and all(0 <= epoch < state["epoch"] for epoch, _ in keys)
    return isinstance(value, list) and len(keys) == len(value) and is_ordered


def _is_optimizer_state(value: Any, state: State, trainer: Trainer) -> bool:
    """Return whether groups are this optimizer's, and all weights have the same entries, in their own shape."""
    expected_groups, param_groups = trainer.optimizer.state_dict()["param_groups"], trainer.optimizer.param_groups
    groups, entries = value["param_groups"], value["state"]
    shapes = dict(enumerate(p.shape for group in param_groups for p in group["params"]))
    return (
        len(groups) == len(expected_groups)
        and all(map(_is_param_group, groups, expected_groups))
        and len({frozenset(entry) for entry in entries.values()}) <= 1
        and all(_is_state_entry(name, v, shapes[i]) for i, entry in entries.items() for name, v in entry.items())
    )


def _is_param_group(group: Any, expected: Any) -> bool:
    return bool(group.keys() == expected.keys()) and all(
        _value_type(group[name]) is _value_type(expected[name]) for name in expected
    )


def _value_type(value: Any) -> type[Any]:
    """Return a value's type; all numbers count as float."""
    return float if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) else type(value)


def _is_state_entry(name: str, value: Any, shape: torch.Size) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape in (shape, torch.Size())
    return value is None or (name != MOMENTUM_KEY and isinstance(value, bool | int | float))


def _is_average_state(value: Any, state: State, trainer: Trainer) -> bool:
    return value is None if trainer.average is None else trainer.average.fits(value)


def _is_rng_state(value: Any, state: State, trainer: Trainer) -> bool:
    torch.Generator().set_state(value["torch"])  # raises if it is not one
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
    "scored": _is_scored,
    "rng": _is_rng_state,
    "optimizer": _is_optimizer_state,
    "average": _is_average_state,
    "callbacks": lambda value, *_: isinstance(value, dict),
}
