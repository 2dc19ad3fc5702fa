"""The overfit watch: when it fires, what it does then, and what a run's records say afterwards."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

import deat
from deat.cli.main import main
from deat.data import ImageSet, InMemorySource, as_source
from deat.errors import UsageError
from deat.evaluation.attacks import parse_attack
from deat.runs.resolve_request import Request, resolve_request
from deat.runs.run_dir import RunFolder
from deat.training.epoch_records import EpochWatch, read_history
from deat.training.overfit_watch import MAX_SCORED_IMAGES, OverfitRule, OverfitWatch
from deat.utils.safetensors_files import read_note
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable, same, weights

THREAT = deat.Linf(0.05)
RULE = OverfitRule()

# The rule, on histories alone


def history(*epochs: tuple[int, float, float], single: float | None = None) -> list[EpochWatch]:
    """Readings of (k, accuracy against several steps, l_X); the last one's single-step accuracy may be given."""
    last = len(epochs) - 1
    return [
        EpochWatch(i, k, 0.04, multi + 0.06 if single is None or i < last else single, multi, magnitude)
        for i, (k, multi, magnitude) in enumerate(epochs)
    ]


def verdict(
    readings: list[EpochWatch], rule: OverfitRule = RULE, images: int = MAX_SCORED_IMAGES, chance: float = 0.0
) -> str | None:
    """Why the last epoch is a collapse; None if it is not."""
    return rule.find_collapse(readings, images, chance)[1]


def fired(readings: list[EpochWatch], rule: OverfitRule = RULE, *scored: float) -> list[int]:
    """The epochs in which the rule fires as the history grows; scored are the images, and what one answer gets."""
    return [i for i in range(len(readings)) if verdict(readings[: i + 1], rule, *scored)]


HEALTHY = [(3, 0.44, 3300.0), (3, 0.47, 3450.0), (3, 0.48, 3500.0)]
BROKEN = {
    # The authors' WRN-34-10 runs right after the first decay: l_X leaps, then falls below where it was.
    "m+deat, alpha 10/255": [*HEALTHY, (3, 0.0, 10300.0), (4, 0.0, 4000.0), (5, 0.0, 1900.0), (6, 0.0, 1500.0)],
    "free-4, alpha 8/255": [*HEALTHY, (3, 0.01, 9000.0), (3, 0.0, 2500.0), (3, 0.0, 1500.0), (3, 0.0, 1500.0)],
    "in two steps": [*HEALTHY, (3, 0.30, 6900.0), (3, 0.25, 7000.0), (3, 0.02, 8000.0), (3, 0.0, 1500.0)],
}


@pytest.mark.parametrize("name", ["m+deat, alpha 10/255", "free-4, alpha 8/255"])
def test_collapse_fires_within_its_epoch_and_as_long_as_it_lasts(name):
    assert fired(history(*BROKEN[name])) == [3, 4, 5, 6]


def test_collapse_by_parts_is_measured_from_the_last_healthy_epoch():
    assert fired(history(*BROKEN["in two steps"])) == [5, 6]


def test_verdict_says_which_rule_fired_with_its_numbers():
    both = verdict(history(*BROKEN["m+deat, alpha 10/255"][:4], single=0.86))
    assert both == (
        "pgd-10 accuracy fell from 48.0% to 0.0% and l_X rose from 3500 to 1.03e+04 at k 3, with fgsm accuracy at 86.0%"
    )
    fall = verdict(history((1, 0.5, 10.0), (1, 0.2, 10.0), single=0.9))
    assert fall == "pgd-10 accuracy fell from 50.0% to 20.0%, with fgsm accuracy at 90.0%"
    leap = verdict(history((1, 0.5, 10.0), (1, 0.4, 30.0), single=0.8))
    assert leap == "l_X rose from 10 to 30 at k 1, with fgsm accuracy at 80.0%"


def test_leap_alone_fires_where_it_opens_a_gap_or_is_taken_at_its_word():
    rows = (1, 0.5, 10.0), (1, 0.45, 30.0)
    assert fired(history(*rows, single=0.75)) == [1]
    assert fired(history(*rows, single=0.58)) == []
    assert fired(history(*rows, single=0.51), OverfitRule(gap=-1)) == [1]


def test_leap_between_epochs_of_equal_k_is_a_suspicion_whatever_the_accuracies_say():
    rows = history((1, 0.5, 10.0), (1, 0.55, 20.1), single=0.56)
    assert verdict(rows) is None
    assert RULE.find_jump(rows) == "l_X rose from 10 to 20.1 at k 1"
    for quiet in [(1, 0.55, 20.0)], [(2, 0.55, 30.0)]:
        assert RULE.find_jump(history((1, 0.5, 10.0), *quiet)) is None
    assert RULE.find_jump(history((0, 0.5, 10.0), (0, 0.55, 30.0))) is None
    assert RULE.find_jump(rows[:1]) is None


def test_gap_is_measured_from_the_last_healthy_epoch():
    rows = [
        EpochWatch(i, 1, 0.04, *row) for i, row in enumerate([(0.56, 0.5, 10.0), (0.8, 0.4, 30.0), (0.8, 0.4, 70.0)])
    ]
    assert fired(rows) == [1, 2]


def test_fall_fires_whether_or_not_k_changed():
    assert fired(history((1, 0.5, 10.0), (2, 0.2, 10.0))) == [1]


SILENT = {
    "k changes": [(1, 0.4, 100.0), (2, 0.4, 900.0), (3, 0.4, 5000.0), (2, 0.4, 50000.0)],
    "no adversary, leap": [(0, 0.4, 100.0), (0, 0.4, 900.0), (0, 0.4, 9000.0)],
    "no adversary, fall": [(0, 0.5, 100.0), (0, 0.2, 100.0), (0, 0.0, 100.0)],
    "exactly the limits": [(1, 0.9, 100.0), (1, 0.7, 200.0), (1, 0.5, 400.0)],
    "learning begins": [(1, 0.1, 190.0), (1, 0.43, 700.0), (1, 0.32, 3300.0), (1, 0.52, 11000.0), (1, 0.5, 11500.0)],
    "a loss of almost nothing": [(2, 1.0, 1.0), (2, 1.0, 3.0), (2, 0.98, 7.0), (2, 1.0, 0.2), (2, 1.0, 2.0)],
    "alpha 2/255, which stayed healthy": [(3, 0.33, 3000.0), (3, 0.35, 3600.0), (3, 0.37, 4000.0), (3, 0.36, 4100.0)],
    "one epoch": [(1, 0.0, 100.0)],
}


@pytest.mark.parametrize("epochs", SILENT.values(), ids=SILENT.keys())
def test_nothing_fires_without_a_collapse(epochs):
    assert fired(history(*epochs)) == []


@pytest.mark.parametrize("seed", range(20))
def test_healthy_noise_does_not_fire(seed):
    draw = torch.rand(100, 2, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [(2, 0.4 + 0.18 * a, 3000 * (1 + 0.6 * b)) for a, b in draw]
    assert fired(history(*rows)) == []


def test_epoch_that_recovers_is_healthy_again():
    assert fired(history((1, 0.5, 10.0), (1, 0.1, 10.0), (1, 0.45, 10.0), (1, 0.3, 10.0), (1, 0.2, 10.0))) == [1]


def test_a_fall_that_so_few_images_can_show_by_chance_does_not_fire():
    near = history((1, 0.552, 10.0), (1, 0.310, 10.0))  # 16 of 29, then 9
    assert fired(near, RULE, 29) == []
    assert fired(near, RULE, 256) == [1]


def test_an_epoch_whose_fall_may_be_chance_is_none_to_compare_the_next_with():
    rows = history((1, 0.552, 10.0), (1, 0.310, 10.0), (1, 0.138, 10.0))
    assert fired(rows, RULE, 29) == [2]


def test_what_one_answer_for_all_gets_is_nothing_to_fall_from():
    rows = history((1, 0.241, 10.0), (1, 0.0, 10.0), (1, 0.0, 10.0))
    assert fired(rows, RULE, 29, 0.2) == [1, 2]
    assert fired(rows, RULE, 29, 0.241) == []


OVERFIT = Path(__file__).parents[2] / "docs/results/overfit"


@pytest.mark.parametrize("run", ["warn", "rollback", "mplus"])
def test_a_real_collapse_fires_in_the_epochs_in_which_it_was_recorded_and_for_the_same_reasons(run):
    lines = (OVERFIT / run / "watch.jsonl").read_text(encoding="utf-8").splitlines()
    standing: list[EpochWatch] = []
    for event in (EpochWatch(**json.loads(line)) for line in lines):
        standing.append(replace(event, reason=None, action=None))
        assert verdict(standing) == event.reason
        if event.action == "rollback":
            standing.pop()
    assert len(lines) > 20


def test_limits_can_be_set():
    rows = history((1, 0.5, 10.0), (1, 0.4, 10.0), (1, 0.4, 11.0), (1, 0.41, 14.0), single=0.7)
    assert fired(rows) == []
    assert fired(rows, OverfitRule(fall=0.095)) == [1, 2]
    assert fired(rows, OverfitRule(jump=1.2)) == [3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fall": 0},
        {"fall": 1.5},
        {"jump": 1},
        {"gap": 1},
        {"gap": -2},
        {"shrink": 1.0},
        {"shrink": 0},
        {"rollbacks": -1},
        {"rollbacks": 1.5},
    ],
    ids=str,
)
def test_setting_outside_its_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        OverfitWatch(held(), THREAT, **wrong)


def test_a_watch_is_as_strict_as_its_page_says():
    """A fall of 20 points, a leap to twice as much, a gap of 10 points; half the step, three times; 256 images."""
    watch = OverfitWatch(held(), THREAT)
    found = watch.action, watch.rule, watch.shrink, watch.rollbacks, MAX_SCORED_IMAGES
    assert found == ("warn", OverfitRule(fall=0.20, jump=2.0, gap=0.10), 0.5, 3, 256)


FORMS = {"a set": lambda held: held.images, "tensors": lambda held: (held.images.images, held.images.labels)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_images_and_threat_are_taken_in_any_form_that_fit_takes(form):
    watch, known = OverfitWatch(form(held()), "linf:0.05"), OverfitWatch(held(batch_size=128), THREAT)
    trainer_with(watch, known, epochs=2).fit()
    assert watch.threat == THREAT
    assert watch.events == known.events


@pytest.mark.parametrize(("images", "threat"), [("digits", THREAT), (None, "linf")])
def test_what_cannot_be_watched_is_refused_before_any_training(images, threat):
    with pytest.raises(UsageError):
        OverfitWatch(images or held(), threat)


def test_unknown_action_is_refused():
    with pytest.raises(UsageError, match="rollback"):
        OverfitWatch(held(), THREAT, "rolback")


# The watch, on a training that is broken on purpose


def held(n: int = 30, batch_size: int = 10) -> InMemorySource:
    x, y = learnable(n, seed=5)
    return InMemorySource(ImageSet(x, y, ("a", "b", "c")), batch_size, shuffle=False)


def trainer_with(*callbacks: object, method: str = "fgsm", epochs: int = 8, **options) -> deat.Trainer:
    """A trainer that learns its small task within three epochs."""
    net = options.pop("net", None) or conv_net(batch_norm=True)
    named = {"data": learnable(60), "threat": THREAT, "lr": 0.2, "epochs": epochs, "callbacks": list(callbacks)}
    folder = options.pop("folder", None)
    trainer = trainer_of(method, net, **{**named, **options})
    if folder:
        folder.attach(trainer)
    return trainer


def sabotage(trainer: deat.Trainer, epoch: int, times: int = 1) -> deat.Trainer:
    """Turn the classifier's answers round at the end of an epoch, the first so many times it is played."""
    play, left = trainer.train_epoch, [times]

    def broken(budget):
        record = play(budget)
        if trainer.epoch == epoch and left[0]:
            left[0] -= 1
            with torch.no_grad():
                trainer.model[-1].weight.neg_()
                trainer.model[-1].bias.neg_()
        return record

    trainer.train_epoch = broken
    return trainer


class States:
    """Keeps a copy of the trainer's state after each epoch."""

    def __init__(self) -> None:
        self.kept: list[dict] = []

    def on_epoch(self, trainer, stats, timing):
        self.kept.append(copy.deepcopy(trainer.state_dict()))


class Clock:
    """Keeps how long each epoch's training took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch(self, trainer, stats, timing):
        self.seconds.append(timing.train_seconds)


def silent(action: str, **options) -> OverfitWatch:
    return OverfitWatch(held(), THREAT, action, notify=lambda text: None, **options)


def test_watching_changes_nothing_in_a_healthy_training():
    watch = silent("rollback")
    watched, alone = (
        trainer_with(*callbacks, method="m+deat", net=conv_net(batch_norm=True, dropout=0.3))
        for callbacks in ((watch,), ())
    )
    assert watched.fit().history == alone.fit().history
    assert same(weights(watched.model), weights(alone.model))
    assert len(watch.events) == 8
    assert watch.collapses == []
    assert watch.events[-1].multi > 0.9
    assert watch.passes == 8 * 3 * (3 + 21)
    assert watch.seconds > 0
    assert watch.summary() is None


@pytest.mark.parametrize(
    ("sees", "kind", "cure"),
    [(False, "catastrophic overfitting", "--alpha"), (True, "a collapse of the whole network", "--lr")],
)
def test_warning_is_visible_and_training_continues(sees, kind, cure):
    watch = OverfitWatch(held(), THREAT)
    trainer = sabotage(trainer_with(watch), 4)
    if not sees:
        watch._accuracies = lambda trainer, read=watch._accuracies: (1.0, read(trainer)[1])
    with pytest.warns(RuntimeWarning) as seen:
        result = trainer.fit()
    assert f"{kind} in epoch 5: pgd-10 accuracy fell from 100.0%" in str(seen[0].message)
    assert watch.summary().startswith(f"{kind} in epoch 5 (warn)")
    assert f"fgsm accuracy at {watch.events[4].single:.1%}" in str(seen[0].message)
    assert all(flag in str(seen[0].message) for flag in (cure, "--watch stop", "--watch rollback"))
    assert [stats.epoch for stats in result.history] == list(range(8))
    assert (watch.alarms[0].epoch, watch.alarms[0].action) == (4, "warn")
    assert watch.events[3].reason is None
    assert trainer.schedule.alpha == pytest.approx(1.25 * 0.05)


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_suspicion_fires_and_is_noted_aloud_once_but_nothing_is_put_back(action, monkeypatch):
    said: list[str] = []
    trainer = trainer_of("pgd-2", threat=THREAT, epochs=4)
    watch = OverfitWatch(trainer.train, THREAT, action, notify=said.append)
    magnitudes = iter([1.0, 3.0, 9.0, 9.0])
    monkeypatch.setattr(
        watch, "_score_epoch", lambda trainer, stats: EpochWatch(stats.epoch, 2, 0.04, 0.56, 0.5, next(magnitudes))
    )
    trainer.callbacks.append(watch)
    result = trainer.fit()
    assert [event.action for event in watch.events] == [None, "note", "note", None]
    assert len(watch.alarms) == 2
    assert watch.collapses == []
    assert watch.summary() is None
    assert len(result.history) == 4
    assert len(said) == 1
    assert "l_X rose from 1 to 3 at k 2 in epoch 2" in said[0]
    assert "pgd-10 leaves 50.0%" in said[0]


HEALTH, LEAP, FALL = (0.56, 0.5, 1.0), (0.56, 0.5, 3.0), (0.9, 0.0, 30.0)


def actions_on(epochs: int, readings: list[tuple[float, float, float]], action: str, **options) -> list[str | None]:
    """What a watch does about readings of (single, several, l_X), one for each epoch that is played."""
    watch, left = silent(action, **options), iter(readings)
    watch._score_epoch = lambda trainer, stats: EpochWatch(stats.epoch, 2, 0.04, *next(left))
    trainer_of("pgd-2", threat=THREAT, epochs=epochs, callbacks=[watch]).fit()
    return [event.action for event in watch.events]


def test_the_epoch_put_back_is_the_last_healthy_one_and_none_that_had_begun_to_fall(monkeypatch):
    judge = OverfitRule.find_collapse
    monkeypatch.setattr(OverfitRule, "find_collapse", lambda self, held, images, chance: judge(self, held, 10, chance))
    watch, dip = silent("rollback"), (0.3, 0.25, 1.0)  # of ten images, that may be chance
    left = iter([HEALTH, HEALTH, dip, FALL, HEALTH, HEALTH])
    watch._score_epoch = lambda trainer, stats: EpochWatch(stats.epoch, 2, 0.04, *next(left))
    trainer = trainer_of("pgd-2", threat=THREAT, epochs=4, callbacks=[watch])
    assert [stats.epoch for stats in trainer.fit().history] == [0, 1, 2, 3]
    events = [(event.epoch, event.action) for event in watch.events]
    assert events == [(0, None), (1, None), (2, None), (3, "rollback"), (2, None), (3, None)]
    assert [event.epoch for event in watch._history] == [0, 1, 2, 3]


def test_a_watch_evaluates_by_the_images_it_scores_and_the_answer_that_most_of_them_have(monkeypatch):
    asked, judge = [], OverfitRule.find_collapse
    monkeypatch.setattr(
        OverfitRule, "find_collapse", lambda self, *given: (asked.append(given[1:]), judge(self, *given))[1]
    )
    x = learnable(12)[0]
    for count, chance in ((12, 5 / 12), (300, 0.5)):
        labels = torch.tensor([0, 0, 1, 0, 2, 0, 1, 0, 2, 1, 2, 1]) if count == 12 else torch.arange(count) // 150
        images = ImageSet(x[torch.arange(count) % 12], labels, ("a", "b", "c"))
        trainer_with(OverfitWatch(InMemorySource(images, 50, shuffle=False), THREAT), epochs=1).fit()
        assert asked.pop() == (min(count, MAX_SCORED_IMAGES), chance)


def test_suspicions_use_up_no_rollback():
    assert actions_on(3, [HEALTH, LEAP, FALL, LEAP], "rollback", rollbacks=1) == [None, "note", "rollback", None]


def test_what_was_rolled_back_is_not_what_the_next_epoch_is_compared_with():
    assert actions_on(2, [HEALTH, FALL, LEAP], "rollback") == [None, "rollback", "note"]


@pytest.mark.parametrize(("action", "done"), [("warn", [None, "warn", "warn"]), ("rollback", [None, "stop"])])
def test_a_watch_that_may_not_roll_back_warns_or_stops(action, done):
    assert actions_on(3, [HEALTH, FALL, FALL], action, rollbacks=0) == done


@pytest.mark.parametrize("val", [0.25, None])
def test_stop_leaves_the_last_healthy_epoch_in_the_model_and_the_best(val):
    watch, states = silent("stop"), States()
    trainer = sabotage(trainer_with(watch, states, val=val, val_attack="pgd-2"), 4)
    result = trainer.fit()
    healthy = states.kept[3]["model"]
    assert [stats.epoch for stats in result.history] == [0, 1, 2, 3]
    assert all(torch.equal(value, healthy[name]) for name, value in trainer.model.state_dict().items())
    assert result.best.epoch <= 3
    if val is None:
        assert result.best.epoch == 3
        assert all(torch.equal(value, healthy[name]) for name, value in result.best.weights.items())
    assert trainer.game.cost.backprops == 5 * 2 * len(trainer.train)
    assert [(event.epoch, event.action) for event in watch.collapses] == [(4, "stop")]


def test_rollback_resumes_from_the_healthy_epoch_with_half_the_step():
    watch, states = silent("rollback"), States()
    trainer = sabotage(trainer_with(watch, states, method="m+pgd-3"), 4)
    result = trainer.fit()
    assert [stats.epoch for stats in result.history] == list(range(8))
    assert [event.epoch for event in watch.events] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert [(event.epoch, event.action) for event in watch.collapses] == [(4, "rollback")]
    again = trainer_with(method="m+pgd-3", net=conv_net(batch_norm=True, seed=7))
    again.load_state_dict(states.kept[3])
    again.scale_step_size(0.5)
    assert [(s.k, s.alpha, s.loss) for s in again.fit().history] == [(s.k, s.alpha, s.loss) for s in result.history]
    assert same(weights(again.model), weights(trainer.model))


def test_rollback_keeps_what_was_spent():
    clock = Clock()
    trainer = sabotage(trainer_with(clock, silent("rollback"), val=0.25, val_attack="pgd-2"), 4)
    history = trainer.fit().history
    each, checks = 2 * len(trainer.train), len(trainer.val) * 6
    assert [stats.backprops for stats in history] == [each * n for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert [stats.val_passes for stats in history] == [checks * n for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert len(clock.seconds) == 9
    assert trainer.seconds == pytest.approx(sum(clock.seconds))
    alphas = [stats.alpha for stats in history]
    assert alphas == pytest.approx([0.0625] * 4 + [0.03125] * 4)


def test_each_rollback_finds_the_healthy_epoch_untouched_by_the_attempts_since():
    watch, states = silent("rollback"), States()
    trainer = sabotage(trainer_with(watch, states, epochs=6), 4, times=3)
    assert [stats.epoch for stats in trainer.fit().history] == list(range(6))
    one, two, three = [state for state in states.kept if state["epoch"] == 4][1:]
    for other in (two, three):
        assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
        buffers = [[p["momentum_buffer"] for p in s["optimizer"]["state"].values()] for s in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))
    assert trainer.schedule.alpha == pytest.approx(0.0625 / 8)


def test_rollbacks_end_in_a_stop():
    watch = silent("rollback", rollbacks=2, shrink=0.25)
    trainer = sabotage(trainer_with(watch), 4, times=9)
    result = trainer.fit()
    assert [event.action for event in watch.alarms] == ["rollback", "rollback", "stop"]
    assert trainer.schedule.alpha == pytest.approx(0.0625 / 16)
    assert [stats.epoch for stats in result.history] == [0, 1, 2, 3]
    assert watch.summary().startswith(
        "a collapse of the whole network in epoch 5 (rollback), 5 (rollback), 5 (stop); first: "
    )


def test_last_epoch_can_be_rolled_back():
    trainer = sabotage(trainer_with(silent("rollback")), 7)
    assert [stats.epoch for stats in trainer.fit().history] == list(range(8))


def test_going_back_keeps_the_steps_that_friendly_attacks_took():
    trainer = trainer_with(method="fat-3")
    trainer.run_epoch()
    state, first = copy.deepcopy(trainer.state_dict()), trainer.num_image_steps
    trainer.run_epoch()
    spent = trainer.num_image_steps
    trainer.rewind(state)
    assert 0 < first < spent == trainer.num_image_steps


def test_validation_computes_as_training_does_and_the_watch_exactly():
    watch = silent("warn")
    trainer = trainer_with(watch, val=0.25, val_attack="pgd-2", precision="bf16")
    seen: list[bool] = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    trainer.validator(trainer.model)
    assert set(seen) == {True}
    seen.clear()
    watch._accuracies(trainer)
    assert set(seen) == {False}


def test_shorter_steps_are_shorter_where_they_are_stretched_too():
    trainer = trainer_with(method="m+pgd-3")
    alpha, stretch = trainer.schedule.alpha, trainer.schedule.stretch
    assert min(alpha, stretch) > 0
    trainer.scale_step_size(0.25)
    assert (trainer.schedule.alpha, trainer.schedule.stretch) == pytest.approx((alpha / 4, stretch / 4))


def test_log_is_written_anew_where_a_watch_resumes(tmp_path):
    watch = silent("warn", log_path=tmp_path / "watch.jsonl")
    trainer_with(watch, epochs=2).fit()
    other = silent("warn", log_path=tmp_path / "other.jsonl")
    other.log_path.write_text("what a later epoch left\n")
    other.load_state_dict(watch.state_dict())
    assert other.log_path.read_text() == watch.log_path.read_text()
    assert len(other.events) == 2


def test_continued_run_keeps_its_short_steps():
    first, second = trainer_with(), trainer_with()
    first.run_epoch()
    first.scale_step_size(0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.schedule == first.schedule
    assert second.run_epoch().alpha == pytest.approx(0.03125)


@pytest.mark.parametrize("count", [3, 30, MAX_SCORED_IMAGES, MAX_SCORED_IMAGES + 1, 1000])
def test_slice_is_small_and_spread_over_the_held_out_images(count, monkeypatch):
    x = torch.linspace(0, 1, count).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    source = InMemorySource(ImageSet(x, torch.arange(count) % 3, ("a", "b", "c")), 100, shuffle=False)
    watch, seen, labels = OverfitWatch(source, THREAT), [], []
    trainer = trainer_with(watch, epochs=2)

    def look(model, images, attacks, *rest, **options):
        seen.append([x for x, _ in images.epoch(0)])
        labels.append(torch.cat([y for _, y in images.epoch(0)]))
        return {how.name: 0.5 for how in attacks}

    monkeypatch.setattr("deat.training.overfit_watch.compute_accuracies", look)
    trainer.fit()
    assert len(seen) == 2
    found = torch.cat(seen[0])[:, 0, 0, 0]
    assert len(found) == min(count, MAX_SCORED_IMAGES)
    assert all(len(batch) <= 100 for batch in seen[0])
    assert found.min() < 2 / MAX_SCORED_IMAGES
    assert found.max() > 1 - 2 / MAX_SCORED_IMAGES
    assert all(torch.equal(torch.cat(other), torch.cat(seen[0])) for other in seen)
    assert torch.equal(found, found.sort().values)
    assert torch.equal(labels[0], (found * (count - 1)).round().long() % 3)


class Counted(Dataset):
    """Images whose classes take turns, and the numbers of those that were asked for."""

    def __init__(self, count: int, num_classes: int) -> None:
        self.targets, self.asked = [i % num_classes for i in range(count)], []

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.asked.append(index)
        return torch.full((1, 4, 4), 0.5), self.targets[index]


def test_slice_meets_every_class_where_classes_take_turns_and_reads_no_other_images():
    images = Counted(10 * MAX_SCORED_IMAGES, 10)
    source = as_source(images, batch_size=100, shuffle=False)
    images.asked.clear()
    watch = OverfitWatch(source, THREAT)
    scored = watch._scored_images(trainer_with())
    assert set(scored.images.labels.tolist()) == set(range(10))
    assert len(set(images.asked)) == scored.num_examples == MAX_SCORED_IMAGES
    assert watch._scored_images(trainer_with()) is scored


def test_slice_of_a_loader_that_gives_no_image_by_number_meets_every_class_too():
    x, y = torch.full((10 * MAX_SCORED_IMAGES, 1, 4, 4), 0.5), torch.arange(10 * MAX_SCORED_IMAGES) % 10
    source = as_source(list(zip(x.split(100), y.split(100), strict=True)), batch_size=100, shuffle=False)
    scored = OverfitWatch(source, THREAT)._scored_images(trainer_with())
    assert set(scored.images.labels.tolist()) == set(range(10))
    assert scored.num_examples == MAX_SCORED_IMAGES


def test_every_epoch_is_scored_by_one_step_and_by_ten_of_the_watch_s_own_threat_and_seed(monkeypatch):
    asked, scores = [], {"fgsm": 0.25, "pgd-10": 0.5}

    def look(model, images, attacks, threat, seed, *rest, **options):
        asked.append((attacks, threat, seed, *rest))
        return scores

    monkeypatch.setattr("deat.training.overfit_watch.compute_accuracies", look)
    watch = silent("warn", seed=7)
    trainer = trainer_with(watch, method="m+pgd-3", threat=deat.Linf(0.03), epochs=3)
    history = trainer.fit().history
    both = parse_attack("fgsm"), parse_attack("pgd-10")
    assert asked == [(both, THREAT, 7, trainer.engine.to_memory_format, trainer.distributed, trainer.task)] * 3
    assert [(e.epoch, e.k, e.alpha, e.magnitude) for e in watch.events] == [
        (s.epoch, s.k, s.alpha, s.magnitude) for s in history
    ]
    assert {(e.single, e.multi) for e in watch.events} == {(0.25, 0.5)}


def test_double_network_is_watched_too():
    watch = silent("warn")
    trainer_with(watch, net=conv_net().double(), epochs=2).fit()
    assert len(watch.events) == 2


# What a run's folder and command say


def new_folder(path):
    path.mkdir()
    folder = RunFolder(path)
    folder.write_record({})
    return folder


def test_folder_has_one_line_for_each_epoch_that_stands_and_the_events_beside_it(tmp_path):
    folder = new_folder(tmp_path / "run")
    watch = silent("rollback", log_path=folder.path / "watch.jsonl")
    trainer = sabotage(trainer_with(watch, folder=folder), 4, times=2)
    result = trainer.fit()
    assert read_history(folder.path / "history.jsonl") == result.history
    events = [json.loads(line) for line in (folder.path / "watch.jsonl").read_text().splitlines()]
    assert events == [asdict(event) for event in watch.events]
    assert [event["epoch"] for event in events if event["action"] == "rollback"] == [4, 4]
    timed = [json.loads(line)["epoch"] for line in (folder.path / "timing.jsonl").read_text().splitlines()]
    assert timed == [0, 1, 2, 3, 4, 4, 4, 5, 6, 7]


@pytest.mark.parametrize("val", [0.25, None])
def test_folder_s_best_and_last_are_never_the_collapsed_epoch(tmp_path, val):
    folder = new_folder(tmp_path / "run")
    watch = silent("stop", log_path=folder.path / "watch.jsonl")
    trainer = sabotage(trainer_with(watch, folder=folder, val=val, val_attack="pgd-2"), 4)
    result = trainer.fit()
    about = {which: json.loads(read_note(folder.path / which / "model.safetensors")) for which in ("best", "last")}
    assert (about["best"]["epoch"], about["last"]["epoch"]) == (result.best.epoch + 1, 4)
    for which, wanted in (("best", result.best.weights), ("last", trainer.model.state_dict())):
        net = conv_net(batch_norm=True)
        deat.load_weights(net, folder.path / which / "model.safetensors")
        assert all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items())


def test_history_is_written_anew_where_the_folder_comes_before_the_watch(tmp_path):
    folder = new_folder(tmp_path / "run")
    trainer = sabotage(trainer_with(folder, silent("rollback")), 4)
    result = trainer.fit()
    assert read_history(folder.path / "history.jsonl") == result.history


QUICK = ["train", "--epochs", "5", "--test-images", "20", "--val-attack", "pgd-1", "--baseline", "no", "--out", "run"]


@pytest.fixture
def _collapse_in_epoch_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of 60 %, and of nothing the first time the fourth epoch is played."""
    monkeypatch.chdir(tmp_path)
    readings = iter([(0.6, 0.6)] * 3 + [(0.9, 0.0)] + [(0.6, 0.6)] * 10)
    monkeypatch.setattr(OverfitWatch, "_accuracies", lambda self, trainer: next(readings))


@pytest.mark.usefixtures("_collapse_in_epoch_4")
@pytest.mark.parametrize(("action", "epochs"), [("warn", 5), ("stop", 3), ("rollback", 5)])
def test_command_says_what_it_saw_and_did(action, epochs, capsys):
    flag = [] if action == "warn" else ["--watch", action]
    assert main([*QUICK, "--method", "fgsm", *flag]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("deat: catastrophic overfitting in epoch 4: pgd-10 accuracy fell from 60.0% to 0.0%")
    assert err.count("\n") == 1
    line = f"catastrophic overfitting in epoch 4 ({action}); first: pgd-10 accuracy fell from 60.0% to 0.0%"
    assert line in out
    assert line in Path("run/report.md").read_text()
    assert len(read_history(Path("run/history.jsonl"))) == epochs
    assert len(Path("run/watch.jsonl").read_text().splitlines()) == {"warn": 5, "stop": 4, "rollback": 6}[action]
    record = json.loads(Path("run/run.json").read_text())
    assert record["watch"] == action
    spent = json.loads(Path("run/scores.json").read_text())[0]["backprops"]
    assert spent == {"warn": 5, "stop": 4, "rollback": 6}[action] * 2 * 20


@pytest.mark.usefixtures("_collapse_in_epoch_4")
def test_json_stays_one_document_and_holds_what_fired(capsys):
    assert main([*QUICK, "--method", "fgsm", "--watch", "rollback", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (3, "rollback") in [(event["epoch"], event["action"]) for event in document["watch"]]
    assert all(event["reason"] for event in document["watch"])


def test_a_run_s_watch_looks_at_its_held_out_images_under_its_own_threat_seed_and_action():
    run = resolve_request(Request(eps=0.07, watch="rollback", held_out=40), seed=3, device="cpu")
    trainer = run.trainer()
    watch = run.watch(trainer)
    assert trainer.val.num_examples == 40
    assert watch.images is trainer.val
    assert (watch.threat, watch.seed, watch.action) == (deat.Linf(0.07), 3, "rollback")
    assert torch.equal(trainer.val.images.images, run.splits.train.split(40, 3)[1].images)
    assert torch.equal(trainer.train.images.images, run.splits.train.split(40, 3)[0].images)


@pytest.mark.parametrize(("images", "held_out"), [(1397, 139), (20_000, 1000)])
def test_a_run_holds_out_a_tenth_and_at_most_a_thousand(images, held_out):
    run = resolve_request(Request(), device="cpu")
    part = ImageSet(torch.zeros(images, 1, 1, 1), torch.zeros(images, dtype=torch.int64), ("a", "b"))
    assert replace(run, splits=replace(run.splits, train=part)).held_out == held_out


@pytest.mark.usefixtures("_collapse_in_epoch_4")
def test_no_watch_where_it_is_off_or_nothing_is_held_out():
    for extra in (["--watch", "none"], ["--val-attack", "none"], ["--held-out", "0"]):
        assert main([*QUICK, "--epochs", "1", *extra, "--overwrite"]) == 0
        assert not Path("run/watch.jsonl").exists()
        assert json.loads(Path("run/run.json").read_text())["watch"] == "none"


@pytest.mark.usefixtures("_collapse_in_epoch_4")
def test_watch_without_held_out_images_is_refused_before_any_work(capsys):
    assert main([*QUICK, "--watch", "stop", "--held-out", "0"]) == 2
    assert "held out" in capsys.readouterr().err
    assert not Path("run").exists()
