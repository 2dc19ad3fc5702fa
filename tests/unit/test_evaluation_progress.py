"""The progress of an evaluation and the time left that it shows."""

import pytest
import torch

from deat.evaluation import progress as progress_module
from deat.evaluation.attack_registry import get_attacks
from deat.evaluation.attack_verifier import AttackVerifier, BlockResult
from deat.evaluation.attacks import attack_examples
from deat.evaluation.evaluator import evaluate
from deat.evaluation.progress import EvaluationProgress, ProgressPrinter, estimate_attack_cost, format_progress
from deat.evaluation.sanity import estimate_check_passes, extra_attacks
from helpers.eval_attackers import Interrupted, Own
from helpers.eval_nets import THREAT, digits, robust


class Simulation:
    """The progress of an evaluation whose clock and passes are set by hand; attacks are given by their index."""

    def __init__(self, attacks, num_images, block, check_passes=0):
        self.seconds = self.passes = 0
        self.attacks = get_attacks(attacks)
        self.progress = EvaluationProgress(
            self.attacks,
            num_images,
            total=-(-num_images // block) * len(self.attacks),
            count_passes=lambda: self.passes,
            clock=lambda: self.seconds,
            check_passes=check_passes,
        )

    def start(self, index, num_images):
        self.progress.start_attack(self.attacks[index], num_images)

    def finish(self, index, num_images, is_new=True):
        self.progress.finish_attack(self.attacks[index], num_images, is_new)

    @property
    def line(self):
        return format_progress(self.progress)

    @property
    def seconds_left(self):
        return self.progress.seconds_left


def test_a_result_counts_by_the_passes_of_its_attack_and_its_images():
    run = Simulation("natural,pgd-20,apgd-t", 200, 100)
    assert run.line == "evaluating  0/6  -:-- left"
    run.finish(0, 100)
    run.seconds = 2
    run.finish(1, 100)
    assert run.seconds_left == pytest.approx(2 * (500 + 520.3) / 20.3)
    assert run.line == "evaluating  2/6  1:41 left  pgd-20"
    run.seconds = 52
    run.finish(2, 100)
    assert run.seconds_left == pytest.approx(52)


def test_one_long_attack_shows_how_far_it_is_and_never_claims_to_be_finished():
    run = Simulation("natural,aa", 10_000, 10_000)
    run.start(0, 10_000)
    run.seconds = 3
    run.finish(0, 10_000)
    run.start(1, 10_000)
    assert run.line == "evaluating  1/2  -:-- left  aa"
    shown = []
    for part in (0.1, 0.5, 0.9, 1.0, 2.0):
        run.seconds, run.passes = 100 * part, int(4000 * 10_000 * part)
        shown.append(run.seconds_left)
        assert "0:00" not in run.line
    assert shown[:3] == pytest.approx([90, 50, 10], rel=0.01)
    assert min(shown) >= 1
    run.finish(1, 10_000)
    run.progress.start_checks()
    assert run.line.endswith("left  sanity checks")


def test_time_left_follows_the_clock_between_results():
    run = Simulation("pgd-20", 200, 100)
    run.seconds = 10
    run.finish(0, 100)
    first = run.seconds_left
    run.start(0, 100)
    run.seconds, run.passes = 15, 1000
    assert (first, run.seconds_left) == (10, 5)


def test_results_from_the_resume_log_are_not_used_to_estimate_the_time_left():
    run = Simulation("pgd-20", 400, 100)
    run.finish(0, 100, is_new=False)
    run.finish(0, 100, is_new=False)
    run.seconds = 1
    assert run.seconds_left is None
    run.seconds = 10
    run.finish(0, 100)
    assert run.seconds_left == 10
    assert run.progress.done == 3


def test_time_left_includes_the_checks_after_the_attacks():
    run = Simulation("pgd-20", 100, 100, check_passes=6000)
    run.seconds = 10
    run.finish(0, 100)
    assert run.seconds_left == pytest.approx(30)
    run.progress.start_checks()
    run.seconds, run.passes = 30, 4000
    assert run.line == "evaluating  1/1  0:10 left  sanity checks"


def test_a_short_evaluation_prints_nothing_and_a_long_one_prints_a_line_now_and_then(capsys):
    run = Simulation("pgd-20", 300, 100, check_passes=60_000)
    printer = ProgressPrinter(lambda: run.seconds)
    outputs = []

    def at(seconds):
        run.seconds = seconds
        printer(run.progress)
        outputs.append(capsys.readouterr())

    at(0)
    for seconds in (4, 11, 12):
        run.finish(0, 100)
        at(seconds)
    run.progress.start_checks()
    at(12)
    run.passes = 30_000
    for seconds in (13, 72):
        at(seconds)
    assert [output.out for output in outputs] == [""] * 7
    assert [output.err for output in outputs] == [
        *("", "", "deat: evaluating  2/3  2:50 left  pgd-20\n", ""),
        *("deat: evaluating  3/3  2:00 left  sanity checks\n", "", "deat: evaluating  3/3  1:00 left  sanity checks\n"),
    ]


def test_short_sanity_checks_are_not_announced(capsys):
    run = Simulation("pgd-20", 100, 100, check_passes=4000)
    printer = ProgressPrinter(lambda: run.seconds)
    run.seconds = 4
    run.finish(0, 100)
    run.progress.start_checks()
    printer(run.progress)
    assert capsys.readouterr() == ("", "")


def test_each_attack_of_the_sanity_checks_reports_progress_and_no_attack_is_run_twice(monkeypatch):
    attacks, names = [], []

    def record(model, x, y, attack, threat, generator, task):
        attacks.append((attack, threat, generator.initial_seed()))
        return attack_examples(model, x, y, attack, threat, generator, task)

    monkeypatch.setattr(extra_attacks, "attack_examples", record)
    evaluation = evaluate(
        *(robust(), digits(20)),
        threat=THREAT,
        attacks="natural,pgd-20,cw-20",
        progress=lambda progress: names.append(progress.name),
    )
    num_attacks = 2 + 5 + 1 + 5
    num_resumed = 2
    assert len(attacks) == len(set(attacks)) == num_attacks
    assert names == ["", "natural", "pgd-20", "cw-20", *["sanity checks"] * (1 + num_attacks + num_resumed)]
    assert evaluation.check_seconds > 0


def test_an_evaluation_without_checks_reports_none():
    names = []
    evaluation = evaluate(
        *(robust(), digits(9)),
        threat=THREAT,
        attacks="fgsm",
        sanity=False,
        progress=lambda progress: names.append(progress.name),
    )
    assert (names, evaluation.check_seconds) == (["", "fgsm"], 0)


def test_progress_goes_to_standard_error_only_and_can_be_switched_off(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "LINE_INTERVAL_SECONDS", 0.0)
    outputs = []
    for options in ({}, {"progress": True}, {"progress": False}):
        evaluate(robust(), digits(9), threat=THREAT, attacks="fgsm", sanity=False, **options)
        outputs.append(capsys.readouterr())
    assert [output.out for output in outputs] == [""] * 3
    assert ["evaluating  1/1" in output.err for output in outputs] == [True, True, False]
    assert outputs[2].err == ""


@pytest.mark.parametrize("attacks", ["natural", "fgsm,square", "pgd-10,cw-20x2", "pgd-40-last"])
def test_the_estimated_passes_of_the_checks_are_about_right_on_a_model_that_nothing_fools(attacks, monkeypatch):
    reports, net = [], robust()
    monkeypatch.setattr(
        AttackVerifier, "attack_block", lambda self, attack, x, *_: BlockResult([True] * len(x), 0, 0.0, 0, 0)
    )
    net[-1].bias.data[0] = 1e3
    data = digits(20)[0], torch.zeros(20).long()
    evaluation = evaluate(net, data, threat=THREAT, attacks=attacks, progress=reports.append)
    passes, estimate = reports[-1]._count_passes(), 20 * estimate_check_passes(get_attacks(attacks))
    assert len(evaluation.labels) == 20
    assert 0.9 * estimate <= passes <= 1.5 * estimate


def test_a_user_s_attack_is_assumed_to_cost_more_than_natural_whatever_its_name():
    assert (
        EvaluationProgress([Own("mine")], 10, 1, lambda: 0).work_left
        > EvaluationProgress(get_attacks("natural"), 10, 1, lambda: 0).work_left
        > 0
    )
    assert estimate_attack_cost(Own("natural")) == estimate_attack_cost(Own("mine"))


def test_progress_is_reported_from_the_start_and_does_not_count_results_from_the_log_as_work_done(tmp_path):
    reports = []

    def interrupt_after(count):
        def on_progress(progress):
            reports.append((progress.done, progress.work_done, progress.work_left))
            if progress.done == count:
                raise Interrupted

        return on_progress

    options = {"threat": THREAT, "attacks": "natural,pgd-3", "block": 10, "sanity": False}
    with pytest.raises(Interrupted):
        evaluate(robust(), digits(20), resume_log=tmp_path / "log.jsonl", progress=interrupt_after(3), **options)
    assert reports == [(n, pytest.approx(work), pytest.approx(66 - work)) for n, work in enumerate((0, 3, 33, 36))]
    reports.clear()
    evaluate(robust(), digits(20), resume_log=tmp_path / "log.jsonl", progress=interrupt_after(5), **options)
    assert [work for _, work, _ in reports] == [0, 0, 0, 0, 30]
    assert reports[-1][2] == pytest.approx(0)
