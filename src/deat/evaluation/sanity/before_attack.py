"""What a model shows of itself before any attack: things that make every number about it doubtful."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deat.core.losses import cross_entropy
from deat.evaluation.attacks import compute_gradient
from deat.evaluation.fast_model import exact_float32
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.sanity.flags import Flag, make_flag
from deat.utils.torch_utils import eval_mode

SMALL_BATCH_IMAGES = 7
"""About how many images a part holds when the slice is asked again in parts."""
MIN_IMAGES_FOR_CHANCE = 50
"""Images from which an accuracy can be told from chance."""


def check_before_attacks(model: nn.Module, x: Tensor, y: Tensor, num_classes: int) -> list[Flag]:
    """Flags about the model itself, from a few images."""
    with exact_float32(x.device), eval_mode(model):
        with torch.no_grad():
            logits = model(x)
        broken = _flag_not_finite(logits)
        if broken:
            return [broken]  # nothing else can be said of such a model
        unsteady = [flag for flag in (_flag_training_mode(model), _flag_randomised(model, x)) if flag]
        found = (
            _flag_probabilities(logits),
            None if unsteady else _flag_batch_dependent(model, x, logits),  # else answers differ anyway
            _flag_at_chance(logits, y, num_classes),
            _flag_zero_gradients(model, x, y),
            _flag_autograd_inside(model, x),
        )
    return [*unsteady, *filter(None, found)]


def _flag_not_finite(logits: Tensor) -> Flag | None:
    bad = int((~logits.isfinite()).flatten(1).any(1).sum())
    if not bad:
        return None
    return make_flag("not_finite", f"the outputs for {bad} of {len(logits)} images are NaN or infinite")


def _flag_training_mode(model: nn.Module) -> Flag | None:
    stuck = sorted({type(m).__name__ for m in model.modules() if m.training})
    if not stuck:
        return None
    return make_flag("training_mode", f"{', '.join(stuck)} stay in training mode after model.eval()")


def _flag_probabilities(logits: Tensor) -> Flag | None:
    if not are_probabilities(logits):
        return None
    return make_flag("probabilities", "the outputs are probabilities: none is negative and each row sums to one")


def are_probabilities(logits: Tensor) -> bool:
    """Whether no output is negative and every row sums to one, as behind a softmax."""
    out = logits.double()
    return bool((out >= 0).all()) and bool(((out.sum(1) - 1).abs() < 1e-4).all())


def _flag_randomised(model: nn.Module, x: Tensor) -> Flag | None:
    with torch.no_grad():
        runs = torch.stack([model(x).double() for _ in range(5)])
    spread = float((runs - runs[0]).abs().max() / _mean_magnitude(runs))
    if spread <= 1e-4:
        return None
    return make_flag("randomised", f"five runs on the same images differ by {spread:.2g} of their size")


def _flag_batch_dependent(model: nn.Module, x: Tensor, logits: Tensor) -> Flag | None:
    if len(x) < 4:
        return None
    with torch.no_grad():
        apart = torch.cat([model(part) for part in x.tensor_split(max(2, -(-len(x) // SMALL_BATCH_IMAGES)))])
    distance = (apart - logits).double().abs().amax(1) / _mean_magnitude(logits.double())
    # Rounding moves float32 logits by far less than a hundredth, but may tip a few over a step of the model's own.
    moved = int((distance > 0.01).sum())
    if moved <= max(2, 0.05 * len(x)):
        return None
    seen = f"{moved} of {len(x)} images get other outputs in batches of about {SMALL_BATCH_IMAGES}, by up to"
    return make_flag("batch_dependent", f"{seen} {float(distance.max()):.2g} of their size")


def _flag_at_chance(logits: Tensor, y: Tensor, num_classes: int) -> Flag | None:
    shown, n = len(set(y.tolist())), len(y)
    if n < MIN_IMAGES_FOR_CHANCE or num_classes < 2 or 2 * shown <= min(num_classes, n):  # too few, or sorted
        return None
    hits, chance = int((logits.argmax(1) == y).sum()), 1 / num_classes
    if wilson_interval(hits, n)[0] > chance:
        return None
    return make_flag("at_chance", f"without any attack {hits} of {n} images are right, where chance gives {chance:.1%}")


def _flag_zero_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    with torch.inference_mode(False), torch.enable_grad():
        inputs, labels = x.clone().requires_grad_(), y.clone()  # an inference tensor cannot be differentiated
        grad = compute_gradient(cross_entropy(model(inputs), labels).sum(), inputs)
    dead = int((~(grad.flatten(1).abs().amax(1) > 0)).sum())  # a NaN is above nothing
    if dead <= max(2, 0.05 * len(x)):
        return None
    return make_flag("zero_gradients", f"the loss has no gradient, or NaN for one, by {dead} of {len(x)} images")


def _flag_autograd_inside(model: nn.Module, x: Tensor) -> Flag | None:
    with _record_autograd_calls() as calls, torch.no_grad():
        model(x[:4])
    return make_flag("autograd_inside", "the model calls autograd while it classifies") if calls else None


def _mean_magnitude(logits: Tensor) -> Tensor:
    return logits.abs().mean().clamp_min(1e-12)


@contextmanager
def _record_autograd_calls() -> Iterator[list[str]]:
    """What is noted each time that autograd's engine runs, whichever of its functions a model holds, and since when."""
    calls: list[str] = []
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def spied(*args: Any, **kwargs: Any) -> Any:
        """Note it, and run."""
        calls.append("backward")
        return engine(*args, **kwargs)

    try:
        autograd._engine_run_backward = spied
        yield calls
    finally:
        autograd._engine_run_backward = engine
