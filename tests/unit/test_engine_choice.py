"""When auto compiles: once its pace shows that the rest of the run earns the wait back."""

import io
import itertools

import pytest
from rich.console import Console

import deat
from deat.cli.training_progress import TrainingProgress
from deat.training import engine_choice as pacing
from deat.training.engine_choice import AutoCompile, CompilePolicy
from deat.training.epoch_records import EpochTiming
from deat.training.progress_lines import EpochPrinter
from helpers.games import trainer_of


@pytest.fixture
def paced():
    """A trainer of nine epochs under auto, and what was wanted of it: to compile, or not to."""
    trainer = trainer_of("pgd-1", epochs=9)
    wanted: list[bool] = []

    def use(yes):
        wanted.append(yes)
        trainer.game.executor.compiled = object() if yes else None

    trainer.game.executor.use_compiled = use
    trainer.compile_policy = AutoCompile()
    return trainer, wanted


def after(trainer, epoch, seconds, warm_up=0.0):
    """An epoch of so many seconds has ended."""
    trainer.game.cost.backprops = 6 * (epoch - 1)
    trainer.compile_policy.before_epoch(trainer)
    trainer.epoch, trainer.batches_done, trainer.game.cost.backprops = epoch, 0, 6 * epoch
    trainer.compile_policy.after_epoch(trainer, EpochTiming(epoch - 1, seconds, 0.0, 1.0, warm_up_seconds=warm_up))


@pytest.mark.parametrize(("seconds", "compiled"), [(0.001, False), (1e4, True)])
def test_auto_compiles_once_the_pace_shows_that_it_pays(paced, seconds, compiled):
    trainer, wanted = paced
    after(trainer, 1, seconds)
    assert wanted == [True] * compiled


def test_what_is_new_to_be_recorded_or_compiled_is_no_part_of_a_pace(paced):
    trainer, wanted = paced
    after(trainer, 1, 1e6, warm_up=1e6)
    assert wanted == []
    after(trainer, 2, 1e4)
    assert wanted == [True]
    after(trainer, 3, 1e6, warm_up=1e6 - 9e3)  # a move that came late, faster than recorded ones but for that
    assert wanted == [True]


def test_auto_compiles_sooner_where_kernels_were_built_before(paced, monkeypatch, tmp_path):
    monkeypatch.setattr(deat.Engine, "uses_own_kernels", property(lambda self: True))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    trainer, wanted = paced
    left = 8 * len(trainer.train) * 2  # backprops
    for built in (False, True):
        trainer.compile_policy = AutoCompile()
        after(trainer, 1, 6 * 6 / 0.3 / left)  # six seconds could be saved
        assert wanted == [True] * built
        (tmp_path / "A1").mkdir(exist_ok=True)
        (tmp_path / "A1" / "batch_norm_forward_kernel.cubin").touch()


def test_auto_takes_compiling_back_where_it_was_no_faster(paced):
    trainer, wanted = paced
    for epoch, seconds in enumerate((1e4, 2e4, 2e4), 1):
        after(trainer, epoch, seconds)
    assert wanted == [True, False]


def test_auto_keeps_what_was_faster(paced):
    trainer, wanted = paced
    for epoch, seconds in enumerate((1e4, 9e3, 3e4), 1):
        after(trainer, epoch, seconds)
    assert wanted == [True]


def test_auto_compiles_once_where_that_fell_back(paced):
    trainer, wanted = paced
    trainer.game.executor.use_compiled = wanted.append
    for epoch in range(1, 9):
        after(trainer, epoch, 1e5)
    assert wanted == [True]


def test_what_was_spent_before_a_run_resumes_does_not_make_it_look_faster(paced):
    trainer, wanted = paced
    trainer.game.cost.backprops = 10**9
    trainer.compile_policy.before_epoch(trainer)
    trainer.epoch, trainer.game.cost.backprops = 1, 10**9 + 4
    trainer.compile_policy.after_epoch(trainer, EpochTiming(0, 3600.0, 0.0, 1.0))
    assert wanted == [True]
    assert trainer.compile_policy.recorded_pace == 3600 / 4, "what was played of a broken-off epoch, and not all of it"


def glances(trainer, monkeypatch, seconds, warm_up=0.0, batches=4):
    """So many batches of an epoch are played, so many seconds apart; the second one has something new."""
    monkeypatch.setattr(pacing, "perf_counter", itertools.count(0, seconds).__next__)
    trainer.game.cost.backprops = trainer.game.executor.warm_up_seconds = 0
    trainer.compile_policy.before_epoch(trainer)
    for step in range(1, batches + 1):
        trainer.batches_done, trainer.game.cost.backprops = step, 2 * step
        trainer.game.executor.warm_up_seconds += warm_up * (step == 2)
        trainer.compile_policy.after_batch(trainer)


def test_auto_compiles_in_the_middle_of_an_epoch_that_is_long(paced, monkeypatch):
    trainer, wanted = paced
    glances(trainer, monkeypatch, seconds=8.0, batches=3)
    assert wanted == []
    glances(trainer, monkeypatch, seconds=8.0, batches=4)
    assert wanted == [True]
    assert trainer.compile_policy.recorded_pace == 24 / 6, "seconds a backprop"
    trainer.compile_policy.after_epoch(trainer, EpochTiming(0, 1e6, 0.0, 1.0))  # of both kinds
    assert wanted == [True]
    after(trainer, 2, 1e6)
    assert wanted == [True, False]


def test_an_epochs_first_batch_with_which_workers_start_is_no_part_of_a_pace(paced, monkeypatch):
    trainer, wanted = paced
    monkeypatch.setattr(pacing, "perf_counter", iter((0.0, 900.0, 901.0, 902.0)).__next__)
    trainer.compile_policy.before_epoch(trainer)
    for trainer.game.cost.backprops in (2, 4, 6):
        trainer.compile_policy.after_batch(trainer)
    trainer.epoch = 1
    trainer.compile_policy.after_epoch(trainer, EpochTiming(0, 1000.0, 0.0, 1.0))
    assert trainer.compile_policy.recorded_pace == 100 / 4, "seconds a backprop since the first batch"
    assert wanted == [True]


def test_a_single_epoch_is_compiled_if_its_rest_is_long(monkeypatch):
    trainer = trainer_of("pgd-1", epochs=1)
    wanted: list[bool] = []
    trainer.game.executor.use_compiled = wanted.append
    monkeypatch.setattr(type(trainer.train), "__len__", lambda self: 10**5)
    trainer.compile_policy = AutoCompile()
    glances(trainer, monkeypatch, seconds=8.0)
    assert wanted == [True]


def test_a_short_rest_is_not_compiled_and_what_is_new_does_not_count_on_the_way_either(paced, monkeypatch):
    trainer, wanted = paced
    glances(trainer, monkeypatch, seconds=8.0, warm_up=20.0)
    assert wanted == []
    trainer.config.__dict__["epochs"] = 0
    glances(trainer, monkeypatch, seconds=8.0)
    assert wanted == []


def test_a_pace_is_of_one_epoch(paced, monkeypatch):
    trainer, wanted = paced
    glances(trainer, monkeypatch, seconds=0.1, batches=2)
    after(trainer, 1, 0.001)
    monkeypatch.setattr(pacing, "perf_counter", lambda: 1e6)  # validation took its time
    trainer.compile_policy.after_batch(trainer)
    assert wanted == []


def test_callbacks_can_read_which_engine_runs(paced, capsys, monkeypatch):
    trainer, _ = paced
    trainer.compile_policy = CompilePolicy()
    how = ["graph"]
    monkeypatch.setattr(deat.Engine, "name", property(lambda self: how[0]))
    out = io.StringIO()
    line = TrainingProgress(Console(file=out, width=100))
    line.show_trainer(trainer)
    trainer.callbacks = [EpochPrinter(), line]
    for how[0] in ("graph", "compile", "compile", "eager"):
        trainer.run_epoch()
    said = [text.rpartition("s")[2] for text in capsys.readouterr().out.splitlines()]
    assert said == [" recorded", " compiled", " compiled", ""]
    said = [text for text in out.getvalue().splitlines() if "moves" in text]
    assert [("compiled" in text, "eager" in text) for text in said] == [(True, False), (False, True)]
