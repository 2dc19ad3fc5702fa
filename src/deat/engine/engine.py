"""The engine of a training: device, precision, memory format, loss scaling, and whether to record or compile."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deat.engine.cpu_bf16_workarounds import FastBf16Functions, may_have_slow_bf16_functions
from deat.engine.kernels import has_triton
from deat.engine.loss_scaler import LossScaler
from deat.engine.precision import Precision
from deat.errors import UsageError, unknown_name_error

ENGINES = ("auto", "eager", "graph", "compile")


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
        self._uses_fast_bf16_functions = False
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
        on_cpu = self.device.type == "cpu" and self.precision == "bf16"
        self._uses_fast_bf16_functions = on_cpu and not self.use_compile and may_have_slow_bf16_functions(net)
        for p in net.parameters():
            if p.dim() == 4:
                p.data = p.data.contiguous(memory_format=self.memory_format)
        return net

    def to_memory_format(self, x: Tensor) -> Tensor:
        """Return a batch in this engine's memory format.

        Args:
            x: The batch, (B, ...).
        """
        return x.contiguous(memory_format=self.memory_format) if x.dim() == 4 else x.contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes."""
        if self.precision == "fp32":
            return nullcontext()
        autocast = torch.autocast(self.device.type, dtype=self.dtype)
        return _nested(autocast, FastBf16Functions()) if self._uses_fast_bf16_functions else autocast

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss scaled for backward.

        Args:
            loss: The loss, a scalar.
        """
        return self.scaler.scale(loss) if self.scaler else loss

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, scaled. Not by autograd.grad, for which DDP would not average them.

        Args:
            loss: The loss, a scalar.
        """
        torch.autograd.backward(self.scale(loss))

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
        """Write the result of `unscale` to `out`.

        Args:
            out: Where the result is written.
            grad: The scaled gradient.
            examples: See `unscale`.
        """
        if self.scaler is None:
            torch.mul(grad, examples, out=out)
        else:
            out.copy_(self.unscale(grad, examples))

    def is_finite(self, grad: Tensor) -> Tensor | None:
        """Return, under a loss scaler, whether a scaled gradient is finite, as a device value; otherwise None.

        Args:
            grad: The scaled gradient.

        Returns:
            The device value, or None.
        """
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
        is_taken = self.has_finite_gradients(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        return is_taken

    def has_finite_gradients(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return whether all gradients of an optimiser's weights are finite, as a device value.

        Args:
            optimizer: The optimiser.
        """
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # The largest value, not the 2-norm: squares of scaled gradients may overflow although the gradients do not.
        return torch.isfinite(torch.nn.utils.get_total_norm(grads, norm_type=torch.inf))


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
