"""The loss scale of fp16 as a device value, so that a recorded step follows it."""

from typing import Any

import torch
from torch import Tensor

START, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""torch's own: halved after an overflow, doubled after so many steps without one."""


class DeviceScaler:
    """Scales losses and unscales gradients; a step whose gradients overflowed is not taken."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), START, device=device)
        self.tracker = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, outputs: Tensor) -> Tensor:
        """A value ready for backward."""
        return outputs * self.factor

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Unscale, step, and renew the scale; whether the step was taken. The optimiser takes a device's `skip`."""
        found = torch.zeros((), device=self.factor.device)
        for group in optimizer.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, self.factor.reciprocal())
        optimizer.step(skip=found)  # type: ignore[call-overload]
        torch._amp_update_scale_(self.factor, self.tracker, found, GROWTH, BACKOFF, INTERVAL)
        return found == 0

    def tensors(self) -> list[Tensor]:
        """What a step changes."""
        return [self.factor, self.tracker]

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held, as torch's own scaler says it, so that either goes on from the other."""
        rules = {"growth_factor": GROWTH, "backoff_factor": BACKOFF, "growth_interval": INTERVAL}
        return {"scale": float(self.factor), **rules, "_growth_tracker": int(self.tracker)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.factor.fill_(state["scale"])
        self.tracker.fill_(state["_growth_tracker"])
