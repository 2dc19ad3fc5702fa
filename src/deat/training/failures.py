"""How training fails: numbers that go bad and memory that runs out, told with where it was."""

import re

import torch

from deat.errors import NumericalError, UsageError
from deat.game.round import Budget
from deat.numbers import level


def located(message: str, *, epoch: int, batch: int, budget: Budget, lr: float, seed: int) -> NumericalError:
    """An error that says where training was, in words and as facts for the run's record; epoch counts from 0."""
    where = f"k {budget.k}, alpha {level(budget.alpha)}, lr {lr:.4g}, seed {seed}"
    facts = {"epoch": epoch + 1, "batch": batch, "k": budget.k, "alpha": budget.alpha, "lr": lr, "seed": seed}
    return NumericalError(f"{message} It happened at {where}.", **facts)


def is_shortage(error: Exception) -> bool:
    """Whether an error means that there was no memory left."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def is_lost_worker(error: Exception) -> bool:
    """Whether a process that loads images is gone, which torch says wherever its parent happens to be."""
    return re.match(r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)", str(error)) is not None


def shortage(epoch: int, batch_size: int) -> str:
    """What to do when memory ran out; a smaller batch is another experiment, so only the user chooses it."""
    return (
        f"out of memory in epoch {epoch + 1} with batch_size {batch_size}. Start a run with a smaller batch_size, a "
        "smaller model or precision bf16."
    )


def check_determinism(error: Exception) -> None:
    """Say what to do where torch has no deterministic form of an operation of the network."""
    text = str(error)
    if "deterministic" in text and "use_deterministic_algorithms" in text:
        reason = text.strip().split("\n")[0].split(". ")[0]
        raise UsageError(
            f"this network cannot be trained deterministically: {reason}. Leave --deterministic away; a resumed run is "
            "then not exact."
        ) from error
