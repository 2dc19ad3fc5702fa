"""Sums on the device, read once an epoch."""

import pytest
import torch

from deat.core.batch_buffers import Buffers
from deat.core.epoch_sums import EpochRecord, Meter
from deat.engine.engine import Engine
from deat.errors import NumericalError
from helpers.games import trainer_of
from helpers.nets import conv_net


def finished(n: int, *, loss: float = 1.0, hits: int = 1, magnitude: float = 2.0, valid: bool = True) -> Buffers:
    """A round of n examples that has been played."""
    r = Buffers.allocate(torch.zeros(n, 1, 2, 2), torch.zeros(n, dtype=torch.int64))
    r.loss.fill_(loss)
    r.num_correct.fill_(hits)
    r.magnitude.fill_(magnitude)
    r.update_applied.fill_(valid)
    return r


def test_record_weighs_every_example_the_same_whatever_its_batch():
    meter = Meter("cpu")
    meter.add(finished(6, loss=1.0, hits=3, magnitude=2.0))
    meter.add(finished(2, loss=5.0, hits=1, magnitude=7.0))
    assert meter.read(4) == EpochRecord(4, loss=2.0, accuracy=0.5, magnitude=26.0, examples=8)


def test_reset_begins_an_epoch():
    meter = Meter("cpu")
    meter.add(finished(6))
    meter.count_skipped(torch.tensor(True))
    meter.count_active(torch.ones(3, dtype=torch.bool))
    meter.reset()
    assert meter.read(0) == EpochRecord(0, 0.0, 0.0, 0.0, 0)


def test_last_batch_scope_keeps_only_the_last_magnitude_and_sums_all_else():
    meter = Meter("cpu", over="last_batch")
    for n, magnitude in ((6, 2.0), (6, 3.0), (2, 5.0)):
        meter.add(finished(n, magnitude=magnitude))
    record = meter.read(0)
    assert record.magnitude == 10.0
    assert record.examples == 14


def test_skipped_round_adds_nothing_and_the_skip_is_counted():
    meter = Meter("cpu")
    meter.add(finished(6))
    before = meter.sums.clone()
    meter.count_skipped(torch.tensor(True))
    meter.add(finished(4, loss=float("inf"), hits=4, magnitude=float("nan"), valid=False))
    assert torch.equal(meter.sums, before)
    record = meter.read(0)
    assert (record.examples, record.skipped, record.loss, record.magnitude) == (6, 1, 1.0, 12.0)


def test_skipped_last_batch_does_not_wipe_the_last_magnitude():
    meter = Meter("cpu", over="last_batch")
    meter.add(finished(2, magnitude=3.0))
    meter.add(finished(2, magnitude=9.0, valid=False))
    assert meter.read(0).magnitude == 6.0


def test_active_counts_ascended_examples():
    meter = Meter("cpu")
    for mask in ([True, False, True], [False, False, True]):
        meter.count_active(torch.tensor(mask))
    assert meter.read(0).num_image_steps == 3


@pytest.mark.parametrize("what", ["loss", "magnitude"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_first_batch_that_is_not_finite_is_named(what, value):
    meter = Meter("cpu")
    meter.add(finished(2))
    meter.add(finished(2))
    meter.add(finished(2, **{what: value}))
    meter.add(finished(2, **{what: value}))
    with pytest.raises(NumericalError, match="epoch 8, batch 3 of 4"):
        meter.read(7)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_is_not_recommended_that_is_in_use(precision):
    meter = Meter("cpu", non_finite_hint=Engine(precision=precision).non_finite_hint)
    meter.add(finished(2, loss=float("nan")))
    with pytest.raises(NumericalError, match=r"\. Lower the learning rate") as told:
        meter.read(0)
    assert ("precision fp32" in str(told.value)) == (precision == "bf16")


def test_sums_are_exact_over_many_small_batches():
    meter = Meter("cpu")
    for _ in range(2000):
        meter.add(finished(1, magnitude=1e4 + 0.5))
    assert meter.read(0).magnitude == 2000 * (1e4 + 0.5)


def test_training_names_the_batch_that_broke_it():
    net, calls = conv_net(), []

    def break_later(module, inputs, output):
        calls.append(1)
        return output * float("nan") if len(calls) == 6 else output

    trainer = trainer_of("natural", net)  # three batches an epoch
    net.register_forward_hook(break_later)
    with pytest.raises(NumericalError, match="epoch 2, batch 3 of 3"):
        trainer.fit()
    assert len(trainer.history) == 1
