"""The time that an evaluation says it has left."""

import pytest
import torch

from deat.evaluation import progress
from deat.evaluation.attack_registry import get_attacks
from deat.evaluation.attacks import correct_under_attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.judge import BlockResult, Judge
from deat.evaluation.progress import EvaluationProgress, ProgressPrinter, estimate_attack_cost, format_progress
from deat.evaluation.sanity import after_attack, estimate_check_passes
from helpers.eval_attackers import Interrupted, Own
from helpers.eval_nets import THREAT, digits, robust


class Clock:
    """A judge's counter and a clock, both moved by hand."""

    def __init__(self, attacks, images, block, checks=0):
        self.seconds = self.passed = 0
        self.attacks = get_attacks(attacks)
        rulings = -(-images // block) * len(self.attacks)
        self.pace = EvaluationProgress(self.attacks, images, rulings, lambda: self.passed, lambda: self.seconds, checks)

    def begin(self, how, images):
        self.pace.begin(self.attacks[how], images)

    def end(self, how, images, made=True):
        self.pace.end(self.attacks[how], images, made)


def test_a_ruling_counts_by_its_attack_s_passes_and_its_images():
    clock = Clock("natural,pgd-20,apgd-t", 200, 100)
    assert format_progress(clock.pace) == "evaluating  0/6  -:-- left"
    clock.end(0, 100)
    clock.seconds = 2
    clock.end(1, 100)
    assert clock.pace.left == pytest.approx(2 * (500 + 520.3) / 20.3)
    assert format_progress(clock.pace) == "evaluating  2/6  1:41 left  pgd-20"
    clock.seconds = 52
    clock.end(2, 100)
    assert clock.pace.left == pytest.approx(52)


def test_one_long_ruling_shows_how_far_it_is_and_never_claims_to_be_over():
    clock = Clock("natural,aa", 10_000, 10_000)
    clock.begin(0, 10_000)
    clock.seconds = 3
    clock.end(0, 10_000)
    clock.begin(1, 10_000)
    assert format_progress(clock.pace) == "evaluating  1/2  -:-- left  aa"
    shown = []
    for part in (0.1, 0.5, 0.9, 1.0, 2.0):
        clock.seconds, clock.passed = 100 * part, int(4000 * 10_000 * part)
        shown.append(clock.pace.left)
        assert "0:00" not in format_progress(clock.pace)
    assert shown[:3] == pytest.approx([90, 50, 10], rel=0.01)
    assert min(shown) >= 1
    clock.end(1, 10_000)
    clock.pace.check()
    assert format_progress(clock.pace).endswith("left  sanity checks")


def test_time_left_follows_the_clock_between_rulings():
    clock = Clock("pgd-20", 200, 100)
    clock.seconds = 10
    clock.end(0, 100)
    first = clock.pace.left
    clock.begin(0, 100)
    clock.seconds, clock.passed = 15, 1000
    assert (first, clock.pace.left) == (10, 5)


def test_rulings_of_an_earlier_call_say_nothing_about_the_time_left():
    clock = Clock("pgd-20", 400, 100)
    clock.end(0, 100, made=False)
    clock.end(0, 100, made=False)
    clock.seconds = 1
    assert clock.pace.left is None
    clock.seconds = 10
    clock.end(0, 100)
    assert clock.pace.left == 10
    assert clock.pace.done == 3


def test_time_left_holds_the_checks_that_come_after_the_attacks():
    clock = Clock("pgd-20", 100, 100, checks=6000)
    clock.seconds = 10
    clock.end(0, 100)
    assert clock.pace.left == pytest.approx(30)
    clock.pace.check()
    clock.seconds, clock.passed = 30, 4000
    assert format_progress(clock.pace) == "evaluating  1/1  0:10 left  sanity checks"


def test_where_no_terminal_is_a_short_evaluation_is_silent_and_a_long_one_speaks_now_and_then(capsys):
    clock = Clock("pgd-20", 300, 100, checks=60_000)
    say = ProgressPrinter(lambda: clock.seconds)
    told = []

    def at(seconds):
        clock.seconds = seconds
        say(clock.pace)
        told.append(capsys.readouterr())

    at(0)
    for seconds in (4, 11, 12):
        clock.end(0, 100)
        at(seconds)
    clock.pace.check()
    at(12)
    clock.passed = 30_000
    for seconds in (13, 72):
        at(seconds)
    assert [found.out for found in told] == [""] * 7
    assert [found.err for found in told] == [
        *("", "", "deat: evaluating  2/3  2:50 left  pgd-20\n", ""),
        *("deat: evaluating  3/3  2:00 left  sanity checks\n", "", "deat: evaluating  3/3  1:00 left  sanity checks\n"),
    ]


def test_sanity_checks_that_are_soon_over_are_not_announced(capsys):
    clock = Clock("pgd-20", 100, 100, checks=4000)
    say = ProgressPrinter(lambda: clock.seconds)
    clock.seconds = 4
    clock.end(0, 100)
    clock.pace.check()
    say(clock.pace)
    assert capsys.readouterr() == ("", "")


def test_every_attack_of_the_sanity_checks_tells_how_far_they_are():
    names = []
    found = evaluate(
        robust(), digits(20), threat=THREAT, attacks="natural,pgd-20", progress=lambda pace: names.append(pace.name)
    )
    assert names == ["", "natural", "pgd-20", *["sanity checks"] * (1 + 3 + 5 + 1 + 5)]
    assert found.check_seconds > 0


def test_an_evaluation_without_checks_says_nothing_of_them():
    names = []
    found = evaluate(
        robust(), digits(9), threat=THREAT, attacks="fgsm", sanity=False, progress=lambda pace: names.append(pace.name)
    )
    assert (names, found.check_seconds) == (["", "fgsm"], 0)


def test_progress_goes_to_standard_error_alone_and_can_be_switched_off(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
    said = [
        evaluate(robust(), digits(9), threat=THREAT, attacks="fgsm", sanity=False, **chosen) and capsys.readouterr()
        for chosen in ({}, {"progress": True}, {"progress": False})
    ]
    assert [found.out for found in said] == [""] * 3
    assert ["evaluating  1/1" in found.err for found in said] == [True, True, False]
    assert said[2].err == ""


@pytest.mark.parametrize("attacks", ["natural", "fgsm,square", "pgd-10,cw-20x2", "pgd-40-last"])
def test_the_checks_are_expected_to_cost_what_they_cost_where_nobody_falls(attacks, monkeypatch):
    paces, net = [], robust()
    monkeypatch.setattr(Judge, "rule", lambda self, how, x, *_: BlockResult([True] * len(x), 0, 0.0, 0, 0))
    net[-1].bias.data[0] = 1e3
    found = evaluate(
        net, (digits(20)[0], torch.zeros(20).long()), threat=THREAT, attacks=attacks, progress=paces.append
    )
    made, expected = paces[-1]._count_passes(), 20 * estimate_check_passes(get_attacks(attacks))
    assert len(found.labels) == 20
    assert 0.9 * expected <= made <= 1.5 * expected


def test_no_check_asks_again_what_another_has_asked(monkeypatch):
    asked = []

    def noted(model, x, y, how, threat, generator):
        asked.append((how, threat, generator.initial_seed()))
        return correct_under_attack(model, x, y, how, threat, generator)

    monkeypatch.setattr(after_attack, "correct_under_attack", noted)
    evaluate(robust(), digits(20), threat=THREAT, attacks="pgd-20,cw-20")
    assert len(asked) == len(set(asked)) == 3 + 3 + 5 + 1 + 5


def test_an_attack_of_somebody_else_s_weighs_more_than_nothing():
    assert (
        EvaluationProgress([Own("mine")], 10, 1, lambda: 0).work_left
        > EvaluationProgress(get_attacks("natural"), 10, 1, lambda: 0).work_left
        > 0
    )
    assert estimate_attack_cost(Own("natural")) == estimate_attack_cost(Own("mine"))


def test_an_evaluation_tells_its_pace_at_the_start_and_leaves_the_ledger_s_rulings_out(tmp_path):
    told = []

    def watched(stop):
        def progress(pace):
            told.append((pace.done, pace.made, pace.work_left))
            if pace.done == stop:
                raise Interrupted

        return progress

    options = {"threat": THREAT, "attacks": "natural,pgd-3", "block": 10, "sanity": False}
    with pytest.raises(Interrupted):
        evaluate(robust(), digits(20), resume_log=tmp_path / "rulings", progress=watched(3), **options)
    assert told == [(n, pytest.approx(made), pytest.approx(66 - made)) for n, made in enumerate((0, 3, 33, 36))]
    del told[:]
    evaluate(robust(), digits(20), resume_log=tmp_path / "rulings", progress=watched(5), **options)
    assert [made for _, made, _ in told] == [0, 0, 0, 0, 30]
    assert told[-1][2] == pytest.approx(0)
