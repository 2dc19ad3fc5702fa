"""Training and evaluation in several processes, started by torchrun.

Without torchrun there is one process, and every function here works on it alone. The processes exchange tensors and
JSON, never pickled objects.
"""

import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
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
"""How long processes wait for one that is slow. One that dies is noticed at once."""


@dataclass(frozen=True)
class BatchShard:
    """The rows of every batch that one process computes: row i belongs to process i mod size.

    Attributes:
        rank: The number of the process.
        size: How many processes there are.
    """

    rank: int = 0
    size: int = 1

    def rows(self, batch_size: int) -> slice:
        """Return the rows of this process in a batch.

        Args:
            batch_size: The length of the whole batch, over all processes.

        Returns:
            The rows. A process without any gets the first row, whose result is not counted.
        """
        return slice(self.rank, None, self.size) if self.rank < batch_size else slice(0, 1)

    def count(self, batch_size: int) -> int:
        """Return how many rows of a batch belong to this process."""
        return len(range(self.rank, batch_size, self.size))


@dataclass(frozen=True)
class Distributed:
    """This process among those of its run, and how they communicate.

    All processes must call the same methods in the same order.

    Attributes:
        rank: The number of this process.
        size: How many processes there are.
        local_rank: The number of this process on its machine.

    Example:
        >>> distributed = deat.Distributed.initialize()
        >>> deat.fit(model, data, distributed=distributed)
        >>> if distributed.is_main:
        ...     torch.save(model.state_dict(), "weights.pt")
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def initialize(cls, device: str = "auto") -> "Distributed":
        """Connect the processes that torchrun started, with gloo for tensors on CPUs and NCCL for those on GPUs.

        Args:
            device: "cpu", "cuda" or "auto". On GPUs, each process takes that of its local rank.

        Returns:
            This process. It is the only one if torchrun did not start it.

        Raises:
            UsageError: If the device is for a single process, there are fewer GPUs than processes, or variables that
                torchrun sets are missing or have no meaning.
            Interrupted: If not all processes connect in time.
        """
        rank, size, local_rank = _read_torchrun_variables()
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
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    @property
    def is_multiprocess(self) -> bool:
        """Whether there are several processes."""
        return self.size > 1

    @property
    def shard(self) -> BatchShard:
        """The rows of every batch that this process computes."""
        return BatchShard(self.rank, self.size)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the JSON values of all processes, in the order of ranks.

        Args:
            value: This process's value.
        """
        if not self.is_multiprocess:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        texts = [torch.zeros(max(map(int, lengths)), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(texts, nn.functional.pad(data, (0, len(texts[0]) - len(data))))
        return [json.loads(bytes(text[: int(n)].tolist())) for text, n in zip(texts, lengths, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Return the JSON value of the first process.

        Args:
            value: The value; that of other processes than the first is not used.
        """
        return self.all_gather_json(value if self.is_main else None)[0]

    def all_reduce_sum(self, values: list[float]) -> list[float]:
        """Add up the numbers of all processes in float64, in the order of ranks, so that all get the same bits.

        Args:
            values: This process's numbers.

        Returns:
            The sums.
        """
        return [sum(column) for column in zip(*self.all_gather_json(values), strict=True)]

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, on the device and without reading it.

        Args:
            tensor: This process's tensor.
        """
        if not self.is_multiprocess:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def all_reduce_any(self, flag: bool) -> bool:
        """Return whether the flag of any process is true.

        Args:
            flag: This process's flag.
        """
        if not self.is_multiprocess:
            return flag
        largest = torch.tensor([int(flag)])
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return bool(largest)

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Call a function in the first process only.

        Args:
            function: What to call. Its result must be a JSON value if there are several processes.

        Returns:
            The result of the function, in all processes.

        Raises:
            DeatError: If the function raises one. All processes raise it.
        """
        if not self.is_multiprocess:
            return function()
        value, failure = None, None
        if self.is_main:
            try:
                value = function()
            except DeatError as error:
                failure = error
        value, main_failure = self.broadcast_json([value, failure and [type(failure).__name__, str(failure)]])
        if failure:
            raise failure
        if main_failure:
            name, message = main_failure
            raise getattr(errors, name, DeatError)(message)
        return value

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, in the order of ranks.

        Args:
            tensor: The tensor of this process. Those of other processes have the same dtype and may differ in shape.

        Returns:
            The tensors, on the CPU.
        """
        own = tensor.detach().cpu().contiguous()
        if not self.is_multiprocess:
            return [own]
        data = own.reshape(-1).view(torch.uint8)
        shapes, lengths = zip(*self.all_gather_json([list(own.shape), len(data)]), strict=True)
        buffers = [data.new_zeros(max(lengths)) for _ in lengths]
        dist.all_gather(buffers, nn.functional.pad(data, (0, max(lengths) - len(data))))
        return [b[:n].view(own.dtype).view(shape) for b, n, shape in zip(buffers, lengths, shapes, strict=True)]

    @contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Let one process of each machine run the body of the with statement before the others, to fill a cache.

        If it fails the others still run it, so that all end with the same error.
        """
        if self.local_rank:
            self.all_reduce_any(False)
        try:
            yield
        finally:
            if not self.local_rank:
                self.all_reduce_any(False)

    def wrap_ddp(self, objective: nn.Module) -> nn.Module:
        """Wrap a module in DistributedDataParallel, which averages its gradients over all processes.

        Args:
            objective: The module of network and loss.

        Returns:
            The wrapped module, or the module itself in a single process.
        """
        if not self.is_multiprocess:
            return objective
        # torch warns of the strides of 1x1 kernels in channels-last order, whose bytes are the same in both orders.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)
        return DistributedDataParallel(objective, **_NO_BUFFER_SYNC)

    def to_sync_batch_norm(self, model: nn.Module) -> nn.Module:
        """Convert batch norms to synchronized ones, whose statistics are those of the images of all processes.

        Args:
            model: The network.

        Returns:
            The converted network, or the network itself in a single process.
        """
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        return convert(model) if self.is_multiprocess else model

    def broadcast_model_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of the first process to all, since batch-norm statistics differ between processes.

        Args:
            model: The network, whose buffers are changed in place.
        """
        self.broadcast_tensors(model.buffers())

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors of the first process into those of all others.

        Args:
            tensors: The tensors, which are changed in place in all processes but the first.
        """
        for tensor in tensors if self.is_multiprocess else ():
            dist.broadcast(tensor, 0)


SINGLE_PROCESS = Distributed()
"""A run in a single process."""

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_RENDEZVOUS_VARIABLES = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""What connects several processes beside their number."""
_LAUNCH_HINT = "Start with torchrun, which sets it, or unset WORLD_SIZE for a single process."
_BUFFER_SYNC_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # since torch 2.13, and before
_NO_BUFFER_SYNC: dict[str, Any] = {
    next(n for n in _BUFFER_SYNC_OPTIONS if n in signature(DistributedDataParallel).parameters): False
}
_message_stores: list[Any] = []


def _read_torchrun_variables() -> tuple[int, int, int]:
    """Return the rank, the number of processes and the rank on this machine, which torchrun sets."""
    defaults = {"WORLD_SIZE": "1"}
    numbers = []
    for name in _TORCHRUN_VARIABLES:
        text = os.environ.get(name, defaults.get(name, "0"))
        if not text.isascii() or not text.isdigit():
            raise UsageError(f"the environment variable {name} is {text!r}, not a whole number. {_LAUNCH_HINT}")
        numbers.append(int(text))
    rank, size, local_rank = numbers
    missing = [name for name in _RENDEZVOUS_VARIABLES if name not in os.environ]
    if size > 1 and missing and not is_process_group_initialized():
        raise UsageError(f"the environment variable WORLD_SIZE is {size}, and {missing[0]} is not set. {_LAUNCH_HINT}")
    if rank >= size:
        raise UsageError(f"the environment variable RANK is {rank}, with a WORLD_SIZE of {size}. {_LAUNCH_HINT}")
    return rank, size, local_rank


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
    """Return a name that only the processes of this start know.

    When torchrun restarts processes it keeps its store, in which addresses of dead processes would deadlock the new
    ones. Its count of restarts differs between machines. So each process asks the first one under a random name.
    """
    name, deadline = secrets.token_hex(8), monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    if rank:
        store.set(f"ask/{rank}", name)
        prefix: str = store.get(f"answer/{name}").decode()
        store.set(f"heard/{prefix}/{rank}", "")
        return prefix
    while not store.check([f"heard/{name}/{other}" for other in range(1, size)]):
        if monotonic() > deadline:
            raise Interrupted(
                f"not all {size} processes connected within {RENDEZVOUS_TIMEOUT}. Look at the messages of the others."
            )
        for other in range(1, size):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", name)
        sleep(0.02)
    return name


def _choose_backend(device: str, local_rank: int) -> str:
    """Return the backends for a device, and select the GPU of this process."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "gloo"
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"device {device!r} is for a single process. With several, each takes the GPU of its local rank: "
            "use 'cuda', 'cpu' or 'auto'."
        )
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}. "
            "Start as many processes as GPUs (--nproc-per-node), or use --device cpu."
        )
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"
