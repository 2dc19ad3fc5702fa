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
    rank, carry = game.ranks.rank, state["carry"]
    if state["meter"]:
        game.meter.load_state_dict(state["meter"][rank])
    game.carry = None if carry is None else carry[rank :: game.ranks.size].to(game.engine.device, copy=True)
    with torch.no_grad():
        for name, buffer in game.net.named_buffers() if state["buffers"] else ():
            buffer.copy_(state["buffers"][name][rank])


def synchronised(model: nn.Module, settings: Settings, device: torch.device, ranks: Ranks) -> nn.Module:
    """The model, its batch norms taking their statistics over all processes where that was asked for."""
    if not settings.sync_bn:
        return model
    if device.type != "cuda":
        raise UsageError("sync_bn needs GPUs: torch has no synchronised batch norm on a CPU. Leave it out.")
    return ranks.synchronise(model)


def _interleaved(parts: list[Tensor]) -> Tensor:
    """A batch's rows in their order, from every process's."""
    whole = torch.cat([torch.empty_like(part) for part in parts])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
