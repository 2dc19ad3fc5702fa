"""Run folders and bench folders made by hand, with every number known."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import Flag
from deat.training.epoch_records import EpochStats, EpochTiming, append_record
from deat.utils.safetensors_files import encode_tensors


def make_run(
    folder: Path,
    method: str = "m+deat",
    *,
    seed: int = 0,
    epochs: int = 4,
    finished: int | None = None,
    shares: dict[str, float] | None = None,
    images: int = 200,
    cost: int = 3,
    model: str = "small",
    flags: tuple[Flag, ...] = (),
    classes: tuple[str, ...] = ("0", "1"),
    record: dict[str, Any] | None = None,
    kept: int | None = None,
) -> Path:
    """A run folder; `shares` are its accuracies by attack, or None for a run that is not evaluated.

    kept is the epoch, counted from 1, that it holds weights of as its best, if any.
    """
    folder.mkdir(parents=True)
    about = {
        "request": {"data": "digits", "method": method, "model": "auto"},
        "settings": {"epochs": epochs, "seed": seed, "batch_size": 64, "val_attack": "pgd-20", "lr": 0.05},
        "method": {"name": method, "schedule": {"kind": "Fixed", "alpha": 1.0}},
        "model": {"name": model, "parameters": 100},
        "data": {"name": "digits", "train": 640, "held_out": 64, "classes": list(classes)},
        "threat": {"norm": "linf", "eps": 0.15},
        "versions": {"deat": "0"},
        **(record or {}),
    }
    (folder / "run.json").write_text(json.dumps(about))
    draw = random.Random(f"{method} {seed}")
    for epoch in range(epochs if finished is None else finished):
        append_record(folder / "history.jsonl", _epoch(epoch, epochs, cost, draw))
        append_record(folder / "timing.jsonl", EpochTiming(epoch, 1.5 * cost, 0.1, 400.0))
    if kept is not None:
        (folder / "best").mkdir()
        note = json.dumps({"epoch": kept, "step": 0})
        (folder / "best/model.safetensors").write_bytes(encode_tensors({"w": torch.zeros(1)}, note))
    if shares is not None:
        _evaluation(shares, images, flags, classes, draw).save(folder / "evaluation.json")
    return folder


def make_bench(
    folder: Path, rows: list[dict[str, Any]], recipe: str = "quick", table: str | None = None, **settings: Any
) -> Path:
    """A bench folder around run folders that lie in it."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {"recipe": recipe, "paper": {"table": table}, "settings": settings, "rows": rows}
    (folder / "bench.json").write_text(json.dumps(told))
    return folder


def one_run(folder: str, seed: int = 0, status: str = "done", why: str | None = None, jobs: int = 1) -> dict[str, Any]:
    """What bench.json says of a run."""
    return {"seed": seed, "folder": folder, "status": status, "why": why, "concurrent_jobs": jobs}


def _epoch(epoch: int, epochs: int, cost: int, draw: random.Random) -> EpochStats:
    part = (epoch + 1) / epochs
    return EpochStats(
        epoch=epoch,
        k=cost - 1,
        alpha=0.15,
        level=0.0,
        magnitude=900 * (1.2 - part) + 40 * draw.random(),
        threshold=None,
        loss=2.3 * (1.1 - part) + 0.1 * draw.random(),
        train_accuracy=0.8 * part * (0.9 + 0.1 * draw.random()),
        val_natural=0.9 * part * (0.9 + 0.1 * draw.random()),
        val_robust=0.6 * part * (0.7 + 0.3 * draw.random()),
        log10_lipschitz=2 + part + 0.2 * draw.random(),
        lr=0.05,
        examples=640,
        skipped=0,
        active=0,
        backprops=10 * cost * (epoch + 1),
        passes=20 * cost * (epoch + 1),
        val_passes=0,
        val_loss=2.3 * (1.2 - part),
    )


def _evaluation(
    shares: dict[str, float], images: int, flags: tuple[Flag, ...], classes: tuple[str, ...], draw: random.Random
) -> Evaluation:
    labels = [n % len(classes) for n in range(images)]
    results = []
    ranks = draw.sample(range(images), images)  # what a weak attack fools, a strong one fools as well
    for name, share in shares.items():
        correct = [rank < round(share * images) for rank in ranks]
        results.append(AttackResult(name, correct, 0, 0.1, 1, 1))
    settings = {
        "threat": {"norm": "linf", "eps": 0.15},
        "attacks": {name: {"name": name, "steps": 20 if "-" in name else 1} for name in shares},
        "seed": 0,
        "block": 500,
        "cascade": False,
        "sample": False,
        "available": images,
    }
    return Evaluation(results, labels, list(classes), settings, list(flags))
