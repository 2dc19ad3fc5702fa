"""Within an epoch the device never answers back: no method reads a tensor on the host."""

from dataclasses import replace

import pytest
import torch

import deat
from deat.data import Augment, InMemorySource
from deat.methods import list_methods
from helpers.games import EXTRAS, THREATS, busy_budget, trainer_of
from helpers.guards import HostRead, no_host_reads

TENSOR = torch.tensor([1.0, 2.0, 0.0])
MASK = TENSOR > 0
READS = {
    "item": lambda: TENSOR[0].item(),
    "tolist": lambda: TENSOR.tolist(),
    "numpy": lambda: TENSOR.numpy(),
    "array": lambda: TENSOR.__array__(),
    "cpu": lambda: TENSOR.cpu(),
    "bool": lambda: bool(MASK.any()),
    "if": lambda: 1 if MASK.all() else 0,
    "float": lambda: float(TENSOR[0]),
    "int": lambda: int(TENSOR[0]),
    "nonzero": lambda: TENSOR.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: TENSOR.masked_select(MASK),
    "mask index": lambda: TENSOR[MASK],
    "mask write": lambda: TENSOR.clone().__setitem__(MASK, torch.ones(2)),
    "unique": lambda: TENSOR.unique(),
    "equal": lambda: torch.equal(TENSOR, TENSOR),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_guard_catches_a_host_read(read):
    read()
    with pytest.raises(HostRead), no_host_reads():
        read()


def test_guard_lets_device_work_pass():
    with no_host_reads():
        masked = torch.where(MASK, TENSOR, 0.0)
        chosen = TENSOR.index_select(0, MASK.long())
        chosen.add_(masked.sum()).to(torch.float64)
    assert chosen.shape == (3,)


def play_digits(name: str, threat: deat.ThreatModel, rules: str = "default", **ascent: bool) -> deat.Trainer:
    """Two batches of digits, cropped and flipped, the second one short, under the guard."""
    method = deat.get_method(name, rules=rules)
    method = replace(method, attack=replace(method.attack, **ascent))
    part = deat.load_data("digits").train.subset(range(14))
    net = deat.add_normalization(deat.build_model("small", num_classes=10, in_channels=1, image_size=8), [0.3], [0.4])
    source = InMemorySource(part, 9, augment=Augment(pad=1, flip=True))
    trainer = trainer_of(method, net, data=source, threat=threat)
    trainer.game.meter.read = lambda epoch: None
    budget = busy_budget(method, threat)
    with no_host_reads():
        trainer.train_epoch(budget)
    return trainer


@pytest.mark.promise("P38")
@pytest.mark.parametrize("name", list_methods() + EXTRAS)
@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_no_method_reads_the_host_within_an_epoch(name, threat):
    trainer = play_digits(name, threat)
    assert trainer.game.meter.sums.tolist()[3] == 14


@pytest.mark.parametrize("name", list_methods() + EXTRAS)
def test_no_method_reads_the_host_under_the_released_rules(name):
    trainer = play_digits(name, THREATS[0], "released")
    assert trainer.game.meter.sums.tolist()[3] == 14


def test_carrying_delta_over_batches_reads_nothing():
    trainer = play_digits("free-4", THREATS[0], persistent=True)
    assert trainer.game.carried_delta is not None


def test_compact_is_the_one_option_that_reads():
    with pytest.raises(HostRead):
        play_digits("fat-5", THREATS[0], compact=True)
