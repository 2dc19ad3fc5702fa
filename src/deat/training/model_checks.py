"""Whether a network can be trained on a source: its answers, its weights and its gradients, before any training."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data import Source
from deat.data.checks import describe_labels_out_of_range, describe_largest_label
from deat.data.statistics import ChannelStats
from deat.errors import DataError, UsageError
from deat.evaluation.resume_log import fingerprint
from deat.models import Normalize, get_input_std, load_weights
from deat.models.import_export import read_normalization
from deat.models.interface_checks import check_dtype, check_input_unmodified, describe_output, logits_hint
from deat.models.weights import find_weights_file
from deat.utils.tensor_files import check_finite_tensors, read_tensors
from deat.utils.torch_utils import device_of, eval_mode
from deat.utils.user_code import describe_error


def find_unused_parameters(model: nn.Module, source: Source) -> list[str]:
    """The parameters that want a gradient and that the model's answer does not depend on."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with eval_mode(model):
        found = torch.autograd.grad(
            model(_make_two_images(model, source)).sum(), list(learning.values()), allow_unused=True
        )
    return [name for name, grad in zip(learning, found, strict=True) if grad is None]


def check_trainable(model: nn.Module, source: Source, num_processes: int, original_data: object) -> Tensor:
    """Refuse a model that has nothing to train or does not give one logit per class; its answer to two images.

    given is the data that the source is made of, before images were held out, by whose numbers they are named.
    """
    _check_preconditions(model, source)
    logits, lone = _run_two_images(model, source, _has_single_image_batch(source, num_processes))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < source.num_classes:
        raise UsageError(
            f"the model answers two images with {describe_output(logits)}; let it return logits of shape "
            f"(2, {source.num_classes}), one for each class.{logits_hint(logits, (2, source.num_classes))}"
            f"{_classes_hint(logits, source, original_data)}"
        )
    _check_single_image_batches(lone, source, num_processes)
    _check_gradient(logits)
    _check_finite_weights(model)
    return logits.detach()


def _check_preconditions(model: nn.Module, source: Source) -> None:
    """Refuse what cannot be trained whatever the model answers."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient; there is nothing to train.")
    if not torch.is_grad_enabled():
        raise UsageError(
            "gradients are switched off here: call fit outside torch.no_grad() and torch.inference_mode()."
        )
    if source.num_classes < 2:
        raise DataError("the data has a single class; there is nothing to tell apart.")


def _check_single_image_batches(failing_norms: list[str], source: Source, num_processes: int) -> None:
    """Refuse a batch of one image for batch norms that an image alone is too few for."""
    if failing_norms:
        whose = "a process with a batch" if num_processes > 1 else "a batch"
        raise DataError(
            f"{source.num_examples} images in batches of {source.batch_size} leave {whose} of one, on which {failing_norms[0]} "
            "cannot train here. Use another batch size, or one image less."
        )


def _has_single_image_batch(source: Source, num_processes: int) -> bool:
    """Whether a process has a batch of one image."""
    lengths = {source.batch_size, source.num_examples % source.batch_size} - {0}
    return any(length // num_processes <= 1 for length in lengths)


def _run_two_images(model: nn.Module, source: Source, check_single_image: bool) -> tuple[Any, list[str]]:
    """What the model answers to two images, and the kinds of batch norm in it that an image alone is too few for."""
    lone: list[str] = []

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        """Note a batch norm that has one value of each image and channel, and so of one image no deviation."""
        if output.numel() == 2 * output.shape[1]:
            lone.append(type(module).__name__)

    x = _make_two_images(model, source)
    seen = x.clone()
    hooks = [norm.register_forward_hook(look) for norm in _batch_norms_in_training(model) if check_single_image]
    try:
        with eval_mode(model):
            answer = model(seen)
    except Exception as error:  # whatever the user's own code may raise
        check_dtype(model, x, error)
        raise UsageError(
            f"the model cannot read images of shape {tuple(source.shape)}: {describe_error(error)}"
            f"{_channel_order_hint(source.shape)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    check_input_unmodified(seen, x)
    return answer, lone


def _batch_norms_in_training(model: nn.Module) -> list[nn.Module]:
    """The batch norms that take statistics of a batch while the model trains, which one that is frozen does not."""
    with eval_mode(model):
        model.train()  # which a model may override; modes are put back
        norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return [norm for norm in norms if norm.training]


def _check_gradient(logits: Tensor) -> None:
    """Refuse an answer that does not depend on any parameter that learns, as one that was detached."""
    if not logits.requires_grad:
        raise UsageError(
            "no gradient leads from the model's answer to a parameter that requires one, so nothing can be learnt. "
            "Take detach(), .data, torch.no_grad() or NumPy out of its forward, or let parameters learn that it uses."
        )


def _check_finite_weights(model: nn.Module) -> None:
    """Refuse weights that are broken already; a buffer may hold an infinity, as masks do."""
    bad = [name for name, held in model.named_parameters() if not bool(held.detach().isfinite().all())]
    bad += [name for name, held in model.named_buffers() if held.is_floating_point() and bool(held.isnan().any())]
    if bad:
        raise UsageError(
            f"the model's weights are not finite before any training, in {', '.join(bad[:3])}. Load or initialise them "
            "again, and look at what made them."
        )


def _classes_hint(logits: object, source: Source, original_data: object) -> str:
    """The classes where they have names, else which labels are too large and what to do about them."""
    classes = source.num_classes
    named = tuple(getattr(getattr(source, "images", None), "classes", ()))
    if named and named != tuple(map(str, range(classes))):
        return f" The classes are {', '.join(map(repr, named[:5]))}{', ...' if len(named) > 5 else ''}."
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        return ""
    return describe_labels_out_of_range(original_data, logits.shape[1]) or describe_largest_label(
        source, logits.shape[1]
    )


def _make_two_images(model: nn.Module, source: Source) -> Tensor:
    """Noise, of which a network makes something, drawn from a stream of its own."""
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    noise = torch.rand(2, *source.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(device_of(model), dtype)


def _channel_order_hint(shape: Sequence[int]) -> str:
    """What to do about images whose channels seem to come last."""
    if shape[-1] not in (1, 3) or shape[0] in (1, 3):
        return ""
    return (
        "\nImages are N x C x H x W, and these look like N x H x W x C: give images.permute(0, 3, 1, 2), or a Dataset "
        "whose images are C x H x W."
    )


def read_channel_stats(weights: str | Path) -> ChannelStats | None:
    """The statistics that a file or a folder of weights says its network was trained behind."""
    carried = read_normalization(find_weights_file(Path(weights)))
    if not carried:
        return None
    front = Normalize(**carried)  # which refuses what is none
    return ChannelStats(tuple(front.mean.flatten().tolist()), tuple(front.std.flatten().tolist()))


def hash_weights(weights: str | Path) -> str:
    """A hash of the tensors in a file or a folder of weights, by which they are known again."""
    found = read_tensors(find_weights_file(Path(weights)))
    return fingerprint(sorted(found), *(found[name] for name in sorted(found)))


def load_initial_weights(model: nn.Module, weights: str) -> None:
    """Put weights into a network, and say where they do not quite belong."""
    file = find_weights_file(Path(weights))
    check_finite_tensors(read_tensors(file), file)
    fresh = load_weights(model, weights, fresh_head=True)
    if get_input_std(model) is None and read_normalization(file):
        warnings.warn(
            f"{weights} was trained behind a normalisation, and this network stands behind none; if that is not meant, "
            "--normalize data puts it there.",
            stacklevel=3,
        )
    if fresh:
        warnings.warn(f"{', '.join(fresh)} start anew: the weights are for another number of classes.", stacklevel=3)
