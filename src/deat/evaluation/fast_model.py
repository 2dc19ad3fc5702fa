"""A model's quick twin, for attacks on a GPU: half precision or TF32, channels last. Nobody is judged by it.

An attack asks the twin for logits and gradients. What it claims to have fooled it asks the exact model, in float32.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from deat.engine.cuda_graphs import capture_graph, device_context, forbid_synchronisation, warm_up_stream
from deat.engine.kernels import has_triton
from deat.engine.kernels.graph_pass import fused_backend
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attacks import compute_gradient, is_correct

EAGER_CALLS_BEFORE_RECORDING = 1
"""How often a size comes up before it is worth a recording."""
MIN_RECORDED_BATCH, MAX_RECORDED_BATCH = 32, 1024
NetworkFn = Callable[[Tensor], Tensor]


def padded_size(n: int, is_remainder: bool = False) -> int:
    """The next of 32, 40, 48, 56, 64, 80, 96, 112, 128 …: at most a quarter more than n.

    What is left over beside whole parts is padded to a quarter, a half … of one: there a few images do not matter,
    and every size costs a recording.
    """
    if is_remainder:
        quarter = max(MIN_RECORDED_BATCH, MAX_RECORDED_BATCH // 4)
        return -(-n // quarter) * quarter
    power = MIN_RECORDED_BATCH
    while 2 * power < n:
        power *= 2
    return next(power * quarters // 4 for quarters in (4, 5, 6, 7, 8) if power * quarters // 4 >= n)


class GraphedNetwork:
    """Calls a network on batches of any length, by its input differentiable.

    The parts of a batch keep their activations apart from each other, each in a slot of its own. A network that cannot
    be recorded is called as it is.
    """

    def __init__(self, net: NetworkFn) -> None:
        self.net, self.records = net, True
        self._calls_by_shape: Counter[torch.Size] = Counter()
        self._slots: list[_GraphSlot] = []
        self._warmed_up: set[tuple[torch.Size, tuple[int, ...]]] = set()

    def __call__(self, x: Tensor) -> Tensor:
        """The network's answer."""
        parts = torch.split(x, MAX_RECORDED_BATCH)
        sizes = [padded_size(len(part), len(parts) > 1) for part in parts]
        # Whatever is no whole part goes to the first slot, wherever it stands: so each of its sizes is recorded once.
        slots = [number if len(part) == MAX_RECORDED_BATCH else 0 for number, part in enumerate(parts, 1)]
        answers = [self._ask(*how) for how in zip(parts, sizes, slots, strict=True)]
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _ask(self, x: Tensor, size: int, slot_index: int) -> Tensor:
        shape = torch.Size((size, *x.shape[1:]))
        self._calls_by_shape[shape] += 1
        if len(x) == 0 or not self.records:
            return self.net(x)
        if self._calls_by_shape[shape] <= EAGER_CALLS_BEFORE_RECORDING:
            return self.net(_pad_batch(x, shape))[: len(x)]
        while len(self._slots) <= slot_index:
            self._slots.append(_GraphSlot())
        slot = self._slots[slot_index]
        if shape not in slot.graphs_by_shape and not self._record(slot, _pad_batch(x, shape)):
            return self.net(x)
        answer: Tensor = _GraphedFunction.apply(x, slot.graphs_by_shape[shape], slot)  # type: ignore[no-untyped-call]
        return answer

    def _record(self, slot: "_GraphSlot", x: Tensor) -> bool:
        """Record a size, if that can be done."""
        try:
            with warnings.catch_warnings():  # torch's own thread says that it makes itself at home on the device
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
                kind = x.shape, x.stride()
                slot.graphs_by_shape[x.shape] = _GraphPair(self.net, x, slot.pool, warm_up=kind not in self._warmed_up)
                self._warmed_up.add(kind)
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be recorded, so attacks ask it eagerly: {reason}", stacklevel=2)
            self.records = False
        return self.records


class _GraphSlot:
    """Recordings that share their memory, a pair for each size.

    `serial` says whose activations are there: it counts forwards, and backwards, which write over what they have used.
    """

    def __init__(self) -> None:
        self.graphs_by_shape: dict[torch.Size, _GraphPair] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.activations_version = 0

    def run(self, pair: "_GraphPair", x: Tensor) -> None:
        """Run a forward, over whatever is there."""
        self.activations_version += 1
        pair.forward(x)


class _GraphPair:
    """One batch size's recordings, and the tensors that they read and write; a new size needs a warm-up before."""

    def __init__(self, net: NetworkFn, x: Tensor, pool: Any, warm_up: bool) -> None:
        self.x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            if warm_up:
                self._warm_up(net)
            self.forth, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with capture_graph(self.forth, x.device, pool):
                answer = net(self.x)
            self.slope = torch.zeros_like(answer)
            with capture_graph(self.back, x.device, pool):
                self.grad = compute_gradient(answer, self.x, self.slope)
        self.answer = answer.detach()

    def _warm_up(self, net: NetworkFn) -> None:
        with warm_up_stream(self.x.device):
            for how in (nullcontext(), forbid_synchronisation()):  # what is called first may have to be built
                with how:
                    answer = net(self.x)
                    compute_gradient(answer, self.x, torch.zeros_like(answer))

    def forward(self, x: Tensor) -> None:
        """Answer a batch, which may be shorter than the recording's."""
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.forth.replay()

    def backward(self, grad_output: Tensor) -> Tensor:
        """The gradient by the last forward's batch."""
        self.slope.zero_()
        self.slope[: len(grad_output)].copy_(grad_output)
        self.back.replay()
        return self.grad[: len(grad_output)].clone()


class _GraphedFunction(torch.autograd.Function):
    """A recorded forward, whose backward is recorded too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _GraphPair, slot: _GraphSlot) -> Tensor:
        """The answer."""
        slot.run(pair, x)
        ctx.pair, ctx.slot, ctx.activations_version = pair, slot, slot.activations_version
        ctx.save_for_backward(x)
        return pair.answer[: len(x)].clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """The gradient by x; what it needs is made again where another forward or backward since has overwritten it."""
        if ctx.slot.activations_version != ctx.activations_version:
            ctx.slot.run(ctx.pair, *ctx.saved_tensors)
        ctx.slot.activations_version += 1
        return ctx.pair.backward(grad_output), None, None


def _pad_batch(x: Tensor, shape: torch.Size) -> Tensor:
    """x with its first image again and again behind it, laid out in memory as x is."""
    missing = shape[0] - len(x)
    return (
        torch.cat((x, x[:1].expand(missing, *x.shape[1:]).clone(memory_format=_memory_format_of(x)))) if missing else x
    )


def _memory_format_of(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


ENGINES = ("auto", "eager", "graph", "compile")
COMPILE_MIN_PASSES = 3_000_000
"""Image passes from which a compiled twin earns back its compilation: ten seconds the first time, and it saves five in
1.4 million of them (docs/results/evaluation.md)."""
ATTACK_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_RELATIVE_LOGIT_ERROR = 0.05
"""How far the twin's logits may be from the model's, by length, before it is not asked at all."""
EXACT_BATCH_IMAGES = 256
GRADIENT_SCALE = 1024.0
"""What half precision's gradients are multiplied by on their way, so that small ones do not vanish."""


def choose_engine(wanted: str, device: torch.device, passes: int) -> str:
    """How the twin is asked: "auto" compiles it for work that is long enough to earn its compilation back."""
    if wanted not in ENGINES:
        raise unknown_name_error("engine", wanted, ENGINES)
    if wanted in ("graph", "compile") and device.type != "cuda":
        raise UsageError(f"engine {wanted!r} needs a CUDA device for an evaluation; use 'auto' or 'eager'.")
    if wanted != "auto":
        return wanted
    return "eager" if device.type != "cuda" else "compile" if passes >= COMPILE_MIN_PASSES else "graph"


def choose_attack_precision(wanted: str, device: torch.device) -> str:
    """The precision that attacks work in: "auto" is fp16 on a GPU, which rounds images no coarser than TF32."""
    if wanted not in ATTACK_PRECISIONS:
        raise unknown_name_error("precision", wanted, ATTACK_PRECISIONS)
    if wanted in ("tf32", "bf16", "fp16") and device.type != "cuda":
        raise UsageError(f"attacks in {wanted} need a CUDA device; use 'auto' or 'fp32'.")
    return ("fp16" if device.type == "cuda" else "fp32") if wanted == "auto" else wanted


class LowPrecisionModel(nn.Module):
    """A copy of a network in another precision, which answers in float32.

    It knows nobody who asks it, so recordings of it and their memory go as soon as nobody holds them.
    """

    def __init__(self, net: nn.Module, precision: str, compiled: bool) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self.precision, self.compiled = precision, compiled
        self._cast_weights()

    def _cast_weights(self) -> None:
        """Plain layers hold their weights as autocast would cast them, in every call."""
        for module in self.net.modules():
            if type(module) in (nn.Conv2d, nn.Linear) and self.precision in AUTOCAST_DTYPES:
                module.to(AUTOCAST_DTYPES[self.precision])

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        with self._autocast(x):
            logits: Tensor = self.net(x)
        return logits.float()

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_DTYPES.get(self.precision)
        return torch.autocast(x.device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()


def _compile_model(model: LowPrecisionModel) -> NetworkFn:
    """A twin compiled once for every length of batch, its batch norms by our own kernels."""
    compiled: NetworkFn = torch.compile(model, backend=fused_backend if has_triton() else "inductor")

    def call(x: Tensor) -> Tensor:
        """Ask the compiled twin, or the twin itself where it cannot be compiled."""
        torch._dynamo.mark_dynamic(x, 0)
        try:
            return compiled(x) if model.compiled else model(x)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be compiled, so it runs as it is: {reason}", stacklevel=2)
            model.compiled = False
            logits: Tensor = model(x)
            return logits

    return call


def _apply_engine(model: LowPrecisionModel, engine: str) -> NetworkFn:
    """A twin as it is, recorded, or compiled and recorded."""
    if engine == "eager":
        return model
    return GraphedNetwork(_compile_model(model) if engine == "compile" else model)


class FastModel(nn.Module):
    """The twin of an exact model: called like it, and differentiable by its input alone."""

    def __init__(self, net: nn.Module, exact_model: nn.Module, precision: str, engine: str) -> None:
        super().__init__()
        self.low_precision_model = LowPrecisionModel(net, precision, compiled=engine == "compile")
        self.ask = _apply_engine(self.low_precision_model, engine)
        self._exact_holder = (exact_model,)  # not a submodule: its modes are its own
        self.forwards = self.backwards = 0

    @property
    def exact_model(self) -> nn.Module:
        """The model that has the last word."""
        return self._exact_holder[0]

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, and could be."""
        return self.low_precision_model.compiled

    def forward(self, x: Tensor) -> Tensor:
        """The twin's logits, in float32."""
        self.forwards += len(x)
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        logits = self.ask(_scale_gradient(x, 1 / GRADIENT_SCALE))
        if logits.requires_grad:
            logits.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        return _scale_gradient(logits, GRADIENT_SCALE)

    def surely_correct(self, x: Tensor, y: Tensor) -> Tensor:
        """Which images the exact model classifies correctly, asked in batches of one size, each new one being dear."""
        with torch.no_grad(), full_precision():
            answers = [self._exact_logits(part) for part in torch.split(x, EXACT_BATCH_IMAGES)]
        return is_correct(torch.cat(answers), y) if answers else torch.zeros_like(y, dtype=torch.bool)

    def _exact_logits(self, x: Tensor) -> Tensor:
        missing = EXACT_BATCH_IMAGES - len(x)
        full = torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) if missing else x
        logits: Tensor = self.exact_model(full)
        return logits[: len(x)]

    def matches_exact(self, x: Tensor) -> bool:
        """Whether its logits are close enough to the exact model's for its gradients to be of use."""
        with torch.no_grad():
            found, exact = self(x), self.exact_model(x)
        distance = float((found - exact).norm() / exact.norm().clamp_min(1e-12))
        if not distance <= MAX_RELATIVE_LOGIT_ERROR:
            warnings.warn(
                f"in {self.low_precision_model.precision} the model's logits differ by {distance:.0%}, so attacks run in float32.",
                stacklevel=2,
            )
        return distance <= MAX_RELATIVE_LOGIT_ERROR

    def _count_backward(self, grad: Tensor) -> None:
        self.backwards += len(grad)


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """x itself."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, scaled; what overflowed on its way is large, not lost."""
        return torch.nan_to_num(grad * ctx.factor), None


def _scale_gradient(x: Tensor, factor: float) -> Tensor:
    found: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


@contextmanager
def full_precision(tf32: bool = False) -> Iterator[None]:
    """float32 without TF32 (or with it), whatever was set before, by torch's older interface or its newer one."""
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the newer one was used, and torch refuses to mix them
        units = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
        with _set_fp32_precision(units, "tf32" if tf32 else "ieee"):
            yield
        return
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        backends.cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = conv


@contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """float32 without TF32 and without a caller's autocast: what verdicts are given in."""
    with device_context(device), full_precision(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _set_fp32_precision(backends: tuple[Any, ...], precision: str) -> Iterator[None]:
    before = [unit.fp32_precision for unit in backends]
    try:
        for unit in backends:
            unit.fp32_precision = precision
        yield
    finally:
        for unit, held in zip(backends, before, strict=True):
            unit.fp32_precision = held
