"""Starts that an attack remembers for each image: which image is which, resets, limits and refusals."""

from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.core import remembered_starts
from deat.core.inner_attack import InnerAttack
from deat.core.remembered_starts import RememberStarts, StartMemory
from deat.data import as_source
from deat.data.batch_source import find_batch_indices
from deat.errors import DataError, UsageError
from deat.utils.distributed import BatchShard
from helpers.games import game_of, trainer_of
from helpers.nets import Items, conv_net, images, learnable

PGI = deat.get_method("fgsm-pgi")
EPS = deat.Linf(0.1)


def memory_of(n: int = 4, **rule: float) -> StartMemory:
    return StartMemory(RememberStarts(**rule), n, (1, 2, 2), torch.device("cpu"))


def updated(memory: StartMemory, index: list[int], epoch: int, grad: torch.Tensor, start: torch.Tensor) -> None:
    x = torch.full_like(start, 0.5)
    memory.update(torch.tensor(index), slice(None), epoch, x, start, grad, EPS, torch.tensor(0.1))


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_indices_are_those_of_the_images_in_the_batch_for_all_processes_together(kind: str, shuffle: bool) -> None:
    x, y = learnable(22)
    source = as_source((x, y) if kind == "tensors" else Items(x, y), batch_size=5, seed=3, shuffle=shuffle)
    indices = find_batch_indices(source, "fgsm-pgi")
    for epoch in range(2):
        for step, (batch, _) in enumerate(source.epoch(epoch)):
            assert torch.equal(x[indices(epoch, step)], batch)
    source.shard = BatchShard(1, 2)
    first, _ = next(iter(source.epoch(1)))
    assert torch.equal(x[indices(1, 0)][1::2], first)


def test_a_loader_is_refused_with_the_fix() -> None:
    loader = DataLoader(TensorDataset(*learnable()), batch_size=8, shuffle=True)
    with pytest.raises(UsageError, match=r"fgsm-pgi.*DataLoader.*Pass the Dataset itself"):
        trainer_of(PGI, data=loader)


def test_a_loop_of_your_own_that_does_not_number_its_images_is_refused_with_how() -> None:
    game = deat.Game(
        net := conv_net(), deat.Objective(net, PGI.objective), EPS, PGI.attack, torch.optim.SGD(net.parameters(), 0.1)
    )
    budget = deat.Budget(1, 0.1)
    with pytest.raises(UsageError, match=r"game\.remember_starts"):
        game.begin_batch(*images(), budget)
    game.remember_starts(6, (1, 4, 4))
    with pytest.raises(UsageError, match=r"game\.batch_index"):
        game.begin_batch(*images(), budget)
    game.batch_index = torch.arange(6)
    PGI.play_batch(game, *images(), budget)


def adversarial_step(net: torch.nn.Module) -> deat.AdversarialStep:
    step = deat.AdversarialStep(net, torch.optim.SGD(net.parameters(), 0.1), method="fgsm-pgi", threat=EPS, epochs=3)
    step.game.remember_starts(6, (1, 4, 4))
    step.game.batch_index = torch.arange(6)
    return step


def test_a_loop_of_ones_own_resumes_with_its_starts() -> None:
    net, other_net = conv_net(), conv_net()
    first = adversarial_step(net)
    first(*images())
    first.end_epoch()
    state = first.state_dict()
    other_net.load_state_dict(net.state_dict())
    second = adversarial_step(other_net)
    second.load_state_dict(state)
    for one, other in zip(first(*images()), second(*images()), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    with pytest.raises(UsageError, match="remember_starts before"):
        deat.AdversarialStep(net, first.game.optimizer, method="fgsm-pgi", threat=EPS, epochs=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"persistent": True}, "Leave persistent out"), ({"start_radius": 2.0}, "leaves_ball=True")],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        InnerAttack(remember=RememberStarts(), **settings)


@pytest.mark.parametrize("settings", [{"decay": 1.0}, {"decay": -0.1}, {"reset_every": 0}, {"reset_every": 1.5}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings)).split("_")[0]):
        RememberStarts(**settings)


def test_a_play_without_attack_steps_is_refused() -> None:
    game = game_of(replace(deat.get_method("yopo-3-2"), attack=PGI.attack), conv_net())
    with pytest.raises(UsageError, match="made no step of delta"):
        deat.get_method("yopo-3-2").play(game, *images(), deat.Budget(2, 0.1, epoch=1))


def test_free_remembers_starts_too_from_its_first_step() -> None:
    method = replace(deat.get_method("free-3"), attack=PGI.attack)
    trainer = trainer_of(method, epochs=2)
    trainer.fit()
    state = trainer.game.start_memory.state_dict()
    assert state["is_known"].all()
    assert (state["starts"].abs() <= 1).all()
    assert state["momenta"].abs().sum() > 0


def test_more_memory_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_starts, "_memory_size", lambda device: 10 * 2**30)
    with pytest.raises(DataError, match=r"1,000,000 images .* takes 560\.\d GiB, and cpu has 10\.0 GiB"):
        StartMemory(RememberStarts(), 1_000_000, (3, 224, 224), torch.device("cpu"))


def test_a_start_is_remembered_by_image_and_forgotten_at_a_reset() -> None:
    memory, random = memory_of(reset_every=3), torch.full((2, 1, 2, 2), 0.07)
    grad = torch.tensor([1.0, -2.0, 3.0, -4.0]).view(1, 1, 2, 2)
    updated(memory, [2], 0, grad, torch.zeros(1, 1, 2, 2))
    index = torch.tensor([1, 2])
    recalled = memory.recall(index, 1, random, EPS.eps)
    assert torch.equal(recalled[0], random[0])
    assert torch.allclose(recalled[1], 0.1 * grad[0].sign())
    assert torch.equal(memory.recall(index, 3, random, EPS.eps), random)


def test_momentum_outlives_a_gradient_that_changes_its_sign() -> None:
    """With |g| equal everywhere, 0.3 of the momentum never outweighs a new gradient; of a small gradient it does."""
    memory, zero = memory_of(reset_every=9), torch.zeros(1, 1, 2, 2)
    updated(memory, [0], 0, torch.ones(1, 1, 2, 2), zero)
    updated(memory, [0], 1, torch.tensor([-0.1, 1.0, -1.0, 1.0]).view(1, 1, 2, 2), zero)
    recalled = memory.recall(torch.tensor([0]), 2, zero, EPS.eps)
    assert torch.allclose(recalled.flatten(), torch.tensor([0.1, 0.1, -0.1, 0.1]))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_gradients_of_any_size_leave_finite_numbers(scale: float) -> None:
    memory = StartMemory(RememberStarts(), 1, (3, 200, 200), torch.device("cpu"))
    grad = torch.zeros(1, 3, 200, 200)
    grad[0, 0, 0, 0] = scale
    x = torch.full_like(grad, 0.5)
    for epoch in (1, 2):
        memory.update(torch.tensor([0]), slice(None), epoch, x, torch.zeros_like(x), grad, EPS, torch.tensor(0.1))
    assert all(bool(part.isfinite().all()) for part in memory.state_dict().values())


def test_a_state_of_another_number_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match="remembered starts are of shape"):
        memory_of(4).load_state_dict(memory_of(5).state_dict())
