"""Games and trainers put together the way training does it, on small networks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget, Buffers
from deat.core.first_layer import FirstLayer
from deat.methods import Method
from deat.models import get_input_std

from .nets import conv_net, learnable

THREATS = [deat.Linf(0.1), deat.L2(0.5), deat.L1(2.0)]
NO_BALL_CONTAINS_ANOTHER = [deat.Linf(0.2), deat.L2(0.5), deat.L1(1.2)]
UNIONS = [deat.Union(*NO_BALL_CONTAINS_ANOTHER, rule=rule) for rule in ("worst", "random", "error", "magnitude")]
EXTRAS = ["m+free", "m+yopo-5-3", "m+f+trades", "m+fat-5", "g+fgsm", "m+g+deat", "awp+fgsm", "g+awp+m+deat"]
EXTRAS += ["f+n-fgsm", "m+g+n-fgsm", "g+awp+m+fgsm-pgi", "awp+m+gradalign", "auto+f+trades", "g+auto+pgd-3"]
UPDATE_COSTS = {"g+fgsm": 1, "m+g+deat": 1, "awp+fgsm": 1, "g+awp+m+deat": 2, "m+g+n-fgsm": 1}
UPDATE_COSTS |= {"g+awp+m+fgsm-pgi": 2, "gradalign": 2, "awp+m+gradalign": 3, "g+auto+pgd-3": 1}
"""Backprops a batch beyond k + 1."""


def game_of(
    method: Method,
    net: nn.Module,
    threat: deat.ThreatModel = THREATS[0],
    *,
    lr: float = 0.1,
    cls: type[deat.Game] = deat.Game,
    **options: Any,
) -> deat.Game:
    """A game that plays this method, its learner plain SGD; as in training, its inputs are taken as checked."""
    options.setdefault("check_inputs", False)
    game = cls(
        net,
        deat.Objective(net, method.objective),
        threat,
        method.attack,
        torch.optim.SGD(net.parameters(), lr=lr),
        probe=method.probe,
        pixel_scale=get_input_std(net),
        **options,
    )
    game.generator.manual_seed(0)
    if method.attack.remember is not None:
        number_images(game)
    return game


def number_images(game: deat.Game) -> None:
    """Let a game remember starts as if every batch were the first images of one data set."""
    begin_batch = game.begin_batch

    def begin_numbered(x: Tensor, y: Tensor, budget: Budget) -> Buffers:
        if game.start_memory is None:
            game.remember_starts(64, tuple(x.shape[1:]))
        game.batch_index = torch.arange(len(x))
        return begin_batch(x, y, budget)

    game.begin_batch = begin_numbered  # type: ignore[method-assign]


def busy_budget(method: Method, threat: deat.ThreatModel = THREATS[0]) -> Budget:
    """The method's own budget in the middle of a training of 12 epochs, with k at 2 where l_X decides."""
    schedule = method.bind(threat, 12)
    state = schedule.init()
    if "k" in state:
        state = {**state, "k": 2}
    return schedule.budget(state, 6)


def reach(method: Method, threat: deat.ThreatModel, budget: Budget) -> deat.ThreatModel:
    """The ball that a method keeps its perturbations in: a larger one if it does not project them."""
    if not method.attack.leaves_ball:
        return threat
    return replace(threat, eps=method.attack.start_radius * threat.eps + budget.k * budget.step_size)


class WatchedGame(deat.Game):
    """A game that shows every delta there ever is to `seen`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def _look(self, r: Buffers) -> None:
        self.seen.append((r.x.clone(), r.delta.clone()))

    def begin_batch(self, x: Tensor, y: Tensor, budget: Budget) -> Buffers:
        r = super().begin_batch(x, y, budget)
        self._look(r)
        return r

    def step_delta_in_move(self, r: Buffers) -> None:
        super().step_delta_in_move(r)
        self._look(r)

    def ascend(self, r: Buffers) -> None:
        super().ascend(r)
        self._look(r)

    def compute_both_gradients(self, r: Buffers, layer: FirstLayer | None = None, **options: Any) -> Tensor | None:
        finite = super().compute_both_gradients(r, layer, **options)
        self._look(r)
        return finite


def trainer_of(method: str | Method, net: nn.Module | None = None, *, data: Any = None, **options: Any) -> deat.Trainer:
    """A trainer on 24 small images, in batches of 10, with a constant learning rate."""
    named = {
        key: options.pop(key) for key in ("val", "optimizer", "callbacks", "normalize", "distributed") if key in options
    }
    threat = options.pop("threat", THREATS[0])
    settings = {"epochs": 3, "batch_size": 10, "lr": 0.1, "lr_schedule": "flat", "precision": "fp32", "workers": 0}
    return deat.make_trainer(
        conv_net() if net is None else net,
        learnable() if data is None else data,
        method=method,
        threat=threat,
        config=deat.TrainConfig(**{**settings, **options}),
        **named,
    )
