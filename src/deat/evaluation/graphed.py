"""A network's forward and backward as CUDA graphs, a pair for each of a few batch sizes.

An eager call of a small network costs more on the host than on the device, and every new batch size costs a search for
convolutions. So batches are padded up to a size that was seen before; in eval mode an image's answer is its own.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EAGER = 2
"""How often a batch size comes up before it is worth a recording."""
SMALLEST = 32
Net = Callable[[Tensor], Tensor]


def padded_size(n: int) -> int:
    """The next of 32, 40, 48, 56, 64, 80, 96, 112, 128 …: at most a quarter more than n."""
    power = SMALLEST
    while 2 * power < n:
        power *= 2
    return next(power * quarters // 4 for quarters in (4, 5, 6, 7, 8) if power * quarters // 4 >= n)


class Graphed:
    """Calls a network on batches of any length, by its input differentiable; recordings share their memory.

    `recorded` is the network as recordings run it, such as compiled; None where it is as it is. `serial` counts
    forwards, so that a backward knows whether its forward's activations are still there.
    """

    def __init__(self, net: Net, recorded: Net | None = None) -> None:
        self.net, self.recorded = net, recorded or net
        self.serial = 0
        self._uses: Counter[torch.Size] = Counter()
        self._pairs: dict[torch.Size, _Pair] = {}
        self._pool: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        """The network's answer."""
        shape = torch.Size((padded_size(len(x)), *x.shape[1:]))
        self._uses[shape] += 1
        if self._uses[shape] <= EAGER:
            return self.net(_padded(x, shape))[: len(x)]
        if shape not in self._pairs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._pairs[shape] = _Pair(self.recorded, _padded(x, shape), self._pool)
        answer: Tensor = _Replay.apply(x, self._pairs[shape], self)  # type: ignore[no-untyped-call]
        return answer


class _Pair:
    """One batch size's recordings, and the tensors that they read and write."""

    def __init__(self, net: Net, x: Tensor, pool: Any) -> None:
        self.x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            self._warm_up(net)
            self.forth, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.forth, pool=pool):
                answer = net(self.x)
            self.slope = torch.zeros_like(answer)
            with torch.cuda.graph(self.back, pool=pool):
                (self.grad,) = torch.autograd.grad(answer, self.x, self.slope)
        self.answer = answer.detach()

    def _warm_up(self, net: Net) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            answer = net(self.x)
            torch.autograd.grad(answer, self.x, torch.zeros_like(answer))
        torch.cuda.current_stream().wait_stream(stream)

    def forward(self, x: Tensor) -> Tensor:
        """The answer to a batch, which may be shorter than the recording's."""
        with torch.no_grad():
            self.x[: len(x)].copy_(x)
        self.forth.replay()
        return self.answer[: len(x)].clone()

    def backward(self, slope: Tensor) -> Tensor:
        """The gradient by the last forward's batch."""
        self.slope.zero_()
        self.slope[: len(slope)].copy_(slope)
        self.back.replay()
        return self.grad[: len(slope)].clone()


class _Replay(torch.autograd.Function):
    """A recorded forward, whose backward is recorded too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pair: _Pair, owner: Graphed) -> Tensor:
        """The answer."""
        owner.serial += 1
        ctx.pair, ctx.owner, ctx.serial = pair, owner, owner.serial
        ctx.save_for_backward(x)
        return pair.forward(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        """The gradient by x; another forward since may have overwritten what it needs, which is then made again."""
        if ctx.owner.serial != ctx.serial:
            ctx.owner.serial += 1
            ctx.pair.forward(*ctx.saved_tensors)
        return ctx.pair.backward(slope), None, None


def _padded(x: Tensor, shape: torch.Size) -> Tensor:
    missing = shape[0] - len(x)
    return torch.cat((x, x[:1].expand(missing, *x.shape[1:]))) if missing else x
