"""YOPO's first layer, found by itself on networks it has never seen, and the steps through it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget
from deat.core.first_layer import find_first_layer
from deat.core.move_order import _compute_costates, _first_layer_gradient
from deat.errors import UsageError
from deat.tasks.per_example_losses import cross_entropy
from helpers.games import THREATS, WatchedGame, busy_budget, game_of
from helpers.nets import CLASSES, SIDE, conv_net, images, same, seeded, weights


class TwoStems(nn.Module):
    """Two convolutions that both look at the image."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 1)
        self.mix, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.fine(x), self.coarse(x.flip(-1))], 1)
        return self.head(torch.tanh(self.mix(torch.tanh(both))).flatten(1))


class Skip(nn.Module):
    """The image reaches a second layer too, beside what the first one made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(torch.cat([x, h], 1))).flatten(1))


class TinyViT(nn.Module):
    """Patches, a class token and positions that belong to the root, attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.patch = nn.Conv2d(1, 8, 2, stride=2)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.pos
        return self.head(self.block(tokens)[:, 0])


class Twice(nn.Module):
    """One convolution that sees the image, and later its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))


class ByKeyword(nn.Module):
    """A first layer that is called by keyword, with an activation in place behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.relu(self.conv(input=x), inplace=True).flatten(1))


def in_place() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * SIDE**2, CLASSES)
    )


def linear_first() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def parametrised() -> nn.Sequential:
    net = conv_net()
    net[0] = nn.utils.parametrizations.weight_norm(net[0])
    return net


NETS = {
    "an activation in place": (in_place, lambda n: [n[0]]),
    "called by keyword": (ByKeyword, lambda n: [n.conv]),
    "convolution": (conv_net, lambda n: [n[0]]),
    "linear after flatten": (linear_first, lambda n: [n[1]]),
    "two stems": (TwoStems, lambda n: [n.fine, n.coarse]),
    "normalised": (lambda: deat.add_normalization(conv_net(), [0.4], [0.3]), lambda n: [n.net[0]]),
    "weight norm": (parametrised, lambda n: [n[0]]),
    "vision transformer": (TinyViT, lambda n: [n.patch]),
    "skip from the image": (Skip, lambda n: [n.first, n.second]),
    "shared layer": (Twice, lambda n: [n.conv]),
    "batch norm": (lambda: conv_net(batch_norm=True), lambda n: [n[0]]),
}
every_net = pytest.mark.parametrize(("build", "expected"), NETS.values(), ids=NETS.keys())


@every_net
def test_first_layer_is_every_parametric_module_that_sees_the_image(build, expected):
    net = seeded(build)
    found = find_first_layer(net, images()[0])
    assert list(found.modules) == expected(net)


@every_net
def test_finding_the_first_layer_leaves_the_network_as_it_was(build, expected):
    net = seeded(build).train()
    expected(net)[0].eval()
    next(net.parameters()).requires_grad_(False)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    modes, learning = [m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]
    find_first_layer(net, images()[0])
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == learning
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    assert not any(m._forward_hooks for m in net.modules())


@every_net
def test_first_layer_gradient_is_the_input_gradient_where_the_costate_was_taken(build, expected):
    net, method = seeded(build).double().eval(), deat.get_method("yopo-5-3")
    (x, y), game = images(), game_of(method, net)
    r = game.begin_batch(x.double(), y, Budget(4, 0.05))
    layer = game.prepare_first_layer(r)
    costates = _compute_costates(game, r, layer)
    delta = r.delta.clone().requires_grad_()
    (true,) = torch.autograd.grad(cross_entropy(net(r.x + delta), y).sum(), delta)
    torch.testing.assert_close(_first_layer_gradient(game, r, layer, costates), true)
    torch.testing.assert_close(r.grad, true)


@every_net
def test_yopo_trains_every_network(build, expected):
    net, method = seeded(build), deat.get_method("yopo-3-2")
    game, before = game_of(method, net), weights(net)
    for seed in range(2):
        method.play(game, *images(seed=seed), busy_budget(method))
    assert game.meter.read(0).examples == 12
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True)]
    assert all(c for c, p in zip(changed, net.parameters(), strict=True) if p.dim() > 1)
    assert not any(m._forward_hooks for m in net.modules())


def test_clean_branch_of_an_objective_does_not_disturb_the_costates():
    net = seeded(TwoStems).double()
    method = replace(deat.get_method("yopo-5-3"), objective=deat.Trades(beta=6.0))
    (x, y), game = images(), game_of(method, net)
    r = game.begin_batch(x.double(), y, Budget(4, 0.05))
    layer = game.prepare_first_layer(r)
    costates = _compute_costates(game, r, layer)
    torch.testing.assert_close(_first_layer_gradient(game, r, layer, costates), r.grad)


@dataclass(frozen=True)
class Curvature:
    """The loss, and how much its gradient differs a step away: two calls on perturbed images, one on clean ones."""

    num_forwards: ClassVar[int] = 3

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> deat.LossOutput:
        adv = x + delta
        logits = net(adv)
        loss = cross_entropy(logits, y).mean()
        (here,) = torch.autograd.grad(loss, adv, create_graph=True)
        further = cross_entropy(net(adv + 0.05 * here.detach().sign()), y).mean()
        (there,) = torch.autograd.grad(further, adv, create_graph=True)
        clean = cross_entropy(net(x), y).mean()
        return deat.LossOutput(loss + 10 * (here - there).square().sum() + clean, logits)


TWICE_DIFFERENTIABLE = {name: net for name, net in NETS.items() if name != "vision transformer"}  # torch's attention


@pytest.mark.promise("P110")
@pytest.mark.parametrize(("build", "expected"), TWICE_DIFFERENTIABLE.values(), ids=TWICE_DIFFERENTIABLE.keys())
def test_yopo_works_with_an_objective_that_differentiates_inside(build, expected):
    net, method = seeded(build).double().eval(), replace(deat.get_method("yopo-3-2"), objective=Curvature())
    (x, y), game = images(), game_of(method, net)
    r = game.begin_batch(x.double(), y, Budget(2, 0.05))
    layer = game.prepare_first_layer(r)
    costates = _compute_costates(game, r, layer)
    torch.testing.assert_close(_first_layer_gradient(game, r, layer, costates), r.grad)
    before = weights(net)
    method.play(game, x.double(), y, Budget(2, 0.05))
    assert not same(before, weights(net))


@pytest.mark.promise("P110")
def test_yopo_refuses_an_objective_that_calls_a_part_of_the_network_before_anything_is_trained():
    def half(net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> deat.LossOutput:
        net.fine(x + delta)
        logits = net(x + delta)
        return deat.LossOutput(cross_entropy(logits, y).mean(), logits)

    net, method = seeded(TwoStems), replace(deat.get_method("yopo-3-2"), objective=half)
    game, before = game_of(method, net), weights(net)
    with pytest.raises(UsageError, match="calls the first layer 3 times, where the network does so 2 times"):
        method.play(game, *images(), Budget(2, 0.05))
    assert same(before, weights(net))


def test_making_offsets_draws_no_random_numbers():
    def noisy(net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> deat.LossOutput:
        logits = net(x + delta + 0.01 * torch.randn_like(x))
        return deat.LossOutput(cross_entropy(logits, y).mean(), logits)

    net, method = conv_net(), replace(deat.get_method("yopo-3-2"), objective=noisy)
    game = game_of(method, net)
    r = game.begin_batch(*images(), Budget(2, 0.05))
    before = torch.get_rng_state()
    game.prepare_first_layer(r)
    assert torch.equal(before, torch.get_rng_state())


class InPieces(nn.Module):
    """A network that its compiler takes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        torch._dynamo.graph_break()
        return self.head(torch.tanh(self.norm(h)).flatten(1))


@pytest.fixture
def graphs(monkeypatch):
    """Compiling is quick, and says what was compiled."""
    found, compile = [], torch.compile

    def backend(graph, inputs):
        found.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, dynamic=False, backend=backend))
    return found


COMPILED = [(name, build, deat.CrossEntropy()) for name, (build, _) in NETS.items()]
COMPILED += [("in pieces", InPieces, loss) for loss in (deat.CrossEntropy(), deat.Trades())]
COMPILED += [("two stems, clean branch", TwoStems, deat.Trades()), ("shared, clean branch", Twice, deat.Trades())]


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(("name", "build", "loss"), COMPILED)
def test_compiled_passes_and_steps_are_the_eager_ones_whatever_k(name, build, loss, graphs):
    method, ends, counts = replace(deat.get_method("yopo-4-3"), objective=loss), [], []
    for compiles in (False, True):
        net = seeded(build).double()
        game = game_of(method, net, engine=deat.Engine(use_compile=compiles))
        for seed, k in enumerate((3, 1, 3)):
            x, y = images(seed=seed)
            method.play(game, x.double(), y, Budget(k, 0.02))
            counts.append(len(graphs))
        ends.append([game._buffers_by_shape[x.shape].delta, *weights(net), *net.buffers()])
        assert not any(m._forward_hooks for m in net.modules())
    assert game.executor.compiled is not None, "compiling fell back"
    assert counts[2] == 0 < counts[3] == counts[5]
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)


def test_first_layer_steps_run_no_other_layer():
    net, method = conv_net(), deat.get_method("yopo-3-4")
    calls = {0: 0, len(net) - 1: 0}
    game = game_of(method, net)
    r = game.begin_batch(*images(), busy_budget(method))
    game.prepare_first_layer(r)
    for index in calls:
        net[index].register_forward_hook(lambda *_, i=index: calls.__setitem__(i, calls[i] + 1))
    method.play(game, *images(), busy_budget(method))
    assert calls == {0: 3 + 2 * (4 - 1), len(net) - 1: 3}  # a full pass shows the first step's gradient itself


def test_yopo_takes_n_steps_of_delta_between_full_passes():
    method = deat.get_method("yopo-4-5")
    game = game_of(method, conv_net(), cls=WatchedGame)
    method.play(game, *images(), Budget(3, 0.001))
    moves = sum(not torch.equal(a, b) for (_, a), (_, b) in zip(game.seen, game.seen[1:], strict=False))
    assert moves == 3 * 5


def test_first_of_n_steps_is_a_pgd_step_and_later_ones_hold_the_costate():
    net, threat = conv_net().double(), THREATS[1]
    (x, y), method = images(), deat.get_method("yopo-2-2")
    game = game_of(method, net, threat, lr=0.0, cls=WatchedGame)
    method.play(game, x.double(), y, Budget(1, 0.1))
    start = game.seen[0][1].requires_grad_()
    first = net[0](x.double() + start)
    rest = net[1:](first)
    grad, costate = torch.autograd.grad(cross_entropy(rest, y).sum(), [start, first])
    one = threat.pgd_step(x.double(), start.detach(), grad, 0.1).requires_grad_()
    (held,) = torch.autograd.grad(net[0](x.double() + one), one, grad_outputs=costate)
    two = threat.pgd_step(x.double(), one.detach(), held, 0.1)
    torch.testing.assert_close(game.seen[-1][1], two)


@pytest.mark.parametrize("n", [1, 4])
def test_yopo_1_n_is_one_plain_update_on_the_start(n):
    x, y = images()
    net, plain = conv_net(), conv_net()
    yopo = deat.get_method(f"yopo-1-{n}", rules="released")
    game = game_of(yopo, net, lr=0.2)
    yopo.play(game, x, y, busy_budget(yopo))
    start = game._buffers_by_shape[x.shape].delta
    assert start.abs().max() > 0
    natural = deat.get_method("natural")
    other = game_of(natural, plain, lr=0.2)
    natural.play(other, x + start, y, Budget(0, 0.0))
    torch.testing.assert_close(weights(net), weights(plain))
    assert not same(weights(net), weights(conv_net()))


def test_weights_step_once_on_the_sum_of_the_passes_with_the_first_layer_counted_once():
    net, (x, y) = conv_net().double(), images()
    method = deat.get_method("yopo-3-2")
    game = game_of(method, net, lr=0.1, cls=WatchedGame)
    before, points, full = weights(net), [], []
    net.register_forward_pre_hook(lambda m, inputs: points.append(inputs[0].detach().clone()))
    net[-1].register_forward_hook(lambda m, i, o: full.append(points[-1]))
    method.play(game, x.double(), y, busy_budget(method))
    full = full[-3:]  # the search for the first layer ran the network once more
    trained, plain = weights(net), conv_net().double()
    total = [torch.zeros_like(w) for w in before]
    for point in full:
        grads = torch.autograd.grad(cross_entropy(plain(point), y).mean(), list(plain.parameters()))
        total = [t + g for t, g in zip(total, grads, strict=True)]
    torch.testing.assert_close(trained, [w - 0.1 * g for w, g in zip(before, total, strict=True)])


def test_network_without_a_layer_that_sees_the_image_is_refused():
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(1, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            return self.logits + x.flatten(1).sum(1, keepdim=True)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.unused = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x.flatten(1)[:, :CLASSES]

    find_first_layer(Blind(), images()[0])  # its one module is the layer
    with pytest.raises(UsageError, match="yopo found no layer"):
        find_first_layer(Nested(), images()[0])
