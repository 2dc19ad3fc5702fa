"""Nothing is written, appended to or removed outside a run's folder, whatever links somebody has put into it."""

import os
import shutil
from pathlib import Path

import pytest

from deat.bench.run_claims import BenchFolder, GridCell
from deat.bench.workers import run_claimed_cell
from deat.checkpoint.store import remove_temporary_files
from deat.cli.main import main
from deat.errors import CheckpointError
from deat.evaluation.attack_verifier import BlockResult
from deat.evaluation.resume_log import ResumeLog
from deat.recipes import apply_overrides, get_recipe
from deat.training.epoch_records import EpochTiming, append_record
from deat.utils.safe_write import check_no_symlinks
from helpers.runs import make_run

from .conftest import SHORT

JUDGED = ["evaluate", "run", "--attacks", "natural", "--n", "20"]
COMMANDS = {
    "resume": ["resume", "run"],
    "train": [*SHORT, "--resume", "auto"],
    "evaluate": JUDGED,
    "report": ["report", "run", "--no-figures", "--gallery", "0"],
}


@pytest.fixture
def victim() -> Path:
    """A folder of somebody's, with files whose names deat also gives."""
    for name in ("model.safetensors", ".draft.tmp", "notes", "index.html", "figures/sweep.svg"):
        path = Path("victim") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of mine\n")
    return Path("victim")


def plant(link: Path, target: Path) -> None:
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target.resolve())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


PLANTED = [
    ("best", "", ("resume", "train")),
    ("last", "", ("resume", "train")),
    ("best/model.safetensors", "model.safetensors", ("resume",)),
    ("report.md", "notes", ("resume", "train")),
    ("history.jsonl", "notes", ("resume",)),
    ("timing.jsonl", "new", ("resume",)),
    ("lock", "new", ("resume",)),
    (".evaluation-rulings.jsonl", "notes", ("evaluate",)),
    (".evaluation-rulings.jsonl", "new", ("evaluate",)),
    (".evaluation-lock", "new", ("evaluate",)),
    ("evaluation.json", "new", ("evaluate",)),
    ("report", "", ("resume", "report")),
    ("report/figures", "figures", ("report",)),
    ("report/index.html", "index.html", ("report",)),
]
CASES = [(command, name, target) for name, target, commands in PLANTED for command in commands]


@pytest.mark.promise("P10")
@pytest.mark.parametrize(("command", "name", "target"), CASES)
def test_link_where_deat_would_write_is_refused_by_name_and_nothing_changes(
    command, name, target, unfinished, victim, capsys
):
    plant(unfinished / name, victim / target)
    before = contents(victim), contents(unfinished)
    assert main(COMMANDS[command]) == 4
    message = capsys.readouterr().err
    assert f"{str(unfinished / name)!r} is a symbolic link" in message
    assert "Remove the link" in message
    assert (contents(victim), contents(unfinished)) == before


@pytest.mark.promise("P10")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("resume", "lock"),
        ("resume", "history.jsonl"),
        ("resume", "timing.jsonl"),
        ("evaluate", ".evaluation-lock"),
        ("evaluate", ".evaluation-rulings.jsonl"),
    ],
)
def test_nothing_is_written_through_a_hard_link(command, name, unfinished):
    victim = Path("victim")
    victim.write_bytes((unfinished / name).read_bytes() if (unfinished / name).exists() else b"notes of mine\n")
    before = victim.read_bytes()
    (unfinished / name).unlink(missing_ok=True)
    (unfinished / name).hardlink_to(victim)
    assert main(COMMANDS[command]) == 0
    assert victim.read_bytes() == before


@pytest.mark.promise("P10")
def test_run_s_folder_and_its_parents_may_be_links(unfinished):
    Path("far/away").mkdir(parents=True)
    unfinished.rename("far/away/run")
    Path("near").symlink_to("far")
    Path("run").symlink_to("near/away/run")
    for command in ("resume", "evaluate", "report"):
        assert main(COMMANDS[command]) == 0, command
    assert Path("far/away/run/report/index.html").is_file()


def test_report_goes_through_a_link_that_the_user_names(unfinished):
    Path("site").mkdir()
    Path("linked").symlink_to("site")
    assert main([*COMMANDS["report"], "--out", "linked"]) == 0
    assert Path("site/index.html").is_file()


@pytest.mark.promise("P10")
def test_leftovers_behind_a_link_are_left_alone(victim, tmp_path):
    kept = tmp_path / "kept"
    (kept / "best").mkdir(parents=True)
    (kept / "best/.model.safetensors.1.tmp").touch()
    (kept / "elsewhere").symlink_to(victim.resolve())
    remove_temporary_files(kept)
    assert not list((kept / "best").iterdir())
    assert (victim / ".draft.tmp").is_file()


@pytest.mark.promise("P10")
def test_lines_are_not_added_through_a_link(victim):
    for name in ("timing.jsonl", "rulings.jsonl"):
        Path(name).symlink_to(victim / "notes")
    with pytest.raises(OSError, match="symbolic link"):
        append_record(Path("timing.jsonl"), EpochTiming(0, 1.0, 1.0, 1.0))
    with pytest.raises(CheckpointError, match=r"resume log .rulings\.jsonl."):
        ResumeLog("question", Path("rulings.jsonl")).add(0, "natural", "images", BlockResult([True], 0, 0.0, 1, 0))
    assert (victim / "notes").read_text() == "notes of mine\n"


@pytest.mark.promise("P10")
@pytest.mark.parametrize("name", ["natural", "natural/seed-0", "natural/seed-0/best", "natural/seed-0/history.jsonl"])
def test_bench_does_not_play_a_run_behind_a_link(name, victim):
    grid, quick = BenchFolder(Path("table")), get_recipe("quick")
    (row,) = apply_overrides(quick.make_rows(["natural"]), {"epochs": "1", "attacks": "natural", "n": "20"})
    grid.open(quick, [cell := GridCell(row, 0)], {})
    if name.count("/") == 2:
        make_run(Path("table/natural/seed-0"), "natural", epochs=1, finished=0)
    plant(Path("table") / name, victim)
    before = contents(victim)
    assert not run_claimed_cell(grid, *grid.claim([cell]))
    assert "symbolic link" in grid.runs()[cell.folder]["why"]
    assert contents(victim) == before


@pytest.mark.parametrize("name", [".claims", "bench.json"])
def test_bench_s_own_files_are_no_links(name, victim):
    plant(Path("table") / name, victim / "new")
    with pytest.raises(CheckpointError, match="symbolic link"):
        BenchFolder(Path("table")).open(None, [], {})
    assert not os.path.lexists(victim / "new")


def test_what_is_no_link_is_not_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    check_no_symlinks([tmp_path, tmp_path / "file", tmp_path / "nothing"])
    with pytest.raises(CheckpointError, match="link' is a symbolic link"):
        check_no_symlinks([tmp_path / "file", tmp_path / "link"])
