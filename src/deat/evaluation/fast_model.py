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

from deat.engine.cuda_graphs import on, recording, refusing_waits, warming_up
from deat.engine.kernels import has_triton
from deat.engine.kernels.graph_pass import fused
from deat.errors import UsageError, unknown
from deat.evaluation.attacks import gradient, is_right

EAGER = 1
"""How often a size comes up before it is worth a recording."""
SMALLEST, LARGEST = 32, 1024
Net = Callable[[Tensor], Tensor]


def padded_size(n: int, among_others: bool = False) -> int:
    """The next of 32, 40, 48, 56, 64, 80, 96, 112, 128 …: at most a quarter more than n.

    What is left over beside whole parts is padded to a quarter, a half … of one: there a few images do not matter,
    and every size costs a recording.
    """
    if among_others:
        quarter = max(SMALLEST, LARGEST // 4)
        return -(-n // quarter) * quarter
    power = SMALLEST
    while 2 * power < n:
        power *= 2
    return next(power * quarters // 4 for quarters in (4, 5, 6, 7, 8) if power * quarters // 4 >= n)


class Graphed:
    """Calls a network on batches of any length, by its input differentiable.

    The parts of a batch keep their activations apart from each other, each in a slot of its own. A network that cannot
    be recorded is called as it is.
    """

    def __init__(self, net: Net) -> None:
        self.net, self.records = net, True
        self._uses: Counter[torch.Size] = Counter()
        self._slots: list[_Slot] = []
        self._warm: set[tuple[torch.Size, tuple[int, ...]]] = set()

    def __call__(self, x: Tensor) -> Tensor:
        """The network's answer."""
        parts = torch.split(x, LARGEST)
        sizes = [padded_size(len(part), len(parts) > 1) for part in parts]
        # Whatever is no whole part goes to the first slot, wherever it stands: so each of its sizes is recorded once.
        slots = [number if len(part) == LARGEST else 0 for number, part in enumerate(parts, 1)]
        answers = [self._ask(*how) for how in zip(parts, sizes, slots, strict=True)]
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _ask(self, x: Tensor, size: int, number: int) -> Tensor:
        shape = torch.Size((size, *x.shape[1:]))
        self._uses[shape] += 1
        if len(x) == 0 or not self.records:
            return self.net(x)
        if self._uses[shape] <= EAGER:
            return self.net(_padded(x, shape))[: len(x)]
        while len(self._slots) <= number:
            self._slots.append(_Slot())
        slot = self._slots[number]
        if shape not in slot.pairs and not self._record(slot, _padded(x, shape)):
            return self.net(x)
        answer: Tensor = _Replay.apply(x, slot.pairs[shape], slot)  # type: ignore[no-untyped-call]
        return answer

    def _record(self, slot: "_Slot", x: Tensor) -> bool:
        """Record a size, if that can be done."""
        try:
            with warnings.catch_warnings():  # torch's own thread says that it makes itself at home on the device
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
                kind = x.shape, x.stride()
                slot.pairs[x.shape] = _Pair(self.net, x, slot.pool, warm_up=kind not in self._warm)
                self._warm.add(kind)
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be recorded, so attacks ask it eagerly: {reason}", stacklevel=2)
            self.records = False
        return self.records


class _Slot:
    """Recordings that share their memory, a pair for each size.

    `serial` says whose activations are there: it counts forwards, and backwards, which write over what they have used.
    """

    def __init__(self) -> None:
        self.pairs: dict[torch.Size, _Pair] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.serial = 0

    def run(self, pair: "_Pair", x: Tensor) -> None:
        """Run a forward, over whatever is there."""
        self.serial += 1
        pair.forward(x)


class _Pair:
    """One batch size's recordings, and the tensors that they read and write; a new size needs a warm-up before."""

    def __init__(self, net: Net, x: Tensor, pool: Any, warm_up: bool) -> None:
        self.x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            if warm_up:
                self._warm_up(net)
            self.forth, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with recording(self.forth, x.device, pool):
                answer = net(self.x)
            self.slope = torch.zeros_like(answer)
            with recording(self.back, x.device, pool):
                self.grad = gradient(answer, self.x, self.slope)
        self.answer = answer.detach()

    def _warm_up(self, net: Net) -> None:
        with warming_up(self.x.device):
            for how in (nullcontext(), refusing_waits()):  # what is called first may have to be built
                with how:
                    answer = net(self.x)
                    gradient(answer, self.x, torch.zeros_like(answer))

    def forward(self, x: Tensor) -> None:
        """Answer a batch, which may be shorter than the recording's."""
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.forth.replay()

    def backward(self, slope: Tensor) -> Tensor:
        """The gradient by the last forward's batch."""
        self.slope.zero_()
        self.slope[: len(slope)].copy_(slope)
        self.back.replay()
        return self.grad[: len(slope)].clone()


class _Replay(torch.autograd.Function):
    """A recorded forward, whose backward is recorded too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _Pair, slot: _Slot) -> Tensor:
        """The answer."""
        slot.run(pair, x)
        ctx.pair, ctx.slot, ctx.serial = pair, slot, slot.serial
        ctx.save_for_backward(x)
        return pair.answer[: len(x)].clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        """The gradient by x; what it needs is made again where another forward or backward since has overwritten it."""
        if ctx.slot.serial != ctx.serial:
            ctx.slot.run(ctx.pair, *ctx.saved_tensors)
        ctx.slot.serial += 1
        return ctx.pair.backward(slope), None, None


def _padded(x: Tensor, shape: torch.Size) -> Tensor:
    """x with its first image again and again behind it, laid out in memory as x is."""
    missing = shape[0] - len(x)
    return torch.cat((x, x[:1].expand(missing, *x.shape[1:]).clone(memory_format=_layout(x)))) if missing else x


def _layout(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


ENGINES = ("auto", "eager", "graph", "compile")
WORTH_COMPILING = 3_000_000
"""Image passes from which a compiled twin earns back its compilation: ten seconds the first time, and it saves five in
1.4 million of them (docs/results/evaluation.md)."""
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AGREE = 0.05
"""How far the twin's logits may be from the model's, by length, before it is not asked at all."""
CHUNK = 256
SCALE = 1024.0
"""What half precision's gradients are multiplied by on their way, so that small ones do not vanish."""


def choose_engine(wanted: str, device: torch.device, passes: int) -> str:
    """How the twin is asked: "auto" compiles it for work that is long enough to earn its compilation back."""
    if wanted not in ENGINES:
        raise unknown("engine", wanted, ENGINES)
    if wanted in ("graph", "compile") and device.type != "cuda":
        raise UsageError(f"engine {wanted!r} needs a CUDA device for an evaluation; use 'auto' or 'eager'.")
    if wanted != "auto":
        return wanted
    return "eager" if device.type != "cuda" else "compile" if passes >= WORTH_COMPILING else "graph"


def choose_quick(wanted: str, device: torch.device) -> str:
    """The precision that attacks work in: "auto" is fp16 on a GPU, which rounds images no coarser than TF32."""
    if wanted not in PRECISIONS:
        raise unknown("precision", wanted, PRECISIONS)
    if wanted in ("tf32", "bf16", "fp16") and device.type != "cuda":
        raise UsageError(f"attacks in {wanted} need a CUDA device; use 'auto' or 'fp32'.")
    return ("fp16" if device.type == "cuda" else "fp32") if wanted == "auto" else wanted


class Twin(nn.Module):
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
            if type(module) in (nn.Conv2d, nn.Linear) and self.precision in DTYPES:
                module.to(DTYPES[self.precision])

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        with self._autocast(x):
            logits: Tensor = self.net(x)
        return logits.float()

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        dtype = DTYPES.get(self.precision)
        return torch.autocast(x.device.type, dtype=dtype, cache_enabled=False) if dtype else nullcontext()


def _compiled(twin: Twin) -> Net:
    """A twin compiled once for every length of batch, its batch norms by our own kernels."""
    compiled: Net = torch.compile(twin, backend=fused if has_triton() else "inductor")

    def call(x: Tensor) -> Tensor:
        """Ask the compiled twin, or the twin itself where it cannot be compiled."""
        torch._dynamo.mark_dynamic(x, 0)
        try:
            return compiled(x) if twin.compiled else twin(x)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).split("\n")[0]
            warnings.warn(f"this network cannot be compiled, so it runs as it is: {reason}", stacklevel=2)
            twin.compiled = False
            logits: Tensor = twin(x)
            return logits

    return call


def _asked(twin: Twin, engine: str) -> Net:
    """A twin as it is, recorded, or compiled and recorded."""
    if engine == "eager":
        return twin
    return Graphed(_compiled(twin) if engine == "compile" else twin)


class Quick(nn.Module):
    """The twin of an exact model: called like it, and differentiable by its input alone."""

    def __init__(self, net: nn.Module, exact: nn.Module, precision: str, engine: str) -> None:
        super().__init__()
        self.twin = Twin(net, precision, compiled=engine == "compile")
        self.ask = _asked(self.twin, engine)
        self._exact = (exact,)  # not a submodule: its modes are its own
        self.forwards = self.backwards = 0

    @property
    def exact(self) -> nn.Module:
        """The model that has the last word."""
        return self._exact[0]

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, and could be."""
        return self.twin.compiled

    def forward(self, x: Tensor) -> Tensor:
        """The twin's logits, in float32."""
        self.forwards += len(x)
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
        logits = self.ask(_scaled(x, 1 / SCALE))
        if logits.requires_grad:
            logits.register_hook(self._passed_back)  # type: ignore[no-untyped-call]
        return _scaled(logits, SCALE)

    def surely_correct(self, x: Tensor, y: Tensor) -> Tensor:
        """Which images the exact model classifies correctly, asked in batches of one size, each new one being dear."""
        with torch.no_grad(), full_precision():
            answers = [self._surely(part) for part in torch.split(x, CHUNK)]
        return is_right(torch.cat(answers), y) if answers else torch.zeros_like(y, dtype=torch.bool)

    def _surely(self, x: Tensor) -> Tensor:
        missing = CHUNK - len(x)
        full = torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) if missing else x
        logits: Tensor = self.exact(full)
        return logits[: len(x)]

    def agrees(self, x: Tensor) -> bool:
        """Whether its logits are close enough to the exact model's for its gradients to be of use."""
        with torch.no_grad():
            found, exact = self(x), self.exact(x)
        distance = float((found - exact).norm() / exact.norm().clamp_min(1e-12))
        if not distance <= AGREE:
            warnings.warn(
                f"in {self.twin.precision} the model's logits differ by {distance:.0%}, so attacks run in float32.",
                stacklevel=2,
            )
        return distance <= AGREE

    def _passed_back(self, grad: Tensor) -> None:
        self.backwards += len(grad)


class _Scaled(torch.autograd.Function):
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


def _scaled(x: Tensor, factor: float) -> Tensor:
    found: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return found


@contextmanager
def full_precision(tf32: bool = False) -> Iterator[None]:
    """float32 without TF32 (or with it), whatever was set before, by torch's older interface or its newer one."""
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the newer one was used, and torch refuses to mix them
        units = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
        with _set_units(units, "tf32" if tf32 else "ieee"):
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
def exactly(device: torch.device) -> Iterator[None]:
    """float32 without TF32 and without a caller's autocast: what verdicts are given in."""
    with on(device), full_precision(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _set_units(units: tuple[Any, ...], precision: str) -> Iterator[None]:
    before = [unit.fp32_precision for unit in units]
    try:
        for unit in units:
            unit.fp32_precision = precision
        yield
    finally:
        for unit, held in zip(units, before, strict=True):
            unit.fp32_precision = held
