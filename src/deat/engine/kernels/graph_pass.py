"""Finds batch norms in a network's graph, with the sums and the ReLU beside them, and makes each one call."""

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional as F

from deat.engine.kernels import conv_streams
from deat.engine.kernels.batch_norm import allocate_sums, fused_batch_norm
from deat.engine.kernels.classifier_head import MAX_CLASSES, pooled_linear
from deat.engine.kernels.conv_streams import start_conv2d, wait_for_conv2d
from deat.engine.kernels.cross_entropy import fused_cross_entropy
from deat.engine.kernels.first_conv import PADDED_CHANNELS, conv2d_few_channels
from deat.engine.kernels.kernel_utils import HALF_DTYPES

IN_PLACE_OPERATORS = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem),
)


def can_delay_until(node: fx.Node, until: fx.Node) -> bool:
    """Whether it may as well run at a later node: in between nothing but counts changes in its place, and no mode."""
    while (node := node.next) is not until:
        if (is_in_place(node) and not is_batch_counter(node)) or _changes_mode(node):
            return False
    return True


def _changes_mode(node: fx.Node) -> bool:
    """Whether gradients, autocasting or another mode are switched on or off."""
    return str(getattr(node.target, "__name__", "")).startswith(("_set_", "_enter_", "_exit_"))


def is_in_place(node: fx.Node) -> bool:
    """Whether it changes a tensor in its place."""
    name = str(getattr(node.target, "__name__", node.target))
    return (
        name.endswith("_") or node.target in IN_PLACE_OPERATORS or "out" in node.kwargs or _has_inplace_argument(node)
    )


def _has_inplace_argument(node: fx.Node) -> bool:
    """Whether a function is called with `inplace`, by that name or by position."""
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a method's name, or written in C
        return False
    return bool(given.get("inplace"))


def is_batch_counter(node: fx.Node) -> bool:
    """Whether it adds one to a batch norm's count of batches."""
    if (node.op, node.target, *node.args[1:]) != ("call_method", "add_", 1) or node.users:
        return False
    held = get_example_tensor(node.args[0])
    return held is not None and held.dtype == torch.int64 and held.dim() == 0


def get_only_user(node: Any) -> fx.Node | None:
    """Who asks for it, if one does."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def get_example_tensor(node: Any) -> torch.Tensor | None:
    """A tensor like the one that it will be, if it is known to be one."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


MIN_OVERLAPPING_CONVOLUTIONS = 2
"""How many other convolutions must fit between where one could begin and where its result is needed."""


def replace_convolutions(graph: fx.Graph) -> None:
    """Convolutions of a few channels run with more, of zeros; the others take their weights' gradients beside."""
    for node in list(graph.nodes):
        held = get_example_tensor(node.args[0]) if node.target is torch.conv2d and node.args else None
        if held is not None and held.dim() == 4:
            node.target = conv2d_few_channels if held.shape[1] < PADDED_CHANNELS else conv_streams.conv2d
            if node.target is conv2d_few_channels:
                _fuse_standardisation(graph, node)


def overlap_branches(graph: fx.Graph) -> None:
    """Convolutions that can begin long before their results are needed do so, beside the others."""
    convolutions = [node for node in graph.nodes if node.target is conv_streams.conv2d]
    for conv in convolutions:
        start, end = max(conv.all_input_nodes), min(conv.users, default=conv)
        meanwhile = [other for other in convolutions if other is not conv and start < other < end]
        if len(meanwhile) >= MIN_OVERLAPPING_CONVOLUTIONS and _can_start_early(conv, start, end):
            start.append(conv)
            conv.target = start_conv2d
            with graph.inserting_before(end):
                result = graph.call_function(wait_for_conv2d, (conv,))
            result.meta = dict(conv.meta)
            conv.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)


def _can_start_early(conv: fx.Node, start: fx.Node, end: fx.Node) -> bool:
    """Whether a convolution may run from one node to another beside the others.

    A float32 weight that others ask for too would be halved for all of them by whoever comes first. One that does not
    learn leaves the matrix units busy enough: there, waiting for each other costs more than it brings.
    """
    weight: Any = conv.args[1] if len(conv.args) > 1 else None
    held = get_example_tensor(weight)
    if held is None or not held.requires_grad:
        return False
    own = held.dtype in HALF_DTYPES or get_only_user(weight) is conv
    return own and start.op != "placeholder" and can_delay_until(start, end)


def replace_classifier_head(graph: fx.Graph) -> None:
    """A mean over pixels and the linear layer of few classes behind it become one call."""
    for node in list(graph.nodes):
        weight = get_example_tensor(node.args[1]) if node.target is F.linear and len(node.args) > 1 else None
        if weight is None or len(weight) > MAX_CLASSES:
            continue
        chain = _find_global_mean(node.args[0])
        if chain and all(get_only_user(old) for old in chain) and can_delay_until(chain[-1], node):
            node.target, node.args = pooled_linear, (chain[-1].args[0], *node.args[1:])
            for old in chain:
                graph.erase_node(old)


def _find_global_mean(node: Any) -> list[fx.Node]:
    """The nodes that take a mean over pixels and end in this one, the last one first; none if there is no such mean."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return []
    before: Any = node.args[0] if node.args else None
    how, held = _integer_arguments(node), get_example_tensor(before)
    if held is None or held.dim() != 4:
        return []
    if node.target in ("flatten", torch.flatten) and how in ([1], [1, -1]):
        pool = before.target is F.adaptive_avg_pool2d and _integer_arguments(before) in ([1], [1, 1])
        return [node, before] if pool else []
    return [node] if node.target in ("mean", torch.mean) and sorted(side % 4 for side in how) == [2, 3] else []


def _integer_arguments(node: fx.Node) -> list[int]:
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
        if _is_cast_from_half(wide) and _are_labels(label) and can_delay_until(wide, node):
            node.target, node.args, node.kwargs = fused_cross_entropy, (wide.args[0], label), {}
            if not wide.users:
                graph.erase_node(wide)
            _fuse_mean(graph, node)


def _fuse_mean(graph: fx.Graph, losses: fx.Node) -> None:
    """Where nobody asks for losses but their mean, let that be taken with them."""
    mean = get_only_user(losses)
    if mean is not None and (mean.target, mean.args, mean.kwargs) == ("mean", (losses,), {}):
        losses.kwargs, losses.meta = {"mean": True}, dict(mean.meta)
        mean.replace_all_uses_with(losses)
        graph.erase_node(mean)


def _is_cast_from_half(node: Any) -> bool:
    """Whether it is a half-precision tensor in float32."""
    if not isinstance(node, fx.Node) or node.target != "float" or len(node.args) != 1:
        return False
    held = get_example_tensor(node.args[0])
    return held is not None and held.dtype in HALF_DTYPES


def _are_labels(node: Any) -> bool:
    held = get_example_tensor(node)
    return held is not None and held.dtype == torch.int64 and held.dim() == 1


def _fuse_standardisation(graph: fx.Graph, conv: fx.Node) -> None:
    """Where (x - shift) / scale goes into a convolution of few channels alone, let that do it."""
    quotient: Any = conv.args[0]
    difference = quotient.args[0] if quotient.target is operator.truediv else None
    if not isinstance(difference, fx.Node) or difference.target is not operator.sub:
        return
    (x, shift), scale = difference.args, quotient.args[1]
    if not (
        _is_channel_constant(shift, x)
        and _is_channel_constant(scale, x)
        and get_only_user(difference)
        and get_only_user(quotient)
    ):
        return
    if not can_delay_until(difference, conv):
        return
    conv.args = (x, *conv.args[1:])
    conv.kwargs = {**conv.kwargs, "shift": shift, "scale": scale}
    for node in (quotient, difference):
        graph.erase_node(node)


def _is_channel_constant(node: Any, images: Any) -> bool:
    """Whether it is a constant for each channel of some images, of their type."""
    a, x = get_example_tensor(node), get_example_tensor(images)
    if a is None or x is None or x.dim() != 4 or a.dtype != x.dtype or a.requires_grad:
        return False
    return tuple(a.shape[-3:]) == (x.shape[1], 1, 1) and a.numel() == x.shape[1] and a.is_contiguous()


ADD_FUNCTIONS = (operator.add, torch.add, operator.iadd)
RELU_FUNCTIONS = (F.relu, torch.relu, torch.relu_, F.relu_)
RELU_METHODS = ("relu", "relu_")


def fused_backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend for torch.compile: batch norms become calls of our kernels and the rest runs as it is.

    A graph without any is handed on to torch's own compiler, and so is one with graphs inside it, such as those of
    checkpointed activations, which cannot run as it is.
    """
    return graph.forward if not _has_subgraphs(graph) and fuse_graph(graph) else _compile_with_inductor(graph, inputs)


def first_layer_backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend for a first layer alone: its convolution becomes a call of our kernels and the rest runs as it is."""
    if _has_subgraphs(graph):
        return _compile_with_inductor(graph, inputs)
    replace_convolutions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph.forward


def _has_subgraphs(graph: fx.GraphModule) -> bool:
    return any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)


def _compile_with_inductor(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
    return inductor


def fuse_graph(graph: fx.GraphModule) -> int:
    """Fuse every batch norm in place; how many there were. A graph without any stays as it is."""
    norms = [node for node in graph.graph.nodes if node.target is F.batch_norm and node.args]
    if not norms:
        return 0
    calls = [_fuse_batch_norm(graph.graph, node) for node in norms]
    _allocate_sums_together(graph.graph, calls)
    _merge_batch_counters(graph.graph)
    replace_convolutions(graph.graph)
    overlap_branches(graph.graph)
    replace_classifier_head(graph.graph)
    replace_losses(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return len(norms)


def _fuse_batch_norm(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    x, *rest = norm.args
    assert isinstance(x, fx.Node)
    summed = x if _is_fusable_add(x) and all(user >= norm for user in x.users) and can_delay_until(x, norm) else None
    sum_behind = _find_add_after(norm) if summed is None else None
    end = sum_behind or norm
    relu = _find_relu_after(end)
    with graph.inserting_before(end):
        terms = summed.args if summed is not None else (x, None)
        kwargs = {**norm.kwargs, "residual": _other_operand(sum_behind, norm), "relu": relu is not None}
        found = graph.call_function(fused_batch_norm, (*terms, *rest), kwargs)
        y, total = (graph.call_function(operator.getitem, (found, i)) for i in range(2))
    _replace_node(relu or end, y)
    if summed is not None:
        _replace_node(summed, total)
    else:
        _reroute_other_users(x, found, total)
    for old in (relu, sum_behind, norm, summed):
        if old is not None:
            graph.erase_node(old)
    if not total.users:
        graph.erase_node(total)
    found.meta = dict(x.meta)
    return found


def _allocate_sums_together(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Zero every batch norm's sums at once, before the first of them."""
    first = min(calls)
    channels = [int(call.meta["example_value"].shape[1]) for call in calls]
    with graph.inserting_before(first):
        room = graph.call_function(allocate_sums, (first.args[0], *channels))
        for i, call in enumerate(calls):
            sums = graph.call_function(operator.getitem, (room, i))
            call.kwargs = {**call.kwargs, "sums": sums}


def _reroute_other_users(x: fx.Node, fused_call: fx.Node, total: fx.Node) -> None:
    """Whoever else asks for x later asks for it behind the call, whose gradient then adds theirs by the way."""
    others = [user for user in x.users if user is not fused_call and user.target is not F.batch_norm]
    if all(user > fused_call and not is_in_place(user) for user in others):
        total.meta = dict(x.meta)
        for user in others:
            user.replace_input_with(x, total)


def _replace_node(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _merge_batch_counters(graph: fx.Graph) -> None:
    """Batch norms count their batches, each with a launch of its own: let one launch do it for all."""
    counts = [node for node in graph.nodes if is_batch_counter(node)]
    if counts:
        times = Counter(node.args[0] for node in counts)  # one launch must not add to a count twice at once
        with graph.inserting_before(counts[-1]):
            graph.call_function(torch._foreach_add_, (list(times), list(times.values())))
    for node in counts:
        graph.erase_node(node)


def _is_fusable_add(node: fx.Node) -> bool:
    """Whether it adds two tensors of one shape and type, neither of which is needed as it was before."""
    if node.op != "call_function" or node.target not in ADD_FUNCTIONS or node.kwargs or len(node.args) != 2:
        return False
    a, b = (get_example_tensor(term) for term in node.args)
    alike = a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype
    return alike and (node.target is not operator.iadd or _is_only_seen_by(node.args[0], node))


def _find_add_after(norm: fx.Node) -> fx.Node | None:
    """The sum of a batch norm and something else, with a ReLU behind it, if the batch norm can wait for it."""
    after = get_only_user(norm)
    if after is None or not _is_fusable_add(after) or _find_relu_after(after) is None:
        return None
    waits = can_delay_until(norm, after) and not _shares_statistics_until(norm, after)
    return after if after.args[0] is not after.args[1] and waits else None


def _shares_statistics_until(norm: fx.Node, after: fx.Node) -> bool:
    """Whether another batch norm before that node has the same running statistics, which know who came first."""
    mean: Any = norm.args[1] if len(norm.args) > 1 else norm.kwargs.get("running_mean")
    return isinstance(mean, fx.Node) and any(norm < user < after for user in mean.users)


def _is_only_seen_by(node: Any, user: fx.Node) -> bool:
    """Whether nobody but its user sees it, neither here nor outside."""
    return node.op != "placeholder" and get_only_user(node) is user


def _other_operand(add_node: fx.Node | None, term: fx.Node) -> Any:
    """What a sum adds to a term."""
    return None if add_node is None else add_node.args[1] if add_node.args[0] is term else add_node.args[0]


def _find_relu_after(node: fx.Node) -> fx.Node | None:
    after = get_only_user(node)
    return after if after is not None and _is_relu(after) else None


def _is_relu(node: fx.Node) -> bool:
    return node.target in (
        RELU_FUNCTIONS if node.op == "call_function" else RELU_METHODS if node.op == "call_method" else ()
    )
