"""The scaling of losses in fp16, which CUDA graphs can record."""

from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
"""torch's defaults: halved after an overflow, doubled after 2000 steps without one."""


class LossScaler:
    """A loss scaler that CUDA graphs can record: it skips a step whose gradients overflow without reading the device.

    Args:
        device: The device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the scaled value, ready for backward."""
        return outputs * self.factor

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Unscale the gradients, step the weights, and update the scale.

        Args:
            optimizer: An optimiser whose `step` takes `skip`, a device value that is not 0 where it must do nothing.

        Returns:
            Whether the step was taken, as a device value.
        """
        overflow = torch.zeros((), device=self.factor.device)
        for group in optimizer.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, self.factor.reciprocal())
        optimizer.step(skip=overflow)  # type: ignore[call-overload]
        torch._amp_update_scale_(
            self.factor, self.growth_tracker, overflow, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL
        )
        return overflow == 0

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        return [self.factor, self.growth_tracker]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's GradScaler, so that either scaler can load the other's."""
        rules = {"growth_factor": GROWTH_FACTOR, "backoff_factor": BACKOFF_FACTOR, "growth_interval": GROWTH_INTERVAL}
        return {"scale": float(self.factor), **rules, "_growth_tracker": int(self.growth_tracker)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.factor.fill_(state["scale"])
        self.growth_tracker.fill_(state["_growth_tracker"])
