"""Locks on files, which the system releases when their holder dies, however it dies.

The lock itself is that of `filelock` (`lock_descriptor`: flock, or LockFileEx on Windows). Its class `FileLock`, which
also opens the file, is not used. It accepts a file with a second hard link, through which deat would write the holder's
name elsewhere. And it detects that a lock file was removed by the file's link count alone, which is not reliable on NFS.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EWOULDBLOCK
from hashlib import sha256
from pathlib import Path

from filelock import lock_descriptor

from deat.errors import BusyError, CheckpointError
from deat.utils.safe_write import NO_FOLLOW
from deat.utils.text import MessageHandler, ignore_message

LOCK_FILE_NAME = "lock"
_open_descriptors: set[int] = set()


@contextmanager
def file_lock(path: Path, *, wait: bool = True, delete: bool = False, required: bool = True) -> Iterator[int]:
    """Hold an exclusive lock on a file, which is created if it does not exist.

    Args:
        path: The file to lock. A symbolic link is refused; of a hard link, this name becomes a new file.
        wait: Whether to wait until the lock is free. If not, a lock that is not free is an error.
        delete: Whether to remove the file at the end.
        required: Whether it is an error if the system or the disk has no locks. If not, the code then runs without a lock.

    Yields:
        The descriptor of the open file.

    Raises:
        BlockingIOError: If `wait` is false and another process holds the lock.
        OSError: If the file cannot be opened, or `required` is true and there are no locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _open_locked(path, wait, required)
    _open_descriptors.add(fd)
    try:
        yield fd
    finally:
        if fd in _open_descriptors:  # a forked process closed it, and the file is still its parent's
            if delete:  # before the lock is released: after that, the name may belong to the next holder
                with suppress(OSError):
                    path.unlink()
            _open_descriptors.remove(fd)
            os.close(fd)


def _open_locked(path: Path, wait: bool, required: bool) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            _lock(fd, wait, required)
            if _is_only_name(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # others lock the new file of this name


def _lock(fd: int, wait: bool, required: bool) -> None:
    try:
        is_locked = lock_descriptor(fd, blocking=wait)
    except OSError as error:
        if required:
            raise OSError(error.errno, f"no file locks on this system or disk ({error.strerror})") from None
        return
    if not is_locked:
        raise BlockingIOError(EWOULDBLOCK, "locked by another process")


def _is_only_name(path: Path, fd: int) -> bool:
    with suppress(FileNotFoundError):
        opened = os.fstat(fd)
        if os.path.samestat(path.stat(), opened):
            if opened.st_nlink <= 1:
                return True
            path.unlink()  # a hard link to another file, which is left alone
    return False  # its last holder removed the name just now


def _close_in_child() -> None:
    for fd in _open_descriptors:
        os.close(fd)
    _open_descriptors.clear()


if hasattr(os, "register_at_fork"):
    # A lock is released when all copies of its descriptor are closed, and a loader's workers may outlive this process.
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_with_holder(path: Path, target: Path, log: MessageHandler = ignore_message) -> Iterator[None]:
    """Let only this process work on a folder or a file, and name it in the lock file, which is removed at the end.

    A system or a disk without locks gives none, which is no error.

    Args:
        path: The lock file.
        target: What the process works on, for messages.
        log: Called with a message if an earlier holder left its lock file behind.

    Raises:
        BusyError: If another process holds the lock. The message names the process.
        CheckpointError: If the lock file cannot be written.
    """
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(file_lock(path, wait=False, delete=True, required=False))
        except BlockingIOError:
            raise BusyError(
                f"{_describe_holder(path) or 'another process'} is working on {str(target)!r}. "
                "Wait for it, stop it, or choose another --out."
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot write to {str(target)!r}: {error.strerror}. Choose another --out.") from None
        if former := _describe_holder(path):
            log(f"{former} did not remove its lock; this process takes it over")
        with suppress(OSError):  # on a full disk, the file has no owner's name
            os.ftruncate(fd, 0)
            os.write(fd, json.dumps({"pid": os.getpid(), "host": _hash_host(), "since": int(time.time())}).encode())
        yield


@contextmanager
def lock_run_folder(folder: Path, log: MessageHandler = ignore_message) -> Iterator[None]:
    """Let only this process work on a run folder; see `lock_with_holder`."""
    with lock_with_holder(folder / LOCK_FILE_NAME, folder, log):
        yield


def _describe_holder(path: Path) -> str | None:
    try:
        if not path.is_file():  # a named pipe would block
            return None
        with path.open("rb") as file:
            holder = json.loads(file.read(200))
        where = "this machine" if holder["host"] == _hash_host() else "another machine"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(holder["since"])))
        return f"process {int(holder['pid'])} on {where}, since {since},"
    except (ValueError, KeyError, TypeError, OverflowError, OSError):  # empty, or not written by deat
        return None


def _hash_host() -> str:
    """Hash the machine's name, which is private."""
    return sha256(platform.node().encode()).hexdigest()[:16]
