"""A system without file locks."""

import errno

import pytest

from deat.utils import locks


def remove_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to lock a file fail as on a disk that has no locks."""

    def refuse(fd: int, *, blocking: bool = True) -> bool:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(locks, "lock_descriptor", refuse)
