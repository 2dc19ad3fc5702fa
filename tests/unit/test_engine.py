"""How a move runs: precision, loss scaling and skipped steps, memory format."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import deat
from deat.core.batch_buffers import Budget
from deat.engine.layer_work import count_multiply_adds
from deat.engine.precision import choose_precision
from deat.errors import UsageError
from deat.training import engine_choice
from deat.training.config import resolve_device
from deat.training.engine_choice import AutoCompile
from deat.training.optimizers import DeviceSGD
from deat.utils.torch_contexts import choose_threads
from helpers.games import THREATS, busy_budget, game_of, trainer_of
from helpers.nets import conv_net, images, same, weights

every_threat = pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
CPU = torch.device("cpu")


def scaled_engine(scale: float = 1024.0) -> deat.Engine:
    """An engine that scales losses as fp16 does, on a device where the rest is exact."""
    engine = deat.Engine()
    engine.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return engine


def fused(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, fused=True)


def plain(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


both_optimisers = pytest.mark.parametrize("optimizer", [fused, plain])


class Overflow:
    """Makes a parameter's gradient infinite in chosen backward passes, as fp16 would."""

    def __init__(self, net: nn.Module, passes: set[int]) -> None:
        self.passes, self.seen = passes, 0
        net[0].weight.register_hook(self._spoil)

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return grad * float("inf") if self.seen in self.passes else grad


@pytest.mark.promise("P36")
@pytest.mark.parametrize("name", ["pgd-7", "free-4", "trades", "yopo-5-3", "fat-5"])
@pytest.mark.parametrize("rules", ["default", "literal", "released"])
@every_threat
def test_loss_scale_changes_neither_magnitude_nor_weights(name, rules, threat):
    method, found = deat.get_method(name, rules=rules), []
    for engine in (deat.Engine(), scaled_engine()):
        net = conv_net().double()
        game = game_of(method, net, threat, engine=engine)
        for seed in range(2):
            x, y = images(seed=seed)
            method.play(game, x.double(), y, busy_budget(method, threat))
        found.append((game.meter.read(0), weights(net)))
    (exact, expected), (scaled, trained) = found
    assert scaled.magnitude == pytest.approx(exact.magnitude, rel=1e-9)
    assert scaled.loss == pytest.approx(exact.loss, rel=1e-9)
    assert scaled.skipped == 0
    torch.testing.assert_close(trained, expected)


@both_optimisers
def test_skipped_step_adds_nothing_to_loss_magnitude_or_count_and_is_counted_itself(optimizer):
    method, net = deat.get_method("natural"), conv_net()
    game = game_of(method, net, engine=scaled_engine())
    game.optimizer = optimizer(net)
    Overflow(net, {2})
    method.play(game, *images(6, seed=0), Budget(0, 0.0))
    sums, before = game.meter.sums.clone(), weights(net)
    method.play(game, *images(6, seed=1), Budget(0, 0.0))
    assert torch.equal(game.meter.sums, sums)
    assert same(before, weights(net))
    method.play(game, *images(4, seed=2), Budget(0, 0.0))
    record = game.meter.read(0)
    assert (record.examples, record.skipped) == (10, 1)
    assert not same(before, weights(net))


@both_optimisers
def test_replay_counts_every_skipped_step_and_records_the_last_pass_if_it_was_taken(optimizer):
    method = deat.get_method("free-3")
    for skipped, examples in ({1}, 6), ({1, 2}, 6), ({3}, 0), ({1, 2, 3}, 0):
        net = conv_net()
        game = game_of(method, net, engine=scaled_engine())
        game.optimizer = optimizer(net)
        Overflow(net, skipped)
        method.play(game, *images(), busy_budget(method))
        record = game.meter.read(0)
        assert (record.skipped, record.examples) == (len(skipped), examples)
        assert (record.magnitude > 0) == (examples > 0)


@both_optimisers
def test_scale_falls_after_a_skipped_step(optimizer):
    method, net = deat.get_method("natural"), conv_net()
    game = game_of(method, net, engine=scaled_engine(64.0))
    game.optimizer = optimizer(net)
    Overflow(net, {1})
    method.play(game, *images(), Budget(0, 0.0))
    assert game.engine.scaler.get_scale() == 32.0


@both_optimisers
def test_large_but_finite_gradients_are_a_step_that_was_taken(optimizer):
    method, net = deat.get_method("natural"), conv_net()
    game = game_of(method, net, engine=scaled_engine(2.0**80))
    game.optimizer = optimizer(net)
    before = weights(net)
    method.play(game, *images(), Budget(0, 0.0))
    record = game.meter.read(0)
    assert not same(before, weights(net))
    assert (record.examples, record.skipped) == (6, 0)


def test_fp16_is_refused_on_a_cpu_and_unknown_precisions_everywhere():
    with pytest.raises(UsageError, match="GPU"):
        choose_precision("fp16", CPU, lambda: 0)
    with pytest.raises(UsageError, match="bf16"):
        choose_precision("bf61", CPU, lambda: 0)


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bf16_for_much_work_where_the_cpu_is_fast_at_it(fast, monkeypatch):
    monkeypatch.setattr("deat.engine.precision.has_native_cpu_bf16", lambda: fast)
    assert choose_precision("auto", CPU, lambda: 10**9) == ("bf16" if fast else "fp32")
    assert choose_precision("auto", CPU, lambda: 10**6) == "fp32"
    assert choose_precision("bf16", CPU, lambda: 10**6) == "bf16"


def test_work_counts_the_multiply_adds_of_one_example():
    conv, linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 10)
    net = nn.Sequential(conv, nn.Flatten(), linear)
    assert count_multiply_adds(net, (3, 4, 4)) == 16 * 8 * 3 * 9 + 8 * 16 * 10


def test_work_leaves_out_what_half_precision_does_not_make_faster():
    depthwise, norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
    assert count_multiply_adds(nn.Sequential(depthwise, norm, nn.ReLU()), (8, 4, 4)) == 0


def test_work_of_attention_is_counted_in_torchs_transformer_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)
    assert count_multiply_adds(layer, (5, 8)) == 5 * (4 * 8 * 8 + 2 * 8 * 32)


def test_counting_work_leaves_the_network_and_the_random_state_as_they_were():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x + torch.rand(()))

    net, state = nn.Sequential(nn.BatchNorm1d(4), Noisy()), torch.get_rng_state()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    count_multiply_adds(net, (4,))
    assert torch.equal(state, torch.get_rng_state())
    assert net.training
    assert not net[1].linear._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_small_networks_use_one_thread():
    with torch.device("meta"):
        assert choose_threads(nn.Linear(100, 10)) == 1
        assert choose_threads(nn.Linear(10_000, 1000)) == torch.get_num_threads()


def test_half_precision_lays_convolutions_out_channels_last():
    net, engine = conv_net(channels=3), deat.Engine(precision="bf16")
    engine.prepare(net)
    assert net[2].weight.is_contiguous(memory_format=torch.channels_last)
    game = game_of(deat.get_method("pgd-2"), net, engine=engine)
    r = game.begin_batch(*images(channels=3), Budget(1, 0.1))
    assert r.x.is_contiguous(memory_format=torch.channels_last)
    assert r.delta.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for the CPU needs a C++ compiler")
def test_compiled_moves_equal_eager_ones_in_double_precision():
    readings = []
    for engine in ("eager", "compile"):
        net = conv_net().double()
        trainer = trainer_of("pgd-1", net, epochs=2, engine=engine)
        trainer.fit()
        assert (trainer.game.executor.compiled is not None) == (engine == "compile")
        readings.append(([(s.loss, s.magnitude) for s in trainer.history], weights(net)))
    (one, before), (other, after) = readings
    assert np.allclose(one, other, rtol=1e-9)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
def test_a_dropout_that_changes_every_epoch_stays_compiled(monkeypatch):
    made, asked = [], torch.compile
    note = lambda graph, inputs: (made.append(graph), graph.forward)[1]  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked(function, **options | {"backend": note}))
    torch._dynamo.reset()
    method, net = deat.get_method("natural"), conv_net(dropout=0.2)
    game = game_of(method, net, engine=deat.Engine(use_compile=True))
    for epoch in range(12):
        net[2].p = epoch / 20
        method.play(game, *images(), Budget(0, 0.1))
    assert len(made) == 12, "torch gives up after eight, and the rest runs as it is"


def test_a_network_that_cannot_be_compiled_trains_as_it_is(monkeypatch):
    def refuse(*args, **options):
        def call(*inputs):
            raise TorchDynamoException("no such operation")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    trainer = trainer_of("pgd-1", epochs=2, engine="compile")
    with pytest.warns(UserWarning, match="cannot be compiled.*no such operation"):
        trainer.fit()
    assert len(trainer.history) == 2
    assert trainer.engine.name == "eager"


def test_a_compiled_move_that_fails_on_its_way_back_leaves_no_part_of_a_gradient(monkeypatch):
    def halfway(function, **options):
        def call(*inputs):
            seen = net[0].register_forward_hook(lambda module, given, out: out.register_hook(fail) and None)
            try:
                return function(*inputs)
            finally:
                seen.remove()

        return call

    def fail(grad):
        raise OutOfResources(2, 1, "shared memory")

    class OutOfResources(Exception):  # like all of Triton's, no RuntimeError
        __module__ = "triton.runtime.errors"

    plain, net = conv_net(), conv_net()
    trainer_of("natural", plain, epochs=1).fit()
    monkeypatch.setattr(torch, "compile", halfway)
    trainer = trainer_of("natural", net, epochs=1, engine="compile")
    with pytest.warns(UserWarning, match="cannot be compiled.*shared memory"):
        trainer.fit()
    assert trainer.engine.name == "eager"
    assert same(weights(plain), weights(net))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"optimizer": lambda ps: torch.optim.Adam(ps, lr=0.01)},
            "only steps of deat.s SGD can be.*compiled once that pays",
        ),
        ({"method": "f+pgd-2", "compact": True}, "compact.*compiled once that pays"),
        ({"method": "f+pgd-2", "compact": True, "engine": "compile"}, "compact.*is compiled$"),
        ({"method": "f+pgd-2", "compact": True, "deterministic": True}, "compact.*is eager$"),
    ],
)
def test_what_cannot_be_recorded_is_reported_and_compiled(options, said, monkeypatch):
    class Gpu:
        """Looks like a GPU to whoever asks, and is none."""

        type, index = "cuda", 0

    options = dict(options)
    method = deat.get_method(options.pop("method", "pgd-2"))
    if options.pop("compact", False):
        method = replace(method, attack=replace(method.attack, compact=True))
    monkeypatch.setattr(engine_choice, "resolve_device", lambda name: Gpu())
    monkeypatch.setattr(engine_choice, "choose_precision", lambda *_: "fp32")
    monkeypatch.setattr(engine_choice, "Engine", lambda _, *rest, **named: deat.Engine(CPU, *rest, **named))
    trainer = trainer_of(method, conv_net(), **options)
    assert re.search(said, trainer.engine_note)
    assert isinstance(trainer.compile_policy, AutoCompile) == ("once" in said)


def test_a_skipped_step_leaves_weights_and_momentum_as_they_were():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = DeviceSGD([weight], 0.1, 0.9, 0.5)
    weight.grad = torch.ones(3)
    optimizer.step(skip=torch.zeros(()))
    assert torch.allclose(weight, torch.full((3,), 1 - 0.1 * 1.5))
    held = weight.detach().clone(), optimizer.state[weight]["momentum_buffer"].clone()
    weight.grad = torch.full((3,), torch.inf)
    optimizer.step(skip=torch.ones(()))
    assert torch.equal(weight, held[0])
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], held[1])


def test_a_device_without_float64_or_random_numbers_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="device 'meta' is not available here"):
        resolve_device("meta")

    def refuse(*size: int, dtype: torch.dtype, device: torch.device) -> None:
        assert dtype == torch.float64
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(UsageError, match=r"device 'mps' is not available here \(Cannot convert.*\)\. Use 'cpu'"):
        resolve_device("mps")
