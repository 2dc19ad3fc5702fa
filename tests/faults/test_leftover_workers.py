"""A process that ends, or is killed, with the next epoch's work done ahead: nobody stays, and nothing is said."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from helpers.children import Children

SCRIPT = """
import multiprocessing, pathlib, sys, time
import torch
from deat.data import as_source

class Zeros(torch.utils.data.Dataset):
    classes = ("a", "b")
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.zeros(3, 32, 32), index % 2

source = as_source(Zeros(), batch_size=4, workers=2)
for epoch in range(2):
    for x, y in source.epoch(epoch):
        pass
pids = "\\n".join(str(child.pid) for child in multiprocessing.active_children())
pathlib.Path("part").write_text(pids)
pathlib.Path("part").rename("pids")
time.sleep(float(sys.argv[1]))
"""


def running(pid: int) -> bool:
    """Whether a process does anything; one that has ended may wait for a parent who asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(folder: Path) -> list[int]:
    deadline = monotonic() + 60
    while not (folder / "pids").exists() and monotonic() < deadline:
        sleep(0.02)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def assert_gone(pids: list[int]) -> None:
    deadline = monotonic() + 60
    while any(map(running, pids)) and monotonic() < deadline:
        sleep(0.05)
    assert [pid for pid in pids if running(pid)] == []


def test_a_script_that_ends_with_work_done_ahead_ends_silently_and_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT, "0"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    pids = workers_of(tmp_path)
    assert len(pids) == 2
    assert_gone(pids)


def test_workers_of_a_killed_process_end_too(children: Children, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    pid = children.start_script(tmp_path / "script.py", "600", cwd=tmp_path)
    pids = workers_of(tmp_path)
    assert len([pid for pid in pids if running(pid)]) == 2
    os.kill(pid, signal.SIGKILL)
    assert children.wait(pid) == -signal.SIGKILL
    assert_gone(pids)
