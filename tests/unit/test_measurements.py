"""Measurements of a method: what they are of, that they cost no pass, and that they come through a checkpoint."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import deat
from deat.core.batch_buffers import Buffers
from deat.core.measurements import FIRST_ACCURACY, FIRST_LOSS, LARGEST_RISE, REACHED_RISE
from helpers.games import NO_BALL_CONTAINS_ANOTHER, THREATS, UNIONS, game_of, trainer_of
from helpers.guards import no_host_reads
from helpers.nets import conv_net, images

ALL = (FIRST_LOSS, FIRST_ACCURACY, REACHED_RISE, LARGEST_RISE)
BUDGET = deat.Budget(k=2, step_size=0.05)


def measured_method(name: str = "free-3") -> deat.Method:
    return replace(deat.get_method(name), measurements=ALL)


def play(method: deat.Method, threat: deat.ThreatModel = THREATS[0], lr: float = 0.1) -> deat.Game:
    game = game_of(method, conv_net(), threat, lr=lr, measurements=method.measurements)
    for seed, n in enumerate((6, 3)):
        method.play_batch(game, *images(n, seed=seed), BUDGET)
    return game


def test_first_loss_and_accuracy_are_those_of_the_batch_before_its_first_update():
    """free-3 starts at zero, so its first pass sees the clean images; here the weights never move."""
    game, (x, y) = game_of(measured_method(), conv_net(), lr=0.0, measurements=ALL), images(6)
    with torch.no_grad():
        logits = game.net(x)
    measured_method().play_batch(game, x, y, BUDGET)
    record = game.meter.read(0)
    assert record.measured["first_loss"] == pytest.approx(cross_entropy(logits, y).item(), rel=1e-5)
    assert record.measured["first_accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    assert record.loss > record.measured["first_loss"]


def test_rises_are_of_the_gradient_where_delta_ends():
    threat, method = deat.Linf(0.1), measured_method()
    game, (x, y) = game_of(method, conv_net(), threat, lr=0.0, measurements=ALL), images(6)
    method.play_batch(game, x, y, BUDGET)
    delta = game.last_batch.delta.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(game.net(x + delta), y, reduction="sum"), delta)
    reached = (grad * delta).sum() / 6
    highest = torch.where(grad > 0, (x + 0.1).clamp(max=1) - x, (x - 0.1).clamp(min=0) - x)
    record = game.meter.read(0)
    assert record.measured["reached_rise"] == pytest.approx(reached.item(), rel=1e-4)
    assert record.measured["largest_rise"] == pytest.approx((grad * highest).sum().item() / 6, rel=1e-4)


@pytest.mark.parametrize("threat", [*THREATS, *UNIONS], ids=str)
@pytest.mark.parametrize("name", ["free-3", "pgd-2", "trades", "yopo-3-2", "awp+fgsm", "g+m+deat"])
def test_measuring_costs_no_pass_and_changes_no_weight(name: str, threat: deat.ThreatModel) -> None:
    method = deat.get_method(name)
    if hasattr(method.play, "check_threat") and getattr(threat, "rule", "") == "worst" and "yopo" in name:
        return  # refused
    plain, measured = play(method, threat), play(measured_method(name), threat)
    assert vars(plain.cost) == vars(measured.cost)
    for before, after in zip(plain.net.parameters(), measured.net.parameters(), strict=True):
        assert torch.equal(before, after)
    record = measured.meter.read(0)
    assert plain.meter.read(0) == replace(record, measured={})
    assert record.measured["reached_rise"] >= -1e-6 or name != "free-3"
    assert record.measured["largest_rise"] > 0


def largest_rise_by_search(x: Tensor, grad: Tensor, threat: deat.ThreatModel) -> Tensor:
    """The largest inner product in ball and box, by bisection of the Lagrange multiplier of the norm, in float64."""
    size, room = grad.double().abs().flatten(1), torch.where(grad > 0, 1 - x, x).double().flatten(1)
    if threat.name == "l1":
        order = size.argsort(1, descending=True)
        room, size = room.gather(1, order), size.gather(1, order)
        left = (threat.eps - (room.cumsum(1) - room)).clamp(min=0)
        return (size * torch.minimum(room, left)).sum(1)
    low, high = torch.zeros(len(x), 1).double(), torch.full((len(x), 1), 1e9).double()
    for _ in range(200):
        middle = (low + high) / 2
        fits = torch.minimum(middle * size, room).norm(dim=1, keepdim=True) <= threat.eps
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return (size * torch.minimum(low * size, room)).sum(1)


@pytest.mark.parametrize("threat", [deat.L2(0.5), deat.L2(3.0), deat.L1(0.7), deat.L1(6.0)], ids=str)
def test_the_steepest_perturbation_has_the_largest_rise_of_ball_and_box(threat):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, 2, 5, 5, generator=generator).round(decimals=1)  # some pixels are at a bound
    grad = torch.randn(x.shape, generator=generator)
    delta = threat.steepest_delta(x, grad)
    assert threat.contains(x, x + delta).all()
    assert torch.allclose((grad * delta).flatten(1).sum(1).double(), largest_rise_by_search(x, grad, threat), rtol=2e-3)
    assert not threat.steepest_delta(x, torch.zeros_like(grad)).any()


@pytest.mark.parametrize("rule", ["worst", "magnitude"])
def test_the_steepest_perturbation_of_a_union_is_that_of_each_example_s_ball(rule):
    union, x = deat.Union(*NO_BALL_CONTAINS_ANOTHER, rule=rule), images(6)[0]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    ball = torch.arange(6) % 3
    expected = [union.threats[n].steepest_delta(x[i : i + 1], grad[i : i + 1]) for i, n in enumerate(ball.tolist())]
    assert torch.allclose(union.at(ball).steepest_delta(x, grad), torch.cat(expected), atol=1e-6)
    assert torch.allclose(union.steepest_delta(x, grad), union.at(union.steepest(grad)).steepest_delta(x, grad))


def test_examples_that_a_stopping_rule_has_stopped_have_no_rise():
    """f+ with tau 0 stops each example that is misclassified; the rises of the others are as without it."""
    x, y = images(6)
    method = replace(deat.friendly(deat.get_method("pgd-2"), tau=0), measurements=ALL)
    game = game_of(method, conv_net(), lr=0.0, measurements=ALL)
    method.play_batch(game, x, y, BUDGET)
    active, measured = game.last_batch.active, game.last_batch.measured
    assert 0 < active.sum() < 6
    assert torch.equal(measured[:, 2] != 0, active)
    assert torch.equal(measured[:, 3] > 0, active)


def test_methods_that_craft_have_one_update_which_is_the_first_and_the_last():
    record = play(measured_method("pgd-2")).meter.read(0)
    assert record.measured["first_loss"] == pytest.approx(record.loss)
    assert record.measured["first_accuracy"] == pytest.approx(record.accuracy)


def mean_step(buffers: Buffers, threat: deat.ThreatModel) -> Tensor:
    """Return how far delta is from zero, as a share of eps."""
    return buffers.delta.abs().flatten(1).mean(1) / threat.eps


def test_a_measurement_of_your_own_is_in_the_history_and_the_method_s_record():
    method = replace(deat.get_method("pgd-2"), measurements=(deat.Measurement("length", mean_step),))
    trainer = trainer_of(method, epochs=2)
    result = trainer.fit()
    assert method.describe()["measurements"] == ["length"]
    assert "measurements" not in deat.get_method("pgd-2").describe()
    lines = [json.loads(json.dumps(asdict(stats))) for stats in result.history]
    assert all(0 < line["measured"]["length"] <= 1 for line in lines)


def test_measurements_of_half_an_epoch_come_through_a_checkpoint():
    def trainer() -> deat.Trainer:
        return trainer_of(measured_method(), epochs=2)

    whole = trainer()
    whole.fit()
    halves, state = trainer(), {}

    class SaveInside:
        def on_batch(self, trainer: deat.Trainer, buffers: Buffers) -> None:
            if (trainer.epoch, trainer.batches_done) == (1, 1):
                state.update(json.loads(json.dumps(trainer.game.meter.state_dict())))

    halves.callbacks.append(SaveInside())
    halves.fit()
    assert len(state["sums"]) == 4 + len(ALL)
    assert halves.history == whole.history
    fresh = trainer()
    fresh.game.meter.load_state_dict(state)
    assert fresh.game.meter.state_dict() == state


def test_measuring_reads_nothing_on_the_host_and_runs_as_moves_that_can_be_recorded(monkeypatch):
    method, moves = measured_method(), []
    game = game_of(method, conv_net(), measurements=ALL)
    run = game.executor.run
    monkeypatch.setattr(
        game.executor, "run", lambda name, *a, **b: (moves.append((name, b["recorded"])), run(name, *a, **b))
    )
    with no_host_reads():
        method.play(game, *images(6), BUDGET)
    assert [entry for entry in moves if entry[0].startswith("measure")] == [
        ("measure after the first update", True),
        ("measure after the last update", True),
    ]


def test_a_step_in_a_loop_of_your_own_measures_too():
    net = conv_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = deat.AdversarialStep(net, optimizer, epochs=2, method=measured_method(), threat=THREATS[0])
    step(*images(6))
    record = step.end_epoch()
    assert set(record.measured) == {measurement.name for measurement in ALL}
    step.load_state_dict(step.state_dict())
    assert step.history == [record]
