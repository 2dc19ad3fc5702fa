"""Where an epoch's seconds go: training, validation and the rest add up to all that went by."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import deat
from deat.checkpoint.encoding import build_dataclass
from deat.cli import training_progress
from deat.cli.training_progress import PhaseTimer
from deat.core.game import Game
from deat.training import trainer as training
from deat.training.epoch_records import EpochTiming
from deat.training.validation import Validator
from deat.utils.text import format_seconds
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, owner: type, name: str, seconds: float, patch: pytest.MonkeyPatch) -> None:
        """Let a method take so long."""
        real = getattr(owner, name)

        def slow(*args: object, **options: object) -> object:
            self.now += seconds
            return real(*args, **options)

        patch.setattr(owner, name, slow)


class Told:
    """A callback and a keeper that take their time."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.timings = clock, list[EpochTiming]()

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: EpochTiming) -> None:
        self.timings.append(timing)
        self.clock.now += 5

    def on_train_begin(self, trainer: deat.Trainer) -> None:
        self.clock.now += 20

    def save_if_due(self, trainer: deat.Trainer, *, force: bool = False) -> None:
        self.clock.now += 7


def test_an_epoch_s_seconds_add_up_to_all_that_went_by(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(training, "perf_counter", clock)
    clock.after(Game, "end_batch", 1, monkeypatch)
    clock.after(Validator, "__call__", 3, monkeypatch)
    told = Told(clock)
    trainer = trainer_of("fgsm", conv_net(), data=learnable(12), val=learnable(4), epochs=3, batch_size=4)
    trainer.callbacks, trainer.checkpointer = [told], told
    clock.now += 1000  # before training begins, which is nobody's
    trainer.fit()
    assert [(t.train_seconds, t.val_seconds, t.other_seconds) for t in told.timings] == [
        (3, 3, 40),  # it is told as a callback and as a checkpointer that training begins
        (3, 3, 12),
        (3, 3, 12),
    ]
    last = 5 + 7 + 7  # the last epoch's own rest: its callback, its save, and the one at the end
    assert sum(t.seconds for t in told.timings) + last == clock.now - 1100
    assert trainer.seconds == 9  # training's alone, as ever


def test_clocks_of_older_runs_are_read_with_no_rest() -> None:
    timing = EpochTiming(0, 1.0, 2.0, 3.0, 4.0)
    older = {name: value for name, value in asdict(timing).items() if name != "other_seconds"}
    assert build_dataclass(EpochTiming, older) == EpochTiming(0, 1.0, 2.0, 3.0)
    assert build_dataclass(EpochTiming, json.loads(json.dumps(asdict(timing)))) == timing
    assert (EpochTiming(**older).seconds, timing.seconds) == (3, 7)


def test_phases_add_up_to_all_elapsed_seconds_and_the_rest_goes_to_the_named_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(training_progress, "perf_counter", clock)
    timer = PhaseTimer()
    clock.now += 70
    timer.add_phase("saving", training=24.0, validation=20.0)
    clock.now += 0.25
    timer.add_phase("scores")
    clock.now += 0.25
    timer.add_phase("scores")
    assert timer.seconds_by_phase == {"training": 24, "validation": 20, "saving": 26, "scores": 0.5}
    assert timer.summary() == "70.5 s in all: training 24.0, validation 20.0, saving 26.0, scores 0.50"


def test_seconds_are_shown_in_about_three_digits() -> None:
    assert [format_seconds(value) for value in (0.0412, 1.23, 45.67, 123.4)] == ["0.04", "1.2", "45.7", "123"]


def test_a_run_ends_with_where_its_seconds_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from deat.cli.main import main

    monkeypatch.chdir(tmp_path)
    how = "--epochs 1 --held-out 20 --val-attack fgsm --test-images 20 --baseline yes --out run"
    assert main(["train", *how.split()]) == 0
    said = capsys.readouterr().out
    (line,) = [text for text in said.splitlines() if " s in all: " in text]
    names = [part.rsplit(" ", 1)[0] for part in line.split(" s in all: ")[1].split(", ")]
    assert names == ["training", "validation", "watch", "saving", "scores", "baseline"]
    assert "s of " in next(text for text in said.splitlines() if "epoch 1/1" in text)
    assert "other_seconds" in json.loads((tmp_path / "run/timing.jsonl").read_text())
    assert main(["resume", "run"]) == 0
    assert "s in all" not in capsys.readouterr().out  # nothing was trained
