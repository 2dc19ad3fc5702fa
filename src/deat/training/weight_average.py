"""The exponential moving average of a network's weights, which is scored beside the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deat.models.weights import get_state_dict, unwrap_model
from deat.utils.distributed import Distributed

State = dict[str, Any]


class WeightAverage:
    """Averages weights and batch-norm statistics after every update: average += (1 - decay) (value - average).

    The first averages would be those of random weights, so the decay grows to its value: after n updates it is at most
    (1 + n) / (10 + n). Averages are float32 at least. What is not a float, such as a count of batches, is copied.

    Args:
        model: The network that is trained. Its tensors are updated in place.
        decay: The largest decay, between 0 and 1.

    Attributes:
        updates: The number of updates so far.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.updates = unwrap_model(model), decay, 0
        self._averages = {name: _copy_in_float32(value) for name, value in self._values().items()}
        self.refresh()

    def refresh(self) -> None:
        """Find the network's tensors again; call it where they may have been replaced, as at the start of an epoch."""
        values = self._values()
        floats = [name for name, value in values.items() if value.is_floating_point()]
        self._pairs = [self._averages[name] for name in floats], [values[name] for name in floats]
        self._copied = [(self._averages[name], values[name]) for name in values if name not in set(floats)]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present values. Nothing is read from the device."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages, values = self._pairs
        same_type = [value.to(average.dtype) for average, value in zip(averages, values, strict=True)]
        torch._foreach_lerp_(averages, same_type, 1 - decay)
        for average, value in self._copied:
            average.copy_(value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the network inside a with block; its own values are put back exactly."""
        own = {name: value.clone() for name, value in self._values().items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(own)

    def weights(self) -> dict[str, Tensor]:
        """Return the averages as a state dict of the network, on the CPU, in the types of its own tensors."""
        values = self._values()
        return {name: a.to(values[name].dtype).cpu().clone() for name, a in self._averages.items()}

    def broadcast_buffers(self, distributed: Distributed) -> None:
        """Copy the first process's averages of batch-norm statistics to all processes, as the network's own are."""
        distributed.broadcast_tensors(
            self._averages[name] for name, _ in self.model.named_buffers() if name in self._averages
        )

    def state_dict(self) -> State:
        """Return the averages and the number of updates."""
        return {"updates": self.updates, "averages": {name: a.clone() for name, a in self._averages.items()}}

    def load_state_dict(self, state: State) -> None:
        """Load a result of `state_dict`."""
        self.updates = state["updates"]
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])

    def fits(self, state: State) -> bool:
        """Return whether a state is of this network."""
        shapes = {name: average.shape for name, average in self._averages.items()}
        return state["updates"] >= 0 and {name: a.shape for name, a in state["averages"].items()} == shapes

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in get_state_dict(self.model).items()}

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._values().items():
            tensor.copy_(values[name])


def _copy_in_float32(value: Tensor) -> Tensor:
    """Copy a tensor; a float of less precision would not move by small steps."""
    if value.is_floating_point():
        return value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
    return value.detach().clone()
