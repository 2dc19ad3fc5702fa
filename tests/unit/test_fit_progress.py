"""What `deat.fit` shows while it works and says when it is stopped: on standard error, and nothing where not wanted."""

import os
import re
import signal
import traceback
from types import SimpleNamespace

import pytest

import deat
from deat.core.game import Game
from deat.errors import Interrupted
from deat.runs import fit as fitting
from deat.training import engine_choice
from deat.utils.distributed import Distributed
from deat.utils.signals import Interruption
from helpers.nets import conv_net, learnable

QUICK = {"method": "fgsm", "epochs": 2, "batch_size": 10, "lr": 0.1, "threat": "linf:0.05", "val_attack": "fgsm"}


def fit(**options):
    return deat.fit(conv_net(), learnable(20), val=learnable(8), **{**QUICK, **options})


def test_every_epoch_is_a_line_on_standard_error_and_nothing_is_on_standard_output(capsys):
    result = fit()
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[2:] == [result.choice.reason, *result.notes], "what a person should know comes behind the epochs"
    for line, stats in zip(lines, result.history, strict=False):
        assert line.startswith(f"fgsm  epoch {stats.epoch + 1}/2  k 1  l_X ")
        assert f"val {stats.val_natural:.1%} robust {stats.val_robust:.1%}" in line
        assert re.search(r"  [\d.]+s of [\d.]+s$", line)


def test_progress_off_is_silent_and_callbacks_of_your_own_are_called_either_way(capsys):
    class Heard:
        epochs = 0

        def on_epoch(self, trainer, stats, timing):
            Heard.epochs += 1

    fit(progress=False, callbacks=[Heard()])
    assert capsys.readouterr() == ("", "")
    notes = fit(callbacks=[Heard()]).notes
    assert len(capsys.readouterr().err.splitlines()) == 2 + 1 + len(notes)
    assert Heard.epochs == 4


def test_what_a_person_should_know_of_the_engine_is_reported_first(capsys, monkeypatch):
    monkeypatch.setattr(
        engine_choice.EngineChoice, "fallback_note", property(lambda self: "not every move is recorded: it is eager")
    )
    fit()
    assert capsys.readouterr().err.splitlines()[0] == "not every move is recorded: it is eager"
    fit(progress=False)
    assert capsys.readouterr().err == ""


def test_a_trainer_of_your_own_is_silent(capsys):
    deat.make_trainer(conv_net(), learnable(20), config=deat.TrainConfig(epochs=1, batch_size=10)).fit()
    assert capsys.readouterr() == ("", "")


def test_of_several_processes_the_first_one_alone_speaks(monkeypatch):
    told = []
    monkeypatch.setattr(fitting, "make_trainer", lambda *_, callbacks, **__: told.append(len(callbacks)) or Stopped())
    for rank in (0, 1):
        with pytest.raises(Interrupted):
            deat.fit(conv_net(), learnable(20), distributed=Distributed(rank, 2), **QUICK)
    assert told == [1, 0]


class Stopped:
    """A trainer that is asked to stop in its third epoch."""

    epoch, batches_done, config, engine_note = 2, 0, deat.TrainConfig(epochs=9), ""
    interruption, model = Interruption(), conv_net()
    train = SimpleNamespace(batch_size=QUICK["batch_size"])
    game = SimpleNamespace(cost=SimpleNamespace(backprops=0))

    def fit(self):
        raise Interrupted("asked to stop")


def stop_after(monkeypatch, batches, stop):
    real, seen = Game.end_batch, []

    def close(self, *args):
        seen.append(1)
        if len(seen) == batches:
            stop()
        return real(self, *args)

    monkeypatch.setattr(Game, "end_batch", close)


@pytest.fixture
def _interruptible():
    """Python's own handler: who starts the tests in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.promise("P24")
@pytest.mark.usefixtures("_interruptible")
def test_interrupted_training_says_where_it_is_saved_and_how_it_resumes(monkeypatch, tmp_path):
    folder = tmp_path / "kept"
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as stopped:
        stop_after(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        fit(checkpoints=folder, progress=False)
    assert str(stopped.value) == (
        f"interrupted by SIGINT in epoch 2 of 2, after batch 1; saved in {str(folder)!r}. "
        "The same call resumes from there."
    )
    assert fit(checkpoints=folder, progress=False).history == fit(progress=False).history  # as it says


@pytest.mark.parametrize(("batches", "place"), [(3, "epoch 2, batch 2"), (4, "epoch 2, its validation")])
def test_training_that_resumes_or_is_finished_says_so_first(batches, place, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "kept"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_after(patch, batches, lambda: signal.raise_signal(signal.SIGTERM))
        fit(checkpoints=folder)
    assert "resuming" not in capsys.readouterr().err
    fit(checkpoints=folder)
    first, then, *_ = capsys.readouterr().err.splitlines()
    assert first == f"resuming in {str(folder)!r} at {place}"
    assert then.startswith("fgsm  epoch 2/2")
    fit(checkpoints=folder)
    said = capsys.readouterr().err
    assert said.startswith(f"finished already in {str(folder)!r}: nothing is trained\n")
    assert "epoch 2/2" not in said
    fit(checkpoints=folder, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_without_a_folder_says_that_nothing_was_saved_and_what_would_save_it(monkeypatch):
    stop_after(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(progress=False)
    shown = "".join(traceback.format_exception(stopped.value))
    assert "interrupted in epoch 1 of 2, after batch 1; nothing was saved, since fit was given no folder" in shown
    assert "with checkpoints='some/folder' the same call resumes" in shown


def test_training_that_is_asked_to_stop_without_a_folder_says_the_same():
    class Stop:
        def on_epoch(self, trainer, stats, timing):
            trainer.interruption.request("asked to stop")

    with pytest.raises(Interrupted, match=r"asked to stop in epoch 2 of 2; nothing was saved.*checkpoints="):
        fit(callbacks=[Stop()], progress=False)
