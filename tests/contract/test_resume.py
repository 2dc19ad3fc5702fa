"""A training that goes on from the disk gives the bytes of one that was never interrupted, for every method."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import deat
from deat.errors import Interrupted
from deat.methods import names
from deat.training.checkpoints import Checkpoints
from helpers.games import EXTRAS, trainer_of
from helpers.nets import conv_net

OPTIONS = {"epochs": 4, "rate": "cyclic", "val": 0.25, "val_attack": "pgd-2"}
PER_EPOCH = 2
"""Batches in an epoch of trainer_of's images, a quarter of them held out."""


def persistent(name: str) -> deat.Method:
    method = deat.method(name)
    return replace(method, ascent=replace(method.ascent, persistent=True))


METHODS = {**{name: deat.method(name) for name in names() + EXTRAS}, "persistent m+deat": persistent("m+deat")}


def fresh(method: deat.Method, seed: int = 0, **options: object) -> deat.Trainer:
    net = conv_net(batch_norm=True, dropout=0.2, seed=seed)
    return trainer_of(method, net, **{**OPTIONS, **options})


def everything(trainer: deat.Trainer) -> list[object]:
    """All that two trainings must agree in, to the last bit."""
    tensors = {**trainer.model.state_dict()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"best.{name}": value for name, value in trainer.best.snapshot.weights.items()}
    if trainer.game.carry is not None:
        tensors["carry"] = trainer.game.carry
    bits = {name: value.numpy().tobytes() for name, value in tensors.items()}
    return [bits, trainer.state, [json.dumps(asdict(stats)) for stats in trainer.history], vars(trainer.game.cost)]


def interrupt_at(trainer: deat.Trainer, batches: int) -> None:
    """Ask for a stop once so many batches have been played."""
    plays = []

    def count(*_: object) -> None:
        plays.append(1)
        if len(plays) == batches:
            trainer.interruption.ask()

    real = trainer.game.close
    trainer.game.close = lambda r: (real(r), count())


@pytest.fixture(scope="module")
def wholes() -> dict[str, list[object]]:
    return {}


@pytest.mark.parametrize("stop", [PER_EPOCH * 2, PER_EPOCH * 2 + 1], ids=["after an epoch", "in mid-epoch"])
@pytest.mark.parametrize("name", METHODS)
def test_resumed_training_equals_an_uninterrupted_one(name, stop, tmp_path, wholes):
    method = METHODS[name]
    if name not in wholes:
        whole = fresh(method)
        whole.fit()
        wholes[name] = everything(whole)
    first, second = fresh(method), fresh(method, seed=7)
    interrupt_at(first, stop)
    first.keeper = Checkpoints(tmp_path)
    with pytest.raises(Interrupted):
        first.fit()
    second.keeper = Checkpoints(tmp_path)
    assert second.keeper.resume(second)
    assert (second.epoch * PER_EPOCH + second.step, second.game.cost) == (stop, first.game.cost)
    second.fit()
    assert everything(second) == wholes[name]


def test_nothing_to_resume_is_said_by_returning_false(tmp_path: Path):
    trainer = trainer_of("natural")
    assert not Checkpoints(tmp_path).resume(trainer)
    assert not Checkpoints(tmp_path / "nowhere").resume(trainer)
