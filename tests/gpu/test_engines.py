"""Recorded and compiled moves where things change in the middle of a training; skipped where there is no GPU."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import deat
from deat.core import inner_attack
from deat.core.batch_buffers import Budget, Buffers
from deat.training.engine_choice import CompilePolicy
from deat.training.epoch_records import EpochTiming
from deat.training.optimizers import DeviceSGD
from deat.utils.distributed import BatchShard
from helpers.engines import growing, small_images, small_net, small_trainer
from helpers.kernels_cases import distance

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, inside its compiler
]

GROWING = [("deat-1", "step"), ("pgd-3", "ascend"), ("fat-3", "ascend"), ("trades-3", "ascend")]
GROWING += [("yopo-4-2", "accumulate")]
"""Methods, and the move that comes with their first k of 1; FAT's ascends with a mask, and in eval mode."""


class Clocked:
    """A callback that keeps every epoch's clock."""

    def __init__(self, kept: list[EpochTiming]) -> None:
        self.kept = kept

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: EpochTiming) -> None:
        self.kept.append(timing)


@pytest.mark.parametrize(("method", "move"), GROWING)
def test_recordings_do_not_grow_while_k_and_momentum_change(method: str, move: str) -> None:
    trainer = small_trainer(growing(method), engine="graph")
    counts, ks, clocks = [], [], list[EpochTiming]()
    trainer.callbacks.append(Clocked(clocks))
    momentum, momenta, close = trainer.optimizer.param_groups[0]["momentum"], [], trainer.game.end_batch

    def note(r: Buffers) -> None:
        close(r)
        momenta.append(float(momentum))

    trainer.game.end_batch = note  # type: ignore[method-assign]
    with trainer.session():
        for _ in range(4):
            ks.append(trainer.run_epoch().k)
            counts.append(len(trainer.game.executor.recorder or ()))
        assert trainer.game.executor.recorder is not None, "the recording fell back"
        assert trainer.game.executor.recorder.graph(move), "nothing came with the first step"
    assert ks == [0, 1, 2, 3]
    came = 1 + trainer.method.attack.needs_reference  # TRADES asks its clean images as well
    assert counts == [4, *[2 * (2 + came)] * 3], "two moves and those that came, for each of two batch sizes"
    assert clocks[0].train_seconds > clocks[0].warm_up_seconds > 0 == clocks[3].warm_up_seconds
    assert momenta == pytest.approx([trainer.lr_scheduler.schedule.at(step, 12)[1] for step in range(12)])
    assert min(momenta) < 0.82 < 0.88 < min(momenta[0], momenta[-1]), "it goes down and comes back"


@pytest.mark.parametrize("method", [name for name, _ in GROWING])
def test_compilations_do_not_grow_while_k_changes(method: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = small_trainer(growing(method), engine="compile")
    counts, ks = [], []
    with trainer.session():
        for _ in range(4):
            ks.append(trainer.run_epoch().k)
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert ks == [0, 1, 2, 3]
    assert trainer.game.executor.compiled is not None
    assert counts[0] >= 1
    assert counts[1] == counts[2] == counts[3]
    assert (counts[1] > counts[0]) == (method != "deat-1"), "an ascend, or a full pass, is compiled once there is one"


def run_of(
    engine: str, method: str, net: nn.Module, epochs: int = 3, *callbacks: Any
) -> tuple[list[Tensor], list[Any], Tensor]:
    """Weights and statistics, the history, and where the device's random stream is, in deterministic mode."""
    own = None if engine == "graph" else (lambda p: DeviceSGD(p, 0.01, 0.9, 5e-4))
    trainer = small_trainer(method, net, engine=engine, optimizer=own, deterministic=True, epochs=epochs)
    trainer.callbacks.extend(callbacks)
    with trainer.session():
        history = [trainer.run_epoch() for _ in range(epochs)]
        stream = torch.cuda.get_rng_state()
    assert trainer.engine.name == engine, "the recording fell back"
    return [value.clone() for value in trainer.model.state_dict().values()], history, stream


@pytest.mark.parametrize("method", ["pgd-3", "trades-2", "m+deat", "yopo-3-2"])
def test_recorded_dropout_equals_eager_dropout_bit_for_bit(method: str) -> None:
    nets, before = [small_net(dropout=0.3) for _ in range(2)], torch.cuda.get_rng_state()
    eager, graph = (run_of(engine, method, net) for engine, net in zip(("eager", "graph"), nets, strict=True))
    assert graph[1] == eager[1]
    assert all(torch.equal(one, other) for one, other in zip(eager[0], graph[0], strict=True))
    assert torch.equal(eager[2], graph[2]), "a recording draws as many numbers, and its warm-up none"
    assert eager[2][8:].any(), "nothing was drawn since the last batch began"
    assert torch.equal(torch.cuda.get_rng_state(), before), "the caller's stream was drawn from"
    assert run_of("graph", method, small_net())[1] != graph[1], "dropout changed nothing"


@pytest.mark.parametrize("method", ["trades-1", "trades-3", "f+trades"])
def test_recorded_trades_looks_as_far_out_as_eager_trades_bit_for_bit(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, graph = (run_of(engine, method, small_net(), epochs=7) for engine in ("eager", "graph"))  # 21 steps
    assert graph[1] == eager[1]
    assert all(torch.equal(one, other) for one, other in zip(eager[0], graph[0], strict=True))
    monkeypatch.setattr(inner_attack, "FIRST_GRADIENT_SCALE", 1.0)
    assert run_of("graph", method, small_net(), epochs=7)[1] != graph[1], "it makes no difference"


@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_a_recorded_ascent_of_trades_follows_how_far_out_it_is_to_look(engine: str) -> None:
    torch._dynamo.reset()
    trainer = small_trainer("trades-2", engine=engine)
    game = trainer.game
    with trainer.session():
        trainer.run_epoch()
        r = game.begin_batch(*next(iter(trainer.train.epoch(1))), Budget(2, 2 / 255))
        start, times = r.delta.clone(), game.delta_scale.factor
        assert times is not None
        assert float(times) == inner_attack.FIRST_GRADIENT_SCALE, "a batch begins"
        game.ascend(r)
        assert float(times) == 1.0, "delta has moved"

        def taken(ascend: Callable[[Buffers], None], far: float) -> Tensor:
            r.delta.copy_(start)
            times.fill_(far)
            ascend(r)
            return r.grad.clone()

        found = [(taken(game.ascend, far), taken(game._ascend, far)) for far in (64.0, 256.0)]  # recorded, and as it is
    assert trainer.engine.name == engine, "it fell back"
    assert len(game.executor.recorder or ()) > 0
    assert max(distance(plain, recorded) for recorded, plain in found) < 0.2
    assert distance(found[1][0], found[0][0]) > 0.5, "both look from the same place"


class Turning:
    """A callback that changes a training once, after its first epoch."""

    def __init__(self, change: Callable[[deat.Trainer], None]) -> None:
        self.change = change

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: EpochTiming) -> None:
        if stats.epoch == 0:
            self.change(trainer)


def turned(kind: type[nn.Module], name: str, value: float) -> Callable[[deat.Trainer], None]:
    """Every layer of a kind is told another number."""
    return lambda trainer: [setattr(m, name, value) for m in trainer.model.modules() if isinstance(m, kind)] and None


CHANGES: dict[str, Callable[[deat.Trainer], None]] = {
    "weight decay": lambda trainer: trainer.optimizer.param_groups[0].update(weight_decay=5.0),
    "a batch norm's momentum": turned(nn.BatchNorm2d, "momentum", 0.9),
    "dropout": turned(nn.Dropout, "p", 0.8),
}


def state_of(run: tuple[list[Tensor], list[Any], Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in run[0]])


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_is_followed_by_recordings_bit_for_bit(change: str) -> None:
    eager, graph = (
        run_of(engine, "pgd-2", small_net(dropout=0.3), 3, Turning(CHANGES[change])) for engine in ("eager", "graph")
    )
    assert graph[1] == eager[1]
    assert torch.equal(state_of(graph), state_of(eager))
    left = run_of("graph", "pgd-2", small_net(dropout=0.3))
    assert left[1][0] == graph[1][0], "the first epoch is as it was"
    assert not torch.equal(state_of(left), state_of(graph)), "it makes no difference"


@pytest.mark.parametrize("change", ["weight decay", "a batch norm's momentum"])
def test_what_a_callback_changes_is_followed_by_compiled_moves(change: str) -> None:
    torch._dynamo.reset()
    trainer = small_trainer("pgd-2", engine="compile", epochs=3)
    trainer.callbacks.append(Turning(CHANGES[change]))
    with trainer.session():
        for _ in range(3):
            trainer.run_epoch()
    assert trainer.engine.name == "compile", "it fell back"
    found = torch.cat([value.double().flatten() for value in trainer.model.state_dict().values()])
    changed, left = (
        state_of(run_of("eager", "pgd-2", small_net(), 3, *how)) for how in ([Turning(CHANGES[change])], [])
    )
    assert distance(found, changed) < distance(found, left) / 4


class Forced(CompilePolicy):
    """Compiles, and stops doing so, after the epochs that it is told to, as a pace does; notes what each one ran by."""

    def __init__(self, plan: dict[int, bool]) -> None:
        self.plan, self.ran = plan, list[tuple[str, bool]]()

    def after_epoch(self, trainer: deat.Trainer, *rest: object) -> None:
        runner = trainer.game.executor
        self.ran.append((trainer.engine.name, runner.compiled is not None))
        assert len(runner.recorder or ()) > 0
        if (wanted := self.plan.get(len(self.ran))) is not None:
            runner.use_compiled(wanted)


@pytest.mark.parametrize("method", ["pgd-2", "yopo-3-2"])
def test_a_training_goes_from_recorded_to_compiled_moves_and_back(method: str) -> None:
    torch._dynamo.reset()
    histories, paces = [], (Forced({}), Forced({2: True, 4: False}))
    for pace in paces:
        trainer = small_trainer(method, engine="auto", epochs=6, lr_schedule="flat")
        trainer.compile_policy = pace
        with trainer.session():
            histories.append([trainer.run_epoch() for _ in range(6)])
    recorded, compiled = ("graph", False), ("compile", True)
    assert paces[0].ran == [recorded] * 6
    assert paces[1].ran == [recorded] * 2 + [compiled] * 2 + [recorded] * 2
    for stayed, went in zip(*histories, strict=True):
        assert went.backprops == stayed.backprops
        assert went.examples == stayed.examples == 130
        assert went.loss == pytest.approx(stayed.loss, rel=5e-2)
        assert went.magnitude == pytest.approx(stayed.magnitude, rel=0.3)


def test_a_network_that_cannot_be_recorded_trains_eagerly_and_one_line_says_why() -> None:
    _, expected, drawn = run_of("eager", "pgd-2", small_net(dropout=0.3, reads=True))
    trainer = small_trainer("pgd-2", small_net(dropout=0.3, reads=True), engine="graph", deterministic=True, epochs=3)
    with trainer.session(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = torch.cuda.current_stream()
        history = [trainer.run_epoch() for _ in range(3)]
        assert torch.cuda.current_stream() == before
        stream = torch.cuda.get_rng_state()
    (line,) = [str(w.message) for w in told if "this network" in str(w.message)]
    assert "cannot be recorded" in line
    assert "synchroniz" in line, "it does not say why"
    assert "previous error" not in line, "it says that there was a reason, and not which"
    assert "\n" not in line
    assert trainer.engine.name == "eager"
    assert all(math.isfinite(stats.loss) for stats in history)
    assert [stats.loss for stats in history] == pytest.approx([stats.loss for stats in expected], rel=1e-3)
    assert torch.equal(stream, drawn), "dropout draws other numbers than it would have"


class Keeping(nn.Module):
    """Takes a running mean off its answers, and keeps it in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        self.seen = 0.9 * self.seen + 0.1 * y.detach().float().mean(0)
        return y - self.seen


@pytest.mark.parametrize("method", ["pgd-2", "trades-2"])
def test_a_network_that_replaces_its_buffers_trains_eagerly_and_one_line_says_why(method: str) -> None:
    expected = run_of("eager", method, Keeping())
    trainer = small_trainer(method, Keeping(), engine="graph", deterministic=True, epochs=3)
    with trainer.session(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = [trainer.run_epoch() for _ in range(3)]
    (line,) = [str(w.message) for w in told if "this network" in str(w.message)]
    assert "runs eagerly: its buffer seen is replaced by a new tensor" in line
    assert trainer.engine.name == "eager"
    assert [stats.loss for stats in history] == pytest.approx([stats.loss for stats in expected[1]], rel=1e-3)
    assert trainer.model.state_dict()["seen"].any(), "nothing was seen"


class Pictures(Dataset[Any]):
    """Somebody's own data set, with a random transform of its own."""

    classes = tuple("0123456789")

    def __init__(self) -> None:
        self.held = small_images()

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.held.images[index].float() / 255
        return (image + 0.1 * torch.rand(())).clamp(0, 1), int(self.held.labels[index])


def test_a_data_set_of_your_own_is_trained_on_from_pinned_memory_as_without_workers() -> None:
    ends = []
    for workers in (2, 0):
        trainer = small_trainer("pgd-2", data=Pictures(), workers=workers, deterministic=True, epochs=3)
        images, labels = next(trainer.train.loader.epoch(0, 0, BatchShard()))  # type: ignore[attr-defined]
        assert images.is_pinned()
        assert labels.is_pinned()
        trainer.train.stop_workers()  # type: ignore[attr-defined]
        found = trainer.fit()
        assert trainer.engine.name == "graph", "the recording fell back"
        ends.append((found.history, [p.detach().clone() for p in trainer.model.parameters()]))
    (history, weights), (other_history, other_weights) = ends
    assert [stats.examples for stats in history] == [130] * 3
    assert all(math.isfinite(stats.loss) for stats in history)
    assert history == other_history, "a batch was overwritten while it was copied, or came in another order"
    assert all(torch.equal(one, other) for one, other in zip(weights, other_weights, strict=True))
