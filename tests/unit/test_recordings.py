"""A recorded network answers and differentiates like an eager one; what cannot be recorded runs eagerly."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from deat.evaluation import graphed
from deat.evaluation.graphed import EAGER, Graphed
from deat.evaluation.quick import Quick


def cube(x: Tensor) -> Tensor:
    return x**3


class Pair:
    """A recording of a network: its backward writes over the activations, as on a device."""

    def __init__(self, net: graphed.Net, x: Tensor, pool: Any) -> None:
        self.net, self.x, self.kept = net, x.detach().clone(), torch.full_like(x, torch.nan)

    def forward(self, x: Tensor) -> None:
        self.x[: len(x)] = x
        self.kept, self.answer = self.x.clone(), self.net(self.x)

    def backward(self, slope: Tensor) -> Tensor:
        found = 3 * self.kept[: len(slope)] ** 2 * slope
        self.kept.fill_(torch.nan)
        return found


@pytest.fixture
def no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, no_pools: None) -> Graphed:
    """A network whose batches of 32 are recorded already."""
    monkeypatch.setattr(graphed, "_Pair", Pair)
    found = Graphed(cube)
    for _ in range(EAGER):
        found(torch.rand(32, 2))
    return found


def slope(net: graphed.Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    return grad


def test_a_second_backward_of_one_forward_is_right_too(recorded: Graphed) -> None:
    x = torch.rand(32, 2).requires_grad_()
    answer = recorded(x)
    for column in range(2):
        (grad,) = torch.autograd.grad(answer[:, column].sum(), x, retain_graph=True)
        assert torch.equal(grad[:, column], slope(cube, x)[:, column])
    assert recorded.recordings() == 1


def test_activations_that_a_late_backward_wrote_over_are_not_taken_for_those_of_the_next_question(
    recorded: Graphed,
) -> None:
    first, second = (torch.rand(32, 2) for _ in range(2))
    x = first.clone().requires_grad_()
    answer = recorded(x)
    with torch.no_grad():
        recorded(second)
    (grad,) = torch.autograd.grad(answer.sum(), x)
    assert torch.equal(grad, slope(cube, first))
    assert torch.equal(slope(recorded, first), slope(cube, first))


def test_an_empty_batch_has_no_answers(recorded: Graphed) -> None:
    assert recorded(torch.rand(0, 2)).shape == (0, 2)


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def idle_device(monkeypatch: pytest.MonkeyPatch, no_pools: None) -> None:
    """Recordings are made, and do nothing."""
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool=None: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)


@pytest.mark.parametrize("net", [Tensor.detach, lambda x: torch.ones_like(x, requires_grad=True)])
def test_a_network_that_lets_no_gradient_through_has_none(net: graphed.Net, idle_device: None) -> None:
    asked = Graphed(net)
    x = torch.rand(32, 2, requires_grad=True)
    for _ in range(EAGER + 1):
        answer = asked(x)
        assert torch.equal(answer, net(x))
    (grad,) = torch.autograd.grad(answer.sum(), x)
    assert not grad.any()


def test_a_network_that_cannot_be_recorded_is_asked_eagerly(idle_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    asked, x = Graphed(cube), torch.rand(5, 2)
    for _ in range(EAGER):
        asked(x)
    with pytest.warns(UserWarning, match="cannot be recorded.*not permitted"):
        assert torch.equal(asked(x), cube(x))
    assert torch.equal(slope(asked, x), slope(cube, x))
    assert asked.recordings() == 0


def test_a_twin_that_cannot_be_compiled_answers_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> graphed.Net:
        def call(x: Tensor) -> Tensor:
            raise TorchDynamoException("no such operation")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.rand(4, 3, 2, 2)
    quick = Quick(net, net, "fp32", compiled=True)
    with pytest.warns(UserWarning, match="cannot be compiled.*no such operation"):
        assert torch.allclose(quick(x), net(x))
    assert not quick.compiled
