"""A fast low-precision copy of a model for attacks: half precision or TF32, channels last, on a GPU as CUDA graphs.

Attacks take logits and gradients from the fast model. Only the exact model, in float32, decides whether an image is
classified correctly.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deat.engine.cuda_graphs import capture_graph, forbid_synchronisation, warm_up_stream
from deat.engine.engine import ENGINES
from deat.engine.kernels import has_triton
from deat.engine.kernels.graph_pass import fused_backend
from deat.engine.precision import has_native_cpu_bf16
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attacks import compute_gradient
from deat.models.normalize import Normalize
from deat.utils.float32_precision import full_precision
from deat.utils.torch_contexts import choose_threads

EAGER_CALLS_BEFORE_RECORDING = 1
"""A batch size is recorded once it has come up more often than this."""
MIN_RECORDED_BATCH, MAX_RECORDED_BATCH = 32, 1024
COMPILE_MIN_PASSES = 3_000_000
"""Image passes from which compiling saves time: it takes ten seconds the first time, and saves five in 1.4 million passes
(docs/results/evaluation.md)."""
ATTACK_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
MIN_CPU_BF16_WEIGHTS = 200_000
"""A network with fewer weights in its layers is attacked in float32 on a CPU: it is so small that casts cost more."""
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_RELATIVE_LOGIT_ERROR = 0.05
"""The fast model is used only if its logits differ from the exact ones by no more than this, as a share of their norm."""
EXACT_BATCH_IMAGES = 256
"""Images in a batch of the exact model."""
GRADIENT_SCALE = 1024.0
"""Gradients are multiplied by this on their way back, so that small ones do not underflow in half precision."""
NetworkFn = Callable[[Tensor], Tensor]
"""Images to logits."""


def choose_attack_engine(wanted: str, device: torch.device, passes: int) -> str:
    """Choose how attacks run the model on a device.

    Args:
        wanted: "auto", "eager", "graph" or "compile".
        device: The model's device.
        passes: About how many image passes the evaluation makes; "auto" compiles only for long ones.

    Returns:
        "eager", "graph" or "compile".

    Raises:
        UsageError: The engine is unknown, or needs a CUDA device and there is none.
    """
    if wanted not in ENGINES:
        raise unknown_name_error("engine", wanted, ENGINES)
    if wanted in ("graph", "compile") and device.type != "cuda":
        raise UsageError(f"engine {wanted!r} needs a CUDA device for an evaluation; use 'auto' or 'eager'.")
    if wanted != "auto":
        return wanted
    return "eager" if device.type != "cuda" else "compile" if passes >= COMPILE_MIN_PASSES else "graph"


def choose_attack_precision(wanted: str, device: torch.device, num_weights: int = 0) -> str:
    """Choose the precision that attacks compute in.

    Args:
        wanted: "auto", "fp32", "tf32", "bf16" or "fp16".
        device: The model's device.
        num_weights: The number of weights in the model's layers, from `count_layer_weights`; 0 if it must not compute
            in half precision unless that is wanted.

    Returns:
        One of these other than "auto", which is fp16 on a GPU (it rounds images no more coarsely than TF32), bf16 for
        all but small networks on a CPU that multiplies it natively, and fp32 elsewhere.

    Raises:
        UsageError: The precision is unknown, or needs a CUDA device and there is none.
    """
    if wanted not in ATTACK_PRECISIONS:
        raise unknown_name_error("precision", wanted, ATTACK_PRECISIONS)
    if wanted in ("tf32", "fp16") and device.type != "cuda":
        raise UsageError(f"attacks in {wanted} need a CUDA device; use 'auto', 'bf16' or 'fp32'.")
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "fp16"
    is_fast = device.type == "cpu" and num_weights >= MIN_CPU_BF16_WEIGHTS and has_native_cpu_bf16()
    return "bf16" if is_fast else "fp32"


def count_layer_weights(net: nn.Module) -> int:
    """Return the number of weights of a network's convolutions and linear layers."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return sum(module.weight.numel() for module in net.modules() if isinstance(module, layers))


def choose_attack_threads(net: nn.Module) -> int:
    """Return how many CPU threads attacks use: one for a small network, which a second thread makes slower."""
    is_small = count_layer_weights(net) < MIN_CPU_BF16_WEIGHTS
    return choose_threads(net) if is_small else torch.get_num_threads()


class PassCounter(nn.Module):
    """Base of the models that count the images passed through them.

    Attributes:
        forwards: Images passed forward so far.
        backwards: Images passed backward so far.
        block_images: Images in the block that is attacked, as many as a batch may have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = self.block_images = 0

    def _count(self, logits: Tensor) -> Tensor:
        """Count the forward pass that made these logits now, and its backward pass when it is made."""
        self.forwards += len(logits)
        if logits.requires_grad:
            logits.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        return logits

    def _count_backward(self, grad: Tensor) -> None:
        self.backwards += len(grad)


class CountingModel(PassCounter):
    """A model that counts the images which pass through it.

    Args:
        net: The model to call.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.training = net.training  # train() would change the net's submodules too

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's logits."""
        return self._count(self.net(x))


class FastModel(PassCounter):
    """A low-precision copy of a model, called like it and differentiable with respect to its input only.

    Args:
        net: The model to copy.
        exact_model: The model that decides whether an image is classified correctly; may count its passes.
        precision: "fp32", "tf32", "bf16" or "fp16".
        engine: "eager", "graph" or "compile".
    """

    def __init__(self, net: nn.Module, exact_model: nn.Module, precision: str, engine: str) -> None:
        super().__init__()
        self.low_precision_model = LowPrecisionModel(net, precision, compiled=engine == "compile")
        self.forward_fn = _apply_engine(self.low_precision_model, engine)
        self._exact_holder = (exact_model,)  # in a tuple, or it would be a submodule and share this model's mode

    @property
    def exact_model(self) -> nn.Module:
        """The model that decides whether an image is classified correctly."""
        return self._exact_holder[0]

    @property
    def compiled(self) -> bool:
        """Whether the copy is compiled, which may have failed."""
        return self.low_precision_model.compiled

    def forward(self, x: Tensor) -> Tensor:
        """Return the copy's logits, in float32."""
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        if x.device.type == "cpu":  # which has no fp16, and the range of bf16 is that of float32
            return self._count(self.forward_fn(x))
        logits = self.forward_fn(_scale_gradient(x, 1 / GRADIENT_SCALE))
        return _scale_gradient(self._count(logits), GRADIENT_SCALE)

    def exact_outputs(self, x: Tensor) -> Tensor:
        """Return the exact model's logits, without gradients.

        On a GPU batches have one fixed size, because the first batch of each new size is slow there.
        """
        with torch.no_grad(), full_precision():
            return torch.cat([self._exact_logits(part) for part in torch.split(x, EXACT_BATCH_IMAGES)])

    def _exact_logits(self, x: Tensor) -> Tensor:
        missing = EXACT_BATCH_IMAGES - len(x) if x.device.type == "cuda" else 0
        padded = torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) if missing else x
        logits: Tensor = self.exact_model(padded)
        return logits[: len(x)]

    def matches_exact(self, x: Tensor) -> bool:
        """Return whether the logits are close enough to the exact ones for attacks to use them; warn if not."""
        try:
            with torch.no_grad():
                logits, exact_logits = self(x), self.exact_model(x)
        except RuntimeError as failure:  # an operation that has no half precision here
            reason = str(failure).split("\n")[0]
            warnings.warn(f"attacks run in float32, since the model fails in lower precision: {reason}", stacklevel=2)
            return False
        error = float((logits - exact_logits).norm() / exact_logits.norm().clamp_min(1e-12))
        matches = error <= MAX_RELATIVE_LOGIT_ERROR  # a NaN does not match
        if not matches:
            warnings.warn(
                f"the model's logits in {self.low_precision_model.precision} are off by {error:.0%}, so attacks run in float32.",
                stacklevel=2,
            )
        return matches


class LowPrecisionModel(nn.Module):
    """A copy of a network that computes in another precision and returns float32 logits.

    It holds no reference to its `FastModel`, so that graphs and their memory are freed with the last user.

    Args:
        net: The network to copy.
        precision: "fp32", "tf32", "bf16" or "fp16".
        compiled: Whether the copy will be compiled.
    """

    def __init__(self, net: nn.Module, precision: str, compiled: bool) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self.precision, self.compiled = precision, compiled
        self._cast_weights()
        if all(parameter.device.type == "cpu" for parameter in self.net.parameters()):
            _use_channels_last_layers(self.net)

    def _cast_weights(self) -> None:
        """Cast the weights that autocast would otherwise cast in every call."""
        for module in self.net.modules():
            if type(module) in (nn.Conv2d, nn.Linear) and self.precision in AUTOCAST_DTYPES:
                module.to(AUTOCAST_DTYPES[self.precision])

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, in float32."""
        with self._autocast(x):
            logits: Tensor = self.net(x)
        return logits.float()

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(x.device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()


class _ChannelsLastNormalize(nn.Module):
    """The normalisation of images, by one number for each pixel: broadcasting three in channels-last order is slow on a CPU."""

    def __init__(self, layer: Normalize) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns, bit for bit."""
        if x.dim() != 4:
            normalized: Tensor = self.layer(x)
            return normalized
        mean, std = (
            values.expand(1, *x.shape[1:]).contiguous(memory_format=torch.channels_last)
            for values in (self.layer.mean, self.layer.std)
        )
        normalized = (x - mean) / std
        return normalized


class _ChannelsLastPool(nn.Module):
    """Average pooling to one pixel, whose gradient is in channels-last order: other layers are slow with another order."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the average of each channel, (B, C, 1, 1)."""
        if x.dim() != 4:
            return F.adaptive_avg_pool2d(x, 1)
        return x.permute(0, 2, 3, 1).mean((1, 2))[:, :, None, None]


def _use_channels_last_layers(net: nn.Module) -> None:
    """Replace layers that are slow in channels-last order on a CPU, in place."""
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
                continue
            if type(layer) is Normalize:
                setattr(parent, name, _ChannelsLastNormalize(layer))
            elif type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
                setattr(parent, name, _ChannelsLastPool())


def _apply_engine(model: LowPrecisionModel, engine: str) -> NetworkFn:
    if engine == "eager":
        return model
    return GraphedNetwork(_compile_model(model) if engine == "compile" else model)


def _compile_model(model: LowPrecisionModel) -> NetworkFn:
    """Compile a model once for all batch sizes, with deat's batch norm kernels where Triton is installed."""
    compiled: NetworkFn = torch.compile(model, backend=fused_backend if has_triton() else "inductor")

    def call(x: Tensor) -> Tensor:
        """Call the compiled model, or the model itself if it cannot be compiled."""
        torch._dynamo.mark_dynamic(x, 0)
        try:
            return compiled(x) if model.compiled else model(x)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be compiled, so attacks run it uncompiled: {reason}", stacklevel=2)
            model.compiled = False
            logits: Tensor = model(x)
            return logits

    return call


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Return x."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the scaled gradient, with overflow replaced by large finite numbers."""
        return torch.nan_to_num(grad * ctx.factor), None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    output: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return output


class GraphedNetwork:
    """A network that is called through CUDA graphs, on batches of any length, and differentiable by its input.

    A batch is split into parts of at most `MAX_RECORDED_BATCH` images. Each part has a slot with its own memory for
    activations, so that their backward passes do not disturb each other. A network that cannot be recorded is called
    eagerly.

    Args:
        net: The network, or a function that calls it.
    """

    def __init__(self, net: NetworkFn) -> None:
        self.net, self.can_record = net, True
        self._calls_by_shape: Counter[torch.Size] = Counter()
        self._slots: list[_GraphSlot] = []
        self._warmed_up: set[tuple[torch.Size, tuple[int, ...]]] = set()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the network's logits."""
        parts = torch.split(x, MAX_RECORDED_BATCH)
        sizes = [padded_size(len(part), len(parts) > 1) for part in parts]
        # A part that is not full always has slot 0, so that each of its sizes is recorded only once.
        slots = [index if len(part) == MAX_RECORDED_BATCH else 0 for index, part in enumerate(parts, 1)]
        logits = [self._forward_part(*arguments) for arguments in zip(parts, sizes, slots, strict=True)]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _forward_part(self, x: Tensor, size: int, slot_index: int) -> Tensor:
        shape = torch.Size((size, *x.shape[1:]))
        self._calls_by_shape[shape] += 1
        if len(x) == 0 or not self.can_record:
            return self.net(x)
        if self._calls_by_shape[shape] <= EAGER_CALLS_BEFORE_RECORDING:
            return self.net(_pad_batch(x, shape))[: len(x)]
        while len(self._slots) <= slot_index:
            self._slots.append(_GraphSlot())
        slot = self._slots[slot_index]
        if shape not in slot.graphs_by_shape and not self._try_record(slot, _pad_batch(x, shape)):
            return self.net(x)
        logits: Tensor = _GraphedFunction.apply(x, slot.graphs_by_shape[shape], slot)  # type: ignore[no-untyped-call]
        return logits

    def _try_record(self, slot: "_GraphSlot", x: Tensor) -> bool:
        """Record a batch shape; return False if that is not possible."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch's thread creates its context
                layout = x.shape, x.stride()
                slot.graphs_by_shape[x.shape] = _GraphPair(
                    self.net, x, slot.pool, warm_up=layout not in self._warmed_up
                )
                self._warmed_up.add(layout)
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be recorded, so attacks run it eagerly: {reason}", stacklevel=2)
            self.can_record = False
        return self.can_record


def padded_size(n: int, is_remainder: bool = False) -> int:
    """Return the batch size that a batch of n images is padded to.

    Args:
        n: The number of images.
        is_remainder: Whether the batch is one of several parts. Such parts have sizes in steps of a quarter of
            `MAX_RECORDED_BATCH`, because every size costs a recording and a few images more do not matter.

    Returns:
        The next of 32, 40, 48, 56, 64, 80, 96, 112, 128, ...: at most a quarter more than n.
    """
    if is_remainder:
        quarter = max(MIN_RECORDED_BATCH, MAX_RECORDED_BATCH // 4)
        return -(-n // quarter) * quarter
    power = MIN_RECORDED_BATCH
    while 2 * power < n:
        power *= 2
    return next(power * quarters // 4 for quarters in (4, 5, 6, 7, 8) if power * quarters // 4 >= n)


class _GraphSlot:
    """Graphs of different batch shapes that share one memory pool, so only one of them has its activations there.

    `activations_version` counts forward and backward passes; a backward pass also overwrites the activations.
    """

    def __init__(self) -> None:
        self.graphs_by_shape: dict[torch.Size, _GraphPair] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.activations_version = 0

    def forward(self, graphs: "_GraphPair", x: Tensor) -> None:
        """Run a forward pass, which overwrites the activations in the pool."""
        self.activations_version += 1
        graphs.forward(x)


class _GraphPair:
    """The forward and backward graphs of one batch shape, and the tensors that they read and write."""

    def __init__(self, net: NetworkFn, x: Tensor, pool: Any, warm_up: bool) -> None:
        self.x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            if warm_up:
                self._warm_up(net)
            self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with capture_graph(self.forward_graph, x.device, pool):
                logits = net(self.x)
            self.grad_output = torch.zeros_like(logits)
            with capture_graph(self.backward_graph, x.device, pool):
                self.grad = compute_gradient(logits, self.x, self.grad_output)
        self.logits = logits.detach()

    def _warm_up(self, net: NetworkFn) -> None:
        with warm_up_stream(self.x.device):
            for context in (nullcontext(), forbid_synchronisation()):  # the first call may build kernels, and wait
                with context:
                    logits = net(self.x)
                    compute_gradient(logits, self.x, torch.zeros_like(logits))

    def forward(self, x: Tensor) -> None:
        """Compute the logits of a batch, which may be shorter than the recorded one."""
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.forward_graph.replay()

    def backward(self, grad_output: Tensor) -> Tensor:
        """Return the gradient with respect to the batch of the last forward pass."""
        self.grad_output.zero_()
        self.grad_output[: len(grad_output)].copy_(grad_output)
        self.backward_graph.replay()
        return self.grad[: len(grad_output)].clone()


class _GraphedFunction(torch.autograd.Function):
    """A forward pass by a recorded graph, whose backward pass is recorded too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graphs: _GraphPair, slot: _GraphSlot) -> Tensor:
        """Return the logits."""
        slot.forward(graphs, x)
        ctx.graphs, ctx.slot, ctx.activations_version = graphs, slot, slot.activations_version
        ctx.save_for_backward(x)
        return graphs.logits[: len(x)].clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient with respect to x, after another forward pass if the activations were overwritten since."""
        if ctx.slot.activations_version != ctx.activations_version:
            ctx.slot.forward(ctx.graphs, *ctx.saved_tensors)
        ctx.slot.activations_version += 1
        return ctx.graphs.backward(grad_output), None, None


def _pad_batch(x: Tensor, shape: torch.Size) -> Tensor:
    """Repeat the first image at the end of a batch, keeping the batch's memory format."""
    missing = shape[0] - len(x)
    if not missing:
        return x
    return torch.cat((x, x[:1].expand(missing, *x.shape[1:]).clone(memory_format=_memory_format_of(x))))


def _memory_format_of(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
