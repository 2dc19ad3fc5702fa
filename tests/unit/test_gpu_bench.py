"""The benchmark of training speed, on a CPU that it takes for a GPU: what it counts, keeps and shows."""

import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import deat
from helpers.bench_scripts import importable_bench

GROUP = "preact_resnet18/{}/4"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """bench/gpu.py with tiny cells."""
    with importable_bench(monkeypatch):
        yield tiny_cells(importlib.import_module("gpu"), monkeypatch)


def tiny_cells(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "WORKERS", 0)
    monkeypatch.setattr(gpu, "MANY", 2)
    monkeypatch.setattr(gpu, "SIDES", {"preact_resnet18": 8})
    monkeypatch.setattr(gpu, "net_of", lambda network: tiny())
    monkeypatch.setattr(gpu, "peak", lambda: 800.0)
    monkeypatch.setattr(gpu, "all_groups", lambda: {GROUP.format(m): ("plain", "eager") for m in gpu.PLAIN})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    return gpu


def tiny() -> nn.Module:
    torch.manual_seed(0)
    rest = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    return deat.add_normalization(
        nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 3), rest=rest)), [0.5] * 3, [0.25] * 3
    )


def run(gpu: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *groups: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), *groups])
    gpu.main()
    return json.loads(out.read_text())["cells"]


def test_a_backprop_is_counted_as_the_work_that_it_is(gpu: ModuleType) -> None:
    worth = {name: gpu.forwards_worth(deat.get_method(name), k + 1) for name, k in gpu.STEPS.items()}
    assert worth == {
        "pgd-7": 7 * 2 + 3,
        "m+deat": 3 * 3,
        "trades": 1 + 10 * 2 + 2 * 3,  # the clean answer, the ascends, and both branches
        "m+mart": 2 * 2 + 2 * 3,
        "fat-5": 5 * 2 + 3,
        "yopo-5-3": 5 * 3,
    }


def test_every_cell_says_what_it_did_and_both_sides_do_as_much(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    script = gpu.Script
    monkeypatch.setattr(gpu, "Script", lambda *args, **named: (made.append(script(*args, **named)), made[-1])[1])
    cells = run(gpu, tmp_path / "speed.json", monkeypatch)
    assert not [cell for cell in cells.values() if "failed" in cell]
    assert len({cell["made"]["source"] for cell in cells.values()}) == 1
    for method, plain in zip(gpu.PLAIN, made, strict=True):
        pair = [cells[f"{GROUP.format(method)}/{engine}"] for engine in ("plain", "eager")]
        assert [cell["backprops_per_batch"] for cell in pair] == [gpu.STEPS[method] + 1] * 2
        assert plain.backprops == 4 * gpu.MANY * pair[0]["backprops_per_batch"]  # a warm-up and three passes
    lines = (tmp_path / "speed.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| preact")]
    assert len(rows) == len(cells) == 2 * len(gpu.PLAIN)
    assert {row.count("|") for row in rows} == {lines[lines.index(rows[0]) - 1].count("|")} == {13}
    assert all(len(line) <= 120 for line in lines if not line.startswith("|"))


@pytest.mark.parametrize("name", ["trades", "mart"])
def test_the_plain_loops_learn_from_the_same_loss(name: str, gpu: ModuleType) -> None:
    data, net = gpu.images(8, 4), tiny()
    script = gpu.Script(net, gpu.Images(data.images, data.labels), 4, 1, 0.1, 0.1, 0.1)
    ((x, y),) = batches = list(script.batches())
    script.batches = lambda: iter(batches)
    torch.manual_seed(3)
    delta = 0.001 * torch.randn_like(x)
    expected = deat.get_method(name).objective(tiny(), x, delta, y).loss.detach()
    torch.manual_seed(3)
    {"trades": gpu.trades_epoch, "mart": gpu.mart_epoch}[name](script, steps=0)
    assert script.losses == pytest.approx([float(expected)], rel=1e-5)


def test_what_stands_side_by_side_is_measured_in_one_call_and_what_failed_again(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    found = {"ms_per_backprop": 1.0, "images_per_second": 1, "tflops": 1.0, "peak_memory_gib": 1.0}
    found |= {"warm_up_seconds": 1.0, "backprops_per_batch": 8}
    broken = {GROUP.format("trades") + "/eager"}
    monkeypatch.setattr(
        gpu, "measure", lambda name: (asked.append(name), {"failed": "a | b"} if name in broken else dict(found))[1]
    )
    out, group = tmp_path / "speed.json", GROUP.format("trades")
    run(gpu, out, monkeypatch)
    assert len(asked) == 2 * len(gpu.PLAIN)
    assert f"| {group.replace('/', ' | ')} | eager | failed: a / b | | |" in (tmp_path / "speed.md").read_text()
    asked.clear()
    broken.clear()
    assert "failed" not in run(gpu, out, monkeypatch)[f"{group}/eager"]
    assert asked == [f"{group}/plain", f"{group}/eager"]
    with pytest.raises(SystemExit, match="remove it"):
        run(gpu, out, monkeypatch)
    monkeypatch.setattr(gpu, "gpu_machine", lambda: {"torch": "another"})
    out.write_text(json.dumps({**json.loads(out.read_text()), "cells": {}}))
    with pytest.raises(SystemExit):
        run(gpu, out, monkeypatch)
    assert json.loads(out.read_text())["cells"] == {}, "cells of two machines would stand in one table"


def test_numbers_are_in_their_file_before_a_page_of_them_can_fail(gpu: ModuleType, tmp_path: Path) -> None:
    result, out = {"cells": {"a": 1}}, tmp_path / "speed.json"
    with pytest.raises(KeyError):
        gpu.write_result(result, out, lambda held: held["machine"])
    assert json.loads(out.read_text()) == result


def test_an_engine_that_fell_back_is_not_shown_as_what_it_was_to_be(gpu: ModuleType) -> None:
    cell = {"ms_per_backprop": 1.0, "images_per_second": 1, "tflops": 200.0, "peak_memory_gib": 1.0, "ran": "graph"}
    cell |= {"warm_up_seconds": 1.0, "backprops_per_batch": 8, "peak_tflops": 400.0}
    machine = {"device": "a GPU", "torch": "2", "python": "3", "peak_tflops": 800.0}
    page = gpu.render({"machine": machine, "cells": {"net/pgd-7/128/compile": cell}})
    assert "| compile, fell back: graph |" in page
    assert "| 50% |" in page, "the share is of what its own call reached"


def test_the_page_says_each_calls_peak_and_which_deat_it_measured(gpu: ModuleType) -> None:
    cell = {"ms_per_backprop": 1.0, "images_per_second": 1, "tflops": 200.0, "peak_memory_gib": 1.0}
    cell |= {"warm_up_seconds": 1.0, "backprops_per_batch": 8}
    new = {**cell, "peak_tflops": 400.0, "made": {"commit": "abc", "source": "012"}, "first": True}
    machine = {"device": "a GPU", "torch": "2", "python": "3", "peak_tflops": 800.0}
    cells = {
        f"{net}/pgd-7/128/{engine}": held for net, held in (("a", cell), ("b", new)) for engine in ("eager", "graph")
    }
    page = gpu.render({"machine": machine, "cells": cells})
    assert "| 800.0 | commit not recorded | a/pgd-7/128 |" in page
    assert "| 400.0 | commit abc, source digest 012 | b/pgd-7/128 |" in page
    assert page.count("| 1.0, first |") == 2


def test_the_page_about_files_says_the_command_that_made_it(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, out = importlib.import_module("gpu_stream"), tmp_path / "stream.json"
    monkeypatch.setattr(
        stream,
        "make_files",
        lambda folder, count: (folder / "0").mkdir() or stream.make_file(str(folder / "0" / "0.jpg"), 0) / 1000,
    )
    monkeypatch.setattr(stream, "seconds_of", lambda method, data, workers: len(data) / (1 + bool(workers)))
    words = ["--images", "1", "--times", "3", "--workers", "2", "5"]
    monkeypatch.setattr(sys, "argv", ["gpu_stream.py", *words, "--out", str(out)])
    stream.main()
    page, result = out.with_suffix(".md").read_text(), json.loads(out.read_text())
    assert f"python bench/gpu_stream.py {' '.join(words)} --out docs/results/stream.json" in page.splitlines()
    assert [row["workers"] for row in result["rows"]] == [2, 5] * 2
    assert "| natural | 1 | 5 | 2 | 1 | 100% |" in page
    usual = {**stream.DEFAULTS, "images": 4096 * 4}
    assert stream.command(usual) == "python bench/gpu_stream.py --out docs/results/stream.json"
    assert stream.render(result) == page
