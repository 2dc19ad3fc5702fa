"""A short run on digits, its command, and processes to kill."""

import shutil
from pathlib import Path

import pytest

from deat.checkpoint.store import find_newest_checkpoint
from helpers.children import Children

COMMAND = """train --method fgsm --epochs 3 --batch-size 256 --held-out 200 --val-attack pgd-1 --watch none --threads 1
--test-images 0 --baseline no --out run"""
SHORT = COMMAND.split()
BATCHES = 5
"""Batches in an epoch of the short run."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def whole(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert children.run(*SHORT, cwd=folder) == 0, (folder / "err").read_text()
    return folder / "run"


@pytest.fixture
def unfinished(whole: Path) -> Path:
    """A copy of the short run, killed before its last epoch was saved."""
    shutil.copytree(whole, "run")
    shutil.rmtree(find_newest_checkpoint(Path("run")).newest)
    Path("run/report.md").unlink()
    return Path("run")
