"""Pages of measurements are what their files say, also of files from before a column was there."""

import importlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import deat
from deat.data import ImageSet
from deat.training.engine_choice import CompilePolicy
from helpers.bench_scripts import importable_bench
from helpers.games import trainer_of
from helpers.nets import conv_net

ROOT = Path(__file__).parents[2]
PAGES = {
    "evaluation": "evaluation_page",
    "fast": "gpu_fast",
    "killloop": "killloop",
    "parts": "gpu_parts",
    "profile": "gpu_profile_page",
    "ranks": "ranks_page",
    "reach": "reach",
    "speed": "gpu_page",
    "stream": "gpu_stream",
}


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bench's modules can be imported, and are nobody else's."""
    with importable_bench(monkeypatch):
        yield


@pytest.fixture
def fast(bench: None) -> ModuleType:
    return importlib.import_module("gpu_fast")


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_made_from_the_committed_numbers(name: str) -> None:
    if name == "parts":
        pytest.importorskip("triton", reason="needs Triton, which is for Linux")
    result = ROOT / f"docs/results/{name}.json"
    page = importlib.import_module(PAGES[name])
    assert result.with_suffix(".md").read_text() == page.render(json.loads(result.read_text()))


def run(seconds: list[float] | None = None, **other: Any) -> dict[str, Any]:
    clock = {"seconds": seconds, "seconds_per_bp_epoch": 1.0, "warm_up_seconds": 5.0}
    found = {"bp_epochs": [1, 2], "ran": "compile", "accuracy": {"natural": 0.8, "pgd-20": 0.4}, "move": None}
    return {**clock, **found, **other}


def page_of(fast: ModuleType, runs: dict[str, Any]) -> str:
    return str(fast.render({"machine": {"device": "a GPU", "torch": "2"}, "runs": runs}))


def test_a_run_is_shown_with_its_warm_ups_and_the_engine_it_ended_with(fast: ModuleType) -> None:
    lines = page_of(fast, {"auto-bf16-0": run([6.0, 2.0]), "compile-bf16-0": run([6.0, 2.0], ran="graph")})
    assert "| auto-bf16-0, ended with compile | 3 | 3.0 | 1.000 | 5.0 | 8.0 | 80.00 |" in lines
    assert "| compile-bf16-0, fell back: graph | 3 |" in lines


def test_only_compiled_bf16_and_eager_fp32_are_compared(fast: ModuleType) -> None:
    runs = {f"{side}-{seed}": run() for side in ("compile-bf16", "eager-fp32") for seed in (0, 1)}
    with_others = page_of(fast, {**runs, "graph-bf16-0": run(), "auto-bf16-0": run()})
    assert "natural +0.00 +- 0.00" in page_of(fast, runs)
    assert "natural +0.00 +- 0.00" in with_others


@pytest.mark.parametrize(
    ("seconds", "engines", "expected"),
    [
        ([7.0, 2.0, 2.0, 2.0], ["compile"] * 4, (1.0, 5.0)),
        ([5.0, 4.0, 9.0, 2.0], ["graph"] * 2 + ["compile"] * 2, (1.0, 1.0 + 7.0)),
        ([5.0, 9.0, 2.0, 2.0], ["graph"] + ["compile"] * 3, (1.0, 3.0 + 7.0)),  # no pace of its own is known
        ([5.0, 2.0, 2.0, 6.0], ["compile"] * 3 + ["eager"], (3.0, 3.0)),
    ],
)
def test_every_engines_first_epoch_holds_a_warm_up(
    seconds: list[float], engines: list[str], expected: tuple[float, float], fast: ModuleType
) -> None:
    assert fast.paced(seconds, [2] * 4, engines) == pytest.approx(expected)


def test_an_epoch_is_noted_by_the_engine_it_ran_by_and_not_by_the_next_ones(fast: ModuleType) -> None:
    class Switch(CompilePolicy):
        def after_epoch(self, trainer: deat.Trainer, timing: object) -> None:
            trainer.engine.use_cuda_graphs = True

    trainer = trainer_of("natural", epochs=2)
    trainer.compile_policy, noted = Switch(), fast.Noted()
    trainer.callbacks.append(noted)
    trainer.run_epoch()
    assert noted.engines == ["eager"]
    assert trainer.engine.name == "graph"


@dataclass(frozen=True)
class Row:
    """A recipe's row that trains a small network, and the run that it becomes."""

    settings: dict[str, Any]

    def resolve(self, seed: int) -> SimpleNamespace:
        images = ImageSet(torch.randint(0, 256, (20, 1, 4, 4)).to(torch.uint8), torch.arange(20) % 3, tuple("012"))
        settings = {**self.settings, "precision": "fp32"}
        return SimpleNamespace(
            trainer=lambda: trainer_of("pgd-1", data=images, seed=seed, **settings),
            config=SimpleNamespace(epochs=settings["epochs"]),
            splits=SimpleNamespace(train=images, test=images),
            threat=deat.Linf(0.1),
        )


def test_a_run_says_what_every_epoch_ran_by_and_which_deat_made_it(
    fast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row({"epochs": 3})
    monkeypatch.setattr(fast, "get_recipe", lambda name: SimpleNamespace(make_rows=lambda *how: [row]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = fast.measure("any", fast.SIDES["auto-bf16"], 0, None)
    assert (found["engines"], found["ran"]) == (["eager"] * 3, "eager")
    assert found["bp_epochs"] == [2] * 3
    assert found["move"] is None
    assert found["made"] == importlib.import_module("gpu_source").made_by()
    assert "| auto-bf16-0, ended with eager | 6 |" in page_of(fast, {"auto-bf16-0": found})


def test_the_worst_agreement_of_all_methods_is_shown_and_each_is_kept(
    fast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = {name: {"loss": 0.1, "signs": 0.02, "steps": 0.3} for name in fast.MOVED}
    each[fast.NEAR] = {"loss": 0.9, "signs": 0.9, "steps": 0.9}
    each["mart-1"], each["fat-1"] = {"loss": 0.01, "signs": 0.5, "steps": 0.6}, None
    monkeypatch.setattr(fast, "apart", lambda model, batch, method: each[method])
    images = ImageSet(torch.zeros(4, 1, 4, 4, dtype=torch.uint8), torch.arange(4) % 3, tuple("012"))
    found = fast.agreement(conv_net(), images)
    assert found == {"each": each}
    page = page_of(fast, {"compile-bf16-0": run(move=found)})
    assert "| 0.10000 | 50.00% |" in page
    assert "90.00%" in page.split("\n\n")[-2], "what is left out is reported"
    each.update(dict.fromkeys(each))
    assert fast.agreement(conv_net(), images) is None, "nothing was compiled, so nothing agrees"


def test_moves_of_every_method_are_compared_and_a_fall_back_is_not_an_agreement(
    fast: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "DEVICE", "cpu")
    images = ImageSet(torch.randint(0, 256, (12, 1, 4, 4)).to(torch.uint8), torch.arange(12) % 3, tuple("012"))
    for method in (*fast.MOVED, fast.NEAR):
        r = fast.moved(conv_net(batch_norm=True), images, method, "eager", "bf16")
        assert r.delta.any(), method
        assert r.loss > 0, method
    ask = fast.moved
    monkeypatch.setattr(fast, "moved", lambda net, batch, method, engine, how: ask(net, batch, method, "eager", how))
    found = fast.apart(conv_net(batch_norm=True), images, fast.NEAR)
    assert (found["loss"], found["signs"], found["steps"]) == (0.0, 0.0, 0.0)
    assert 0 < found["compile_from_fp32"] == found["eager_from_fp32"] < 0.5, "either is beside float32, and near it"
    monkeypatch.setattr(fast, "moved", lambda net, batch, method, engine, how: None)
    assert fast.apart(conv_net(), images, "pgd-1") is None


def test_trades_is_compared_with_float32_where_the_file_has_it(fast: ModuleType) -> None:
    old = {"loss": 0.0, "signs": 0.3, "steps": 0.3}
    new = {**old, "signs": 0.09, "compile_from_fp32": 0.141, "eager_from_fp32": 0.139}
    runs = {
        f"compile-bf16-{seed}": run(move={"each": {fast.NEAR: held, "pgd-1": old}})
        for seed, held in enumerate((old, new))
    }
    page = page_of(fast, runs)
    text = " ".join(page.split())
    assert "30.00% of its signs differ." in text
    assert "9.00% of its signs differ. From eager fp32, 14.10% differ with compiled moves and 13.90% with" in text
    assert all(len(line) <= 100 for line in page.splitlines() if not line.startswith("|"))


def test_a_number_says_which_files_made_it_with_and_without_git(tmp_path: Path) -> None:
    source = importlib.import_module("gpu_source")
    package, twin = tmp_path / "one" / "deat", tmp_path / "two" / "deat"
    for folder in (package, twin):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("x = 1\n")
        (folder / "a.pyc").write_text(folder.as_posix())
    found = source.made_by(package)
    assert found == source.made_by(twin) == {"commit": None, "source": found["source"]}
    assert source.describe_source(found) == f"source digest {found['source']}"
    assert source.describe_source(None) == "commit not recorded"
    (twin / "a.py").rename(twin / "b.py")
    assert source.made_by(twin) != found
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "a.py"), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", *words], cwd=package, check=True)
    (package / "a.pyc").unlink()
    named = source.made_by(package)
    assert named["source"] == found["source"]
    assert not named["commit"].endswith("+")
    (package / "a.py").write_text("x = 2\n")
    assert source.made_by(package)["commit"] == f"{named['commit']}+"
