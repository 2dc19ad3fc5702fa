"""Natural training: the baseline without an adversary.

Idea: minimise the cross-entropy on the images as they are. Moves of a batch (core/game.py): `J`.
Settings: none. Cost: 1 backprop a batch.
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Craft
from deat.methods.method import Method
from deat.methods.method_registry import register_method


@register_method("natural")
def natural() -> Method:
    """Build natural training."""
    return Method("natural", Craft(), Fixed(k=0), summary="no adversary, the baseline")
