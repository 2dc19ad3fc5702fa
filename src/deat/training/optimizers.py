"""The optimizer of the network's weights, and the scheduler of its learning rate and momentum."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from deat.engine.kernels import has_triton
from deat.errors import UsageError
from deat.training.config import TrainConfig
from deat.training.lr_schedules import get_lr_schedule
from deat.training.named_optimizers import OPTIMIZERS
from deat.utils.numbers import check_number

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check_optimizer_factory(optimizer: Any) -> None:
    """Check that `optimizer` is a function from parameters to an optimizer.

    Args:
        optimizer: The function; None is accepted.

    Raises:
        UsageError: It is an optimizer itself, or anything else that cannot be called.
    """
    if optimizer is not None and not callable(optimizer):
        raise UsageError(
            f"optimizer is of type {type(optimizer).__name__}; it must be a function from parameters to an optimizer, "
            "such as lambda params: torch.optim.Adam(params, lr=1e-3). Those of a name are TrainConfig(optimizer='adamw') "
            "or fit(optimizer='adamw')."
        )


def make_optimizer(factory: OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of a network, and check that it can be trained with it.

    Args:
        factory: A function from parameters to an optimizer.
        model: The network.

    Raises:
        UsageError: The result is no optimizer, needs a closure or sparse gradients, maximises, or has none of the
            network's parameters.
    """
    optimizer = factory(model.parameters())
    kind = type(optimizer).__name__
    if not all(hasattr(optimizer, name) for name in ("param_groups", "step", "zero_grad", "state_dict")):
        raise UsageError(f"the function optimizer returned a {kind}; it must return an optimizer of the parameters.")
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise UsageError(
            f"{kind}.step needs a closure that computes the loss again, and training computes each loss once. Use an "
            "optimizer that steps by the gradients, such as torch.optim.SGD or AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam takes sparse gradients, and those of a network are dense. Use torch.optim.Adam.")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise UsageError(f"{kind} with maximize=True would raise the loss. Omit maximize.")
    own = set(model.parameters())
    if not any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"the {kind} has none of the network's parameters, so nothing would be trained. Pass it the parameters that "
            "the function is given: lambda params: torch.optim.Adam(params, lr=1e-3)."
        )
    return optimizer


def make_optimizer_factory(config: TrainConfig, on_device: bool) -> OptimizerFactory:
    """Make the optimizer that the settings name: by default SGD with momentum and weight decay, as in the paper.

    Args:
        config: The settings of training.
        on_device: Keep learning rate and momentum on the device, for steps that are recorded.

    Returns:
        A function from parameters to the optimizer of all of them.
    """

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer of these parameters."""
        named = OPTIMIZERS[config.optimizer]
        make = DeviceSGD if on_device and named.can_record else named.build
        return make(parameters, lr=config.lr or named.lr, **config.optimizer_settings)

    return build


class DeviceSGD(torch.optim.Optimizer):
    """SGD whose learning rate and momentum are tensors on the device, so that a recorded step uses their present values.

    torch.optim.SGD accepts a tensor as its learning rate, but a recorded step of it keeps its momentum.

    Args:
        parameters: The parameters.
        lr: The learning rate.
        momentum: The momentum.
        weight_decay: The weight decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._init_device_state()
        self._step_function = sgd_step
        self._weight_copies: dict[Tensor, Tensor] = {}

    def _init_device_state(self) -> None:
        """Move learning rates and momenta to the device, and make a velocity for every weight."""
        for group in self.param_groups:
            for name in ("lr", "momentum"):
                group[name] = torch.tensor(float(group[name]), device=group["params"][0].device)
            for parameter in group["params"]:
                if self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which may be one of torch.optim.SGD."""
        super().load_state_dict(state_dict)
        self._init_device_state()

    def use_compiled(self, wanted: bool) -> None:
        """Switch between a compiled step, one pass over the weights, and the default one."""
        self._step_function = compile_sgd_step() if wanted else sgd_step

    def follow(self, copies: dict[Tensor, Tensor]) -> None:
        """Update copies of weights in each step too.

        Args:
            copies: The copy of each weight that has one; its gradient is used if the weight has none.
        """
        self._weight_copies = copies

    @property
    def is_watched(self) -> bool:
        """Whether step hooks are registered; they read weights and gradients, so copies cannot be used."""
        own_hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        return any(map(bool, (*own_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, also those of copies."""
        super().zero_grad(set_to_none)
        for copy in self._weight_copies.values():
            copy.grad = None

    @torch.no_grad()
    def step(self, closure: None = None, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update all parameters: v = momentum v + (g + decay w); w = w - lr v.

        Args:
            closure: Not supported.
            skip: A tensor on the device; 1 leaves weights and velocities as they are.
        """
        for group in self.param_groups:
            pairs = [(p, grad) for p in group["params"] if (grad := self._gradient_of(p)) is not None]
            weights, grads = [p for p, _ in pairs], [grad for _, grad in pairs]
            velocities = [self.state[p]["momentum_buffer"] for p in weights]
            lr, momentum = group["lr"], group["momentum"]
            if skip is not None:
                lr, momentum = lr * (1 - skip), torch.where(skip > 0, torch.ones_like(momentum), momentum)
                grads = [torch.where(skip > 0, -group["weight_decay"] * p, grad) for p, grad in pairs]
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
    """Update weights in place: v = momentum v + (g + decay w); w = w - lr v.

    Args:
        weights: The weights.
        velocities: Their velocities, updated in place.
        grads: Their gradients.
        lr: The learning rate.
        momentum: The momentum.
        decay: The weight decay.
        copies: For each weight a copy to update, or None.
    """
    grads = [grad.to(w.dtype) for grad, w in zip(grads, weights, strict=True)]
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, torch._foreach_add(grads, weights, alpha=decay))
    torch._foreach_sub_(weights, torch._foreach_mul(velocities, lr))
    copied = [(copy, w) for copy, w in zip(copies, weights, strict=True) if copy is not None]
    if copied:
        torch._foreach_copy_([copy for copy, _ in copied], [w for _, w in copied])


def compile_sgd_step() -> Callable[..., None]:
    """Return a form of `sgd_step` that makes one pass: our own kernel, or torch.compile without Triton."""
    if not has_triton():
        compiled: Callable[..., None] = torch.compile(sgd_step, dynamic=False)
        return compiled
    from deat.engine.kernels.sgd_triton import FusedSGD

    return FusedSGD(fallback=sgd_step)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    """Shorten the gradient with respect to all weights to `max_norm` before each step from now on, where it is longer.

    Args:
        optimizer: The optimizer.
        max_norm: The largest 2-norm over all weights.
    """

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Clip the gradients; a fused step unscales them itself, so the bound is scaled instead."""
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = torch.nn.utils.get_total_norm([p.grad for p in weights])
        scale = getattr(optimizer, "grad_scale", None)
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, total if scale is None else total / scale)

    optimizer.register_step_pre_hook(clip)


class LRScheduler:
    """Sets the learning rate and the momentum before each batch. Groups keep the ratio of their learning rates.

    Args:
        optimizer: The optimizer.
        config: The settings of training.
        total_steps: The number of batches of the whole training.

    Raises:
        UsageError: The optimizer's learning rate is not > 0.
    """

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
        """Return the learning rate of a batch; `step` counts from the start of training."""
        return self.schedule.at(step, self.total_steps)[0]

    def set_step(self, step: int) -> None:
        """Set learning rate and momentum for a batch; `step` counts from the start of training."""
        lr, momentum = self.schedule.at(step, self.total_steps)
        # Groups are read each time: an optimizer that loads a state replaces them.
        for group, ratio in zip(self.optimizer.param_groups, self.lr_ratios, strict=True):
            _set_group_value(group, "lr", lr * ratio)
            if momentum is not None:
                _set_group_value(group, "momentum", momentum)


def describe_param_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """Return the settings of each parameter group as text, to compare when a run resumes."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [{name: _format_value(value) for name, value in group.items()} for group in groups]


def _format_value(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, Tensor) else value)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state; DeviceSGD and torch.optim.SGD accept each other's.

    Args:
        optimizer: The optimizer.
        state: A state_dict(); it is copied.
    """
    own_groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(deepcopy(state))  # it would update the given tensors in place
    for group, before in zip(optimizer.param_groups, own_groups, strict=True):
        for name, value in before.items():
            on_host = isinstance(value, float) and torch.is_tensor(group.get(name))
            group[name] = float(group[name]) if on_host else group.get(name, value)
    align_state_with_parameters(optimizer)


def align_state_with_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give a loaded state the device and memory layout of its parameters, which fused steps need."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if torch.is_tensor(value):
                group[name] = value.to(group["params"][0].device)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _set_group_value(group: dict[str, Any], name: str, value: float) -> None:
    """Set a value of a group, on the device or on the host."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = value
