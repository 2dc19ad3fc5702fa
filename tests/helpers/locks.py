"""A system without file locks."""

import errno

import pytest

from deat.utils import file_locks


def remove_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to lock a file fail as on a disk that has no locks."""

    def refuse(fd: int, *, blocking: bool = True) -> bool:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(file_locks, "lock_descriptor", refuse)
