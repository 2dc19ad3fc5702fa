"""awp+: where the gradient is taken, that the weights come back bit for bit, and what stays as without it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import deat
from deat.core.batch_buffers import Budget
from deat.core.weight_perturbation import WeightPerturbation
from deat.errors import UsageError
from deat.methods.change_settings import configure_method
from helpers.games import busy_budget, game_of, trainer_of
from helpers.nets import conv_net, images, same, weights


@pytest.mark.parametrize("name", ["natural", "fgsm", "free-4", "trades", "f+mart"])
def test_weights_return_bit_for_bit_and_all_but_the_update_is_as_without_it(name):
    plain = deat.get_method(name)
    budget = Budget(0, 0.0) if name == "natural" else busy_budget(plain)
    found = []
    for method in (plain, deat.awp(plain)):
        net = conv_net(batch_norm=True)
        game, before = game_of(method, net, lr=0.0), weights(net)
        method.play_batch(game, *images(), budget)
        assert same(before, weights(net))
        buffers = next(iter(game._buffers_by_shape.values()))
        found.append(([*net.buffers(), buffers.delta, buffers.grad, buffers.magnitude], game.meter.read(0)))
    assert same(found[0][0], found[1][0])  # batch-norm statistics among them: they move once
    (one, two) = (record for _, record in found)
    assert one == two


def test_each_tensor_moves_by_gamma_times_its_norm_along_its_gradient():
    net = conv_net()
    before = weights(net)
    x, y = images()
    nn.functional.cross_entropy(net(x), y).backward()
    WeightPerturbation(gamma=0.01).perturb(net.parameters())
    for old, p in zip(before, net.parameters(), strict=True):
        moved = p.detach() - old
        if p.dim() == 1:
            assert not moved.any()
        else:
            assert moved.norm() == pytest.approx(0.01 * old.norm().item(), rel=1e-3)
            assert torch.cosine_similarity(moved.flatten(), p.grad.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, 1e30])
def test_gradients_that_overflow_or_vanish_leave_finite_weights(value):
    net = conv_net()
    for p in net.parameters():
        p.grad = torch.full_like(p, value)
    before = weights(net)
    WeightPerturbation().perturb(net.parameters())
    assert all(p.isfinite().all() for p in net.parameters())
    assert same(before, weights(net)) == (value != 1e30)


def test_weights_are_put_back_when_the_network_fails_at_the_perturbed_ones():
    net, calls = conv_net(batch_norm=True), []
    before = weights(net)

    def fail_at_the_second(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("broken layer")

    net[-1].register_forward_hook(fail_at_the_second)
    method = deat.awp(deat.get_method("natural"))
    with pytest.raises(RuntimeError, match="broken layer"):
        method.play(game_of(method, net), *images(), Budget(0, 0.0))
    assert same(before, weights(net))


def test_warm_up_epochs_are_those_of_the_method_itself_and_cost_no_more():
    plain = trainer_of("pgd-2", conv_net(batch_norm=True), epochs=2)
    warm = trainer_of(configure_method("awp+pgd-2", awp_warmup=1), conv_net(batch_norm=True), epochs=2)
    for trainer in (plain, warm):
        trainer.run_epoch()
    assert same(weights(plain.model), weights(warm.model))
    one, two = plain.run_epoch(), warm.run_epoch()
    assert two.backprops - one.backprops == len(warm.train)
    assert not same(weights(plain.model), weights(warm.model))


@pytest.mark.parametrize(
    "name", ["awp+natural", "m+awp+deat", "awp+m+deat", "awp+f+trades", "g+awp+fgsm", "m+awp+g+mart"]
)
def test_prefixes_compose_in_any_order(name):
    method = deat.get_method(name)
    assert method.name == name
    plain = deat.get_method(name.replace("awp+", ""))
    assert replace(method, name=plain.name, play=plain.play, summary="") == plain


def test_order_of_g_plus_and_awp_plus_does_not_matter():
    trained = [conv_net(batch_norm=True) for _ in range(2)]
    for name, net in zip(("g+awp+fgsm", "awp+g+fgsm"), trained, strict=True):
        trainer_of(name, net, epochs=1).fit()
    assert same(weights(trained[0]), weights(trained[1]))


def test_settings_are_changed_by_name():
    method = configure_method("m+awp+pgd", awp_gamma=0.01, awp_warmup=3)
    assert method.play.perturbation == WeightPerturbation(0.01, 3)
    assert method.describe()["play"]["perturbation"] == {"kind": "WeightPerturbation", "gamma": 0.01, "warmup": 3}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: deat.get_method("awp+yopo-5-3"), "several passes"),
        (lambda: deat.get_method("g+awp+yopo-5-3"), "several passes"),
        (lambda: deat.get_method("awp+m+awp+pgd"), "once"),
        (lambda: configure_method("pgd-7", awp_gamma=0.01), r"awp\+pgd-7"),
        (lambda: configure_method("awp+pgd-7", awp_gamma=0), r"leave awp\+ out"),
        (lambda: configure_method("awp+pgd-7", awp_gamma=5), "at most 1"),
        (lambda: configure_method("awp+pgd-7", awp_warmup=-1), "warm-up"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(make, says):
    with pytest.raises(UsageError, match=says):
        make()


class Sums(deat.Craft):
    """A play that sums gradients before its update."""

    def __call__(self, game, x, y, budget):
        buffers = game.begin_batch(x, y, budget)
        game.accumulate_gradients(buffers, lambda r: game.compute_both_gradients(r))
        game.joint_update(buffers)
        game.end_batch(buffers)


def test_a_play_of_your_own_that_sums_gradients_is_refused():
    method = deat.awp(deat.Method("sums", Sums(), deat.attack_schedules.Fixed(k=0)))
    with pytest.raises(UsageError, match="sums the gradients"):
        method.play(game_of(method, conv_net()), *images(), Budget(0, 0.0))
