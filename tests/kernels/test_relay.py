"""YOPO's full passes and first-layer steps are fused as other moves are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import deat
from deat.core import compiled_functions
from deat.core.batch_buffers import Budget
from deat.engine.engine import Engine
from deat.engine.kernels.batch_norm import fused_batch_norm
from deat.engine.kernels.first_conv import conv2d_few_channels
from deat.engine.kernels.graph_pass import first_layer_backend, fused_backend
from helpers.games import game_of
from helpers.nets import CLASSES, images, seeded

Backend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class Residual(nn.Module):
    """What its first convolution answers goes into a batch norm and past it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.conv(torch.relu(self.norm(x)))
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


def plain() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, CLASSES))


def normalised(build: Callable[[], nn.Module]) -> nn.Module:
    return deat.add_normalization(seeded(build), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[fx.Node]]]:
    """What a GPU would run: each graph's backend, and its calls of our functions."""
    graphs: list[tuple[str, list[fx.Node]]] = []

    def noting(backend: Backend) -> Backend:
        def note(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            answer = backend(graph, inputs)
            ours = [node for node in graph.graph.nodes if node.target in (fused_batch_norm, conv2d_few_channels)]
            graphs.append((backend.__name__, ours))
            return answer

        return note

    torch._dynamo.reset()
    monkeypatch.setattr(Engine, "uses_own_kernels", property(lambda self: True))
    monkeypatch.setattr(
        compiled_functions,
        "_make_projected_step",
        lambda attack, threat, engine: lambda *args, out: out.copy_(threat.pgd_step(*args)),
    )
    monkeypatch.setattr(compiled_functions, "fused_backend", noting(fused_backend))
    monkeypatch.setattr(compiled_functions, "first_layer_backend", noting(first_layer_backend))
    return graphs


@pytest.mark.parametrize("build", [plain, Residual])
def test_full_passes_and_steps_through_the_first_layer_are_fused(
    build: Callable[[], nn.Module], found: list[tuple[str, list[fx.Node]]]
) -> None:
    net, method = normalised(build), deat.get_method("yopo-3-3")
    engine = Engine(precision="bf16", use_compile=True)
    game = game_of(method, engine.prepare(net), engine=engine)
    method.play(game, *images(channels=3), Budget(2, 0.02))
    assert game.executor.compiled is not None, "compiling fell back"
    assert [backend for backend, _ in found] == ["fused_backend", "first_layer_backend", "fused_backend"]
    probed, layer, joint = (ours for _, ours in found)
    assert (
        [node.target for node in probed]
        == [node.target for node in joint]
        == [conv2d_few_channels, *[fused_batch_norm] * 2]
    )
    assert [node.target for node in layer] == [conv2d_few_channels]
    assert all(ours[0].kwargs["shift"] is not None for _, ours in found), "standardised by itself"
    assert probed[1].args[0] is probed[0], "the probe is added by itself"
    assert str(probed[1].args[1]).startswith("l_offsets"), "the probe is added by itself"
    assert joint[1].args[1] is None
