"""Accuracies and losses under a few attacks without sanity checks: for validation, and for the table after training."""

from collections.abc import Callable, Sequence
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deat.data import BatchSource
from deat.evaluation.attacks import Attack, logits_under_attack, parse_attack
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.seeding import derive_seed
from deat.utils.torch_contexts import device_of


class QuickScore(NamedTuple):
    """The result of one attack on all images.

    Attributes:
        accuracy: The share of images that are classified correctly, or the first metric of another task.
        loss: The task's mean loss, such as the cross-entropy.
        correct: For each image, whether its answer is right; empty for a graded task.
    """

    accuracy: float
    loss: float
    correct: list[bool]


def compute_accuracies(
    model: nn.Module,
    source: BatchSource,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    distributed: Distributed = SINGLE_PROCESS,
    task: Task = CLASSIFICATION,
    *,
    per_example: bool = False,
) -> dict[str, float]:
    """Compute the accuracy, or the first metric of another task, under each attack on all images of a source.

    Args:
        model: The model.
        source: The data.
        attacks: Names, such as "natural" and "pgd-20", or attacks.
        threat: The threat model.
        seed: The seed of the attacks' random starts.
        prepare: Applied to each batch of images, such as to change its memory format.
        distributed: Processes that take the batches in turn; their number changes no result.
        task: What outputs and labels mean.
        per_example: Compute the mean of the task's accuracy of each example, which is a share from 0 to 1, in place of
            its first metric.

    Returns:
        The accuracy by the attack's name.

    Example:
        >>> source = deat.as_source(test, batch_size=250, shuffle=False)
        >>> compute_accuracies(model, source, ["natural", "pgd-20"], deat.Linf(8 / 255), seed=0)
        {'natural': 0.83, 'pgd-20': 0.52}
    """
    scores = compute_scores(model, source, attacks, threat, seed, prepare, distributed, task, per_example=per_example)
    return {name: score.accuracy for name, score in scores.items()}


def compute_scores(
    model: nn.Module,
    source: BatchSource,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor],
    distributed: Distributed,
    task: Task = CLASSIFICATION,
    *,
    per_example: bool = False,
) -> dict[str, QuickScore]:
    """Compute the task's first metric, such as accuracy, and its mean loss under each attack on all images of a source.

    The numbers are read from the device at the end only.

    Args:
        model: The model.
        source: The data.
        attacks: Names, such as "natural" and "pgd-20", or attacks.
        threat: The threat model.
        seed: The seed of the attacks' random starts.
        prepare: Applied to each batch of images, such as to change its memory format.
        distributed: Processes that take the batches in turn; their number changes no result.
        task: What outputs and labels mean.
        per_example: As in `compute_accuracies`.

    Returns:
        Metric, mean loss and, for a task whose answers are right or wrong, each image's verdict, by the attack's name.
    """
    parsed = [parse_attack(attack) for attack in attacks]
    device = device_of(model)
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    losses = torch.zeros(len(parsed), len(source), dtype=torch.float64, device=device)
    statistics: list[list[Tensor]] = [[] for _ in parsed]
    for batch, (x, y) in enumerate(source.epoch(0)):
        if batch % distributed.size != distributed.rank:
            continue
        images = prepare(x.to(dtype))
        for index, attack in enumerate(parsed):
            generator = torch.Generator(device).manual_seed(derive_seed(seed, f"score {attack.name}", batch))
            logits = logits_under_attack(model, images, y, attack, threat, generator, task)
            losses[index, batch] = task.loss(logits, y).sum(dtype=torch.float64)
            own = task.accuracy(logits, y).double().unsqueeze(1) if per_example else task.statistics(logits, y)
            place, is_right = own.new_full((len(own), 1), batch), task.is_right(logits, y).double().unsqueeze(1)
            statistics[index].append(torch.cat((place, is_right, own), 1))
    sums = distributed.all_reduce_sum(losses.flatten().tolist())
    means = [fsum(sums[i : i + len(source)]) / source.num_examples for i in range(0, len(sums), len(source))]
    scores = {}
    for attack, batches, loss in zip(parsed, statistics, means, strict=True):
        parts = distributed.all_gather(torch.cat(batches) if batches else torch.zeros(0, dtype=torch.float64))
        rows = torch.cat([part for part in parts if len(part)])
        in_order = rows[rows[:, 0].argsort(stable=True), 1:]  # by batch, whatever the number of processes
        own = in_order[:, 1:]
        metric = float(own.mean()) if per_example else task.summarize(own)[task.metric_names[0]]
        correct = [] if task.is_graded else in_order[:, 0].bool().tolist()
        scores[attack.name] = QuickScore(metric, loss, correct)
    return scores
