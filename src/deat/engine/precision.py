"""How a move runs on this device: precision, memory format, loss scaling."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deat.engine.kernels import has_triton
from deat.engine.kernels.conv_streams import mark_for_side_stream, wait_for_gradients
from deat.errors import UsageError, unknown_name_error
from deat.utils.torch_utils import SMALL_MODEL_PARAMETERS

CASTABLE_LAYERS = (nn.Conv2d, nn.Linear)
"""Layers whose weights autocast would cast, and that do nothing else with them."""


class HalfWeights:
    """Half-precision copies of a network's large weights, by name: what a forward asks in their place.

    Gradients by the copies are handed back to the weights, in their own precision, as autocast would.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        self._net = net
        self._full_by_name = dict(castable_weights(net))
        self._half_by_name = {
            name: p.detach().to(dtype).requires_grad_(p.requires_grad) for name, p in self._full_by_name.items()
        }
        for half in self._half_by_name.values():
            mark_for_side_stream(half)
        self._detached_by_name = {name: half.detach() for name, half in self._half_by_name.items()}
        self.is_current = True

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the weights as they are now."""
        if not self.is_current and self._half_by_name:
            torch._foreach_copy_(list(self._detached_by_name.values()), list(self._full_by_name.values()))
        self.is_current = True

    def trainable_copies(self, owner: nn.Module) -> dict[str, Tensor]:
        """The copies, by the names that `owner`, which contains the network, gives to their weights."""
        halves = {id(p): self._half_by_name[name] for name, p in self._full_by_name.items()}
        return {name: halves[id(p)] for name, p in owner.named_parameters() if id(p) in halves}

    def frozen(self) -> dict[str, Tensor]:
        """Every weight of the network, halved where it can be, to be differentiated by none."""
        return {
            name: p.detach() for name, p in self._net.named_parameters() if name not in self._half_by_name
        } | self._detached_by_name

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """Each weight's copy."""
        return {p: self._half_by_name[name] for name, p in self._full_by_name.items()}

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return list(self._detached_by_name.values())

    @torch.no_grad()
    def merge_gradients(self, keep_for_optimizer: bool = False) -> None:
        """Add the copies' gradients to the weights' own, once all of them are there; or keep those that are alone."""
        wait_for_gradients()
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, half in zip(self._full_by_name.values(), self._half_by_name.values(), strict=True):
            if half.grad is None or (keep_for_optimizer and p.grad is None):
                continue
            if p.grad is not None:
                p.grad.add_(half.grad)
            else:
                p.grad = torch.empty_like(p)
                new[0].append(p.grad)
                new[1].append(half.grad)
            half.grad = None
        if new[0]:
            torch._foreach_copy_(*new)


def castable_weights(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of plain layers that no other module shares, and whose gradients nobody waits for on their way."""
    every = [p for _, p in net.named_parameters(remove_duplicate=False)]
    times = {id(p): sum(q is p for q in every) for p in every}
    names = {id(p): name for name, p in net.named_parameters()}
    layers = [module for module in net.modules() if type(module) in CASTABLE_LAYERS]
    held = [p for layer in layers for p in (layer._parameters.get("weight"), layer._parameters.get("bias"))]
    found = [p for p in held if p is not None and times[id(p)] == 1 and not _has_gradient_hooks(p)]
    return [(names[id(p)], p) for p in found]


def _has_gradient_hooks(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000
"""torch's own: halved after an overflow, doubled after so many steps without one."""


class LossScaler:
    """Scales losses and unscales gradients; a step whose gradients overflowed is not taken."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), INITIAL_SCALE, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

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
        torch._amp_update_scale_(
            self.factor, self.growth_tracker, found, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL
        )
        return found == 0

    def tensors(self) -> list[Tensor]:
        """What a step changes."""
        return [self.factor, self.growth_tracker]

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held, as torch's own scaler says it, so that either goes on from the other."""
        rules = {"growth_factor": GROWTH_FACTOR, "backoff_factor": BACKOFF_FACTOR, "growth_interval": GROWTH_INTERVAL}
        return {"scale": float(self.factor), **rules, "_growth_tracker": int(self.growth_tracker)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.factor.fill_(state["scale"])
        self.growth_tracker.fill_(state["_growth_tracker"])


PRECISIONS = ("auto", "fp32", "bf16", "fp16")
ENGINES = ("auto", "eager", "graph", "compile")

Precision = Literal["fp32", "bf16", "fp16"]


def has_native_cpu_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def choose_precision(precision: str, device: torch.device, num_parameters: int) -> Precision:
    """The precision to train in; "auto" is bf16 where the hardware is fast at it (on a CPU: and the network large)."""
    if precision not in PRECISIONS:
        raise unknown_name_error("precision", precision, PRECISIONS)
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'fp32'.")
    if precision != "auto":
        return precision  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return (
        "bf16"
        if device.type == "cpu" and num_parameters >= SMALL_MODEL_PARAMETERS and has_native_cpu_bf16()
        else "fp32"
    )


def choose_recording(engine: str, device: torch.device, obstacle: str | None) -> tuple[bool, str]:
    """Whether to play moves as CUDA graphs, and what stands against it where they would be otherwise."""
    if engine not in ENGINES:
        raise unknown_name_error("engine", engine, ENGINES)
    if engine == "graph" and device.type != "cuda":
        raise UsageError("engine 'graph' needs a CUDA device; use 'eager' or 'auto'.")
    if engine == "eager" or device.type != "cuda":
        return False, ""
    if obstacle and engine == "graph":
        raise UsageError(f"engine 'graph' cannot serve here: {obstacle}. Use 'eager' or 'auto'.")
    return not obstacle, obstacle or ""


@dataclass
class Engine:
    """The device side of a game: casts, scales and lays out memory, so that moves need not know.

    records plays moves as CUDA graphs; compiles compiles what they call.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    records: bool = False
    use_compile: bool = False

    def __post_init__(self) -> None:
        self.scaler: torch.amp.GradScaler | LossScaler | None = None
        if self.precision == "fp16":
            self.scaler = LossScaler(self.device) if self.records else torch.amp.GradScaler(self.device.type)

    @property
    def name(self) -> str:
        """What --engine calls it."""
        return "compile" if self.use_compile else "graph" if self.records else "eager"

    @property
    def dtype(self) -> torch.dtype:
        """What networks compute in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    @property
    def non_finite_hint(self) -> str:
        """What may help where numbers stop being finite."""
        other = "" if self.precision == "fp32" else ", or train with precision fp32"
        return f"Lower the learning rate{other}."

    @property
    def uses_own_kernels(self) -> bool:
        """Whether compiling may use our own kernels: in half precision, on a GPU that Triton serves."""
        return self.device.type == "cuda" and self.precision != "fp32" and has_triton()

    @property
    def memory_format(self) -> torch.memory_format:
        """Channels last in half precision, where convolutions want it."""
        return torch.contiguous_format if self.precision == "fp32" else torch.channels_last

    def prepare(self, net: nn.Module) -> nn.Module:
        """The network on the device, its convolutions laid out for it."""
        net.to(self.device)
        for p in net.parameters():
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=self.memory_format)
        return net

    def layout(self, x: Tensor) -> Tensor:
        """A batch in this engine's memory format."""
        return x.contiguous(memory_format=self.memory_format) if x.dim() == 4 else x.contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which networks run forward."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """A loss ready for backward."""
        return self.scaler.scale(loss) if self.scaler else loss

    def unscale(self, grad: Tensor, examples: float) -> Tensor:
        """A gradient of the scaled batch mean as each example's own gradient."""
        if self.scaler is None:
            return grad * examples
        return torch.nan_to_num(grad * (examples / self.scaler.scale(grad.new_ones(()))), posinf=0.0, neginf=0.0)

    def unscale_into(self, out: Tensor, grad: Tensor, examples: float) -> None:
        """The same, written where it is to be."""
        if self.scaler is None:
            torch.mul(grad, examples, out=out)
        else:
            out.copy_(self.unscale(grad, examples))

    def is_finite(self, grad: Tensor) -> Tensor | None:
        """Under a scaler, whether a scaled gradient did not overflow, as a device value."""
        return None if self.scaler is None else torch.isfinite(grad).all()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Step the weights; under a scaler, whether the step was taken, as a device value."""
        if self.scaler is None:
            optimizer.step()
            return None
        if isinstance(self.scaler, LossScaler):
            return self.scaler.step(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # The largest gradient, not their length: squares of scaled gradients may overflow by themselves.
        taken = torch.isfinite(torch.nn.utils.get_total_norm(grads, norm_type=torch.inf))
        self.scaler.step(optimizer)
        self.scaler.update()
        return taken
