"""Many weights mirrored by one Triton kernel, which finds them in a table of addresses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE, COLUMNS = 64, 7
EIGHT = 8
"""What channels are a multiple of, so that they are read and written 16 bytes at a time."""
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _turn(
    table, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr, EIGHT: tl.constexpr
) -> None:  # fmt: skip
    """One tile of one tap: a weight's rows are outputs, its mirror's are inputs, and taps are in the other order."""
    row = table + tl.program_id(0) * COLUMNS
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    mirror = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(DTYPE)), 16)
    outputs = tl.multiple_of(tl.load(row + 2).to(tl.int32), EIGHT)
    inputs = tl.multiple_of(tl.load(row + 3).to(tl.int32), EIGHT)
    taps, tap, tile = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32), tl.load(row + 6).to(tl.int32)
    wide = (inputs + SIDE - 1) // SIDE
    o, i = tile // wide * SIDE + tl.arange(0, SIDE), tile % wide * SIDE + tl.arange(0, SIDE)
    ok = (o < outputs)[:, None] & (i < inputs)[None, :]
    v = tl.load(weight + (o * taps + tap)[:, None] * inputs + i[None, :], mask=ok)
    ok = (i < inputs)[:, None] & (o < outputs)[None, :]
    tl.store(mirror + (i * taps + taps - 1 - tap)[:, None] * outputs + o[None, :], tl.trans(v), mask=ok)


def table_of(weights: list[Tensor], mirrors: list[Tensor]) -> Tensor:
    """A row for each tile of each tap of each weight: two addresses, outputs, inputs, taps, the tap and the tile."""
    rows = []
    for weight, mirror in zip(weights, mirrors, strict=True):
        outputs, inputs, taps = weight.shape[0], weight.shape[1], weight[0, 0].numel()
        tiles = -(-outputs // SIDE) * -(-inputs // SIDE)
        head = [weight.data_ptr(), mirror.data_ptr(), outputs, inputs, taps]
        rows += [[*head, tap, tile] for tap in range(taps) for tile in range(tiles)]
    return torch.tensor(rows, device=weights[0].device)


def turn(table: Tensor, dtype: torch.dtype) -> None:
    """Mirror every weight of a table."""
    _turn[(len(table),)](table, DTYPE=TYPES[dtype], COLUMNS=COLUMNS, SIDE=SIDE, EIGHT=EIGHT)
