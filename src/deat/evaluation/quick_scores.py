"""Accuracies and losses under a few attacks without sanity checks: for validation, and for the table after training."""

from collections.abc import Callable, Sequence
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deat.core.loss_terms import cross_entropy
from deat.data import Source
from deat.evaluation.attacks import Attack, is_correct, logits_under_attack, parse_attack
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.seeding import derive_seed
from deat.utils.torch_utils import device_of


class QuickScore(NamedTuple):
    """The result of one attack on all images.

    Attributes:
        accuracy: The share of images that are classified correctly.
        loss: The mean cross-entropy.
        correct: For each image, whether it is classified correctly.
    """

    accuracy: float
    loss: float
    correct: list[bool]


def compute_accuracies(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    distributed: Distributed = SINGLE_PROCESS,
) -> dict[str, float]:
    """Compute the accuracy under each attack on all images of a source.

    Args:
        model: The model.
        source: The data.
        attacks: Names, such as "natural" and "pgd-20", or attacks.
        threat: The threat model.
        seed: The seed of the attacks' random starts.
        prepare: Applied to each batch of images, such as to change its memory format.
        distributed: Processes that take the batches in turn; their number changes no result.

    Returns:
        The accuracy by the attack's name.

    Example:
        >>> source = deat.as_source(test, batch_size=250, shuffle=False)
        >>> compute_accuracies(model, source, ["natural", "pgd-20"], deat.Linf(8 / 255), seed=0)
        {'natural': 0.83, 'pgd-20': 0.52}
    """
    scores = compute_scores(model, source, attacks, threat, seed, prepare, distributed)
    return {name: score.accuracy for name, score in scores.items()}


def compute_scores(
    model: nn.Module,
    source: Source,
    attacks: Sequence[str | Attack],
    threat: ThreatModel,
    seed: int,
    prepare: Callable[[Tensor], Tensor],
    distributed: Distributed,
) -> dict[str, QuickScore]:
    """Compute the accuracy and the mean cross-entropy under each attack on all images of a source.

    The numbers are read from the device at the end only.

    Args:
        model: The model.
        source: The data.
        attacks: Names, such as "natural" and "pgd-20", or attacks.
        threat: The threat model.
        seed: The seed of the attacks' random starts.
        prepare: Applied to each batch of images, such as to change its memory format.
        distributed: Processes that take the batches in turn; their number changes no result.

    Returns:
        Accuracy, mean cross-entropy and each image's verdict, by the attack's name.
    """
    parsed = [parse_attack(attack) for attack in attacks]
    device = device_of(model)
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    sums = torch.zeros(len(parsed), 2, len(source), dtype=torch.float64, device=device)
    verdicts: list[Tensor] = []
    for batch, (x, y) in enumerate(source.epoch(0)):
        verdicts.append(torch.zeros(len(parsed), len(y), dtype=torch.bool, device=device))
        if batch % distributed.size != distributed.rank:
            continue
        images = prepare(x.to(dtype))
        for index, attack in enumerate(parsed):
            generator = torch.Generator(device).manual_seed(derive_seed(seed, f"score {attack.name}", batch))
            logits = logits_under_attack(model, images, y, attack, threat, generator)
            verdicts[batch][index] = is_correct(logits, y)
            sums[index, 0, batch] = verdicts[batch][index].sum()
            sums[index, 1, batch] = cross_entropy(logits, y).sum(dtype=torch.float64)
    flat = distributed.all_reduce_sum(sums.flatten().tolist())
    means = [fsum(flat[i : i + len(source)]) / source.num_examples for i in range(0, len(flat), len(source))]
    correct = [_gather_verdicts(row, distributed) for row in torch.cat(verdicts, dim=1)]
    rows = zip(means[::2], means[1::2], correct, strict=True)
    return {attack.name: QuickScore(*row) for attack, row in zip(parsed, rows, strict=True)}


def _gather_verdicts(correct: Tensor, distributed: Distributed) -> list[bool]:
    """Each image's verdict, from the process that has its batch; the others have False."""
    return list(map(any, zip(*distributed.all_gather(correct.tolist()), strict=True)))
