"""TRADES' first step in half precision, from a start that rounding would hide."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget, Buffers
from deat.core.inner_attack import FIRST_GRADIENT_SCALE, InnerAttack
from helpers.games import game_of
from helpers.nets import conv_net, images

THREAT = deat.Linf(8 / 255)
TRADES = deat.get_method("trades-2")


def ascended(
    precision: str, net: nn.Module, ascents: int = 1, threat: deat.ThreatModel = THREAT
) -> tuple[Tensor, Buffers]:
    """The start of a batch's game, and its board after so many ascents."""
    game = game_of(TRADES, net, threat, engine=deat.Engine(precision=precision))  # type: ignore[arg-type]
    r = game.begin_batch(*images(64), Budget(ascents, threat.eps / 4))
    start = r.delta.clone()
    for _ in range(ascents):
        game.ascend(r)
    return start, r


def seen_by(net: nn.Module) -> list[Tensor]:
    """Every batch that a network will be asked about."""
    seen = list[Tensor]()
    net.register_forward_pre_hook(lambda net, given: seen.append(given[0].detach().clone()))
    return seen


@pytest.mark.parametrize("batch_norm", [False, True])
def test_in_half_precision_the_first_step_goes_where_it_goes_in_float32(batch_norm: bool) -> None:
    (_, exact), (_, half) = (ascended(precision, conv_net(batch_norm=batch_norm)) for precision in ("fp32", "bf16"))
    other = (exact.grad.sign() != half.grad.sign()).float().mean()
    assert other < 0.2, "rounding alone gives 0.38 with batch norm and 0.51 without"
    assert half.grad.abs().sum() == pytest.approx(float(exact.grad.abs().sum()), rel=0.15), (
        "l_X would be three times it"
    )


@pytest.mark.parametrize("threat", [THREAT, deat.L2(0.5)], ids=lambda threat: threat.name)
def test_only_the_first_gradient_is_taken_further_out_and_delta_steps_from_where_it_is(
    threat: deat.ThreatModel,
) -> None:
    net = conv_net()
    seen = seen_by(net)
    start, first = ascended("bf16", net, threat=threat)
    clean, far = seen
    assert torch.equal(far, clean + FIRST_GRADIENT_SCALE * start)
    assert torch.allclose(first.delta, threat.pgd_step(clean, start, first.grad, threat.eps / 4))
    seen.clear()
    ascended("bf16", net, ascents=2, threat=threat)
    assert torch.equal(seen[2], clean + first.delta)


def test_an_ascent_after_another_step_of_delta_looks_where_it_stands() -> None:
    net = conv_net()
    seen = seen_by(net)
    game = game_of(TRADES, net, THREAT, engine=deat.Engine(precision="bf16"))
    r = game.begin_batch(*images(), Budget(2, THREAT.eps / 4))
    game.joint_update(r)
    game.step_delta(r)
    stood = r.x + r.delta
    game.ascend(r)
    assert torch.equal(seen[-1], stood)


def test_in_float32_every_gradient_is_taken_where_delta_is() -> None:
    net = conv_net()
    seen = seen_by(net)
    start, _ = ascended("fp32", net)
    assert torch.equal(seen[1], seen[0] + start)


def test_adversaries_that_half_precision_sees_look_where_they_stand() -> None:
    assert TRADES.attack.has_tiny_start
    assert deat.get_method("f+trades").attack.has_tiny_start
    others = {
        "ce": InnerAttack(start="jitter"),
        "far": InnerAttack(loss="kl"),
        "kept": replace(TRADES.attack, persistent=True),
    }
    assert not any(ascent.has_tiny_start for ascent in others.values())
