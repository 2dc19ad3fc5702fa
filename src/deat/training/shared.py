"""What each process of a run has for itself, as one state that the first can save and all can load."""

from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.game.moves import Game
from deat.ranks import Ranks
from deat.training.settings import Settings


def own_parts(game: Game, step: int) -> dict[str, Any]:
    """Every process's sums and buffers, and the carried delta of the whole batch; all must ask for it."""
    ranks, buffers = game.ranks, {}
    if step and ranks.many:  # between epochs they are everybody's
        buffers = {name: torch.stack(ranks.gather_tensor(b)) for name, b in game.net.named_buffers()}
    return {
        "meter": ranks.gather(game.meter.state_dict()) if step else None,
        "carry": None if game.carry is None else _interleaved(ranks.gather_tensor(game.carry)),
        "buffers": buffers,
    }


def take_parts(game: Game, state: dict[str, Any]) -> None:
    """Take this process's part of such a state up again."""
    rank, size, carry = game.ranks.rank, game.ranks.size, state["carry"]
    if state["meter"]:
        game.meter.load_state_dict(_own_sums(state["meter"], rank, size))
    game.carry = None if carry is None else carry[rank::size].to(game.engine.device, copy=True)
    with torch.no_grad():
        for name, buffer in game.net.named_buffers():
            rows = state.get("buffers", {}).get(name, ())
            if len(rows) == size:  # else as many processes as now did not save it, and the first one's are in the model
                buffer.copy_(rows[rank])


def synchronised(model: nn.Module, settings: Settings, device: torch.device, ranks: Ranks) -> nn.Module:
    """The model, its batch norms taking their statistics over all processes where that was asked for."""
    if not settings.sync_bn:
        return model
    if device.type != "cuda":
        raise UsageError("sync_bn needs GPUs: torch has no synchronised batch norm on a CPU. Leave it out.")
    return ranks.synchronise(model)


def _own_sums(saved: list[dict[str, list[float]]], rank: int, size: int) -> dict[str, list[float]]:
    """This process's sums; where another number of processes saved them, those it now stands for."""
    mine = saved[rank::size]
    sums = [sum(column) for column in zip(*(part["sums"] for part in mine), strict=True)]
    common, active = saved[0]["counts"][:3], sum(part["counts"][3] for part in mine)
    return {"sums": sums or [0.0] * 4, "counts": [*common, active]}


def _interleaved(parts: list[Tensor]) -> Tensor:
    """A batch's rows in their order, from every process's."""
    whole = torch.cat([torch.empty_like(part) for part in parts])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
