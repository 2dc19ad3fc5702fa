"""Listings that are saved: used only where they are what deat would compute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deat.cli import saved_listings
from deat.cli.list import compute_rows
from deat.cli.saved_listings import SAVED_KINDS, find_saved_kind, load_rows, save_rows

ROWS: list[dict[str, Any]] = [{"name": "pgd-7", "backprops": 80}]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in place of deat's source, and a home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(saved_listings, "PACKAGE_ROOT", folder)
    return folder


def test_saved_rows_are_loaded_until_the_source_changes(package: Path) -> None:
    assert load_rows("methods") is None
    save_rows("methods", ROWS)
    assert load_rows("methods") == ROWS
    assert load_rows("models") is None
    (package / "b.py").write_text("")
    assert load_rows("methods") is None
    (package / "b.py").unlink()
    assert load_rows("methods") == ROWS
    (package / "a.py").write_text("a = 2\n")
    assert load_rows("methods") is None


@pytest.mark.parametrize("damage", ["[]", "{}", '{"hash": 1, "rows": [{}]}', "{", '{"hash": "", "rows": 3}', "\xff"])
def test_a_damaged_listing_is_not_used(package: Path, damage: str) -> None:
    save_rows("methods", ROWS)
    (file,) = (package.parent / "home").rglob("methods.json")
    file.write_bytes(damage.encode("latin-1"))
    assert load_rows("methods") is None


def test_an_edited_listing_is_not_used(package: Path) -> None:
    save_rows("methods", ROWS)
    (file,) = (package.parent / "home").rglob("methods.json")
    file.write_text(file.read_text().replace("80", "81"))
    assert load_rows("methods") is None


def test_nothing_is_saved_where_packages_add_plugins(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rows("methods", ROWS)
    monkeypatch.setattr(saved_listings, "entry_points", lambda group: [group])
    assert load_rows("methods") is None
    save_rows("tasks", ROWS)
    assert not list((package.parent / "home").rglob("tasks.json"))


def test_a_home_that_cannot_be_written_is_no_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(package / "a.py"))  # a file
    save_rows("methods", ROWS)
    assert load_rows("methods") is None


@pytest.mark.parametrize("kind", SAVED_KINDS)
def test_json_keeps_the_rows_of_every_saved_kind(kind: str) -> None:
    rows = compute_rows(kind)
    assert rows
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["list", "methods"], "methods"),
        (["list", "--json", "data"], "data"),
        (["list", "methods", "--code=own.py"], None),
        (["list", "plugins"], None),
        (["list", "methods", "tasks"], None),
        (["list", "--help"], None),
        (["train"], None),
        ([], None),
    ],
)
def test_only_plain_listings_are_saved(argv: list[str], kind: str | None) -> None:
    assert find_saved_kind(argv) == kind


def test_the_second_listing_is_the_first_and_needs_no_torch(tmp_path: Path) -> None:
    def list_methods(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *options, "-m", "deat", "list", "methods"]
        environment = {**os.environ, "HOME": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)

    first, second = list_methods(), list_methods("-X", "importtime")
    imported = {line.rpartition("|")[2].strip() for line in second.stderr.splitlines()}
    assert second.stdout == first.stdout
    assert "deat.cli.saved_listings" in imported
    assert "torch" not in imported
