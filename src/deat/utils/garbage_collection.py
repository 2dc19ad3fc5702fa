"""Garbage collections left out where they take long and find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_new_garbage_only() -> Iterator[None]:
    """Collect garbage only among objects that are made inside a `with` block.

    torch's modules have so many objects that a full collection takes 0.1 s and more.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside a `with` block, such as one that imports modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # new objects are old ones now, which collections of new ones leave out
            gc.enable()
