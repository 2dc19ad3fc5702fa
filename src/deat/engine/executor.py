"""Run functions of static device buffers: replayed as CUDA graphs, compiled, or called as they are."""

import warnings
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from deat.engine.cuda_graphs import GraphRecorder, StaticBuffers
from deat.engine.engine import Engine
from deat.engine.half_weights import HalfWeights
from deat.engine.kernels.conv_streams import wait_for_gradients

BuffersT = TypeVar("BuffersT", bound=StaticBuffers)
GUARDED_LAYER_ATTRIBUTES = ("training", "p", "momentum")
"""The mode of a layer, a dropout's probability and a batch norm's momentum; a recording keeps the ones it saw."""
RECOMPILE_LIMIT = 256
"""How often a function may be compiled again. torch's 8 are used up by a dropout that changes in every epoch."""


class CompiledForShape(Protocol):
    """Functions compiled for one batch shape, and the half-precision weights that they use, if any."""

    shape: torch.Size
    half_weights: HalfWeights | None


class Executor:
    """Runs functions of static buffers as the engine says, with a fallback where a network does not allow it.

    It knows nothing of adversarial training. A function and every tensor that it may change are given to `run`, which
    records them as a CUDA graph and replays it. `begin_batch` is given a function that compiles the calls made inside;
    a network that cannot be compiled runs as it is, and one that cannot be recorded runs eagerly, with one warning.

    Args:
        net: The network whose layers are guarded.
        optimizer: The optimiser that steps its weights. One with `use_compiled` is made to compile its step, one with
            `follow` to step the half-precision copies together with the weights.
        engine: Device, precision, and whether to record and to compile.
        single_process: Whether no other process shares the batches. A failed call that has communicated with others is
            not repeated, since they would wait for it.

    Attributes:
        full_batch_size: Batches of fewer rows are not compiled: a short last batch would not earn its compilation back.
        compiled: The compiled functions in use, if any.
        recorder: The recordings, or None where nothing is recorded.
    """

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, engine: Engine, *, single_process: bool = True
    ) -> None:
        self.engine, self.single_process = engine, single_process
        self._net, self._optimizer = net, optimizer
        self.recorder = GraphRecorder(net) if engine.use_cuda_graphs else None
        self.compiled: Any = None
        self.full_batch_size = 0
        self._guarded_values, self._optimizer_steps_half_weights = self._read_guarded_values(), False
        self._seen: set[tuple[str, torch.Size]] = set()
        self.warm_up_seconds = 0.0

    def take_warm_up_seconds(self) -> float:
        """Return the seconds spent on first calls (compiling, recording, set-up) since this was last called."""
        seconds, self.warm_up_seconds = self.warm_up_seconds, 0.0
        return seconds

    def refresh(self) -> bool:
        """Check the layers and the optimiser, and drop what was compiled and recorded if any of them changed.

        Compiled and recorded functions keep what they saw: modes, dropout probabilities, momentum of batch norms,
        weight decay, and which parameters learn. The trainer calls this once an epoch. In a loop of your own, call it
        after changing one of these; a whole scan before each batch would cost milliseconds on large networks.

        Returns:
            Whether something changed.
        """
        values = self._read_guarded_values()
        if values == self._guarded_values:
            return False
        self._guarded_values = values
        self.use_compiled(self.engine.use_compile)
        return True

    def begin_batch(self, x: Tensor, compile_for: Callable[[torch.Size], CompiledForShape]) -> bool:
        """Prepare for a batch: compile for its shape if the engine compiles.

        Args:
            x: The batch's static input.
            compile_for: Compiles the functions that will be called, for one shape.

        Returns:
            Whether everything compiled and recorded before was dropped, as hooks on the optimiser's step require.
        """
        dropped = self._optimizer_steps_half_weights and self._has_optimizer_hooks()
        if dropped:
            self.use_compiled(self.engine.use_compile)
        if self.engine.use_compile and self.compiled is None and len(x) >= self.full_batch_size:
            self.compiled = compile_for(x.shape)
            self._configure_optimizer(True)
        self.weights_changed()
        return dropped

    def compiled_for(self, shape: torch.Size) -> Any:
        """The compiled functions for a batch shape, or None."""
        return self.compiled if self.compiled and self.compiled.shape == shape else None

    def run(
        self,
        name: str,
        function: Callable[[BuffersT], None],
        buffers: BuffersT,
        mutable_tensors: Callable[[], Iterable[Tensor]],
        *,
        recorded: bool = True,
    ) -> None:
        """Run a function on static buffers: replay its recording, make one first, or call it.

        Args:
            name: What the function is called; with the buffers, the key of its recording.
            function: Reads and writes the buffers and may change `mutable_tensors`, nothing else.
            buffers: The static buffers.
            mutable_tensors: Every tensor outside the buffers that the function may change. A recording warms up by
                calling the function, and restores all of them afterwards.
            recorded: Whether it may be recorded; a function that communicates with other processes may not.
        """
        started, is_new = perf_counter(), (name, buffers.x.shape) not in self._seen
        self._run_with_fallback(name, function, buffers, mutable_tensors, recorded)
        if is_new and (self.engine.use_compile or self.engine.device.type == "cuda"):  # eager first calls cost nothing
            self._seen.add((name, buffers.x.shape))
            self.warm_up_seconds += perf_counter() - started

    def _run_with_fallback(
        self,
        name: str,
        function: Callable[[BuffersT], None],
        buffers: BuffersT,
        mutable_tensors: Callable[[], Iterable[Tensor]],
        recorded: bool,
    ) -> None:
        recorder = self.recorder if recorded else None
        without_gradient = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is None]
        try:
            if recorder is None:
                function(buffers)
            else:
                recorder.run(name, function, buffers, mutable_tensors)
        except Exception as error:
            if not self._can_fall_back(error, recorder):
                raise
            self._fall_back(str(error).split("\n")[0])
            for p in without_gradient:  # it may hold a part of a gradient by now
                p.grad = None
            self._run_with_fallback(name, function, buffers, mutable_tensors, recorded)

    def prepare_forward(self, x: Tensor) -> None:
        """Cast the weights to half precision if they changed since; call this before a function that uses the network."""
        if self.compiled_for(x.shape) and self._half_weights:
            self._half_weights.cast()

    def weights_changed(self, by_optimizer: bool = False) -> None:
        """Note that the weights changed; an optimiser that steps the half-precision copies has updated these too."""
        if self._half_weights and not (by_optimizer and self._optimizer_steps_half_weights):
            self._half_weights.is_current = False

    def merge_gradients(self, *, keep_for_optimizer: bool = False) -> None:
        """Add the gradients of half-precision copies to the weights' own, or keep them for an optimiser that uses them."""
        if self._half_weights:
            self._half_weights.merge_gradients(
                keep_for_optimizer=keep_for_optimizer and self._optimizer_steps_half_weights
            )

    def half_weight_tensors(self) -> list[Tensor]:
        """The half-precision copies that the optimiser steps together with the weights."""
        return self._half_weights.tensors() if self._optimizer_steps_half_weights and self._half_weights else []

    @property
    def _half_weights(self) -> HalfWeights | None:
        half_weights: HalfWeights | None = self.compiled.half_weights if self.compiled else None
        return half_weights

    def use_compiled(self, enabled: bool) -> None:
        """Compile from the next batch on, or stop doing so; recordings are dropped and made again."""
        wait_for_gradients()  # a function that failed may have launched some
        self.engine.use_compile, self.compiled = enabled, None
        self._configure_optimizer(False)
        self.clear_recordings()

    def _has_optimizer_hooks(self) -> bool:
        return bool(getattr(self._optimizer, "is_watched", False))

    def _read_guarded_values(self) -> list[Any]:
        learns = [p.requires_grad for p in self._net.parameters()]
        decays = [group.get("weight_decay") for group in self._optimizer.param_groups]
        layers = [vars(module) for module in self._net.modules()]
        return [*learns, *decays, *(_number_or_none(v.get(name)) for v in layers for name in GUARDED_LAYER_ATTRIBUTES)]

    def _configure_optimizer(self, compiled: bool) -> None:
        """Set whether the optimiser compiles its step and which copies it steps, if it supports that."""
        if use := getattr(self._optimizer, "use_compiled", None):
            use(compiled)
        can_follow = self.single_process and self.engine.scaler is None and not self._has_optimizer_hooks()
        half_weights = self._half_weights if can_follow else None
        if follow := getattr(self._optimizer, "follow", None):
            self._optimizer_steps_half_weights = half_weights is not None
            follow(half_weights.copies if half_weights else {})

    def clear_recordings(self) -> None:
        """Drop every recording, as is needed when tensors that it uses are replaced."""
        self._seen.clear()
        if self.recorder:
            self.recorder.clear_recordings()

    def drop(self, buffers: StaticBuffers) -> None:
        """Drop the recordings on buffers that will not be used again."""
        self._seen = {key for key in self._seen if key[1] != buffers.x.shape}
        if self.recorder:
            self.recorder.drop(buffers)

    def _can_fall_back(self, error: Exception, recorder: GraphRecorder | None) -> bool:
        """Whether to repeat a call with less; not one that may have communicated with other processes."""
        is_expected = isinstance(error, RuntimeError) or _is_triton_error(error)
        if recorder is None:
            return self.compiled is not None and (is_expected if self.single_process else _is_dynamo_error(error))
        return is_expected

    def _fall_back(self, reason: str) -> None:
        """Stop compiling, or else stop recording."""
        if self.compiled is not None:
            warnings.warn(f"this network cannot be compiled, so it runs as it is: {reason}", stacklevel=4)
            self.use_compiled(False)
            return
        warnings.warn(f"this network cannot be recorded as a CUDA graph, so it runs eagerly: {reason}", stacklevel=4)
        self.recorder, self.engine.use_cuda_graphs = None, False


def compile_function(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Compile a function for tensors of fixed shapes, and again where a network's hooks change, as YOPO's do."""
    patched = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=RECOMPILE_LIMIT)
    compiled: Callable[..., Any] = patched(torch.compile(function, dynamic=False, backend=backend))
    return compiled


def _number_or_none(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None


def _is_triton_error(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "triton"


def _is_dynamo_error(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    return isinstance(error, TorchDynamoException)
