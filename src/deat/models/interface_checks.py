"""What a model must do to be trained or evaluated: be a `torch.nn.Module` with weights that maps float images to logits."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deat.errors import UsageError, check_is_instance


def check_model(model: Any) -> None:
    """Check that a model is a module whose weights exist and can be differentiated through.

    Args:
        model: What the user passed as the model.

    Raises:
        UsageError: The model is no `torch.nn.Module`, a class instead of an object, has lazy or meta parameters, or was
            made in `torch.inference_mode()`.
    """
    check_is_instance(model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; wrap it in a torch.nn.Module that returns logits.")
    tensors = (*model.parameters(), *model.buffers())
    if any(is_lazy(tensor) or tensor.is_meta for tensor in tensors):
        raise UsageError("the model has layers without weights yet (lazy, or on the device 'meta'): initialise them.")
    if any(tensor.is_inference() for tensor in tensors):
        raise UsageError(
            "the model was made in torch.inference_mode(), which gradients cannot pass: make it outside, or under "
            "torch.no_grad()."
        )


def check_input_unmodified(images_after: Tensor, images_before: Tensor) -> None:
    """Check that a forward pass left its input as it was.

    Args:
        images_after: The tensor that the model was called with, after the call.
        images_before: A copy of it from before the call.

    Raises:
        UsageError: They differ.
    """
    if not torch.equal(images_after, images_before):
        raise UsageError(
            "the model changes the images it is given: write x = x - mean instead of x -= mean, for example."
        )


def check_dtype(model: nn.Module, x: Tensor, error: Exception) -> None:
    """Explain a failed forward pass if the model has no weights of the images' dtype.

    Args:
        model: The model that failed.
        x: The images that it was called with.
        error: What the call raised.

    Raises:
        UsageError: The call failed with a `RuntimeError`, and all floating-point weights have another dtype.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if isinstance(error, RuntimeError) and dtypes and x.dtype not in dtypes:
        weight_dtypes = " and ".join(sorted(map(str, dtypes)))
        raise UsageError(
            f"the model's weights are {weight_dtypes}, and images {x.dtype}: give it as model.float()."
        ) from error


def describe_output(output: object) -> str:
    """Describe what a model returned, by shape and dtype or by type, for an error message.

    Example:
        >>> describe_output(torch.zeros(1, 10))
        'shape (1, 10), torch.float32'
    """
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)}, {output.dtype}"
    return f"a {type(output).__name__}"


def logits_hint(output: object, accepts: Callable[[Tensor], bool]) -> str:
    """Suggest how to return the logits alone where one part of a model's output has their shape.

    Args:
        output: What the model returned, such as a tuple, a dict or a dataclass.
        accepts: Whether a tensor has the shape of logits for the images that it was called with.

    Returns:
        A sentence for an error message that begins with a space, or an empty text where no part has that shape.
    """
    parts = _output_parts(output).items()
    place = next((place for place, part in parts if isinstance(part, Tensor) and accepts(part)), None)
    if place is None:
        return ""
    return f" Its {place} has that shape: wrap the model in a Module whose forward returns self.net(x){place}."


def _output_parts(output: object) -> dict[str, object]:
    """The parts of a model's output, by the expression that selects each."""
    if isinstance(output, Mapping):
        return {f"[{name!r}]": part for name, part in output.items()}
    if isinstance(output, tuple | list):
        return {f"[{index}]": part for index, part in enumerate(output)}
    return {f".{name}": part for name, part in getattr(output, "__dict__", {}).items()}
