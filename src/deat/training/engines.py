"""Which engine a training gets, and what a person is told of it."""

import os
from typing import NamedTuple

from deat.game.engine import Engine, choose_precision, choose_records
from deat.methods import Method
from deat.ranks import Ranks
from deat.training.settings import Settings, find_device

IN_WORDS = {"eager": "", "graph": "recorded", "compile": "compiled"}
"""How moves run."""


class Chosen(NamedTuple):
    """An engine, what stands against recording every move, if anything, and whether a run may come to be compiled."""

    engine: Engine
    obstacle: str
    may_compile: bool

    @property
    def news(self) -> str:
        """Why moves are not recorded, and what is done instead; empty where nothing stands against it."""
        if not self.obstacle:
            return ""
        instead = "compiled" if self.engine.compiles else "compiled once that pays" if self.may_compile else "eager"
        return f"not every move is recorded ({self.obstacle}): it is {instead}"


def choose(settings: Settings, method: Method, num_parameters: int, ranks: Ranks, own_optimizer: bool) -> Chosen:
    """The engine that these settings ask for, on this device, for this method."""
    device = find_device(settings.device)
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    obstacles = {
        "this method's play cannot be recorded": not method.play.records,
        "a compact batch changes its shape": method.ascent.compact,
        "an optimiser of your own may read the host": own_optimizer,
        "batch-norm statistics meet those of other processes": settings.sync_bn and ranks.many,
    }
    records, obstacle = choose_records(settings.engine, device, next(filter(obstacles.get, obstacles), None))
    if records and ranks.many:
        obstacle = "joint moves meet other processes; the others are recorded"
    precision = choose_precision(settings.precision, device, num_parameters)
    may_compile = settings.engine == "auto" and device.type == "cuda" and not settings.deterministic
    return Chosen(Engine(device, precision, records, compiles=settings.engine == "compile"), obstacle, may_compile)
