"""The precision of training: fp32, bf16 or fp16, and which one "auto" is."""

from collections.abc import Callable
from typing import Literal

import torch

from deat.errors import UsageError, unknown_name_error

MIN_BF16_MULTIPLY_ADDS = 30_000_000
"""Multiply-adds of a batch from which bf16 is faster on a CPU with AVX512-BF16; below, its casts cost what it saves."""

PRECISIONS = ("auto", "fp32", "bf16", "fp16")

Precision = Literal["fp32", "bf16", "fp16"]


def has_native_cpu_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def choose_precision(precision: str, device: torch.device, count_batch_work: Callable[[], float]) -> Precision:
    """Choose the precision to train in.

    Args:
        precision: One of `PRECISIONS`. "auto" is bf16 where the hardware is fast at it (on a CPU only for networks with
            enough work), otherwise fp32.
        device: The device.
        count_batch_work: Counts the multiply-adds of a forward pass of a batch; called for "auto" on a CPU that is fast
            at bf16. Nothing is timed, so that the same run always has the same precision.

    Returns:
        The precision.

    Raises:
        UsageError: If the precision is unknown, or is fp16 on a CPU.
    """
    if precision not in PRECISIONS:
        raise unknown_name_error("precision", precision, PRECISIONS)
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'fp32'.")
    if precision != "auto":
        return precision  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    is_fast = device.type == "cpu" and has_native_cpu_bf16()
    return "bf16" if is_fast and count_batch_work() >= MIN_BF16_MULTIPLY_ADDS else "fp32"
