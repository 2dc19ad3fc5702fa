"""How far a bench is: told from its folder alone, by what runs cost and not by how many there are."""

import json
from dataclasses import replace

import pytest

from deat import recipes
from deat.bench.run_claims import BenchFolder, make_cells
from deat.bench.status import BenchProgress
from deat.evaluation.evaluator import evaluate
from deat.recipes.recipe import EvaluationPlan
from helpers.eval_nets import digits, tiny
from helpers.runs import make_run

QUICK = recipes.get_recipe("quick")
CELLS = make_cells(QUICK.make_rows(["natural", "pgd-7"]), (0,), None, None)


@pytest.fixture
def grid(tmp_path):
    found = BenchFolder(tmp_path)
    found.open(QUICK, CELLS, {})
    return found


def test_nothing_is_promised_before_anything_was_done(grid):
    assert "0/2 runs  -:-- left" in BenchProgress(grid, CELLS).line().plain


def test_a_running_cell_counts_by_its_epochs(grid):
    progress = BenchProgress(grid, CELLS)
    cell, lock = grid.claim(CELLS)
    path = grid.root / cell.folder
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"settings": {"epochs": 4}, "data": {"train": 4000}}))
    (path / "history.jsonl").write_text("{}\n" * 3)
    made = progress._made(cell, grid.runs()[cell.folder])
    lock.close()
    assert made == pytest.approx(cell.row.training_cost * 3 / 4)
    line = progress.line().plain
    assert "now: natural, seed 0" in line
    assert "-:--" not in line


def judged_until(count, ledger):
    """Have so many rulings on a first block written down: natural, PGD-20, and AutoAttack's four parts."""

    def stop(pace):
        if pace.done == count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(
            tiny(), digits(4), threat="linf:0.5", attacks="natural,pgd-20,aa", block=2, resume_log=ledger, progress=stop
        )


def test_judging_counts_by_its_rulings_and_autoattack_for_most_of_it(tmp_path):
    rows = [
        replace(row, evaluation=EvaluationPlan(("natural", "pgd-20", "aa"), "last"))
        for row in QUICK.make_rows(["pgd-7"])
    ]
    (cell,) = cells = make_cells(rows, (0,), None, None)
    grid = BenchFolder(tmp_path)
    grid.open(QUICK, cells, {})
    progress = BenchProgress(grid, cells)
    folder = make_run(tmp_path / cell.folder, epochs=1)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"data": {**record["data"], "train": 4000}}))  # two blocks
    parts = []
    for count in (0, 2, 5, 6):
        judged_until(count, folder / ".evaluation-rulings.jsonl")
        parts.append(progress._made(cell, {"status": "running"}) / progress.weights[cell.folder])
    assert parts[0] < parts[1] < 0.3 < parts[2] < 0.45 < 0.5 < parts[3] < 0.7
    (folder / "evaluation.json").touch()
    assert progress._made(cell, {"status": "running"}) == pytest.approx(progress.weights[cell.folder])


def test_a_run_that_ended_is_news_once_and_one_that_had_ended_before_is_none(grid):
    grid.finish(CELLS[0], "done")
    progress = BenchProgress(grid, CELLS)
    assert progress.news() == []
    grid.finish(CELLS[1], "failed", "no such luck")
    (line,) = progress.news()
    assert line.startswith("pgd-7, seed 0: failed: no such luck")
    assert "2/2" in line
    assert progress.news() == []


def test_news_tell_autoattack_also_where_it_was_run_apart(grid):
    progress = BenchProgress(grid, CELLS)
    folder = make_run(grid.root / CELLS[0].folder, shares={"natural": 0.9, "pgd-20": 0.5})
    make_run(grid.root / "aside", shares={"natural": 0.9, "aa": 0.4}, images=50)
    (grid.root / "aside" / "evaluation.json").rename(folder / "evaluation-aa.json")
    grid.finish(CELLS[0], "done")
    (line,) = progress.news()
    assert line.startswith("natural, seed 0: natural 90.0%, pgd-20 50.0%, aa 40.0%, 120 backprops")


def test_dearer_runs_weigh_more():
    weights = {cell.row.label: cell.row.training_cost for cell in CELLS}
    assert weights["pgd-7"] > 2 * weights["natural"]
