"""Reads pickles of plain data (dicts, lists, numbers, strings and byte arrays) without running any code in them."""

import io
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from deat.errors import DataError


class _ArrayStandIn:
    """Stands in for a numpy array, so that numpy's own code is never called."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _DtypeStandIn:
    """Stands in for a numpy dtype."""

    def __init__(self, type_code: str | bytes = "", *_: Any) -> None:
        self.type_code = type_code.decode() if isinstance(type_code, bytes) else type_code

    def __setstate__(self, state: Any) -> None:
        pass


def _encode_latin1(text: str, codec: str | bytes = "latin1") -> bytes:
    """Return bytes that Python 3 pickled as text."""
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
        """Return the stand-in for an allowed name; raise DataError for any other."""
        if (module, name) not in _ALLOWED_GLOBALS:
            raise DataError(f"it refers to {module}.{name}, and only plain data is read")
        return _ALLOWED_GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> NoReturn:
        """Raise DataError for a reference to an object outside the pickle."""
        raise DataError("it refers to data outside itself")


def load_plain_pickle(data: bytes, name: str) -> dict[bytes, Any]:
    """Read a pickled dict of plain data.

    Args:
        data: The pickle.
        name: The file's name, for messages.

    Returns:
        The dict, its string keys as bytes. numpy arrays in it are stand-ins for `to_uint8_array`.

    Raises:
        DataError: If the pickle is damaged, is not a dict, or refers to anything but plain data.
    """
    try:
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise DataError(
            f"{name!r} is not a CIFAR batch: {error}. Get the official release, preferably the binary one."
        ) from None
    if not isinstance(content, dict):
        raise DataError(f"{name!r} holds a {type(content).__name__}, not a CIFAR batch; get the official release.")
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}


def to_uint8_array(value: Any, shape: tuple[int, int], name: str) -> NDArray[np.uint8]:
    """Convert what `load_plain_pickle` gives for a numpy array to an array.

    Args:
        value: The stand-in.
        shape: The expected shape: number of images, bytes per image.
        name: The file's name, for the message.

    Returns:
        A uint8 array of this shape.

    Raises:
        DataError: If the value is not a uint8 array of this shape.
    """
    try:
        _, actual_shape, dtype, is_fortran, raw = value.state
        if tuple(actual_shape) != shape or dtype.type_code not in ("u1", "|u1") or len(raw) != shape[0] * shape[1]:
            raise ValueError
        flat = np.frombuffer(bytes(raw), dtype=np.uint8)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()
    except (AttributeError, TypeError, ValueError):
        raise DataError(f"{name!r} does not hold {shape[0]} images of {shape[1]} bytes; get it again.") from None
