"""Claims on a bench's cells, and turns at its record: both are let go of when their process dies."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deat.locks import hold, lock


class Claim:
    """A file that only one process can hold."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> "Claim | None":
        """The claim, or None while another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return cls(hold(path, partial(lock, wait=False)))
        except BlockingIOError:
            return None

    def drop(self) -> None:
        """Let go of it."""
        os.close(self._handle)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with whoever locks the same file, after waiting for one's turn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = hold(path)
    try:
        yield
    finally:
        os.close(handle)
