"""Functions that torch is slow at in bf16 on a CPU, computed in another way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
GROUPS_POSITION = 6
"""The position of `groups` among the arguments of a convolution."""
MAX_SHORT_SEQUENCE = 256
"""Tokens up to which a whole matrix of attention weights is computed; its memory grows with their square."""


class FastBf16Functions(TorchFunctionMode):
    """Inside, attention over few tokens is two products of matrices, and depthwise convolutions are float32.

    torch's fused attention and its depthwise convolutions have backward passes for bf16 on a CPU that take several
    times as long as these. The results are the same up to rounding, and the convolutions' more exact.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and _is_depthwise(args, kwargs):
            x, *others = args
            with torch.autocast("cpu", enabled=False):
                return func(x.float(), *others, **kwargs).bfloat16()
        is_short = (func is F.scaled_dot_product_attention and args[0].shape[-2] <= MAX_SHORT_SEQUENCE) or (
            func is F.multi_head_attention_forward and args[0].shape[0] <= MAX_SHORT_SEQUENCE
        )
        if is_short:
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def may_have_slow_bf16_functions(net: nn.Module) -> bool:
    """Whether a network has depthwise convolutions, or seems to be a transformer; other networks are left alone."""
    return any(
        isinstance(m, nn.LayerNorm | nn.MultiheadAttention) or (isinstance(m, _ConvNd) and m.groups > 1)
        for m in net.modules()
    )


def _is_depthwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    groups = args[GROUPS_POSITION] if len(args) > GROUPS_POSITION else kwargs.get("groups", 1)
    return bool(groups > 1 and len(args) > 1 and args[1].shape[1] == 1 and args[1].dtype == torch.float32)
