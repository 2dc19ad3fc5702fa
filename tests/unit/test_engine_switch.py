"""A training that was recorded goes on eagerly, and the other way round: steps and loss scales are taken over."""

from typing import Any

import pytest
import torch

from deat.engine.loss_scaler import LossScaler
from deat.training import trainer as training
from deat.training.optimizers import DeviceSGD, load_optimizer_state, make_optimizer_factory
from deat.training.resume_checks import collect_environment, list_differences
from deat.training.trainer import Trainer
from helpers.games import trainer_of
from helpers.nets import conv_net


def trainer_with(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(
        training, "make_optimizer_factory", lambda settings, records: make_optimizer_factory(settings, on_device)
    )
    trainer: Trainer = trainer_of("pgd-2", conv_net(), epochs=4, lr_schedule="cyclic")
    assert isinstance(trainer.optimizer, DeviceSGD) == on_device
    return trainer


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("played", [0, 2])
def test_either_engine_resumes_from_the_others_state(
    recorded: bool, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first, second = (trainer_with(device, monkeypatch) for device in (recorded, recorded, not recorded))
    for _ in range(4):
        whole.run_epoch()
    for _ in range(played):
        first.run_epoch()
    second.load_state_dict(first.state_dict())
    for _ in range(4 - played):
        second.run_epoch()
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert second.history[-1].loss == pytest.approx(whole.history[-1].loss, rel=1e-4)


def test_rates_from_a_state_of_the_host_are_device_values_that_a_recording_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, device = (trainer_with(on_device, monkeypatch) for on_device in (False, True))
    host.run_epoch()
    device.load_state_dict(host.state_dict())
    (group,) = device.optimizer.param_groups
    held = group["lr"], group["momentum"]
    assert all(isinstance(value, torch.Tensor) for value in held), "a recorded step would have frozen them"
    device.lr_scheduler.set_step(8)
    assert held[0] is group["lr"]
    assert held[1] is group["momentum"]
    assert (float(held[0]), float(held[1])) == pytest.approx(
        device.lr_scheduler.schedule.at(8, device.lr_scheduler.total_steps)
    )


def test_training_that_resumes_with_other_steps_is_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = (collect_environment(trainer_with(on_device, monkeypatch)) for on_device in (False, True))
    assert list_differences(host, host) == []
    shapes = [{"settings": {"rate": name}} for name in ("cyclic", "flat")]
    assert list_differences(*shapes) == ['settings.lr_schedule: "cyclic", now "flat"'], "by its present name"
    assert list_differences(host, device) == ['steps: "SGD", now "DeviceSGD"']
    assert list_differences({name: value for name, value in host.items() if name != "steps"}, device) == []


def test_an_optimiser_of_your_own_resumes_with_its_own_settings() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    one, other = (torch.optim.Adam([weight], lr=lr, betas=(0.5, 0.6)) for lr in (0.1, 0.2))
    weight.grad = torch.ones(2)
    one.step()
    load_optimizer_state(other, one.state_dict())
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.1, (0.5, 0.6))
    assert float(other.state[weight]["step"]) == 1


def test_loss_scales_are_taken_over_from_torchs_scaler_and_by_it() -> None:
    torchs, ours = torch.amp.GradScaler("cpu", init_scale=64.0), LossScaler(torch.device("cpu"))
    state: dict[str, Any] = {**torchs.state_dict(), "_growth_tracker": 7}
    ours.load_state_dict(state)
    assert (float(ours.factor), int(ours.growth_tracker)) == (64.0, 7)
    assert ours.state_dict() == state
    ours.factor.fill_(8.0)
    torchs.load_state_dict(ours.state_dict())
    assert torchs.get_scale() == 8.0
