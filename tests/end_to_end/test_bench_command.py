"""`deat bench` as a person uses it: a table, gone on with after anything that can happen to it."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from deat.bench import workers
from deat.bench import workers as cells
from deat.bench.run_claims import BenchFolder
from deat.cli.main import main
from helpers.children import Children
from helpers.together import CONTEXT as FORKSERVER

SMALL = ["--set", "epochs=1", "--set", "n=20", "--set", "attacks=natural,pgd-2", "--set", "held_out=20"]
BENCH = ["bench", "quick", "--methods", "natural,m+deat", "--seeds", "0,1", *SMALL]

BAD = """
import os
from pathlib import Path
import deat

class Explode(deat.Craft):
    def __call__(self, game, x, y, budget):
        raise RuntimeError("no such luck")

class Die(deat.Craft):
    def __call__(self, game, x, y, budget):
        os.kill(os.getpid(), 9)

class Ask(deat.Craft):
    def __call__(self, game, x, y, budget):
        if not os.path.exists("asked"):
            open("asked", "w").close()
            os.kill(int(Path("bench").read_text()), 15)
        super().__call__(game, x, y, budget)

def method(name, play):
    return deat.Method(name, play, deat.attack_schedules.Fixed(k=1, alpha_eps=1.0))

explode, die, ask = method("explode", Explode()), method("die", Die()), method("ask", Ask())
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def runs_of(out: str = "runs/bench-quick") -> dict[str, dict]:
    found = json.loads((Path(out) / "bench.json").read_text())
    return {run["folder"]: run for row in found["rows"] for run in row["runs"]}


def written(out: str = "runs/bench-quick") -> dict[str, int]:
    files = [p for p in Path(out).glob("*/seed-*/**/*") if p.is_file() and not p.parent.name.startswith("ckpt-")]
    return {str(p): p.stat().st_mtime_ns for p in files}


def test_a_bench_leaves_a_run_a_cell_shows_a_table_and_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(BENCH) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("/4, " in line for line in lines) == 4
    (row,) = (line for line in lines if line.startswith("m+deat  "))
    assert row.count("±") == 3
    assert row.endswith("2/2")
    assert "*" not in row
    before = written()
    assert {Path(p).parent.name for p in before} == {"seed-0", "seed-1", "best", "last"}
    assert main([*BENCH, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["numbers"]["backprops"]["mean"] for row in found["rows"]} == {"natural": 22, "m+deat": 22}
    assert written() == before


def test_a_dry_run_tells_what_each_row_and_all_would_cost_and_creates_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = [
        "bench",
        "quick",
        "--methods",
        "natural,pgd-7,m+deat",
        "--seeds",
        "0,1,2",
        "--set",
        "epochs=4",
        "--dry-run",
    ]
    assert main([*order, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["label"], row["seeds"], row["epochs"]) for row in found["rows"]] == [
        ("natural", 3, 4),
        ("pgd-7", 3, 4),
        ("m+deat", 3, 4),
    ]
    batches = found["rows"][0]["cost"]["batches"]
    assert [row["cost"]["backprops"] for row in found["rows"]] == [[4 * batches] * 2, [32 * batches] * 2, [140, 160]]
    assert found["seconds"][1] == pytest.approx(3 * sum(row["cost"]["seconds"][1] for row in found["rows"]))
    assert main(order) == 0
    said = capsys.readouterr().out
    assert "140 to 160" in said
    assert "nothing was created" in said
    assert list(Path().iterdir()) == []


def test_an_interrupted_bench_resumes_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cells, "evaluate", interrupted)
        assert main(BENCH) == 75
    assert "resumes" in capsys.readouterr().err
    trained = written()
    assert {run["status"] for run in runs_of().values()} == {"waiting"}
    assert main(BENCH) == 0
    assert trained.items() <= written().items()  # what was trained was not trained again


@pytest.mark.promise("P3")
def test_a_finished_run_with_a_damaged_evaluation_is_evaluated_again(capsys: pytest.CaptureFixture[str]) -> None:
    order = ["bench", "quick", "--methods", "natural", "--seeds", "0", *SMALL]
    assert main([*order, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    file = Path("runs/bench-quick/natural/seed-0/evaluation.json")
    file.write_bytes(file.read_bytes()[:100])
    assert main([*order, "--json"]) == 0
    again = capsys.readouterr()
    assert again.err.count("evaluation.json is damaged, so this run is evaluated again") == 1
    assert json.loads(again.out)["rows"] == found


def test_records_brought_from_elsewhere_without_weights_are_neither_run_again_nor_lost_to_a_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = ["bench", "quick", "--methods", "natural", *SMALL]
    assert main([*order, "--seeds", "0"]) == 0
    for file in Path("runs").rglob("*"):
        if file.is_file() and file.suffix not in (".json", ".jsonl"):
            file.unlink()
    shutil.rmtree("runs/bench-quick/.claims")
    before = written()
    assert main([*order, "--seeds", "0,1"]) == 0  # a seed more is run beside it
    assert before.items() <= written().items()
    assert sum(name.endswith("model.safetensors") for name in written()) == 2
    capsys.readouterr()
    assert main(["report", "runs/bench-quick", "--gallery", "0", "--no-figures", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["seeds"], row["troubles"]) == ([0, 1], [])


@pytest.fixture
def _workers_that_have_imported_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start in milliseconds; those of a test that outlives one start as a person's do."""
    monkeypatch.setattr(workers, "get_context", lambda kind: FORKSERVER)


def test_a_bench_with_rows_at_chance_says_which_and_what_to_do_and_leaves_with_6(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order = ["bench", "quick", "--methods", "natural,fgsm", "--seeds", "0", *SMALL, "--set", "n=60", "--set", "lr=1e-9"]
    assert main(order) == 6
    said = capsys.readouterr().out
    assert "FLAG at_chance of natural, seed 0: " in said
    assert "because of the flags above: every row" in said
    assert said.count("train longer, with another --lr") == 1
    assert "docs/evaluation.md#at_chance" in said
    assert main([*order, "--json"]) == 6
    assert any("because of the flags above" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.promise("P6")
@pytest.mark.usefixtures("_workers_that_have_imported_all")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_bench_whose_folder_takes_nothing_more_ends_with_status_4(
    jobs: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    order = ["bench", "quick", "--methods", "natural", "--seeds", "0,1", "--jobs", jobs, *SMALL]
    real = BenchFolder.open

    def opened(self: BenchFolder, *rest: object) -> None:
        real(self, *rest)
        (self.root / ".claims/bench.json").unlink()
        (self.root / ".claims/bench.json").mkdir()  # in the lock's way, even for a user who may write anywhere

    monkeypatch.setattr(BenchFolder, "open", opened)
    assert main(order) == 4
    said = capfd.readouterr().err
    assert "cannot write to" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("_workers_that_have_imported_all")
@pytest.mark.parametrize(("jobs", "times"), [("1", 3), ("2", 1)])
def test_a_bench_asked_to_stop_keeps_what_it_has_and_resumes_however_often(
    jobs: str, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.py").write_text(BAD)
    Path("bench").write_text(str(os.getpid()))
    order = ["bench", "quick", "--methods", "bad.py:ask", "--seeds", "0", "--jobs", jobs, *SMALL]
    for _ in range(times):
        assert main(order) == 75
        assert "resumes" in capsys.readouterr().err
        assert runs_of()["ask/seed-0"]["status"] == "waiting"
        Path("asked").unlink()
    (newest,) = sorted(Path("runs/bench-quick/ask/seed-0").glob("ckpt-*"))[-1:]
    state = json.loads((newest / "state.json").read_text())["state"]
    assert (state["epoch"], state["step"]) == (0, times)  # a batch more each time
    Path("asked").touch()
    assert main(order) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_failing_run_says_why_and_takes_no_other_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text(BAD)
    order = ["bench", "quick", "--methods", "bad.py:explode,natural", "--seeds", "0", *SMALL]
    assert main(order) == 1
    line = BAD.splitlines().index('        raise RuntimeError("no such luck")') + 1
    why, out = f"RuntimeError: no such luck (bad.py, line {line})", capsys.readouterr().out
    failure = Path("runs/bench-quick/explode/seed-0/failure.json")
    assert f"explode failed: seed 0: {why}" in out
    assert f"the whole traceback: {failure}" in out
    assert any("bad.py" in text for text in json.loads(failure.read_text())["traceback"])
    assert main(["report", "runs/bench-quick", "--no-figures"]) == 0
    assert all(why in Path(f"runs/bench-quick/report/{name}").read_text() for name in ("table.md", "index.html"))
    capsys.readouterr()
    assert [run["status"] for run in runs_of().values()] == ["failed", "done"]
    before = written()
    Path("bad.py").write_text(BAD.replace('raise RuntimeError("no such luck")', "super().__call__(game, x, y, budget)"))
    assert main(order) == 0
    assert not failure.exists()
    after = written()
    assert {p: t for p, t in after.items() if "/natural/" in p} == {p: t for p, t in before.items() if "/natural/" in p}


def test_several_jobs_give_the_same_numbers_marked_and_outlive_a_worker_that_dies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("bad.py").write_text(BAD)
    assert main(["bench", "quick", "--methods", "natural", "--seeds", "0", "--out", "one", *SMALL]) == 0
    order = ["bench", "quick", "--methods", "bad.py:die,natural", "--seeds", "0", "--out", "two", "--jobs", "2", *SMALL]
    assert main(order) == 1
    assert "die failed: seed 0: its process died 2 times" in capsys.readouterr().out
    found = runs_of("two")
    assert {folder: run["status"] for folder, run in found.items()} == {
        "die/seed-0": "failed",
        "natural/seed-0": "done",
    }
    same = [json.loads(Path(out, "natural/seed-0/evaluation.json").read_text()) for out in ("one", "two")]
    assert same[0]["accuracy"] == same[1]["accuracy"]
    assert (
        Path("one/natural/seed-0/history.jsonl").read_bytes() == Path("two/natural/seed-0/history.jsonl").read_bytes()
    )


DYING = {"by signal 9": (signal.raise_signal, 9, 5), "with status 3": (os._exit, 3, 2)}


@pytest.mark.promise("P166")
@pytest.mark.usefixtures("_workers_that_have_imported_all")
@pytest.mark.parametrize("end", DYING)
def test_a_bench_whose_processes_die_before_they_begin_a_run_ends_and_says_so(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function, number, status = DYING[end]
    started = []

    def start(context, grid, cells):
        started.append(context.Process(target=function, args=(number,)))
        started[-1].start()
        return started[-1]

    monkeypatch.setattr(workers, "_start_worker", start)
    order = ["bench", "quick", "--methods", "natural", "--seeds", "0,1", "--jobs", "2", *SMALL]
    assert main(order) == status
    assert end in capsys.readouterr().err
    assert len(started) <= 2 * workers.MAX_IDLE_DEATHS
    assert {run["status"] for run in runs_of().values()} == {"waiting"}
    monkeypatch.undo()


@pytest.mark.promise("P167")
def test_processes_of_a_killed_bench_save_their_runs_and_end_too(children: Children) -> None:
    order = ["bench", "quick", "--methods", "natural", "--seeds", "0", "--jobs", "2", *SMALL, "--set", "epochs=5000"]
    bench = children.start(*order, cwd=Path.cwd())
    folder = Path("runs/bench-quick/natural/seed-0")
    wait_for((folder / "history.jsonl").is_file)
    pid = int(json.loads((folder / "lock").read_text())["pid"])
    os.kill(bench, signal.SIGKILL)
    assert children.wait(bench) == -signal.SIGKILL
    wait_for(lambda: not is_running(pid))
    assert not (folder / "lock").exists()
    assert {run["status"] for run in runs_of().values()} == {"waiting"}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_benches_share_a_folder_and_a_killed_one_is_resumed_with(children: Children) -> None:
    slow = ["bench", "quick", "--methods", "natural", "--seeds", "0,1", *SMALL, "--set", "epochs=16"]
    other = children.start(*slow, cwd=Path.cwd())
    history = Path("runs/bench-quick/natural/seed-0/history.jsonl")
    wait_for(lambda: history.is_file())
    os.kill(other, signal.SIGKILL)
    assert children.wait(other) == -signal.SIGKILL
    assert runs_of()["natural/seed-0"]["status"] == "running"
    other = children.start(*slow, cwd=Path.cwd())
    wait_for(
        lambda: any(run["attempts"] for run in runs_of().values()) and runs_of()["natural/seed-0"]["attempts"] == 1
    )
    assert main(slow) == 6  # two steps are too few to believe
    assert children.wait(other) == 6
    found = runs_of()
    assert {run["status"] for run in found.values()} == {"done"}
    assert {run["attempts"] for run in found.values()} == {1}  # nothing was done twice


def test_ray_spreads_the_cells_over_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    before = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert main([*BENCH, "--parallel", "ray"]) == 0
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)  # Ray leaves its own
    assert {run["status"] for run in runs_of().values()} == {"done"}
    assert {run["attempts"] for run in runs_of().values()} == {1}


CASES = [
    (["quack"], 2, ["unknown recipe 'quack'", "quick"]),
    (["quick", "--methods", "deet-3"], 2, ["unknown method 'deet-3'", "deat-3"]),
    (["quick", "--methods", "nothing.py:NAME"], 2, ["nothing.py"]),
    (["quick", "--model", "smal"], 2, ["unknown model 'smal'", "small"]),
    (["quick", "--data", "digit"], 2, ["unknown data 'digit'", "digits"]),
    (["quick", "--seeds", "a"], 2, ["'a'", "0,1,2"]),
    (["quick", "--seeds", ","], 2, ["','", "0,1,2"]),
    (["quick", "--rows", "m+deet"], 2, ["'m+deet'", "m+deat"]),
    (["quick", "--rows", " , "], 2, ["--rows", "has no name"]),
    (["quick", "--methods", ","], 2, ["--methods ','", "has no name"]),
    (["quick", "--model", ","], 2, ["--model ','", "has no name"]),
    (["quick", "--out", "x" * 300], 2, ["too long"]),
    (["quick", "--jobs", "0"], 2, ["--jobs"]),
    (["quick", "--budget-bp", "3"], 2, ["one epoch of natural", "20"]),
    (["quick", "--set", "epoks=3"], 2, ["unknown setting 'epoks'", "epochs"]),
    (["quick", "--set", "epochs=0"], 2, ["epochs", ">= 1"]),
    (["imagenet"], 2, ["--data folder:PATH"]),
    (["imagenet", "--data", "folder:nowhere"], 3, ["nowhere"]),
    (["quick", "--parallel", "ray", "--jobs", "2"], 2, ["--jobs", "ray"]),
]


@pytest.mark.parametrize(
    ("order", "status", "words"), CASES, ids=lambda case: " ".join(case) if isinstance(case, list) else ""
)
def test_bad_input_ends_before_anything_is_created(
    order: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *order]) == status
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert list(Path().iterdir()) == []


def test_recipes_are_listed_with_their_place_in_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["cifar10-standard"]["in the paper"] == "Table 3"
    assert "1,000 training images are held out" in found["cifar10-standard"]["settings"].replace("\n", " ")
    assert main(["list", "recipes"]) == 0
    shown = capsys.readouterr().out
    assert any(line.split()[:4] == ["alpha-gamma", "Figure", "3", "released"] for line in shown.splitlines())
    assert all(recipe["settings"] in shown for recipe in found.values())


def wait_for(condition: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
