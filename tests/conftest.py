"""What every test shares: one thread, so that two runs of the suite beside each other do not fight."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
