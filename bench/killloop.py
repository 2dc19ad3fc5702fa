"""Kill a run on digits at random moments, resume it each time, and require the bytes of a run that was never killed.

    python bench/killloop.py [--kills 200] [--seed 0] [--epochs 30] [--out docs/results/killloop.json]

A run is started, killed after a random time by SIGKILL or SIGTERM (chosen at random), and resumed until it ends. Then
the next run starts, until the number of kills is reached. Processes are forked from one that has loaded torch, so that
a kill costs one second instead of ten. The exit status is 1 if a run ends with other bytes.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from shared import Record, command_block, paragraph

import deat
from deat.checkpoint.store import find_newest_checkpoint
from deat.cli.main import main as command
from deat.runs.run_dir import has_checkpoint
from deat.utils.safe_write import write_atomic, write_json
from deat.version import get_versions

TRAIN = """train --method m+deat --batch-size 256 --held-out 200 --val-attack pgd-2 --threads 1
--test-images 0 --baseline no --resume auto"""
COMPARED = ("history.jsonl", "watch.jsonl", "best/model.safetensors", "last/model.safetensors")
IN_CHECKPOINT = ("model.safetensors", "optim.safetensors")
LONGEST = 1.5
"""Seconds after which a process is killed, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("docs/results/killloop.json"))
    asked = parser.parse_args()
    out, train = asked.out.resolve(), [*TRAIN.split(), "--epochs", str(asked.epochs), "--out"]
    warm_up()
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)
        found = loop(train, asked.kills, random.Random(asked.seed))
    record = {"kills": asked.kills, "seed": asked.seed, "epochs": asked.epochs, **found}
    record |= {"command": train, "versions": get_versions()}
    write_json(out, record)
    write_atomic(out.with_suffix(".md"), render(record).encode())
    print(render(record))
    return 0 if found["identical"] == found["runs"] else 1


def warm_up() -> None:
    """Have torch load all that it loads when it first trains, so that no child does."""
    torch.set_num_threads(1)
    images = deat.load_data("digits").train.subset(range(64))
    net = deat.build_model("small", in_channels=1, image_size=8)
    deat.fit(net, images, epochs=2, batch_size=32, val=0.5, device="cpu")


def loop(train: list[str], kills: int, draw: random.Random) -> dict[str, int]:
    """Runs that are killed until so many kills are spent, each compared with the first one, which is not."""
    finish(start(train, "whole"))
    wanted = final_bytes(Path("whole"))
    counts: Counter[str] = Counter(dict.fromkeys(("runs", "identical", "sigkill", "sigterm", "torn_saves", "saved"), 0))
    while counts["sigkill"] + counts["sigterm"] < kills:
        name = f"run-{counts['runs']}"
        left = kills - counts["sigkill"] - counts["sigterm"]
        kill_until_done(train, name, left, draw, counts)
        counts["runs"] += 1
        same = final_bytes(Path(name)) == wanted
        counts["identical"] += same
        print(f"{name}: {'the same bytes' if same else 'OTHER BYTES'}; {dict(counts)}", flush=True)
        if same:
            shutil.rmtree(name)
    return dict(counts)


def kill_until_done(train: list[str], name: str, most: int, draw: random.Random, counts: Counter[str]) -> None:
    """Start or resume a run, and kill it after a random time, until it ends by itself or kills run out."""
    for _ in range(most):
        pid, how = start(train, name), draw.choice((signal.SIGKILL, signal.SIGTERM))
        time.sleep(draw.uniform(0, LONGEST))
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        os.kill(pid, how)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        nothing = status == 130 and not has_checkpoint(Path(name))
        assert nothing or status in (-how, 75), f"{name} left with {status}: {Path('err').read_text()[-2000:]}"
        counts["sigkill" if how == signal.SIGKILL else "sigterm"] += 1
        counts["torn_saves"] += any(Path(name).glob(".tmp-*")) if Path(name).is_dir() else 0
        counts["saved"] += how == signal.SIGTERM and status == 75
    finish(start(train, name))


def start(train: list[str], name: str) -> int:
    """A process that trains or resumes a run of this name."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    with contextlib.suppress(BaseException):
        for number, file in ((1, "out"), (2, "err")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        status = command([*train, name])
    os._exit(status)


def finish(pid: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, Path("err").read_text()[-2000:]


def final_bytes(run: Path) -> dict[str, bytes]:
    """Every file in which two runs must agree."""
    newest = find_newest_checkpoint(run).newest
    assert newest is not None
    return {name: (run / name).read_bytes() for name in COMPARED} | {
        n: (newest / n).read_bytes() for n in IN_CHECKPOINT
    }


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    epochs = result["command"][result["command"].index("--epochs") + 1]
    rows = {
        "SIGKILL": result["sigkill"],
        "SIGTERM": result["sigterm"],
        "of these, ended with status 75": result["saved"],
        "kills that left an incomplete save": result["torn_saves"],
        "runs that were finished": result["runs"],
        "runs with the same final bytes as one that was never killed": result["identical"],
    }
    return "\n".join(
        [
            f"# {result['kills']} kills",
            "",
            *command_block(f"python bench/killloop.py --kills {result['kills']} --seed {result['seed']}"),
            "",
            *paragraph(
                f"The runs are {epochs}-epoch runs of m+deat on digits. Each is killed at a random moment within "
                f"{LONGEST:g} s of every start, and resumed each time."
            ),
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {count} |" for name, count in rows.items()),
            "",
            *paragraph(
                "Compared are the history, the log of the overfitting watch, the best and last weights, and the "
                "weights and momentum of the newest checkpoint."
            ),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
