"""Counts the CUDA graphs of a network."""

from deat.evaluation.fast_model import GraphedNetwork


def count_recordings(network: GraphedNetwork) -> int:
    """How many pairs of forward and backward graphs there are."""
    return sum(len(slot.graphs_by_shape) for slot in network._slots)
