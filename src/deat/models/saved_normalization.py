"""The normalisation that weights were trained behind, as files of weights record it."""

import json
from typing import Any

from deat.utils.safetensors_files import Tensors

NORMALIZATION_NAMES = ("mean", "std")
"""The numbers of a normalisation: one of each for every channel."""
NETWORK_PREFIX, NORMALIZE_PREFIX = "net.", "normalize."
"""What names of weights begin with in a Normalized network."""


def split_normalization(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Separate the weights of a Normalized network into those of the network and its normalisation.

    Args:
        tensors: Weights of a run.

    Returns:
        The weights under the network's own names, and mean and std, or {} where the network is not Normalized.
    """
    network = {name: t for name, t in tensors.items() if name.startswith(NETWORK_PREFIX)}
    numbers = {
        name.removeprefix(NORMALIZE_PREFIX): t.flatten().tolist()
        for name, t in tensors.items()
        if name.startswith(NORMALIZE_PREFIX)
    }
    if numbers.keys() != set(NORMALIZATION_NAMES) or len(network) + len(numbers) != len(tensors):
        return tensors, {}
    return {name.removeprefix(NETWORK_PREFIX): tensor for name, tensor in network.items()}, numbers


def parse_normalization_note(note: str | None) -> dict[str, Any]:
    """Read the normalisation in the note of a file.

    Args:
        note: What `format_normalization_note` returned, or the note of another program.

    Returns:
        mean and std, or {} where the note does not have them.
    """
    try:
        normalization = json.loads(note or "{}").get("normalize", {})
    except (ValueError, AttributeError, RecursionError):  # a note of another program
        return {}
    is_valid = isinstance(normalization, dict) and normalization.keys() == set(NORMALIZATION_NAMES)
    return normalization if is_valid else {}


def format_normalization_note(normalization: dict[str, Any]) -> str | None:
    """Format a normalisation as the note of a file.

    Args:
        normalization: mean and std, or {}.

    Returns:
        The note, or None where there is no normalisation.
    """
    return json.dumps({"normalize": normalization}) if normalization else None
