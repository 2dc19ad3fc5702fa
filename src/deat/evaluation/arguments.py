"""What can be asked of an evaluation: everything else is refused, before any work."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deat.data import Source
from deat.data.checks import describe_labels_out_of_range, describe_largest_label
from deat.errors import CheckpointError, UsageError, check_is_instance
from deat.evaluation.attacks import is_natural
from deat.evaluation.fast_model import exact_float32
from deat.evaluation.judge import AttackLike
from deat.evaluation.results import read_evaluation_json
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.files import check_no_symlinks
from deat.utils.numbers import convert_number_fields, is_int_at_least
from deat.utils.torch_utils import eval_mode


@dataclass(frozen=True)
class EvaluationRequest:
    """Who is judged against what, by which attacks and how; about holds what the answer shall say of model and data."""

    model: nn.Module
    threat: ThreatModel
    attacks: list[AttackLike]
    block: int
    seed: int = 0
    cascade: bool = False
    n: int | None = None
    sanity: bool = True
    precision: str = "auto"
    engine: str = "graph"
    resume_log: str | Path | None = None
    about: dict[str, Any] = field(default_factory=dict)
    distributed: Distributed = SINGLE_PROCESS

    def __post_init__(self) -> None:
        convert_number_fields(self)  # evaluation.json and the ledger say block and seed

    def count_images(self, source: Source) -> int:
        """How many of a source's images are judged."""
        return source.num_examples if self.n is None else min(self.n, source.num_examples)


def count_outputs(model: nn.Module, x: Tensor, source: Source) -> int:
    """The number of the model's logits, which may be more than the classes that the data shows, but not fewer."""
    given = x[:1].clone()
    logits: Any = call_model(model, given)
    check_input_unmodified(given, x[:1])
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 1 or not logits.is_floating_point():
        raise UsageError(
            f"the model answers one image with {describe_output(logits)}; let it return logits of shape (images, classes)."
            f"{logits_hint(logits, (1, source.num_classes))}"
        )
    outputs = int(logits.shape[1])
    if outputs < source.num_classes:
        hint = describe_labels_out_of_range(getattr(source, "images", None), outputs) or describe_largest_label(
            source, outputs
        )
        raise UsageError(f"the model tells {outputs} classes apart, but the data has {source.num_classes}.{hint}")
    return outputs


def check_input_unmodified(images_after: Tensor, images_before: Tensor) -> None:
    """Refuse a model that changed the images it saw: whoever asks it again would ask about others."""
    if not torch.equal(images_after, images_before):
        raise UsageError("the model changes the images it is given: write x = x - mean, say, in place of x -= mean.")


def describe_output(output: object) -> str:
    """What a model answers with."""
    if isinstance(output, Tensor):
        return f"shape {tuple(output.shape)}, {output.dtype}"
    return f"a {type(output).__name__}"


def call_model(model: nn.Module, x: Tensor) -> Any:
    """What the model answers, or that it cannot take float32 images since its weights are of another type."""
    try:
        with exact_float32(x.device), torch.no_grad(), eval_mode(model):
            return model(x)
    except RuntimeError as error:
        check_dtype(model, x, error)
        raise


def check_dtype(model: nn.Module, x: Tensor, error: Exception) -> None:
    """Refuse a model that failed since none of its weights are of the images' type."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if isinstance(error, RuntimeError) and dtypes and x.dtype not in dtypes:
        named = " and ".join(sorted(map(str, dtypes)))
        raise UsageError(f"the model's weights are {named}, and images {x.dtype}: give it as model.float().") from error


def logits_hint(output: object, shape: tuple[int, int]) -> str:
    """Where an answer of several parts holds logits of that shape, and how a model returns them alone."""
    held = _output_parts(output).items()
    place = next((place for place, part in held if isinstance(part, Tensor) and part.shape == shape), None)
    if place is None:
        return ""
    return f" Its {place} has that shape: wrap the model in a Module whose forward returns self.net(x){place}."


def _output_parts(output: object) -> dict[str, object]:
    """What an answer holds, by how that is reached."""
    if isinstance(output, Mapping):
        return {f"[{name!r}]": part for name, part in output.items()}
    if isinstance(output, tuple | list):
        return {f"[{number}]": part for number, part in enumerate(output)}
    return {f".{name}": part for name, part in getattr(output, "__dict__", {}).items()}


def check_model(model: Any) -> None:
    """Refuse what is no network (a function has no weights to tell it from another, no modes) or has no gradients."""
    check_is_instance(model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; wrap it in a torch.nn.Module that returns logits.")
    if any(is_lazy(held) or held.is_meta for held in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model has layers without weights yet (lazy, or on the device 'meta'): give them some first."
        )
    if any(held.is_inference() for held in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model was made in torch.inference_mode(), so that nothing can be differentiated through it: make it "
            "outside, or under torch.no_grad()."
        )


def check_about(about: Any) -> dict[str, Any]:
    """What evaluation.json shall say of model and data, refused before any work where it cannot."""
    try:
        return dict(json.loads(json.dumps(dict(about or {}), allow_nan=False)))
    except (TypeError, ValueError):
        raise UsageError(f"about must be a dict of values that JSON has, not {about!r}.") from None


def check_output_files(resume_log: Any, save: Any) -> None:
    """Refuse files that cannot be written or must not be replaced, not after hours."""
    check_no_symlinks(Path(file) for file in (resume_log, save) if isinstance(file, str | Path))
    if isinstance(save, str | Path):
        path = Path(save).absolute()
        nearest = next(folder for folder in path.parents if folder.exists())
        if path.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise CheckpointError(f"save {str(save)!r} cannot be written; name a file in a folder of yours.")
        if path.exists() and read_evaluation_json(path) is None:
            raise UsageError(f"{str(save)!r} exists and is no evaluation, so it is not replaced. Choose another file.")


def check_evaluation_arguments(
    attacks: list[AttackLike], n: int | None, block: int, seed: int = 0, threads: int | None = None
) -> None:
    """Refuse attacks and numbers that cannot be evaluated, before any data is read."""
    names = [a.name for a in attacks]
    if not names:
        raise UsageError("no attack was named; use at least one, such as natural, pgd-20 or aa.")
    if "worst" in names:
        raise UsageError("an attack cannot be named 'worst', which is what they leave together.")
    if any(a.name == "natural" and not is_natural(a) for a in attacks):
        raise UsageError("an attack cannot be named 'natural', which is what images are without any.")
    if len(set(names)) < len(names):
        raise UsageError(f"an attack is named twice in {names}; each may stand once.")
    if n is not None and not is_int_at_least(n, 1):
        raise UsageError(f"n must be a number of images >= 1, not {n!r}.")
    if not is_int_at_least(block, 1):
        raise UsageError(f"block must be a number of images >= 1, not {block!r}.")
    if not is_int_at_least(seed, 0):
        raise UsageError(f"seed must be a whole number >= 0, not {seed!r}.")
    if threads is not None and not is_int_at_least(threads, 1):
        raise UsageError(f"threads must be a whole number >= 1, not {threads!r}.")
