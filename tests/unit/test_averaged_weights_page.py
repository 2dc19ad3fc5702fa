"""The page of averaged weights: it is made of the records beside it, and its batch norms are estimated as it says."""

from pathlib import Path

import pytest
import torch

from helpers.bench_scripts import importable_bench
from helpers.nets import conv_net, images

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture(autouse=True)
def _bench(monkeypatch):
    with importable_bench(monkeypatch):
        yield


def test_the_page_is_that_of_the_records_beside_it():
    from averaged_weights import render

    assert (RESULTS / "averaged-weights.md").read_text() == render(RESULTS / "averaged-weights")


def test_statistics_are_estimated_by_the_mean_over_the_batches_and_nothing_else_changes():
    from averaged_weights import estimate_statistics

    net = conv_net(batch_norm=True).eval()
    norm = next(module for module in net if isinstance(module, torch.nn.BatchNorm2d))
    before, momentum, seen = [p.clone() for p in net.parameters()], norm.momentum, []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].mean((0, 2, 3))))
    estimate_statistics(net, iter([images(6)[0], images(6, seed=1)[0]]))
    assert torch.allclose(norm.running_mean, torch.stack(seen).mean(0), atol=1e-6)
    assert (norm.momentum, norm.training) == (momentum, False)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
