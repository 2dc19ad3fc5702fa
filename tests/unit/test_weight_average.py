"""The moving average of weights: its formula, its scores beside the weights' own, and what a run keeps of it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.cli.main import main
from deat.errors import CheckpointError, Interrupted, UsageError
from deat.training.checkpoints import Checkpoints
from deat.training.weight_average import WeightAverage
from deat.utils.distributed import Distributed
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable
from helpers.together import together

OPTIONS = {"epochs": 3, "val": 0.25, "val_attack": "pgd-2", "ema": 0.9}


def with_average(method: str = "m+deat", seed: int = 0, **options: object) -> deat.Trainer:
    return trainer_of(method, conv_net(batch_norm=True, seed=seed), **{**OPTIONS, **options})


def as_bytes(weights: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.cpu().numpy().tobytes() for name, value in weights.items()}


def follow_updates(trainer: deat.Trainer, decay: float) -> dict[str, Tensor]:
    """Average by hand, after every step of the optimizer, in float64."""
    state = trainer.model.state_dict()
    expected = {name: value.double() for name, value in state.items() if value.is_floating_point()}
    steps = []

    def average(*_: object) -> None:
        steps.append(1)
        now = min(decay, (1 + len(steps)) / (10 + len(steps)))
        for name in expected:
            expected[name] = now * expected[name] + (1 - now) * trainer.model.state_dict()[name].double()

    trainer.optimizer.register_step_post_hook(average)
    return expected


@pytest.mark.parametrize("method", ["m+deat", "free-4", "pgd-2", "f+trades-2", "yopo-3-2", "natural"])
def test_every_update_of_weights_and_batch_norms_is_averaged(method):
    trainer = with_average(method, val=None)
    expected = follow_updates(trainer, 0.9)
    result = trainer.fit()
    assert any("running_mean" in name for name in expected)
    for name, value in expected.items():
        assert torch.allclose(result.averaged[name].double(), value, atol=1e-6), name


def test_averaging_and_scoring_the_average_changes_nothing_of_training():
    with_it, without = with_average(), with_average(ema=None)
    one, two = with_it.fit(), without.fit()
    assert as_bytes(one.model.state_dict()) == as_bytes(two.model.state_dict())
    own = {"ema_natural", "ema_robust", "best_epoch", "val_p", "val_passes"}
    for a, b in zip(one.history, two.history, strict=True):
        assert {k: v for k, v in asdict(a).items() if k not in own} == {
            k: v for k, v in asdict(b).items() if k not in own
        }
        assert (a.ema_natural is None, b.ema_natural) == (False, None)
        assert a.val_passes == 2 * b.val_passes


def test_the_best_weights_may_be_the_average_and_score_as_recorded():
    trainer = with_average(epochs=6, ema=0.5)
    result = trainer.fit()
    scores = {(s.epoch, s.averaged): (s.natural, s.robust) for s in trainer.best.scored}
    for stats in result.history:
        assert scores[stats.epoch, False] == (stats.val_natural, stats.val_robust)
        assert scores[stats.epoch, True] == (stats.ema_natural, stats.ema_robust)
    assert scores[result.choice.epoch, result.choice.averaged] == (result.best.natural, result.best.robust)
    result.load_best()
    again = trainer.validator(result.model)
    assert (again.natural, again.robust) == (result.best.natural, result.best.robust)


def test_without_held_out_images_the_average_after_the_last_epoch_is_the_best():
    result = with_average(val=None).fit()
    assert (result.best.averaged, result.choice.averaged, result.choice.rule) == (True, True, "last")
    assert as_bytes(result.best.weights) == as_bytes(result.averaged)
    assert "averaged" in result.choice.reason


@pytest.mark.promise("P13", "P16")
@pytest.mark.parametrize("batches", [2, 3], ids=["after an epoch", "in mid-epoch"])
def test_a_resumed_training_has_the_same_average(tmp_path, batches):
    whole, first, second = with_average(), with_average(), with_average(seed=7)
    expected = whole.fit()
    plays, real = [], first.game.end_batch

    def count(buffers: object) -> None:
        real(buffers)
        plays.append(1)
        if len(plays) == batches:
            first.interruption.request()

    first.game.end_batch = count
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(tmp_path).resume_or_start(second)
    result = second.fit()
    assert as_bytes(result.averaged) == as_bytes(expected.averaged)
    assert as_bytes(result.best.weights) == as_bytes(expected.best.weights)
    assert result.history == expected.history


@pytest.mark.parametrize(("before", "now"), [(None, 0.9), (0.9, None), (0.9, 0.99)])
def test_a_training_does_not_resume_with_another_decay(tmp_path, before, now):
    first = with_average(ema=before)
    Checkpoints(tmp_path).resume_or_start(first)
    first.fit()
    with pytest.raises(UsageError, match=r"ema: .*now"):
        Checkpoints(tmp_path).resume_or_start(with_average(ema=now))


@pytest.mark.parametrize("ema", [0, 1, -0.5, 1.5, "0.9x", True])
def test_a_decay_that_is_no_share_is_refused_with_one_that_is(ema):
    with pytest.raises(UsageError, match=r"ema .*0\.999"):
        deat.TrainConfig(ema=ema)


def test_averages_of_half_precision_weights_still_move():
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(net.weight, 1.0)
    average = WeightAverage(net, 0.999)
    average.updates = 100_000
    nn.init.constant_(net.weight, 2.0)
    for _ in range(700):
        average.update()
    assert average.weights()["weight"].item() == pytest.approx(2 - 0.999**700, abs=0.01)
    assert average.weights()["weight"].dtype == torch.bfloat16


def average_together(ranks: Distributed) -> dict[str, bytes]:
    net = conv_net(batch_norm=True)
    trainer = trainer_of("m+deat", net, data=learnable(24), batch_size=8, distributed=ranks, **{**OPTIONS, "val": None})
    return as_bytes(trainer.fit().averaged)


@pytest.mark.promise("P30")
def test_all_processes_have_the_same_average():
    first, second = together(average_together)
    assert first == second


def test_a_run_with_an_average_keeps_scores_and_exports_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "--epochs", "2", "--ema", "0.9", "--baseline", "no", "--out", "run", "--test-images", "40"]) == 0
    )
    assert "averaged" in capsys.readouterr().out
    run = deat.load_run("run", epoch="averaged")
    assert run.settings.ema == 0.9
    names = [score["name"] for score in json.loads(Path("run/scores.json").read_text())]
    assert any("averaged weights" in name for name in names)
    assert main(["evaluate", "run", "--epoch", "averaged", "--attacks", "natural", "--n", "40"]) == 0
    assert main(["export", "run", "--epoch", "averaged", "--out", "averaged.safetensors"]) == 0
    assert main(["report", "run"]) == 0


def test_a_run_without_an_average_says_how_to_get_one(tmp_path):
    result = trainer_of("fgsm", conv_net(), epochs=1).fit()
    with pytest.raises(UsageError, match=r"ema=0\.999"):
        result.load_averaged()
    result.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="--ema"):
        deat.load_run(tmp_path / "run", model=conv_net(), epoch="averaged")


def test_a_saved_result_and_checkpoints_give_the_average_back(tmp_path):
    data = learnable(24)
    result = deat.fit(
        conv_net(),
        data,
        val=learnable(8),
        method="fgsm",
        epochs=2,
        ema=0.9,
        batch_size=8,
        checkpoints=tmp_path / "kept",
        progress=False,
    )
    result.save(tmp_path / "run")
    for folder in ("kept", "run"):
        loaded = deat.load_run(tmp_path / folder, model=conv_net(seed=3), epoch="averaged")
        assert as_bytes(loaded.model.state_dict()) == as_bytes(result.averaged)
