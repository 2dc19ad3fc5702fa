"""g+: what is penalised, along which direction, at which cost, and what it leaves as it was."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget
from deat.errors import UsageError
from deat.methods.change_settings import configure_method
from deat.tasks import CLASSIFICATION, Regression
from deat.tasks.per_example_losses import cross_entropy
from helpers.games import THREATS, UNIONS, busy_budget, game_of, trainer_of
from helpers.nets import conv_net, images, same, weights

every_threat = pytest.mark.parametrize("threat", [*THREATS, deat.L2(0.5, scale=[[2.0]])], ids=str)


def penalised(
    form: str, step: float, net: nn.Module, x: Tensor, y: Tensor, threat: deat.ThreatModel
) -> tuple[float, list[Tensor]]:
    """The penalty at x alone, and its gradient by the weights."""
    penalty = deat.GradientPenalty(form, weight=1.0, step=step)
    loss = partial(deat.CrossEntropy(), task=CLASSIFICATION)
    delta = torch.zeros_like(x).requires_grad_()
    output = penalty.add_to(loss, net, x, delta, y, CLASSIFICATION, threat)
    value = output.loss - loss(net, x, delta, y).loss
    return value.item(), list(torch.autograd.grad(value, list(net.parameters())))


def by_double_backward(net: nn.Module, x: Tensor, y: Tensor, threat: deat.ThreatModel) -> tuple[float, list[Tensor]]:
    """The mean of (eps times the slope along the steepest step of length 1)^2, differentiated twice."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(net(x), y).sum(), x, create_graph=True)
    direction = threat.step(x.detach(), torch.zeros_like(x), grad.detach(), threat.eps)
    value = (grad * direction).flatten(1).sum(1).square().mean()
    return value.item(), list(
        torch.autograd.grad(value, list(net.parameters()), allow_unused=True, materialize_grads=True)
    )


@every_threat
def test_finite_difference_converges_to_the_double_backward_value_and_gradient(threat):
    net, (x, y) = conv_net().double(), images()
    x = x.double()
    value, grads = by_double_backward(net, x, y, threat)
    errors = []
    for step in (1e-3, 1e-4, 1e-6):
        found, found_grads = penalised("gradient", step, net, x, y, threat)
        difference = max((a - b).abs().max().item() for a, b in zip(found_grads, grads, strict=True))
        errors.append(max(abs(found - value), difference))
    assert value > 1e-4
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)  # of first order in the step
    assert errors[2] < 1e-6


@pytest.mark.parametrize("threat", THREATS[:2], ids=str)
def test_in_linf_and_l2_the_dual_norm_of_the_gradient_is_penalised(threat):
    net, (x, y) = conv_net().double(), images()
    x = x.double().requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(net(x), y).sum(), x)
    expected = (threat.eps * threat.dual_norm(grad)).square().mean().item()
    assert penalised("gradient", 1e-6, net, x.detach(), y, threat)[0] == pytest.approx(expected, rel=1e-5)


def test_curvature_of_a_quadratic_loss_is_its_hessian_along_the_step():
    """(w x - y)^2 has the Hessian 2 w w^T, whatever the step."""
    net = nn.Linear(3, 1, bias=False).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    threat, loss = deat.Linf(0.1, box=None), partial(deat.CrossEntropy(), task=Regression())
    w = net.weight.detach()[0]
    expected = []
    for row, target in zip(x, y, strict=True):
        grad = 2 * (w @ row - target) * w
        v = threat.eps * grad.sign()
        expected.append((v.norm() * (2 * w * (w @ v)).norm()).square())
    for step in (0.5, 2.0):
        delta = torch.zeros_like(x).requires_grad_()
        penalty = deat.GradientPenalty("curvature", weight=1.0, step=step)
        output = penalty.add_to(loss, net, x, delta, y, Regression(), threat)
        found = (output.loss - loss(net, x, delta, y).loss).item()
        assert found == pytest.approx(torch.stack(expected).mean().item(), rel=1e-9)


@pytest.mark.parametrize("form", ["gradient", "curvature"])
@pytest.mark.parametrize("name", ["natural", "pgd-2", "deat-3", "trades", "yopo-3-2"])
def test_delta_and_l_x_are_those_of_the_method_without_the_penalty(name, form):
    plain = deat.get_method(name)
    budget = Budget(0, 0.0) if name == "natural" else busy_budget(plain)
    found = []
    for method in (plain, deat.gplus(plain, form)):
        game = game_of(method, conv_net(batch_norm=True).double(), lr=0.0)
        x, y = images()
        method.play(game, x.double(), y, budget)
        found.append((game.meter.read(0), next(iter(game._buffers_by_shape.values()))))
    (one, r), (two, s) = found
    assert torch.equal(r.delta, s.delta)
    torch.testing.assert_close(r.grad, s.grad, rtol=1e-12, atol=1e-15)
    assert two.magnitude == pytest.approx(one.magnitude, rel=1e-12)
    assert two.accuracy == one.accuracy
    assert two.loss > one.loss


def test_only_the_last_update_of_a_batch_is_penalised():
    plain = deat.get_method("free-4")
    updates: list[list[list[Tensor]]] = []
    for method in (plain, deat.gplus(plain)):
        net, seen = conv_net().double(), []
        game = game_of(method, net)
        step = game.optimizer.step
        game.optimizer.step = lambda step=step, seen=seen, net=net: (step(), seen.append(weights(net)))
        x, y = images()
        method.play(game, x.double(), y, busy_budget(plain))
        updates.append(seen)
    assert [same(a, b) for a, b in zip(*updates, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize("form", ["gradient", "curvature"])
@pytest.mark.parametrize("objective", [deat.CrossEntropy(), deat.Trades()], ids=str)
def test_dropout_masks_are_the_same_in_all_passes(objective, form):
    """Otherwise the penalty at a tiny step would be the variance of the masks over the step squared."""
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    x, y = images()
    delta, loss = torch.zeros_like(x.double()).requires_grad_(), partial(objective, task=CLASSIFICATION)
    penalty = deat.GradientPenalty(form, weight=1.0, step=1e-6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = penalty.add_to(loss, net, x.double(), delta, y, CLASSIFICATION, THREATS[0])
        after = torch.rand(1)
        torch.manual_seed(0)
        plain = loss(net, x.double(), delta, y)
        assert (output.loss - plain.loss).item() < 10
        assert torch.equal(after, torch.rand(1))  # and the stream goes on as without a penalty


@pytest.mark.parametrize("form", ["gradient", "curvature"])
def test_bf16_comes_close_to_float32_at_the_default_step(form):
    method, found = deat.gplus(deat.get_method("natural"), form, weight=1.0), []
    for precision in ("fp32", "bf16"):
        losses = []
        for played in (method, deat.get_method("natural")):
            net = conv_net()
            with torch.no_grad():
                net[-1].weight.mul_(20)  # so that there is some curvature
            game = game_of(played, net, lr=0.0, engine=deat.Engine(precision=precision))
            played.play(game, *images(60), Budget(0, 0.0))
            losses.append(game.meter.read(0).loss)
        found.append(losses[0] - losses[1])
    assert found[0] > 0.01
    assert found[1] == pytest.approx(found[0], rel=0.25)


# Names and settings


@pytest.mark.parametrize(
    "name", ["g+natural", "g+fgsm", "m+g+deat", "g+m+deat", "f+g+trades", "m+g+f+mart", "g+m+amata-2-10"]
)
def test_prefixes_compose_in_any_order(name):
    method = deat.get_method(name)
    assert method.name == name
    plain = deat.get_method(name.replace("g+", ""))
    assert replace(method, name=plain.name, play=plain.play) == plain
    assert method.play == deat.gplus(plain).play


def test_a_method_in_a_file_takes_g_plus(tmp_path):
    (tmp_path / "own.py").write_text(
        "import deat\nbold = deat.Method('bold', deat.Replay(), deat.attack_schedules.Fixed(k=1, alpha_eps=0.5))\n"
    )
    for spec in (f"{tmp_path}/own.py:g+bold", f"g+{tmp_path}/own.py:bold", f"m+g+{tmp_path}/own.py:bold"):
        assert "g+bold" in deat.get_method(spec).name


def test_settings_are_changed_by_name_and_the_form_brings_its_own():
    changed = configure_method("m+g+deat", g_weight=0.3)
    assert changed.play.penalty == deat.GradientPenalty("gradient", 0.3, 0.25)
    assert configure_method(changed, g_form="curvature").play.penalty == deat.GradientPenalty("curvature", 0.1, 1.0)
    assert configure_method("g+deat-3", g_step=0.5) == deat.gplus(deat.get_method("deat-3"), step=0.5)
    described = changed.describe()["play"]
    assert described["play"] == {"kind": "Replay"}
    assert described["penalty"] == {"kind": "GradientPenalty", "form": "gradient", "weight": 0.3, "step": 0.25}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: configure_method("deat-3", g_weight=0.3), "g\\+deat-3"),
        (lambda: configure_method("g+deat-3", g_weight=0), "leave g\\+ out"),
        (lambda: configure_method("g+deat-3", g_weight=-1.0), "weight of g\\+"),
        (lambda: configure_method("g+deat-3", g_step=0), "step of g\\+"),
        (lambda: configure_method("g+deat-3", g_form="hessian"), "curvature"),
        (lambda: deat.gplus(deat.get_method("fgsm"), "hessian"), "curvature"),
        (lambda: deat.get_method("g+m+g+deat"), "once"),
        (lambda: deat.gplus("fgsm"), r"get_method\('g\+NAME'\)"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_accepted(make, says):
    with pytest.raises(UsageError, match=says):
        make()


class Twice(deat.Craft):
    """Updates twice, and does not say which update is the last."""

    def __call__(self, game: deat.Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        buffers = game.begin_batch(x, y, budget)
        game.joint_update(buffers)
        game.joint_update(buffers)
        game.end_batch(buffers)

    def backprops(self, budget: Budget) -> int:
        return 2


def test_a_play_with_two_last_updates_is_refused_with_what_to_change():
    method = deat.gplus(deat.Method("twice", Twice(), deat.attack_schedules.Fixed(k=0)))
    with pytest.raises(UsageError, match=r"Twice made 2 such.*last=False"):
        method.play_batch(game_of(method, conv_net()), *images(), Budget(0, 0.0))


@pytest.mark.parametrize("threat", UNIONS, ids=lambda t: t.rule)
def test_under_a_union_each_example_is_penalised_in_its_ball(threat):
    method = deat.get_method("m+g+deat")
    game = game_of(method, conv_net(), threat)
    method.play_batch(game, *images(), busy_budget(method, threat))
    assert game.meter.read(0).examples == 6


def test_yopo_refuses_what_it_refuses_without_the_penalty():
    with pytest.raises(UsageError, match="first layer alone"):
        trainer_of("g+yopo-3-2", threat=UNIONS[0])


def test_compiled_moves_play_the_penalty_uncompiled(monkeypatch):
    pytest.importorskip("torch._inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, inside its compiler
        torch._dynamo.reset()
        one = trainer_of("g+pgd-1", conv_net(), epochs=1, engine="eager").fit().history
        two = trainer_of("g+pgd-1", conv_net(), epochs=1, engine="compile").fit().history
    assert two[0].loss == pytest.approx(one[0].loss, rel=1e-4)
    assert two[0].backprops == one[0].backprops


# GradAlign


def test_alignment_of_examples_without_a_gradient_is_zero_and_finite():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        net[1].weight.zero_()
    x, y = images()
    x = x.double()
    penalty, delta = deat.GradientAlignment(), torch.zeros_like(x).requires_grad_()
    loss = partial(deat.CrossEntropy(), task=CLASSIFICATION)
    output = penalty.add_to(loss, net, x, delta, y, CLASSIFICATION, THREATS[0], noise=0.1 * torch.ones_like(x))
    assert torch.equal(output.loss, loss(net, x, delta, y).loss)
    grads = torch.autograd.grad(output.loss, list(net.parameters()))
    assert all(bool(grad.isfinite().all()) for grad in grads)


def test_a_larger_alignment_weight_turns_the_gradients_to_each_other():
    angles = []
    for weight in (1e-3, 5.0):
        net, (x, y) = conv_net(), images(24)
        method = configure_method("gradalign", g_weight=weight)
        game = game_of(method, net, deat.Linf(0.3), lr=0.05)
        for _ in range(40):
            method.play_batch(game, x, y, busy_budget(method, deat.Linf(0.3)))
        slopes = []
        for moved in (
            x,
            (x + 0.3 * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) - 1)).clamp(0, 1),
        ):
            moved = moved.clone().requires_grad_()
            slopes += torch.autograd.grad(cross_entropy(net(moved), y).sum(), moved)
        angles.append(1 - torch.cosine_similarity(*(slope.flatten(1) for slope in slopes)).mean().item())
    assert angles[1] < 0.5 * angles[0]


def test_gradalign_has_one_penalty_with_one_setting():
    with pytest.raises(UsageError, match=r"g\+ cannot be put before gradalign"):
        deat.get_method("g+gradalign")
    with pytest.raises(UsageError, match=r"\(g_weight\) alone"):
        configure_method("gradalign", g_step=0.5)
    with pytest.raises(UsageError, match=r"\(g_weight\) alone"):
        configure_method("gradalign", g_form="curvature")
    with pytest.raises(UsageError, match="weight of gradalign"):
        configure_method("gradalign", g_weight=0.0)
    assert configure_method("gradalign", g_weight=0.5).play.penalty.weight == 0.5
