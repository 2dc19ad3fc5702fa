"""One step of projected gradient ascent in the Linf ball, in one pass over the images."""

import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import ceil_div

BLOCK_NUMBERS = 2048


@triton.jit
def linf_step_kernel(x, delta, grad, alpha, out, n, EPS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Clamp delta + alpha sign(grad) to the ball, and x plus it to [0, 1]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(grad + at, mask=mask, other=0)
    sign = tl.where(g > 0, 1.0, tl.where(g < 0, -1.0, g))  # NaN stays
    moved = tl.load(delta + at, mask=mask, other=0) + tl.load(alpha) * sign
    image = tl.load(x + at, mask=mask, other=0)
    moved = tl.clamp(moved, -EPS, EPS, propagate_nan=tl.PropagateNan.ALL)
    moved = tl.clamp(moved, -image, 1.0 - image, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, moved, mask=mask)


def linf_projected_step(x: Tensor, delta: Tensor, grad: Tensor, alpha: Tensor, *, out: Tensor, eps: float) -> Tensor:
    """Write the next delta to `out`, which may be delta itself; all tensors must have the same memory layout."""
    grid = (ceil_div(x.numel(), BLOCK_NUMBERS),)
    linf_step_kernel[grid](x, delta, grad, alpha, out, x.numel(), EPS=eps, BLOCK=BLOCK_NUMBERS, num_warps=8)
    return out
