"""Unions of balls: what they accept, their geometry, their text and records, and the rules of training."""

import copy
import json

import pytest
import torch

import deat
from deat.core.union_rules import make_union_rule
from deat.errors import UsageError
from deat.methods.change_settings import configure_method
from deat.threat import build_threat, format_threat, parse_threat
from deat.utils.distributed import SINGLE_PROCESS
from helpers.games import UNIONS, busy_budget, game_of
from helpers.nets import conv_net, images

UNION = UNIONS[0]
BALLS = UNION.threats


def batch(n=40, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, 3, 3, generator=g, dtype=torch.float64)
    delta = scale * torch.randn(n, 2, 3, 3, generator=g, dtype=torch.float64)
    return x, delta * torch.logspace(-2, 1, n, dtype=torch.float64).view(-1, 1, 1, 1)


def test_text_and_record_give_the_union_again():
    union = parse_threat("linf:8/255 + l2:0.5+l1:1.2e+1", rule="error")
    assert union == deat.Union(deat.Linf(8 / 255), deat.L2(0.5), deat.L1(12), rule="error")
    assert parse_threat(union.text, rule="error") == union
    assert build_threat(json.loads(json.dumps(union.describe()))) == union
    assert copy.deepcopy(union) == union
    assert format_threat(union) == "union of linf eps 8/255, l2 eps 0.5, l1 eps 12"
    assert parse_threat("linf:0.1+l2:0.5") == deat.Union("linf:0.1", "l2:0.5", rule="worst")


def test_boxes_and_scales_reach_every_ball_of_a_text_and_the_record():
    union = parse_threat("linf:0.1+l2:0.5", box=(-1, 1), scale=[1.0, 2.0], mutable=[True, False])
    assert all(
        (ball.box, ball.scale, ball.mutable) == (union.box, union.scale, union.mutable) for ball in union.threats
    )
    assert build_threat(json.loads(json.dumps(union.describe()))) == union
    assert not union.is_plain


def test_unions_are_flattened_and_a_union_of_one_is_its_ball():
    assert deat.Union(deat.Union(*BALLS[:2], rule="random"), BALLS[2]) == deat.Union(*BALLS)
    assert parse_threat(deat.Union(BALLS[1])) is BALLS[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deat.Union(), "needs balls"),
        (lambda: deat.Union(deat.Linf(0.1), deat.Linf(0.2)), "two linf balls, of radius 0.1 and 0.2"),
        (lambda: deat.Union(deat.Linf(0.1), deat.L2(0)), "l2 has the radius 0"),
        (lambda: deat.Union(deat.Linf(0.1), deat.L2(1, box=(-1, 1))), "one box, and linf has"),
        (lambda: deat.Union(deat.Linf(0.1, scale=[1.0]), deat.L2(1)), "one scale"),
        (lambda: deat.Union(deat.Linf(0.1), deat.L2(1), rule="best"), "'best'.*worst"),
        (lambda: parse_threat("linf:0.1+l2"), "no radius"),
        (lambda: parse_threat("linf:0.1", rule="random"), "for several balls"),
        (lambda: configure_method("pgd-7", UNION, alpha=0.1), "alpha_eps"),
        (
            lambda: deat.fit(conv_net(), images(), batch_size=6, threat="linf:0.1+l2:1000"),
            "l2 eps 1000 reaches every image",
        ),
    ],
)
def test_what_is_no_union_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_norm_and_contains_say_whether_any_ball_holds_a_perturbation():
    x, delta = batch()
    x = torch.full_like(x, 0.5)  # no box in the way of these
    inside = torch.stack([ball.norm(delta) <= ball.eps for ball in BALLS]).any(0)
    small = delta.abs().flatten(1).amax(1) < 0.5
    assert torch.equal(UNION.norm(delta) <= 1, inside)
    assert torch.equal(UNION.contains(x, x + delta)[small], inside[small])
    assert inside.any()
    assert not inside.all()


def test_projection_is_the_nearest_of_the_balls_and_changes_nothing_inside():
    x, delta = batch()
    projected = UNION.project(x, delta)
    distance = (projected - delta).flatten(1).norm(dim=1)
    others = torch.stack([(ball.project(x, delta) - delta).flatten(1).norm(dim=1) for ball in BALLS])
    assert torch.equal(distance, others.amin(0))
    assert UNION.contains(x, x + projected).all()
    assert torch.allclose(UNION.project(x, projected), projected, atol=1e-9)


def test_dual_norm_is_the_largest_rise_inside_and_the_step_makes_it():
    x, grad = batch()
    x = torch.full_like(x, 0.5)
    moved = UNION.at(UNION.steepest(grad)).step(x, torch.zeros_like(x), grad, 1.0)
    rise = (moved * grad).flatten(1).sum(1)
    is_l1 = (
        UNION.steepest(grad) == 2
    )  # its step has several coordinates, and only the steepest one makes the whole rise
    assert torch.allclose(rise[~is_l1], UNION.dual_norm(grad)[~is_l1])
    sampled = UNION.sample_uniform(grad.flatten(1), torch.Generator().manual_seed(0))
    assert ((sampled * grad.flatten(1)).sum(1) <= UNION.dual_norm(grad) + 1e-9).all()


def test_each_row_is_treated_as_its_ball_alone_treats_it():
    x, delta = batch()
    grad = batch(seed=1)[1]
    ball = torch.arange(len(x)) % len(BALLS)
    each = UNION.at(ball)
    for number, own in enumerate(BALLS):
        rows = ball == number
        assert torch.equal(each.project(x, delta)[rows], own.project(x[rows], delta[rows]))
        step = own.pgd_step(x[rows], delta[rows], grad[rows], 0.25 * own.eps)
        assert torch.equal(each.pgd_step(x, delta, grad, 0.25)[rows], step)
        assert torch.allclose(each.dual_norm(grad)[rows], own.eps * own.dual_norm(grad[rows]))


@pytest.mark.parametrize("kind", ["zero", "uniform", "normal", "bernoulli", "jitter"])
def test_starts_are_inside_of_balls_and_of_more_than_one(kind):
    x, _ = batch(60)
    start = UNION.initial_delta(x, kind, torch.Generator().manual_seed(0))
    assert UNION.contains(x, x + start).all()
    if kind == "uniform":
        assert not any(ball.contains(x, x + start).all() for ball in BALLS)


def test_step_sizes_are_each_balls_own_share_of_its_radius():
    method = deat.get_method("pgd-7")
    assert method.bind(UNION, 10).alpha == 0.25
    assert [method.bind(ball, 10).alpha for ball in BALLS] == [0.25 * ball.eps for ball in BALLS]


def test_error_rule_draws_balls_in_proportion_to_their_errors_and_all_alike_before_it_knows_them():
    rule = make_union_rule(deat.Union(*BALLS, rule="error"), torch.device("cpu"), SINGLE_PROCESS)
    generator = torch.Generator().manual_seed(0)

    def shares():
        drawn = torch.stack([rule.draw(3, generator)[0] for _ in range(3000)])
        return torch.bincount(drawn, minlength=3) / 3000

    assert torch.allclose(shares(), torch.full((3,), 1 / 3), atol=0.03)
    rule.load_state_dict({"counts": [[80, 60, 100], [100, 100, 100]]})  # errors .2, .4 and 0
    assert torch.allclose(shares(), torch.tensor([1 / 3, 2 / 3, 0.0]), atol=0.03)
    assert shares()[2] == 0


def test_error_rule_counts_what_the_network_got_right_in_the_balls_that_were_played():
    method = deat.get_method("pgd-2")
    game = game_of(method, conv_net(), deat.Union(*BALLS, rule="error"))
    right = torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(8):
        method.play(game, *images(seed=seed), busy_budget(method, UNION))
        buffers = next(iter(game._buffers_by_shape.values()))
        right[:, int(buffers.ball[0])] += torch.tensor([float(buffers.num_correct), 6.0])
    assert torch.equal(game.union_rule.counts, right)
    assert right[1].sum() == 48


def test_clean_batches_are_not_counted_as_robust():
    method = deat.get_method("natural")
    game = game_of(method, conv_net(), deat.Union(*BALLS, rule="error"))
    method.play(game, *images(), busy_budget(method, UNION))
    assert game.union_rule.counts.sum() == 0


def test_worst_rule_keeps_the_step_with_the_highest_loss_of_each_example():
    method, net = deat.get_method("pgd-2"), conv_net().double()
    game = game_of(method, net, UNION)
    x, y = images()
    buffers = game.begin_batch(x.double(), y, busy_budget(method, UNION))
    before = buffers.delta.clone()
    game.ascend(buffers)
    candidates = [ball.pgd_step(buffers.x, before, buffers.grad, game.step_size * ball.eps) for ball in BALLS]
    losses = torch.stack(
        [torch.nn.functional.cross_entropy(net(buffers.x + c), y, reduction="none") for c in candidates]
    )
    assert torch.equal(buffers.ball, losses.argmax(0))
    own = torch.nn.functional.cross_entropy(net(buffers.x + buffers.delta), y, reduction="none")
    assert torch.allclose(own, losses.amax(0))


@pytest.mark.parametrize("rule", ["random", "error"])
def test_a_batch_has_one_ball_and_its_magnitude_is_the_rise_in_it(rule):
    method = deat.get_method("pgd-2")
    game = game_of(method, conv_net(), deat.Union(*BALLS, rule=rule))
    drawn = set()
    for seed in range(12):
        method.play(game, *images(seed=seed), busy_budget(method, UNION))
        buffers = next(iter(game._buffers_by_shape.values()))
        ball = int(buffers.ball[0])
        drawn.add(ball)
        assert (buffers.ball == ball).all()
        assert torch.allclose(buffers.magnitude, BALLS[ball].eps * BALLS[ball].dual_norm(buffers.grad))
    assert drawn == {0, 1, 2}


def test_replacing_the_threat_of_a_game_replaces_the_rule():
    game = game_of(deat.get_method("pgd-2"), conv_net(), UNION)
    game.threat = BALLS[0]
    assert game.union_rule is None
    game.threat = deat.Union(*BALLS, rule="magnitude")
    assert game.union_rule.union.rule == "magnitude"
