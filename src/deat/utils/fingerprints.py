"""Hashes of tensors and settings, and what identifies a model: its layers, weights, code and a few logits."""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.utils.float32_precision import exact_float32
from deat.utils.torch_contexts import eval_mode

FINGERPRINT_IMAGES = 8
"""The first images, on which a model's logits identify it."""
MAX_FINGERPRINT_LOGITS = 64
"""How many of these logits are saved at most."""
LOGITS_TOLERANCE = 1e-3
"""How far logits may be from saved ones, as a share of the largest; the rounding of float32 moves them by far less."""


def fingerprint(*parts: Any) -> str:
    """Return a hash of tensors and JSON values.

    Example:
        >>> fingerprint({"seed": 0}, torch.zeros(2)) == fingerprint({"seed": 1}, torch.zeros(2))
        False
    """
    digest = sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()


def fingerprint_model(model: nn.Module) -> str:
    """Return a hash of a model's layers, weights and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layers = re.sub(r"0x[0-9a-f]+", "", repr(model))  # without addresses in memory
    return fingerprint(layers, sorted(tensors), *(tensors[name] for name in sorted(tensors)))


def fingerprint_code(model: nn.Module) -> str:
    """Return a hash of the Python files that define a model's layers and the functions that they hold."""
    parts = [part for m in model.modules() for part in (type(m), *filter(callable, vars(m).values()))]
    files = {getattr(sys.modules.get(getattr(part, "__module__", None) or ""), "__file__", None) for part in parts}
    return fingerprint(sorted(sha256(source).hexdigest() for source in map(_read_source, files) if source))


def _read_source(file: str | None) -> bytes:
    try:
        return Path(file).read_bytes() if file and file.endswith(".py") else b""
    except OSError:
        return b""


def fingerprint_logits(model: nn.Module, x: Tensor) -> list[float]:
    """Return some of a model's logits on the first images, by which the model is identified.

    Args:
        model: The model, which may draw random numbers.
        x: The evaluation's images; only the first few are used, so that their number does not matter.

    Returns:
        At most `MAX_FINGERPRINT_LOGITS` numbers of six digits.
    """
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), exact_float32(x.device), torch.no_grad(), eval_mode(model):
        torch.manual_seed(0)  # so that a randomised model gives the same logits again
        flat = model(x[:FINGERPRINT_IMAGES]).flatten().double()
    logits: list[float] = flat[:: -(-len(flat) // MAX_FINGERPRINT_LOGITS)].tolist()
    return [float(f"{value:.6g}") for value in logits]


def are_close(saved: Any, logits: list[float]) -> bool:
    """Return whether saved logits equal a model's, up to rounding.

    Args:
        saved: What a line of the log holds.
        logits: What `fingerprint_logits` returns now.
    """
    try:
        before, now = torch.tensor(saved, dtype=torch.float64), torch.tensor(logits, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    largest = float(now.nan_to_num(0, 0, 0).abs().max()) if len(now) else 0.0
    tolerance = LOGITS_TOLERANCE * largest
    return before.shape == now.shape and torch.allclose(before, now, rtol=0, atol=tolerance, equal_nan=True)
