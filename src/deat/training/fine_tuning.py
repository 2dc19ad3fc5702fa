"""Weights that training begins with: put into a network, and what they expect before it."""

import warnings
from pathlib import Path

from torch import nn

from deat.data.statistics import Statistics
from deat.evaluation.ledger import fingerprint
from deat.models import Normalize, load_weights, pixel_scale
from deat.models.portable import normalization_of
from deat.models.weights import locate
from deat.tensorfile import check_finite, read


def statistics_of(weights: str | Path) -> Statistics | None:
    """The statistics that a file or a folder of weights says its network was trained behind."""
    carried = normalization_of(locate(Path(weights)))
    if not carried:
        return None
    front = Normalize(**carried)  # which refuses what is none
    return Statistics(tuple(front.mean.flatten().tolist()), tuple(front.std.flatten().tolist()))


def content_of(weights: str | Path) -> str:
    """A hash of the tensors in a file or a folder of weights, by which they are known again."""
    found = read(locate(Path(weights)))
    return fingerprint(sorted(found), *(found[name] for name in sorted(found)))


def fine_tune(model: nn.Module, weights: str) -> None:
    """Put weights into a network, and say where they do not quite belong."""
    file = locate(Path(weights))
    check_finite(read(file), file)
    fresh = load_weights(model, weights, fresh_head=True)
    if pixel_scale(model) is None and normalization_of(file):
        warnings.warn(
            f"{weights} was trained behind a normalisation, and this network stands behind none; if that is not meant, "
            "--normalize data puts it there.",
            stacklevel=3,
        )
    if fresh:
        warnings.warn(f"{', '.join(fresh)} start anew: the weights are for another number of classes.", stacklevel=3)
