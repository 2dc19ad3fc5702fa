"""Tasks: their losses, verdicts and metrics, against plain formulas; their labels; a task of one's own."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import deat
from deat.errors import DataError, UsageError
from deat.evaluation.attack_verifier import AttackVerifier
from deat.evaluation.attacks import Attack, parse_attack
from deat.tasks import Classification, MultiLabel, Regression, Segmentation, get_task, list_tasks
from deat.tasks.multi_label import average_precision

ALL = [Classification(), MultiLabel(), Segmentation(ignore_index=9), Regression()]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def example(task, n=6):
    """Random outputs and labels of a task."""
    g = generator(1)
    match task.name:
        case "classification":
            return torch.randn(n, 4, generator=g), torch.randint(0, 4, (n,), generator=g)
        case "multilabel":
            return torch.randn(n, 3, generator=g), torch.randint(0, 2, (n, 3), generator=g)
        case "segmentation":
            labels = torch.randint(0, 3, (n, 5, 4), generator=g)
            labels[:, 0] = 9
            return torch.randn(n, 3, 5, 4, generator=g), labels
    return torch.randn(n, 2, generator=g), torch.randn(n, 2, generator=g)


@pytest.mark.parametrize("task", ALL, ids=str)
def test_every_function_of_a_task_gives_one_number_for_each_example(task):
    outputs, y = example(task)
    others = example(task)[0].flip(0)
    values = [task.loss(outputs, y), task.is_right(outputs, y), task.accuracy(outputs, y), task.score(outputs, y)]
    values += [task.divergence(others, outputs), task.margin(outputs, y)]
    if task.defines("boosted_loss"):
        values += [task.boosted_loss(outputs, y), task.weighted_divergence(others, outputs, y)]
    assert all(value.shape == (6,) for value in values)
    assert bool((task.divergence(outputs, outputs).abs() < 1e-6).all())
    for i in range(6):  # no example depends on the others of its batch
        torch.testing.assert_close(task.loss(outputs[i : i + 1], y[i : i + 1]), task.loss(outputs, y)[i : i + 1])


def test_a_single_logit_means_the_same_as_two():
    z, y = torch.randn(8, 1, generator=generator()), torch.randint(0, 2, (8,), generator=generator())
    task, two = Classification(), torch.cat((torch.zeros(8, 1), z), 1)
    bce = nn.functional.binary_cross_entropy_with_logits(z[:, 0], y.float(), reduction="none")
    torch.testing.assert_close(task.loss(z, y), bce)
    for name in ("loss", "is_right", "margin", "boosted_loss"):
        assert torch.equal(getattr(task, name)(z, y), getattr(task, name)(two, y))
        assert torch.equal(getattr(task, name)(z[:, 0], y), getattr(task, name)(two, y))


def test_the_loss_of_a_multi_label_task_is_the_mean_binary_cross_entropy():
    outputs, y = example(MultiLabel())
    bce = nn.functional.binary_cross_entropy_with_logits(outputs, y.float(), reduction="none").mean(1)
    torch.testing.assert_close(MultiLabel().loss(outputs, y), bce)


def test_average_precision_is_that_of_ranks_and_shares_ties():
    present = torch.tensor([1, 0, 1, 0]).bool()
    assert average_precision(torch.tensor([4.0, 3, 2, 1]), present) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision(torch.tensor([1.0, 1, 1, 1]), present) == pytest.approx(0.5)
    assert average_precision(torch.tensor([1.0, 2.0]), torch.tensor([False, False])) is None


def test_metrics_of_multi_label_answers():
    outputs, y = torch.tensor([[2.0, -1], [1, 1], [-1, 3]]), torch.tensor([[1, 0], [1, 0], [0, 1]])
    metrics = MultiLabel().summarize(MultiLabel().statistics(outputs, y))
    assert metrics["exact match"] == pytest.approx(2 / 3)
    assert metrics["mAP"] == pytest.approx(1.0)


def test_ignored_pixels_count_nowhere():
    task, (outputs, y) = Segmentation(ignore_index=9), example(Segmentation(ignore_index=9))
    changed = outputs.clone()
    changed[:, :, 0] = 100 * torch.randn(6, 3, 4, generator=generator())
    for name in ("loss", "accuracy", "margin", "boosted_loss", "statistics"):
        torch.testing.assert_close(getattr(task, name)(changed, y), getattr(task, name)(outputs, y))
    expected = nn.functional.cross_entropy(outputs, y, ignore_index=9, reduction="none").flatten(1).sum(1) / 16
    torch.testing.assert_close(task.loss(outputs, y), expected)
    grad = torch.autograd.grad(task.loss(outputs.requires_grad_(), y).sum(), outputs)[0]
    assert not grad[:, :, 0].any()


def test_an_image_without_pixels_that_count_has_no_loss_and_changes_no_metric():
    task, (outputs, y) = Segmentation(ignore_index=9), example(Segmentation(ignore_index=9))
    y[0] = 9
    assert float(task.loss(outputs, y)[0]) == 0.0
    statistics = task.statistics(outputs, y)
    assert task.summarize(statistics) == task.summarize(statistics[1:])


def test_miou_is_that_of_the_whole_set():
    task, (outputs, y) = Segmentation(ignore_index=9), example(Segmentation(ignore_index=9))
    answers, counted = outputs.argmax(1), y != 9
    ious = []
    for c in range(3):
        union = ((answers == c) | (y == c)) & counted
        ious.append(float(((answers == c) & (y == c)).sum() / union.sum()))
    metrics = task.summarize(task.statistics(outputs, y))
    assert metrics["mIoU"] == pytest.approx(sum(ious) / 3)
    assert metrics["pixel accuracy"] == pytest.approx(float((answers == y)[counted].double().mean()))


def test_segpgd_weighs_right_pixels_alone_at_first_and_all_alike_at_last():
    task, (outputs, y) = Segmentation(ignore_index=9), example(Segmentation(ignore_index=9))
    pixels, right = nn.functional.cross_entropy(outputs, y, ignore_index=9, reduction="none"), outputs.argmax(1) == y
    torch.testing.assert_close(task.segpgd_loss(outputs, y, 0.0), (pixels * right).flatten(1).sum(1) / 16)
    torch.testing.assert_close(task.segpgd_loss(outputs, y, 1.0), 0.5 * task.loss(outputs, y))


def test_a_multi_label_answer_with_more_wrong_labels_is_worse_and_the_probability_decides_ties():
    y = torch.ones(4, 3, dtype=torch.int64)
    outputs = torch.tensor([[9.0, 9, 9], [0.1, 0.1, 0.1], [9, 9, -0.1], [9, 9, -9]])
    scores = MultiLabel().score(outputs, y).tolist()
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert MultiLabel().score(-outputs, 1 - y).tolist() == scores


def test_an_attack_lowers_the_map_also_where_no_label_changes():
    x = torch.rand(40, 2, generator=generator())
    data = x, (x > 0.5).long()
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.eye(2))
        net.bias.fill_(3.0)  # every label is predicted, so that only the ranking of examples is left to attack
    evaluation = deat.evaluate(
        net, data, task="multilabel", threat="linf:0.2", attacks="natural,pgd-5", sanity=False, progress=False
    )
    assert evaluation.metrics["natural"]["mAP"] == 1.0
    assert evaluation.metrics["pgd-5"]["mAP"] < 0.9
    assert evaluation.metrics["pgd-5"]["exact match"] == evaluation.metrics["natural"]["exact match"]


def test_regression_metrics():
    task, (outputs, y) = Regression(), example(Regression(), 40)
    metrics = task.summarize(task.statistics(outputs, y))
    residual, spread = (outputs - y).square().sum(0), (y - y.mean(0)).square().sum(0)
    assert metrics["R2"] == pytest.approx(float((1 - residual / spread).mean()), rel=1e-5)
    assert metrics["MAE"] == pytest.approx(float((outputs - y).abs().mean()), rel=1e-5)
    assert task.summarize(task.statistics(y.mean(0).expand(40, 2), y))["R2"] == pytest.approx(0, abs=1e-6)
    wide = Regression(tolerance=100)
    assert bool(wide.is_right(outputs, y).all())
    assert bool((wide.margin(outputs, y) < 0).all())


@pytest.mark.parametrize("task", ALL, ids=str)
def test_a_nan_is_never_right(task):
    outputs, y = example(task)
    outputs[0] = torch.nan
    assert not task.is_right(outputs, y)[0]
    assert bool(task.is_beaten(outputs, y)[0])


BAD_LABELS = [
    (Classification(), torch.zeros(4, 3), "argmax"),
    (Classification(), torch.zeros(4, 3, 3, dtype=torch.int64), "segmentation"),
    (Classification(), torch.tensor([0.5, 1.0]), "regression"),
    (MultiLabel(), torch.zeros(4, dtype=torch.int64), "one_hot"),
    (MultiLabel(), torch.tensor([[0, 2]]), "0 or 1"),
    (MultiLabel(), torch.tensor([[0.0, 1.0], [0.5, 1.0]]), r"example 1 are \[0.5, 1.0\]"),
    (MultiLabel(), torch.tensor([[0.0, torch.nan]]), "nan"),
    (Segmentation(), torch.zeros(4, 3, 3), r"masks.long\(\)"),
    (Segmentation(), torch.zeros(4, 1, 3, 3), r"squeeze\(1\)"),
    (Segmentation(), torch.full((2, 3, 3), 255), "ignore_index"),
    (Regression(), torch.zeros(4, 2, 2), r"\(N, targets\)"),
    (Regression(), torch.tensor([0.0, torch.nan]), "example 1"),
]


@pytest.mark.parametrize(("task", "labels", "remedy"), BAD_LABELS, ids=lambda v: str(v)[:20])
def test_wrong_labels_are_refused_with_what_to_do(task, labels, remedy):
    with pytest.raises(DataError, match=remedy):
        task.check_labels(task.prepare_labels(labels), 2)


def test_masks_of_which_no_pixel_counts_are_refused(tmp_path):
    net, x, masks = torch.nn.Conv2d(1, 2, 1), torch.rand(8, 1, 4, 4), torch.full((8, 4, 4), 255)
    options = {"task": Segmentation(255), "threat": deat.Linf(0.1), "progress": False}
    with pytest.raises(DataError, match="no pixel counts"):
        deat.fit(net, (x, masks), epochs=1, batch_size=4, **options)
    with pytest.raises(DataError, match="no pixel counts"):
        deat.evaluate(net, (x, masks), attacks="natural", **options)


@pytest.mark.parametrize(
    ("masks", "remedy"),
    [(torch.zeros(8, 1, 4, 4).long(), r"masks.squeeze\(1\)"), (torch.full((8, 4, 4), 255), r"ignore_index=255")],
    ids=["a channel", "void"],
)
def test_masks_that_do_not_fit_the_outputs_say_what_is_likely_wrong(masks, remedy):
    masks[0] = 1
    with pytest.raises(UsageError, match=remedy):
        deat.fit(torch.nn.Conv2d(1, 2, 1), (torch.rand(8, 1, 4, 4), masks), task="segmentation", batch_size=4)


@pytest.mark.parametrize(("task", "y"), [("multilabel", torch.ones(8, 4).long()), ("regression", torch.rand(8, 4))])
def test_too_few_outputs_are_not_taken_for_labels_that_count_from_one(task, y):
    with pytest.raises(UsageError, match=r"\(2, 4\)") as error:
        deat.fit(torch.nn.Linear(5, 3), (torch.rand(8, 5), y), task=task, batch_size=4)
    assert "count from" not in str(error.value)


def test_the_part_of_an_output_that_has_the_masks_logits_is_named():
    class Parts(torch.nn.Conv2d):
        def forward(self, x):
            return {"aux": x.mean(), "out": super().forward(x)}

    x, masks = torch.rand(8, 1, 4, 4), torch.randint(0, 2, (8, 4, 4))
    with pytest.raises(UsageError, match=r"self\.net\(x\)\['out'\]"):
        deat.fit(Parts(1, 2, 1), (x, masks), task="segmentation", batch_size=4)
    with pytest.raises(UsageError, match=r"self\.net\(x\)\['out'\]"):
        deat.evaluate(Parts(1, 2, 1), (x, masks), task="segmentation", attacks="natural", threat="linf:0.1")


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_inputs_of_every_task_are_normalised_by_what_was_measured(task):
    x = torch.randn(40, 3) * torch.tensor([1.0, 5.0, 0.1]) + 7
    y = (x > 7).long() if task == "multilabel" else x[:, :1]
    net, threat = torch.nn.Linear(3, y.shape[1]), deat.Linf(0.1, box=None)
    options = {"epochs": 1, "batch_size": 8, "progress": False}
    result = deat.fit(net, (x, y), task=task, threat=threat, normalize="data", **options)
    seen = []
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    result.model(x)
    assert torch.allclose(seen[-1].mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(seen[-1].std(0), torch.ones(3), atol=0.05)


class Nameless(deat.tasks.Task):
    def loss(self, outputs, y):
        return (outputs.flatten() - y).square()

    def is_right(self, outputs, y):
        return self.loss(outputs, y) < 1


class Borrowed(Segmentation):
    """It would be read from a record as its parent."""


@pytest.mark.parametrize(("task", "remedy"), [(Nameless(), "name = 'nameless'"), (Borrowed(), "name of its own")])
def test_a_task_without_a_name_of_its_own_is_refused_before_any_work(task, remedy):
    with pytest.raises(UsageError, match=remedy):
        deat.fit(torch.nn.Linear(2, 1), (torch.rand(8, 2), torch.rand(8)), task=task, batch_size=4)


def test_a_model_that_learned_nothing_is_flagged_in_words_for_every_task():
    x, y = torch.rand(200, 3), torch.randn(200)
    evaluation = deat.evaluate(
        torch.nn.Linear(3, 1), (x, y + 9), task="regression", threat="linf:0.1", attacks="natural", progress=False
    )
    (flag,) = evaluation.flags
    assert flag.name == "at_chance"
    assert "classify" not in flag.advice


def test_tasks_have_names_and_are_made_by_them():
    assert [get_task(name).name for name in list_tasks()] == list(list_tasks())
    assert get_task("Multi-Label") == MultiLabel()
    assert get_task(Regression(2.0)) == Regression(2.0)
    assert str(Segmentation(255)) == "segmentation(ignore_index=255)"
    for wrong in ("segmentatoin", None, Regression):
        with pytest.raises(UsageError, match=r"segmentation|Regression\(\)"):
            get_task(wrong)


@pytest.mark.parametrize("task", [*ALL, replace(Segmentation(), right_share=0.9), Regression(2.5)], ids=str)
def test_a_record_gives_the_task_back(task):
    assert deat.tasks.build_task(task.describe()) == task
    assert deat.tasks.build_task(None) == Classification()


# An attack on answers that are more or less wrong


class Quadratic(nn.Module):
    """A regression whose error is largest in the middle of the ball, so that the last iterate is not the worst."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.sin(40 * self.weight * x.flatten(1).sum(1, keepdim=True))


def test_an_attack_keeps_the_worst_iterate_of_each_example():
    x, y = torch.rand(20, 1, generator=generator()), torch.zeros(20)
    task, threat, net = Regression(), deat.Linf(0.2), Quadratic()
    seen = []
    hook = net.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(), out.detach())))
    adv = Attack("own", steps=9, alpha=0.3, freeze=True)(net, x, y, threat, generator(), task)
    hook.remove()
    lowest = torch.stack([task.score(out, y) for _, out in seen]).amin(0)
    torch.testing.assert_close(task.score(net(adv).detach(), y), lowest)
    last = Attack("own", steps=9, alpha=0.3, freeze=False)(net, x, y, threat, generator(), task)
    assert bool((task.score(net(last).detach(), y) > lowest + 1e-3).any())


def test_restarts_keep_the_worse_run_of_each_example():
    x, y = torch.rand(20, 1, generator=generator()), torch.zeros(20)
    task, net = Regression(), Quadratic()
    attacks = [Attack("own", 2, alpha=0.05, restarts=n) for n in (1, 2, 5)]
    with torch.no_grad():
        scores = [task.score(net(attack(net, x, y, deat.Linf(0.2), generator(), task)), y) for attack in attacks]
    assert bool((scores[1] <= scores[0] + 1e-6).all() and (scores[2] <= scores[1] + 1e-6).all())
    assert float(scores[2].mean()) < float(scores[0].mean())


def test_a_verdict_is_never_better_than_that_of_the_clean_example():
    x, y = torch.rand(20, 1, generator=generator()), torch.zeros(20)
    judge = AttackVerifier(Quadratic(), deat.Linf(0.2), 0, task=Regression())

    class Centre:
        """An attack that improves every answer."""

        name = "centre"

        def __call__(self, model, x, y, threat, generator=None):
            return x + threat.project(x, -x)

    natural, helped = (judge.attack_block(attack, x, y, 0) for attack in (parse_attack("natural"), Centre()))
    assert all(b <= a for a, b in zip(natural.scores, helped.scores, strict=True))
    assert len(natural.statistics) == 20


# A task of one's own, as docs/tasks.md shows it


@dataclass(frozen=True)
class Angles(deat.tasks.Task):
    """Directions in the plane, in radians."""

    name = "angles"

    def loss(self, outputs, y):
        return 1 - torch.cos(outputs.flatten() - y)

    def is_right(self, outputs, y):
        return self.loss(outputs, y) < 0.05


def angles():
    x = torch.rand(300, 2, generator=generator()) * 2 - 1
    return x, torch.atan2(x[:, 1], x[:, 0])


def test_a_task_of_your_own_is_trained_and_evaluated():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    threat = deat.Linf(0.05, box=(-1, 1))
    options = {"task": Angles(), "threat": threat}
    training = {"epochs": 6, "val": 0.2, "batch_size": 20, "val_attack": "pgd-5", "lr": 0.05, "progress": False}
    result = deat.fit(net, angles(), method="m+deat", **options, **training)
    assert result.best.natural > 0.3
    evaluation = deat.evaluate(result.model, angles(), **options, attacks="natural,pgd-5", sanity=False)
    assert evaluation.accuracy["pgd-5"] <= evaluation.accuracy["natural"]
    assert evaluation.settings["task"]["name"] == "angles"


@pytest.mark.parametrize(("method", "name"), [("trades", "divergence"), ("mart", "boosted_loss")])
def test_a_method_that_a_task_does_not_define_is_refused_before_any_work(method, name):
    net = nn.Sequential(nn.Linear(2, 1))
    with pytest.raises(UsageError, match=name):
        deat.fit(net, angles(), task=Angles(), threat=deat.Linf(0.05, box=None), method=method, epochs=1)


@pytest.mark.parametrize(("method", "scores"), [("natural", "natural"), ("pgd-2", "under attack")])
def test_the_best_epoch_of_a_regression_is_chosen_by_its_metric(method, scores):
    x = torch.rand(60, 3, generator=generator())
    options = {"task": "regression", "threat": "linf:0.05", "epochs": 2, "batch_size": 16, "progress": False}
    result = deat.fit(nn.Linear(3, 1), (x, x.sum(1)), method=method, val=0.3, **options)
    assert "R2" in result.choice.reason
    assert scores in result.choice.reason
    assert "%" not in result.choice.reason, "an R2 is no share"
    assert not any("held-out image" in note for note in result.notes), "there are no verdicts that could be missing"
    assert result.choice.as_json()["metric"] == "R2"


def test_an_image_set_of_multi_labels_may_hold_floats():
    present = torch.randint(0, 2, (20, 3), generator=generator())
    images = torch.rand(20, 4, generator=generator())
    losses = []
    for labels in (present, present.float(), present.bool()):
        data = deat.ImageSet(images, labels, ("a", "b", "c"), MultiLabel())
        torch.manual_seed(0)
        options = {"threat": "linf:0.1", "epochs": 1, "batch_size": 10, "progress": False}
        losses.append(deat.fit(nn.Linear(4, 3), data, **options).history[0].loss)
    assert losses[0] == losses[1] == losses[2]


def test_mart_on_a_regression_says_why_it_cannot_be():
    with pytest.raises(UsageError, match="classes"):
        deat.fit(nn.Linear(2, 1), angles(), task="regression", threat=deat.Linf(0.1, box=None), method="m+mart")


@pytest.mark.parametrize("attacks", ["aa", "natural,segpgd-5", "square"])
def test_an_attack_for_another_task_is_refused_before_any_work(attacks):
    with pytest.raises(UsageError, match="regression"):
        deat.evaluate(nn.Linear(2, 1), angles(), task="regression", threat=deat.Linf(0.1, box=None), attacks=attacks)


@pytest.mark.parametrize(("task", "outputs"), [("multilabel", 2), ("segmentation", 3), ("regression", 2)])
def test_outputs_that_a_task_cannot_read_are_refused_with_their_shape(task, outputs):
    x = torch.rand(40, 3, 4, 4, generator=generator())
    y = {
        "multilabel": torch.zeros(40, 5),
        "segmentation": torch.arange(40 * 16).view(40, 4, 4) % 3,
        "regression": torch.zeros(40),
    }
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, outputs))
    with pytest.raises(UsageError, match="shape"):
        deat.fit(net, (x, y[task]), task=task, epochs=1, batch_size=20)
    with pytest.raises(UsageError, match="shape"):
        deat.evaluate(net, (x, y[task]), task=task, threat="linf:0.1")


def test_a_game_and_its_objective_have_the_same_task():
    net = nn.Linear(2, 1)
    objective = deat.Objective(net, deat.CrossEntropy(), Regression())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert deat.Game(net, objective, deat.Linf(0.1), deat.InnerAttack(), optimizer).task == Regression()
    with pytest.raises(UsageError, match="same task"):
        deat.Game(net, objective, deat.Linf(0.1), deat.InnerAttack(), optimizer, task=MultiLabel())


def test_an_evaluation_of_masks_with_a_void_label_names_the_setting_for_it():
    masks = torch.randint(0, 2, (4, 6, 6), generator=generator())
    masks[:, 0] = 255
    with pytest.raises(UsageError, match="ignore_index=255"):
        deat.evaluate(nn.Conv2d(1, 2, 1), (torch.rand(4, 1, 6, 6), masks), task="segmentation", threat="linf:0.1")


def test_texts_call_waveforms_and_rows_of_a_table_examples_and_not_images():
    y = torch.arange(20) % 2
    options = {"attacks": "natural", "sanity": False, "progress": False}
    for x, threat, noun in (
        (torch.rand(20, 1, 8, 8), deat.Linf(0.1), "images"),
        (2 * torch.rand(20, 1, 30) - 1, deat.Linf(0.1, box=(-1, 1)), "examples"),
        (torch.randn(20, 3), deat.Union(deat.Linf(0.1, box=None), deat.L2(0.2, box=None)), "examples"),
    ):
        net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 2))
        evaluation = deat.evaluate(net, (x, y), threat=threat, **options)
        assert f"20 {noun}" in repr(evaluation)
        assert f"20 {noun}" in evaluation._repr_html_()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_outputs_of_one_number_an_example_may_be_a_vector_also_in_the_checks(task):
    x, y = torch.rand(30, 3, generator=generator()), torch.arange(30) % 2
    y = y if task == "classification" else y.float()
    net = nn.Linear(3, 1)
    options = {"task": task, "threat": "linf:0.1", "attacks": "natural,pgd-2", "progress": False}
    column, vector = (deat.evaluate(n, (x, y), **options) for n in (net, nn.Sequential(net, nn.Flatten(0))))
    assert vector.scores == column.scores
    assert [flag.name for flag in vector.flags] == [flag.name for flag in column.flags]
