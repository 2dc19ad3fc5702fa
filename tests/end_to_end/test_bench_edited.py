"""A bench of a method out of a file that is edited while the bench is made."""

import json
import shutil
from pathlib import Path

import pytest

from deat.bench import workers as cells
from deat.cli.main import main

SMALL = ["--set", "epochs=1", "--set", "n=20", "--set", "attacks=natural,pgd-2", "--set", "held_out=20"]
OWN = """
import deat

class Bad(deat.Craft):
    def __call__(self, game, x, y, budget):
        raise RuntimeError("no such luck")

own = deat.Method("own", deat.Craft(), deat.attack_schedules.Fixed(k=1, alpha_eps={alpha}))
"""


def bench(seeds: str = "0", methods: str = "own.py:own,natural") -> int:
    return main(["bench", "quick", "--methods", methods, "--seeds", seeds, "--out", "b", *SMALL])


def alpha(seed: int = 0) -> float:
    record = json.loads(Path(f"b/own/seed-{seed}/run.json").read_text())
    return float(record["method"]["schedule"]["alpha"])


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN.format(alpha=0.5))


def test_a_finished_run_of_an_edited_method_is_neither_shown_as_its_own_nor_joined_by_other_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench() in (0, 6)
    before = Path("b/bench.json").read_bytes()
    Path("own.py").write_text(OWN.format(alpha=0.25))
    for seeds in ("0", "1"):
        assert bench(seeds) == 2
        told = capsys.readouterr().err
        assert "the file of own was edited since b/own/seed-0 was trained" in told
        assert "Remove these folders to train them again, run only the other rows" in told
    assert Path("b/bench.json").read_bytes() == before
    assert bench("0,1", "natural") in (0, 6)
    shutil.rmtree("b/own/seed-0")
    assert bench("0,1") in (0, 6)
    assert alpha(0) == alpha(1) == 0.25


def test_a_method_that_failed_may_be_mended(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(OWN.format(alpha=0.5).replace("deat.Craft()", "Bad()"))
    assert bench() == 1
    Path("own.py").write_text(OWN.format(alpha=0.5))
    assert bench() in (0, 6)
    assert "own failed" not in capsys.readouterr().out.rpartition("accuracy in percent")[2]


def test_a_run_that_was_trained_and_not_evaluated_when_its_file_was_edited_is_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(cells, "evaluate", lambda *_, **__: 1 / 0)
        assert bench(methods="own.py:own") == 1
    assert alpha() == 0.5
    Path("own.py").write_text(OWN.format(alpha=0.25))
    assert bench(methods="own.py:own") in (0, 6)
    assert alpha() == 0.25
    assert "own, seed-0: started again: " in capsys.readouterr().err
