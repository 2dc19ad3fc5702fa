"""The nearest points of a hyperplane that lie in [0, 1], in each norm.

FAB computes them twice in every step. For Linf and L2 no coordinate is sorted: Newton's method gives the length of the
step, which is exact after a few rounds because the distance covered is a concave function of it with few corners.
"""

import torch
from torch import Tensor

MAX_ROUNDS = 40
"""More rounds than any image has needed; each one passes a corner at least."""
CPU_ROWS = 32
"""How many points are handled at once on a CPU, so that they stay in its cache."""


def step_to_hyperplane(points: Tensor, normal: Tensor, offset: Tensor, norm: str) -> Tensor:
    """Return the shortest steps d with <normal, point + d> = offset and point + d in [0, 1].

    Args:
        points: Points in [0, 1], (B, n).
        normal: The normals of the hyperplanes, (B, n).
        offset: Their offsets, (B,).
        norm: "linf", "l2" or "l1": what is short.

    Returns:
        The steps, (B, n); into the nearest corner where the hyperplane does not meet the box.
    """
    if points.device.type != "cpu" or len(points) <= CPU_ROWS:
        return _step(points, normal, offset, norm)
    parts = zip(*(torch.split(values, CPU_ROWS) for values in (points, normal, offset)), strict=True)
    return torch.cat([_step(part, normals, offsets, norm) for part, normals, offsets in parts])


def _step(points: Tensor, normal: Tensor, offset: Tensor, norm: str) -> Tensor:
    gap = offset - _dot(normal, points)
    sign = normal.sign().mul_(gap.sign()[:, None])
    slope = normal.abs()
    room = sign.clamp(min=0).addcmul_(sign, points, value=-1)  # 1 - point or point; of a flat pixel it does not matter
    size = _fill_steepest(slope, room, gap.abs()) if norm == "l1" else _stretch(slope, room, gap.abs(), norm)
    return size.mul_(sign)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bn,bn->b", a, b)


def _stretch(slope: Tensor, room: Tensor, gap: Tensor, norm: str) -> Tensor:
    """The sizes min(length * u, room) that cover the gap, where u is 1 in Linf and the slope in L2."""
    direction = slope.new_ones(1, 1) if norm == "linf" else slope
    gain_by_pixel = slope if norm == "linf" else slope.square()
    largest = torch.finfo(slope.dtype).max ** 0.5
    length = (gap / gain_by_pixel.sum(1)).nan_to_num(largest, largest).clamp(max=largest)
    for _ in range(MAX_ROUNDS):
        reach = length[:, None] * direction
        size = torch.minimum(reach, room)
        missing = gap - _dot(slope, size)
        is_done = (missing <= 1e-6 * gap) | (length >= largest)
        if is_done.all():
            return size
        gain = _dot(gain_by_pixel, (reach < room).to(slope.dtype))
        longer = (length + missing / gain).nan_to_num(largest, largest).clamp(max=largest)
        length = torch.where(is_done, length, torch.maximum(longer, length))
    return torch.minimum(length[:, None] * direction, room)


def _fill_steepest(slope: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """The sizes that cover the gap by as few coordinates as possible: the steepest ones, with all their room."""
    order = slope.argsort(1, descending=True)
    gains = (slope * room).gather(1, order)
    missing = (gap[:, None] - (gains.cumsum(1) - gains)).clamp(min=0)
    share = (missing / gains).nan_to_num(0.0).clamp(max=1)
    return torch.zeros_like(room).scatter(1, order, share * room.gather(1, order))
