"""A network's forward and backward as CUDA graphs, a pair for each of a few batch sizes.

An eager call of a small network costs more on the host than on the device, and every new batch size costs a search for
convolutions. So batches are cut into parts of one size, and what is left over is padded up to a size that was seen
before; in eval mode an image's answer is its own.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from deat.evaluation.attacks import gradient
from deat.recording import recording, refusing_waits, warming_up

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
