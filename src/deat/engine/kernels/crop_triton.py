"""A batch cut out of a set of images, turned to float32 in [0, 1] by the way, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_NUMBERS = 1024
"""Numbers of an image that a program writes."""


@triton.jit(
    do_not_specialize=["pad", "every"], do_not_specialize_on_alignment=["index"]
)  # one build serves all batches
def crop_kernel(
    x, index, top, left, flip, out, pad, every, xn, xc, xh, xw,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out's images are x's at index, with a border of zeros, cut at their corners and mirrored where flip says so."""
    place, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(index + place * every)
    c, h, w = at // (H * W), at // W % H, at % W
    h += tl.load(top + n).to(tl.int32) - pad
    w = tl.where(tl.load(flip + n), W - 1 - w, w) + tl.load(left + n).to(tl.int32) - pad
    ok = (at < C * H * W) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    v = tl.load(x + n * xn + (c * xc + h * xh + w * xw), mask=ok, other=0).to(tl.float32)
    if x.dtype.element_ty == tl.uint8:
        v *= 1 / 255  # a division would round differently
    tl.store(out + place.to(tl.int64) * (C * H * W) + at, v, mask=at < C * H * W)


def launch_crop(x: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, out: Tensor, pad: int) -> None:
    """Write the crops of x's images at index; corners and flips are of all images of x."""
    sizes = {"C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "BLOCK": BLOCK_NUMBERS}
    grid = len(index), -(-x[0].numel() // BLOCK_NUMBERS)
    crop_kernel[grid](x, index, top, left, flip, out, pad, index.stride(0), *x.stride(), **sizes)
