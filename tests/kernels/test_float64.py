"""In float64 a whole network that was fused computes what it did: what its kernels do not take, torch does."""

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget, Buffers
from deat.engine.engine import Engine
from deat.engine.kernels import batch_norm, classifier_head, cross_entropy, first_conv
from deat.engine.kernels.classifier_head import pooled_linear
from deat.engine.kernels.first_conv import conv2d_few_channels
from helpers.games import game_of
from helpers.kernels_cases import distance
from helpers.nets import CLASSES, images, seeded, weights

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them for real")


class Whole(nn.Module):
    """What is fused, once each: a first convolution, batch norms with a sum before and behind, a shortcut, an end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), *(_conv(3) for _ in range(2))
        self.shortcut, self.head = _conv(1), nn.Linear(8, CLASSES)
        self.first, self.second, self.third = (nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.a(torch.relu(self.first(x)))
        out = self.second(self.b(x)) + self.shortcut(x)
        return self.head(torch.relu(self.third(torch.relu(out) + x)).mean((2, 3)))


def _conv(size: int) -> nn.Conv2d:
    return nn.Conv2d(8, 8, size, padding=size // 2, bias=False)


class Exact(Engine):
    """The engine of half precision, in float64."""

    dtype = torch.float64  # type: ignore[assignment]
    memory_format = torch.channels_last  # type: ignore[assignment]
    uses_own_kernels = True  # type: ignore[assignment]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU is taken for a GPU; which kernels ran."""
    names, launch = list[str](), batch_norm._launch
    monkeypatch.setattr(
        batch_norm, "_is_supported_tensor", lambda x: x.is_contiguous(memory_format=torch.channels_last)
    )
    monkeypatch.setattr(
        batch_norm, "_launch", lambda name, *rest, **named: (names.append(name), launch(name, *rest, **named))[1]
    )
    for module in (classifier_head, cross_entropy, first_conv):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    return names


def played(method: deat.Method, compiles: bool) -> tuple[Buffers, list[Tensor]]:
    """A batch after its game, and by how much each weight and statistic has moved."""
    net = deat.add_normalization(seeded(Whole), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)).double()
    engine = Exact(use_compile=compiles)
    game = game_of(method, engine.prepare(net), engine=engine)
    before = [*weights(net), *(b.clone() for b in net.buffers())]
    x, y = images(channels=3, side=6)
    method.play(game, x.double(), y, Budget(2, 0.02, 1.0))
    assert (game.executor.compiled is not None) == compiles, "compiling fell back"
    after = (*net.parameters(), *net.buffers())
    return next(iter(game._buffers_by_shape.values())), [p.detach() - q for p, q in zip(after, before, strict=True)]


@pytest.mark.parametrize("name", ["pgd-2", "free-3", "trades-2", "mart-2", "fat-2", "yopo-3-2"])
def test_a_fused_network_in_float64_plays_as_it_did(name: str, ran: list[str]) -> None:
    torch._dynamo.reset()
    method = deat.get_method(name)
    (one, steps), (other, ours) = (played(method, compiles) for compiles in (False, True))
    assert {"batch_norm_forward_kernel", "batch_norm_backward_kernel"} <= set(ran)
    assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-12)
    for part in ("delta", "grad", "magnitude"):
        assert distance(getattr(one, part), getattr(other, part)) < 1e-9, part
    moved = [(p, q) for p, q in zip(steps, ours, strict=True) if p.any() or q.any()]
    assert len(moved) > 15
    assert max(distance(p, q) for p, q in moved) < 1e-9


def test_a_first_convolution_and_an_end_in_float64_are_torchs(ran: list[str]) -> None:
    x, weight, head = (torch.randn(*size).double() for size in ((2, 3, 6, 6), (8, 3, 3, 3), (4, 8)))
    assert torch.equal(conv2d_few_channels(x, weight), torch.conv2d(x, weight))
    features = torch.conv2d(x, weight).contiguous(memory_format=torch.channels_last)
    assert torch.equal(pooled_linear(features, head), features.mean((2, 3)) @ head.T)
