"""How a move runs on this device: precision, memory format, loss scaling."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deat.errors import UsageError, unknown
from deat.game.scaler import DeviceScaler
from deat.kernels import has_triton
from deat.modes import SMALL

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
ENGINES = ("auto", "eager", "graph", "compile")

Precision = Literal["fp32", "bf16", "fp16"]


def cpu_is_fast_at_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


def choose_precision(wanted: str, device: torch.device, num_parameters: int) -> Precision:
    """The precision to train in; "auto" is bf16 where the hardware is fast at it (on a CPU: and the network large)."""
    if wanted not in PRECISIONS:
        raise unknown("precision", wanted, PRECISIONS)
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError("precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'fp32'.")
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return "bf16" if device.type == "cpu" and num_parameters >= SMALL and cpu_is_fast_at_bf16() else "fp32"


def choose_records(wanted: str, device: torch.device, obstacle: str | None) -> tuple[bool, str]:
    """Whether to play moves as CUDA graphs, and what stands against it where they would be otherwise."""
    if wanted not in ENGINES:
        raise unknown("engine", wanted, ENGINES)
    if wanted == "graph" and device.type != "cuda":
        raise UsageError("engine 'graph' needs a CUDA device; use 'eager' or 'auto'.")
    if wanted == "eager" or device.type != "cuda":
        return False, ""
    if obstacle and wanted == "graph":
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
    compiles: bool = False

    def __post_init__(self) -> None:
        self.scaler: torch.amp.GradScaler | DeviceScaler | None = None
        if self.precision == "fp16":
            self.scaler = DeviceScaler(self.device) if self.records else torch.amp.GradScaler(self.device.type)

    @property
    def name(self) -> str:
        """What --engine calls it."""
        return "compile" if self.compiles else "graph" if self.records else "eager"

    @property
    def dtype(self) -> torch.dtype:
        """What networks compute in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    @property
    def remedy(self) -> str:
        """What may help where numbers stop being finite."""
        other = "" if self.precision == "fp32" else ", or train with precision fp32"
        return f"Lower the learning rate{other}."

    @property
    def fuses(self) -> bool:
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
        if isinstance(self.scaler, DeviceScaler):
            return self.scaler.step(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # The largest gradient, not their length: squares of scaled gradients may overflow by themselves.
        taken = torch.isfinite(torch.nn.utils.get_total_norm(grads, norm_type=torch.inf))
        self.scaler.step(optimizer)
        self.scaler.update()
        return taken
