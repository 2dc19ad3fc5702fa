"""Checks of the model on a few images before any attack: properties that make every accuracy of it doubtful."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deat.data.image_label_checks import noun_of_shape
from deat.evaluation.attacks import compute_gradient
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.sanity.flag_advice import Flag, make_flag
from deat.tasks import CLASSIFICATION, Task
from deat.tasks.task import rows_of
from deat.utils.float32_precision import exact_float32
from deat.utils.torch_contexts import eval_mode

SMALL_BATCH_IMAGES = 7
"""About how many images each small batch has when the outputs in small batches are compared with those in one batch."""
MIN_IMAGES_FOR_CHANCE = 50
"""With fewer images an accuracy cannot be distinguished from chance."""


def check_before_attacks(
    model: nn.Module, x: Tensor, y: Tensor, num_classes: int, task: Task = CLASSIFICATION, batch_size: int = 0
) -> list[Flag]:
    """Check a model on a few images.

    Args:
        model: Maps images to logits.
        x: Images in [0, 1], from all over the data.
        y: Their labels.
        num_classes: The number of classes of the data.
        task: What outputs and labels mean.
        batch_size: The number of images that attacks query at once. The model is also queried in batches of this size.

    Returns:
        The flags raised, or only `not_finite` if the outputs are not finite.
    """
    with exact_float32(x.device), eval_mode(model):
        own_batch, noun = _query(model, x, y, task), noun_of_shape(x.shape[1:])
        logits = own_batch.outputs
        not_finite = _flag_not_finite(logits, noun)
        if not_finite:
            return [not_finite]
        random_outputs = [flag for flag in (_flag_training_mode(model), _flag_randomised(model, x, logits)) if flag]
        large_batch = None
        if batch_size > len(x):
            large_batch = _query(model, _fill_batch(x, batch_size), _fill_batch(y, batch_size), task)
        other_flags = (
            _flag_probabilities() if own_batch.are_probabilities else None,
            None
            if random_outputs
            else _flag_batch_dependent(model, x, logits, large_batch),  # random ones always differ
            _flag_at_chance(logits, y, num_classes, task, noun),
            _flag_zero_gradients(own_batch, large_batch, noun),
            _flag_autograd_inside(model, x),
        )
    return [*random_outputs, *filter(None, other_flags)]


class Query(NamedTuple):
    """A model's outputs for a batch, and the images for which the loss has no gradient, which one pass shows."""

    outputs: Tensor
    has_no_gradient: Tensor
    are_probabilities: bool


def _query(model: nn.Module, x: Tensor, y: Tensor, task: Task) -> Query:
    with torch.inference_mode(False), torch.enable_grad():
        inputs, labels = x.clone().requires_grad_(), y.clone()  # an inference tensor cannot be differentiated
        outputs = model(inputs)
        grad = compute_gradient(task.loss(outputs, labels).sum(), inputs)
    has_no_gradient = ~(grad.flatten(1).abs().amax(1) > 0)  # a NaN is no gradient
    return Query(outputs.detach(), has_no_gradient, task.are_probabilities(outputs))


def _flag_not_finite(logits: Tensor, noun: str) -> Flag | None:
    count = int((~rows_of(logits).isfinite()).any(1).sum())
    if not count:
        return None
    return make_flag("not_finite", f"the outputs for {count} of {len(logits)} {noun} are NaN or infinite")


def _flag_training_mode(model: nn.Module) -> Flag | None:
    layers = sorted({type(m).__name__ for m in model.modules() if m.training})
    if not layers:
        return None
    return make_flag("training_mode", f"{', '.join(layers)} stay in training mode after model.eval()")


def _flag_probabilities() -> Flag:
    return make_flag("probabilities", "the outputs are probabilities, those of a softmax or a sigmoid")


def _flag_randomised(model: nn.Module, x: Tensor, logits: Tensor) -> Flag | None:
    with torch.no_grad():
        runs = torch.stack([logits.double(), *(model(x).double() for _ in range(4))])
    spread = float((runs - runs[0]).abs().max() / _mean_magnitude(runs))
    if spread <= 1e-4:
        return None
    return make_flag(
        "randomised",
        f"the outputs of five runs on the same {noun_of_shape(x.shape[1:])} differ by {spread:.2g} of their size",
    )


def _flag_batch_dependent(model: nn.Module, x: Tensor, logits: Tensor, large_batch: Query | None) -> Flag | None:
    if len(x) < 4:
        return None
    with torch.no_grad():
        small_batches = x.tensor_split(max(2, -(-len(x) // SMALL_BATCH_IMAGES)))
        answers = {f"about {SMALL_BATCH_IMAGES}": torch.cat([model(batch) for batch in small_batches])}
    if large_batch is not None:
        answers[f"{len(large_batch.outputs):,}"] = large_batch.outputs[: len(x)]
    for size, outputs in answers.items():
        count = count_different_outputs(outputs, logits)
        if count > max_odd_images(len(x)):
            largest = float(_output_differences(outputs, logits).max())
            return make_flag(
                "batch_dependent",
                f"the outputs for {count} of {len(x)} {noun_of_shape(x.shape[1:])} differ in batches of {size}, "
                f"by up to {largest:.2g} of their size",
            )
    return None


def _fill_batch(values: Tensor, batch_size: int) -> Tensor:
    """Repeat examples until there are as many as in a batch of the attacks."""
    repeats = -(-batch_size // len(values))
    return values.repeat(repeats, *[1] * (values.dim() - 1))[:batch_size]


def _output_differences(outputs: Tensor, others: Tensor) -> Tensor:
    """The largest difference of each image's outputs, (B,), as a share of the usual size of outputs."""
    return rows_of((outputs - others).double()).abs().amax(1) / _mean_magnitude(others.double())


def count_different_outputs(outputs: Tensor, others: Tensor) -> int:
    """Count the images whose outputs differ by more than rounding explains; NaN differs."""
    return int((~(_output_differences(outputs, others) <= 0.01)).sum())


def max_odd_images(num_images: int) -> float:
    """How many images' outputs may differ: rounding may push a few over a step inside the model."""
    return max(2, 0.05 * num_images)


def _flag_at_chance(logits: Tensor, y: Tensor, num_classes: int, task: Task, noun: str) -> Flag | None:
    if len(y) < MIN_IMAGES_FOR_CHANCE or num_classes < 2 or not task.class_labels(y):
        return _flag_at_constant_answer(logits, y, task) if not task.class_labels(y) else None
    classes_shown, n = len(set(y.tolist())), len(y)
    if 2 * classes_shown <= min(num_classes, n):  # the data is sorted by class
        return None
    hits, chance = int(task.is_right(logits, y).sum()), 1 / num_classes
    if wilson_interval(hits, n)[0] > chance:
        return None
    return make_flag(
        "at_chance", f"without attack {hits} of {n} {noun} are classified correctly; chance is {chance:.1%}"
    )


def _flag_at_constant_answer(outputs: Tensor, y: Tensor, task: Task) -> Flag | None:
    """Compare the first metric of a task without classes with that of the best constant answer."""
    chance, name = task.chance(y.cpu()), task.metric_names[0]
    if chance is None or len(y) < MIN_IMAGES_FOR_CHANCE:
        return None
    value = task.summarize(task.statistics(outputs, y).cpu())[name]
    if value > chance:
        return None
    return make_flag(
        "at_chance", f"without attack {name} is {value:.3g} on {len(y)} examples; a constant answer has {chance:.3g}"
    )


def _flag_zero_gradients(own_batch: Query, large_batch: Query | None, noun: str) -> Flag | None:
    n, count = len(own_batch.outputs), int(own_batch.has_no_gradient.sum())
    if count > max_odd_images(n):
        return make_flag("zero_gradients", f"the gradient of the loss is zero or NaN for {count} of {n} {noun}")
    if large_batch is None:
        return None
    n, count = len(large_batch.outputs), int(large_batch.has_no_gradient.sum())
    if count <= max_odd_images(n):
        return None
    return make_flag(
        "zero_gradients", f"in batches of {n:,} the gradient of the loss is zero or NaN for {count:,} {noun}"
    )


def _flag_autograd_inside(model: nn.Module, x: Tensor) -> Flag | None:
    with _record_autograd_calls() as calls, torch.no_grad():
        model(x[:4])
    return make_flag("autograd_inside", "the model computes gradients while it classifies") if calls else None


def _mean_magnitude(logits: Tensor) -> Tensor:
    return logits.abs().mean().clamp_min(1e-12)


@contextmanager
def _record_autograd_calls() -> Iterator[list[str]]:
    """Note every run of autograd's engine, whichever of torch's functions starts it."""
    calls: list[str] = []
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def record_and_run(*args: Any, **kwargs: Any) -> Any:
        """Note the call, and make it."""
        calls.append("backward")
        return run_backward(*args, **kwargs)

    try:
        autograd._engine_run_backward = record_and_run
        yield calls
    finally:
        autograd._engine_run_backward = run_backward
