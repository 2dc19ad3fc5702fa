"""Weight gradients taken beside the backward pass, on streams that do nothing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from deat.engine.kernels import conv_streams, kernel_utils


class Stream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture(autouse=True)
def idle_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_streams, "get_side_stream", lambda device, use: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)


def test_what_is_read_beside_is_not_added_to_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, read, summed = conv_streams._conv_gradient, [], []

    def noted(dy: Tensor, *rest: Any, needs_grad_x: bool) -> Tensor:
        read.append(dy.data_ptr())
        return gradient(dy, *rest, needs_grad_x=needs_grad_x)

    monkeypatch.setattr(conv_streams, "_conv_gradient", noted)
    x, weight = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)
    h = 2 * x  # its gradient is that by the sum, which the convolution reads, and the convolution's
    h.register_hook(lambda grad: summed.append(grad.data_ptr()))
    y = conv_streams.SideStreamConvFunction.apply(h, weight, [1, 1], [1, 1], [1, 1], 1) + h  # type: ignore[no-untyped-call]
    (3 * y).sum().backward()
    assert read
    assert summed[0] not in read
    conv_streams.wait_for_gradients()
    assert not conv_streams._pending


def test_weight_gradients_taken_beside_are_the_weights_gradients() -> None:
    x, weight = torch.randn(2, 4, 6, 6, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    for _ in range(2):  # the second adds to the first
        conv_streams.SideStreamConvFunction.apply(x, weight, [2, 1], [1, 0], [1, 2], 2).square().sum().backward()  # type: ignore[no-untyped-call]
    conv_streams.wait_for_gradients()
    ours = weight.grad, x.grad
    weight.grad = x.grad = None
    for _ in range(2):
        torch.conv2d(x, weight, None, (2, 1), (1, 0), (1, 2), 2).square().sum().backward()
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours, (weight.grad, x.grad), strict=True))  # type: ignore[arg-type]


def test_gradients_that_autograd_finds_for_the_weight_are_apart_until_they_are_joined() -> None:
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3, requires_grad=True)
    y = conv_streams.SideStreamConvFunction.apply(x, weight, [1, 1], [1, 1], [1, 1], 1)  # type: ignore[no-untyped-call]
    (y.square().sum() + weight.square().sum()).backward()
    assert torch.equal(weight.grad, 2 * weight), "autograd waits for nothing beside"
    conv_streams.wait_for_gradients()
    ours, weight.grad = weight.grad, None
    (torch.conv2d(x, weight, None, 1, 1).square().sum() + weight.square().sum()).backward()
    assert torch.allclose(ours, weight.grad, rtol=1e-5)


def test_a_device_has_one_stream_for_each_use_and_branches_and_weight_gradients_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    asked: list[Any] = []
    for room in (conv_streams, conv_streams):
        monkeypatch.setattr(
            room,
            "get_side_stream",
            lambda device, use: (asked.append(kernel_utils.get_side_stream(device, use)), asked[-1])[1],
        )
    monkeypatch.setattr(conv_streams, "on_gpu", lambda x: True)
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 4, 3, 3, requires_grad=True)
    conv_streams.wait_for_conv2d(conv_streams.start_conv2d(x, weight))
    conv_streams.SideStreamConvFunction.apply(x, weight, [1, 1], [1, 1], [1, 1], 1).sum().backward()  # type: ignore[no-untyped-call]
    conv_streams.wait_for_gradients()
    first, second, third, fourth = asked
    assert first is second is not third
    assert third is fourth
    kernel_utils.get_side_stream.cache_clear()
