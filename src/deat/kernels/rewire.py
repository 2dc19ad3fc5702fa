"""Puts our own convolutions, branches, network's end and loss into a graph, in place of torch's."""

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from deat.kernels import forked
from deat.kernels.branch import arrived, begin_conv2d
from deat.kernels.entropy import cross_entropy
from deat.kernels.nodes import can_wait, example, only_user
from deat.kernels.pooled import CLASSES, pooled_linear
from deat.kernels.sizes import HALVES
from deat.kernels.stem import CHANNELS, conv2d_of_few

MEANWHILE = 2
"""How many other convolutions must fit between where one could begin and where its result is needed."""


def replace_convolutions(graph: fx.Graph) -> None:
    """Convolutions of a few channels run with more, of zeros; the others take their weights' gradients beside."""
    for node in list(graph.nodes):
        held = example(node.args[0]) if node.target is torch.conv2d and node.args else None
        if held is not None and held.dim() == 4:
            node.target = conv2d_of_few if held.shape[1] < CHANNELS else forked.conv2d
            if node.target is conv2d_of_few:
                _standardise_within(graph, node)


def branch_off(graph: fx.Graph) -> None:
    """Convolutions that can begin long before their results are needed do so, beside the others."""
    convolutions = [node for node in graph.nodes if node.target is forked.conv2d]
    for conv in convolutions:
        start, end = max(conv.all_input_nodes), min(conv.users, default=conv)
        meanwhile = [other for other in convolutions if other is not conv and start < other < end]
        if len(meanwhile) >= MEANWHILE and _can_begin(conv, start, end):
            start.append(conv)
            conv.target = begin_conv2d
            with graph.inserting_before(end):
                result = graph.call_function(arrived, (conv,))
            result.meta = dict(conv.meta)
            conv.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)


def _can_begin(conv: fx.Node, start: fx.Node, end: fx.Node) -> bool:
    """Whether a convolution may run from one node to another beside the others.

    A float32 weight that others ask for too would be halved for all of them by whoever comes first. One that does not
    learn leaves the matrix units busy enough: there, waiting for each other costs more than it brings.
    """
    weight: Any = conv.args[1] if len(conv.args) > 1 else None
    held = example(weight)
    if held is None or not held.requires_grad:
        return False
    own = held.dtype in HALVES or only_user(weight) is conv
    return own and start.op != "placeholder" and can_wait(start, end)


def replace_end(graph: fx.Graph) -> None:
    """A mean over pixels and the linear layer of few classes behind it become one call."""
    for node in list(graph.nodes):
        weight = example(node.args[1]) if node.target is F.linear and len(node.args) > 1 else None
        if weight is None or len(weight) > CLASSES:
            continue
        chain = _mean_over_pixels(node.args[0])
        if chain and all(only_user(old) for old in chain) and can_wait(chain[-1], node):
            node.target, node.args = pooled_linear, (chain[-1].args[0], *node.args[1:])
            for old in chain:
                graph.erase_node(old)


def _mean_over_pixels(node: Any) -> list[fx.Node]:
    """The nodes that take a mean over pixels and end in this one, the last one first; none if there is no such mean."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return []
    before: Any = node.args[0] if node.args else None
    how, held = _how(node), example(before)
    if held is None or held.dim() != 4:
        return []
    if node.target in ("flatten", torch.flatten) and how in ([1], [1, -1]):
        pool = before.target is F.adaptive_avg_pool2d and _how(before) in ([1], [1, 1])
        return [node, before] if pool else []
    return [node] if node.target in ("mean", torch.mean) and sorted(side % 4 for side in how) == [2, 3] else []


def _how(node: fx.Node) -> list[int]:
    """The numbers that a node is given beside its tensor, which stand for themselves or in a list; none for others."""
    rest: Any = node.args[1:]
    given = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return list(given) if not node.kwargs and all(isinstance(number, int) for number in given) else []


def replace_losses(graph: fx.Graph) -> None:
    """Cross-entropies of half-precision logits, which are widened first, become one call each, as do their means."""
    for node in list(graph.nodes):
        if node.target is not F.cross_entropy or len(node.args) != 2 or node.kwargs != {"reduction": "none"}:
            continue
        wide, label = node.args
        if _is_widened(wide) and _are_labels(label) and can_wait(wide, node):
            node.target, node.args, node.kwargs = cross_entropy, (wide.args[0], label), {}
            if not wide.users:
                graph.erase_node(wide)
            _take_mean_within(graph, node)


def _take_mean_within(graph: fx.Graph, losses: fx.Node) -> None:
    """Where nobody asks for losses but their mean, let that be taken with them."""
    mean = only_user(losses)
    if mean is not None and (mean.target, mean.args, mean.kwargs) == ("mean", (losses,), {}):
        losses.kwargs, losses.meta = {"mean": True}, dict(mean.meta)
        mean.replace_all_uses_with(losses)
        graph.erase_node(mean)


def _is_widened(node: Any) -> bool:
    """Whether it is a half-precision tensor in float32."""
    if not isinstance(node, fx.Node) or node.target != "float" or len(node.args) != 1:
        return False
    held = example(node.args[0])
    return held is not None and held.dtype in HALVES


def _are_labels(node: Any) -> bool:
    held = example(node)
    return held is not None and held.dtype == torch.int64 and held.dim() == 1


def _standardise_within(graph: fx.Graph, conv: fx.Node) -> None:
    """Where (x - shift) / scale goes into a convolution of few channels alone, let that do it."""
    quotient: Any = conv.args[0]
    difference = quotient.args[0] if quotient.target is operator.truediv else None
    if not isinstance(difference, fx.Node) or difference.target is not operator.sub:
        return
    (x, shift), scale = difference.args, quotient.args[1]
    if not (_by_channel(shift, x) and _by_channel(scale, x) and only_user(difference) and only_user(quotient)):
        return
    if not can_wait(difference, conv):
        return
    conv.args = (x, *conv.args[1:])
    conv.kwargs = {**conv.kwargs, "shift": shift, "scale": scale}
    for node in (quotient, difference):
        graph.erase_node(node)


def _by_channel(node: Any, images: Any) -> bool:
    """Whether it is a constant for each channel of some images, of their type."""
    a, x = example(node), example(images)
    if a is None or x is None or x.dim() != 4 or a.dtype != x.dtype or a.requires_grad:
        return False
    return tuple(a.shape[-3:]) == (x.shape[1], 1, 1) and a.numel() == x.shape[1] and a.is_contiguous()
