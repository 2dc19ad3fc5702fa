"""What our steps of SGD must agree with, for tests on a CPU (interpreted) and on a GPU."""

import torch
from torch import Tensor

from deat.engine.kernels.sgd_triton import FusedSGD
from deat.training.optimizers import sgd_step

SHAPES = ((8,), (3000,), (1,), (16, 8, 3, 3), (12, 6, 1, 1), (70, 40), ())


def compare_steps(device: str, half: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """(torch's, ours, how many went another way): weights, velocities and halves after two steps of SGD."""
    ends, odd = [], []

    def rest(*args: object) -> None:
        odd.append(len(args[0]))  # type: ignore[arg-type]
        sgd_step(*args)  # type: ignore[arg-type]

    for step in (sgd_step, FusedSGD(rest)):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            found = torch.randn(shape, generator=generator).to(device)  # noqa: B023
            return found.contiguous(memory_format=torch.channels_last) if found.dim() == 4 else found

        weights, velocities = ([draw(*shape) for shape in SHAPES] for _ in range(2))
        copies = [w.to(half) if i % 2 else None for i, w in enumerate(weights)]
        lr, momentum = torch.tensor(0.1, device=device), torch.tensor(0.9, device=device)
        for _ in range(2):
            grads = [
                draw(*w.shape).to(w.dtype if copy is None else half) for w, copy in zip(weights, copies, strict=True)
            ]
            step(weights, velocities, grads, lr, momentum, 5e-4, copies)
        ends.append([*weights, *velocities, *(copy.float() for copy in copies if copy is not None)])
    return ends[0], ends[1], odd


def odd_steps(device: str) -> bool:
    """Whether a gradient in another order of memory than its weight's steps it all the same."""
    w = torch.arange(2 * 3 * 4 * 4.0, device=device).view(2, 3, 4, 4)
    v, grad = torch.zeros_like(w), w.clone().contiguous(memory_format=torch.channels_last)
    expected = w - 0.5 * (grad + 0.1 * w)
    FusedSGD(sgd_step)(
        [w], [v], [grad], torch.tensor(0.5, device=device), torch.tensor(0.9, device=device), 0.1, [None]
    )
    return bool(torch.allclose(w, expected))
