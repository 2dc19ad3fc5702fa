"""What bench/gpu_parts.py leaves out is there to be left out."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton, which is for Linux")


def test_every_part_that_the_benchmark_leaves_out_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    known = set(sys.modules)
    parts = importlib.import_module("gpu_parts").PARTS
    assert len(parts) > 5
    assert all(hasattr(owner, name) for owner, name, _ in parts.values())
    for name in set(sys.modules) - known:
        if name.startswith("gpu"):  # bench's modules are nobody else's
            del sys.modules[name]
