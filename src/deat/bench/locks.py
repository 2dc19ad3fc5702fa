"""Locks that a process holds as long as it lives: the kernel lets go of them when it dies, however it dies."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path


class Claim:
    """A file that only one process can hold."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path) -> "Claim | None":
        """The claim, or None while another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def drop(self) -> None:
        """Let go of it."""
        self._file.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with whoever locks the same file, after waiting for one's turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
