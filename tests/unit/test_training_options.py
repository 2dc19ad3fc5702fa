"""Label smoothing, class weights, mixup, CutMix, random erasing and clipped gradients, with every kind of method."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deat
from deat.cli.main import main
from deat.core.training_losses import LossOutput
from deat.data import ImageSet
from deat.errors import DataError, Interrupted, UsageError
from deat.tasks import CLASSIFICATION, MultiLabel, Regression, Segmentation
from deat.training.batch_mixing import BatchMixing
from deat.training.checkpoints import Checkpoints
from deat.training.learner_task import balance_classes
from helpers.games import trainer_of
from helpers.nets import conv_net, images, learnable

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, 0.3]])
SHARES = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.25, 0.75]])
WEIGHTS = (1.0, 2.0, 0.5)


def expected_loss(logits: Tensor, shares: Tensor, smoothing: float, weights: tuple[float, ...]) -> Tensor:
    """-sum_c w_c t_c log p_c, with the smoothed target t."""
    target = (1 - smoothing) * shares + smoothing / shares.shape[1]
    return -(torch.tensor(weights) * target * logits.log_softmax(1)).sum(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_learner_minimises_the_smoothed_and_weighted_cross_entropy(smoothing, weights):
    task, y = CLASSIFICATION.for_learner(smoothing, weights), torch.tensor([0, 2])
    for labels, shares in ((y, F.one_hot(y, 3).float()), (SHARES, SHARES)):
        expected = expected_loss(LOGITS, shares, smoothing, weights or (1.0, 1.0, 1.0))
        assert torch.allclose(task.loss(LOGITS, labels), expected)


def test_mixed_labels_count_as_their_largest_share():
    task = CLASSIFICATION.with_mixed_labels()
    assert task.is_right(LOGITS, SHARES).tolist() == [True, True]
    assert torch.equal(task.margin(LOGITS, SHARES), CLASSIFICATION.margin(LOGITS, torch.tensor([0, 2])))


def test_weights_of_pixels_and_labels_leave_ignored_ones_out():
    logits, y = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    y[:, 0] = 255
    task = Segmentation(ignore_index=255).for_learner(0.1, WEIGHTS)
    counted = F.cross_entropy(
        logits, y, weight=torch.tensor(WEIGHTS), label_smoothing=0.1, ignore_index=255, reduction="none"
    )
    assert torch.allclose(task.loss(logits, y), counted.flatten(1).sum(1) / 12)
    present = torch.tensor([[0, 1, 1]])
    pairs = F.binary_cross_entropy_with_logits(LOGITS[:1], present * 0.9 + 0.05)
    assert torch.allclose(MultiLabel().for_learner(0.1, None).loss(LOGITS[:1], present), pairs)


def test_boosted_terms_of_mart_have_the_weight_of_their_class():
    y = torch.tensor([0, 1])
    plain, weighted = CLASSIFICATION.boosted_loss(LOGITS, y), CLASSIFICATION.for_learner(0.0, WEIGHTS)
    assert torch.allclose(weighted.boosted_loss(LOGITS, y), torch.tensor([1.0, 2.0]) * plain, atol=1e-6)


def test_the_attack_maximises_the_loss_of_the_labels_themselves():
    """Attacks of a smoothed and of a plain training take the same steps from the same weights."""
    deltas = []
    for smoothing in (0.0, 0.4):
        trainer = trainer_of("pgd-2", conv_net(), label_smoothing=smoothing, epochs=1)
        (x, y), kept = next(iter(trainer.train.epoch(0))), []
        trainer.prepare_step(0, 0)
        real = trainer.game.joint_update
        trainer.game.joint_update = lambda buffers, real=real, kept=kept: (
            kept.append(buffers.delta.clone()),
            real(buffers),
        )
        trainer.method.play_batch(trainer.game, x, y, trainer.budget)
        deltas.append(kept[0])
        last = trainer.game.functions.unwrapped_objective
        assert last.task == CLASSIFICATION
    assert torch.equal(*deltas)


def test_balanced_weights_make_classes_count_equally():
    labels = torch.tensor([0] * 6 + [1] * 3 + [2] * 3)
    weights = balance_classes(CLASSIFICATION, labels, 3)
    assert weights == pytest.approx((12 / 18, 12 / 9, 12 / 9))
    assert balance_classes(Segmentation(ignore_index=9), torch.tensor([[[0, 0], [1, 9]]]), 2) == (0.75, 1.5)
    with pytest.raises(DataError, match="class 1 "):
        balance_classes(CLASSIFICATION, torch.tensor([0, 2]), 3)


METHODS = (
    "natural",
    "fgsm",
    "m+deat",
    "free-4",
    "pgd-2",
    "m+trades-2",
    "mart-2",
    "f+trades-2",
    "fat-2",
    "yopo-3-2",
    "amata-2-3",
)
OPTIONS = {
    "label smoothing and weights": {"label_smoothing": 0.1, "class_weights": (1.0, 2.0, 0.5)},
    "balanced": {"class_weights": "balanced"},
    "mixup": {"mixup": 0.4},
    "CutMix": {"cutmix": 1.0},
    "all of them": {"mixup": 1.0, "cutmix": 1.0, "random_erasing": 0.5, "label_smoothing": 0.1, "clip_grad_norm": 0.5},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_method_trains_with_every_option(method, options):
    net = conv_net()
    before = [p.detach().clone() for p in net.parameters()]
    trainer = trainer_of(method, net, data=learnable(24), epochs=2, val=0.25, val_attack="pgd-1", **options)
    plain = trainer_of(method, conv_net(), data=learnable(24), epochs=2, val=0.25, val_attack="pgd-1")
    history, without = trainer.fit().history, plain.fit().history
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
    assert history[-1].loss != without[-1].loss
    if method in ("natural", "fgsm", "free-4", "pgd-2"):
        assert history[-1].backprops == without[-1].backprops


@pytest.mark.promise("P13")
def test_a_resumed_training_mixes_the_same_images(tmp_path):
    def make() -> deat.Trainer:
        return trainer_of("m+deat", conv_net(), epochs=3, **OPTIONS["all of them"], ema=0.9)

    whole, first, second = make(), make(), make()
    expected = whole.fit()
    plays, real = [], first.game.end_batch

    def count(buffers: object) -> None:
        real(buffers)
        plays.append(1)
        if len(plays) == len(first.train) + 1:
            first.interruption.request()

    first.game.end_batch = count
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(tmp_path).resume_or_start(second)
    assert second.fit().history == expected.history


def mixing(**options: float) -> BatchMixing:
    return BatchMixing(**{"mixup": 0.0, "cutmix": 0.0, "random_erasing": 0.0, "num_classes": 3, "seed": 0, **options})


def test_mixed_images_and_labels_have_the_same_shares():
    x, y = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 12, 10).contiguous(), torch.tensor([0, 1, 2, 0])
    other = x.flip(0)
    for step in range(30):
        blended, shares = mixing(mixup=1.0).apply(x, y, 0, step)
        share = ((blended - other) / (x - other))[0, 0, 0, 0]
        own, others = F.one_hot(y, 3).float(), F.one_hot(y.flip(0), 3).float()
        assert torch.allclose(blended, share * x + (1 - share) * other, atol=1e-5)
        assert torch.allclose(shares, share * own + (1 - share) * others, atol=1e-5)
        cut, shares = mixing(cutmix=1.0).apply(x, y, 0, step)
        pasted = (cut != x).flatten(1).float().mean(1)
        assert bool(((cut == x) | (cut == other)).all())
        assert torch.allclose(shares, (1 - pasted)[:, None] * own + pasted[:, None] * others, atol=1e-5)
    assert torch.equal(x, torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 1, 12, 10)), "the batch itself is not changed"


def test_erasing_takes_one_rectangle_from_the_stated_share_of_images():
    x = torch.ones(400, 2, 16, 16)
    erased, _ = mixing(random_erasing=0.25).apply(x, torch.zeros(400, dtype=torch.long), 0, 0)
    is_erased = erased == 0.5
    assert torch.equal(is_erased[:, 0], is_erased[:, 1])
    rows, cols = is_erased[:, 0].any(2), is_erased[:, 0].any(1)
    assert torch.equal(is_erased[:, 0], rows[:, :, None] & cols[:, None, :])
    assert 0.18 < rows.any(1).float().mean() < 0.32
    assert bool((erased[~is_erased] == 1).all())


def test_draws_depend_on_seed_epoch_and_batch_alone():
    (x, y), every = images(8), {"mixup": 1.0, "cutmix": 1.0, "random_erasing": 0.5}
    first = mixing(**every).apply(x, y, 1, 2)
    assert all(map(torch.equal, first, mixing(**every).apply(x, y, 1, 2)))
    for other in (
        mixing(**every, seed=1).apply(x, y, 1, 2),
        mixing(**every).apply(x, y, 1, 3),
        mixing(**every).apply(x, y, 2, 2),
    ):
        assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_update_is_longer_than_the_clipped_gradient_allows(precision):
    net = conv_net()
    trainer = trainer_of(
        "pgd-1",
        net,
        epochs=1,
        clip_grad_norm=0.01,
        precision=precision,
        momentum=0.0,
        weight_decay=0.0,
        lr=1.0,
        lr_schedule="flat",
    )
    lengths, before = [], {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: before.update({p: p.detach().clone() for p in net.parameters()})
    )
    trainer.optimizer.register_step_post_hook(
        lambda *_: lengths.append(sum(float((p.detach() - before[p]).square().sum()) for p in net.parameters()) ** 0.5)
    )
    trainer.fit()
    assert lengths
    assert max(lengths) == pytest.approx(0.01, rel=0.01)


class OwnLoss:
    num_forwards = 1

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        logits = net(x + delta)
        return LossOutput(F.cross_entropy(logits, y), logits)


def test_options_that_do_not_fit_are_refused_with_what_to_do():
    own = replace(deat.get_method("pgd-1"), objective=OwnLoss())
    with pytest.raises(UsageError, match="OwnLoss"):
        trainer_of(own, conv_net(), label_smoothing=0.1)
    with pytest.raises(UsageError, match="2 weights, and the data 3 classes"):
        trainer_of("pgd-1", conv_net(), data=learnable(24), class_weights=(1.0, 1.0))
    for task in (Regression(), MultiLabel(), Segmentation()):
        with pytest.raises(UsageError, match="Leave them out"):
            task.with_mixed_labels()
    with pytest.raises(UsageError, match="regression"):
        Regression().for_learner(0.1, None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("label_smoothing", 1.0),
        ("label_smoothing", -0.1),
        ("class_weights", "even"),
        ("class_weights", ()),
        ("class_weights", (1.0, -1.0)),
        ("class_weights", (0.0, 0.0)),
        ("mixup", -1),
        ("cutmix", float("nan")),
        ("random_erasing", 1.5),
        ("clip_grad_norm", 0),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(option, value):
    with pytest.raises(UsageError, match=option):
        deat.TrainConfig(**{option: value})


def test_mixing_rectangles_needs_images():
    rows = torch.rand(40, 6), torch.randint(2, (40,))
    net = nn.Sequential(nn.Linear(6, 2))
    fit = {"method": "fgsm", "epochs": 1, "batch_size": 10, "progress": False, "threat": deat.Linf(0.1)}
    with pytest.raises(UsageError, match="cutmix"):
        deat.fit(net, rows, cutmix=1.0, **fit)
    assert deat.fit(net, rows, mixup=0.2, **fit).history


def test_the_command_takes_and_records_the_options(tmp_path):
    flags = ["--label-smoothing", "0.1", "--class-weights", "balanced", "--mixup", "0.2", "--cutmix", "1"]
    flags += ["--random-erasing", "0.25", "--clip-grad-norm", "1", "--ema", "0.9"]
    small = ["--epochs", "1", "--baseline", "no", "--test-images", "0", "--out", str(tmp_path / "run")]
    assert main(["train", *flags, *small]) == 0
    settings = deat.load_run(tmp_path / "run").settings
    assert (settings.label_smoothing, settings.class_weights, settings.mixup, settings.cutmix) == (
        0.1,
        "balanced",
        0.2,
        1.0,
    )
    assert (settings.random_erasing, settings.clip_grad_norm, settings.ema) == (0.25, 1.0, 0.9)
    with pytest.raises(SystemExit):
        main(["train", "--class-weights", "1,x"])


@pytest.mark.parametrize("options", [{"class_weights": "balanced"}, {"mixup": 1.0, "label_smoothing": 0.1}], ids=str)
def test_a_network_may_have_more_outputs_than_the_data_has_classes(options):
    data = ImageSet(images(24)[0], torch.tensor([0] * 20 + [1] * 4), ("a", "b"))
    with pytest.warns(RuntimeWarning, match="3 outputs, and the data 2 classes"):
        trainer = trainer_of("mart-2", conv_net(), data=data, epochs=1, **options)
    assert trainer.fit().history
