"""One batch's static device buffers: what the moves read and write, and what a captured move needs."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """What one minibatch may spend: k iterations of size alpha; level is FAT's tau or DAT's c_t."""

    k: int
    alpha: float
    level: float = 0.0


@dataclass
class Cost:
    """What was spent: backprops (the paper's unit), and forwards and backwards of the whole network."""

    backprops: int = 0
    passes: int = 0


@dataclass(eq=False)
class Buffers:
    """The board of one minibatch game.

    x and delta stay float32 in any precision. grad holds the gradient of each example's own loss by its
    own delta, undone from batch mean and loss scale. magnitude is its per-example dual norm at the probed
    move. reference, start, counter and active serve TRADES' crafting, DAT and FAT.
    """

    x: Tensor
    y: Tensor
    delta: Tensor
    grad: Tensor
    start: Tensor
    reference_logits: Tensor
    steps_left: Tensor
    active: Tensor
    loss: Tensor
    num_correct: Tensor
    magnitude: Tensor
    valid: Tensor

    @classmethod
    def allocate(cls, x: Tensor, y: Tensor) -> "Buffers":
        """Buffers for batches shaped like (x, y)."""
        n, image, scalar = len(y), torch.zeros_like(x), x.new_zeros(())
        return cls(
            x=image,
            y=torch.zeros_like(y),
            delta=image.clone(),
            grad=image.clone(),
            start=image.clone(),
            reference_logits=x.new_zeros(n, 0),
            steps_left=x.new_zeros(n),
            active=torch.ones_like(y, dtype=torch.bool),
            loss=scalar,
            num_correct=scalar.clone(),
            magnitude=x.new_zeros(n),
            valid=torch.ones_like(scalar, dtype=torch.bool),
        )

    def __len__(self) -> int:
        return len(self.y)

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [getattr(self, f.name) for f in fields(self)]

    def rows(self, index: Tensor) -> "Buffers":
        """A copy of some examples' part of every per-example buffer."""
        pick = {f.name: getattr(self, f.name) for f in fields(self)}
        return Buffers(**{name: b.index_select(0, index) if b.dim() else b for name, b in pick.items()})
