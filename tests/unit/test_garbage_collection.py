"""Garbage collections that are left out."""

import gc
import weakref

import pytest

from deat.utils.garbage_collection import collect_new_garbage_only, without_garbage_collection


class Node:
    def __init__(self) -> None:
        self.me = self  # garbage that only a collection finds


def make_garbage() -> weakref.ref[Node]:
    return weakref.ref(Node())


@pytest.fixture(autouse=True)
def _restored():
    yield
    gc.unfreeze()
    gc.enable()


def test_only_new_garbage_is_collected_inside_the_block_and_all_after_it() -> None:
    gc.disable()
    old = make_garbage()
    with collect_new_garbage_only():
        new = make_garbage()
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_as_before_after_a_block_without_them(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), without_garbage_collection():
        assert not gc.isenabled()
        found = make_garbage()
        raise ImportError
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert found() is None
