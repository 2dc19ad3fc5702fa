"""Optimizers by name: the settings that they take, what they train, and how their trainings resume."""

from pathlib import Path
from typing import Any

import pytest
import torch

import deat
from deat.cli.main import main
from deat.errors import Interrupted, UsageError
from deat.runs.record_files import read_record
from deat.training.checkpoints import Checkpoints
from deat.training.named_optimizers import OPTIMIZERS
from deat.training.optimizers import make_optimizer_factory
from helpers.nets import conv_net, learnable

X, Y = learnable()


def interrupt_at(trainer: deat.Trainer, batches: int) -> None:
    """Ask for a stop once so many batches have been played."""
    played, end_batch = [], trainer.game.end_batch

    def count(buffers: Any) -> None:
        end_batch(buffers)
        played.append(1)
        if len(played) == batches:
            trainer.interruption.request()

    trainer.game.end_batch = count  # type: ignore[method-assign]


def make_optimizer(**settings: object) -> torch.optim.Optimizer:
    config = deat.TrainConfig(**settings)  # type: ignore[arg-type]
    return make_optimizer_factory(config, on_device=False)(conv_net().parameters())


def test_named_optimizers_are_those_of_torch_with_the_given_settings() -> None:
    adamw = make_optimizer(optimizer="adamw", lr=0.01, betas=(0.8, 0.9), weight_decay=0.3)
    assert isinstance(adamw, torch.optim.AdamW)
    group = adamw.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, (0.8, 0.9), 0.3)
    rmsprop = make_optimizer(optimizer="rmsprop", momentum=0.5).param_groups[0]
    assert (rmsprop["lr"], rmsprop["momentum"], rmsprop["weight_decay"]) == (1e-3, 0.5, 0.0)


def test_without_a_name_records_are_those_of_versions_without_named_optimizers() -> None:
    record = deat.TrainConfig().describe()
    assert not {"optimizer", "betas"} & record.keys()
    assert (record["momentum"], record["weight_decay"]) == (0.9, 5e-4)
    assert deat.TrainConfig(optimizer="adam").describe()["optimizer"] == "adam"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adamm"}, "Did you mean 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum=0.9 is a setting of sgd and rmsprop, and not of adamw"),
        ({"betas": (0.9, 0.99)}, "not of sgd"),
        ({"optimizer": "adam", "betas": (0.9,)}, "two numbers"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "below 1"),
        ({"optimizer": "adam", "betas": 0.9}, "two numbers"),
    ],
)
def test_settings_of_other_optimizers_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        deat.TrainConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_training_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def fresh() -> deat.Trainer:
        config = deat.TrainConfig(optimizer=name, epochs=3, batch_size=8, seed=1)
        return deat.make_trainer(conv_net(batch_norm=True), (X, Y), method="m+deat", threat="linf:0.1", config=config)

    whole, first, second = fresh(), fresh(), fresh()
    whole.fit()
    interrupt_at(first, batches=len(first.train) + 1)
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(tmp_path).resume_or_start(second)
    second.fit()
    for mine, other in zip(whole.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    assert whole.history == second.history


def test_fit_trains_with_a_named_optimizer_and_resumes_with_no_other(tmp_path: Path) -> None:
    options = {"epochs": 1, "batch_size": 8, "progress": False, "checkpoints": tmp_path, "method": "fgsm"}
    result = deat.fit(conv_net(), (X, Y), optimizer="adamw", betas=(0.9, 0.99), **options)
    assert result.record["settings"]["betas"] == (0.9, 0.99)
    with pytest.raises(UsageError, match=r'optimizer: "AdamW", now "SGD".*settings\.optimizer'):
        deat.fit(conv_net(), (X, Y), **options)


def test_the_command_line_takes_and_records_an_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    flags = "--n-train 200 --epochs 1 --test-images 0 --baseline no --val-attack none --method fgsm"
    argv = f"train {flags} --optimizer adamw --betas 0.8,0.99 --out {out}".split()
    assert main(argv) == 0
    config = read_record(out).config
    assert (config.optimizer, config.betas, config.lr, config.momentum) == ("adamw", (0.8, 0.99), 1e-3, None)
    assert main(["resume", str(out)]) == 0
    capsys.readouterr()
    assert main([*argv[:-2], "--out", str(tmp_path / "other"), "--momentum", "0.9"]) == 2
    assert "not of adamw" in capsys.readouterr().err
