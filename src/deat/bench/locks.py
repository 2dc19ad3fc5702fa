"""Locks that a process holds as long as it lives: the kernel lets go of them when it dies, however it dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deat.writing import NO_FOLLOW


class Claim:
    """A file that only one process can hold."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> "Claim | None":
        """The claim, or None while another process holds it."""
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return cls(handle)

    def drop(self) -> None:
        """Let go of it."""
        os.close(self._handle)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with whoever locks the same file, after waiting for one's turn."""
    handle = _open(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
