"""The scripts of bench/, imported by tests and forgotten again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@contextmanager
def importable_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the scripts can be imported; afterwards their modules, with plain names, are nobody else's."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{BENCH}/"):
            del sys.modules[name]
