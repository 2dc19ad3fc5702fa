"""The bench's folder: a cell is one process's at a time, and free again when that process is gone."""

import errno
import json
import os

import pytest

from deat import recipes
from deat.bench.run_claims import MAX_ATTEMPTS, BenchFolder, make_cells, remove_damaged_evaluations
from deat.errors import CheckpointError, DataError, UsageError
from deat.report.run_results import load_bench
from helpers.locks import remove_locks
from helpers.runs import make_run

QUICK = recipes.get_recipe("quick")


def cells(methods=("natural", "pgd-7"), seeds=(0, 1)):
    return make_cells(QUICK.make_rows(methods), seeds, None, None)


@pytest.fixture
def grid(tmp_path):
    found = BenchFolder(tmp_path / "bench")
    found.open(QUICK, cells(), {})
    return found


def test_seeds_come_one_after_the_other_so_that_rows_can_be_compared_early():
    assert [cell.folder for cell in cells()] == ["natural/seed-0", "pgd-7/seed-0", "natural/seed-1", "pgd-7/seed-1"]


def test_two_benches_never_claim_the_same_cell(grid):
    other = BenchFolder(grid.root)
    other.open(QUICK, cells(), {})
    taken = [holder.claim(cells()) for holder in (grid, other, grid, other)]
    assert sorted(cell.folder for cell, _ in taken) == sorted(cell.folder for cell in cells())
    assert other.claim(cells()) is None


def test_runs_that_share_the_machine_are_marked_and_others_are_not(grid):
    alone, lock = grid.claim(cells())
    grid.finish(alone, "done")
    lock.close()
    held = [grid.claim(cells()) for _ in range(2)]
    jobs = {folder: run["concurrent_jobs"] for folder, run in grid.runs().items()}
    assert jobs[alone.folder] == 1
    assert [jobs[cell.folder] for cell, _ in held] == [2, 2]


def test_a_crowded_run_stays_marked_when_it_is_resumed_alone(grid):
    held = [grid.claim(cells()) for _ in range(2)]
    for cell, lock in held:
        grid.finish(cell, "waiting")
        lock.close()
    again, _lock = grid.claim(cells())
    assert again.folder == held[0][0].folder
    assert grid.runs()[again.folder]["concurrent_jobs"] == 2


def test_the_cell_of_a_dead_process_is_free_again_but_not_for_ever(grid):
    for _ in range(MAX_ATTEMPTS):
        cell, lock = grid.claim(cells()[:1])
        lock.close()  # as the kernel does for a process that was killed
    assert cell.folder == "natural/seed-0"
    assert grid.claim(cells()[:1]) is None
    run = grid.runs()["natural/seed-0"]
    assert (run["status"], "died" in run["why"]) == ("failed", True)
    grid.open(QUICK, cells(), {})
    assert grid.runs()["natural/seed-0"]["status"] == "waiting"


def test_cells_whose_process_is_gone_are_buried_and_living_ones_are_not(grid):
    (dead, lock), (living, _) = (grid.claim(cells()) for _ in range(2))
    lock.close()
    grid.fail_dead_cells(cells())
    found = grid.runs()
    assert (found[dead.folder]["status"], found[living.folder]["status"]) == ("failed", "running")
    assert sum(run["status"] == "waiting" for run in found.values()) == 2


def test_a_bench_is_refused_in_words_where_there_are_no_locks_to_claim_cells_by(tmp_path, monkeypatch):
    remove_locks(monkeypatch)
    with pytest.raises(CheckpointError, match="no file locks"):
        BenchFolder(tmp_path / "bench").open(QUICK, cells(), {})


def finish_all(grid):
    for _ in cells():
        cell, lock = grid.claim(cells())
        make_run(grid.root / cell.folder, shares={"natural": 0.9})
        grid.finish(cell, "done")
        lock.close()


def test_finished_cells_are_not_claimed_and_new_seeds_are_added(grid):
    finish_all(grid)
    grid.open(QUICK, cells(seeds=(0, 1, 7)), {})
    assert grid.claim(cells(seeds=(0, 1, 7)))[0].folder == "natural/seed-7"


@pytest.mark.promise("P3")
@pytest.mark.parametrize("name", ["evaluation.json", "evaluation-last.json", "history.jsonl", "run.json"])
@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"attacks": [], "flags": [], "labels": [1]}', "\x00\n"])
def test_a_finished_cell_whose_results_are_damaged_is_free_again(grid, name, text):
    finish_all(grid)
    (grid.root / "pgd-7/seed-1" / name).write_text(text)
    grid.open(QUICK, cells(), {})
    cell, _lock = grid.claim(cells())
    assert cell.folder == "pgd-7/seed-1"
    assert grid.claim(cells()) is None


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation-last.json"])
def test_results_that_a_later_deat_wrote_are_not_taken_for_damaged(grid, name):
    finish_all(grid)
    cell = grid.root / "pgd-7/seed-1"
    told = json.loads((cell / "evaluation.json").read_text())
    (cell / name).write_text(json.dumps({**told, "schema": 99}))
    with pytest.raises(DataError, match="Upgrade deat"):
        grid.open(QUICK, cells(), {})
    with pytest.raises(DataError, match="Upgrade deat"):
        remove_damaged_evaluations(cell)
    assert json.loads((cell / name).read_text())["schema"] == 99


@pytest.mark.promise("P6")
def test_a_disk_that_takes_nothing_more_is_explained_and_the_cell_stays_free(grid, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cell, lock = grid.claim(cells())
    with monkeypatch.context() as patch:
        patch.setattr("deat.runs.record_files.write_json", full)
        for work in (
            lambda: grid.claim(cells()[1:]),
            lambda: grid.finish(cell, "done"),
            lambda: grid.fail_dead_cells(cells()),
            lambda: grid.open(QUICK, cells(), {}),
        ):
            with pytest.raises(CheckpointError, match=r"No space left on device.*the same command again"):
                work()
    lock.close()
    grid.open(QUICK, cells(), {})
    assert grid.claim(cells())[0] == cell


def test_a_folder_of_another_bench_or_of_something_else_is_refused(grid, tmp_path):
    with pytest.raises(UsageError, match="quick"):
        grid.open(recipes.get_recipe("ablation"), [], {})
    with pytest.raises(UsageError, match="lr"):
        grid.open(QUICK, cells(), {"set": {"lr": "0.1"}})
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(UsageError, match="no bench"):
        BenchFolder(tmp_path / "photos").open(QUICK, cells(), {})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--out"):
        BenchFolder(tmp_path / "file" / "bench").open(QUICK, cells(), {})


def test_two_methods_of_one_name_are_refused(tmp_path):
    (tmp_path / "mine.py").write_text("import deat\nMINE = deat.get_method('pgd-7')\n")
    both = cells(["pgd-7", f"{tmp_path}/mine.py:MINE"])
    with pytest.raises(UsageError, match="another name"):
        BenchFolder(tmp_path / "bench").open(QUICK, both, {})


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"rows": [{"runs": [{}]}]})])
def test_a_broken_record_is_refused(grid, text):
    (grid.root / "bench.json").write_text(text)
    with pytest.raises(CheckpointError, match="bench's record"):
        grid.runs()


@pytest.mark.parametrize("name", ["recipe", "settings", "rows"])
@pytest.mark.parametrize("value", [17, None])
def test_a_record_with_a_part_of_another_kind_is_refused_and_kept(grid, name, value):
    file = grid.root / "bench.json"
    text = json.dumps({**json.loads(file.read_text()), name: value})
    file.write_text(text)
    with pytest.raises(CheckpointError, match="bench's record"):
        grid.open(QUICK, cells(), {})
    with pytest.raises(DataError, match="not what deat bench writes"):
        load_bench(grid.root)
    assert file.read_text() == text
