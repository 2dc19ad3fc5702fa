"""Several processes that train or judge one network together, started by torchrun; alone, every part is the whole.

What they tell each other is numbers and JSON, never pickled objects.
"""

import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deat import errors
from deat.errors import DeatError, Interrupted, UsageError

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""How long processes wait for each other at the start."""
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long one may keep the others waiting; one that dies is noticed at once."""


@dataclass(frozen=True)
class BatchShard:
    """One process's part of every batch: row i belongs to process i mod size, whatever the batch's length."""

    rank: int = 0
    size: int = 1

    def rows(self, batch_size: int) -> slice:
        """Its rows of a batch; where none is left, the first one as a stand-in that counts nothing."""
        return slice(self.rank, None, self.size) if self.rank < batch_size else slice(0, 1)

    def count(self, batch_size: int) -> int:
        """How many of a batch's images are its own."""
        return len(range(self.rank, batch_size, self.size))


@dataclass(frozen=True)
class Distributed:
    """This process among those of its run: who it is, and how it agrees with the others.

    Every method must be called by all processes, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def initialize(cls, device: str = "auto") -> "Distributed":
        """The processes that torchrun started, joined: over gloo on CPUs, and NCCL for what lies on GPUs."""
        rank, size, local_rank = (int(os.environ.get(name, d)) for name, d in _TORCHRUN_VARIABLES)
        if is_process_group_initialized() or size == 1:
            return cls(rank, size, local_rank)
        backend = _choose_backend(device, local_rank)
        store, rank, size = next(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT))  # type: ignore[attr-defined]
        store = dist.PrefixStore(_agree_on_store_prefix(store, rank, size), store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        _message_stores.append(dist.PrefixStore("said", store))  # type: ignore[attr-defined]
        return cls(rank, size, local_rank)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def is_multiprocess(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def shard(self) -> BatchShard:
        """This process's part of a batch."""
        return BatchShard(self.rank, self.size)

    def all_gather(self, value: Any) -> list[Any]:
        """Everybody's JSON value, in the order of ranks."""
        if not self.is_multiprocess:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        found = [torch.zeros(max(map(int, lengths)), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(found, nn.functional.pad(data, (0, len(found[0]) - len(data))))
        return [json.loads(bytes(f[: int(n)].tolist())) for f, n in zip(found, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first process's JSON value."""
        return self.all_gather(value if self.is_main else None)[0]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Everybody's numbers added up in float64, in the order of ranks, so that all get the same bits."""
        return [sum(column) for column in zip(*self.all_gather(values), strict=True)]

    def all_reduce_any(self, flag: bool) -> bool:
        """Whether anybody says so."""
        if not self.is_multiprocess:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """What the first process's work gives, as JSON; where that fails, it fails alike in every process."""
        if not self.is_multiprocess:
            return function()
        value, failure = None, None
        if self.is_main:
            try:
                value = function()
            except DeatError as error:
                failure = error
        told = self.broadcast([value, failure and [type(failure).__name__, str(failure)]])
        if failure:
            raise failure
        if told[1]:
            raise getattr(errors, told[1][0], DeatError)(told[1][1])
        return told[0]

    def all_gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor of one kind, on the CPU, in the order of ranks; they may differ in shape."""
        own = tensor.detach().cpu().contiguous()
        if not self.is_multiprocess:
            return [own]
        data = own.reshape(-1).view(torch.uint8)
        shapes, lengths = zip(*self.all_gather([list(own.shape), len(data)]), strict=True)
        found = [data.new_zeros(max(lengths)) for _ in lengths]
        dist.all_gather(found, nn.functional.pad(data, (0, max(lengths) - len(data))))
        return [f[:n].view(own.dtype).view(s) for f, n, s in zip(found, lengths, shapes, strict=True)]

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Let one process of each machine do something alone, such as fill a cache, before its others do it too.

        Where it fails the others still have their turn: they then find the same mistake, and end alike.
        """
        if self.local_rank:
            self.all_reduce_any(False)
        try:
            yield
        finally:
            if not self.local_rank:
                self.all_reduce_any(False)

    def wrap_ddp(self, objective: nn.Module) -> nn.Module:
        """The objective with its gradients averaged over the processes in every backward."""
        if not self.is_multiprocess:
            return objective
        # Said of 1x1 kernels laid out channels last, whose bytes are the same in either layout.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        return DistributedDataParallel(objective, **_NO_BUFFER_SYNC)

    def to_sync_batch_norm(self, model: nn.Module) -> nn.Module:
        """The model with batch norms whose statistics are those of all processes' images."""
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model) if self.is_multiprocess else model

    def broadcast_model_buffers(self, model: nn.Module) -> None:
        """Give everybody the first process's buffers: each has batch-norm statistics of its own images."""
        for buffer in model.buffers() if self.is_multiprocess else ():
            dist.broadcast(buffer, 0)


SINGLE_PROCESS = Distributed()
"""One process, which needs nobody's agreement."""

_TORCHRUN_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
_BUFFER_SYNC_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # since torch 2.13, and before
_NO_BUFFER_SYNC: dict[str, Any] = {
    next(n for n in _BUFFER_SYNC_OPTIONS if n in signature(DistributedDataParallel).parameters): False
}
_message_stores: list[Any] = []


def get_message_store() -> Any:
    """Return the key-value store that all processes of the run share, to agree on which errors were printed.

    Returns:
        A `torch.distributed.Store`, or None for a single process. It still works after another process died.
    """
    return _message_stores[-1] if _message_stores else None


def is_process_group_initialized() -> bool:
    """Return True if this process joined a distributed run."""
    return dist.is_available() and dist.is_initialized()


def _agree_on_store_prefix(store: Any, rank: int, size: int) -> str:
    """A name that only the processes of this start know.

    torchrun keeps its store when it starts processes again, and whoever reads an address that a dead one left there
    waits in vain; its count of restarts differs between machines. So each asks the first by a name of its own.
    """
    name, deadline = secrets.token_hex(8), monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    if rank:
        store.set(f"ask/{rank}", name)
        found: str = store.get(f"answer/{name}").decode()
        store.set(f"heard/{found}/{rank}", "")
        return found
    while not store.check([f"heard/{name}/{other}" for other in range(1, size)]):
        if monotonic() > deadline:
            raise Interrupted(
                f"not all of {size} processes came within {RENDEZVOUS_TIMEOUT}; look at their own messages."
            )
        for other in range(1, size):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        sleep(0.02)
    return name


def _choose_backend(device: str, local_rank: int) -> str:
    """gloo, and for a GPU NCCL beside it, this process's GPU being the one of its local rank."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "gloo"
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"device {device!r} is for a single process; with several each takes the GPU of its local rank. "
            "Use 'cuda', 'cpu' or 'auto'."
        )
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}. "
            "Start as many processes as GPUs (--nproc-per-node), or use --device cpu."
        )
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"
