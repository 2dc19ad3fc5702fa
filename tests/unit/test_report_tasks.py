"""A report on runs of a regression: the metric with its own interval, and no claim that only shares of images allow."""

from pathlib import Path

import torch
from torch import nn

import deat

THREAT = deat.Linf(2.0, box=None)


def train(folder: Path, method: str, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    data = x, x[:, 0]
    options = {"task": "regression", "threat": THREAT}
    settings = {"epochs": 2, "batch_size": 20, "lr": 0.1, "seed": seed, "progress": False}
    result = deat.fit(nn.Linear(2, 1), data, method=method, **options, **settings)
    result.save(folder)
    attacks = ["natural", "pgd-5"]
    deat.evaluate(
        result.model, data, attacks=attacks, sanity=False, progress=False, save=folder / "evaluation.json", **options
    )


def test_a_negative_r2_is_reported_with_its_bootstrap_interval(tmp_path: Path) -> None:
    folders = [tmp_path / f"{method}-{seed}" for method in ("natural", "pgd-2") for seed in (0, 1)]
    for folder in folders:
        train(folder, *folder.name.rsplit("-", 1)[:1], int(folder.name[-1]))
    deat.report(*folders, out=tmp_path / "report", figures=False, gallery=0)
    evaluations = [deat.load_evaluation(folder / "evaluation.json") for folder in folders[:2]]
    assert all(evaluation.accuracy["pgd-5"] < 0 for evaluation in evaluations)
    low, high = (100 * sum(e.intervals["pgd-5"][end] for e in evaluations) / 2 for end in (0, 1))
    table = (tmp_path / "report/table.md").read_text()
    assert f"({low:.1f} to {high:.1f})" in table
    assert "R2 times 100 in the place of accuracy" in table
    assert "counts an image as correct" not in table
    assert "McNemar" not in table
