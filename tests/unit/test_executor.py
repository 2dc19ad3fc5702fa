"""What cannot be recorded, compiled or differentiated is asked all the same."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import deat
from deat.engine import cuda_graphs as recordings
from deat.evaluation import attack_verifier as judging
from deat.evaluation import fast_model
from deat.evaluation.fast_model import EAGER_CALLS_BEFORE_RECORDING, FastModel, GraphedNetwork
from deat.training import trainer as training
from deat.utils import float32_precision, torch_contexts
from helpers.eval_nets import THREAT, convolutional, digits
from helpers.games import busy_budget, game_of, trainer_of
from helpers.nets import conv_net, images, same, seeded, weights
from helpers.recorded import count_recordings


def cube(x: Tensor) -> Tensor:
    return x**3


def slope(net: fast_model.NetworkFn, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).sum(), x)
    return grad


@pytest.fixture
def no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


class Stream:
    made = device_index = 0

    def __init__(self, device: torch.device | None = None, use: str = "") -> None:
        Stream.made += use == "warm up"

    def wait_stream(self, other: object) -> None:
        pass


class Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def idle_device(monkeypatch: pytest.MonkeyPatch, no_pools: None) -> None:
    """Recordings are made, and do nothing."""
    monkeypatch.setattr(recordings, "get_side_stream", cache(Stream))
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **named: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


class Broken:
    """A recording as torch leaves one that was broken: its stream stays current, its end raises an error too."""

    begins = False

    def __init__(self) -> None:
        self.current, self.states = list[object](), list[str]()

    def __enter__(self) -> None:
        if not self.begins:
            self.__exit__()

    def __exit__(self, *raised: object) -> None:
        raise RuntimeError("operation failed due to a previous error, not permitted when stream is capturing")

    def clone_state(self) -> str:
        return "anew"

    def graphsafe_set_state(self, state: str) -> None:
        self.states.append(state)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, idle_device: None) -> Broken:
    """Recordings break, and with them the stream and the random numbers."""
    found = Broken()
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **named: found)
    monkeypatch.setattr(torch.cuda, "set_stream", found.current.append)
    monkeypatch.setattr(torch.cuda, "default_generators", [found])
    return found


@pytest.fixture
def recording_engine(monkeypatch: pytest.MonkeyPatch, idle_device: None) -> deat.Engine:
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    return deat.Engine(use_cuda_graphs=True)


def test_a_game_and_its_recordings_go_with_the_last_who_holds_them(recording_engine: deat.Engine) -> None:
    method = deat.get_method("pgd-2")
    game = game_of(method, conv_net(), engine=recording_engine)
    method.play(game, *images(), busy_budget(method))
    assert len(game.executor.recorder or ()) == 3  # A, J and the meter
    held = [weakref.ref(one) for one in (game, game.executor, game.executor.recorder, game.net)]
    gc.disable()  # which asks how many objects there are, not how much of a GPU's memory they hold
    try:
        del game
        assert not any(one() for one in held)
    finally:
        gc.enable()


def test_recordings_are_warmed_up_on_one_stream(recording_engine: deat.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "made", 0)
    method = deat.get_method("pgd-2")
    game = game_of(method, conv_net(), engine=recording_engine)
    for n in (6, 4):
        method.play(game, *images(n), busy_budget(method))
    assert len(game.executor.recorder or ()) == 6
    assert Stream.made == 1, "cuBLAS keeps memory of its own for every stream"


def test_a_gpu_that_is_not_the_current_one_is_made_so_while_it_trains_and_evaluates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[str] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "device", noted)
    with torch_contexts.device_context(torch.device("cpu")):
        assert not entered
    with float32_precision.exact_float32(torch.device("cuda:1")):
        assert entered == ["cuda:1"]
    trainer = trainer_of("natural", epochs=1)
    monkeypatch.setattr(training, "torch_backend_flags", lambda *args, **named: nullcontext())
    monkeypatch.setattr(trainer.random_streams, "isolated_rng", lambda device: nullcontext())
    trainer.engine.device = torch.device("cuda:2")
    with trainer.session():
        assert entered == ["cuda:1", "cuda:2"]


def test_moves_that_cannot_be_recorded_run_eagerly_and_the_engine_says_so(
    recording_engine: deat.Engine, broken: Broken
) -> None:
    method, nets = deat.get_method("pgd-2"), [conv_net(), conv_net()]
    method.play(game_of(method, nets[0]), *images(), busy_budget(method))
    with pytest.warns(UserWarning, match="cannot be recorded.*not permitted"):
        method.play(game_of(method, nets[1], engine=recording_engine), *images(), busy_budget(method))
    assert recording_engine.name == "eager"
    assert same(weights(nets[0]), weights(nets[1])), "warming up left a trace"
    assert [type(stream) for stream in broken.current] == [Stream], "the recording's own stream stayed current"
    assert broken.states == ["anew"], "dropout would fail from here on"


def test_what_went_wrong_inside_a_recording_is_reported_rather_than_that_it_broke(broken: Broken) -> None:
    broken.begins = True
    with (
        pytest.raises(RuntimeError, match="a value was asked for") as raised,
        recordings.capture_graph(Graph(), torch.device("cpu")),  # type: ignore[arg-type]
    ):
        raise RuntimeError("a value was asked for")
    assert raised.value.__suppress_context__, "what torch says of it afterwards is of no use"


def test_a_move_that_waits_for_the_device_is_not_tried_in_a_recording(
    recording_engine: deat.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[object] = []

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            if modes == ["error"]:
                raise RuntimeError("called a synchronizing CUDA operation")
            return self.last(x.flatten(1))

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: pytest.fail("it was recorded"))
    method = deat.get_method("natural")
    with pytest.warns(UserWarning, match="runs eagerly: called a synchronizing CUDA operation"):
        method.play(game_of(method, Waiting(), engine=recording_engine), *images(), busy_budget(method))
    assert modes == ["error", 0], "the mode is not the caller's again"


class Counting(nn.Module):
    """Keeps a mean of what it saw, in a new tensor each time, as many a batch norm of one's own does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = seeded(lambda: nn.Linear(16, 3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x.flatten(1))
        self.seen = 0.9 * self.seen + 0.1 * y.detach().mean(0)
        return y - self.seen


@pytest.mark.parametrize("name", ["natural", "pgd-2", "trades-2"])
def test_a_network_that_replaces_its_buffers_runs_eagerly_and_computes_what_it_would(
    name: str, recording_engine: deat.Engine
) -> None:
    method, nets = deat.get_method(name), [Counting(), Counting()]
    method.play(game_of(method, nets[0]), *images(), busy_budget(method))
    with pytest.warns(UserWarning, match="runs eagerly: its buffer seen is replaced by a new tensor"):
        method.play(game_of(method, nets[1], engine=recording_engine), *images(), busy_budget(method))
    assert recording_engine.name == "eager"
    assert nets[0].seen.any()
    assert torch.equal(nets[0].seen, nets[1].seen), "warming up left a trace"
    assert same(weights(nets[0]), weights(nets[1]))


def _turned(name: str, value: object) -> Callable[[deat.Game], None]:
    return lambda game: [setattr(layer, name, value) for layer in game.net.modules() if hasattr(layer, name)] and None


CHANGES: dict[str, Callable[[deat.Game], None]] = {
    "dropout": _turned("p", 0.5),
    "a batch norm's momentum": _turned("momentum", 0.01),
    "a layer's mode": lambda game: game.net[1].train(False) and None,  # type: ignore[index]
    "weight decay": lambda game: game.optimizer.param_groups[0].update(weight_decay=0.1),
    "frozen layers": lambda game: game.net[0].requires_grad_(False) and None,  # type: ignore[index]
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_recording_takes_for_granted_is_recorded_anew_once_it_changed(
    change: Callable[[deat.Game], None], recording_engine: deat.Engine
) -> None:
    method = deat.get_method("pgd-2")
    game = game_of(method, conv_net(batch_norm=True, dropout=0.2), engine=recording_engine)

    def recorded() -> list[int]:
        """Which recordings play a batch."""
        method.play(game, *images(), busy_budget(method))
        kept.append([graph for graph, _ in game.executor.recorder._graphs.values()])  # type: ignore[union-attr]
        return list(map(id, kept[-1]))

    kept: list[list[Any]] = []
    before = recorded()
    assert recorded() == before
    change(game)
    game.refresh()
    after = recorded()
    assert len(after) == len(before) == 3
    assert not set(after) & set(before)
    assert recorded() == after


def test_each_gpu_is_recorded_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(graph: object, stream: object, **named: object) -> Any:
        asked.append(stream)
        return nullcontext()

    monkeypatch.setattr(recordings, "get_side_stream", lambda device, use: (device, use))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph", note)
    for name in ("cuda:0", "cuda:1"):
        with recordings.capture_graph(torch.cuda.CUDAGraph, torch.device(name)):  # type: ignore[arg-type]
            pass
    assert asked == [(torch.device(name), "record") for name in ("cuda:0", "cuda:1")]


@pytest.mark.parametrize("net", [Tensor.detach, lambda x: torch.ones_like(x, requires_grad=True)])
def test_a_network_that_lets_no_gradient_through_has_none(net: fast_model.NetworkFn, idle_device: None) -> None:
    asked = GraphedNetwork(net)
    x = torch.rand(32, 2, requires_grad=True)
    for _ in range(EAGER_CALLS_BEFORE_RECORDING + 1):
        answer = asked(x)
        assert torch.equal(answer, net(x))
    (grad,) = torch.autograd.grad(answer.sum(), x)
    assert not grad.any()


def test_a_network_that_cannot_be_recorded_is_asked_eagerly(broken: Broken) -> None:
    asked, x = GraphedNetwork(cube), torch.rand(5, 2)
    for _ in range(EAGER_CALLS_BEFORE_RECORDING):
        asked(x)
    with pytest.warns(UserWarning, match="cannot be recorded.*not permitted"):
        assert torch.equal(asked(x), cube(x))
    assert torch.equal(slope(asked, x), slope(cube, x))
    assert count_recordings(asked) == 0


def test_a_twin_that_cannot_be_compiled_answers_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **named: Any) -> fast_model.NetworkFn:
        def call(x: Tensor) -> Tensor:
            raise TorchDynamoException("no such operation")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.rand(4, 3, 2, 2)
    quick = FastModel(net, net, "fp32", "compile")
    with pytest.warns(UserWarning, match="cannot be compiled.*no such operation"):
        assert torch.allclose(quick(x), net(x))
    assert not quick.compiled


def test_an_eager_twin_is_asked_as_it_is_at_every_length() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval()
    quick, seen = FastModel(net, net, "fp32", "eager"), list[int]()
    quick.low_precision_model.register_forward_pre_hook(lambda twin, given: seen.append(len(given[0])))
    for length in (5, 5, 5, 0):
        x = torch.rand(length, 3, 2, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(quick(x).sum(), x)
        assert torch.allclose(slope, torch.autograd.grad(net(x).sum(), x)[0])
    assert seen == [5, 5, 5, 0]
    assert not quick.compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("engine", ["eager", "graph", "compile"])
def test_a_twin_and_its_recordings_go_with_the_last_who_holds_them(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_model, "has_triton", lambda: True)
    monkeypatch.setattr(fast_model, "fused_backend", lambda graph, inputs: graph.forward)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).eval(), torch.rand(4, 3, 2, 2, requires_grad=True)
    quick = FastModel(net, net, "bf16", engine)
    torch.autograd.grad(quick(x).sum(), x)
    held = [weakref.ref(one) for one in (quick, quick.forward_fn, quick.low_precision_model)]
    gc.disable()  # which asks how many objects there are, not how much of a GPU's memory they hold
    try:
        del quick
        assert not any(one() for one in held)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:this network cannot be recorded")
@pytest.mark.usefixtures("no_pools")
def test_an_evaluation_by_way_of_a_twin_gives_the_exact_models_verdicts_but_for_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data = convolutional(), digits(100)
    how: dict[str, Any] = {"threat": deat.Linf(THREAT.eps / 4), "attacks": ["natural", "pgd-5", "cw-5", "apgd-ce"]}
    exact = deat.evaluate(net, data, **how)
    monkeypatch.setattr(judging, "choose_attack_precision", lambda *_: "bf16")
    found = deat.evaluate(net, data, **how)
    assert (exact.settings["precision"], found.settings["precision"]) == ("fp32", "bf16")
    assert not found.settings["compiled"]
    assert found.verdicts["natural"] == exact.verdicts["natural"]
    for name, verdicts in exact.verdicts.items():
        assert sum(a != b for a, b in zip(verdicts, found.verdicts[name], strict=True)) <= 4, name
    assert exact.flags == found.flags == []
