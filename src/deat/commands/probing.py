"""What a report asks of the trained networks themselves: accuracy at other radii, and adversarial examples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deat.commands.evaluate import Order, find_run, load_model, test_part
from deat.data import as_source
from deat.errors import DeatError
from deat.evaluation.attacks import attack
from deat.evaluation.evaluator import blocks, evaluate
from deat.evaluation.judge import block_seed
from deat.modes import evaluating
from deat.report.collect import OneRun, Row
from deat.report.gallery import Gallery, Tile, pixels
from deat.report.series import Figure, Line, Panel
from deat.threat import ThreatModel

SWEEP = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""The radii of a sweep, in units of the run's own eps."""
ATTACK = "pgd-20"
Loaded = tuple[torch.nn.Module, Any, ThreatModel]


def load(run: OneRun, device: str, data_root: str | None) -> Loaded:
    """A run's best network, its test images and its threat model."""
    order = Order(str(run.path), device=device, data_root=data_root)
    found, weights = find_run(order)
    return load_model(found, weights, order).eval(), test_part(found), found.threat


def sweep(rows: Sequence[Row], images: int, device: str, data_root: str | None) -> Figure:
    """PGD-20 accuracy by radius, on the first test images, of each row's first finished run."""
    lines, lacking = [], []
    for row in rows:
        for run in row.done[:1]:
            try:
                lines.append(_swept(row.name, run.seed, load(run, device, data_root), images))
            except (DeatError, OSError) as error:
                lacking.append(f"{row.name}: {error}")
    name = "Accuracy by radius"
    if not lines:
        return Figure("sweep", name, missing="; ".join(lacking) or "an evaluated run")
    panel = Panel(f"{ATTACK.upper()} on {images:,} test images", "eps", "accuracy", lines, percent=True)
    return Figure("sweep", name, [panel], "; ".join(lacking))


def gallery(row: Row, count: int, device: str, data_root: str | None) -> Gallery:
    """The first test images, attacked through a row's first finished run."""
    try:
        model, part, threat = load(row.done[0], device, data_root)
    except (DeatError, OSError) as error:
        return Gallery(missing=str(error))
    x, y = _first(model, part, count)
    how = attack(ATTACK)
    generator = torch.Generator(x.device).manual_seed(block_seed(0, how.name, 0))
    adv = how(model, x, y, threat, generator)
    tiles = _tiles(
        x.cpu(), adv.cpu(), _seen(model, x, part.classes), _seen(model, adv, part.classes), y.tolist(), part.classes
    )
    return Gallery(row.name, f"{how.name.upper()}, {threat.name} eps {threat.eps:.4g}", tuple(tiles))


def has_weights(run: OneRun, epoch: str = "best") -> bool:
    """Whether a run's weights are beside its record."""
    return (Path(run.path) / epoch / "model.safetensors").is_file()


def _swept(name: str, seed: int, loaded: Loaded, images: int) -> Line:
    model, part, threat = loaded
    shares: list[float | None] = []
    for factor in SWEEP:
        how, radius = (ATTACK, replace(threat, eps=factor * threat.eps)) if factor else ("natural", threat)
        shares.append(evaluate(model, part, threat=radius, attacks=[how], n=images, sanity=False).accuracy[how])
    return Line(name, seed, [factor * threat.eps for factor in SWEEP], shares)


def _first(model: torch.nn.Module, part: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    device = next(model.parameters()).device
    source = as_source(part, batch_size=count, device=device, shuffle=False)
    return next(iter(blocks(source, count, min(count, source.num_examples))))


def _seen(model: torch.nn.Module, x: torch.Tensor, classes: Sequence[str]) -> list[str]:
    with torch.no_grad(), evaluating(model):
        return [str(classes[i]) for i in model(x).argmax(1).tolist()]


def _tiles(
    x: torch.Tensor, adv: torch.Tensor, before: list[str], after: list[str], labels: list[int], classes: Sequence[str]
) -> Iterator[Tile]:
    for n, label in enumerate(labels):
        delta = adv[n] - x[n]
        shown = 0.5 + delta / (2 * max(float(delta.abs().max()), 1e-9))
        yield Tile(str(classes[label]), before[n], after[n], (pixels(x[n]), pixels(shown), pixels(adv[n])))
