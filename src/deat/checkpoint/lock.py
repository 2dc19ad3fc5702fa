"""One process a run or an evaluation: a lock that the system lets go of when its holder dies, however it dies."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from deat.errors import BusyError, CheckpointError
from deat.locks import hold
from deat.locks import lock as lock_file

LOCK = "lock"


@dataclass(frozen=True)
class Holder:
    """Who works on a run: a process, a hash of its machine's name, which is nobody's business, and since when."""

    pid: int
    host: str
    since: int

    @classmethod
    def me(cls) -> "Holder":
        """This process, now."""
        return cls(os.getpid(), sha256(platform.node().encode()).hexdigest()[:16], int(time.time()))

    def is_me(self) -> bool:
        """Whether it is this very process."""
        return (self.pid, self.host) == (os.getpid(), Holder.me().host)

    def __str__(self) -> str:
        where = "this machine" if self.host == Holder.me().host else "another machine"
        return f"process {self.pid} on {where}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))},"


@contextmanager
def owned(place: Path, say: Callable[[str], None] = lambda text: None, *, lock: Path | None = None) -> Iterator[None]:
    """Own a run's folder inside, or whatever `lock` stands for; the file that says so is gone afterwards."""
    path = lock or place / LOCK
    handle = _acquire(path, place, say)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path, place: Path, say: Callable[[str], None]) -> int:
    try:
        handle = hold(path, lambda handle: _take(handle, place))
    except OSError as error:
        raise CheckpointError(f"cannot write to {str(place)!r}: {error.strerror}. Choose another --out.") from None
    _sign(handle, say)
    return handle


def _take(handle: int, place: Path) -> None:
    try:
        lock_file(handle, wait=False)
    except BlockingIOError:
        raise BusyError(
            f"{_holder(handle) or 'another process'} is working on {str(place)!r}. Wait for it, stop it, or choose "
            "another --out."
        ) from None
    except OSError:
        return  # a system or a disk without locks


def _sign(handle: int, say: Callable[[str], None]) -> None:
    before = _holder(handle)
    if before and not before.is_me():
        say(f"{before} left this run without closing it; it is taken over")
    with suppress(OSError):  # a full disk costs the others the holder's name
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(Holder.me())).encode(), 0)


def _holder(handle: int) -> Holder | None:
    """Whoever signed last; None where that cannot be read, or no clock shows it."""
    try:
        found = json.loads(os.pread(handle, 200, 0))
        holder = Holder(int(found["pid"]), str(found["host"]), int(found["since"]))
        return holder if str(holder) else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return None
