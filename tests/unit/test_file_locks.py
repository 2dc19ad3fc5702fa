"""A lock has one holder, ends with it, writes nothing elsewhere, and says so where there are none."""

import os
import signal
import time
from pathlib import Path

import pytest

from deat.utils import file_locks
from deat.utils.file_locks import file_lock
from helpers.children import Children
from helpers.locks import remove_locks


def is_free(path: Path) -> bool:
    try:
        with file_lock(path, wait=False):
            return True
    except BlockingIOError:
        return False


def test_only_one_holds_a_lock_until_it_lets_go(tmp_path):
    with file_lock(tmp_path / "new folder" / "lock"):
        assert not is_free(tmp_path / "new folder" / "lock")
    assert is_free(tmp_path / "new folder" / "lock")


def test_file_is_removed_only_where_that_is_wanted(tmp_path):
    for name, delete in (("kept", False), ("removed", True)):
        with file_lock(tmp_path / name, delete=delete):
            assert (tmp_path / name).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


HOLD = """import os, sys, time
from pathlib import Path
from deat.utils.file_locks import file_lock

with file_lock(Path("lock")):
    if "fork" in sys.argv and os.fork() == 0:
        Path("worker").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    Path("held").touch()
    time.sleep(60)
"""


@pytest.mark.promise("P8")
@pytest.mark.parametrize("workers", ["", "fork"])
def test_lock_ends_with_its_process_however_it_dies_and_not_with_its_workers(workers, children: Children, tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    holder = children.start_script(tmp_path / "hold.py", workers, cwd=tmp_path)
    while not ((tmp_path / "held").exists() and (not workers or (tmp_path / "worker").exists())):
        time.sleep(0.01)
    assert not is_free(tmp_path / "lock")
    os.kill(holder, signal.SIGKILL)
    assert children.wait(holder) == -signal.SIGKILL
    assert is_free(tmp_path / "lock")
    if workers:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


UNWIND = """import os, sys
from pathlib import Path
from deat.utils.file_locks import file_lock

with file_lock(Path("lock"), delete=True):
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    assert Path("lock").exists()
    try:
        with file_lock(Path("lock"), wait=False):
            pass
    except BlockingIOError:
        Path("busy").touch()
"""


def test_forked_process_that_ends_neither_removes_nor_releases_the_lock_of_its_parent(children: Children, tmp_path):
    (tmp_path / "unwind.py").write_text(UNWIND)
    assert children.run_script(tmp_path / "unwind.py", cwd=tmp_path) == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "busy").exists()


@pytest.mark.promise("P8")
@pytest.mark.parametrize("again", [True, False])  # made again by a third process
def test_lock_whose_file_its_last_holder_removes_just_then_is_taken_on_a_new_one(again, tmp_path, monkeypatch):
    path, lock_descriptor, locked = tmp_path / "lock", file_locks.lock_descriptor, []

    def lock_and_remove(fd, *, blocking):
        locked.append(fd)
        if len(locked) == 1:
            path.rename(tmp_path / "removed")
            if again:
                path.touch()
        return lock_descriptor(fd, blocking=blocking)

    monkeypatch.setattr(file_locks, "lock_descriptor", lock_and_remove)
    with file_lock(path):
        assert len(locked) == 2
        assert not is_free(path)


def test_hard_link_becomes_a_file_of_its_own_and_what_it_led_to_is_neither_changed_nor_locked(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "lock").hardlink_to(tmp_path / "victim")
    with file_lock(tmp_path / "lock", delete=True) as fd:
        os.write(fd, b"note")
        assert (tmp_path / "lock").read_text() == "note"
        assert is_free(tmp_path / "victim")
    assert (tmp_path / "victim").read_text() == "mine"


def test_symbolic_link_is_refused(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"), file_lock(tmp_path / "lock"):
        pass
    assert not (tmp_path / "victim").exists()


def test_without_file_locks_it_says_so_or_continues_as_wanted(tmp_path, monkeypatch):
    remove_locks(monkeypatch)
    with pytest.raises(OSError, match="no file locks"), file_lock(tmp_path / "lock"):
        pass
    with file_lock(tmp_path / "lock", required=False), file_lock(tmp_path / "lock", required=False):
        pass
