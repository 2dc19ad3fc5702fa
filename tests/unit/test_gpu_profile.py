"""The profile of whole batches: what it makes of a profiler's events, what it plays, and what its page shows."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.data import Augment
from helpers.bench_scripts import importable_bench
from helpers.data_sets import random_set

Load = Callable[[str], ModuleType]
MOVE = {"ms": 1.0, "launches": 3, "kinds": {"everything else": 900.0}, "kernels": []}
MACHINE = {"device": "a GPU", "torch": "2"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """A file of bench, taken for a GPU's though there is none."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    with importable_bench(monkeypatch):
        yield importlib.import_module


def event(start: float, end: float, launch: int, name: str = "a kernel", device: str = "CUDA", **more: Any) -> Any:
    """An event as torch's profiler has it."""
    time_range, kind = SimpleNamespace(start=start, end=end), SimpleNamespace(name=device)
    return SimpleNamespace(time_range=time_range, device_type=kind, id=launch, name=name, **more)


def asked(launch: int, name: str) -> Any:
    return event(0.0, 1.0, launch, name, device="CPU")


TWO_BATCHES = [
    asked(1, "cudaLaunchKernel"),
    asked(2, "cudaGraphLaunch"),
    asked(3, "cudaGraphLaunch"),
    asked(4, "cudaMemcpyAsync"),
    event(100, 110, 1, "crop"),
    event(130, 150, 2, "conv"),  # a gap of 20 between launches
    event(140, 180, 2, "beside"),  # on another stream
    event(145, 150, 2, "conv"),
    event(185, 195, 2, "step"),  # a gap of 5 inside a replay
    event(195, 205, 3, "step"),  # a graph of one kernel
    event(295, 305, 4, "Memcpy HtoD"),  # a gap of 90
    event(100, 305, 9, "an annotation", is_user_annotation=True),
]


def test_a_batch_s_time_is_what_ran_whatever_overlapped(load: Load) -> None:
    timeline = load("gpu_timeline")
    found = timeline.timeline(*timeline.spans_of(reversed(TWO_BATCHES)), batches=2)
    assert (found["busy_ms"], found["idle_inside_ms"], found["idle_between_ms"]) == (0.045, 0.0025, 0.055)
    assert found["replays"] == [{"kernels": 1, "times": 0.5, "ms": 0.01}, {"kernels": 4, "times": 0.5, "ms": 0.065}]
    assert (found["inside"]["ms"], found["inside"]["launches"]) == (0.0425, 2.5)
    assert (found["outside"]["ms"], found["outside"]["launches"]) == (0.01, 1.0)
    assert found["inside"]["kernels"][:2] == [
        {"us": 20.0, "times": 0.5, "name": "beside"},
        {"us": 12.5, "times": 1.0, "name": "conv"},
    ]
    assert {kernel["name"] for kernel in found["outside"]["kernels"]} == {"crop", "Memcpy HtoD"}


@pytest.mark.parametrize("named", [[], [asked(77, "cudaGraphLaunch")]], ids=["none", "others"])
def test_where_no_launch_is_known_as_a_graph_s_one_of_many_kernels_is_taken_for_it(named: Any, load: Load) -> None:
    timeline = load("gpu_timeline")
    nameless = [
        *named,
        *(e for e in TWO_BATCHES if e.device_type.name == "CUDA"),
        event(400, 401, 0),
        event(401, 402, 0),
    ]
    spans, graphs = timeline.spans_of(nameless)
    assert timeline.replays_of(spans, graphs) == {2}


def test_a_profile_of_nothing_says_so(load: Load) -> None:
    timeline, batches = load("gpu_timeline"), load("gpu_batches")
    found = batches.attempt(lambda: timeline.timeline([], {1}, 2))
    assert found == {"failed": "ValueError: the profiler saw nothing on the device"}


def trainer(method: str = "pgd-7") -> deat.Trainer:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    settings = deat.TrainConfig(epochs=2, batch_size=8, lr=0.01, device="cpu", engine="eager")
    return deat.make_trainer(net, random_set(24), method=method, config=settings, augment=Augment(2))


def test_batches_that_are_looked_at_one_by_one_are_the_trainer_s(load: Load) -> None:
    player = load("gpu_batches").Player
    whole, parts = player(trainer(), 2), player(trainer(), 2)
    whole.play()
    assert sum(1 for _ in parts.each()) == 3
    assert whole.trainer.game.cost == parts.trainer.game.cost
    assert whole.trainer.game.cost.backprops == 3 * 3
    for one, other in zip(whole.trainer.model.parameters(), parts.trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_batch_is_clocked_with_the_device_and_without(load: Load) -> None:
    found = load("gpu_batches").Player(trainer(), 1).clocked()
    assert set(found) == {"ms", "host_ms"}
    assert min(found.values()) > 0


class Recorded:
    """Plays moves as they are, and counts them."""

    moves = 0

    def run(self, name: str, move: Callable[[Any], None], r: Any, mutable_tensors: Any) -> None:
        self.moves += 1
        move(r)


@pytest.mark.parametrize("method", ["pgd-7", "m+deat", "trades"])
def test_a_batch_s_rest_is_clocked_without_its_replays(
    method: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, held = load("gpu_batches"), trainer(method)
    held.game.executor.recorder = recorder = Recorded()  # type: ignore[assignment]
    player = batches.Player(held, 2)
    counted: list[int] = []
    clocked = player.clocked
    player.clocked = lambda: (clocked(), counted.append(recorder.moves))[0]
    player.profiled = lambda: {"busy_ms": 1.0}
    monkeypatch.setattr(batches, "trained", lambda method: nullcontext(player))
    found = batches.measure(method)
    assert set(found) == {"k", "ms", "host_ms", "rest_ms", "rest_host_ms", "device"}
    moves = {"pgd-7": 4, "m+deat": 6, "trades": 5}[
        method
    ]  # the last one closes the round, TRADES' first one asks the clean images
    assert counted == [4 * 3 * moves] * 2


def test_a_batch_that_is_not_recorded_says_so(load: Load) -> None:
    batches = load("gpu_batches")
    assert batches.attempt(lambda: batches.Player(trainer(), 1).recorder)["failed"] == (
        "AssertionError: nothing was recorded"
    )


def page(load: Load, **batches: Any) -> list[str]:
    result = {"machine": MACHINE, "moves": {"ascend, compile": MOVE}}
    result |= {"batches": batches} if batches else {}
    text: str = load("gpu_profile_page").render(result)
    return text.splitlines()


def test_the_page_shows_whole_batches_side_by_side_and_what_failed(load: Load) -> None:
    timeline = load("gpu_timeline")
    device = timeline.timeline(*timeline.spans_of(TWO_BATCHES), batches=2)
    clocks = {"k": 7, "ms": 12.8, "host_ms": 3.21, "rest_ms": 0.5, "rest_host_ms": 0.4}
    lines = page(
        load,
        pgd=clocks | {"device": device},
        deat=clocks | {"device": {"failed": "ValueError: a | b"}},
        trades={"failed": "RuntimeError: no"},
    )
    assert "| | pgd, k = 7 | deat, k = 7 | trades |" in lines
    assert "| **ms a batch** | **12.80** | **12.80** |  |" in lines
    assert lines.count("| host time | 3.21 | 3.21 |  |") == 1
    assert "| kernels inside replays: time and number | 0.04 in 2 |  |  |" in lines
    assert "| replays: number x time (kernels) | 0.5 x 0.01 (1), 0.5 x 0.07 (4) |  |  |" in lines
    assert "| failed |  | ValueError: a / b | RuntimeError: no |" in lines
    rows = lines[lines.index("| | pgd, k = 7 | deat, k = 7 | trades |") :]
    assert {row.count("|") for row in rows[: rows.index("")]} == {5}
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


def test_a_profile_without_batches_has_its_page_all_the_same(load: Load) -> None:
    assert not [line for line in page(load) if "batch's time" in line]
