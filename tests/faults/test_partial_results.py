"""Ctrl-C in `deat.fit` without checkpoints gives back what there is; nothing else ends quietly."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch

import deat
from deat.core.game import Game
from deat.errors import Interrupted
from deat.evaluation.attacks import Attack
from helpers.nets import conv_net, learnable, same

QUICK = {"method": "fgsm", "epochs": 4, "batch_size": 10, "lr": 0.1, "threat": "linf:0.05", "val_attack": "pgd-2"}
"""Two batches an epoch."""


@pytest.fixture(autouse=True)
def _interruptible():
    """Python's own handler: who starts the tests in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def fit(net=None, **options):
    return deat.fit(net or conv_net(batch_norm=True), learnable(20), val=learnable(8), **{**QUICK, **options})


def after(monkeypatch, kind, name, calls, action):
    """Do something in one call of a method."""
    real, seen = getattr(kind, name), []

    def counting(self, *args):
        seen.append(1)
        if len(seen) == calls:
            action()
        return real(self, *args)

    monkeypatch.setattr(kind, name, counting)


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.promise("P151")
@pytest.mark.parametrize(("batches", "stopped_after"), [(5, (2, 1)), (6, (2, 2)), (3, (1, 1))])
def test_ctrl_c_gives_back_the_history_and_the_best_weights(batches, stopped_after, monkeypatch, capsys):
    whole = fit(progress=False)
    net = conv_net(batch_norm=True)
    with monkeypatch.context() as patch:
        after(patch, Game, "end_batch", batches, press_ctrl_c)
        result = fit(net)
    assert result.is_partial
    assert result.stopped_after == stopped_after
    assert result.history == whole.history[: stopped_after[0]]
    shorter = fit(progress=False, callbacks=[Stop(stopped_after[0])])
    assert result.best.epoch == shorter.best.epoch
    assert same(result.best.weights.values(), shorter.best.weights.values())
    assert result.choice == shorter.choice
    assert not result.model.training
    assert not any(module.training for module in net.modules())
    assert same(result.load_best().state_dict().values(), result.best.weights.values())
    said = capsys.readouterr().err
    assert result.notes[0] in said
    assert "partial" in result.notes[0]
    assert "checkpoints=" in result.notes[0]
    assert f"partial: {stopped_after[0]} of 4 epochs" in repr(result)
    assert not whole.is_partial
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Stop:
    """Ends training after so many epochs."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch(self, trainer, stats, timing):
        if trainer.epoch == self.epochs:
            trainer.stop()


def test_ctrl_c_in_validation_leaves_that_epoch_out(monkeypatch):
    after(monkeypatch, Attack, "__call__", 5, press_ctrl_c)  # two batches an epoch, natural and by pgd-2
    result = deat.fit(conv_net(), learnable(20), val=learnable(14), progress=False, **QUICK)
    assert (result.is_partial, len(result.history), result.stopped_after) == (True, 1, (1, 2))


def test_a_second_ctrl_c_ends_the_batch_itself_and_still_gives_back_what_there_is(monkeypatch):
    def press_twice():
        press_ctrl_c()
        press_ctrl_c()
        pytest.fail("the second one raises")

    after(monkeypatch, Game, "end_batch", 5, press_twice)
    result = fit(progress=False)
    assert (result.is_partial, len(result.history)) == (True, 2)


def test_in_the_first_epoch_there_is_no_result_and_the_model_is_in_eval_mode(monkeypatch):
    net = conv_net(batch_norm=True)
    after(monkeypatch, Game, "end_batch", 1, press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        fit(net, progress=False)
    assert not net.training


def test_sigterm_raises(monkeypatch):
    net = conv_net(batch_norm=True)
    after(monkeypatch, Game, "end_batch", 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGTERM in epoch 3 of 4, after batch 1; nothing was saved"):
        fit(net, progress=False)
    assert not net.training


def in_a_thread(work):
    """What a thread other than the main one returns."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_trains_and_gives_back_what_there_is_too(monkeypatch):
    assert in_a_thread(lambda: fit(progress=False)).history == fit(progress=False).history

    class Interrupt:
        def on_epoch(self, trainer, stats, timing):
            if trainer.epoch == 2:
                raise KeyboardInterrupt

    result = in_a_thread(lambda: fit(progress=False, callbacks=[Interrupt()]))
    assert (result.is_partial, len(result.history)) == (True, 2)


def test_a_partial_result_is_saved_as_a_run_without_weights_of_half_an_epoch(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        after(patch, Game, "end_batch", 7, press_ctrl_c)
        result = fit(progress=False)
    if result.best.epoch == 2:  # then these are the last epoch's too
        result = replace(result, best=replace(result.best, epoch=1))
    folder = result.save(tmp_path / "partial")
    assert (folder / "best/model.safetensors").is_file()
    assert not (folder / "last").exists()
    record = json.loads((folder / "run.json").read_text())
    assert record["stopped_after"] == [3, 1]
    assert "partial" in (folder / "report.md").read_text()
    loaded = deat.load_run(folder, model=conv_net(batch_norm=True))
    assert loaded.history == result.history
    with torch.no_grad():
        assert torch.equal(loaded.model(learnable(4)[0]), result.load_best()(learnable(4)[0]))


def test_with_checkpoints_ctrl_c_saves_and_raises(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        after(patch, Game, "end_batch", 5, press_ctrl_c)
        with pytest.raises(Interrupted, match="The same call resumes"):
            fit(progress=False, checkpoints=tmp_path / "kept")
    assert fit(progress=False, checkpoints=tmp_path / "kept").history == fit(progress=False).history
