"""Commands to give next, as a shell takes them.

A method or a model that is code must be named again by whoever gives the command, so what is printed names it.
"""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deat.loading import is_file_spec
from deat.paths import at_home
from deat.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from deat.training.trainer import Trainer

CODE = {"resume": ("method", "model"), "evaluate": ("model",)}
"""What each command takes that may be code."""


def command(verb: str, folder: Path, request: Mapping[str, Any], ranks: Ranks = ALONE) -> str:
    """The command that does this to a run of that request, started by as many processes as work on it now."""
    named = {what: str(request.get(what)) for what in CODE[verb]}
    flags = [flag(what, spec) for what, spec in named.items() if is_file_spec(spec)]
    return " ".join([_launched(ranks), verb, shlex.quote(str(folder)), *flags])


def flag(what: str, spec: str) -> str:
    """The flag that names code of the user's, as it is recorded."""
    return f"--{what} {shlex.quote(at_home(spec))}"


def stopped_at(trainer: "Trainer") -> str:
    """Where a training was when it was interrupted; nothing of one that was over."""
    batch = f", after batch {trainer.step}" if trainer.step else ""
    epochs = trainer.settings.epochs
    return f" in epoch {trainer.epoch + 1} of {epochs}{batch}" if trainer.epoch < epochs else ""


def goes_on_at(trainer: "Trainer") -> str:
    """Where a training goes on that has been taken up."""
    where = f"batch {trainer.step + 1}" if trainer.step < len(trainer.train) else "its validation"
    return f"epoch {trainer.epoch + 1}" + (f", {where}" if trainer.step else "")


def _launched(ranks: Ranks) -> str:
    """deat, as torchrun starts it where there are several processes; `--` keeps our flags from torchrun."""
    if not ranks.many:
        return "deat"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    if here < ranks.size:
        return f"(as this was started, in {ranks.size} processes) deat"
    return f"torchrun --standalone --nproc-per-node={here} -m -- deat"
