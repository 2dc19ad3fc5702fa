"""What every registered method keeps to against a union of balls, under each rule that picks among them."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import deat
from deat.core.union_rules import RULES
from deat.errors import Interrupted, UsageError
from deat.methods import list_methods
from deat.threat import UNION_RULES, BallPerExample
from deat.training.checkpoints import Checkpoints
from helpers.games import EXTRAS, THREATS, UNIONS, WatchedGame, busy_budget, game_of, trainer_of
from helpers.guards import BackwardCounter, no_host_reads
from helpers.nets import conv_net, images, same, weights

every_method = pytest.mark.parametrize("name", list_methods() + EXTRAS)
every_rule = pytest.mark.parametrize("union", UNIONS, ids=lambda union: union.rule)
SAMPLE = ["m+deat", "f+trades", "yopo-3-2"]


def is_refused(method: deat.Method, union: deat.Union) -> bool:
    """Whether a method has no step under the rule, which then says why."""
    is_relay = isinstance(method.play, deat.Relay) and union.rule == "worst"
    if not (is_relay or method.attack.leaves_ball):
        return False
    with pytest.raises(UsageError, match="first layer alone" if is_relay else "does not project"):
        trainer_of(method, conv_net(), threat=union)
    return True


class BallGame(WatchedGame):
    """A game that also notes which ball each perturbation was said to be in."""

    def _look(self, r: deat.Buffers) -> None:
        self.seen.append((r.x.clone(), r.delta.clone(), r.ball.clone()))


def test_rules_are_those_that_a_union_takes():
    assert set(RULES) == set(UNION_RULES) == {union.rule for union in UNIONS}


@every_method
@every_rule
def test_deltas_are_in_their_balls_at_the_declared_cost_without_host_reads(name, union):
    method, net = deat.get_method(name), conv_net(batch_norm=True)
    if is_refused(method, union):
        return
    before, counter = weights(net), BackwardCounter(net[-1])
    game, budget = game_of(method, net, union, cls=BallGame), busy_budget(method, union)
    for seed, n in enumerate((6, 5)):
        batch = images(n, seed=seed)
        with no_host_reads():
            method.play_batch(game, *batch, budget)
    assert not same(before, weights(net))
    assert counter.count == game.cost.backprops == 2 * method.play.backprops(budget)
    for x, delta, ball in game.seen:
        x, adv = x.double(), x.double() + delta.double()
        assert BallPerExample(union, ball).contains(x, adv, atol=1e-6).all()
        assert union.contains(x, adv, atol=1e-6).all()
    record = game.meter.read(0)
    assert 0 < record.loss < 100
    assert record.magnitude > 0
    assert record.examples == 11


@pytest.mark.parametrize(("name", "persistent"), [*((name, False) for name in SAMPLE), ("free-2", True)])
@every_rule
def test_training_resumes_in_mid_epoch_to_the_bits_of_an_uninterrupted_one(name, union, persistent, tmp_path):
    method = deat.get_method(name)
    method = replace(method, attack=replace(method.attack, persistent=persistent))
    if is_refused(method, union):
        return

    def fresh() -> deat.Trainer:
        net = conv_net(batch_norm=True, dropout=0.2)
        return trainer_of(method, net, threat=union, epochs=2, val=0.25, val_attack="pgd-2")

    whole, first, second = fresh(), fresh(), fresh()
    whole.fit()
    plays, play = [], first.game.begin_batch

    def count(*args: object) -> deat.Buffers:
        plays.append(1)
        if len(plays) == 3:
            first.interruption.request()
        return play(*args)

    first.game.begin_batch = count
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(tmp_path).resume_or_start(second)
    second.fit()
    assert same(weights(whole.model), weights(second.model))
    histories = [[json.dumps(asdict(stats)) for stats in t.history] for t in (whole, second)]
    assert histories[0] == histories[1]
    assert whole.game.union_rule.state_dict() == second.game.union_rule.state_dict()


@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_a_union_of_one_ball_trains_to_the_bits_of_the_ball(name, threat):
    trainers = [trainer_of(name, conv_net(), threat=t, epochs=1) for t in (threat, deat.Union(threat))]
    for trainer in trainers:
        trainer.fit()
    assert same(*(weights(trainer.model) for trainer in trainers))
    assert trainers[0].history == trainers[1].history


@pytest.mark.parametrize("rule", ["worst", "magnitude"])
@pytest.mark.parametrize("name", ["pgd-3", "deat-1", "f+trades"])
def test_a_ball_that_no_other_can_beat_is_the_only_one_played(rule, name):
    """The other ball is so small that neither its rise nor its loss is ever the largest."""
    alone, tiny = deat.Linf(0.3), deat.L2(1e-6)
    method = deat.get_method(name)
    method = replace(method, attack=replace(method.attack, start="zero"))
    results = []
    for threat in (alone, deat.Union(tiny, alone, rule=rule)):
        net = conv_net().double()
        game = game_of(method, net, threat)
        budget = replace(busy_budget(method, threat), k=3)
        for seed in range(2):
            x, y = images(seed=seed)
            method.play(game, x.double(), y, budget)
        results.append(weights(net))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*results, strict=True))


def test_passes_of_the_worst_rule_are_one_more_a_ball_and_step():
    passes = {}
    for union in UNIONS:
        method = deat.get_method("pgd-2")
        game = game_of(method, conv_net(), union)
        method.play(game, *images(), busy_budget(method, union))
        passes[union.rule] = game.cost.passes
    assert passes == {"worst": 2 * 3 + 2 * 3, "random": 6, "error": 6, "magnitude": 6}
