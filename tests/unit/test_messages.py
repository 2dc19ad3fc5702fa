"""What a training says of itself beside its numbers: odd outputs, few held-out images, chance, and a k that stands."""

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.errors import DataError, UsageError
from deat.evaluation.intervals import newcombe_interval, wilson_interval, wilson_interval_of_share
from deat.radius_checks import check_radius
from deat.threat import parse_threat
from deat.training.messages import FEW_HELD_OUT_IMAGES, collect_start_notes, find_output_problems
from deat.training.progress_lines import EpochPrinter
from deat.utils.distributed import Distributed
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable, same, weights
from helpers.validation import PLACE, one_after_the_other, scores_of

EVEN = torch.zeros(2, 3)
QUICK = deat.TrainConfig(epochs=1, batch_size=8, precision="fp32", workers=0)


class Ending(nn.Module):
    """A network with something behind its logits."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.net, self.end = conv_net(batch_norm=True, dropout=0.5), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.net(x))


def warned(net: nn.Module, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer_of("pgd-2", net, **options)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize("normalize", [None, ([0.5], [0.5])])
def test_a_network_that_returns_probabilities_is_noticed_once_before_training(normalize):
    (said,) = warned(Ending(nn.Softmax(1)), normalize=normalize)
    assert "the model's outputs are probabilities" in said
    assert "Return logits" in said


@pytest.mark.parametrize("end", [nn.Identity(), nn.LogSoftmax(1), nn.Sigmoid(), nn.ReLU()], ids=repr)
def test_other_ends_of_a_network_are_not_taken_for_probabilities(end):
    assert warned(Ending(end)) == []


@pytest.mark.parametrize(
    ("task", "net"),
    [
        ("classification", nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())),
        ("classification", nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))),
        ("multilabel", nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())),
    ],
)
def test_a_sigmoid_is_noticed_where_it_makes_every_answer_yes(task, net):
    x, y = torch.rand(60, 4), torch.arange(60) % 2
    y = y if task == "classification" else torch.stack((y, 1 - y), 1)
    with pytest.warns(RuntimeWarning, match="Return logits"):
        deat.make_trainer(net, (x, y), method="natural", task=task, config=deat.TrainConfig(batch_size=20))
    options = {"task": task, "threat": "linf:0.1", "attacks": "natural", "progress": False}
    flags = deat.evaluate(net, (x, y), **options).flags
    assert "probabilities" in [flag.name for flag in flags]
    bounded = nn.Sequential(net[0], nn.Hardtanh(0, 1))  # values from 0 to 1 alone are no sigmoid
    flags = deat.evaluate(bounded, (x, y), **options).flags
    assert "probabilities" not in [flag.name for flag in flags]


def test_outputs_for_more_classes_than_the_data_has_are_named():
    (said,) = find_output_problems(torch.zeros(2, 1000), 10)
    assert "the model has 1,000 outputs, and the data 10 classes. That works" in said
    assert find_output_problems(torch.zeros(2, 10), 10) == []
    assert len(find_output_problems(torch.full((2, 4), 0.25), 3)) == 2


def test_looking_at_the_outputs_touches_no_weight_statistic_mode_or_random_stream():
    net, before = Ending(nn.Softmax(1)), torch.get_rng_state()
    held = copy.deepcopy(net.state_dict())
    net.net[3].eval()
    assert warned(net)
    assert all(torch.equal(value, held[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net.net[:5]] == [True, True, True, False, True]
    assert torch.equal(torch.get_rng_state(), before)


def test_noticing_odd_outputs_changes_nothing_in_the_training():
    def trained(notice: bool) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if not notice:
                patch.setattr("deat.training.make_trainer.check_trainable", lambda *_: EVEN)
            net = Ending(nn.Softmax(1))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer_of("m+pgd-3", net).fit()
        return [*weights(net), *net.buffers()]

    assert same(trained(True), trained(False))


def test_one_process_of_several_speaks():
    assert [len(warned(Ending(nn.Softmax(1)), distributed=Distributed(rank=rank))) for rank in (0, 1)] == [1, 0]


def test_few_held_out_images_are_reported_with_what_one_is_worth_and_the_flag_that_helps():
    (said,) = collect_start_notes(trainer_of("pgd-2", data=learnable(60), val=learnable(29, seed=1)))
    assert "only 29 images are held out to choose the best epoch: each is worth 3.4 points" in said
    assert "less than about 24 points apart" in said
    assert "--held-out" in said


def test_a_hundred_held_out_images_are_enough_and_so_are_none():
    assert FEW_HELD_OUT_IMAGES == 100
    for count, lines in ((99, 1), (100, 0)):
        assert len(collect_start_notes(trainer_of("pgd-2", val=learnable(count, seed=1)))) == lines
    assert collect_start_notes(trainer_of("pgd-2")) == []
    assert collect_start_notes(trainer_of("pgd-2", val=learnable(29, seed=1), val_attack="none")) == []


@pytest.mark.parametrize("n", [10, 29, 1000])
@pytest.mark.parametrize(("one", "other"), [(0.5, 0.5), (0.9, 0.1), (0.3, 0.0), (1.0, 0.0)])
def test_interval_of_a_difference_holds_it_and_is_newcombe_s(one, other, n):
    low, high = newcombe_interval(one, other, n)
    assert low < one - other <= high
    assert -1 <= low <= high <= 1
    (lone, _), (_, upper) = wilson_interval_of_share(one, n), wilson_interval_of_share(other, n)
    assert low == pytest.approx(one - other - math.hypot(one - lone, upper - other))
    assert newcombe_interval(other, one, n) == pytest.approx((-high, -low))


def test_weights_at_chance_are_reported_with_the_numbers_and_what_helps(monkeypatch):
    monkeypatch.setattr(PLACE, lambda *_: scores_of(0.5, 0.5, n=4))
    held = learnable(4)[0], torch.tensor([0, 1, 1, 2])
    (said,) = trainer_of("pgd-2", val=held, val_attack="pgd-2").fit().notes
    assert said.startswith("the best weights (epoch 3) are at chance: ")
    assert "50.0% of 4 held-out images" in said
    assert "a constant answer gets 50.0%" in said
    assert all(way in said for way in ("--lr", "more epochs", "--held-out"))


@pytest.mark.parametrize(
    ("labels", "said"),
    [([0, 1, 2] * 8, False), ([0, 0, 0, 0, 1, 2] * 4, True), ([0, 0, 0, 0, 1, 2], False)],
    ids=["as common", "commoner", "of few images by chance"],
)
def test_weights_at_chance_where_one_class_is_far_commoner_are_reported_with_that(labels, said, monkeypatch):
    monkeypatch.setattr(PLACE, lambda *_: scores_of(0.3, 0.3))
    held = learnable(len(labels))[0], torch.tensor(labels)
    (note, *_) = trainer_of("pgd-2", val=held, val_attack="pgd-2").fit().notes
    assert "are at chance" in note
    assert ("One class has 67% of these" in note) == said


def judged(monkeypatch, *found, n=120):
    """A training whose validations say so, (natural, robust), on n images in three classes of a size."""
    monkeypatch.setattr(PLACE, one_after_the_other(found, n))
    held = learnable(n)[0], torch.arange(n) % 3
    return trainer_of("pgd-2", val=held, val_attack="pgd-2", epochs=len(found))


def test_an_epoch_one_image_better_than_one_answer_for_all_is_at_chance_and_not_chosen(monkeypatch):
    trainer = judged(monkeypatch, (0.6, 0.2), (41 / 120, 41 / 120))
    luck, n = trainer.validator.chance_upper_bound, 120
    assert trainer.validator.chance == 40 / n < 41 / n < luck < 0.5
    assert wilson_interval(round(luck * n), n)[0] <= 40 / n < wilson_interval(round(luck * n) + 1, n)[0], (
        "the most that may be chance"
    )
    assert trainer.fit().best.epoch == 0
    (said, *_) = judged(monkeypatch, (41 / 120, 41 / 120)).fit().notes
    assert "are at chance: without any attack 34.2% of 120 held-out images are right" in said


def test_few_images_are_not_held_against_an_epoch_that_is_better_than_chance(monkeypatch):
    assert judged(monkeypatch, (0.5, 0.5), n=48).validator.chance_upper_bound == 1 / 3


def test_a_network_that_forgot_what_it_knew_is_reported_with_both_numbers_and_what_helps(monkeypatch):
    (said,) = judged(monkeypatch, (0.99, 0.1), (0.6, 0.5)).fit().notes
    assert said.startswith("natural accuracy fell from 99.0% (epoch 1) to 60.0% (epoch 2, ")
    assert all(way in said for way in ("--eps", "--lr"))
    assert judged(monkeypatch, (0.99, 0.1), (0.8, 0.5)).fit().notes == [], "robustness has its price"
    assert judged(monkeypatch, (0.6, 0.5), (0.99, 0.1)).fit().notes == []


def test_weights_that_know_something_and_those_that_nothing_evaluated_are_not_said_to_be_at_chance(monkeypatch):
    assert trainer_of("pgd-2").fit().notes == []
    monkeypatch.setattr(PLACE, lambda *_: scores_of(0.75, 0.0, n=4))
    held = learnable(4)[0], torch.tensor([0, 1, 1, 2])
    assert trainer_of("pgd-2", val=held, val_attack="pgd-2").fit().notes == []


def test_a_training_whose_k_was_never_raised_says_so_at_its_end(monkeypatch):
    trainer = trainer_of("m+deat", epochs=4)
    read, spikes = trainer.read_meter, iter([1.0, 90.0, 30.0, 45.0])
    monkeypatch.setattr(trainer, "read_meter", lambda: replace(read(), magnitude=next(spikes)))
    (said,) = trainer.fit().notes
    assert "k stayed at 1: l_X was 90 in epoch 2" in said
    assert "at most 45 (epoch 4)" in said


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("l2:8/255", "l2 eps 8/255 is less than usual, and looks like one for linf"),
        ("l1:8/255", "l1 eps 8/255 is less than"),
        ("linf:0.0001", "linf eps 0.0001 is less than"),
        ("linf:0", "natural training"),
    ],
)
def test_a_radius_that_means_little_is_reported_before_training(spec, words):
    said = []
    images = torch.rand(24, 1, 4, 4), torch.arange(24) % 3
    deat.make_trainer(conv_net(), images, method="pgd-2", threat=spec, config=QUICK, notify=said.append)
    assert [words in line for line in said] == [True]


def test_a_usual_radius_is_not_remarked_on_and_one_of_0_is_no_matter_to_natural_training():
    said = []
    images = torch.rand(24, 1, 4, 4), torch.arange(24) % 3
    for method, spec in [("pgd-2", "linf:8/255"), ("pgd-2", "l2:0.5"), ("pgd-2", "l1:12"), ("natural", "linf:0")]:
        deat.make_trainer(conv_net(), images, method=method, threat=spec, config=QUICK, notify=said.append)
    assert said == []


def test_a_radius_that_covers_all_images_is_refused_by_fit():
    with pytest.raises(UsageError, match="l2 eps 600 reaches every image of 1x4x4"):
        deat.make_trainer(conv_net(), (torch.rand(24, 1, 4, 4), torch.arange(24) % 3), threat="l2:600", config=QUICK)


@pytest.mark.parametrize(("name", "widest"), [("linf", 1.0), ("l2", 3072**0.5), ("l1", 3072.0)])
def test_a_radius_that_reaches_every_image_is_refused_where_the_images_are_known(name, widest):
    check_radius(parse_threat(f"{name}:{0.99 * widest}"), (3, 32, 32))
    check_radius(parse_threat(f"{name}:0"), (3, 32, 32))
    for eps in (widest, widest if name == "linf" else 600 * widest):
        with pytest.raises(UsageError, match=f"{name} eps .* reaches every image of 3x32x32.*usual is"):
            check_radius(parse_threat(f"{name}:{eps}"), (3, 32, 32))


@pytest.mark.parametrize("progress", [True, False])
def test_fit_says_what_its_result_notes_unless_it_is_to_be_silent(
    progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deat.training.trainer.collect_result_notes", lambda trainer: ["take care"])
    images = torch.rand(8, 1, 4, 4), torch.arange(8) % 3
    deat.fit(conv_net(), images, method="natural", epochs=1, batch_size=8, device="cpu", progress=progress)
    assert ("take care" in capsys.readouterr().err.splitlines()) == progress


def test_a_k_that_does_not_grow_is_reported_while_it_can_be_changed(monkeypatch, capsys):
    trainer = trainer_of("m+deat", epochs=12, callbacks=[EpochPrinter()])
    read, spikes = trainer.read_meter, iter([1.0, 90.0, *[30.0] * 10])
    monkeypatch.setattr(trainer, "read_meter", lambda: replace(read(), magnitude=next(spikes)))
    trainer.fit()
    lines = capsys.readouterr().out.splitlines()
    told = [number for number, line in enumerate(lines) if line.startswith("after 4 of 12 epochs k stayed at 1")]
    assert told == [4], "once, after the line of the fourth epoch"
    trainer = trainer_of("m+deat", epochs=12, callbacks=[EpochPrinter()])
    read, growing = trainer.read_meter, iter(10.0**n for n in range(12))
    monkeypatch.setattr(trainer, "read_meter", lambda: replace(read(), magnitude=next(growing)))
    trainer.fit()
    assert "stayed" not in capsys.readouterr().out


def stuck_after(monkeypatch, magnitudes, epochs=30, **options) -> deat.Trainer:
    trainer = trainer_of("m+deat", epochs=epochs, **options)
    read, values = trainer.read_meter, iter(magnitudes)
    monkeypatch.setattr(trainer, "read_meter", lambda: replace(read(), magnitude=next(values)))
    return trainer


@pytest.mark.parametrize(("later", "epoch"), [(55.0, 4), (80.0, 10)])
def test_a_k_that_is_unlikely_to_grow_is_reported_at_once_and_never_twice(later, epoch, monkeypatch, capsys):
    """As after a start from trained weights, where l_X has a peak in epoch 2."""
    stuck_after(monkeypatch, [1.0, 90.0, *[later] * 28], callbacks=[EpochPrinter()]).fit()
    lines = capsys.readouterr().out.splitlines()
    told = [line.split(" k stayed")[0] for line in lines if "k stayed at 1: l_X was 90 in epoch 2" in line]
    assert told == [f"after {epoch} of 30 epochs"]
    assert lines.index(next(line for line in lines if line.startswith(told[0]))) == epoch


@pytest.mark.parametrize("progress", [True, False])
def test_fit_shows_a_k_that_does_not_grow_between_its_epoch_lines(progress, monkeypatch, capsys):
    read, values = deat.Trainer.read_meter, iter([1.0, 90.0, *[20.0] * 6])
    monkeypatch.setattr(deat.Trainer, "read_meter", lambda trainer: replace(read(trainer), magnitude=next(values)))
    images = torch.rand(8, 1, 4, 4), torch.arange(8) % 3
    deat.fit(conv_net(), images, method="m+deat", epochs=8, batch_size=8, device="cpu", progress=progress)
    assert capsys.readouterr().err.count("after 4 of 8 epochs k stayed at 1") == progress


def test_a_loop_of_your_own_is_warned_of_a_k_that_does_not_grow(monkeypatch):
    net = conv_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = deat.AdversarialStep(net, optimizer, epochs=30, method="m+deat")
    read, values = step.game.meter.read, iter([1.0, 90.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(step.game.meter, "read", lambda epoch: replace(read(epoch), magnitude=next(values)))
    for _ in range(3):
        step.end_epoch()
    with pytest.warns(RuntimeWarning, match="after 4 of 30 epochs k stayed at 1"):
        step.end_epoch()
    step.end_epoch()


@pytest.mark.parametrize(
    ("scale", "shift", "fix"),
    [
        (1.12, 0.0, "images.clamp(0, 1)"),
        (1.12, -0.06, "images.clamp(0, 1)"),
        (4.0, -2.0, "normalize=(mean, std)"),
        (255.0, 0.0, "divide by 255"),
    ],
)
def test_images_outside_the_range_are_explained_by_how_far_they_are(scale, shift, fix):
    pixels = torch.linspace(0, 1, 40 * 64).reshape(40, 1, 8, 8).flip(0)
    with pytest.raises(DataError, match=r"outside \[0, 1\]") as caught:
        deat.fit(conv_net(), (pixels * scale + shift, torch.arange(40) % 3), epochs=1, batch_size=8, progress=False)
    assert fix in str(caught.value)
