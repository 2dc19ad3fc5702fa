"""Reading of plain files alone: a named pipe in place of one would stop the reader for ever."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

NO_BLOCK: int = getattr(os, "O_NONBLOCK", 0)
"""Flag of os.open that does not wait for the writer of a pipe, on systems that have it."""
BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of os.open that leaves line ends as they are, on Windows."""


def open_plain_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file to read its bytes.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be opened, or is a pipe, a socket, a device or a folder.
    """
    handle = os.open(path, os.O_RDONLY | NO_BLOCK | BINARY)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_plain_text(path: Path, errors: str = "strict") -> str:
    """Read the text of a plain file in UTF-8.

    Args:
        path: The file.
        errors: What is done about bytes that are no text, as in `bytes.decode`.

    Raises:
        OSError: If it cannot be read, or is no plain file.
        UnicodeDecodeError: If it is no text, and `errors` is "strict".
    """
    with open_plain_file(path) as file:
        return file.read().decode("utf-8", errors)
