"""The page on adversarial training of five tasks: what its script trains, and that its numbers are the records'."""

import importlib
import re
from collections.abc import Iterator
from statistics import mean, stdev
from types import ModuleType
from typing import Any

import pytest
import torch

from deat.data import DataSplits, ImageSet
from deat.errors import Interrupted
from deat.tasks import Classification, MultiLabel, Regression, Segmentation
from helpers.bench_scripts import importable_bench


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with importable_bench(monkeypatch):
        yield importlib.import_module("task_results_page")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with importable_bench(monkeypatch):
        yield importlib.import_module("task_results")


ROBUST = {"natural": (0.1, 0.2, 0.1), "pgd-7": (0.4, 0.5, 0.6), "pgd-7 short": (0.4, 0.42, 0.41)}
ROBUST |= {"m+deat": (0.7, 0.8, 0.75), "m+trades": (0.5, 0.5, 0.5)}


def record(label: str, seed: int, robust: float) -> dict[str, Any]:
    metrics = {"natural": {"accuracy": 0.9}, "pgd-20": {"accuracy": robust}, "worst": {"accuracy": robust}}
    intervals = {attack: {"accuracy": [0.25, 0.75]} for attack in metrics}
    spent = {"natural": 100, "m+deat": 400}.get(label, 800)
    return {
        **{"task": "spoken-digits", "label": label, "seed": seed, "eps": 0.002, "snr_db": 24.0, "lr": 0.05},
        **{"epochs": 10, "batch_size": 64, "weights": 46_154, "train_examples": 2700, "test_examples": 300},
        **{"backprops": spent + seed, "metrics": metrics, "intervals": intervals, "flags": [], "precision": "bf16"},
        **{"cpu": "a CPU", "torch": "2", "python": "3"},
    }


def chosen() -> dict[str, Any]:
    scores = {"natural": 0.9, "least": 0.5, "robust": {"0.002": 0.6}, "test_constant": {"accuracy": 0.1}}
    return {**scores, "eps": 0.002, "radii": [0.001, 0.002], "lrs": [0.05], "lr": dict.fromkeys(ROBUST, 0.05)}


def rows_of(page: ModuleType) -> Any:
    records = [record(label, seed, values[seed]) for label, values in ROBUST.items() for seed in (2, 0, 1)]
    return page.Rows("spoken-digits", records, chosen())


def table(text: str) -> dict[str, list[str]]:
    return {r[0]: r[1:] for line in re.findall(r"^\| (.*) \|$", text, re.M) if (r := line.split(" | "))}


def test_each_method_has_the_mean_of_its_seeds_with_a_t_interval(page: ModuleType) -> None:
    found = table(page.render([rows_of(page)], "command"))
    values = ROBUST["pgd-7"]
    half_width = 4.303 * stdev(values) / 3**0.5
    assert found["PGD-AT (pgd-7)"] == ["10", "0.05", "801", "90.0 ± 0.0", f"50.0 ± {100 * half_width:.1f}"]
    assert found["a constant answer"][-1] == "10.0 %"


def test_methods_are_compared_by_the_difference_of_means_and_its_pooled_interval(page: ModuleType) -> None:
    lines = [line for line in page.render([rows_of(page)], "command").splitlines() if "| equal epochs |" in line]
    ours, theirs = ROBUST["m+deat"], ROBUST["pgd-7"]
    half_width = 2.776 * ((stdev(ours) ** 2 + stdev(theirs) ** 2) / 3) ** 0.5
    assert "| 3 | 50% | +0.0 ± 0.0 |" in lines[0]
    assert f"| +{100 * (mean(ours) - mean(theirs)):.1f} ± {100 * half_width:.1f} | higher |" in lines[0]
    assert lines[1].endswith("| +0.0 ± 16.0 | indistinguishable |")


def test_the_figure_has_a_panel_for_the_task_and_is_the_same_twice(page: ModuleType, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        page.draw([rows_of(page)], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(
    ("task", "labels", "expected"),
    [
        (Classification(), torch.tensor([1, 1, 1, 0]), {"accuracy": 0.75}),
        (Regression(), torch.tensor([-1.0, 1.0, -1.0, 1.0]), {"R2": 0.0, "MAE": 1.0, "RMSE": 1.0}),
        (MultiLabel(), torch.tensor([[1, 0], [1, 0], [0, 0], [1, 1]]), {"exact match": 0.5, "mAP": 0.5}),
        (Segmentation(11), torch.tensor([[[0, 0, 0, 1, 11]]] * 4), {"mIoU": 0.375, "pixel accuracy": 0.75}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_constant_answer_is_the_most_common_one(script: ModuleType, task, labels, expected) -> None:
    examples = ImageSet(torch.zeros(4, 1, 1, 5), labels, ("a", "b")[: 1 if task.name == "regression" else 2], task)
    assert script.constant_answer(examples, examples) == pytest.approx(expected)


def test_signal_to_noise_is_that_of_a_perturbation_at_its_bound_everywhere(script: ModuleType) -> None:
    waves = torch.stack((torch.full((1, 50), 0.2), torch.full((1, 50), -0.02)))
    assert script.signal_to_noise(waves, 0.02) == pytest.approx((20 + 0) / 2)


def small_setup(script: ModuleType) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=generator)
    examples = ImageSet(x, (x[:, 0] > 0).long(), ("no", "yes"))
    splits = DataSplits("made", examples, examples.subset(range(40)), None, None, 0.1, box=None)
    net = lambda outputs, features: torch.nn.Linear(features, outputs)  # noqa: E731
    return script.Setup(
        "made", lambda root: splits, net, "accuracy", 4, 32, (0.1,), (0.1, 0.2), trial_share=1, sanity=False
    )


@pytest.mark.parametrize("base", ["natural", "deat-3"])
def test_g_plus_spends_the_backprops_of_the_method_without_it(script: ModuleType, tmp_path, base) -> None:
    study = script.Study(small_setup(script), tmp_path, tmp_path / "out", tmp_path / "work")
    study.run_penalties([0])
    spent = {
        method: script.read_record(tmp_path / f"out/runs/made-{method}-seed0.json")["backprops"]
        for method in (base, f"g+{base}")
    }
    assert 0.7 < spent[f"g+{base}"] / spent[base] < 1.3


def test_an_interrupted_study_repeats_no_record_and_ends_with_the_same_ones(script, tmp_path, monkeypatch) -> None:
    def study(name: str) -> Any:
        return script.Study(small_setup(script), tmp_path, tmp_path / name, tmp_path / name / "work")

    study("straight").run([0])
    played = script.Study.play
    monkeypatch.setattr(script.Study, "play", stop_at_the_third(played))
    with pytest.raises(Interrupted):
        study("stopped").run([0])
    found = {file: file.stat().st_mtime_ns for file in (tmp_path / "stopped").rglob("*lr*.json")}
    assert len(found) == 2
    monkeypatch.setattr(script.Study, "play", played)
    study("stopped").run([0])
    assert all(file.stat().st_mtime_ns == time for file, time in found.items())
    records = sorted((tmp_path / "straight" / "runs").glob("*.json"))
    assert [file.stem for file in records] == [f"made-{m}-seed0" for m in sorted(ROBUST_FILES)]
    for file in records:
        one, two = (script.read_record(folder / file.name) for folder in (file.parent, tmp_path / "stopped" / "runs"))
        assert one["metrics"] == two["metrics"]
        assert one["backprops"] == two["backprops"] > 0


ROBUST_FILES = [label.replace(" ", "-") for label in ROBUST]


def stop_at_the_third(play: Any) -> Any:
    """A `play` that is interrupted when it is called for the third time."""
    calls = []

    def stopped(self: Any, job: Any) -> Any:
        calls.append(job)
        if len(calls) == 3:
            raise Interrupted("stopped")
        return play(self, job)

    return stopped
