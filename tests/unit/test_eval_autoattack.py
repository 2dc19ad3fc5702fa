"""AutoAttack is the reference implementation's own, block by block, and leaves no trace."""

import json
import logging
import random
import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import pyautoattack
import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import nn

import deat
from deat.errors import UsageError
from deat.evaluation import autoattack
from deat.evaluation.autoattack import AUTOATTACK_PARTS, AutoAttack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.judge import derive_block_seed
from helpers.eval_nets import Around, digits, quantised, tiny
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable

NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
RADII = [deat.Linf(0.15), deat.L2(0.6), deat.L1(1.0)]
threats = pytest.mark.parametrize("threat", RADII, ids=lambda t: t.name)


BUDGETS = {
    APGDAttack: {"n_iter": 10, "n_iter_orig": 10},
    APGDAttack_targeted: {"n_iter": 10, "n_iter_orig": 10},
    FABAttack_PT: {"n_iter": 5},
    SquareAttack: {"n_queries": 75},
}


@pytest.fixture
def _small_budget(monkeypatch):
    """The parts with a small budget, for whoever calls them: their full one takes seconds."""
    for kind, budget in BUDGETS.items():

        def perturb(self, *args, real=kind.perturb, budget=budget):
            vars(self).update(budget)
            return real(self, *args)

        monkeypatch.setattr(kind, "perturb", perturb)


def by_hand(net, x, y, threat, name, *, seed, block):
    """(adversarial images, still correct) as a person calls the reference, block by block."""
    found = []
    for number, first in enumerate(range(0, len(y), block)):
        options = {"eps": threat.eps, "norm": NORMS[threat.name], "seed": derive_block_seed(seed, name, number)}
        adversary = pyautoattack.AutoAttack(net, version="standard", **options)
        if name != "aa":
            adversary.attacks_to_run = [name]
        images, labels = x[first : first + block], y[first : first + block]
        trace = sys.gettrace()
        found.append(adversary.run_standard_evaluation(images, labels, batch_size=block)[0])
        sys.settrace(trace)  # which the reference ends
    adv = torch.cat(found)
    return adv, net(adv).argmax(1) == y


def with_a_wrong_one(net, n):
    """Test images, the second of which has another label than the network gives it."""
    x, y = digits(n)
    y[1] = (net(x[1:2]).argmax(1) + 1) % 10
    return x, y


def test_aa_equals_the_reference_called_by_hand():
    net, threat = tiny(), RADII[0]
    x, y = with_a_wrong_one(net, 8)
    _, standing = by_hand(net, x, y, threat, "aa", seed=5, block=8)
    found = evaluate(net, (x, y), threat=threat, attacks=["aa"], seed=5, block=8, sanity=False)
    assert found.verdicts["aa"] == standing.tolist()
    assert 0 < standing.sum() < 7
    assert found.flags == []
    told = found.settings["attacks"]["aa"]
    targets = {"apgd-t": 9, "fab-t": 9}
    assert told == {"parts": list(AUTOATTACK_PARTS), "targets": targets, "targeted_loss": "dlr", "standard": True}


@pytest.mark.usefixtures("_small_budget")
@threats
def test_aa_equals_the_reference_on_the_same_blocks_in_every_norm(threat):
    net = tiny()
    x, y = with_a_wrong_one(net, 10)
    _, standing = by_hand(net, x, y, threat, "aa", seed=1, block=6)
    found = evaluate(net, (x, y), threat=threat, attacks=["aa"], seed=1, block=6, sanity=False)
    assert found.verdicts["aa"] == standing.tolist()
    assert 0 < standing.sum() < 9
    assert found.flags == []
    assert found.settings["attacks"]["aa"]["targets"] == {"apgd-t": 5 if threat.name == "l1" else 9, "fab-t": 9}


@pytest.mark.usefixtures("_small_budget")
@threats
@pytest.mark.parametrize("name", AUTOATTACK_PARTS)
def test_each_part_alone_equals_the_reference_image_by_image(name, threat):
    net, (x, y) = tiny(), digits(6)
    adv, standing = by_hand(net, x, y, threat, name, seed=2, block=6)
    generator = torch.Generator().manual_seed(derive_block_seed(2, name, 0))
    assert torch.equal(AutoAttack(name, (name,))(net, x, y, threat, generator), adv)
    found = evaluate(net, (x, y), threat=threat, attacks=[name], seed=2, block=6, sanity=False)
    assert found.verdicts[name] == standing.tolist()
    assert found.flags == []
    assert found.settings["attacks"][name]["parts"] == [name]
    assert found.settings["attacks"][name]["standard"] is False


@pytest.mark.usefixtures("_small_budget")
def test_aa_is_at_least_as_strong_as_its_first_part_and_counts_what_it_costs():
    found = evaluate(tiny(), digits(12), threat=deat.Linf(0.2), attacks=["natural", "apgd-ce", "aa"], sanity=False)
    assert found.accuracy["aa"] <= found.accuracy["apgd-ce"] <= found.accuracy["natural"]
    part, whole = found.results[1:]
    assert part.forwards > part.backwards > 0
    assert whole.forwards > part.forwards
    assert whole.backwards > part.backwards


@pytest.mark.usefixtures("_small_budget")
def test_the_record_says_how_many_images_each_part_felled(tmp_path):
    net, data = tiny(), digits(30)
    options = {"threat": deat.Linf(0.15), "attacks": ["natural", "apgd-ce", "aa"], "sanity": False, "block": 12}
    found = evaluate(net, data, save=tmp_path / "evaluation.json", **options)
    natural, part, whole = found.results
    assert list(whole.felled) == list(AUTOATTACK_PARTS)
    assert sum(whole.felled.values()) == sum(natural.correct) - sum(whole.correct)
    assert whole.felled["apgd-ce"] > 0
    assert natural.felled == part.felled == {}
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert told["attacks"][2]["felled"] == whole.felled
    assert deat.load_evaluation(tmp_path / "evaluation.json") == found


@pytest.mark.usefixtures("_small_budget")
@pytest.mark.parametrize(("left", "cascade"), [(1, False), (3, True), (6, False)])
def test_an_interruption_costs_one_part_of_one_block(left, cascade, tmp_path, monkeypatch):
    net, data, begun = tiny(), digits(12), []
    options = {"threat": deat.Linf(0.1), "attacks": ["natural", "pgd-1", "aa"], "block": 6, "sanity": False}
    whole = evaluate(net, data, cascade=cascade, **options)
    real = autoattack._run_reference_part

    def reference(model, x, y, threat, part, seed):
        begun.append(part)
        if len(begun) == left + 1:
            raise KeyboardInterrupt
        return real(model, x, y, threat, part, seed)

    monkeypatch.setattr(autoattack, "_run_reference_part", reference)
    ledger = tmp_path / "rulings.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(net, data, cascade=cascade, resume_log=ledger, **options)
    found = evaluate(net, data, cascade=cascade, resume_log=ledger, **options)
    parts = [*AUTOATTACK_PARTS, *AUTOATTACK_PARTS]
    assert begun == [*parts[: left + 1], *parts[left:]]
    assert found.verdicts == whole.verdicts
    assert [(r.felled, r.forwards, r.backwards, r.invalid) for r in found.results] == [
        (r.felled, r.forwards, r.backwards, r.invalid) for r in whole.results
    ]
    assert sum(whole.verdicts["aa"]) > 2


@pytest.mark.usefixtures("_small_budget")
def test_a_network_that_only_square_breaks_is_flagged_by_aa_alone():
    found = evaluate(quantised(tiny()), digits(40), threat=deat.Linf(0.25), attacks=["aa"], sanity=False)
    assert found.results[0].felled["square"] > 2
    assert [flag.name for flag in found.flags] == ["black_box_wins"]


@cache
def three_classes() -> nn.Module:
    return trainer_of("natural", conv_net(seed=2), data=learnable(60), epochs=25).fit().model


@pytest.mark.usefixtures("_small_budget")
@threats
def test_three_classes_are_attacked_by_targeted_cross_entropy_and_not_called_standard(threat, monkeypatch):
    def undefined(self, x, y):
        raise AssertionError("the targeted DLR loss needs four classes")

    monkeypatch.setattr(APGDAttack_targeted, "dlr_loss_targeted", undefined)
    net, (x, y) = three_classes(), learnable(8)
    radius = type(threat)({"linf": 0.3, "l2": 0.8, "l1": 2.0}[threat.name])
    found = evaluate(net, (x, y), threat=radius, attacks=["natural", "apgd-t", "aa"], sanity=False)
    told = found.settings["attacks"]["aa"]
    assert told == {
        "parts": list(AUTOATTACK_PARTS),
        "targets": {"apgd-t": 2, "fab-t": 2},
        "targeted_loss": "ce",
        "standard": False,
    }
    assert found.accuracy["natural"] == 1
    assert found.accuracy["apgd-t"] < 1
    assert found.accuracy["aa"] <= found.accuracy["apgd-t"]
    assert found.flags == []


@pytest.mark.usefixtures("_small_budget")
@threats
def test_two_classes_work(threat):
    net = Around(three_classes(), lambda x: x, lambda logits: logits[:, :2])
    x, y = (part[learnable(12)[1] < 2] for part in learnable(12))
    radius = type(threat)({"linf": 0.35, "l2": 1.0, "l1": 3.0}[threat.name])
    found = evaluate(net, (x, y), threat=radius, attacks=["natural", "aa"], sanity=False)
    told = found.settings["attacks"]["aa"]
    assert (told["targets"], told["standard"]) == ({"apgd-t": 1, "fab-t": 1}, False)
    assert found.accuracy["aa"] < found.accuracy["natural"]
    assert found.flags == []


def test_the_record_counts_the_network_s_classes_not_those_that_the_images_show():
    x, y = digits(40)
    found = evaluate(tiny(), (x[y < 2], y[y < 2]), threat=deat.Linf(0.5), attacks=["aa"], n=2, sanity=False)
    assert found.settings["attacks"]["aa"]["targeted_loss"] == "dlr"
    assert found.settings["attacks"]["aa"]["standard"] is True


@pytest.mark.parametrize(("classes", "loss"), [(2, "ce"), (3, "ce"), (4, "dlr"), (10, "dlr"), (1000, "dlr")])
def test_standard_needs_four_classes_and_never_more_targets_than_wrong_ones(classes, loss):
    told = AutoAttack().describe(deat.Linf(0.1), classes)
    assert (told["targeted_loss"], told["standard"]) == (loss, loss == "dlr")
    assert told["targets"] == {"apgd-t": min(9, classes - 1), "fab-t": min(9, classes - 1)}


@pytest.mark.usefixtures("_small_budget")
def test_aa_says_nothing_and_leaves_generators_gradients_and_tracing_alone(caplog, capfd):
    def trace(frame, event, arg):
        return None

    net, traced = tiny().train(), sys.gettrace()
    net[1].weight.requires_grad_(False)
    torch.manual_seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    learning = [p.requires_grad for p in net.parameters()]
    caplog.set_level(logging.DEBUG)
    sys.settrace(trace)
    try:
        evaluate(net, digits(6), threat=deat.Linf(0.05), attacks=["aa"], sanity=False)
        kept = sys.gettrace()
    finally:
        sys.settrace(traced)
    assert kept is trace
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("auto-attack").level == logging.NOTSET
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert all(p.grad is None for p in net.parameters())
    assert [p.requires_grad for p in net.parameters()] == learning
    assert all(m.training for m in net.modules())


@pytest.mark.usefixtures("_small_budget")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_aa_s_parts_work_where_gradients_are_off(mode):
    net, (x, y), chosen = tiny(), digits(6), ["apgd-ce", "fab-t"]
    plain = evaluate(net, (x, y), threat=deat.Linf(0.15), attacks=chosen, sanity=False)
    with mode():
        inside = evaluate(net, (x + 0, y + 0), threat=deat.Linf(0.15), attacks=chosen, sanity=False)
    assert inside.verdicts == plain.verdicts


class Startled(nn.Module):
    """A network that gives its images class 0, and any that was moved class 1."""

    def __init__(self, x):
        super().__init__()
        self.register_buffer("x", x.flatten(1))

    def forward(self, x):
        moved = (x.flatten(1)[:, None] - self.x).abs().amax(2).amin(1) > 1e-6
        return nn.functional.one_hot(moved.long(), 10).float()


@threats
def test_what_rounding_leaves_outside_the_ball_is_pulled_back_into_it(threat, monkeypatch):
    def round_out(x, y, batch_size):
        signs = torch.where(x < 0.5, 1.0, -1.0)
        return x + (1 + 1e-5) * threat.eps / threat.norm(signs).view(-1, 1, 1, 1) * signs, y

    adversary = SimpleNamespace(run_standard_evaluation=round_out)
    monkeypatch.setattr(autoattack, "build_adversary", lambda *_: adversary)
    x, y = digits(8)[0], torch.zeros(8, dtype=torch.int64)
    assert not threat.contains(x, round_out(x, y, 8)[0]).any()
    assert threat.contains(x, AutoAttack()(Startled(x), x, y, threat)).all()
    found = evaluate(Startled(x), (x, y), threat=threat, attacks=["aa"], sanity=False)
    assert (found.accuracy["aa"], found.flags) == (0, [])


def test_the_seed_and_the_block_decide_what_aa_draws():
    seeds = {derive_block_seed(seed, "aa", block) for seed in range(10) for block in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_block_seed(0, "aa", 0) != derive_block_seed(0, "square", 0)


def test_without_the_package_a_person_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(UsageError, match="pip install pyautoattack"):
        evaluate(tiny(), digits(4), threat=deat.Linf(0.1), attacks=["aa"], sanity=False)
