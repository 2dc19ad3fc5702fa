"""Turns at what several processes need and one of them makes: the others wait until it is there, or its maker dead."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deat.writing import NO_FOLLOW

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


@contextmanager
def turn(path: Path) -> Iterator[bool]:
    """Alone with whoever locks the same file, which is gone afterwards; False where it cannot be locked."""
    handle = None
    with suppress(OSError):  # a disk that is read-only, or has no locks
        handle = _locked(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _leave(path, handle)


def _locked(path: Path) -> int | None:
    """The file, after waiting for one's turn; None where the system has no locks."""
    while fcntl is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        if _take(handle, path):
            return handle
        os.close(handle)
    return None


def _take(handle: int, path: Path) -> bool:
    """Lock the file; False if whoever had it before removed its name, so that others lock another one."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
    except BaseException:
        os.close(handle)
        raise


def _leave(path: Path, handle: int) -> None:
    # The name goes first: after the lock, it could be the next one's.
    with suppress(OSError):
        path.unlink()
    os.close(handle)
