"""Training by one call or step by step: data, validation, the best epoch, continuing, any optimiser, any network."""

import copy
import json
import math
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.data import ImageSet
from deat.data.image_set import split_indices
from deat.errors import DataError, NumericalError, UsageError
from deat.evaluation.attacks import parse_attack
from deat.evaluation.quick_scores import QuickScore
from deat.methods.change_settings import configure_method
from deat.runs.resolve_request import Request, resolve_request
from deat.training.best_epoch import BestEpoch
from deat.training.config import from_recorded_names
from deat.training.data_split import open_source
from deat.training.epoch_records import EpochStats, append_record, read_history
from deat.training.model_checks import log10_lipschitz
from deat.training.training_cost import backprop_bounds
from deat.training.validation import read_labels
from deat.utils.seeding import RandomStreams, derive_seed
from helpers.games import THREATS, trainer_of
from helpers.nets import CLASSES, SIDE, Items, conv_net, images, learnable, same, seeded, weights
from helpers.validation import PLACE, one_after_the_other

QUICK = {"epochs": 2, "batch_size": 8, "lr": 0.1, "lr_schedule": "flat", "precision": "fp32", "workers": 0}


X, Y = learnable(24)
DATA = {
    "tensors": (X, Y),
    "bytes": ((255 * X).to(torch.uint8), Y),
    "arrays": (X.numpy(), Y.numpy()),
    "dataset": Items(X, Y),
    "tensor dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "list of batches": [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])],
    "image set": ImageSet(X, Y, ("a", "b", "c")),
}


def lines(history: list[EpochStats]) -> str:
    return "\n".join(json.dumps(asdict(stats)) for stats in history)


@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
def test_fit_trains_on_any_kind_of_data(data):
    net = conv_net()
    before = weights(net)
    result = deat.fit(net, data, method="fgsm", threat=deat.Linf(0.1), **QUICK)
    assert result.model is net
    assert not same(before, weights(net))
    assert [stats.examples for stats in result.history] == [24, 24]
    assert result.history[-1].backprops == 2 * 3 * 2
    assert result.best.epoch == 1


def test_fit_teaches_what_is_there_to_learn():
    result = deat.fit(
        conv_net(), learnable(60), method="m+deat", threat="linf:0.05", epochs=12, batch_size=10, lr=0.1, val=0.2
    )
    assert result.history[-1].train_accuracy > 0.9
    assert result.best.robust > 0.9
    assert result.history[-1].loss < result.history[0].loss


def test_history_holds_what_an_epoch_was():
    history = trainer_of("m+deat", val=0.25, val_attack="pgd-3", epochs=3, threat=deat.Linf(0.1)).fit().history
    assert [stats.epoch for stats in history] == [0, 1, 2]
    assert [stats.k for stats in history] == [0, 1, 1]
    assert [stats.threshold for stats in history] == [None, None, 1.01 * history[1].magnitude]
    assert [stats.alpha for stats in history] == pytest.approx([0.125] * 3)
    assert [stats.backprops for stats in history] == [2, 6, 10]
    assert [stats.passes for stats in history] == [4, 12, 20]
    assert [stats.val_passes for stats in history] == [8, 16, 24]
    assert all(0 <= stats.val_robust <= stats.val_natural <= 1 for stats in history)
    assert all(stats.val_loss > 0 for stats in history)
    assert all(stats.magnitude > 0 and stats.examples == 18 and stats.skipped == 0 for stats in history)


def test_callback_can_end_training_after_the_running_epoch():
    class Enough:
        def on_epoch(self, trainer, stats, timing):
            assert timing.epoch == stats.epoch == len(trainer.history) - 1
            assert timing.train_seconds > 0
            if stats.epoch == 1:
                trainer.stop()

    result = trainer_of("natural", epochs=5, callbacks=[Enough()]).fit()
    assert [stats.epoch for stats in result.history] == [0, 1]


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("pgd-7", 80, 80),
        ("deat-3", 22, 22),
        ("m+deat", 1 + 9 * 2, 1 + 2 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 8),
        ("deat-40%", 10, sum(range(1, 11))),
    ],
)
def test_cost_is_known_before_training_within_what_the_schedule_may_do(name, few, many):
    method = deat.get_method(name)
    assert backprop_bounds(method, method.bind(THREATS[0], 10), 10) == (few, many)


def test_history_file_reads_back_what_was_written_and_drops_a_torn_line(tmp_path):
    history = trainer_of("natural", epochs=2).fit().history
    path = tmp_path / "history.jsonl"
    for stats in history:
        append_record(path, stats)
    assert read_history(path) == history
    path.write_text(path.read_text()[:-5])
    assert read_history(path) == history[:1]


# Validation and the best epoch


def test_fraction_is_held_out_of_training_and_fixed_by_the_seed():
    trainers = [trainer_of("natural", val=0.25, seed=seed) for seed in (0, 0, 1)]
    parts = [(t.train.images.images, t.validator.source.images.images) for t in trainers]
    for train, held in parts:
        assert (len(train), len(held)) == (18, 6)
        assert not any(torch.equal(a, b) for a in train for b in held)
    assert torch.equal(parts[0][1], parts[1][1])
    assert not torch.equal(parts[0][1], parts[2][1])


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_a_small_fraction_holds_out_one_image_at_least(kind):
    trainer = trainer_of("natural", data=DATA[kind], val=0.01)
    assert (trainer.train.num_examples, trainer.val.num_examples) == (23, 1)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(UsageError, match="fraction"):
        trainer_of("natural", val=fraction)


def test_fraction_of_a_loader_is_refused_with_the_fix():
    with pytest.raises(DataError, match="val="):
        trainer_of("natural", data=DATA["loader"], val=0.25)


def test_validation_data_of_its_own_is_never_trained_on():
    held = images(6, seed=9)
    trainer = trainer_of("pgd-2", val=held)
    seen = []
    trainer.game.net.register_forward_pre_hook(lambda m, i: seen.append(m.training))
    stats = trainer.run_epoch()
    assert trainer.train.num_examples == 24
    assert stats.val_natural is not None
    assert seen.count(True) == 3 * 3  # training
    assert seen.count(False) == 1 + 20 + 1  # natural, cw-20, and its verdict


def test_validation_data_is_checked_before_any_training_and_counts_the_training_data_s_classes():
    with pytest.raises(DataError, match="divide by 255"):
        trainer_of("natural", val=(255 * X[:6], Y[:6]))
    with pytest.raises(DataError, match="class"):
        trainer_of("natural", val=(X[:6], Y[:6] + CLASSES))
    assert trainer_of("natural", val=(X[:6], torch.zeros_like(Y[:6]))).val.num_classes == CLASSES


def test_validation_is_by_the_attack_the_threat_and_the_seed_that_were_set(monkeypatch):
    asked = []

    def look(model, images, attacks, threat, seed, *rest):
        asked.append((attacks, threat, seed, *rest))
        return {"natural": QuickScore(0.9, 0.3, [True]), "cw-3": QuickScore(0.4, 2.0, [True])}

    monkeypatch.setattr(PLACE, look)
    trainer = trainer_of("pgd-2", val=0.25, val_attack="cw-3", seed=5, threat=deat.L2(0.5))
    stats = trainer.run_epoch()
    rest = trainer.engine.to_memory_format, trainer.distributed, trainer.task
    assert asked == [(("natural", parse_attack("cw-3")), deat.L2(0.5), 5, *rest)]
    assert (stats.val_natural, stats.val_robust, stats.val_loss) == (0.9, 0.4, 0.3)
    assert deat.TrainConfig().val_attack == "cw-20"


@pytest.mark.parametrize("kind", ["tensors", "dataset"])
def test_held_out_images_are_the_same_in_every_epoch_in_order_and_as_they_are(kind):
    settings = deat.TrainConfig(epochs=2, batch_size=4, seed=3, workers=0)
    augment = deat.Augment(2) if kind == "tensors" else None
    trainer = deat.make_trainer(conv_net(), DATA[kind], val=0.25, augment=augment, config=settings)
    rest, held = split_indices(len(X), 6, seed=3)
    assert trainer.train.num_examples == len(rest) == 18
    for epoch in range(2):
        assert torch.equal(torch.cat([x for x, _ in trainer.val.epoch(epoch)]), X[held])


def test_validation_loss_is_the_mean_cross_entropy_of_natural_held_out_images():
    x, y = images(7, seed=9)
    trainer = trainer_of("pgd-2", val=(x, y))
    stats = trainer.run_epoch()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(trainer.model.eval()(x), y)
    assert stats.val_loss == pytest.approx(float(expected), rel=1e-5)


def test_validation_leaves_weights_statistics_and_random_state_alone():
    def run(**options) -> str:
        history = trainer_of("m+pgd", conv_net(batch_norm=True, dropout=0.3), epochs=3, **options).fit().history
        without = {"val_natural": None, "val_robust": None, "val_passes": 0, "val_loss": None}
        return lines([replace(s, **without, best_epoch=None, val_p=None) for s in history])

    assert run(val=images(6, seed=9)) == run()


def test_validation_can_be_switched_off():
    result = trainer_of("natural", val=0.25, val_attack="none").fit()
    assert {(stats.val_robust, stats.val_loss) for stats in result.history} == {(None, None)}
    assert result.best.epoch == 2


def stats_with(epoch: int, robust: float | None, natural: float | None) -> EpochStats:
    numbers = dict.fromkeys(EpochStats.__dataclass_fields__, 0)
    return EpochStats(**{**numbers, "epoch": epoch, "val_robust": robust, "val_natural": natural})


NAN = math.nan
CHOICES = {
    "highest": ([(0.5, 0.9), (0.7, 0.8), (0.6, 0.9)], 1),
    "tie goes to natural": ([(0.5, 0.8), (0.5, 0.9), (0.5, 0.85)], 1),
    "then to the earlier": ([(0.5, 0.9), (0.5, 0.9)], 0),
    "nan never wins": ([(0.5, 0.9), (NAN, 0.99), (0.4, NAN)], 0),
    "nan is beaten": ([(NAN, NAN), (0.1, 0.1)], 1),
    "nan natural loses a tie": ([(0.5, NAN), (0.5, 0.2), (0.5, NAN)], 1),
    "no validation": ([(None, None), (None, None), (None, None)], 2),
}


@pytest.mark.parametrize(("scores", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_best_epoch_is_chosen_by_robustness_then_natural_accuracy_then_age(scores, expected):
    best, net = BestEpoch(), nn.Linear(1, 1)
    for epoch, (robust, natural) in enumerate(scores):
        nn.init.constant_(net.weight, epoch)
        best.update_if_better(stats_with(epoch, robust, natural), net)
    assert best.snapshot.epoch == expected
    assert best.snapshot.weights["weight"].item() == expected


AT_CHANCE = {
    "a constant answer that no attack changes": ([(0.25, 0.25), (0.05, 0.6), (0.24, 0.24)], 1),
    "among those that are not, the usual rule": ([(0.25, 0.25), (0.05, 0.6), (0.1, 0.5), (0.25, 0.2)], 2),
    "where all are, the usual rule": ([(0.1, 0.2), (0.25, 0.25), (0.2, 0.25)], 1),
    "just above chance": ([(0.25, 0.25), (0.0, 0.26)], 1),
    "nan never wins": ([(0.2, 0.25), (NAN, 0.99), (0.1, NAN)], 0),
}


@pytest.mark.parametrize(("scores", "expected"), AT_CHANCE.values(), ids=AT_CHANCE.keys())
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_epoch_at_chance_never_beats_one_that_is_not(scores, expected, goes_on):
    best, net = BestEpoch(), nn.Linear(1, 1)
    for epoch, (robust, natural) in enumerate(scores):
        best = BestEpoch(best.snapshot_or_none) if goes_on else best
        best.update_if_better(stats_with(epoch, robust, natural), net, 0.25)
    assert best.snapshot.epoch == expected


def test_a_training_keeps_no_constant_classifier_where_an_epoch_knew_something(monkeypatch):
    monkeypatch.setattr(PLACE, one_after_the_other([(0.5, 0.5), (0.75, 0.25), (0.5, 0.5)], n=4))
    held = X[:4], torch.tensor([0, 1, 1, 2])  # one answer gets a half
    result = trainer_of("pgd-2", val=held, val_attack="pgd-2").fit()
    assert [stats.val_robust for stats in result.history] == [0.5, 0.25, 0.5]
    assert result.best.epoch == 1


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader", "image set"])
def test_chance_is_the_share_of_the_commonest_label_whatever_the_data_is(kind):
    data, labels = DATA[kind], torch.tensor([2] * 7 + [1] * 5)
    kinds = {
        "tensors": (X[:12], labels),
        "dataset": Items(X[:12], labels),
        "loader": DataLoader(TensorDataset(X[:12], labels), batch_size=5),
        "image set": ImageSet(X[:12], labels, ("a", "b", "c")),
    }
    assert type(kinds[kind]) is type(data)
    source = open_source(kinds[kind], deat.TrainConfig(batch_size=5, workers=0), shuffle=False)
    assert deat.tasks.CLASSIFICATION.chance(read_labels(source)) == 7 / 12


@pytest.mark.parametrize(("name", "expected"), [("natural", 2), ("m+deat", 0), ("pgd-2", 0)])
def test_training_without_an_adversary_is_chosen_by_natural_accuracy_also_when_it_resumes(name, expected):
    trainer = trainer_of(name, conv_net(), epochs=2)
    trainer.best.update_if_better(stats_with(0, 0.3, 0.9), trainer.model)
    trainer.load_state_dict(trainer.state_dict())
    trainer.best.update_if_better(stats_with(1, 0.2, 0.98), trainer.model)
    trainer.best.update_if_better(stats_with(2, 0.1, 0.98), trainer.model)
    trainer.best.update_if_better(stats_with(3, 0.2, 0.97), trainer.model)
    assert trainer.best.snapshot.epoch == expected


def test_a_result_shows_itself_in_one_line_without_its_weights():
    result = deat.fit(conv_net(), learnable(24), val=learnable(8), method="fgsm", val_attack="fgsm", **QUICK)
    best = result.best
    shown = f"best.epoch {best.epoch}, natural {best.natural:.1%}, robust {best.robust:.1%})"
    assert repr(result).startswith("TrainResult(Sequential, 2 epochs, ")
    assert repr(result).endswith(shown)
    assert "tensor" not in repr(best)


def test_load_best_puts_the_best_epoch_s_weights_into_the_model():
    seen = {}

    class Keep:
        def on_epoch(self, trainer, stats, timing):
            seen[stats.epoch] = copy.deepcopy(trainer.model.state_dict())

    trainer = trainer_of("fgsm", conv_net(batch_norm=True), val=0.25, epochs=4, callbacks=[Keep()])
    result = trainer.fit()
    last = copy.deepcopy(result.model.state_dict())
    assert all(torch.equal(last[k], v) for k, v in seen[3].items())
    result.load_best()
    best = seen[result.best.epoch]
    assert all(torch.equal(result.model.state_dict()[k], v) for k, v in best.items())


# Continuing


def persistent(name: str) -> deat.Method:
    method = deat.get_method(name)
    return replace(method, attack=replace(method.attack, persistent=True))


CONTINUED = {
    **{
        name: deat.get_method(name) for name in ("m+deat", "pgd-3", "m+trades", "deat-40%", "amata-2-4", "fat-3", "dat")
    },
    "persistent free": persistent("free-3"),
    "persistent m+deat": persistent("m+deat"),
}


@pytest.mark.parametrize("method", CONTINUED.values(), ids=CONTINUED.keys())
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_continued_run_equals_an_uninterrupted_one(method, stop):
    options = {"epochs": 5, "lr_schedule": "cyclic", "val": 0.25, "val_attack": "pgd-2"}

    def fresh(seed: int) -> deat.Trainer:
        return trainer_of(method, conv_net(batch_norm=True, dropout=0.2, seed=seed), **options)

    whole, first, second = fresh(0), fresh(0), fresh(7)
    whole.fit()
    with first.session():
        for _ in range(stop):
            first.run_epoch()
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    second.fit()
    assert lines(second.history) == lines(whole.history)
    assert same(weights(second.model), weights(whole.model))
    assert second.best.snapshot.epoch == whole.best.snapshot.epoch
    assert all(torch.equal(v, whole.best.snapshot.weights[k]) for k, v in second.best.snapshot.weights.items())
    one, other = (t.optimizer.state_dict()["state"] for t in (whole, second))
    assert all(torch.equal(one[i]["momentum_buffer"], other[i]["momentum_buffer"]) for i in one)


def test_state_can_be_saved_before_the_first_epoch():
    first, second = trainer_of("m+deat", val=0.25), trainer_of("m+deat", conv_net(seed=7), val=0.25)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert lines(second.fit().history) == lines(first.fit().history)


def test_state_keeps_the_loss_scale():
    first, second = trainer_of("natural"), trainer_of("natural")
    for trainer in (first, second):
        trainer.engine.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    first.run_epoch()
    first.engine.scaler.update(16.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.engine.scaler.get_scale() == 16.0


# Optimisers


def test_any_optimiser_comes_from_a_factory():
    net = conv_net()
    trainer = trainer_of("fgsm", net, lr=None, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))
    before = weights(net)
    history = trainer.fit().history
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert {stats.lr for stats in history} == {0.01}
    assert not same(before, weights(net))


def test_parameter_groups_keep_the_ratio_of_their_learning_rates():
    def factory(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.02}, {"params": rest, "lr": 0.005}])

    trainer = trainer_of("natural", lr=None, lr_schedule="cosine", optimizer=factory)
    pairs = []
    trainer.optimizer.register_step_pre_hook(lambda o, *_: pairs.append([g["lr"] for g in o.param_groups]))
    trainer.fit()
    assert len(pairs) == 9
    assert pairs[0] == pytest.approx([0.02, 0.005])
    assert all(a == pytest.approx(4 * b) for a, b in pairs)
    assert pairs[-1][0] < 0.01


def test_settings_lr_overrides_the_factory_s_and_keeps_the_ratio():
    def factory(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": rest, "lr": 0.1}])

    trainer = trainer_of("natural", lr=1.0, optimizer=factory)
    trainer.lr_scheduler.set_step(0)
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [1.0, 0.5]


def test_learning_rate_is_stepped_once_a_batch_not_once_a_replay():
    trainer, rates = trainer_of("free-4", lr_schedule="cyclic", epochs=2), []
    trainer.optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    trainer.fit()
    assert len(rates) == 2 * 3 * 4
    steps = [rates[i : i + 4] for i in range(0, len(rates), 4)]
    assert all(len(set(batch)) == 1 for batch in steps)
    assert [batch[0] for batch in steps] == pytest.approx([0, 0.1 / 3, 0.2 / 3, 0.1, 0.2 / 3, 0.1 / 3])


def test_momentum_is_cycled_for_sgd_unless_switched_off_and_never_given_to_who_has_none():
    def momenta(**options) -> list[float]:
        trainer, seen = trainer_of("natural", lr_schedule="cyclic", epochs=2, **options), []
        trainer.optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0].get("momentum")))
        trainer.fit()
        return seen

    assert momenta() == pytest.approx([0.9, 0.9 - 0.1 / 3, 0.9 - 0.2 / 3, 0.8, 0.9 - 0.2 / 3, 0.9 - 0.1 / 3])
    assert set(momenta(cycle_momentum=False)) == {0.9}
    assert set(momenta(optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))) == {None}
    assert set(momenta(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))) == {0.0}


def test_default_optimiser_is_sgd_with_momentum_and_weight_decay_on_everything():
    trainer = trainer_of("natural", conv_net(batch_norm=True))
    (group,) = trainer.optimizer.param_groups
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 5e-4, False)
    assert len(group["params"]) == len(list(trainer.model.parameters()))


# Networks


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIDE**2, SIDE**2), nn.Linear(SIDE**2, SIDE**2)
        self.b.weight = self.a.weight
        self.head = nn.Linear(SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))


def weight_normed() -> nn.Module:
    net = conv_net()
    for index in (0, 2):
        net[index] = nn.utils.parametrizations.weight_norm(net[index])
    return net


ANY = {
    "no batch norm": conv_net,
    "batch norm": lambda: conv_net(batch_norm=True),
    "dropout": lambda: conv_net(dropout=0.3),
    "tied": Tied,
    "weight norm": weight_normed,
    "float64": lambda: conv_net().double(),
}


@pytest.mark.parametrize("build", ANY.values(), ids=ANY.keys())
@pytest.mark.parametrize("name", ["m+deat", "yopo-3-2", "f+trades"])
def test_any_network_trains_and_can_be_put_back_to_its_best_epoch(build, name):
    net = seeded(build)
    before = weights(net)
    result = trainer_of(name, net, val=0.25, val_attack="pgd-2").fit()
    assert not same(before, weights(net))
    result.load_best()
    assert all(math.isfinite(stats.loss) for stats in result.history)


def test_tied_weights_stay_tied():
    net = seeded(Tied)
    trainer_of("m+pgd", net).fit()
    assert net.a.weight is net.b.weight
    assert len(list(net.parameters())) == 5


def test_normalisation_becomes_the_first_layer_of_the_returned_model():
    net = conv_net()
    result = deat.fit(net, learnable(), method="fgsm", threat="linf:0.1", normalize=([0.4], [0.3]), **QUICK)
    with torch.no_grad():
        torch.testing.assert_close(result.model(X), net((X - 0.4) / 0.3))


def test_the_caller_s_random_state_and_threads_are_untouched():
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    during = []

    class Look:
        def on_epoch(self, trainer, stats, timing):
            during.append(torch.get_num_threads())

    options = {"val": 0.25, "val_attack": "pgd-1", "epochs": 1, "threads": 2, "callbacks": [Look()]}
    trainer_of("fgsm", conv_net(dropout=0.3), **options).fit()
    assert set(during) == {2}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("asked", [None, 2])
def test_a_run_s_network_is_evaluated_with_the_threads_that_it_is_trained_with(asked):
    run, threads = resolve_request(Request(), device="cpu", threads=asked), torch.get_num_threads()
    with run.limit_threads(run.model()):
        assert torch.get_num_threads() == run.trainer().threads == (asked or 1)
    assert torch.get_num_threads() == threads


def test_dropout_does_not_depend_on_the_caller_s_random_state():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(lines(trainer_of("m+deat", conv_net(dropout=0.4)).fit().history))
    assert found[0] == found[1]


def test_every_draw_is_a_function_of_seed_stream_epoch_and_step():
    def draws(seed: int, epoch: int, step: int) -> tuple[float, float]:
        starts = torch.Generator()
        streams = RandomStreams(seed, starts)
        with streams.isolated_rng(torch.device("cpu")):
            streams.seek(epoch, step)
            return torch.rand((), generator=starts).item(), torch.rand(()).item()

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    first, again = [draws(*place) for place in places], [draws(*place) for place in places]
    assert first == again
    assert len({number for pair in first for number in pair}) == 2 * len(places)


def test_a_network_on_a_cpu_draws_as_after_manual_seed():
    streams = RandomStreams(3, torch.Generator())
    with streams.isolated_rng(torch.device("cpu")):
        streams.seek(1, 2)
        found = torch.rand(4)
        torch.manual_seed(derive_seed(3, "dropout", 1, 2))
        assert torch.equal(found, torch.rand(4))


class Wrong(nn.Module):
    """Answers in a form of the test's choice."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(SIDE**2, CLASSES), answer

    def forward(self, x: Tensor):
        return self.answer(self.layer(x.flatten(1)), x)


def reject(logits: Tensor, x: Tensor) -> None:
    assert x.shape[-1] == 224, "this network reads images of 224 pixels"


REFUSED = {
    "too few logits": (lambda: Wrong(lambda z, x: z[:, :2]), "one for each class"),
    "no logits": (lambda: Wrong(lambda z, x: {"logits": z}), "dict"),
    "a map": (lambda: Wrong(lambda z, x: x), "one for each class"),
    "other images": (lambda: conv_net(channels=3), "cannot read images of shape"),
    "an assertion": (lambda: Wrong(reject), "cannot read images of shape"),
    "changed images": (lambda: Wrong(lambda z, x: (x.sub_(0.1), z)[1]), "the model changes the images it is given"),
    "no gradient": (lambda: Wrong(lambda z, x: z.detach()), "no gradient reaches a parameter"),
    "nothing to train": (lambda: conv_net().requires_grad_(False), "nothing to train"),
    "no parameters": (lambda: nn.Flatten(), "nothing to train"),
}


@pytest.mark.parametrize(("build", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_network_that_does_not_fit_is_refused_before_any_work(build, says):
    with pytest.raises(UsageError, match=says):
        trainer_of("natural", build())


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_fit_without_gradients_is_refused_with_where_to_call_it(switched_off):
    net = conv_net()
    with switched_off(), pytest.raises(UsageError, match=r"call fit outside torch\.no_grad\(\)"):
        deat.fit(net, (X, Y), batch_size=8)


@pytest.mark.parametrize(("first", "hint"), [(1, True), (2, False)])
def test_labels_that_count_from_one_are_recognised(first, hint):
    with pytest.raises(UsageError, match="one for each class") as told:
        deat.fit(conv_net(), (X, Y + first), batch_size=8)
    assert ("labels count from 1, subtract 1" in str(told.value)) == hint


@pytest.mark.parametrize("val", [None, 0.25])
def test_a_stray_label_is_named_with_its_image_as_it_was_given(val):
    labels = Y.clone()
    labels[5] = 255
    with pytest.raises(UsageError, match=r"Image 5 has the label 255.* remove these images"):
        deat.fit(conv_net(), (X, labels), batch_size=8, val=val)


def test_a_stray_label_of_a_data_set_is_named_with_its_image():
    labels = Y.clone()
    labels[5] = 255
    with pytest.raises(UsageError, match=r"largest label is 255 \(image 5\)"):
        deat.fit(conv_net(), Items(X, labels), batch_size=8)


@pytest.mark.parametrize("build", [lambda: conv_net().state_dict(), lambda: conv_net, lambda: "resnet"])
def test_a_model_that_is_no_module_is_refused_in_words(build):
    says = f"the model is a {type(build()).__name__}; wrap it in a torch.nn.Module"
    with pytest.raises(UsageError, match=says):
        deat.fit(build(), (X, Y), normalize=([0.5], [0.5]))
    made = trainer_of("natural")
    with pytest.raises(UsageError, match=says):
        deat.Trainer(build(), made.train, method=made.method, threat=made.threat, config=made.config)


def test_a_class_in_place_of_its_network_is_refused_with_the_call(tmp_path):
    wrong = {
        "fit": lambda: deat.fit(Tied, (X, Y)),
        "evaluate": lambda: deat.evaluate(Tied, (X, Y), threat="linf:0.1", attacks=["fgsm"]),
        "normalized": lambda: deat.add_normalization(Tied, [0.5], [0.5]),
        "save": lambda: deat.save_weights(Tied, tmp_path / "w.safetensors"),
        "load": lambda: deat.load_weights(Tied, tmp_path / "w.safetensors"),
    }
    deat.save_weights(conv_net(), tmp_path / "w.safetensors")
    for name, call in wrong.items():
        with pytest.raises(UsageError, match=r"the model is the class Tied, not a network: call it, Tied\(\.\.\.\)"):
            call()
            pytest.fail(name)
    with pytest.raises(UsageError, match="by its name, such as 'small'"):
        deat.build_model(Tied)


def test_a_trainer_finds_method_and_threat_by_their_names():
    made = trainer_of("m+deat", threat=deat.L2(0.5))
    found = deat.Trainer(conv_net(), made.train, method="m+deat", threat="l2:0.5", config=made.config)
    assert (found.method, found.threat, found.schedule) == (made.method, made.threat, made.schedule)
    with pytest.raises(UsageError, match="unknown method 'm\\+daet'"):
        deat.Trainer(conv_net(), made.train, method="m+daet", threat="l2:0.5", config=made.config)


def test_more_logits_than_classes_are_welcome():
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 10)))
    with pytest.warns(RuntimeWarning, match="the model has 10 outputs, and the data 3 classes. That works"):
        assert trainer_of("pgd-2", net).fit().history[-1].examples == 24


@pytest.mark.parametrize(
    ("place", "value"), [("0.weight", math.nan), ("0.bias", math.inf), ("1.running_var", math.nan)]
)
def test_weights_that_are_not_finite_before_training_are_refused_by_name(place, value):
    net = conv_net(batch_norm=True)
    net.state_dict()[place].view(-1)[0] = value
    with pytest.raises(UsageError, match=f"weights are not finite before any training, in {place}"):
        trainer_of("natural", net)


def test_answers_that_are_nan_in_eval_mode_alone_end_training_and_are_no_accuracy():
    net = conv_net(batch_norm=True)
    trainer = trainer_of("natural", net, val=0.25)
    net[1].running_var[0] = math.nan
    with pytest.raises(NumericalError, match=r"the loss on held-out images is nan in epoch 1: in eval mode"):
        trainer.fit()


@pytest.mark.parametrize("name", ["m+deat", "trades", "yopo-3-2"])
def test_a_network_that_changes_the_images_it_is_given_is_refused_before_training(name):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = conv_net()

        def forward(self, x):
            x -= 0.5
            return self.net(x)

    with pytest.raises(UsageError, match="the model changes the images it is given: write x = x - mean"):
        trainer_of(name, InPlace())


@pytest.mark.parametrize("net", [nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), conv_net().to("meta")])
def test_a_network_without_weights_yet_is_refused(net):
    with pytest.raises(UsageError, match="the model has layers without weights yet"):
        trainer_of("natural", net)
    with pytest.raises(UsageError, match="the model has layers without weights yet"):
        deat.evaluate(net, learnable(), threat="linf:0.1")


def test_images_that_a_network_made_are_trained_on_without_it():
    x, y = learnable()
    made = x * torch.ones(1, requires_grad=True)
    loader = [(made[:12], y[:12]), (made[12:], y[12:])]
    plain = [stats.loss for stats in trainer_of("m+deat", data=(x, y)).fit().history]
    assert [stats.loss for stats in trainer_of("m+deat", data=(made, y)).fit().history] == plain
    assert trainer_of("m+deat", data=loader, batch_size=12).fit().history


def test_an_infinity_in_a_mask_is_no_broken_weight():
    net = conv_net()
    net.register_buffer("mask", torch.full((3, 3), -math.inf))
    assert trainer_of("natural", net, epochs=1).fit().history


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_turn_nan_are_a_numerical_error_with_a_remedy_that_is_not_in_use(precision):
    net = conv_net()
    trainer = trainer_of("natural", net, precision=precision)
    with torch.no_grad():
        net[0].weight[0, 0, 0, 0] = math.nan
    with pytest.raises(NumericalError, match=r"epoch 1, batch 1.*Lower the learning rate") as told:
        trainer.fit()
    assert ("precision fp32" in str(told.value)) == (precision != "fp32")


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_weights_that_break_in_the_last_update_are_a_numerical_error(which):
    net = conv_net(batch_norm=True)
    trainer, steps = trainer_of("natural", net, epochs=1), []

    def spoil(*_: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            with torch.no_grad():
                getattr(net[-1], which).fill_(math.inf)

    trainer.optimizer.register_step_post_hook(spoil)
    with pytest.raises(NumericalError, match="weights"):
        trainer.fit()
    assert trainer.history == []


def test_a_learning_rate_that_explodes_is_a_numerical_error():
    with pytest.raises(NumericalError):
        trainer_of("pgd-2", lr=1e20, epochs=3).fit()


def test_log_lipschitz_bound_is_the_sum_of_log_frobenius_norms():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    expected = math.log10(net[0].weight.norm().item()) + math.log10(net[3].weight.norm().item())
    assert log10_lipschitz(net) == pytest.approx(expected, rel=1e-6)
    assert log10_lipschitz(nn.Sequential(*[nn.Linear(100, 100) for _ in range(700)])) > 308  # no overflow
    assert log10_lipschitz(nn.Flatten()) == 0


# Settings

BAD = {
    "epochs": [0, -1, 1.5, True],
    "batch_size": [0, 2.0],
    "lr": [0, -0.1, math.nan, math.inf, "0.1"],
    "peak": [0.0, 1.0, -0.5, math.nan],
    "momentum": [-0.1, -1e-10, 1.0, math.nan],
    "weight_decay": [-1e-13, math.nan, math.inf],
    "lr_schedule": ["cycle"],
    "precision": ["fp8"],
    "seed": [-1, 0.5],
    "threads": [0],
    "workers": [-1],
    "val_attack": ["pgd", "cw-0"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_setting_that_is_not_accepted_is_refused_by_name(name, value):
    with pytest.raises(UsageError, match=f"{name}|attack"):
        deat.TrainConfig(**{name: value})


def test_records_keep_the_names_that_settings_had_in_version_0_1():
    config = deat.TrainConfig(lr_schedule="cosine", milestones=(3,))
    recorded = json.loads((Path(__file__).parents[1] / "fixtures/v1/cut-amata/run.json").read_text())["settings"]
    assert list(config.describe()) == list(recorded)
    assert config.describe()["rate"] == "cosine"
    assert deat.TrainConfig(**from_recorded_names(config.describe())) == config
    assert from_recorded_names(recorded)["lr_schedule"] == "cosine"


def test_a_whole_number_too_large_to_compute_with_is_refused_as_infinity_is():
    with pytest.raises(UsageError, match="lr must be a number > 0"):
        deat.TrainConfig(lr=10**400)


ALIKE = {
    "epochs": np.int64(2),
    "batch_size": np.int32(8),
    "lr": np.float32(0.125),
    "milestones": (np.int64(1),),
    "momentum": Fraction(1, 2),
    "weight_decay": np.float64(0.0),
    "seed": np.uint8(3),
    "workers": np.int64(0),
}


def test_numbers_of_other_libraries_are_settings_and_kept_as_python_s_own():
    settings = deat.TrainConfig(**ALIKE)
    own = {"epochs": 2, "batch_size": 8, "lr": 0.125, "milestones": (1,), "momentum": 0.5, "weight_decay": 0.0}
    assert settings == deat.TrainConfig(**own, seed=3, workers=0)
    assert {type(getattr(settings, name)) for name in ALIKE} == {int, float, tuple}
    assert json.dumps(asdict(settings)) == json.dumps(asdict(deat.TrainConfig(**own, seed=3, workers=0)))


def test_training_by_numbers_of_other_libraries_can_be_kept_and_resumed_with(tmp_path):
    for whole, lr in ((np.int64, np.float32), (int, float)):
        kept = {"epochs": whole(1), "checkpoints": tmp_path, "progress": False}
        method = configure_method(
            deat.get_method("m+trades"), deat.Linf(0.1), beta=lr(2), gamma=lr(1.5), max_steps=whole(2)
        )
        result = deat.fit(conv_net(), (X, Y), method=method, batch_size=whole(8), lr=lr(0.125), **kept)
        assert len(result.history) == 1


@pytest.mark.parametrize("value", [np.bool_(True), np.float64("nan"), Fraction(10**400), 1j, torch.tensor(0.1)])
def test_what_is_no_finite_number_is_refused_whoever_made_it(value):
    with pytest.raises(UsageError, match="lr must be a number > 0"):
        deat.TrainConfig(lr=value)


@pytest.mark.parametrize("name", ["momentum", "weight_decay"])
def test_zero_is_a_setting_where_it_means_none(name):
    assert getattr(deat.TrainConfig(**{name: 0}), name) == 0


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "learning_rate": "The learning rate is lr",
        "epoch": "Did you mean 'epochs'",
        "batchsize": "Did you mean 'batch_size'",
        "optimiser": "Did you mean 'optimizer'",
        "eps": "threat=",
    }.items(),
)
def test_keyword_that_fit_does_not_have_is_refused_by_name_with_those_it_has(name, says):
    with pytest.raises(UsageError, match=f"unknown keyword of fit '{name}'") as caught:
        deat.fit(conv_net(), (X, Y), **{name: 1})
    assert says in str(caught.value)
    assert "Known: augment, batch_size, betas, callbacks" in str(caught.value)
    assert "settings" not in str(caught.value)


class Told:
    """A callback that is told too little."""

    def on_epoch(self, trainer):
        raise AssertionError


@pytest.mark.parametrize(
    ("callbacks", "says"),
    [
        ([lambda epoch: None], "the callback <lambda> does not take three arguments"),
        (print, "callbacks is of type builtin_function_or_method"),
        ([Told], "a callback is the class Told"),
        ([Told()], "on_epoch of a Told does not take three arguments"),
        ([None], "a callback is a NoneType"),
    ],
)
def test_a_callback_that_cannot_be_told_is_refused_before_any_work(callbacks, says):
    with pytest.raises(UsageError, match=rf"{says}.*on_epoch\(trainer, stats, timing\)"):
        deat.fit(conv_net(), learnable(), callbacks=callbacks, **QUICK)
    with pytest.raises(UsageError, match=says):
        deat.make_trainer(conv_net(), learnable(), callbacks=callbacks, config=deat.TrainConfig(**QUICK))


def test_an_error_inside_a_network_is_named_with_its_kind_and_place():
    def broken(logits, x):
        raise ValueError("my own bug")

    with pytest.raises(UsageError, match=rf"ValueError: my own bug \({__file__}, line \d+\)"):
        deat.fit(Wrong(broken), learnable(), **QUICK)
    with pytest.raises(UsageError, match=r"RuntimeError: .*channels.* \(.*test_training\.py, line \d+\)"):
        deat.fit(Wrong(lambda logits, x: conv_net(channels=3)(x)), learnable(), **QUICK)


def test_an_optimizer_in_place_of_its_factory_is_refused_with_the_fix():
    net = conv_net()
    with pytest.raises(UsageError, match=r"optimizer is of type Adam; it must be a function.*lambda params"):
        deat.fit(net, (X, Y), optimizer=torch.optim.Adam(net.parameters()), **QUICK)


@pytest.mark.parametrize("lr", [0.0, math.inf])
def test_an_optimizer_whose_learning_rate_cannot_be_steered_is_refused(lr):
    with pytest.raises(UsageError, match=f"the optimiser's learning rate must be a number > 0, .*not {lr}"):
        trainer_of("natural", optimizer=lambda p: torch.optim.SGD(p, lr=lr))


@pytest.mark.parametrize("val", [None, 0.1])
@pytest.mark.parametrize("name", ["folder:photos", Path("photos")])
def test_the_name_of_data_is_refused_with_the_call_that_loads_it(name, val):
    for call in (lambda: deat.fit(conv_net(), name, val=val), lambda: deat.evaluate(conv_net(), name, threat="linf:0")):
        with pytest.raises(UsageError, match=r"deat\.load_data\('folder:photos'\).*a torch Dataset"):
            call()


def test_a_whole_data_set_is_refused_where_one_of_its_splits_belongs():
    digits = deat.load_data("digits")
    for call in (
        lambda: deat.as_source(digits, batch_size=8),
        lambda: deat.fit(conv_net(), (X, Y), val=digits, **QUICK),
    ):
        with pytest.raises(UsageError, match=r"'digits' is a DataSplits.*\.test"):
            call()


def test_images_whose_channels_come_last_are_refused_with_the_order_that_is_meant():
    x = torch.rand(8, SIDE, SIDE, 3)
    with pytest.raises(UsageError, match=r"N x C x H x W.*permute\(0, 3, 1, 2\)"):
        deat.fit(conv_net(channels=3), (x, Y[:8]), **QUICK)
    with pytest.raises(UsageError) as caught:
        deat.fit(conv_net(channels=3), (X, Y), **QUICK)
    assert "permute" not in str(caught.value)


def test_missing_device_is_refused():
    for device in ("cuda:99", "gpu", "nonsense"):
        with pytest.raises(UsageError, match="not available"):
            trainer_of("natural", device=device)


def test_no_device_is_advised_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"Use 'cpu' or 'auto'\.$"):
        trainer_of("natural", device="nonsense")


def test_images_held_out_are_named_where_too_few_are_left_for_a_batch():
    images, labels = torch.rand(120, 1, 8, 8), torch.arange(120) % 2
    said = r"120 examples, of which 12 are held out .* 108 left.*--batch-size\) of at most 108"
    with pytest.raises(DataError, match=said):
        deat.fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), (images, labels), val=0.1, batch_size=128)


@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_bf16_trains_every_threat(threat):
    history = trainer_of("m+deat", conv_net(batch_norm=True), precision="bf16", threat=threat, val=0.25).fit().history
    assert all(math.isfinite(stats.loss) and stats.magnitude > 0 for stats in history)
