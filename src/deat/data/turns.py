"""Turns at what several processes need and one of them makes: the others wait until it is there, or its maker dead."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deat import locks


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
    """The file, after waiting for one's turn; None, and no file, where the system has no locks."""
    if not locks.are_known():
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return locks.hold(path)


def _leave(path: Path, handle: int) -> None:
    # The name goes first: after the lock, it could be the next one's.
    with suppress(OSError):
        path.unlink()
    os.close(handle)
