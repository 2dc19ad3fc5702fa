"""Numbers that go bad end a run with 5 and a note, and never reach the disk."""

import errno
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from deat.checkpoint.store import find_newest_checkpoint
from deat.cli.main import main
from deat.core.game import Game
from deat.data import InMemorySource
from deat.engine.engine import Engine
from deat.errors import DataError, NumericalError, UsageError
from deat.evaluation.attack_verifier import AttackVerifier
from deat.runs import final_scores
from deat.runs.run_dir import RunFolder
from deat.training.checkpoints import Checkpoints
from deat.training.trainer import Trainer
from helpers.games import trainer_of
from helpers.nets import conv_net

from .conftest import BATCHES, SHORT
from .test_saving import assert_same_run


def spoil_batch(monkeypatch: pytest.MonkeyPatch, number: int, value: float) -> None:
    """The loss of one batch becomes this value, counted from the beginning of training."""
    real, calls = Game.compute_both_gradients, []

    def spoilt(self, r, *args, **options):
        result = real(self, r, *args, **options)
        calls.append(1)
        if len(calls) == number:
            r.loss.fill_(value)
        return result

    monkeypatch.setattr(Game, "compute_both_gradients", spoilt)


@pytest.mark.promise("P31")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_loss_ends_with_5_names_the_first_bad_step_and_leaves_the_last_good_checkpoint(
    value, whole, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        spoil_batch(patch, BATCHES + 3, value)
        assert main([*SHORT, "--seed", "0"]) == 5
    message = capsys.readouterr().err
    assert "epoch 2, batch 3 of 5" in message
    note = json.loads(Path("run/failure.json").read_text())
    assert (note["epoch"], note["batch"], note["k"], note["seed"]) == (2, 3, 1, 0)
    assert note["alpha"] == pytest.approx(1.25 * 0.15)
    assert 0 < note["lr"] < 0.05
    assert all(word in message for word in ("k 1", "alpha 0.1875", "lr 0.0", "seed 0"))
    assert find_newest_checkpoint(Path("run")).newest.name == "ckpt-000001"
    assert len(Path("run/history.jsonl").read_text().splitlines()) == 1
    assert main(["resume", "run"]) == 0  # the fault was the test's: without it the run goes on
    assert not Path("run/failure.json").exists()
    assert_same_run(Path("run"), whole)


@pytest.mark.promise("P31")
def test_bad_loss_before_an_interruption_is_not_saved(tmp_path, monkeypatch):
    spoil_batch(monkeypatch, 5, math.nan)
    trainer = trainer_of("fgsm", conv_net())
    Checkpoints(tmp_path).resume_or_start(trainer)
    real = trainer.game.end_batch
    trainer.game.end_batch = lambda r: (
        real(r),
        trainer.interruption.request() if trainer.epoch and trainer.batches_done else None,
    )
    with pytest.raises(NumericalError, match="epoch 2, batch 2"):
        trainer.fit()
    assert find_newest_checkpoint(tmp_path).newest.name == "ckpt-000001"


@pytest.mark.promise("P32")
@pytest.mark.parametrize("where", ["weight", "running_var", "momentum"])
def test_poisoned_state_is_never_saved(where, tmp_path):
    trainer = trainer_of("fgsm", conv_net(batch_norm=True), epochs=3)

    class Poison:
        def on_epoch(self, trainer, stats, timing) -> None:
            if stats.epoch == 1:
                held = trainer.optimizer.state[next(trainer.model.parameters())]
                target = held["momentum_buffer"] if where == "momentum" else getattr(trainer.model[1], where)
                with torch.no_grad():
                    target.view(-1)[0] = math.nan

    trainer.callbacks.append(Poison())
    Checkpoints(tmp_path).resume_or_start(trainer)
    with pytest.raises(NumericalError, match="stopped being finite"):
        trainer.fit()
    assert find_newest_checkpoint(tmp_path).newest.name == "ckpt-000001"
    assert not list(tmp_path.glob(".tmp-*"))


def status_of_one_that_fails_later(error, monkeypatch):
    """The exit status of a training whose eighth joint move raises an error."""
    real, calls = Game._joint_update, []

    def joint(self, *args):
        calls.append(1)
        if len(calls) > 7:
            raise error
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Game, "_joint_update", joint)
        return main(SHORT)


@pytest.mark.promise("P34")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "Python"],
)
def test_memory_that_runs_out_is_status_5_with_the_batch_size_and_a_way_out(error, whole, monkeypatch, capsys):
    assert status_of_one_that_fails_later(error, monkeypatch) == 5
    message = capsys.readouterr().err
    assert "out of memory" in message
    assert "batch_size 256" in message
    assert "smaller batch_size" in message
    assert "Traceback" not in message
    assert main(["resume", "run"]) == 0  # with the batch size it had
    assert_same_run(Path("run"), whole)


@pytest.mark.parametrize("how", ["(pid(s) 12, 13) exited unexpectedly", "(pid 12) is killed by signal: Killed. "])
def test_process_that_decodes_images_and_is_killed_is_status_3_with_a_way_out(how, whole, monkeypatch, capsys):
    error = RuntimeError(f"DataLoader worker {how}")
    assert status_of_one_that_fails_later(error, monkeypatch) == 3
    message = capsys.readouterr().err
    assert "a process that decodes images was killed" in message
    assert "--workers" in message
    assert "Traceback" not in message
    assert main(["resume", "run"]) == 0
    assert_same_run(Path("run"), whole)


PLACES = {
    "the network's way to the device": (Engine, "prepare", SHORT, "--batch-size"),
    "the data's way to the device": (InMemorySource, "__init__", SHORT, "--batch-size"),
    "what is to be saved": (Trainer, "state_dict", SHORT, "--batch-size"),
    "the final scores": (final_scores, "compute_accuracies", [*SHORT, "--test-images", "20"], "--batch-size"),
    "an evaluation": (
        AttackVerifier,
        "attack_block",
        ["evaluate", "run", "--attacks", "natural", "--n", "20"],
        "--block",
    ),
}


@pytest.mark.promise("P34")
@pytest.mark.parametrize("place", PLACES)
def test_memory_that_runs_out_outside_of_training_is_status_5_with_a_way_out(place, whole, monkeypatch, capsys):
    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    owner, name, command, flag = PLACES[place]
    if command[0] == "evaluate":
        shutil.copytree(whole, "run")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, short)
        assert main(command) == 5
    message = capsys.readouterr().err
    assert "out of memory" in message
    assert flag in message
    assert "Traceback" not in message
    assert main([*command, "--resume", "auto"] if command[0] == "train" else command) in (0, 6)


def test_operation_without_a_deterministic_form_is_named_with_the_way_out():
    trainer = trainer_of("fgsm", conv_net(), deterministic=True)

    def undetermined(r: object) -> None:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError(
            "put_1 does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
        )

    trainer.game.end_batch = undetermined
    with pytest.raises(UsageError, match=r"put_1 does not have .* Omit --deterministic"):
        trainer.fit()
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_errors_of_the_runtime_are_not_taken_for_a_lack_of_memory():
    trainer = trainer_of("fgsm", conv_net())
    trainer.game.end_batch = lambda r: (_ for _ in ()).throw(RuntimeError("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        trainer.fit()


@pytest.mark.promise("P47")
def test_data_that_cannot_be_read_any_more_is_status_3_and_the_run_resumes_later(whole, monkeypatch, capsys):
    real = InMemorySource.epoch

    def removed(self, epoch):
        if epoch == 1 and self.shuffle:
            raise DataError("cannot read 'cat/1.png' (No such file or directory).")
        return real(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(InMemorySource, "epoch", removed)
        assert main(SHORT) == 3
    assert "1.png" in capsys.readouterr().err
    assert main(["resume", "run"]) == 0
    assert_same_run(Path("run"), whole)


def test_records_that_could_not_be_written_are_written_with_the_next_epoch(whole, monkeypatch, capsys):
    import deat.runs.run_dir as run_dir

    real, calls = run_dir.append_record, []

    def full(path, record):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, record)

    monkeypatch.setattr(run_dir, "append_record", full)
    assert main(SHORT) == 0
    assert "No space left" in capsys.readouterr().err
    assert_same_run(Path("run"), whole)


@pytest.mark.promise("P51")
def test_old_run_is_kept_until_the_one_that_replaces_it_has_an_epoch(whole, monkeypatch):
    assert main(SHORT) == 0
    with monkeypatch.context() as patch:
        spoil_batch(patch, 2, math.nan)
        assert main([*SHORT, "--overwrite"]) == 5
    assert_same_run(Path("run"), whole)  # the old one is back
    assert not Path(".run.replaced").exists()
    seen = []
    real = RunFolder.on_epoch
    monkeypatch.setattr(
        RunFolder, "on_epoch", lambda self, *a: (seen.append(Path(".run.replaced/report.md").exists()), real(self, *a))
    )
    assert main([*SHORT, "--overwrite", "--seed", "1"]) == 0
    assert seen == [True, False, False]
    assert not Path(".run.replaced").exists()
    assert Path("run/history.jsonl").read_bytes() != (whole / "history.jsonl").read_bytes()
