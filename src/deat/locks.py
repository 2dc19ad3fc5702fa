"""Locks on files, which the system lets go of when their holder dies, however it dies."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from deat.writing import NO_FOLLOW

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


def are_known() -> bool:
    """Whether this system has such locks at all; one of its disks may be without them still."""
    return fcntl is not None


def lock(handle: int, *, wait: bool = True) -> None:
    """Lock an open file; who does not wait gets a BlockingIOError while another holds it.

    Any other OSError says that there are no locks here.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this system has no file locks")
    fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def hold(path: Path, take: Callable[[int], None] = lock) -> int:
    """A file of this name, made where there is none, and locked by `take`; closing it lets go."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            take(handle)
            if _is_still(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last holder removed the name just now, so that others lock another file


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
