"""The moves A and J, the starts they begin from and what they measure."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget
from deat.engine import executor
from deat.engine.cuda_graphs import GraphRecorder
from deat.engine.executor import Executor
from deat.errors import DataError, UsageError
from deat.tasks.per_example_losses import cross_entropy, kl_divergence
from helpers.games import THREATS, WatchedGame, busy_budget, game_of
from helpers.nets import conv_net, images, same, weights

every_threat = pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
PGD = deat.get_method("pgd-2")
ZERO_START = replace(PGD, attack=replace(PGD.attack, start="zero"))


class Inputs:
    """Every image batch a network was asked about, and whether gradients were on."""

    def __init__(self, net: nn.Module) -> None:
        self.seen: list[Tensor] = []
        self.with_grad: list[bool] = []
        net.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.seen.append(inputs[0].detach().clone())
        self.with_grad.append(torch.is_grad_enabled())


def one_by_one(net: nn.Module, x: Tensor, y: Tensor, threat: deat.ThreatModel, budget: Budget, at: int) -> float:
    """l_X the slow way: each image alone, its gradient after `at` of its ascents."""
    total = 0.0
    for i in range(len(y)):
        image, label = x[i : i + 1], y[i : i + 1]
        delta = torch.zeros_like(image)
        for _ in range(at + 1):
            delta.requires_grad_()
            (grad,) = torch.autograd.grad(cross_entropy(net(image + delta), label).sum(), delta)
            delta = delta.detach()
            measured = threat.dual_norm(grad).item()
            delta = threat.pgd_step(image, delta, grad, budget.step_size)
        total += measured
    return total


@every_threat
@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize(("move", "at"), [("joint", 2), ("ascend", 1)])
def test_magnitude_is_the_sum_over_examples_whatever_the_batch_size(threat, size, move, at):
    net, (x, y) = conv_net().double(), images(12)
    x, budget = x.double(), Budget(2, 0.4 * threat.eps)
    method = replace(ZERO_START, probe=deat.MagnitudeProbe(move=move))
    game = game_of(method, net, threat, lr=0.0)
    for start in range(0, 12, size):
        method.play(game, x[start : start + size], y[start : start + size], budget)
    assert game.meter.read(0).magnitude == pytest.approx(one_by_one(net, x, y, threat, budget, at), rel=1e-9)


@every_threat
def test_magnitude_in_normalised_space_is_taken_after_multiplying_by_std(threat):
    x, y = images(channels=2)
    std = torch.tensor([0.2, 0.5]).view(1, 2, 1, 1)
    net = deat.add_normalization(conv_net(channels=2), [0.4, 0.5], [0.2, 0.5])
    found = {}
    for space in ("pixel", "normalised"):
        game = game_of(replace(ZERO_START, probe=deat.MagnitudeProbe(space=space)), net, threat, lr=0.0)
        r = game.begin_batch(x, y, Budget(0, 0.0))
        game.joint_update(r)
        found[space] = r.magnitude.clone()
        grad = r.grad.clone()
    torch.testing.assert_close(found["pixel"], threat.dual_norm(grad))
    torch.testing.assert_close(found["normalised"], threat.dual_norm(grad * std))


def test_magnitude_of_an_epoch_without_ascents_is_zero_when_ascents_are_measured():
    game = game_of(replace(PGD, probe=deat.MagnitudeProbe(move="ascend")), conv_net())
    PGD.play(game, *images(), Budget(2, 0.05))
    assert game.meter.read(0).magnitude > 0
    game.meter.reset()
    PGD.play(game, *images(), Budget(0, 0.05))
    assert game.meter.read(0).magnitude == 0


@pytest.mark.promise("P36")
@every_threat
def test_bf16_keeps_images_and_delta_in_float32_and_inside_the_ball(threat):
    net = conv_net()
    inputs, game = Inputs(net), game_of(ZERO_START, net, threat, engine=deat.Engine(precision="bf16"))
    exact = game_of(ZERO_START, conv_net(), threat)
    answers = []
    net[-1].register_forward_hook(lambda m, i, out: answers.append(out.dtype))
    for played in (game, exact):
        r = played.begin_batch(*images(), Budget(3, 0.4 * threat.eps))
        for _ in range(3):
            played.ascend(r)
        played.joint_update(r)
        assert {b.dtype for b in (r.x, r.delta, r.grad, r.magnitude, r.loss)} == {torch.float32}
        assert threat.contains(r.x, r.x.double() + r.delta.double()).all()
        played.end_batch(r)
    assert set(answers) == {torch.bfloat16}
    assert {x.dtype for x in inputs.seen} == {torch.float32}
    assert game.meter.read(0).magnitude == pytest.approx(exact.meter.read(0).magnitude, rel=0.05)


@pytest.mark.parametrize("name", ["pgd-7", "trades", "mart", "fat-5"])
def test_ascend_gives_parameters_no_gradient_and_leaves_them_alone(name):
    method, net = deat.get_method(name), conv_net()
    game, before = game_of(method, net), weights(net)
    r = game.begin_batch(*images(), busy_budget(method))
    start = r.delta.clone()
    for _ in range(3):
        game.ascend(r)
    assert all(p.grad is None for p in net.parameters())
    assert same(before, weights(net))
    assert not torch.equal(start, r.delta)


def trades_loss(net: nn.Module, x: Tensor, delta: Tensor, y: Tensor, clean_grad: bool = True) -> Tensor:
    clean = net(x) if clean_grad else net(x).detach()
    return (cross_entropy(net(x), y) + 6 * kl_divergence(clean, net(x + delta))).mean()


@pytest.mark.parametrize("name", ["pgd-7", "trades"])
def test_joint_gives_the_weights_and_delta_the_gradients_of_plain_autograd(name):
    method, net = deat.get_method(name), conv_net().double()
    (x, y), game = images(), game_of(method, net)
    r = game.begin_batch(x.double(), y, Budget(1, 0.05))
    game.ascend(r)
    game.accumulate_gradients(r, game.compute_both_gradients)
    delta = r.delta.clone().requires_grad_()
    plain = {
        "pgd-7": lambda: cross_entropy(net(r.x + delta), y).mean(),
        "trades": lambda: trades_loss(net, r.x, delta, y),
    }
    *expected, by_delta = torch.autograd.grad(plain[name](), [*net.parameters(), delta])
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)
    torch.testing.assert_close(r.grad, by_delta * len(y))


def test_trades_gradient_flows_into_both_branches():
    method, net = deat.get_method("trades"), conv_net().double()
    (x, y), game = images(), game_of(method, net)
    r = game.begin_batch(x.double(), y, Budget(1, 0.05))
    game.ascend(r)
    game.accumulate_gradients(r, game.compute_both_gradients)
    one_branch = torch.autograd.grad(trades_loss(net, r.x, r.delta, y, clean_grad=False), list(net.parameters()))
    assert not any(torch.allclose(p.grad, g) for p, g in zip(net.parameters(), one_branch, strict=True))


def test_trades_computes_the_clean_logits_for_crafting_once_a_batch_without_grad():
    method, net = deat.get_method("trades"), conv_net()
    x, y = images()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, x, y, Budget(3, 0.05))
    clean = [torch.equal(seen, x) for seen in inputs.seen]
    assert clean == [True, False, False, False, True, False]
    assert inputs.with_grad == [False, True, True, True, True, True]
    with torch.no_grad():
        torch.testing.assert_close(game._buffers_by_shape[x.shape].reference_logits, conv_net()(x))


def test_trades_without_ascents_needs_no_clean_logits_for_crafting():
    method, net = deat.get_method("m+trades"), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, *images(), Budget(0, 0.05))
    assert len(inputs.seen) == 2
    assert game.cost.passes == 4


def test_joint_steps_the_weights_by_plain_sgd_and_forgets_the_gradient():
    net, (x, y) = conv_net(), images()
    game = game_of(ZERO_START, net, lr=0.3)
    grads = torch.autograd.grad(cross_entropy(net(x), y).mean(), list(net.parameters()))
    expected = [p.detach() - 0.3 * g for p, g in zip(net.parameters(), grads, strict=True)]
    r = game.begin_batch(x, y, Budget(0, 0.0))
    game.joint_update(r)
    torch.testing.assert_close(weights(net), expected)
    assert all(p.grad is None for p in net.parameters())


def test_replay_updates_weights_in_every_pass_and_craft_only_in_the_last():
    for name, updates in (("free-4", 4), ("pgd-3", 1), ("yopo-4-2", 1)):
        method, net = deat.get_method(name), conv_net()
        game, steps = game_of(method, net), []
        game.optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        method.play(game, *images(), busy_budget(method))
        assert len(steps) == updates


def test_loss_and_accuracy_of_a_replay_are_the_last_pass_s():
    method, net = deat.get_method("free-3"), conv_net()
    (x, y), answers = images(), []
    net.register_forward_hook(lambda m, i, out: answers.append(out.detach()))
    game = game_of(method, net, lr=1.0)
    method.play(game, x, y, busy_budget(method))
    record = game.meter.read(0)
    assert len(answers) == 3
    assert record.loss == pytest.approx(cross_entropy(answers[-1], y).mean().item(), rel=1e-6)
    assert record.loss != pytest.approx(cross_entropy(answers[0], y).mean().item(), rel=1e-3)
    assert record.accuracy == pytest.approx((answers[-1].argmax(1) == y).double().mean().item())


# Starts


@pytest.mark.parametrize("name", ["m+pgd", "m+deat", "m+fgsm", "m+trades", "m+mart", "deat-3", "m+yopo-5-3", "m+free"])
@pytest.mark.parametrize("rules", ["default", "literal", "released"])
def test_epoch_with_k_0_is_clean_by_the_text_and_noisy_by_the_released_code(name, rules):
    method = deat.get_method(name, rules=rules)
    x, y = images()
    net = conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, x, y, Budget(0, 0.05))
    noise = (inputs.seen[-1] - x).abs().max()
    if rules != "released" or method.attack.start == "zero":
        assert noise == 0
    else:
        assert 0 < noise <= (0.01 if method.attack.start == "jitter" else THREATS[0].eps + 1e-6)


@pytest.mark.parametrize("rules", ["default", "literal", "released"])
def test_natural_training_is_clean_under_each_rule_set(rules):
    method, net = deat.get_method("natural", rules=rules), conv_net()
    x, y = images()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, x, y, busy_budget(method))
    assert [torch.equal(seen, x) for seen in inputs.seen] == [True]


def persistent_free(**options: bool) -> deat.Method:
    free = deat.get_method("free-3")
    return replace(free, attack=replace(free.attack, persistent=True, **options))


@every_threat
@pytest.mark.parametrize("name", ["free-3", "m+deat", "m+pgd", "m+yopo-5-3"])
def test_unclipped_carried_delta_stays_in_the_ball_and_the_network_sees_pixels_in_0_1(name, threat):
    method = deat.configure_method(deat.get_method(name, rules="released"), persistent=True)
    net = conv_net().double()
    inputs, game, left_the_box = Inputs(net), game_of(method, net, threat), False
    for seed in range(4):
        x, y = images(seed=seed)
        method.play(game, x.double(), y, Budget(2, threat.eps / 2))
        assert (threat.norm(game.carried_delta) <= threat.eps * (1 + 1e-9)).all()
        left_the_box |= not threat.contains(x, x + game.carried_delta).all()
    assert left_the_box
    for seen in inputs.seen:
        assert seen.min() >= -1e-12
        assert seen.max() <= 1 + 1e-12


@pytest.mark.promise("P111")
@every_threat
@pytest.mark.parametrize("name", ["pgd-2", "free-3", "yopo-3-2", "f+pgd-2"])
def test_a_threat_model_that_is_replaced_holds_everywhere_from_the_next_batch_on(name, threat):
    method = deat.get_method(name)
    game = game_of(method, conv_net(), deat.Linf(0.3), cls=WatchedGame)
    method.play(game, *images(), Budget(2, 0.3))
    game.seen.clear()
    game.threat = threat
    for seed in range(3):
        method.play(game, *images(seed=seed), Budget(2, 0.3))
    assert all(threat.contains(x, x + delta).all() for x, delta in game.seen)


@every_threat
def test_persistent_free_begins_a_batch_where_the_last_one_ended_projected_to_the_new_images(threat):
    method, net = persistent_free(), conv_net()
    inputs, game = Inputs(net), game_of(method, net, threat)
    batches = [images(6, seed=seed) for seed in range(3)]
    carried = torch.zeros_like(batches[0][0])
    for x, y in batches:
        first = len(inputs.seen)
        method.play(game, x, y, busy_budget(method, threat))
        torch.testing.assert_close(inputs.seen[first], x + threat.project(x, carried), rtol=0, atol=1e-6)
        assert carried.abs().max() > 0 or first == 0
        carried = game.carried_delta.clone()
    assert not torch.equal(
        game.carried_delta, threat.project(batches[0][0], game.carried_delta)
    )  # so projecting was no idle work


def test_free_without_carrying_begins_every_batch_clean():
    method, net = deat.get_method("free-3"), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    for seed in range(3):
        method.play(game, *images(seed=seed), busy_budget(method))
    assert all(torch.equal(inputs.seen[3 * seed], images(seed=seed)[0]) for seed in range(3))
    assert game.carried_delta is None


def test_carried_delta_takes_the_step_after_the_last_pass_too():
    method, net = persistent_free(), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    x, y = images()
    method.play(game, x, y, busy_budget(method))
    assert len(inputs.seen) == 3
    assert not torch.allclose(game.carried_delta, inputs.seen[-1] - x)


@pytest.mark.parametrize(("rules", "is_stepped"), [("default", False), ("literal", False), ("released", True)])
def test_in_epochs_with_k_0_a_carried_delta_moves_only_where_the_network_sees_it(rules, is_stepped):
    method, net = deat.configure_method(deat.get_method("m+deat", rules=rules), persistent=True), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    for seed in (0, 1):
        method.play(game, *images(seed=seed), Budget(0, 0.01))
        assert (game.carried_delta.abs().max() > 0) == is_stepped
    x, y = images(seed=2)
    method.play(game, x, y, Budget(1, 0.01))
    assert torch.equal(inputs.seen[2], x) is not is_stepped


def test_short_batch_uses_and_renews_the_first_rows_of_the_carried_delta():
    method, net = persistent_free(), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, *images(6), busy_budget(method))
    carried = game.carried_delta.clone()
    x, y = images(2, seed=1)
    method.play(game, x, y, busy_budget(method))
    torch.testing.assert_close(inputs.seen[3], x + game.threat.project(x, carried[:2]), rtol=0, atol=1e-6)
    assert torch.equal(game.carried_delta[2:], carried[2:])
    assert not torch.equal(game.carried_delta[:2], carried[:2])


def test_batch_longer_than_the_carried_delta_begins_its_other_rows_anew():
    method, net = persistent_free(), conv_net()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, *images(2), busy_budget(method))
    carried = game.carried_delta.clone()
    x, y = images(5, seed=1)
    method.play(game, x, y, busy_budget(method))
    started = inputs.seen[3] - x
    torch.testing.assert_close(started[:2], game.threat.project(x[:2], carried), rtol=0, atol=1e-6)
    assert started[2:].abs().max() == 0
    assert len(game.carried_delta) == 5


# Freezing


def friendly_one_by_one(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, threat, budget: Budget) -> Tensor:
    """FAT as its authors describe it, one image at a time."""
    finished = []
    for i in range(len(y)):
        image, label, delta, left = x[i : i + 1], y[i : i + 1], start[i : i + 1].clone(), budget.stop_threshold
        for _ in range(budget.k):
            delta.requires_grad_()
            logits = net(image + delta)
            (grad,) = torch.autograd.grad(cross_entropy(logits, label).sum(), delta)
            delta = delta.detach()
            if logits.argmax(1).item() != label.item():
                if left == 0:
                    break
                left -= 1
            delta = threat.pgd_step(image, delta, grad, budget.step_size)
        finished.append(delta)
    return torch.cat(finished)


def converged_one_by_one(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, threat, budget: Budget) -> Tensor:
    """DAT's stopping rule, one image at a time."""
    finished = []
    for i in range(len(y)):
        image, label, begun = x[i : i + 1], y[i : i + 1], start[i : i + 1]
        delta = begun.clone()
        for _ in range(budget.k):
            delta.requires_grad_()
            (grad,) = torch.autograd.grad(cross_entropy(net(image + delta), label).sum(), delta)
            delta = delta.detach()
            fosc = threat.eps * threat.dual_norm(grad).item() - (grad * (delta - begun)).sum().item()
            if fosc <= budget.stop_threshold:
                break
            delta = threat.pgd_step(image, delta, grad, budget.step_size)
        finished.append(delta)
    return torch.cat(finished)


SLOW = {"fat-5": friendly_one_by_one, "dat": converged_one_by_one}
EASY = images(16, seed=3)


def frozen_game(name: str, threat: deat.ThreatModel, **ascent: bool) -> tuple[deat.Method, deat.Game]:
    method = deat.get_method(name)
    method = replace(method, attack=replace(method.attack, **ascent))
    net = conv_net(batch_norm=True, seed=1).double().eval()
    return method, game_of(method, net, threat, lr=0.1)


@every_threat
@pytest.mark.parametrize("level", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", ["fat-5", "dat"])
def test_freeze_rule_equals_a_loop_over_single_images(name, threat, level):
    x, y = EASY[0].double(), EASY[1]
    _, game = frozen_game(name, threat)
    r = game.begin_batch(x, y, Budget(5, 0.3 * threat.eps, level))
    start, budget = r.delta.clone(), Budget(5, 0.3 * threat.eps, level)
    if name == "dat":  # a part of the images is below this level at once, others come to it later
        moving = start.clone().requires_grad_()
        (grad,) = torch.autograd.grad(cross_entropy(game.net(x + moving), y).sum(), moving)
        fosc = threat.eps * threat.dual_norm(grad)
        budget = Budget(5, 0.3 * threat.eps, fosc.quantile(0.21 + 0.3 * level).item())
        game.generator.manual_seed(0)
        r = game.begin_batch(x, y, budget)
    assert torch.equal(r.delta, start)
    for _ in range(budget.k):
        game.ascend(r)
    expected = SLOW[name](game.net, x, y, start, threat, budget)
    torch.testing.assert_close(r.delta, expected, rtol=0, atol=1e-9)
    steps = int(game.meter.counts[3])
    assert 0 < steps < budget.k * len(y)  # some stopped early, and some moved


def test_active_counts_the_examples_that_really_moved():
    x, y = EASY[0].double(), EASY[1]
    _, game = frozen_game("fat-5", THREATS[0])
    budget, moved = Budget(5, 0.03, 1.0), 0
    r = game.begin_batch(x, y, budget)
    for _ in range(budget.k):
        before = r.delta.clone()
        game.ascend(r)
        moved += int((r.delta != before).flatten(1).any(1).sum())
    game.joint_update(r)
    game.end_batch(r)
    assert game.meter.read(0).num_image_steps == moved
    assert 0 < moved < 5 * len(y)


@every_threat
@pytest.mark.parametrize("name", ["fat-5", "f+trades", "f+mart", "m+fat-5"])
def test_compact_equals_mask_in_eval_mode_batch_norm(name, threat):
    x, y = EASY[0].double(), EASY[1]
    ends = []
    for compact in (False, True):
        method, game = frozen_game(name, threat, compact=compact)
        budget = Budget(5, 0.3 * threat.eps, 1.0)
        method.play(game, x, y, budget)
        r = game._buffers_by_shape[x.shape]
        ends.append((r.delta.clone(), r.active.clone(), weights(game.net), game.meter.read(0)))
    (masked, active, trained, record), (delta, still, also, other) = ends
    assert 0 < active.sum() < len(y)
    assert torch.equal(active, still)
    torch.testing.assert_close(delta, masked, rtol=0, atol=1e-9)
    torch.testing.assert_close(also, trained, rtol=0, atol=1e-9)
    assert other.num_image_steps == record.num_image_steps
    assert other.magnitude == pytest.approx(record.magnitude, rel=1e-9)


def test_compact_runs_the_network_on_ever_fewer_images():
    x, y = EASY[0].double(), EASY[1]
    method, game = frozen_game("fat-5", THREATS[0], compact=True)
    inputs = Inputs(game.net)
    method.play(game, x, y, Budget(5, 0.03, 0.0))
    sizes = [len(seen) for seen in inputs.seen]
    assert sizes[0] == sizes[-1] == len(y)
    assert sizes[1:-1] == sorted(sizes[1:-1], reverse=True)
    assert sizes[-2] < len(y)


def test_compact_without_a_freeze_rule_in_eval_mode_is_refused():
    for name in ("pgd-7", "dat", "free-8"):
        with pytest.raises(UsageError, match="compact"):
            replace(deat.get_method(name).attack, compact=True)


def test_carried_delta_of_another_image_size_is_not_used():
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))
    method = persistent_free()
    inputs, game = Inputs(net), game_of(method, net)
    method.play(game, *images(6, side=4), busy_budget(method))
    x, y = images(6, side=8)
    method.play(game, x, y, busy_budget(method))
    assert torch.equal(inputs.seen[3], x)
    assert game.carried_delta.shape == x.shape


def test_images_of_ever_new_sizes_do_not_fill_the_memory():
    net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))
    method = deat.get_method("pgd-2")
    game = game_of(method, net)
    for side in range(4, 14):
        method.play(game, *images(6, side=side), busy_budget(method))
    assert len(game._buffers_by_shape) <= 4
    assert game.meter.read(0).examples == 60


def test_recordings_on_images_of_ever_new_sizes_do_not_fill_the_memory(monkeypatch):
    class Graph:
        """A recording that does nothing."""

        def replay(self):
            pass

    monkeypatch.setattr(GraphRecorder, "_record", lambda *_: Graph())
    game = game_of(deat.get_method("pgd-1"), conv_net(), engine=deat.Engine(use_cuda_graphs=True))
    for size in range(1, 9):
        r = game.begin_batch(torch.rand(size, 1, 8, 8), torch.zeros(size, dtype=torch.long), Budget(1, 0.1))
        game.ascend(r)
        game.joint_update(r)
    assert len(game.executor.recorder) <= 2 * 4


def test_warm_up_is_what_new_moves_took_since_it_was_asked_last_recorded_or_not(monkeypatch):
    monkeypatch.setattr(executor, "perf_counter", itertools.count(0, 3).__next__)
    monkeypatch.setattr(Executor, "_run_with_fallback", lambda *_: None)
    game = game_of(deat.get_method("pgd-1"), conv_net())
    r = game.begin_batch(*EASY, Budget(1, 0.1))
    game.engine.use_compile = True
    for move, seconds in ((game.ascend, 3), (game.ascend, 0), (game.joint_update, 3)):
        move(r)
        assert game.executor.take_warm_up_seconds() == seconds
    game.executor.use_compiled(True)
    game.ascend(r)
    assert game.executor.take_warm_up_seconds() == 3, "what is compiled anew is new"
    game = game_of(deat.get_method("pgd-1"), conv_net())
    game.ascend(game.begin_batch(*EASY, Budget(1, 0.1)))
    assert game.executor.take_warm_up_seconds() == 0, "on a CPU a first call is like any other"


def test_gradients_that_stay_in_their_place_are_given_anew_when_others_learn():
    net = conv_net(seed=1).double()
    game = game_of(deat.get_method("yopo-5-3"), net)
    x, y = EASY[0].double(), EASY[1]
    game.begin_batch(x, y, Budget(2, 0.01))
    game._allocate_gradients()
    game.begin_batch(x, y, Budget(2, 0.01))
    assert game.has_static_gradients
    next(net.parameters()).requires_grad_(False)
    game.refresh()
    game.begin_batch(x, y, Budget(2, 0.01))
    assert not game.has_static_gradients


# A loss of one's own in the attack


def own_cross_entropy(logits: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, y, reduction="none")


def own_divergence(logits: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    return kl_divergence(reference, logits)


own_divergence.needs_reference = True


@pytest.mark.parametrize(("name", "function"), [("pgd-2", own_cross_entropy), ("trades-2", own_divergence)])
def test_an_inner_loss_may_be_a_function_and_is_recorded_by_its_name(name, function):
    method = deat.get_method(name)
    own = replace(method, attack=replace(method.attack, loss=function))
    nets = [conv_net(), conv_net()]
    for net, one in zip(nets, (method, own), strict=True):
        one.play_batch(game_of(one, net), *images(), Budget(2, 0.05))
    assert same(weights(nets[0]), weights(nets[1]))
    assert own.describe()["ascent"]["loss"] == function.__name__


def mean_loss(logits: Tensor, y: Tensor, reference: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, y)


def test_an_inner_loss_that_gives_no_loss_for_each_example_is_refused():
    method = replace(PGD, attack=deat.InnerAttack(loss=mean_loss))
    with pytest.raises(UsageError, match=r"shape \(\) for 6 examples.*reduction='none'"):
        PGD.play(game_of(method, conv_net()), *images(), Budget(2, 0.05))
    with pytest.raises(UsageError, match="lambda"):
        deat.InnerAttack(loss=lambda logits, y, reference: own_cross_entropy(logits, y, reference))
    with pytest.raises(UsageError, match=r"unknown inner loss .cee.*Or give a function"):
        deat.InnerAttack(loss="cee")


WRONG_INPUTS = {
    "normalised": (lambda x, y: (2 * x - 1, y), {}, r"values from -1 to 1, outside \[0, 1\]"),
    "bytes": (lambda x, y: ((255 * x).to(torch.uint8), y), {}, r"outside \[0, 1\]"),
    "NaN": (lambda x, y: (torch.where(x > 0.9, torch.nan, x), y), {}, "values from nan"),
    "infinite": (lambda x, y: (torch.where(x > 0.9, torch.inf, x), y), {"threat": deat.Linf(0.1, box=None)}, "inf"),
    "numbers to predict": (lambda x, y: (x, y.float()), {}, "task='regression'"),
    "one-hot labels": (lambda x, y: (x, nn.functional.one_hot(y)), {}, r"argmax\(1\)"),
}


@pytest.mark.promise("P170")
@pytest.mark.parametrize("kind", WRONG_INPUTS)
@pytest.mark.parametrize("batches_before", [0, 1])
def test_batch_that_no_ball_or_label_fits_is_refused_before_the_weights_move(kind, batches_before):
    spoil, options, message = WRONG_INPUTS[kind]
    net = conv_net()
    game = game_of(PGD, net, check_inputs=True, **options)
    for _ in range(batches_before):
        PGD.play(game, *images(), Budget(2, 0.05))
    before = weights(net)
    with pytest.raises(DataError, match=message):
        PGD.play(game, *spoil(*images()), Budget(2, 0.05))
    assert same(weights(net), before)


@pytest.mark.promise("P170")
def test_inputs_of_another_box_are_accepted_with_a_threat_model_of_that_box():
    x, y = images()
    game = game_of(PGD, conv_net(), deat.Linf(0.1, box=(-1, 1)), check_inputs=True)
    PGD.play(game, 2 * x - 1, y, Budget(2, 0.05))
    assert game.meter.read(0).examples == len(y)
