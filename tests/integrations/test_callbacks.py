"""Callbacks: every event in its order, plain functions, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import deat
from deat.errors import Interrupted, UsageError
from helpers.nets import conv_net, learnable

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 40, "threat": "linf:0.1", "method": "free-2", "progress": False}


class Diary(deat.Callback):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.result: Any = "nothing"

    def on_train_begin(self, trainer):
        self.events.append(f"begin at {trainer.epoch}")

    def on_batch(self, trainer, buffers):
        self.events.append(f"batch {trainer.epoch}.{trainer.batches_done}")
        self.losses.append(float(buffers.loss))

    def on_validation(self, trainer, scores):
        self.events.append(f"validation {trainer.epoch}")
        assert 0 <= scores.robust <= scores.natural <= 1

    def on_epoch(self, trainer, stats, timing):
        self.events.append(f"epoch {stats.epoch}")
        assert sum(self.losses) / len(self.losses) == pytest.approx(stats.loss, rel=1e-5)
        self.losses.clear()

    def on_checkpoint(self, trainer, path):
        self.events.append(f"checkpoint {trainer.epoch}")
        assert (path / "model.safetensors").is_file()

    def on_train_end(self, trainer, result):
        self.events.append("end")
        self.result = result


def test_every_event_comes_in_its_order(tmp_path: Path) -> None:
    diary, images = Diary(), learnable(80)
    result = deat.fit(conv_net(), images, val=images, callbacks=[diary], checkpoints=tmp_path / "kept", **QUICK)
    epochs = [[f"batch {e}.1", f"batch {e}.2", f"validation {e}", f"epoch {e}", f"checkpoint {e + 1}"] for e in (0, 1)]
    assert diary.events == ["checkpoint 0", "begin at 0", *epochs[0], *epochs[1], "end"]
    assert diary.result is result


def test_the_end_of_an_interrupted_training_has_no_result(tmp_path: Path) -> None:
    class Interrupt(deat.Callback):
        def on_batch(self, trainer, buffers):
            trainer.interruption.request("enough")

    diary = Diary()
    with pytest.raises(Interrupted):
        deat.fit(conv_net(), learnable(80), callbacks=[diary, Interrupt()], checkpoints=tmp_path / "kept", **QUICK)
    assert diary.events[-1] == "end"
    assert diary.result is None


def test_a_plain_function_and_a_bound_method_are_called_after_each_epoch() -> None:
    seen: list[int] = []
    history: list[deat.EpochStats] = []

    class Counter:
        def count(self, trainer, stats, timing):
            seen.append(-stats.epoch - 1)

    def stop(trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        history.append(stats)
        trainer.stop()

    result = deat.fit(conv_net(), learnable(80), callbacks=[lambda *_: seen.append(1), Counter().count, stop], **QUICK)
    assert seen == [1, -1]
    assert history == result.history


def test_plain_functions_are_called_at_every_event(tmp_path: Path) -> None:
    diary, images = Diary(), learnable(80)
    events: list[str] = []
    functions = deat.LambdaCallback(
        on_train_begin=lambda trainer: events.append(f"begin at {trainer.epoch}"),
        on_batch=lambda trainer, buffers: events.append(f"batch {trainer.epoch}.{trainer.batches_done}"),
        on_validation=lambda trainer, scores: events.append(f"validation {trainer.epoch}"),
        on_epoch=lambda trainer, stats, timing: events.append(f"epoch {stats.epoch}"),
        on_checkpoint=lambda trainer, path: events.append(f"checkpoint {trainer.epoch}"),
        on_train_end=lambda trainer, result: events.append("end"),
    )
    few = deat.LambdaCallback(on_train_end=diary.on_train_end)
    callbacks = [functions, diary, few]
    deat.fit(conv_net(), images, val=images, callbacks=callbacks, checkpoints=tmp_path / "kept", **QUICK)
    assert [*events, "end"] == diary.events


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (
            {"on_batch": lambda trainer: None},
            r"LambdaCallback does not take two arguments.*on_batch\(trainer, buffers\)",
        ),
        ({"on_batch": "print"}, "on_batch='print' is no function"),
        ({}, "has no function"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_before_any_work(functions: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        deat.fit(conv_net(), learnable(80), callbacks=[deat.LambdaCallback(**functions)], **QUICK)


@pytest.mark.parametrize(
    ("event", "words"),
    [("on_batch", r"two arguments.*on_batch\(trainer, buffers\)"), ("on_train_begin", "one argument")],
)
def test_a_method_with_other_arguments_is_refused_before_any_work(event: str, words: str) -> None:
    callback = type("Wrong", (), {event: lambda self, a, b, c, d: None})()
    with pytest.raises(UsageError, match=words):
        deat.fit(conv_net(), learnable(80), callbacks=[callback], **QUICK)


def test_callbacks_of_batches_do_not_change_a_bit() -> None:
    networks = [conv_net(), conv_net()]
    for net, callbacks in zip(networks, ([], [Diary()]), strict=True):
        deat.fit(net, learnable(80), callbacks=callbacks, **QUICK)
    assert all(torch.equal(p, q) for p, q in zip(*(net.parameters() for net in networks), strict=True))
