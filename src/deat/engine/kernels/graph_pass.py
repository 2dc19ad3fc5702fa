"""The graph pass that replaces batch norms, convolutions and losses of a network by calls of our own kernels."""

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
    """Whether a node may run at a later one: in between no mode changes, and only batch counters change in place."""
    while (node := node.next) is not until:
        if (is_in_place(node) and not is_batch_counter(node)) or _changes_mode(node):
            return False
    return True


def _changes_mode(node: fx.Node) -> bool:
    """Whether a node switches gradients, autocasting or another mode."""
    return str(getattr(node.target, "__name__", "")).startswith(("_set_", "_enter_", "_exit_"))


def is_in_place(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place."""
    name = str(getattr(node.target, "__name__", node.target))
    return (
        name.endswith("_") or node.target in IN_PLACE_OPERATORS or "out" in node.kwargs or _has_inplace_argument(node)
    )


def _has_inplace_argument(node: fx.Node) -> bool:
    """Whether a function is called with `inplace`, by name or by position."""
    try:
        arguments = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # the name of a method, or a function written in C
        return False
    return bool(arguments.get("inplace"))


def is_batch_counter(node: fx.Node) -> bool:
    """Whether a node adds one to a batch norm's count of batches."""
    if (node.op, node.target, *node.args[1:]) != ("call_method", "add_", 1) or node.users:
        return False
    counter = get_example_tensor(node.args[0])
    return counter is not None and counter.dtype == torch.int64 and counter.dim() == 0


def get_only_user(node: Any) -> fx.Node | None:
    """Return the user of a node, if there is exactly one."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def get_example_tensor(node: Any) -> torch.Tensor | None:
    """Return the example of a node's value that torch.compile recorded, if it is a tensor."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return example if isinstance(example, torch.Tensor) else None


MIN_OVERLAPPING_CONVOLUTIONS = 2
"""How many other convolutions there must be between the earliest start of one and the first use of its result."""


def replace_convolutions(graph: fx.Graph) -> None:
    """Replace convolutions of few channels by our own, and the others by those with weight gradients on a side stream."""
    for node in list(graph.nodes):
        x = get_example_tensor(node.args[0]) if node.target is torch.conv2d and node.args else None
        if x is not None and x.dim() == 4:
            node.target = conv2d_few_channels if x.shape[1] < PADDED_CHANNELS else conv_streams.conv2d
            if node.target is conv2d_few_channels:
                _fuse_standardisation(graph, node)


def overlap_branches(graph: fx.Graph) -> None:
    """Start convolutions on a side stream if their results are needed much later."""
    convolutions = [node for node in graph.nodes if node.target is conv_streams.conv2d]
    for conv in convolutions:
        start, end = max(conv.all_input_nodes), min(conv.users, default=conv)
        overlapping = [other for other in convolutions if other is not conv and start < other < end]
        if len(overlapping) >= MIN_OVERLAPPING_CONVOLUTIONS and _can_start_early(conv, start, end):
            start.append(conv)
            conv.target = start_conv2d
            with graph.inserting_before(end):
                result = graph.call_function(wait_for_conv2d, (conv,))
            result.meta = dict(conv.meta)
            conv.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)


def _can_start_early(conv: fx.Node, start: fx.Node, end: fx.Node) -> bool:
    """Whether a convolution may run on a side stream between two nodes.

    Autocast casts a float32 weight with several users once, on the stream of the first. Without weight gradients the
    matrix units are busy enough, so that waiting for each other costs more than it saves.
    """
    weight: Any = conv.args[1] if len(conv.args) > 1 else None
    example = get_example_tensor(weight)
    if example is None or not example.requires_grad:
        return False
    needs_no_shared_cast = example.dtype in HALF_DTYPES or get_only_user(weight) is conv
    return needs_no_shared_cast and start.op != "placeholder" and can_delay_until(start, end)


def replace_classifier_head(graph: fx.Graph) -> None:
    """Replace a mean over pixels and the linear layer of few classes after it by one call."""
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
    """The nodes of a mean over pixels that ends in this node, the last one first; empty if there is no such mean."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return []
    before: Any = node.args[0] if node.args else None
    numbers, x = _integer_arguments(node), get_example_tensor(before)
    if x is None or x.dim() != 4:
        return []
    if node.target in ("flatten", torch.flatten) and numbers in ([1], [1, -1]):
        is_pooling = before.target is F.adaptive_avg_pool2d and _integer_arguments(before) in ([1], [1, 1])
        return [node, before] if is_pooling else []
    return [node] if node.target in ("mean", torch.mean) and sorted(dim % 4 for dim in numbers) == [2, 3] else []


def _integer_arguments(node: fx.Node) -> list[int]:
    """The integers after a node's first argument, given one by one or as a list; empty if anything else is given."""
    rest: Any = node.args[1:]
    numbers = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return list(numbers) if not node.kwargs and all(isinstance(number, int) for number in numbers) else []


def replace_losses(graph: fx.Graph) -> None:
    """Replace cross-entropies of half-precision logits that are cast to float32, and their means, by one call each."""
    for node in list(graph.nodes):
        if node.target is not F.cross_entropy or len(node.args) != 2 or node.kwargs != {"reduction": "none"}:
            continue
        logits, label = node.args
        if _is_cast_from_half(logits) and _are_labels(label) and can_delay_until(logits, node):
            node.target, node.args, node.kwargs = fused_cross_entropy, (logits.args[0], label), {}
            if not logits.users:
                graph.erase_node(logits)
            _fuse_mean(graph, node)


def _fuse_mean(graph: fx.Graph, losses: fx.Node) -> None:
    """Compute the mean in the same call if it is the only use of the losses."""
    mean = get_only_user(losses)
    if mean is not None and (mean.target, mean.args, mean.kwargs) == ("mean", (losses,), {}):
        losses.kwargs, losses.meta = {"mean": True}, dict(mean.meta)
        mean.replace_all_uses_with(losses)
        graph.erase_node(mean)


def _is_cast_from_half(node: Any) -> bool:
    """Whether a node casts a half-precision tensor to float32."""
    if not isinstance(node, fx.Node) or node.target != "float" or len(node.args) != 1:
        return False
    x = get_example_tensor(node.args[0])
    return x is not None and x.dtype in HALF_DTYPES


def _are_labels(node: Any) -> bool:
    labels = get_example_tensor(node)
    return labels is not None and labels.dtype == torch.int64 and labels.dim() == 1


def _fuse_standardisation(graph: fx.Graph, conv: fx.Node) -> None:
    """Let a convolution of few channels compute (x - shift) / scale if it is the only user."""
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
    """Whether a node is a constant for each channel of the images, of their dtype."""
    constant, x = get_example_tensor(node), get_example_tensor(images)
    if constant is None or x is None or x.dim() != 4 or constant.dtype != x.dtype or constant.requires_grad:
        return False
    has_channel_shape = tuple(constant.shape[-3:]) == (x.shape[1], 1, 1) and constant.numel() == x.shape[1]
    return has_channel_shape and constant.is_contiguous()


ADD_FUNCTIONS = (operator.add, torch.add, operator.iadd)
RELU_FUNCTIONS = (F.relu, torch.relu, torch.relu_, F.relu_)
RELU_METHODS = ("relu", "relu_")


def fused_backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A torch.compile backend that replaces parts of a graph by our own kernels and runs the rest as it is.

    Graphs without batch norms, and graphs with subgraphs (such as checkpointed activations), are compiled by Inductor.

    Args:
        graph: The graph.
        inputs: Example inputs.

    Returns:
        The compiled function.
    """
    return graph.forward if not _has_subgraphs(graph) and fuse_graph(graph) else _compile_with_inductor(graph, inputs)


def first_layer_backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A torch.compile backend for a first layer alone: replaces its convolution and runs the rest as it is."""
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
    """Replace parts of a graph by our own kernels, in place; a graph without batch norms is not changed.

    Args:
        graph: The graph.

    Returns:
        The number of batch norms.
    """
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
    sum_before = (
        x if _is_fusable_add(x) and all(user >= norm for user in x.users) and can_delay_until(x, norm) else None
    )
    sum_after = _find_add_after(norm) if sum_before is None else None
    end = sum_after or norm
    relu = _find_relu_after(end)
    with graph.inserting_before(end):
        terms = sum_before.args if sum_before is not None else (x, None)
        kwargs = {**norm.kwargs, "residual": _other_operand(sum_after, norm), "relu": relu is not None}
        fused_call = graph.call_function(fused_batch_norm, (*terms, *rest), kwargs)
        y, total = (graph.call_function(operator.getitem, (fused_call, i)) for i in range(2))
    _replace_node(relu or end, y)
    if sum_before is not None:
        _replace_node(sum_before, total)
    else:
        _reroute_other_users(x, fused_call, total)
    for old in (relu, sum_after, norm, sum_before):
        if old is not None:
            graph.erase_node(old)
    if not total.users:
        graph.erase_node(total)
    fused_call.meta = dict(x.meta)
    return fused_call


def _allocate_sums_together(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Zero the sums of all batch norms by one launch, before the first of them."""
    first = min(calls)
    channels = [int(call.meta["example_value"].shape[1]) for call in calls]
    with graph.inserting_before(first):
        all_sums = graph.call_function(allocate_sums, (first.args[0], *channels))
        for i, call in enumerate(calls):
            sums = graph.call_function(operator.getitem, (all_sums, i))
            call.kwargs = {**call.kwargs, "sums": sums}


def _reroute_other_users(x: fx.Node, fused_call: fx.Node, total: fx.Node) -> None:
    """Let later users of x use the call's second output, so that its backward kernel adds their gradients."""
    others = [user for user in x.users if user is not fused_call and user.target is not F.batch_norm]
    if all(user > fused_call and not is_in_place(user) for user in others):
        total.meta = dict(x.meta)
        for user in others:
            user.replace_input_with(x, total)


def _replace_node(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _merge_batch_counters(graph: fx.Graph) -> None:
    """Increment the batch counters of all batch norms by one launch."""
    counts = [node for node in graph.nodes if is_batch_counter(node)]
    if counts:
        increments = Counter(node.args[0] for node in counts)  # one launch must not add to a counter twice
        with graph.inserting_before(counts[-1]):
            graph.call_function(torch._foreach_add_, (list(increments), list(increments.values())))
    for node in counts:
        graph.erase_node(node)


def _is_fusable_add(node: fx.Node) -> bool:
    """Whether a node adds two tensors of one shape and dtype, and overwrites neither for other users."""
    if node.op != "call_function" or node.target not in ADD_FUNCTIONS or node.kwargs or len(node.args) != 2:
        return False
    a, b = (get_example_tensor(term) for term in node.args)
    have_same_type = a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype
    return have_same_type and (node.target is not operator.iadd or _is_only_seen_by(node.args[0], node))


def _find_add_after(norm: fx.Node) -> fx.Node | None:
    """The sum after a batch norm that has a ReLU after it, if the batch norm can be delayed until there."""
    after = get_only_user(norm)
    if after is None or not _is_fusable_add(after) or _find_relu_after(after) is None:
        return None
    can_wait = can_delay_until(norm, after) and not _shares_statistics_until(norm, after)
    return after if after.args[0] is not after.args[1] and can_wait else None


def _shares_statistics_until(norm: fx.Node, after: fx.Node) -> bool:
    """Whether another batch norm in between updates the same running statistics, so that the order matters."""
    mean: Any = norm.args[1] if len(norm.args) > 1 else norm.kwargs.get("running_mean")
    return isinstance(mean, fx.Node) and any(norm < user < after for user in mean.users)


def _is_only_seen_by(node: Any, user: fx.Node) -> bool:
    """Whether a node has no other user, inside the graph or outside."""
    return node.op != "placeholder" and get_only_user(node) is user


def _other_operand(add_node: fx.Node | None, term: fx.Node) -> Any:
    """The other operand of a sum, None without a sum."""
    return None if add_node is None else add_node.args[1] if add_node.args[0] is term else add_node.args[0]


def _find_relu_after(node: fx.Node) -> fx.Node | None:
    after = get_only_user(node)
    return after if after is not None and _is_relu(after) else None


def _is_relu(node: fx.Node) -> bool:
    return node.target in (
        RELU_FUNCTIONS if node.op == "call_function" else RELU_METHODS if node.op == "call_method" else ()
    )
