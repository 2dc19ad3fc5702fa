"""A copy between tensors of different numbers of channels, standardised by the way, as one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 512


@triton.jit
def _fit(
    x, out, shift, scale, M,
    CX: tl.constexpr, CO: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """out's rows of CO columns are x's of CX, less shift and over scale; what x lacks is zero."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BC)
    there, known = (row < M)[:, None], (col < CX) & (col < CO)
    v = tl.load(x + row[:, None] * CX + col[None, :], mask=there & known[None, :], other=0)
    if SHIFT:
        v -= tl.load(shift + col, mask=known, other=0)[None, :]
    if SCALE:
        v = v / tl.load(scale + col, mask=known, other=1)[None, :]
    tl.store(out + row[:, None] * CO + col[None, :], v.to(out.dtype.element_ty), mask=there & (col < CO)[None, :])


def fit_channels(x: Tensor, out: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> None:
    """Copy x into out, both channels last."""
    rows, most = x.numel() // x.shape[1], max(x.shape[1], out.shape[1])
    sizes = {"CX": x.shape[1], "CO": out.shape[1], "BC": 1 << (most - 1).bit_length(), "ROWS": ROWS}
    flags = {"SHIFT": shift is not None, "SCALE": scale is not None}
    _fit[(-(-rows // ROWS),)](
        x, out, x if shift is None else shift, x if scale is None else scale, rows, **flags, **sizes
    )
