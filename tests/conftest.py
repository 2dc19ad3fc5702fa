"""What every test shares: one thread, so that two runs do not fight, and the CPU, unless it is about a GPU."""

import os
from collections.abc import Iterator

import pytest
import torch

from helpers.children import Children

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, by whomever


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.path.parts:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.close()
