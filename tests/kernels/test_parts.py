"""What bench/gpu_parts.py leaves out is there to be left out."""

import importlib

import pytest

from helpers.bench_scripts import importable_bench

pytest.importorskip("triton", reason="needs Triton, which is for Linux")


def test_every_part_that_the_benchmark_leaves_out_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with importable_bench(monkeypatch):
        parts = importlib.import_module("gpu_parts").PARTS
    assert len(parts) > 5
    assert all(hasattr(owner, name) for owner, name, _ in parts.values())
