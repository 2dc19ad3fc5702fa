"""The weights that a training starts from (--init): loaded with their normalisation, hashed, a new last layer named."""

import warnings
from pathlib import Path

from torch import nn

from deat.data.channel_stats import ChannelStats
from deat.models import Normalize, get_input_std, load_weights
from deat.models.weights import read_weights
from deat.utils.fingerprints import fingerprint
from deat.utils.safetensors_files import check_finite_tensors


def read_channel_stats(weights: str | Path) -> ChannelStats | None:
    """Read the channel statistics of the normalisation that a network was trained with.

    Args:
        weights: A weights file, or a folder with one.

    Returns:
        The mean and standard deviation, or None if the file has none.
    """
    recorded = read_weights(weights).normalization
    if not recorded:
        return None
    layer = Normalize(**recorded, unit_range=False)  # raises if the numbers are not valid
    return ChannelStats(tuple(layer.mean.flatten().tolist()), tuple(layer.std.flatten().tolist()))


def hash_weights(weights: str | Path) -> str:
    """Hash the tensors of a weights file, or of a folder with one."""
    tensors = read_weights(weights).tensors
    return fingerprint(sorted(tensors), *(tensors[name] for name in sorted(tensors)))


def load_initial_weights(model: nn.Module, weights: str) -> None:
    """Load initial weights into a network; a last layer of another size is kept as it is, with a warning.

    Args:
        model: The network.
        weights: A weights file, or a folder with one.

    Raises:
        DataError: The weights do not fit the network, or are not finite.
    """
    saved = read_weights(weights)
    check_finite_tensors(saved.tensors, saved.file)
    has_normalization = get_input_std(model) is not None
    fresh = load_weights(model, weights, fresh_head=True, ignore_normalization=not has_normalization)
    if saved.normalization and not has_normalization:
        warnings.warn(
            f"{weights} was trained with a normalisation layer, and this network has none; leave --normalize none out.",
            stacklevel=3,
        )
    if fresh:
        warnings.warn(
            f"{', '.join(fresh)} start from random weights: the weights are for another number of classes.",
            stacklevel=3,
        )
