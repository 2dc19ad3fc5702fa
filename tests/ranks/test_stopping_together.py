"""Two processes that are stopped, killed or broken end together, and go on together to the same bytes."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import deat
from deat.errors import CheckpointError, Interrupted
from deat.methods.change_settings import configure_method
from deat.training.checkpoints import Checkpoints
from deat.utils.distributed import Distributed, _agree_on_store_prefix
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable
from helpers.together import commands, meeting_place, statuses, together

RUN = (
    *("train", "--epochs", "3", "--out", "run", "--baseline", "no", "--val-attack", "pgd-2", "--test-images", "0"),
    *("--device", "cpu", "--threads", "1"),
)


def errors(folder: Path) -> list[str]:
    return [(folder / f"err-{rank}").read_text() for rank in range(2)]


def kill_the_second(rank: int) -> None:
    """End the second process, without a word, in the middle of the second epoch."""
    from deat.training.trainer import Trainer

    real = Trainer.prepare_step

    def deadly(self: Trainer, epoch: int, step: int) -> None:
        if rank == 1 and (epoch, step) == (1, 7):
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, epoch, step)

    Trainer.prepare_step = deadly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    assert statuses(commands(folder, *RUN)) == [0, 0]
    return folder / "run"


@pytest.mark.promise("P26")
def test_a_killed_process_ends_all_and_the_run_resumes_to_the_same_bytes(tmp_path: Path, whole: Path) -> None:
    found = statuses(commands(tmp_path, *RUN, prepare=kill_the_second), within=20)
    assert found == [75, -signal.SIGKILL]
    assert "another process of this run is gone" in errors(tmp_path)[0]
    assert not (tmp_path / "run/lock").exists()
    assert statuses(commands(tmp_path, *RUN, "--resume", "auto")) == [0, 0]
    assert "resuming run at epoch 2" in (tmp_path / "out-0").read_text()
    for name in ("history.jsonl", "watch.jsonl", "best/model.safetensors", "last/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_another_number_of_processes_is_refused(tmp_path: Path, whole: Path) -> None:
    assert statuses(commands(whole.parent, *RUN, "--resume", "auto", size=1)) == [2]
    assert "processes: 2, now 1" in (whole.parent / "err-0").read_text()


def stop_in_the_second(rank: int) -> None:
    """Send one process alone a signal, in the middle of the second epoch."""
    from deat.training.trainer import Trainer

    real = Trainer.prepare_step

    def told(self: Trainer, epoch: int, step: int) -> None:
        if rank == 1 and (epoch, step) == (1, 7):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # as from a launcher that passes it on
        real(self, epoch, step)

    Trainer.prepare_step = told  # type: ignore[method-assign]


@pytest.mark.promise("P28")
def test_a_signal_to_one_process_stops_all_at_the_same_batch(tmp_path: Path, whole: Path) -> None:
    found = statuses(commands(tmp_path, *RUN, prepare=stop_in_the_second), within=30)
    assert found == [75, 75]
    assert (
        "".join(errors(tmp_path)).count("Resume with: torchrun --standalone --nproc-per-node=2 -m -- deat resume run")
        == 1
    )
    assert statuses(commands(tmp_path, "resume", "run")) == [0, 0]
    assert "resuming run at epoch 2, batch 9" in (tmp_path / "out-0").read_text()
    assert (tmp_path / "run/history.jsonl").read_bytes() == (whole / "history.jsonl").read_bytes()


def persistent() -> deat.Method:
    return configure_method(deat.get_method("free-4"), deat.Linf(0.1), persistent=True)


def in_parts(ranks: Distributed, folder: Path, name: str) -> list[Any]:
    """A training's end, uninterrupted and interrupted after any of its batches."""
    method = persistent() if name == "persistent" else deat.get_method(name)

    def trainer() -> deat.Trainer:
        net = conv_net(batch_norm=True, dropout=0.2)
        return trainer_of(
            method, net, data=learnable(25), val=learnable(9, seed=2), epochs=2, batch_size=9, distributed=ranks
        )

    def end(t: deat.Trainer) -> list[Any]:
        state = [v.flatten().tolist() for v in t.model.state_dict().values()]
        return [[vars(s) for s in t.history], state, t.game.carried_delta is not None and t.game.carried_delta.tolist()]

    uninterrupted = trainer()
    uninterrupted.fit()
    same = []
    for stop in (1, 2, 4):
        first, second = trainer(), trainer()
        _ask_after(first, stop)
        Checkpoints(folder / f"{stop}").resume_or_start(first)
        try:
            first.fit()
        except Interrupted:
            same.append("stopped")
        Checkpoints(folder / f"{stop}").resume_or_start(second)
        second.fit()
        same.append(end(second) == end(uninterrupted))
    return same


def _ask_after(trainer: deat.Trainer, batches: int) -> None:
    real, seen = trainer.prepare_step, [0]

    def counted(epoch: int, step: int) -> None:
        seen[0] += 1
        if seen[0] == batches and trainer.distributed.rank == 1:
            trainer.interruption.request("enough")
        real(epoch, step)

    trainer.prepare_step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["m+deat", "m+trades", "persistent", "fat-5"])
def test_processes_that_were_interrupted_go_on_exactly(name: str, tmp_path: Path) -> None:
    assert together(in_parts, tmp_path, name) == [["stopped", True] * 3] * 2


def unsaved(ranks: Distributed, folder: Path) -> list[str]:
    """A disk that is full for one save: all processes hear of it, and none waits for another."""
    trainer = trainer_of("m+deat", data=learnable(24), epochs=3, distributed=ranks)
    said: list[str] = []
    keeper = Checkpoints(folder, notify=said.append)
    real, calls = keeper._write_checkpoint, [0]

    def full(*rest: Any) -> str:
        calls[0] += 1
        if calls[0] == 3:
            raise CheckpointError("the disk is full")
        return real(*rest)

    keeper._write_checkpoint = full  # type: ignore[method-assign]
    keeper.resume_or_start(trainer)
    trainer.fit()
    return [*said, str(len(trainer.history))]


def test_a_save_that_fails_is_known_to_all(tmp_path: Path) -> None:
    first, second = together(unsaved, tmp_path)
    assert first == second
    assert first[0].startswith("the disk is full. Training continues")
    assert first[1] == "3"


def test_a_run_that_is_busy_is_refused_by_all(tmp_path: Path, whole: Path) -> None:
    from deat.utils.file_locks import lock_run_folder

    with lock_run_folder(whole):
        assert statuses(commands(whole.parent, *RUN, "--resume", "auto"), within=30) == [7, 7]


def test_processes_that_start_again_do_not_meet_those_that_died() -> None:
    store = meeting_place()
    store.set("ask/1", "of a process that is gone")
    names = []
    for _ in range(2):  # torchrun keeps its store from start to start
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda rank: _agree_on_store_prefix(client(store), rank, 2), range(2))
        assert first == second
        names.append(first)
    assert names[0] != names[1]


def client(store: Any) -> Any:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)
