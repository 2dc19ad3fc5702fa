"""What the processes of one training share: batch norm statistics, and the parts of the state that differ by process."""

from typing import Any

import torch
from torch import Tensor, nn

from deat.core.game import Game
from deat.errors import UsageError
from deat.training.config import TrainConfig
from deat.utils.distributed import Distributed


def sync_batch_norm(model: nn.Module, config: TrainConfig, device: torch.device, distributed: Distributed) -> nn.Module:
    """Make batch norms compute their statistics over all processes, if `config.sync_bn` is set.

    Args:
        model: The network.
        config: The settings of training.
        device: The device the network is trained on.
        distributed: The processes that train together.

    Returns:
        The network, converted if that was requested.

    Raises:
        UsageError: `sync_bn` is set and the device is not a GPU.
    """
    if not config.sync_bn:
        return model
    if device.type != "cuda":
        raise UsageError("sync_bn needs GPUs: torch has no synchronised batch norm on a CPU. Leave it out.")
    return distributed.to_sync_batch_norm(model)


def gather_process_state(game: Game, step: int) -> dict[str, Any]:
    """Gather the state that differs between processes. A collective call: every process must make it.

    Args:
        game: This process's game.
        step: The number of batches done in the current epoch.

    Returns:
        Every process's meter and buffers, the carried delta of the whole batch, what the rule of a union learned, and the
        remembered starts.
    """
    distributed, buffers = game.distributed, {}
    if step and distributed.is_multiprocess:  # between epochs all processes have the same buffers
        buffers = {name: torch.stack(distributed.all_gather(b)) for name, b in game.net.named_buffers()}
    carry = None if game.carried_delta is None else _interleave_rows(distributed.all_gather(game.carried_delta))
    meter = distributed.all_gather_json(game.meter.state_dict()) if step else None
    learned = game.union_rule.state_dict() if game.union_rule is not None else {}
    starts = {"starts": game.start_memory.state_dict()} if game.start_memory is not None else {}
    return {"meter": meter, "carry": carry, "buffers": buffers, **({"union": learned} if learned else {}), **starts}


def restore_process_state(game: Game, state: dict[str, Any]) -> None:
    """Restore this process's part of a gathered state.

    Args:
        game: This process's game.
        state: A result of :func:`gather_process_state`, possibly of another number of processes.
    """
    rank, size, carry = game.distributed.rank, game.distributed.size, state["carry"]
    if state["meter"]:
        game.meter.load_state_dict(_select_own_sums(state["meter"], rank, size))
    game.carried_delta = None if carry is None else carry[rank::size].to(game.engine.device, copy=True)
    if game.union_rule is not None and "union" in state:
        game.union_rule.load_state_dict(state["union"])
    if game.start_memory is not None:
        game.start_memory.load_state_dict(state["starts"])
    with torch.no_grad():
        for name, buffer in game.net.named_buffers():
            rows = state.get("buffers", {}).get(name, ())
            if len(rows) == size:  # else the number of processes changed, and the model's state has the main one's
                buffer.copy_(rows[rank])


def _select_own_sums(saved: list[dict[str, list[float]]], rank: int, size: int) -> dict[str, list[float]]:
    """Return this process's sums; after a change of the number of processes, those of the ones it replaces."""
    own = saved[rank::size]
    sums = [sum(column) for column in zip(*(part["sums"] for part in own), strict=True)]
    common, active = saved[0]["counts"][:3], sum(part["counts"][3] for part in own)
    return {"sums": sums or [0.0] * len(saved[0]["sums"]), "counts": [*common, active]}


def _interleave_rows(parts: list[Tensor]) -> Tensor:
    """Join the processes' rows into the batch's order."""
    batch = torch.cat([torch.empty_like(part) for part in parts])
    for rank, part in enumerate(parts):
        batch[rank :: len(parts)] = part
    return batch
