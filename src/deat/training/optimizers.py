"""The learner's optimiser, and the hand that sets its learning rate before every batch."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deat.engine.kernels import has_triton
from deat.errors import UsageError
from deat.training.config import TrainConfig
from deat.training.lr_schedules import get_lr_schedule
from deat.utils.numbers import check_number

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DEFAULT_LR = 0.1


def check_optimizer_factory(optimizer: Any) -> None:
    """Refuse an optimizer itself, or anything else that cannot be called with parameters to make one."""
    if optimizer is not None and not callable(optimizer):
        raise UsageError(
            f"optimizer is of type {type(optimizer).__name__}; it must be a function from parameters to an optimizer, "
            "such as lambda params: torch.optim.Adam(params, lr=1e-3)."
        )


def make_sgd_factory(config: TrainConfig, on_device: bool) -> OptimizerFactory:
    """SGD with momentum and weight decay on all parameters, as every method of the paper uses it."""

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimiser of these parameters."""
        lr, momentum, decay = config.lr or DEFAULT_LR, config.momentum, config.weight_decay
        if on_device:
            return DeviceSGD(parameters, lr, momentum, decay)
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=True)

    return build


class DeviceSGD(torch.optim.Optimizer):
    """SGD whose learning rate and momentum are device values, so that a recorded step follows them.

    torch's own takes a tensor as its learning rate, but its momentum is frozen when a step is recorded.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._init_device_state()
        self._step_function = sgd_step
        self._weight_copies: dict[Tensor, Tensor] = {}

    def _init_device_state(self) -> None:
        """Put learning rates and momenta on the device, and give every weight a velocity."""
        for group in self.param_groups:
            for name in ("lr", "momentum"):
                group[name] = torch.tensor(float(group[name]), device=group["params"][0].device)
            for parameter in group["params"]:
                if self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, also from a state of torch's own, whose rates would be frozen when a step is recorded."""
        super().load_state_dict(state_dict)
        self._init_device_state()

    def use_compiled(self, wanted: bool) -> None:
        """Step in one pass over the weights rather than in several."""
        self._step_function = compile_sgd_step() if wanted else sgd_step

    def follow(self, copies: dict[Tensor, Tensor]) -> None:
        """Step copies of some weights with them; where a weight has no gradient, its copy's serves."""
        self._weight_copies = copies

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at weights and their gradients before or after a step: then copies cannot follow."""
        own = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        return any(map(bool, (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those of copies too."""
        super().zero_grad(set_to_none)
        for copy in self._weight_copies.values():
            copy.grad = None

    @torch.no_grad()
    def step(self, closure: None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """v = momentum v + (g + decay w); w = w - lr v, over all parameters at once, unless `skip` is one."""
        for group in self.param_groups:
            found = [(p, grad) for p in group["params"] if (grad := self._gradient_of(p)) is not None]
            weights, grads = [p for p, _ in found], [grad for _, grad in found]
            velocities = [self.state[p]["momentum_buffer"] for p in weights]
            lr, momentum = group["lr"], group["momentum"]
            if skip is not None:
                lr, momentum = lr * (1 - skip), torch.where(skip > 0, torch.ones_like(momentum), momentum)
                grads = [torch.where(skip > 0, -group["weight_decay"] * p, grad) for p, grad in found]
            copies = [self._weight_copies.get(p) for p in weights]
            self._step_function(weights, velocities, grads, lr, momentum, group["weight_decay"], copies)
        for copy in self._weight_copies.values():
            copy.grad = None

    def _gradient_of(self, p: Tensor) -> Tensor | None:
        return p.grad if p.grad is not None or p not in self._weight_copies else self._weight_copies[p].grad


def sgd_step(
    weights: list[Any],
    velocities: list[Any],
    grads: list[Any],
    lr: Tensor,
    momentum: Tensor,
    decay: float,
    copies: list[Any],
) -> None:
    """v = momentum v + (g + decay w); w = w - lr v, and copies of it."""
    grads = [grad.to(w.dtype) for grad, w in zip(grads, weights, strict=True)]
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, torch._foreach_add(grads, weights, alpha=decay))
    torch._foreach_sub_(weights, torch._foreach_mul(velocities, lr))
    kept = [(copy, w) for copy, w in zip(copies, weights, strict=True) if copy is not None]
    if kept:
        torch._foreach_copy_([copy for copy, _ in kept], [w for _, w in kept])


def compile_sgd_step() -> Callable[..., None]:
    """The same in one pass: our own kernel, or torch's compiler where it cannot be built."""
    if not has_triton():
        compiled: Callable[..., None] = torch.compile(sgd_step, dynamic=False)
        return compiled
    from deat.engine.kernels.sgd_triton import FusedSGD

    return FusedSGD(fallback=sgd_step)


class LRScheduler:
    """Sets learning rate and momentum once a batch. Groups keep the ratio of their learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig, total_steps: int) -> None:
        self.optimizer, self.total_steps = optimizer, total_steps
        groups = optimizer.param_groups
        self.base_lr = float(groups[0]["lr"])
        check_number("the optimiser's learning rate", self.base_lr, lambda v: v > 0, "> 0, such as 0.01")
        self.lr_ratios = [float(group["lr"]) / self.base_lr for group in groups]
        high = float(groups[0].get("momentum", 0.0))
        cycles = config.cycle_momentum and all("momentum" in group for group in groups)
        self.schedule = get_lr_schedule(
            config.lr_schedule,
            config.lr or self.base_lr,
            config.epochs,
            milestones=config.milestones,
            peak=config.peak,
            momentum=(high, max(0.0, high - 0.1)) if cycles else None,
        )

    def lr_at(self, step: int) -> float:
        """The learning rate of a batch."""
        return self.schedule.at(step, self.total_steps)[0]

    def set_step(self, step: int) -> None:
        """Set the rates for a batch."""
        lr, momentum = self.schedule.at(step, self.total_steps)
        # Asked anew every time: an optimiser that loads its state replaces its groups.
        for group, ratio in zip(self.optimizer.param_groups, self.lr_ratios, strict=True):
            _set_group_value(group, "lr", lr * ratio)
            if momentum is not None:
                _set_group_value(group, "momentum", momentum)


def describe_param_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """The settings of each group of an optimiser, by which a run that goes on knows it again."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [{name: _format_value(value) for name, value in group.items()} for group in groups]


def _format_value(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Go on from a state, which SGD on the device and SGD on the host take from each other."""
    own = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(deepcopy(state))  # it would train on the tensors it is given
    for group, before in zip(optimizer.param_groups, own, strict=True):
        for name, value in before.items():
            on_host = isinstance(value, float) and torch.is_tensor(group.get(name))
            group[name] = float(group[name]) if on_host else group.get(name, value)
    align_state_with_parameters(optimizer)


def align_state_with_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Put a loaded state where its parameters are, laid out as they are: fused steps walk through both at once."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if torch.is_tensor(value):
                group[name] = value.to(group["params"][0].device)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _set_group_value(group: dict[str, Any], name: str, value: float) -> None:
    """Set a group's value where it lives: on the device, or on the host."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
