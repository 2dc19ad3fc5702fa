"""What every registered method keeps to, and some composed ones; a new method is tested by being registered."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import deat
from deat.core.epoch_sums import EpochRecord
from deat.methods import list_methods
from helpers.games import EXTRAS, THREATS, UPDATE_COSTS, WatchedGame, busy_budget, game_of, reach, trainer_of
from helpers.guards import BackwardCounter
from helpers.nets import conv_net, images, same, weights

every_method = pytest.mark.parametrize("name", list_methods() + EXTRAS)
every_threat = pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
each_rule_set = pytest.mark.parametrize("rules", ["default", "literal", "released"])
RULES_AND_THREATS = [("default", threat) for threat in THREATS] + [
    (rules, THREATS[0]) for rules in ("literal", "released")
]
each_rule_set_and_threat = pytest.mark.parametrize(
    ("rules", "threat"), RULES_AND_THREATS, ids=lambda value: getattr(value, "name", value)
)
"""Every ball under the default rules, and the other rule sets in one ball: they change no ball."""


@every_method
@each_rule_set_and_threat
def test_loss_is_finite_and_each_of_two_updates_changes_the_weights(name, threat, rules):
    method, net = deat.get_method(name, rules=rules), conv_net(batch_norm=True)
    game, budget = game_of(method, net, threat), busy_budget(method, threat)
    for seed in (0, 1):
        before = weights(net)
        method.play(game, *images(seed=seed), budget)
        changed = [not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True)]
        # A batch norm takes away whatever the convolution before it adds, so biases may have no gradient.
        assert all(c for c, p in zip(changed, net.parameters(), strict=True) if p.dim() > 1)
    record = game.meter.read(0)
    assert 0 < record.loss < 100
    assert record.examples == 12


@pytest.mark.promise("P35")
@every_method
@each_rule_set_and_threat
def test_every_intermediate_delta_is_in_ball_and_box(name, threat, rules):
    method, net = deat.get_method(name, rules=rules), conv_net()
    game, budget = game_of(method, net, threat, cls=WatchedGame), busy_budget(method, threat)
    for seed, n in enumerate((6, 6, 5, 1)):
        method.play(game, *images(n, seed=seed), budget)
    assert len(game.seen) >= 4 * (budget.k + 2)
    ball = reach(method, threat, budget)
    for x, delta in game.seen:
        assert ball.contains(x.double(), x.double() + delta.double(), atol=1e-6).all()
    assert any(delta.abs().max() > 0 for _, delta in game.seen) == (budget.k > 0)


@pytest.mark.promise("P39")
@every_method
@pytest.mark.parametrize("k", [0, 1, None], ids=["k=0", "k=1", "own k"])
def test_declared_backprops_equal_the_cost_and_the_backward_calls_that_were_made(name, k):
    method, net = deat.get_method(name), conv_net()
    counter, game = BackwardCounter(net[-1]), game_of(method, net)
    budget = busy_budget(method) if k is None else deat.attack_schedules.Budget(k, 0.05, 1.0)
    for seed, n in enumerate((6, 6, 3)):
        method.play(game, *images(n, seed=seed), budget)
    assert counter.count == game.cost.backprops == 3 * method.play.backprops(budget)
    assert method.play.backprops(budget) == budget.k + 1 + UPDATE_COSTS.get(name, 0)


@every_method
def test_modes_and_requires_grad_are_as_the_user_left_them(name):
    method, net = deat.get_method(name), conv_net(batch_norm=True, dropout=0.2)
    norms = [m for m in net if isinstance(m, nn.BatchNorm2d)]
    norms[0].eval()
    net[-1].bias.requires_grad_(False)
    modes, learning, bias = (
        [m.training for m in net.modules()],
        [p.requires_grad for p in net.parameters()],
        net[-1].bias,
    )
    game, frozen, mean = game_of(method, net), bias.clone(), norms[0].running_mean.clone()
    method.play(game, *images(), busy_budget(method))
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == learning
    assert torch.equal(bias, frozen)
    assert torch.equal(norms[0].running_mean, mean)


@every_method
def test_modes_are_restored_when_the_network_fails(name):
    method, net = deat.get_method(name), conv_net(batch_norm=True)
    game, modes = game_of(method, net), [m.training for m in net.modules()]

    def fail(*_: object) -> None:
        raise RuntimeError("broken layer")

    net[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        method.play(game, *images(), busy_budget(method))
    assert [m.training for m in net.modules()] == modes
    assert all(p.requires_grad for p in net.parameters())


@every_method
def test_crafting_moves_batch_norm_statistics_only_in_train_mode(name):
    method, net = deat.get_method(name), conv_net(batch_norm=True)
    if not method.play.crafts_first or not busy_budget(method).k:
        assert method.attack.batch_norm == "train"  # there is no crafting to have a mode of its own
        return
    game, budget = game_of(method, net), busy_budget(method)
    before = {k: v.clone() for k, v in net.named_buffers()}
    r = game.begin_batch(*images(), budget)
    for _ in range(budget.k):
        game.ascend(r)
    unchanged = all(torch.equal(before[k], v) for k, v in net.named_buffers())
    assert unchanged == (method.attack.batch_norm == "eval")


@pytest.mark.parametrize("name", ["fat-5", "f+trades", "f+mart", "m+f+trades", "f+fgsm"])
def test_friendly_methods_craft_in_eval_mode(name):
    assert deat.get_method(name).attack.batch_norm == "eval"


@every_method
@each_rule_set
def test_declaration_survives_json_and_its_name_finds_it_again(name, rules):
    method = deat.get_method(name, rules=rules)
    described = method.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["name"] == method.name
    assert described["play"]["kind"] == type(method.play).__name__
    assert deat.get_method(method.name, rules=rules) == method
    assert deat.get_method(method.name.upper(), rules=rules) == method


@every_method
@each_rule_set
def test_schedule_state_that_went_through_json_gives_the_same_later_budgets(name, rules):
    schedule = deat.get_method(name, rules=rules).bind(THREATS[0], 12)
    magnitudes = [9.0, 5.0, 5.2, 5.3, 4.0, 6.0, 6.0, 6.5, 7.0, 7.0, 7.1, 8.0]
    measured = {"reached_rise": 2.9, "largest_rise": 3.2}
    records = [EpochRecord(t, 1.0, 0.3 + 0.05 * t, m, 100, measured=measured) for t, m in enumerate(magnitudes)]
    whole, parted = schedule.init(), schedule.init()
    for record in records:
        assert schedule.budget(parted, record.epoch) == schedule.budget(whole, record.epoch)
        whole = schedule.observe(whole, record)
        parted = json.loads(json.dumps(schedule.observe(parted, record)))
    assert parted == whole


def history_of(name: str, seed: int) -> str:
    trainer = trainer_of(name, conv_net(batch_norm=True, dropout=0.2), seed=seed, val=0.25, val_attack="pgd-2")
    return "\n".join(json.dumps(asdict(stats)) for stats in trainer.fit().history)


@pytest.mark.promise("P40")
@every_method
def test_same_seed_gives_the_same_history_byte_for_byte_and_another_seed_does_not(name):
    history = history_of(name, 0)
    assert history_of(name, 0) == history
    assert history_of(name, 1) != history


@every_method
def test_crafting_leaves_weights_and_their_gradients_alone(name):
    method, net = deat.get_method(name), conv_net()
    game, before = game_of(method, net), weights(net)
    r = game.begin_batch(*images(), busy_budget(method))
    game.ascend(r)
    assert same(before, weights(net))
    assert all(p.grad is None for p in net.parameters())
    assert r.grad.abs().sum() > 0
