"""Locks on files, which the system lets go of when their holder dies, however it dies."""

import errno
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from deat.errors import BusyError, CheckpointError
from deat.utils.files import NO_FOLLOW

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


def has_file_locks() -> bool:
    """Whether this system has such locks at all; one of its disks may be without them still."""
    return fcntl is not None


def lock_file(handle: int, *, wait: bool = True) -> None:
    """Lock an open file; who does not wait gets a BlockingIOError while another holds it.

    Any other OSError says that there are no locks here.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this system has no file locks")
    fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_locked(path: Path, acquire: Callable[[int], None] = lock_file) -> int:
    """A file of this name, made where there is none, and locked by `take`; closing it lets go."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            acquire(handle)
            if _is_same_file(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed the name just now, so that others lock another file


def _is_same_file(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


class CellLock:
    """A file that only one process can hold."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> "CellLock | None":
        """The claim, or None while another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return cls(open_locked(path, partial(lock_file, wait=False)))
        except BlockingIOError:
            return None

    def drop(self) -> None:
        """Let go of it."""
        os.close(self._handle)


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Alone with whoever locks the same file, after waiting for one's turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open_locked(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def temporary_lock(path: Path) -> Iterator[bool]:
    """Alone with whoever locks the same file, which is gone afterwards; False where it cannot be locked."""
    handle = None
    with suppress(OSError):  # a disk that is read-only, or has no locks
        handle = _open_locked_if_supported(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _unlink_and_close(path, handle)


def _open_locked_if_supported(path: Path) -> int | None:
    """The file, after waiting for one's turn; None, and no file, where the system has no locks."""
    if not has_file_locks():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return open_locked(path)


def _unlink_and_close(path: Path, handle: int) -> None:
    # The name goes first: after the lock, it could be the next one's.
    with suppress(OSError):
        path.unlink()
    os.close(handle)


LOCK_FILE_NAME = "lock"


@dataclass(frozen=True)
class LockHolder:
    """Who works on a run: a process, a hash of its machine's name, which is nobody's business, and since when."""

    pid: int
    host: str
    since: int

    @classmethod
    def current(cls) -> "LockHolder":
        """This process, now."""
        return cls(os.getpid(), sha256(platform.node().encode()).hexdigest()[:16], int(time.time()))

    def is_current_process(self) -> bool:
        """Whether it is this very process."""
        return (self.pid, self.host) == (os.getpid(), LockHolder.current().host)

    def __str__(self) -> str:
        where = "this machine" if self.host == LockHolder.current().host else "another machine"
        return f"process {self.pid} on {where}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))},"


@contextmanager
def lock_run_folder(
    folder: Path, log: Callable[[str], None] = lambda text: None, *, lock_path: Path | None = None
) -> Iterator[None]:
    """Own a run's folder inside, or whatever `lock` stands for; the file that says so is gone afterwards."""
    path = lock_path or folder / LOCK_FILE_NAME
    handle = _acquire_run_lock(path, folder, log)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire_run_lock(path: Path, folder: Path, log: Callable[[str], None]) -> int:
    try:
        handle = open_locked(path, lambda handle: _lock_or_raise_busy(handle, folder))
    except OSError as error:
        raise CheckpointError(f"cannot write to {str(folder)!r}: {error.strerror}. Choose another --out.") from None
    _write_holder(handle, log)
    return handle


def _lock_or_raise_busy(handle: int, folder: Path) -> None:
    try:
        lock_file(handle, wait=False)
    except BlockingIOError:
        raise BusyError(
            f"{_read_holder(handle) or 'another process'} is working on {str(folder)!r}. Wait for it, stop it, or choose "
            "another --out."
        ) from None
    except OSError:
        return  # a system or a disk without locks


def _write_holder(handle: int, log: Callable[[str], None]) -> None:
    before = _read_holder(handle)
    if before and not before.is_current_process():
        log(f"{before} left this run without closing it; it is taken over")
    with suppress(OSError):  # a full disk costs the others the holder's name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(LockHolder.current())).encode(), 0)


def _read_holder(handle: int) -> LockHolder | None:
    """Whoever signed last; None where that cannot be read, or no clock shows it."""
    try:
        found = json.loads(os.pread(handle, 200, 0))
        holder = LockHolder(int(found["pid"]), str(found["host"]), int(found["since"]))
        return holder if str(holder) else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return None
