"""A file that was written is on the disk, and so is its name, before anything relies on it."""

import os
from pathlib import Path

import pytest

from deat.utils.safe_write import append_text, write_atomic


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Every wait for the disk: the contents that were waited for, and what the file of that name held just then."""
    found: list[tuple[str, str | None]] = []
    real, target = os.fsync, tmp_path / "file"

    def fsync(handle: int) -> None:
        here = [p for p in (tmp_path, *tmp_path.iterdir()) if os.path.samestat(os.fstat(handle), p.stat())]
        named = target.read_text() if target.exists() else None
        found.append(("the folder" if here == [tmp_path] else here[0].read_text(), named))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_file_is_on_the_disk_before_it_has_its_name_and_the_name_is_too(tmp_path, synced):
    write_atomic(tmp_path / "file", b"old")
    write_atomic(tmp_path / "file", b"new")
    assert synced == [("old", None), ("the folder", "old"), ("new", "old"), ("the folder", "new")]


def test_text_that_was_added_is_on_the_disk(tmp_path, synced):
    append_text(tmp_path / "file", "one\n")
    append_text(tmp_path / "file", "two\n")
    assert synced == [("one\n", "one\n"), ("one\ntwo\n", "one\ntwo\n")]
