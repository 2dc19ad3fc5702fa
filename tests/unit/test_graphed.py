"""Who may use which recording, and when: shown with recordings that only pretend."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deat.evaluation import fast_model
from deat.evaluation.fast_model import GraphedNetwork
from helpers.recorded import count_recordings


class Pretended:
    """A recording on the CPU: it reads and writes its own tensors, and its activations lie in its slot's memory."""

    made = warmed_up = 0

    def __init__(self, net: Any, x: Tensor, pool: dict[str, Any], warm_up: bool) -> None:
        Pretended.made += 1
        Pretended.warmed_up += warm_up
        self.net, self.x, self.pool = net, x.detach().clone(), pool
        self.answer = net(self.x).detach().clone()

    def forward(self, x: Tensor) -> None:
        self.x[: len(x)] = x
        self.answer.copy_(self.net(self.x).detach())
        self.pool.update(owner=self, images=self.x.clone())

    def backward(self, slope: Tensor) -> Tensor:
        assert self.pool.pop("owner", None) is self, "another recording, or a backward, has overwritten the activations"
        images = self.pool["images"].requires_grad_()
        with torch.enable_grad():
            answer = self.net(images)[: len(slope)]
        return torch.autograd.grad(answer, images, slope)[0][: len(slope)]


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(fast_model, "_GraphPair", Pretended)
    monkeypatch.setattr(fast_model, "MAX_RECORDED_BATCH", 32)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", dict)
    Pretended.made = Pretended.warmed_up = 0
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def slope(ask: Any, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(ask(x).square().sum(), x)
    return grad


def images(n: int) -> Tensor:
    return torch.rand(n, 3, 2, 2, dtype=torch.float64)


def test_batches_of_any_length_are_answered_and_differentiated(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    for n in (70, 70, 65, 33, 32, 31, 1, 96, 70):
        x = images(n)
        assert torch.allclose(slope(ask, x), slope(net, x))
        with torch.no_grad():
            assert torch.allclose(ask(x), net(x))
    assert (Pretended.made, Pretended.warmed_up) == (4, 1), "one size, for three whole parts and for what is left over"


def test_a_backward_survives_other_forwards_in_between(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    first, second = images(40), images(50)
    for _ in range(3):
        ask(first), ask(second)
    x = first.clone().requires_grad_()
    answer = ask(x).square().sum()
    with torch.no_grad():
        ask(second), ask(first + 1)
    (grad,) = torch.autograd.grad(answer, x)
    assert torch.allclose(grad, slope(net, first))
    assert torch.allclose(slope(ask, first), slope(net, first)), (
        "what that backward wrote over was taken for activations"
    )


def test_each_size_of_what_is_left_over_is_recorded_once_wherever_it_stands(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_model, "MAX_RECORDED_BATCH", 256)
    ask = GraphedNetwork(net)
    for n in (300, 600, 301, 520, 310):
        x = images(n)
        assert torch.allclose(slope(ask, x), slope(net, x))
    assert Pretended.made == 3, "two whole parts, and 64 images left over beside one or both; 128 came up once"


def test_padded_batches_lie_in_memory_as_whole_ones_do(net: nn.Module) -> None:
    layouts = {}
    whole = images(32).contiguous(memory_format=torch.channels_last)
    for n in (32, 31, 20, 1):
        layouts[n] = fast_model._pad_batch(whole[:n], torch.Size((32, 3, 2, 2))).stride()
    assert set(layouts.values()) == {whole.stride()}
    assert fast_model._pad_batch(images(5), torch.Size((32, 3, 2, 2))).is_contiguous()


def test_a_size_in_another_layout_is_warmed_up_again(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    for _ in range(3):
        ask(images(32))
    ask(images(96).contiguous(memory_format=torch.channels_last))
    assert (Pretended.made, Pretended.warmed_up) == (3, 2), "in either layout once"


def test_a_second_backward_of_one_forward_is_right_too(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    x = images(20)
    ask(x)
    x.requires_grad_()
    answer = ask(x).square()
    for column in range(3):
        (grad,) = torch.autograd.grad(answer[:, column].sum(), x, retain_graph=True)
        assert torch.allclose(grad, slope(lambda v, column=column: net(v)[:, column], x))
    assert count_recordings(ask) == 1


def test_an_empty_batch_has_no_answers(net: nn.Module) -> None:
    assert GraphedNetwork(net)(images(0)).shape == (0, 3)


def test_two_gradients_of_the_same_images_are_both_right(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    x = images(20)
    for _ in range(3):
        with torch.no_grad():
            ask(x)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        sums = ask(one).square().sum(), ask(other).square().sum()
        (second,) = torch.autograd.grad(sums[1], other)
        (first,) = torch.autograd.grad(sums[0], one)
        assert torch.allclose(first, slope(net, x))
        assert torch.allclose(second, slope(net, x))
    assert Pretended.made == 1


def test_a_size_is_recorded_once_it_comes_again(net: nn.Module) -> None:
    ask = GraphedNetwork(net)
    ask(images(10))
    assert count_recordings(ask) == 0
    ask(images(12))  # padded to the same size
    assert count_recordings(ask) == 1
