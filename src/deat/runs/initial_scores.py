"""The scores of given weights before they are trained further, and the likely cause where they are at chance."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deat.data import BatchSource
from deat.data.batch_source import InterruptibleSource
from deat.data.image_label_checks import noun_of_shape
from deat.evaluation.attacks import parse_attack
from deat.evaluation.quick_scores import compute_accuracies
from deat.models import add_normalization
from deat.models.logits_wrapper import LogitsModel
from deat.models.normalize import Normalized
from deat.models.weights import unwrap_model
from deat.runs.resolve_request import Run
from deat.tasks import CLASSIFICATION, Classification, Task
from deat.tasks.classification import as_class_logits
from deat.training.trainer import Trainer
from deat.training.validation import Validator
from deat.utils.torch_contexts import eval_mode

INITIAL_ATTACK = "pgd-20"
MIN_REORDERED_ACCURACY = 0.5
"""From this accuracy on, another order of the outputs is taken for the cause; random weights reach less."""
USUAL_CAUSES = (
    "Usual causes: another normalisation or another order of the classes than in their training, or a last layer that "
    "starts from random weights"
)


@dataclass(frozen=True)
class InitialScores:
    """What given weights reach before training.

    Attributes:
        natural: Accuracy on natural images.
        robust: Accuracy under `INITIAL_ATTACK`.
        images: The number of images.
        part: Which images: "held-out" or "test".
        warning: What is likely wrong, where natural accuracy is at chance; else empty.
        noun: What texts call the examples.
        task: What the scores are of.
    """

    natural: float
    robust: float
    images: int
    part: str
    warning: str = ""
    noun: str = "images"
    task: Task = CLASSIFICATION

    def describe(self) -> str:
        """Return the scores as one line."""
        natural, robust = map(self.task.format_metric, (self.natural, self.robust))
        return (
            f"your weights: {natural} natural, {robust} {INITIAL_ATTACK.upper()} "
            f"({self.images:,} {self.part} {self.noun})"
        )


def score_initial_weights(run: Run, trainer: Trainer, max_test_images: int) -> InitialScores | None:
    """Score the weights that a run starts from.

    The random state of training is not used, so that the training is the same with and without scores.

    Args:
        run: The run.
        trainer: Its trainer, before the first epoch.
        max_test_images: The number of test images that may be used where no images are held out.

    Returns:
        The scores on the held-out images, or else on test images; None where there are neither.

    Raises:
        Interrupted: If a stop was requested.
    """
    source, part = (trainer.val, "held-out") if trainer.val else (run.test_images(max_test_images), "test")
    if source is None:
        return None
    images = InterruptibleSource(source, trainer.interruption)
    natural, robust = _score(run, trainer, trainer.model, images, ["natural", INITIAL_ATTACK])
    chance = Validator(
        source, parse_attack(INITIAL_ATTACK), run.threat, trainer.engine, 0, task=run.task
    ).chance_upper_bound
    warning = ""
    if chance is not None and natural <= chance:
        cause = next(_find_causes(run, trainer, images, chance), USUAL_CAUSES)
        warning = f"the weights answer at chance before training ({run.task.format_metric(natural)} natural). {cause}."
    return InitialScores(natural, robust, source.num_examples, part, warning, noun_of_shape(source.shape), run.task)


def _score(run: Run, trainer: Trainer, model: nn.Module, source: BatchSource, attacks: list[str]) -> list[float]:
    prepare, seed = trainer.engine.to_memory_format, run.config.seed
    return list(
        compute_accuracies(model, source, attacks, run.threat, seed, prepare, trainer.distributed, run.task).values()
    )


def _find_causes(run: Run, trainer: Trainer, source: BatchSource, chance: float) -> Iterator[str]:
    """What raises natural accuracy above chance, tried on the same images."""
    for change, flag, model in _change_normalization(run, unwrap_model(trainer.model)):
        model = LogitsModel(model) if isinstance(trainer.model, LogitsModel) else model
        (natural,) = _score(run, trainer, model, source, ["natural"])
        if natural > chance:
            yield f"{change} they reach {run.task.format_metric(natural)}: {flag}"
    if not isinstance(run.task, Classification):
        return
    reordered = _reordered_accuracy(trainer.model, source)
    if reordered > max(chance, MIN_REORDERED_ACCURACY):
        classes = ", ".join(map(str, run.splits.train.classes[:5])) + ", ..." * (len(run.splits.train.classes) > 5)
        yield (
            f"With their outputs in another order they reach {reordered:.1%}: put the outputs into the order of the "
            f"data's classes, which is {classes}"
        )


def _change_normalization(run: Run, model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """The network with and without a normalisation, unlike it is trained."""
    if isinstance(model, Normalized):
        yield "Without the normalisation in front", "add --normalize none", model.net
    elif statistics := run.measure_channel_stats():
        normalized = add_normalization(model, statistics.mean, statistics.std).to(next(model.parameters()).device)
        yield "With the data's normalisation in front", "add --normalize data", normalized


def _reordered_accuracy(model: nn.Module, source: BatchSource) -> float:
    """Accuracy if each answer meant the class that it is most often given to, counted on one half of the images and
    measured on the other."""
    answers, labels = _predict(model, source)
    first = torch.arange(len(labels), device=labels.device) % 2 == 0
    counts = torch.zeros(int(answers.max()) + 1, int(labels.max()) + 1, device=labels.device)
    counts.index_put_((answers[first], labels[first]), torch.ones((), device=labels.device), accumulate=True)
    return float((counts.argmax(1)[answers[~first]] == labels[~first]).double().mean())


def _predict(model: nn.Module, source: BatchSource) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), eval_mode(model):
        pairs = [(as_class_logits(model(x)).argmax(1), y) for x, y in source.epoch(0)]
    answers, labels = zip(*pairs, strict=True)
    return torch.cat(answers), torch.cat(labels)
