"""The cost that --dry-run tells: all that a run does is counted, measured by a clock of images that go forward."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.cli.main import main
from deat.evaluation.attacks import parse_attack
from deat.training import training_cost
from deat.training.training_cost import AttackSpeed, CostEstimate, LinearTime

SECONDS_PER_IMAGE = 1e-4


class ImageClock:
    """A clock that a network moves on by its images: it is exact on a busy machine."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def on_forward(self, module: nn.Module, inputs: Any) -> None:
        """Count the images that reach the first layer."""
        if isinstance(module, nn.Conv2d) and module.in_channels == 1:
            self.seconds += SECONDS_PER_IMAGE * len(inputs[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ImageClock]:
    clock = ImageClock()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_cost, "perf_counter", clock)
    hook = nn.modules.module.register_module_forward_pre_hook(clock.on_forward)
    yield clock
    hook.remove()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            "--method pgd-3 --epochs 3 --test-images 100",
            {"training", "validation", "saving", "watch", "scores", "baseline"},
        ),
        (
            "--method trades --epochs 2 --test-images 100 --baseline no --ema 0.9",
            {"training", "validation", "saving", "watch", "scores"},
        ),
        (
            "--method fgsm --epochs 4 --val-attack none --test-images 0",
            {"training", "validation", "saving", "baseline"},
        ),
        (
            "--method pgd-2 --epochs 2 --test-images 0 --baseline no --init given.safetensors",
            {"training", "validation", "saving", "watch", "scores"},
        ),
    ],
)
def test_the_plan_counts_what_the_run_does(
    flags: str, parts: set[str], clock: ImageClock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, plans = ["train", *flags.split(), "--n-train", "300"], []
    deat.save_weights(deat.build_model("small", in_channels=1, image_size=8), "given.safetensors")
    for share in (0.0, 1.0):  # how many images are fooled early, only the run shows
        monkeypatch.setattr(training_cost, "ACTIVE_SHARE", share)
        assert main([*argv, "--dry-run", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["parts"].keys() == parts
    for plan in plans:
        assert plan["seconds"] == pytest.approx([sum(part[side] for part in plan["parts"].values()) for side in (0, 1)])
    clock.seconds = 0.0
    assert main([*argv, "--out", "run"]) == 0
    assert 0.95 * plans[0]["seconds"][1] < clock.seconds < 1.05 * plans[1]["seconds"][1]


def test_a_bench_counts_evaluation_too(clock: ImageClock, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "quick", "--methods", "pgd-2", "--seeds", "0,1", "--out", "bench", "--dry-run", "--json"]
    seconds = {}
    for n in (50, 100):
        assert main([*argv, "--set", "epochs=2", "--set", f"n={n}", "--set", "n_train=200"]) == 0
        plan = json.loads(capsys.readouterr().out)
        (row,) = plan["rows"]
        assert row["cost"]["parts"].keys() == {"training", "validation", "watch", "saving", "evaluation"}
        assert plan["seconds"] == pytest.approx([2 * seconds for seconds in row["cost"]["seconds"]])
        seconds[n] = row["cost"]["parts"]["evaluation"][0]
    assert seconds[100] == pytest.approx(2 * seconds[50], rel=0.05)


def test_epochs_with_more_steps_take_longer_by_the_schedule(
    clock: ImageClock, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--epochs", "6", "--n-train", "300", "--baseline", "no", "--dry-run", "--json"]
    assert main(["train", "--method", "m+deat", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    (few, many), (low, high) = plan["backprops"], plan["parts"]["training"]
    assert many > few
    assert high / low == pytest.approx(many / few, rel=0.05)  # every backprop is one forward pass here
    assert plan["parts"]["validation"][0] == plan["parts"]["validation"][1]


def test_images_that_are_fooled_are_left_out_and_calls_have_a_price() -> None:
    speed = AttackSpeed(LinearTime(1.0, 0.0), LinearTime(0.0, 1.0), batch_size=10)
    assert speed.estimate_seconds([parse_attack("natural")], 25) == 3
    assert speed.estimate_seconds([parse_attack("fgsm")], 10) == 1 + 10
    assert speed.estimate_seconds([parse_attack("pgd-3")], 10) == 1 + 10 * (1 + 2 * training_cost.ACTIVE_SHARE)


def test_parts_add_up() -> None:
    cost = CostEstimate(1, (1, 2), 1.0, (0.0, 0.0), 1, {"training": (1.0, 2.0)}).with_parts({"scores": 3.0})
    assert cost.seconds == (4.0, 5.0)
    assert torch.is_grad_enabled()
