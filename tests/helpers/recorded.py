"""What a network that answers from recordings holds."""

from deat.evaluation.fast_model import Graphed


def count_recordings(asked: Graphed) -> int:
    """How many pairs of graphs there are."""
    return sum(len(slot.pairs) for slot in asked._slots)
