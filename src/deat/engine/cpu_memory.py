"""Keeping the memory of a backprop for the next one, which glibc would return to the system each time."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Names of settings in glibc's malloc.h."""
MAX_MMAP_THRESHOLD = 32 * 2**20
"""The largest value that glibc accepts; larger tensors are still returned to the system when they are freed."""
USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@contextmanager
def reused_memory() -> Iterator[None]:
    """Let glibc keep freed memory inside a with block, and return it to the system afterwards.

    Each backprop allocates and frees the same tensors. Without this, thousands of pages are returned and faulted in
    again every time. Nothing changes on other C libraries, or where the environment sets the thresholds.
    """
    library = _find_glibc()
    if library is None:
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    library.mallopt(M_TOP_PAD, MAX_MMAP_THRESHOLD)
    try:
        yield
    finally:
        library.mallopt(M_TRIM_THRESHOLD, 2 * MAX_MMAP_THRESHOLD)
        library.mallopt(M_TOP_PAD, 0)
        library.malloc_trim(0)


@cache
def _find_glibc() -> Any:
    """glibc, or None where there is another C library, or the user has set its thresholds."""
    if any(name in os.environ for name in USER_SETTINGS) or not hasattr(os, "confstr"):
        return None
    try:
        is_glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
        library = ctypes.CDLL(None)
    except (OSError, ValueError):
        return None
    return library if is_glibc and hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
