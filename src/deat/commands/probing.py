"""What a report asks of the trained networks themselves: accuracy at other radii, and adversarial examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deat.commands.evaluate import Epoch, Evaluate, find_run
from deat.data import as_source
from deat.errors import CheckpointError, DeatError
from deat.evaluation.attacks import attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.judge import block_seed
from deat.evaluation.ledger import fingerprint_model
from deat.evaluation.reading import images_at
from deat.modes import device_of, evaluating
from deat.numbers import level
from deat.paths import tidy
from deat.radii import widest_of
from deat.report.collect import OneRun, Row
from deat.report.gallery import Gallery, Tile, candidates, choose, pixels
from deat.report.series import Figure, Line, Panel
from deat.threat import ThreatModel
from deat.training.folder import WEIGHTS
from deat.training.judging import load_model, test_part
from deat.training.record import read_record

SWEEP = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""The radii of a sweep, in units of the run's own eps, as far as images are apart."""
ATTACK = "pgd-20"
LOOKED = 500
"""How many test images a gallery is chosen from."""


@dataclass(frozen=True)
class Lab:
    """Where networks run and data lies, and the networks of their own, named by the user, whose code may run."""

    device: str = "auto"
    data_root: str | None = None
    models: tuple[str, ...] = ()


Loaded = tuple[torch.nn.Module, Any, ThreatModel]
Shown = tuple[torch.Tensor, list[str]]
"""Images, and what a network takes them for."""


def load(run: OneRun, lab: Lab) -> Loaded:
    """The network that a run's evaluation judged, be it its best or its last, its test images and its threat model."""
    files = _kept(run)
    epoch: Epoch = "last" if files and files[0].parent.name == "last" else "best"
    record = read_record(run.path)
    named = _named(record.model, lab.models)
    order = Evaluate(str(run.path), model=named, epoch=epoch, device=lab.device, data_root=lab.data_root)
    found, _ = find_run(order, record)
    for file in files:
        model = load_model(found, file).eval()
        if _is_judged(run, model):
            return model, test_part(found), found.threat
    raise CheckpointError(f"{str(run.path)!r} has other weights than its evaluation judged: evaluate it again.")


def _named(recorded: str, models: Sequence[str]) -> str | None:
    """Which of the models that the user named a run's own is, by its path or else by file and object alone."""
    same = [spec for spec in models if Path(spec).name == Path(recorded).name]
    return recorded if recorded in models else same[0] if len(same) == 1 else None


def sweep(rows: Sequence[Row], images: int, lab: Lab) -> Figure:
    """PGD-20 accuracy by radius, on the first test images, of each row's first finished run."""
    lines, lacking, counts = [], [], set()
    for row in rows:
        for run in row.done[:1]:
            try:
                loaded = load(run, lab)
                lines.append(_swept(row.name, run.seed, loaded, images))
                counts.add(min(images, len(loaded[1])))  # a set may have fewer than are asked for
            except (DeatError, OSError) as error:
                lacking.append(tidy(f"{row.name}: {error}"))
    name = "Accuracy by radius"
    if not lines:
        return Figure("sweep", name, missing="; ".join(lacking) or "an evaluated run")
    about = f"{ATTACK.upper()} on {' or '.join(f'{n:,}' for n in sorted(counts))} test images, {_seeds(lines)}"
    panel = Panel(about, "eps", "accuracy", lines, percent=True)
    return Figure("sweep", name, [panel], "; ".join(lacking))


def _seeds(lines: Sequence[Line]) -> str:
    """Which one seed of each row a sweep is of: that of most rows, and who has another."""
    held: dict[int | None, list[str]] = {}
    for line in lines:
        held.setdefault(line.seed, []).append(line.row)
    (usual, _), *others = sorted(held.items(), key=lambda item: -len(item[1]))
    told = [f"but seed {seed} of {', '.join(names)}" for seed, names in others]
    return ", ".join([f"seed {usual} alone", *told])


def gallery(row: Row, count: int, lab: Lab) -> Gallery:
    """A few test images, some fooled and some not if there are such, attacked through a row's first finished run."""
    try:
        model, part, threat = load(row.done[0], lab)
    except (DeatError, OSError) as error:
        return Gallery(missing=tidy(str(error)))
    numbers, x, y = _worth_showing(row.done[0], model, part, count)
    how = attack(ATTACK)
    generator = torch.Generator(x.device).manual_seed(block_seed(0, how.name, 0))
    adv = how(model, x, y, threat, generator)
    labels = [str(part.classes[i]) for i in y.tolist()]
    tiles = _tiles(
        numbers, labels, (x.cpu(), _seen(model, x, part.classes)), (adv.cpu(), _seen(model, adv, part.classes))
    )
    return Gallery(row.name, f"{how.name.upper()}, {threat.name} eps {level(threat.eps)}", choose(list(tiles), count))


def has_weights(run: OneRun) -> bool:
    """Whether a run has weights beside its record."""
    return bool(_kept(run))


def _kept(run: OneRun) -> list[Path]:
    files = [run.path / epoch / WEIGHTS for epoch in ("best", "last")]
    return [file for file in files if file.is_file()]


def _is_judged(run: OneRun, model: torch.nn.Module) -> bool:
    """Whether these are the weights behind a run's numbers; an evaluation that does not tell is believed."""
    judged = run.evaluation.settings.get("model") if run.evaluation else None
    return judged is None or judged == fingerprint_model(model)


def _swept(name: str, seed: int, loaded: Loaded, images: int) -> Line:
    model, part, threat = loaded
    shares: list[float | None] = []
    radii = [factor * threat.eps for factor in SWEEP if factor * threat.eps < widest_of(threat, part.shape)]
    for eps in radii:
        how, radius = (ATTACK, replace(threat, eps=eps)) if eps else ("natural", threat)
        found = evaluate(model, part, threat=radius, attacks=[how], n=images, sanity=False, progress=False)
        shares.append(found.accuracy[how])
    return Line(name, seed, radii, shares)


def _worth_showing(
    run: OneRun, model: torch.nn.Module, part: Any, count: int
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """The numbers of the test images to attack, the images and their labels."""
    judged = run.evaluation
    if judged is not None and "natural" in judged.verdicts:
        found = judged.verdicts.get(ATTACK, judged.verdicts["worst"])
        numbers = candidates(judged.verdicts["natural"][:LOOKED], found[:LOOKED], count)
        x, y = _pick(model, part, numbers)
        if y.tolist() == [judged.labels[n] for n in numbers]:  # else it was judged on other images than these
            return numbers, x, y
    x, y = _pick(model, part, range(3 * count))
    return list(range(len(y))), x, y


def _pick(model: torch.nn.Module, part: Any, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of these rising numbers, as many of them as there are."""
    device = device_of(model)
    index = torch.tensor([number for number in numbers if number < len(part)])
    return images_at(as_source(part, batch_size=len(index), device=device, shuffle=False), index, device)


def _seen(model: torch.nn.Module, x: torch.Tensor, classes: Sequence[str]) -> list[str]:
    with torch.no_grad(), evaluating(model):
        return [str(classes[i]) for i in model(x).argmax(1).tolist()]


def _tiles(numbers: Sequence[int], labels: Sequence[str], natural: Shown, attacked: Shown) -> Iterator[Tile]:
    (images, before), (adv, after) = natural, attacked
    for n, (number, label) in enumerate(zip(numbers, labels, strict=True)):
        delta = adv[n] - images[n]
        shown = 0.5 + delta / (2 * max(float(delta.abs().max()), 1e-9))
        yield Tile(number, label, before[n], after[n], (pixels(images[n]), pixels(shown), pixels(adv[n])))
