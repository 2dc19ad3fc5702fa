"""`deat` started in two processes: one of them speaks and writes, and both end alike, whatever happens."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import deat
from deat.evaluation.attack_verifier import AttackVerifier
from deat.evaluation.results import load_evaluation
from deat.utils.distributed import Distributed
from helpers.nets import conv_net, learnable
from helpers.together import commands, statuses, together

QUICK = ("--baseline", "no", "--val-attack", "pgd-2", "--test-images", "50", "--device", "cpu")


def errors(folder: Path) -> list[str]:
    return [(folder / f"err-{rank}").read_text() for rank in range(2)]


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def forbid_writing(rank: int) -> None:
    """Make any file that a process other than the first one opens for writing an error."""
    if rank == 0:
        return
    real = os.open

    def guarded(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), f"process {rank} writes {path}"
        return real(path, flags, *rest, **options)

    os.open = guarded
    import builtins

    plain = builtins.open

    def watched(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        assert not set(mode) & set("wxa+"), f"process {rank} writes {file}"
        return plain(file, mode, *rest, **options)

    builtins.open = watched
    Path.open = lambda self, *args, **options: watched(self, *args, **options)  # type: ignore[method-assign]


def test_one_process_prints_and_writes(tmp_path: Path) -> None:
    found = commands(tmp_path, "train", "--epochs", "2", "--out", "run", *QUICK, prepare=forbid_writing)
    assert statuses(found) == [0, 0]
    assert (tmp_path / "out-1").read_text() == ""
    assert errors(tmp_path)[1] == ""
    lines = (tmp_path / "out-0").read_text().splitlines()
    assert sum(line.endswith("in 2 processes that share batches of 64") for line in lines) == 1
    assert len((tmp_path / "run/history.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "run/run.json").read_text())["processes"] == 2


def test_a_dry_run_is_reported_once(tmp_path: Path) -> None:
    assert statuses(commands(tmp_path, "train", "--dry-run", "--device", "cpu")) == [0, 0]
    assert "a dry run" in (tmp_path / "out-0").read_text()
    assert files(tmp_path) == ["err-0", "err-1", "out-0", "out-1"]


def test_a_mistake_is_explained_once(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert statuses(commands(tmp_path, "train", "--method", "m+nothing", *QUICK)) == [2, 2]
    assert "".join(errors(tmp_path)).count("unknown method") == 1


def raise_in_the_second(rank: int) -> None:
    if rank == 1:
        from deat.training.trainer import Trainer

        def broken(self: Trainer, *rest: Any) -> None:
            raise deat.training.trainer.NumericalError("the second process is unwell.")

        Trainer.prepare_step = broken  # type: ignore[method-assign]


@pytest.mark.promise("P27")
def test_an_error_of_one_process_is_what_is_seen_and_ends_all(tmp_path: Path) -> None:
    found = statuses(commands(tmp_path, "train", "--out", "run", *QUICK, prepare=raise_in_the_second), within=20)
    assert found[1] == 5
    assert found[0] not in (0, None)
    assert "the second process is unwell." in errors(tmp_path)[1]
    assert "Traceback" not in errors(tmp_path)[0]


def nan_in_the_second(rank: int) -> None:
    if rank == 1:
        from deat.core.game import Game

        real = Game.begin_batch

        def poisoned(self: Game, x: Any, y: Any, budget: Any) -> Any:
            return real(self, x * float("nan"), y, budget)

        Game.begin_batch = poisoned  # type: ignore[method-assign]


@pytest.mark.promise("P29")
def test_a_nan_in_one_process_ends_all_with_status_5(tmp_path: Path) -> None:
    found = commands(tmp_path, "train", "--epochs", "2", "--out", "run", *QUICK, prepare=nan_in_the_second)
    assert statuses(found) == [5, 5]
    assert "".join(errors(tmp_path)).count("stopped being finite in epoch 1, batch 1") == 1


def judged(ranks: Distributed, cascade: bool) -> dict[str, Any]:
    x, y = learnable(33)
    found = deat.evaluate(
        conv_net(),
        (x, y),
        threat="linf:0.1",
        attacks=["natural", "fgsm", "pgd-5", "cw-5"],
        block=6,
        cascade=cascade,
        distributed=ranks,
    )
    return {"verdicts": found.verdicts, "labels": found.labels, "flags": [f.name for f in found.flags]}


@pytest.mark.parametrize("cascade", [False, True])
def test_two_evaluates_give_the_same_verdicts_as_one(cascade: bool) -> None:
    alone = judged(Distributed(), cascade)
    assert together(judged, cascade) == [alone, alone]


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    from deat.cli.main import main

    assert main(["train", "--epochs", "1", "--out", str(tmp_path / "run"), "--threads", "1", *QUICK]) == 0
    return tmp_path


EVALUATE = ("evaluate", "run", "--n", "60", "--block", "16", "--attacks", "natural,fgsm,pgd-3", "--device", "cpu")


def test_the_evaluate_command_is_shared_and_ends_alike_everywhere(a_run: Path) -> None:
    found = statuses(commands(a_run, *EVALUATE, prepare=forbid_writing))
    assert found[0] == found[1]
    together_found = load_evaluation(a_run / "run/evaluation.json")
    (a_run / "run/evaluation.json").unlink()
    alone = statuses(commands(a_run, *EVALUATE, size=1))
    assert alone == found[:1]
    assert load_evaluation(a_run / "run/evaluation.json").verdicts == together_found.verdicts
    assert (a_run / "out-1").read_text() == ""
    assert files(a_run / "run").count("evaluation.json") == 1


def stop_at_the_third_block(rank: int) -> None:
    if rank == 0:
        real = AttackVerifier.attack_block

        def attack_block(self: AttackVerifier, attack: Any, x: Any, y: Any, block: int, *rest: Any) -> Any:
            if block == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, attack, x, y, block, *rest)

        AttackVerifier.attack_block = attack_block  # type: ignore[method-assign]


def count_blocks(rank: int) -> None:
    real = AttackVerifier.attack_block

    def attack_block(self: AttackVerifier, attack: Any, x: Any, y: Any, block: int, *rest: Any) -> Any:
        print(f"judges block {block}", file=__import__("sys").stderr)
        return real(self, attack, x, y, block, *rest)

    AttackVerifier.attack_block = attack_block  # type: ignore[method-assign]


def test_a_shared_evaluation_resumes_where_it_was_killed(a_run: Path) -> None:
    killed = statuses(commands(a_run, *EVALUATE, prepare=stop_at_the_third_block), within=20)
    assert killed[0] == -signal.SIGKILL
    assert killed[1] not in (0, None)
    for rank in range(2):
        (a_run / f"err-{rank}").unlink()
    again = statuses(commands(a_run, *EVALUATE, prepare=count_blocks))
    assert again[0] == again[1]
    ruled = [int(line.split()[-1]) for text in errors(a_run) for line in text.splitlines() if "judges block" in line]
    assert sorted(set(ruled)) == [2, 3]
    assert not list((a_run / "run").glob(".evaluation-rulings*"))


def stop_all_at_the_third_block(rank: int) -> None:
    real = AttackVerifier.attack_block

    def attack_block(self: AttackVerifier, attack: Any, x: Any, y: Any, block: int, *rest: Any) -> Any:
        if block >= 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # as one does that waits for another process
        return real(self, attack, x, y, block, *rest)

    AttackVerifier.attack_block = attack_block  # type: ignore[method-assign]


@pytest.mark.promise("P28")
def test_a_shared_evaluation_asked_to_stop_ends_as_one_process_does_and_resumes(a_run: Path) -> None:
    assert statuses(commands(a_run, *EVALUATE, prepare=stop_all_at_the_third_block), within=30) == [75, 75]
    assert "".join(errors(a_run)).count("the same command") == 1
    assert statuses(commands(a_run, *EVALUATE))[0] in (0, 6)
    assert (a_run / "run/evaluation.json").is_file()


def wait_in_vain(rank: int) -> None:
    """Ask the second process to stop while it waits, in a call of torch's, for the first, which never comes."""
    if rank == 0:
        time.sleep(60)
    threading.Thread(target=stop_when_it_waits, daemon=True).start()


def stop_when_it_waits() -> None:
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.05)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.promise("P28")
def test_a_process_that_waits_for_another_is_not_deaf(a_run: Path) -> None:
    first, second = commands(a_run, *EVALUATE, prepare=wait_in_vain)
    second.join(20)
    assert second.exitcode == 75
    assert "the same command" in errors(a_run)[1]
    first.kill()
    assert statuses([first, second]) == [-signal.SIGKILL, 75]


def test_an_unknown_gpu_is_refused_before_any_work(tmp_path: Path) -> None:
    assert statuses(commands(tmp_path, "train", "--device", "cuda:1")) == [2, 2]
    assert "each takes the GPU of its local rank" in errors(tmp_path)[0]
