"""Hugging Face Accelerate: loops of your own in mixed precision and several processes."""

from typing import Any

import torch
from torch import nn

from deat.errors import UsageError
from deat.training.adversarial_step import AdversarialStep, LoopEngine, precision_of

try:
    from accelerate import Accelerator
except ImportError:
    raise UsageError("accelerate is not installed: pip install 'deat[accelerate]'") from None


def make_accelerate_engine(accelerator: Accelerator) -> LoopEngine:
    """Return an engine that computes as an Accelerator does.

    Args:
        accelerator: The accelerator.

    Raises:
        UsageError: It accumulates gradients over batches.
    """
    if accelerator.gradient_accumulation_steps > 1:
        raise UsageError(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, and an update of the weights is a "
            "move of the method: use larger batches, or a smaller learning rate, with gradient_accumulation_steps=1."
        )
    return LoopEngine(
        accelerator.device,
        precision_of(str(accelerator.mixed_precision)),
        autocast_with=accelerator.autocast,
        backward_with=accelerator.backward,
        scaler_in_use=accelerator.scaler,
    )


def make_accelerate_step(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> AdversarialStep:
    """Make an `AdversarialStep` for a loop with Accelerate: its precision, its devices, its processes.

    Its state is saved and restored by `accelerator.save_state` after `accelerator.register_for_checkpointing(step)`.

    Args:
        accelerator: The accelerator.
        model: What `accelerator.prepare` returned.
        optimizer: What it returned, too.
        **options: The other arguments of `AdversarialStep`.

    Returns:
        The step.

    Raises:
        UsageError: The accelerator accumulates gradients over batches.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> step = make_accelerate_step(accelerator, model, optimizer, method="m+deat", threat="linf:8/255", epochs=30)
        >>> result = step(x, y)
    """
    return AdversarialStep(model, optimizer, engine=make_accelerate_engine(accelerator), **options)
