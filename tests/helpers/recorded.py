"""What a network that answers from recordings holds."""

from deat.evaluation.fast_model import GraphedNetwork


def count_recordings(asked: GraphedNetwork) -> int:
    """How many pairs of graphs there are."""
    return sum(len(slot.graphs_by_shape) for slot in asked._slots)
