"""Guards that catch what must not happen, and counters that count what must."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostRead(AssertionError):
    """Somebody read the device from the host."""


class _Operations(TorchDispatchMode):
    """Rejects operations whose result, or its shape, has to be read on the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(self.FORBIDDEN):
            raise HostRead(f"aten.{name}")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise HostRead(f"aten.{name} by a mask")
        if name in ("_to_copy", "copy_"):
            self._check_copy(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _check_copy(name: str, args: Any, kwargs: Any) -> None:
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        if isinstance(source, Tensor) and source.device.type != "cpu" and torch.device(target).type == "cpu":
            raise HostRead(f"aten.{name} to the host")


class _Calls(TorchFunctionMode):
    """Rejects the calls that read memory without any operation of their own."""

    FORBIDDEN = frozenset(
        {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__complex__"}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.FORBIDDEN:
            raise HostRead(f"Tensor.{name}")
        # A device object may be the one that training runs on; a written "cpu" is the host.
        if name == "to" and "cpu" in [a for a in (*args[1:], (kwargs or {}).get("device")) if isinstance(a, str)]:
            raise HostRead("Tensor.to the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, whoever reads a tensor on the host raises HostRead."""
    with _Calls(), _Operations():
        yield


class BackwardCounter:
    """Counts backward calls that reach a network's last layer, however they are made."""

    def __init__(self, last: nn.Module) -> None:
        self._calls: set[int] = set()
        last.register_forward_hook(self._watch)

    def _watch(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._note)

    def _note(self, grad: Tensor) -> None:
        self._calls.add(torch._C._current_graph_task_id())

    @property
    def count(self) -> int:
        return len(self._calls)
