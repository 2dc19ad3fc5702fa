"""Device, precision, memory format and loss scaling."""

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
"""Layers whose weights autocast would cast, and that use them for nothing else."""


class HalfWeights:
    """Half-precision copies of a network's large weights, which forward passes use in place of the weights.

    The gradients by the copies are added to the gradients of the weights, in the weights' own precision, as autocast
    does.

    Args:
        net: The network.
        dtype: The dtype of the copies.

    Attributes:
        is_current: Whether the copies equal the weights; `cast` copies them again if not.
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
        """Copy the weights, unless the copies are current."""
        if not self.is_current and self._half_by_name:
            torch._foreach_copy_(list(self._detached_by_name.values()), list(self._full_by_name.values()))
        self.is_current = True

    def trainable_copies(self, owner: nn.Module) -> dict[str, Tensor]:
        """Return the copies by the names of their weights in `owner`, a module that contains the network."""
        copies = {id(p): self._half_by_name[name] for name, p in self._full_by_name.items()}
        return {name: copies[id(p)] for name, p in owner.named_parameters() if id(p) in copies}

    def frozen(self) -> dict[str, Tensor]:
        """Return every weight of the network by name, detached, in half precision where there is a copy."""
        return {
            name: p.detach() for name, p in self._net.named_parameters() if name not in self._half_by_name
        } | self._detached_by_name

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """The copy of each weight."""
        return {p: self._half_by_name[name] for name, p in self._full_by_name.items()}

    def tensors(self) -> list[Tensor]:
        """Return the copies."""
        return list(self._detached_by_name.values())

    @torch.no_grad()
    def merge_gradients(self, keep_for_optimizer: bool = False) -> None:
        """Add the gradients of the copies to those of the weights, after those of the side stream have been computed.

        Args:
            keep_for_optimizer: Whether to leave the gradient of a copy where its weight has none; an optimiser that
                steps the copies reads it there.
        """
        wait_for_gradients()
        new_gradients: list[Tensor] = []
        half_gradients: list[Tensor] = []
        for p, half in zip(self._full_by_name.values(), self._half_by_name.values(), strict=True):
            if half.grad is None or (keep_for_optimizer and p.grad is None):
                continue
            if p.grad is not None:
                p.grad.add_(half.grad)
            else:
                p.grad = torch.empty_like(p)
                new_gradients.append(p.grad)
                half_gradients.append(half.grad)
            half.grad = None
        if new_gradients:
            torch._foreach_copy_(new_gradients, half_gradients)


def castable_weights(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the weights that may be replaced by half-precision copies.

    These are the parameters of plain layers that no other module shares and that have no gradient hooks.

    Args:
        net: The network.

    Returns:
        Name and parameter of each.
    """
    parameters = [p for _, p in net.named_parameters(remove_duplicate=False)]
    num_uses = {id(p): sum(q is p for q in parameters) for p in parameters}
    names = {id(p): name for name, p in net.named_parameters()}
    layers = [module for module in net.modules() if type(module) in CASTABLE_LAYERS]
    candidates = [p for layer in layers for p in (layer._parameters.get("weight"), layer._parameters.get("bias"))]
    castable = [p for p in candidates if p is not None and num_uses[id(p)] == 1 and not _has_gradient_hooks(p)]
    return [(names[id(p)], p) for p in castable]


def _has_gradient_hooks(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


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


PRECISIONS = ("auto", "fp32", "bf16", "fp16")
ENGINES = ("auto", "eager", "graph", "compile")

Precision = Literal["fp32", "bf16", "fp16"]


def has_native_cpu_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def choose_precision(precision: str, device: torch.device, num_parameters: int) -> Precision:
    """Choose the precision to train in.

    Args:
        precision: One of `PRECISIONS`. "auto" is bf16 where the hardware is fast at it (on a CPU for large networks
            only), otherwise fp32.
        device: The device.
        num_parameters: The number of parameters of the network.

    Returns:
        The precision.

    Raises:
        UsageError: If the precision is unknown, or is fp16 on a CPU.
    """
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
    """Choose whether to record moves as CUDA graphs.

    Args:
        engine: One of `ENGINES`.
        device: The device.
        obstacle: Why the moves cannot be recorded, if they cannot.

    Returns:
        Whether to record, and the obstacle if it is the only reason not to (otherwise empty).

    Raises:
        UsageError: If the engine is unknown, or is "graph" where nothing can be recorded.
    """
    if engine not in ENGINES:
        raise unknown_name_error("engine", engine, ENGINES)
    if engine == "graph" and device.type != "cuda":
        raise UsageError("engine 'graph' needs a CUDA device; use 'eager' or 'auto'.")
    if engine == "eager" or device.type != "cuda":
        return False, ""
    if obstacle and engine == "graph":
        raise UsageError(f"engine 'graph' cannot be used here: {obstacle}. Use 'eager' or 'auto'.")
    return not obstacle, obstacle or ""


@dataclass
class Engine:
    """Where and how a `Game` computes: device, precision, memory format, loss scaling.

    Args:
        device: The device; the CPU by default.
        precision: The precision of the network: "fp32", "bf16" or "fp16".
        use_cuda_graphs: Whether to record moves as CUDA graphs.
        use_compile: Whether to compile the calls of the network.

    Attributes:
        scaler: The loss scaler, in fp16 only.

    Example:
        >>> engine = deat.Engine(torch.device("cuda"), "bf16", use_compile=True)
        >>> game = deat.Game(engine.prepare(net), objective, threat, method.attack, optimizer, engine=engine)
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "fp32"
    use_cuda_graphs: bool = False
    use_compile: bool = False

    def __post_init__(self) -> None:
        self.scaler: torch.amp.GradScaler | LossScaler | None = None
        if self.precision == "fp16":
            self.scaler = LossScaler(self.device) if self.use_cuda_graphs else torch.amp.GradScaler(self.device.type)

    @property
    def name(self) -> str:
        """The name of this engine, as the flag --engine spells it."""
        return "compile" if self.use_compile else "graph" if self.use_cuda_graphs else "eager"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network's computations."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    @property
    def non_finite_hint(self) -> str:
        """What to suggest where a loss or gradient is not finite."""
        other = "" if self.precision == "fp32" else ", or train with precision fp32"
        return f"Lower the learning rate{other}."

    @property
    def uses_own_kernels(self) -> bool:
        """Whether compiled calls use our own kernels: in half precision, on a GPU, where Triton is installed."""
        return self.device.type == "cuda" and self.precision != "fp32" and has_triton()

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of images and convolution weights: channels last in half precision, where it is faster."""
        return torch.contiguous_format if self.precision == "fp32" else torch.channels_last

    def prepare(self, net: nn.Module) -> nn.Module:
        """Move a network to the device, and its convolution weights into the memory format, in place.

        Args:
            net: The network.

        Returns:
            The same network.
        """
        net.to(self.device)
        for p in net.parameters():
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=self.memory_format)
        return net

    def to_memory_format(self, x: Tensor) -> Tensor:
        """Return a batch in this engine's memory format."""
        return x.contiguous(memory_format=self.memory_format) if x.dim() == 4 else x.contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss scaled for backward."""
        return self.scaler.scale(loss) if self.scaler else loss

    def unscale(self, grad: Tensor, examples: float) -> Tensor:
        """Turn the gradient of the scaled batch mean into the gradient of each example's own loss.

        Args:
            grad: The gradient.
            examples: The number of examples in the mean.

        Returns:
            The gradient; under a loss scaler, non-finite values become 0.
        """
        if self.scaler is None:
            return grad * examples
        return torch.nan_to_num(grad * (examples / self.scaler.scale(grad.new_ones(()))), posinf=0.0, neginf=0.0)

    def unscale_into(self, out: Tensor, grad: Tensor, examples: float) -> None:
        """Write the result of `unscale` to `out`."""
        if self.scaler is None:
            torch.mul(grad, examples, out=out)
        else:
            out.copy_(self.unscale(grad, examples))

    def is_finite(self, grad: Tensor) -> Tensor | None:
        """Return, under a loss scaler, whether a scaled gradient is finite, as a device value; otherwise None."""
        return None if self.scaler is None else torch.isfinite(grad).all()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Step the weights.

        Args:
            optimizer: The optimiser.

        Returns:
            Under a loss scaler, whether the step was taken, as a device value; otherwise None.
        """
        if self.scaler is None:
            optimizer.step()
            return None
        if isinstance(self.scaler, LossScaler):
            return self.scaler.step(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # The largest value, not the 2-norm: squares of scaled gradients may overflow although the gradients do not.
        is_taken = torch.isfinite(torch.nn.utils.get_total_norm(grads, norm_type=torch.inf))
        self.scaler.step(optimizer)
        self.scaler.update()
        return is_taken
