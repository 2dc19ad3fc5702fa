"""Crop and flip a batch of images and convert it to float32 in [0, 1], as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import ceil_div

BLOCK_NUMBERS = 1024
"""How many numbers of an image a program writes."""


# Without specialisation, one build serves all batches.
@triton.jit(do_not_specialize=["pad", "index_stride"], do_not_specialize_on_alignment=["index"])
def crop_kernel(
    x, index, top, left, flip, out, pad, index_stride, xn, xc, xh, xw,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write to out the images of x at index, padded with zeros, cropped, and flipped where flip is set."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.load(index + row * index_stride)
    c, h, w = at // (H * W), at // W % H, at % W
    h += tl.load(top + n).to(tl.int32) - pad
    w = tl.where(tl.load(flip + n), W - 1 - w, w) + tl.load(left + n).to(tl.int32) - pad
    mask = (at < C * H * W) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    v = tl.load(x + n * xn + (c * xc + h * xh + w * xw), mask=mask, other=0).to(tl.float32)
    if x.dtype.element_ty == tl.uint8:
        v *= 1 / 255  # a division would round differently
    tl.store(out + row.to(tl.int64) * (C * H * W) + at, v, mask=at < C * H * W)


def launch_crop(x: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, out: Tensor, pad: int) -> None:
    """Write the crops to out; the arguments are those of `crop.crop`."""
    sizes = {"C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "BLOCK": BLOCK_NUMBERS}
    grid = len(index), ceil_div(x[0].numel(), BLOCK_NUMBERS)
    crop_kernel[grid](x, index, top, left, flip, out, pad, index.stride(0), *x.stride(), **sizes)
