"""Which epoch's weights are the best: by paired comparison of held-out images, also when training resumes or rewinds."""

import json
import math

import pytest
import torch
from torch import nn

import deat
from deat.checkpoint.encoding import decode_state, encode_state
from deat.data import InMemorySource
from deat.evaluation.intervals import mcnemar_p_value
from deat.evaluation.quick_scores import compute_scores
from deat.training.best_epoch import BestEpoch, ScoredEpoch
from deat.training.epoch_records import EpochStats, read_history
from deat.training.overfit_watch import OverfitWatch
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable, same
from helpers.validation import PLACE, scores_of, with_verdicts

LINF = deat.Linf(0.1)


def stats(epoch: int, natural: float, robust: float) -> EpochStats:
    numbers = dict.fromkeys(EpochStats.__dataclass_fields__, 0)
    return EpochStats(**{**numbers, "epoch": epoch, "val_robust": robust, "val_natural": natural})


def choose(*epochs: tuple[float, set[int]], n: int = 400, **options) -> BestEpoch:
    """The choice between epochs, each with its natural accuracy and the images that are right under attack."""
    best = BestEpoch(**options)
    for epoch, (natural, right) in enumerate(epochs):
        verdicts = [i in right for i in range(n)]
        best.update_if_better(stats(epoch, natural, len(right) / n), nn.Linear(1, 1), 0.1, verdicts)
    return best


def first(n: int, start: int = 0) -> set[int]:
    return set(range(start, start + n))


def test_the_audited_coin_flip_is_decided_by_natural_accuracy() -> None:
    """24.0 % natural and 17.75 % under attack was chosen over 32.0 % and 16.25 %, on 400 images."""
    one, other = (0.24, first(71)), (0.32, first(65, start=20))
    for epochs in ((one, other), (other, one)):
        best = choose(*epochs)
        assert best.snapshot.natural == 0.32
        assert (best.choice.rule, best.choice.most_robust_accuracy) == ("paired", 71 / 400)
        assert best.choice.p_value == mcnemar_p_value(20, 14) > 0.05
        assert best.choice.indistinguishable == (0, 1)


CHOICES = {
    "a difference that images show": ([(0.5, first(100)), (0.9, first(50))], 0),
    "the same verdicts, better on natural images": ([(0.5, first(100)), (0.6, first(100))], 1),
    "equal epochs: the later one": ([(0.5, first(100)), (0.5, first(100))], 1),
    "a later one that is worse on natural images": ([(0.5, first(100)), (0.49, first(103))], 0),
    "five images, all one way, are too few": ([(0.5, first(100)), (0.4, first(105))], 0),
    "six are not": ([(0.5, first(100)), (0.4, first(106))], 1),
    # each step is within noise of the one before; the third is told apart from the first
    "no drift by small steps": ([(0.5, first(106)), (0.6, first(103)), (0.7, first(100))], 1),
    "the choice falls out of the set": ([(0.9, first(100)), (0.5, first(104)), (0.4, first(110))], 2),
    "and stays in it": ([(0.9, first(100)), (0.5, first(104)), (0.4, first(105))], 0),
    "one at chance, robust as it looks": ([(0.5, first(40)), (0.1, first(400))], 0),
    "is beaten by any that is not": ([(0.1, first(400)), (0.11, first(1))], 1),
    "nothing is right under attack": ([(0.5, first(0)), (0.4, first(0))], 0),
}


@pytest.mark.parametrize(("epochs", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_of_epochs_that_images_do_not_tell_apart_natural_accuracy_decides_then_age(epochs, expected) -> None:
    best = choose(*epochs)
    assert best.snapshot.epoch == best.choice.epoch == expected


def test_the_choice_is_always_one_that_is_indistinguishable_from_the_most_robust_epoch() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        best = BestEpoch()
        for epoch in range(12):
            share = 0.1 + 0.4 * torch.rand((), generator=generator)
            verdicts = (torch.rand(100, generator=generator) < share).tolist()
            natural = float(torch.rand((), generator=generator))
            best.update_if_better(stats(epoch, natural, sum(verdicts) / 100), nn.Linear(1, 1), 0.0, verdicts)
            choice = best.choice
            assert choice.epoch in choice.indistinguishable
            assert choice.most_robust_accuracy == max(scored.robust for scored in best.scored)
            top = best.scored[choice.most_robust]
            assert choice.natural >= top.natural


def test_training_without_an_adversary_is_chosen_by_natural_accuracy_alone() -> None:
    best = choose((0.90, first(200)), (0.91, first(10)), (0.905, first(300)), robust=False)
    assert best.snapshot.epoch == 1
    assert best.choice.rule == "natural"
    assert "highest natural accuracy" in best.choice.reason


def test_natural_validation_is_chosen_by_natural_accuracy() -> None:
    epochs = [(len(right) / 400, right) for right in (first(300), first(302), first(301))]
    assert choose(*epochs).snapshot.epoch == 1


@pytest.mark.parametrize("epochs", [list(e) for e, _ in CHOICES.values()], ids=CHOICES.keys())
def test_the_choice_is_the_same_if_training_resumes_after_every_epoch(epochs) -> None:
    best, whole = BestEpoch(), choose(*epochs)
    for epoch, (natural, right) in enumerate(epochs):
        saved, tensors = encode_state(best.scored, {"ScoredEpoch": ScoredEpoch})
        scored = decode_state(json.loads(json.dumps(saved)), tensors, {"ScoredEpoch": ScoredEpoch})
        best = BestEpoch(best.snapshot_or_none, scored)
        verdicts = [i in right for i in range(400)]
        best.update_if_better(stats(epoch, natural, len(right) / 400), nn.Linear(1, 1), 0.1, verdicts)
    assert best.choice == whole.choice


def test_verdicts_are_those_of_each_image_and_agree_with_the_accuracy() -> None:
    x, y = learnable(20)
    net = conv_net()
    images = InMemorySource(deat.ImageSet(x, y, ("a", "b", "c")), 7, shuffle=False)
    whole = compute_scores(net, images, ["natural", "pgd-2"], LINF, 0, lambda x: x, deat.Distributed())
    assert whole["natural"].correct == (net.eval()(x).argmax(1) == y).tolist()
    for score in whole.values():
        assert sum(score.correct) / 20 == pytest.approx(score.accuracy)


def validated(monkeypatch, found, n=40, **options):
    """A training whose validations find this: natural accuracy and the images that are right under attack."""
    trainer = trainer_of("pgd-2", val=learnable(n), val_attack="pgd-2", epochs=len(found), **options)
    monkeypatch.setattr(PLACE, lambda *_: with_verdicts(*found[trainer.epoch], n=n))
    return trainer


FOUND = [(0.5, first(10)), (0.9, first(20)), (0.8, first(23)), (0.7, first(3))]


def test_a_result_says_which_epoch_was_chosen_and_why_and_each_epoch_s_record_too(monkeypatch) -> None:
    result = validated(monkeypatch, FOUND).fit()
    assert (result.best.epoch, result.choice.epoch, result.choice.most_robust) == (1, 1, 2)
    assert result.choice.indistinguishable == (1, 2)
    assert [e.best_epoch for e in result.history] == [0, 1, 1, 1]
    assert [e.val_p for e in result.history] == [
        None,
        mcnemar_p_value(10, 0),
        mcnemar_p_value(3, 0),
        mcnemar_p_value(0, 20),
    ]
    for part in (
        "best epoch: 2 (",
        "90.0% natural",
        "50.0% under attack",
        "40 held-out",
        "Epoch 3 has 57.5%",
        "p = 0.25",
    ):
        assert part in result.choice.reason


def test_a_saved_result_has_the_choice_and_its_reason_in_run_json(monkeypatch, tmp_path) -> None:
    result = validated(monkeypatch, FOUND).fit()
    folder = result.save(tmp_path / "saved")
    recorded = json.loads((folder / "run.json").read_text())["best_epoch"]
    assert recorded == json.loads(json.dumps(result.choice.as_json()))
    assert (recorded["epoch"], recorded["rule"], recorded["reason"]) == (1, "paired", result.choice.reason)
    assert read_history(folder / "history.jsonl") == result.history


def test_without_validation_the_last_epoch_is_the_best_and_the_result_says_so() -> None:
    result = trainer_of("pgd-2", epochs=2).fit()
    assert (result.best.epoch, result.choice.rule) == (1, "last")
    assert "no held-out images" in result.choice.reason


@pytest.mark.promise("P13")
def test_a_training_that_resumes_from_checkpoints_chooses_as_if_it_had_not_been_interrupted(monkeypatch, tmp_path):
    whole = validated(monkeypatch, FOUND).fit()
    with monkeypatch.context() as patch:
        trainer = validated(patch, FOUND)
        deat.Checkpoints(tmp_path).resume_or_start(trainer)
        trainer.callbacks.append(StopAfter(3))
        with pytest.raises(deat.errors.Interrupted):
            trainer.fit()
    trainer = validated(monkeypatch, FOUND)
    assert deat.Checkpoints(tmp_path).resume_or_start(trainer)
    result = trainer.fit()
    assert result.choice == whole.choice
    assert same(result.best.weights.values(), whole.best.weights.values())
    assert result.history == whole.history


class StopAfter:
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch(self, trainer, stats, timing):
        if stats.epoch + 1 == self.epochs:
            trainer.interruption.request("stop")


@pytest.mark.promise("P150")
def test_a_state_of_an_older_version_resumes_and_compares_by_accuracy_alone_and_says_so(monkeypatch) -> None:
    """The second epoch's better natural accuracy would win a paired comparison; without verdicts the accuracy wins."""
    found = [(0.5, first(20)), (0.9, first(19)), (0.6, first(22)), (0.7, first(21))]
    trainer = validated(monkeypatch, found)
    trainer.run_epoch()
    older = {name: part for name, part in trainer.state_dict().items() if name != "scored"}
    trainer.load_state_dict(older)
    trainer.run_epoch()
    assert trainer.best.choice.rule == "accuracy"
    assert trainer.best.snapshot.epoch == 0
    result = trainer.fit()
    assert result.best.epoch == 3, "the later epochs have verdicts"
    assert any("older version" in note and "accuracy" in note for note in result.notes)
    assert not any("older version" in note for note in validated(monkeypatch, found).fit().notes)


def test_a_rollback_takes_the_choice_back_with_the_epoch(monkeypatch) -> None:
    n = 40
    watch = OverfitWatch(learnable(n), LINF, "rollback", notify=lambda text: None)
    scored = iter([(0.9, 0.6), (0.9, 0.6), (0.99, 0.0), (0.9, 0.6), (0.9, 0.6)])
    monkeypatch.setattr(OverfitWatch, "_accuracies", lambda self, trainer: next(scored))
    trainer = trainer_of("pgd-2", val=learnable(n), val_attack="pgd-2", epochs=4, callbacks=[watch])
    collapsed = iter([(0.5, first(20)), (0.6, first(21)), (0.9, first(40)), (0.7, first(19)), (0.5, first(5))])
    monkeypatch.setattr(PLACE, lambda *_: with_verdicts(*next(collapsed), n=n))
    result = trainer.fit()
    assert [(event.epoch, event.action == "rollback") for event in watch.events][2] == (2, True)
    assert [scored.epoch for scored in trainer.best.scored] == [0, 1, 2, 3]
    assert (result.best.epoch, result.best.natural) == (2, 0.7)
    assert result.choice.most_robust_accuracy == 21 / 40


def test_scores_that_are_no_numbers_never_win(monkeypatch) -> None:
    monkeypatch.setattr(PLACE, lambda *_: scores_of(0.5, 0.5, n=4))
    best = BestEpoch()
    for epoch, (natural, robust) in enumerate([(0.5, 0.2), (math.nan, 0.9), (0.9, math.nan)]):
        best.update_if_better(stats(epoch, natural, robust), nn.Linear(1, 1), 0.1)
    assert best.snapshot.epoch == 0
