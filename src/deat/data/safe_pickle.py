"""Pickles read as plain data: dicts, lists, numbers, strings and byte arrays, and nothing that runs."""

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deat.errors import DataError


class _ArrayStandIn:
    """Stands in for a numpy array while a pickle is read; numpy's own code is never called."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _DtypeStandIn:
    """Stands in for a numpy dtype."""

    def __init__(self, kind: str | bytes = "", *_: Any) -> None:
        self.kind = kind.decode() if isinstance(kind, bytes) else kind

    def __setstate__(self, state: Any) -> None:
        pass


def _encode_latin1(text: str, codec: str | bytes = "latin1") -> bytes:
    """Bytes that a newer Python wrote as text."""
    if codec not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"codec {codec!r}")
    return text.encode("latin1")


_ALLOWED_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _ArrayStandIn,
    ("numpy._core.multiarray", "_reconstruct"): _ArrayStandIn,
    ("numpy", "ndarray"): _ArrayStandIn,
    ("numpy", "dtype"): _DtypeStandIn,
    ("_codecs", "encode"): _encode_latin1,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for each class that such files name; any other is refused."""
        if (module, name) not in _ALLOWED_GLOBALS:
            raise DataError(f"it asks for {module}.{name}, and only plain data is read")
        return _ALLOWED_GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse what lies elsewhere."""
        raise DataError("it refers to data outside itself")


def load_plain_pickle(data: bytes, name: str) -> dict[bytes, Any]:
    """The dict in a pickle, its text keys as bytes; a DataError for anything that is more than data."""
    try:
        found = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise DataError(
            f"{name!r} is not a CIFAR batch: {error}. Get the official release, best the binary one."
        ) from None
    if not isinstance(found, dict):
        raise DataError(f"{name!r} holds a {type(found).__name__}, not a CIFAR batch; get the official release.")
    return {key.encode() if isinstance(key, str) else key: value for key, value in found.items()}


def to_uint8_array(value: Any, shape: tuple[int, int], name: str) -> NDArray[np.uint8]:
    """A pickled uint8 array of this shape."""
    try:
        _, found, kind, fortran, raw = value.state
        if tuple(found) != shape or kind.kind not in ("u1", "|u1") or len(raw) != shape[0] * shape[1]:
            raise ValueError
        flat = np.frombuffer(bytes(raw), dtype=np.uint8)
        return flat.reshape(shape, order="F" if fortran else "C").copy()
    except (AttributeError, TypeError, ValueError):
        raise DataError(f"{name!r} does not hold {shape[0]} images of {shape[1]} bytes; get it again.") from None
