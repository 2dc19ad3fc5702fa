"""Reports of other tasks than classification: their metrics, their intervals, and pictures of masks and waveforms."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import deat
from deat.cli.report import _draw_example, _make_tiles
from deat.evaluation.results import load_evaluation
from deat.report.draw_figures import draw_gallery
from deat.report.gallery import MASK_COLORS, Gallery, is_drawable, mask_to_uint8, wave_to_uint8
from helpers.nets import seeded

THREAT = deat.Linf(0.05, box=None)


def data_of(task: str) -> tuple[Tensor, Tensor]:
    """A few examples of a task."""
    torch.manual_seed(0)
    x = torch.rand(60, 1, 6, 6) if task == "segmentation" else torch.randn(60, 6)
    return (x, (x[:, 0] > 0.5).long()) if task == "segmentation" else (x, x[:, 0] - 2 * x[:, 1])


def net_of(task: str) -> torch.nn.Module:
    return seeded(lambda: torch.nn.Conv2d(1, 2, 3, padding=1) if task == "segmentation" else torch.nn.Linear(6, 1))


@pytest.fixture(params=["segmentation", "regression"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved training of a task, evaluated."""
    data, options = data_of(request.param), {"task": request.param, "threat": THREAT}
    result = deat.fit(
        net_of(request.param), data, method="m+deat", epochs=2, val=0.2, batch_size=16, val_attack="fgsm", device="cpu",
        progress=False, **options,
    )  # fmt: skip
    result.save(tmp_path / "run")
    file = tmp_path / "run/evaluation.json"
    deat.evaluate(result.model, data, attacks="natural,pgd-3", sanity=False, progress=False, save=file, **options)
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore")
def test_a_report_has_the_metrics_of_the_task_with_bootstrap_intervals(run: Path, tmp_path: Path) -> None:
    evaluation = load_evaluation(run / "evaluation.json")
    report = deat.report(run, out=tmp_path / "r", figures=False, gallery=0)
    (row,) = report.numbers["rows"]
    for attack in ("natural", "pgd-3", "worst"):
        cell = row["accuracy"][attack]
        assert cell["mean"] == pytest.approx(evaluation.accuracy[attack])
        assert (cell["low"], cell["high"]) == pytest.approx(evaluation.intervals[attack])
    for text in (report.table, report.page.read_text()):
        assert "bootstrap over examples" in text
        assert "Wilson" not in text
        assert f"Values for {evaluation.task.name} are {evaluation.metric}" in text
        for name, value in evaluation.metrics["worst"].items():
            assert name in text
            assert f"{value:.4f}" in text
    assert "classified correctly" not in report.table
    tex = report.tables["tex"].read_text()
    assert "95 \\% interval (bootstrap)" in tex
    assert "Wilson" not in tex


def tiles_of(task: Any, x: Tensor, y: Tensor, model: Callable[[Tensor], Tensor]) -> list[Any]:
    adv = x + 0.05
    return _make_tiles(range(len(x)), x, adv, y, model, task, ["sky", "road"], THREAT)  # type: ignore[arg-type]


def test_a_gallery_shows_masks_and_their_answers(tmp_path: Path) -> None:
    x, y = data_of("segmentation")
    tiles = tiles_of(deat.tasks.Segmentation(), x[:2], y[:2], net_of("segmentation"))
    for tile in tiles:
        assert len(tile.images) == len(tile.captions) == 6
        assert np.array_equal(tile.images[3], mask_to_uint8(y[tile.image_index]))
        assert "pixels right" in tile.captions[4]
    draw_gallery(Gallery("m+deat", "PGD-20", tuple(tiles)), tmp_path)
    assert (tmp_path / "gallery-2.pdf").is_file()


def test_a_gallery_names_the_answers_of_every_task() -> None:
    x = torch.rand(3, 1, 4, 4)

    def model(images: Tensor) -> Tensor:
        return torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])

    model.modules = lambda: iter(())  # type: ignore[attr-defined]
    net = torch.nn.Module()
    net.forward = model  # type: ignore[method-assign]
    labels = {
        "classification": torch.tensor([0, 1, 1]),
        "multilabel": torch.tensor([[1, 0], [1, 1], [0, 1]]),
        "regression": torch.zeros(3, 2),
    }
    answers = {
        name: [tile.natural_prediction for tile in tiles_of(deat.tasks.get_task(name), x, y, net)]
        for name, y in labels.items()
    }
    assert answers["classification"] == ["sky", "sky", "sky"]
    assert answers["multilabel"] == ["sky", "sky, road", "none"]
    assert answers["regression"] == ["1, -1", "1, 1", "-1, -1"]


def test_a_waveform_is_drawn_where_its_samples_are() -> None:
    quiet, loud = np.zeros((1, 400)), np.full((1, 400), 0.9)
    pictures = [wave_to_uint8(wave, -1.0, 1.0) for wave in (quiet, loud)]
    rows = [int(np.argwhere((picture == (0, 90, 160)).all(2))[:, 0].mean()) for picture in pictures]
    assert rows[1] < rows[0] == pytest.approx(pictures[0].shape[0] // 2, abs=1)
    wave = torch.linspace(-0.5, 0.5, 400)[None]
    drawn = _draw_example(wave, wave + 0.05, deat.Linf(0.05, box=(-1, 1)))
    assert [picture.shape for picture in drawn] == [pictures[0].shape] * 3
    assert is_drawable((1, 400))
    assert is_drawable((3, 8, 8))
    assert not is_drawable((12,))


def test_classes_of_masks_have_colors_and_ignored_pixels_are_white() -> None:
    picture = mask_to_uint8(torch.tensor([[0, 1], [9, 255]]))
    assert [tuple(picture[0, 0]), tuple(picture[0, 1]), tuple(picture[1, 0])] == [*MASK_COLORS[:2], MASK_COLORS[1]]
    assert tuple(picture[1, 1]) == (255, 255, 255)
