"""Rounds adversarial images to the 256 levels of an image file without leaving the ball."""

import torch
from torch import Tensor

from deat.threat import ThreatModel
from deat.utils.torch_contexts import broadcast_mask

_SHRINK_PERCENT = range(100, 49, -1)


def round_to_8_bits(x: Tensor, adv: Tensor, threat: ThreatModel) -> Tensor:
    """Round adversarial images to whole 255ths inside the ball and the box of a threat model.

    Each perturbation is scaled down until its rounded image is inside: by the smallest of the percentages tried, up to
    50 %. Where that is not enough, each value is rounded towards the clean image, which always stays in the ball.

    Args:
        x: The images without attack, in whole 255ths, (B, C, H, W).
        adv: The adversarial images, which are inside.
        threat: The threat model.

    Returns:
        Images that an 8-bit file holds exactly. Where no other image is inside, it is the one of `x`.
    """
    result, is_open = x, torch.ones(len(x), dtype=torch.bool, device=x.device)
    clean, delta = x.double(), adv.double() - x.double()
    candidates = (_to_levels(clean + percent / 100 * delta) for percent in _SHRINK_PERCENT)
    for rounded in (*candidates, _to_levels(clean + (255 * delta).trunc() / 255)):
        is_inside = is_open & threat.contains(x, rounded)
        result = torch.where(broadcast_mask(is_inside, x), rounded, result)
        is_open = is_open & ~is_inside
        if not bool(is_open.any()):
            break
    return result


def _to_levels(images: Tensor) -> Tensor:
    """The nearest images of whole 255ths, as reading an 8-bit file gives them."""
    return (images * 255).round().clamp(0, 255).float() / 255
