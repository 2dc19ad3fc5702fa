"""A training method. Its first sentence is its summary in `deat list methods`."""

import deat


def bold(k: int = 3) -> deat.Method:
    """PGD with k steps of half the radius."""
    return deat.Method("bold", deat.Craft(), deat.attack_schedules.Fixed(k=k, alpha_eps=0.5))
