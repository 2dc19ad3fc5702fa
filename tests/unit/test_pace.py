"""When auto compiles: once an epoch's pace shows that the rest of the run earns the wait back."""

import pytest

import deat
from deat.training.history import EpochTiming
from deat.training.pace import Pace
from helpers.games import trainer_of


@pytest.mark.parametrize(("seconds", "compiled"), [(0.001, False), (1e4, True)])
def test_auto_compiles_once_the_pace_shows_that_it_pays(seconds, compiled):
    trainer = trainer_of("pgd-1", epochs=9)
    wanted: list[bool] = []
    trainer.game.runner.use_compiled = wanted.append
    pace = Pace()
    for epoch in range(3):
        trainer.epoch, trainer.game.cost.backprops = epoch + 1, 6 * (epoch + 1)
        pace.look(trainer, EpochTiming(epoch, 50.0 if epoch == 0 else seconds, 0.0, 1.0))
        assert wanted == [True] * (compiled and epoch > 0)


def test_auto_compiles_after_a_first_epoch_that_is_long():
    trainer = trainer_of("pgd-1", epochs=2)
    wanted: list[bool] = []
    trainer.game.runner.use_compiled = wanted.append
    trainer.epoch, trainer.game.cost.backprops = 1, 6
    Pace().look(trainer, EpochTiming(0, 3600.0, 0.0, 1.0))
    assert wanted == [True]


def test_auto_compiles_sooner_where_kernels_were_built_before(monkeypatch, tmp_path):
    monkeypatch.setattr(deat.Engine, "fuses", property(lambda self: True))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    trainer = trainer_of("pgd-1", epochs=9)
    wanted: list[bool] = []
    trainer.game.runner.use_compiled = wanted.append
    left = 7 * len(trainer.train) * 2  # backprops
    trainer.epoch, trainer.game.cost.backprops = 2, 1
    for built in (False, True):
        pace = Pace()
        pace.look(trainer, EpochTiming(0, 1.0, 0.0, 1.0))
        trainer.game.cost.backprops += 1
        pace.look(trainer, EpochTiming(1, 6 / 0.3 / left, 0.0, 1.0))  # six seconds could be saved
        assert wanted == [True] * built
        (tmp_path / "A1").mkdir(exist_ok=True)
        (tmp_path / "A1" / "forth.cubin").touch()


def test_auto_takes_compiling_back_where_it_was_no_faster():
    trainer = trainer_of("pgd-1", epochs=9)
    wanted: list[bool] = []

    def use(yes):
        wanted.append(yes)
        trainer.game.runner.compiled = object() if yes else None

    trainer.game.runner.use_compiled = use
    pace = Pace()
    for epoch, seconds in enumerate((50.0, 1e4, 1e6, 2e4, 2e4)):
        trainer.epoch, trainer.game.cost.backprops = epoch + 1, 6 * (epoch + 1)
        pace.look(trainer, EpochTiming(epoch, seconds, 0.0, 1.0))
    assert wanted == [True, False]


def test_auto_compiles_once_where_that_fell_back():
    trainer = trainer_of("pgd-1", epochs=20)
    wanted: list[bool] = []
    trainer.game.runner.use_compiled = wanted.append
    pace = Pace()
    for epoch in range(8):
        trainer.epoch, trainer.game.cost.backprops = epoch + 1, 6 * (epoch + 1)
        pace.look(trainer, EpochTiming(epoch, 1e5, 0.0, 1.0))
    assert wanted == [True]


def test_what_was_spent_before_a_run_goes_on_does_not_make_it_look_faster():
    trainer = trainer_of("pgd-1", epochs=2)
    wanted: list[bool] = []
    trainer.game.runner.use_compiled = wanted.append
    trainer.epoch, trainer.game.cost.backprops = 1, 10**9
    Pace().look(trainer, EpochTiming(0, 3600.0, 0.0, 1.0))
    assert wanted == [True]
