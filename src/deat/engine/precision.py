"""The precision of training: fp32, bf16 or fp16, and which one "auto" is."""

from typing import Literal

import torch

from deat.errors import UsageError, unknown_name_error
from deat.utils.torch_utils import SMALL_MODEL_PARAMETERS

PRECISIONS = ("auto", "fp32", "bf16", "fp16")

Precision = Literal["fp32", "bf16", "fp16"]


def has_native_cpu_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def choose_precision(precision: str, device: torch.device, num_parameters: int) -> Precision:
    """Choose the precision to train in.

    Args:
        precision: One of `PRECISIONS`. "auto" is bf16 where the hardware is fast at it (on a CPU for large networks
            only), otherwise fp32.
        device: The device.
        num_parameters: The number of parameters of the network.

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
    return (
        "bf16"
        if device.type == "cpu" and num_parameters >= SMALL_MODEL_PARAMETERS and has_native_cpu_bf16()
        else "fp32"
    )
