"""bench/peers.py: sides that take turns, what they compute, and the page."""

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.bench_scripts import importable_bench
from helpers.nets import seeded

ROOT = Path(__file__).parents[2]
MACHINE = {
    **{"cpu": "a CPU", "cores": 2, "threads": 2, "clock": "wall", "python": "3.11", "torch": "2.13", "deat": "0.1"},
    **{"packages": {"foolbox": "3.3.4"}, "missing": ["torchattacks"]},
}


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bench's modules can be imported, and are nobody else's."""
    with importable_bench(monkeypatch):
        yield


def tiny_net() -> nn.Module:
    def build() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, 10))

    return seeded(build)


def module(name: str) -> Any:
    return importlib.import_module(name)


def played(**seconds: list[float]) -> dict[str, Any]:
    """Rounds of several sides."""
    laps = {
        name.replace("_", " "): [{"seconds": s, "cpu_seconds": s, "others": 0.0, "precision": "bf16"} for s in each]
        for name, each in seconds.items()
    }
    return {"clock": "wall", "played": 2, "undisturbed": 2, "errors": {}, "sides": laps}


def training(cell: dict[str, Any]) -> dict[str, Any]:
    cells = {"PreAct-ResNet 8, pgd-7": {"batches": 1, **cell}}
    return {"training": {"machine": MACHINE, "command": "python bench/peers.py", "cells": cells}}


def test_ratios_are_taken_round_by_round():
    cell = played(deat=[1.0, 2.0, 4.0], good_bf16_loop=[1.5, 3.0, 5.0])
    assert module("side_process").compare(cell, "good bf16 loop", "deat") == [1.25, 1.5, 1.5]
    assert module("side_process").compare(cell, "ART", "deat") is None


def test_the_page_says_who_is_faster_and_which_goals_are_missed():
    page = module("peers_page").render(training(played(deat=[2.0, 2.0], good_bf16_loop=[1.0, 1.0])))
    assert "good bf16 loop takes 0.50 of deat's time" in " ".join(page.split())
    assert "0.50 times as fast as a good bf16 loop, not 1.3" in " ".join(page.split())
    assert "left out: torchattacks" in " ".join(page.split())
    page = module("peers_page").render(training(played(deat=[1.0, 1.0], good_bf16_loop=[2.0, 2.0])))
    assert "Nowhere" in page
    assert "**Goals that are missed.** None" in page
    assert "2.00 (2.00 to 2.00)" in page


def test_a_side_that_fails_is_named_with_its_error():
    cell = played(deat=[1.0, 1.0], good_bf16_loop=[2.0, 2.0]) | {"errors": {"ART": "RuntimeError: no"}}
    assert "ART (RuntimeError: no)" in module("peers_page").render(training(cell))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_is_the_slope_between_the_ends(power: float):
    points = [
        {"value": v, "ms": [3 * float(v * v) ** power], "run_mb": 1.0, "data_mb": 1.0, "others": 0.0}
        for v in (16, 32, 64)
    ]
    assert math.isclose(module("peers_growth").exponent("side", points), power)
    cells = {"growth": {"machine": MACHINE, "command": "python", "cells": {"side": {"points": points, "errors": {}}}}}
    page = module("peers_page").render(cells)
    assert ("to the power of 2.00" in page) == (power == 2.0)
    pytest.importorskip("matplotlib")
    assert module("peers_page").draw(cells).count("<svg") == 1


def test_rounds_that_others_disturbed_do_not_count():
    quiet, loud = {"deat": {"others": 0.0}}, {"deat": {"others": 0.5}}
    side_process = module("side_process")
    assert side_process.count_quiet([quiet, loud, quiet], "wall") == [quiet, quiet]
    assert side_process.count_quiet([quiet, loud], "cpu") == [quiet, loud]


def test_sides_take_turns_in_processes_of_their_own():
    result = module("side_process").play_rounds(
        {"parent": ("os:getppid", {}), "wrong": ("os:no_such_function", {})}, 0, 1, "cpu"
    )
    assert "no_such_function" in result["errors"]["wrong"]
    assert result["sides"] == {"parent": []}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of foolbox, at its import
@pytest.mark.parametrize("method", ["pgd-7", "free-8", "trades"])
def test_every_training_side_trains_the_network(method: str, monkeypatch: pytest.MonkeyPatch):
    peers = module("peers_training")
    nets: list[nn.Module] = []

    def build() -> nn.Module:
        nets.append(tiny_net())
        return nets[-1]

    monkeypatch.setitem(peers.NETWORKS, "tiny", build)
    for side in peers.list_sides(method):
        if side in peers.MODULES:
            pytest.importorskip(peers.MODULES[side])
        work = peers.make(side, "tiny", method, 1)
        before = [value.detach().clone() for value in nets[-1].parameters()]
        work()
        assert not any(map(torch.equal, before, nets[-1].parameters())), side


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of foolbox, at its import
def test_every_side_that_evaluates_finds_the_same_accuracies():
    peers = module("peers_evaluation")
    model = tiny_net().eval()
    x = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = model(x).argmax(1)
    y[::4] = (y[::4] + 1) % 10
    attacks = ["natural", "fgsm", "pgd-20"]
    ours = peers.deat_side(model, x, y, attacks, False)()
    for name in ("bf16 loop", "fp32 loop", "foolbox"):
        if name in peers.list_sides(False):
            theirs = peers.by_attack(model, x, y, peers.PEERS[name](model, attacks))()
            assert theirs["accuracy"]["natural"] == ours["accuracy"]["natural"] == 0.75
            for attack in attacks:
                assert abs(theirs["accuracy"][attack] - ours["accuracy"][attack]) <= 0.05, (name, attack)


def test_the_committed_page_is_made_from_the_committed_numbers():
    result = ROOT / "docs/results/peers.json"
    if not result.exists():
        pytest.skip("nothing was measured yet")
    assert result.with_suffix(".md").read_text() == module("peers_page").render(json.loads(result.read_text()))
