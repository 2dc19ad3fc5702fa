"""Compute float32 without TF32 and without autocast, whatever the user has set."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deat.utils.torch_contexts import device_context


@contextmanager
def full_precision(tf32: bool = False) -> Iterator[None]:
    """Compute float32 products without TF32 inside the context, and restore the user's setting after it.

    Works whether the user has set the precision by torch's older interface or its newer one, which cannot be mixed.

    Args:
        tf32: Allow TF32 instead.
    """
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the newer interface was used
        settings = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
        with _set_fp32_precision(settings, "tf32" if tf32 else "ieee"):
            yield
        return
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        backends.cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = conv


@contextmanager
def _set_fp32_precision(backends: tuple[Any, ...], precision: str) -> Iterator[None]:
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = precision
        yield
    finally:
        for backend, original in zip(backends, before, strict=True):
            backend.fp32_precision = original


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """Compute in float32 without TF32 and without the caller's autocast, as all final classifications do.

    Args:
        device: The model's device, which becomes the current one inside the context.
    """
    with device_context(device), full_precision(), torch.autocast(device.type, enabled=False):
        yield
