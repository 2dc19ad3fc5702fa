"""Checks before training that a network can be trained on a source: its outputs, its weights and its gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import BatchSource, ImageSet, LazyImages
from deat.data.batch_source import stopping_workers
from deat.data.dataloader_source import LoaderSource
from deat.data.image_label_checks import describe_labels_out_of_range, describe_largest_label, noun_of_shape
from deat.errors import DataError, UsageError
from deat.models.interface_checks import check_dtype, check_input_unmodified, describe_output, logits_hint
from deat.models.logits_wrapper import take_logits
from deat.tasks import CLASSIFICATION, Task
from deat.utils.torch_contexts import device_of, eval_mode
from deat.utils.user_code import describe_error


def find_unused_parameters(model: nn.Module, source: BatchSource) -> list[str]:
    """Find the parameters that require a gradient but do not change the model's output.

    Args:
        model: The network.
        source: The training data.

    Returns:
        Their names.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with eval_mode(model):
        output = model(_make_two_images(model, source)).sum()
        grads = torch.autograd.grad(output, list(trained.values()), allow_unused=True)
    return [name for name, grad in zip(trained, grads, strict=True) if grad is None]


def check_trainable(
    model: nn.Module, source: BatchSource, num_processes: int, original_data: object, task: Task = CLASSIFICATION
) -> Any:
    """Check that a model can be trained on a source.

    Args:
        model: The network.
        source: The training data.
        num_processes: The number of processes that share each batch.
        original_data: The data before images were held out; messages name images by their index in it.
        task: What outputs and labels mean.

    Returns:
        What the model has returned for two images of noise: a tensor, or an object with `logits`.

    Raises:
        UsageError: The model has no trainable parameter, its weights are not finite, no gradient reaches them, or it
            does not return one logit per class, or what else the task reads.
        DataError: The data has a single class, or leaves a batch too small for batch norm.
    """
    _check_preconditions(model, source, task)
    output, failing_norms = _run_two_images(model, source, _has_single_image_batch(source, num_processes))
    shape, logits = label_shape(source), take_logits(output)
    if not isinstance(logits, Tensor) or not task.accepts_outputs(logits, 2, source.num_classes, shape):
        raise UsageError(
            f"the model's output for two images is {describe_output(logits)}; let it return "
            f"{task.describe_expected_outputs(2, source.num_classes, shape)}."
            f"{logits_hint(logits, lambda part: task.accepts_outputs(part, 2, source.num_classes, shape))}"
            f"{_classes_hint(logits, source, original_data, task)}"
        )
    _check_single_image_batches(failing_norms, source, num_processes)
    _check_gradient(logits)
    _check_finite_weights(model)
    return output


def label_shape(source: BatchSource) -> tuple[int, ...]:
    """Return the shape of one example's label: () for a class number."""
    if isinstance(source, LoaderSource):
        return source.label_shape
    images = getattr(source, "images", None)
    with stopping_workers(source):
        labels = images.labels if isinstance(images, ImageSet | LazyImages) else next(iter(source.epoch(0)))[1]
    return tuple(labels.shape[1:])


def _check_preconditions(model: nn.Module, source: BatchSource, task: Task) -> None:
    """Check what does not depend on the model's output."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient; there is nothing to train.")
    if not torch.is_grad_enabled():
        raise UsageError(
            "gradients are switched off here: call fit outside torch.no_grad() and torch.inference_mode()."
        )
    if task.reads_logits and source.num_classes < 2:
        raise DataError("the data has a single class; training needs at least two.")


def _check_single_image_batches(failing_norms: list[str], source: BatchSource, num_processes: int) -> None:
    """Raise if batch norms would fail on a batch of one image."""
    if failing_norms:
        batch = "a process with a batch" if num_processes > 1 else "a batch"
        raise DataError(
            f"{source.num_examples} images in batches of {source.batch_size} leave {batch} of one, on which {failing_norms[0]} "
            "cannot train here. Use another batch size, or one image less."
        )


def _has_single_image_batch(source: BatchSource, num_processes: int) -> bool:
    """Return whether some process gets a batch of one image or none."""
    lengths = {source.batch_size, source.num_examples % source.batch_size} - {0}
    return any(length // num_processes <= 1 for length in lengths)


def _run_two_images(model: nn.Module, source: BatchSource, check_single_image: bool) -> tuple[Any, list[str]]:
    """Return the model's output for two images, and the types of batch norm that would fail on a single image."""
    failing_norms: list[str] = []

    def check_values_per_channel(module: nn.Module, inputs: object, output: Tensor) -> None:
        """A batch norm with one value per image and channel has no variance in a batch of one."""
        if output.numel() == 2 * output.shape[1]:
            failing_norms.append(type(module).__name__)

    x = _make_two_images(model, source)
    model_input = x.clone()
    hooks = [
        norm.register_forward_hook(check_values_per_channel)
        for norm in _batch_norms_in_training(model)
        if check_single_image
    ]
    try:
        with eval_mode(model):
            output = model(model_input)
    except Exception as error:  # the user's code may raise anything
        check_dtype(model, x, error)
        noun = noun_of_shape(source.shape)
        raise UsageError(
            f"the model cannot read {noun} of shape {tuple(source.shape)}: {describe_error(error)}"
            f"{_channel_order_hint(source.shape)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    check_input_unmodified(model_input, x)
    return output, failing_norms


def _batch_norms_in_training(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms that use batch statistics while the model trains; frozen ones do not."""
    with eval_mode(model):
        model.train()  # a model may override train() to freeze layers; eval_mode restores the modes
        norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return [norm for norm in norms if norm.training]


def _check_gradient(logits: Tensor) -> None:
    """Raise if the output depends on no trainable parameter, as after detach()."""
    if not logits.requires_grad:
        raise UsageError(
            "no gradient reaches a parameter from the model's output, so nothing can be learnt. Remove detach(), .data, "
            "torch.no_grad() or NumPy from its forward, or set requires_grad on parameters that it uses."
        )


def _check_finite_weights(model: nn.Module) -> None:
    """Raise if weights are not finite; buffers may be infinite, as masks are, but not NaN."""
    bad = [name for name, p in model.named_parameters() if not bool(p.detach().isfinite().all())]
    bad += [name for name, b in model.named_buffers() if b.is_floating_point() and bool(b.isnan().any())]
    if bad:
        raise UsageError(
            f"the model's weights are not finite before any training, in {', '.join(bad[:3])}. Load or initialise them "
            "again."
        )


def _classes_hint(logits: object, source: BatchSource, original_data: object, task: Task) -> str:
    """Return a hint that names the classes, or else the labels that are too large and what to do about them."""
    classes = source.num_classes
    named = tuple(getattr(getattr(source, "images", None), "classes", ()))
    if named and named != tuple(map(str, range(classes))):
        return f" The classes are {', '.join(map(repr, named[:5]))}{', ...' if len(named) > 5 else ''}."
    if not isinstance(logits, Tensor) or logits.dim() != 2 or not task.reads_logits:
        return ""
    return describe_labels_out_of_range(original_data, logits.shape[1]) or describe_largest_label(
        source, logits.shape[1]
    )


def _make_two_images(model: nn.Module, source: BatchSource) -> Tensor:
    """Draw two images of noise without touching the global random state."""
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    noise = torch.rand(2, *source.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(device_of(model), dtype)


def _channel_order_hint(shape: Sequence[int]) -> str:
    """Return what to do about images whose channels seem to come last."""
    if shape[-1] not in (1, 3) or shape[0] in (1, 3):
        return ""
    return (
        "\nImages are N x C x H x W, and these look like N x H x W x C: give images.permute(0, 3, 1, 2), or a Dataset "
        "whose images are C x H x W."
    )


WEIGHT_LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def log10_lipschitz(net: nn.Module) -> float:
    """Compute log10 of the product of the Frobenius norms of all convolution and linear layers.

    Batch norm and shortcuts are left out, and a kernel's norm is not its convolution's, so only the trend of this
    number is meaningful.

    Args:
        net: The network.

    Returns:
        The logarithm, read from the device once; 0 for a network without such layers.
    """
    weights: list[Tensor] = [m.weight.detach() for m in net.modules() if isinstance(m, WEIGHT_LAYER_TYPES)]
    if not weights:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(w.float()) for w in weights]).double()
    return float(norms.clamp_min(1e-300).log().sum()) / math.log(10)
