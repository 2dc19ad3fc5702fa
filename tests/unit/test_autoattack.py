"""AutoAttack gives the verdicts of the reference implementation, block by block, and leaves global state unchanged."""

import json
import logging
import random
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pyautoattack
import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_projections import projection_l1, projection_l2, projection_linf
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import nn

import deat
from deat.evaluation import attacks, auto_pgd, autoattack, square_attack
from deat.evaluation.attack_registry import get_attack
from deat.evaluation.attack_verifier import derive_block_seed
from deat.evaluation.attacks import AUTOATTACK_PARTS
from deat.evaluation.autoattack import AutoAttack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.fast_adaptive_boundary import FastAdaptiveBoundary
from deat.evaluation.nearest_hyperplane import step_to_hyperplane
from deat.evaluation.square_attack import Square
from helpers.eval_nets import Around, digits, quantised, tiny
from helpers.games import trainer_of
from helpers.nets import conv_net, learnable

NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
RADII = [deat.Linf(0.15), deat.L2(0.6), deat.L1(1.0)]
threats = pytest.mark.parametrize("threat", RADII, ids=lambda t: t.name)


BUDGETS = {
    APGDAttack: {"n_iter": 30, "n_iter_orig": 30},
    APGDAttack_targeted: {"n_iter": 30, "n_iter_orig": 30},
    FABAttack_PT: {"n_iter": 5},
    SquareAttack: {"n_queries": 75},
}
OWN_BUDGETS = {"apgd-ce": {"steps": 30}, "apgd-t": {"steps": 30}, "fab-t": {"steps": 5}, "square": {"queries": 75}}


@pytest.fixture
def _small_budget(monkeypatch):
    """The parts with a small budget, the reference's and deat's own, since their full one takes seconds."""
    for kind, budget in BUDGETS.items():

        def perturb(self, *args, real=kind.perturb, budget=budget):
            vars(self).update(budget)
            return real(self, *args)

        monkeypatch.setattr(kind, "perturb", perturb)
    real_part = autoattack.standard_part
    monkeypatch.setattr(
        autoattack, "standard_part", lambda name, threat: replace(real_part(name, threat), **OWN_BUDGETS[name])
    )


def run_reference(net, x, y, threat, name, *, seed, block):
    """(adversarial images, still correct) by the reference implementation called directly, block by block."""
    blocks = []
    for number, first in enumerate(range(0, len(y), block)):
        options = {"eps": threat.eps, "norm": NORMS[threat.name], "seed": derive_block_seed(seed, name, number)}
        adversary = pyautoattack.AutoAttack(net, version="standard", **options)
        if name != "aa":
            adversary.attacks_to_run = [name]
        images, labels = x[first : first + block], y[first : first + block]
        trace = sys.gettrace()
        blocks.append(adversary.run_standard_evaluation(images, labels, batch_size=block)[0])
        sys.settrace(trace)  # which the reference ends
    adv = torch.cat(blocks)
    return adv, net(adv).argmax(1) == y


def images_with_a_misclassified_one(net, n):
    """Test images, the second of which is misclassified."""
    x, y = digits(n)
    y[1] = (net(x[1:2]).argmax(1) + 1) % 10
    return x, y


def test_aa_equals_the_reference_called_directly():
    net, threat = tiny(), RADII[0]
    x, y = images_with_a_misclassified_one(net, 8)
    _, correct = run_reference(net, x, y, threat, "aa", seed=5, block=8)
    evaluation = evaluate(net, (x, y), threat=threat, attacks=["aa"], seed=5, block=8, sanity=False)
    assert evaluation.verdicts["aa"] == correct.tolist()
    assert 0 < correct.sum() < 7
    assert evaluation.flags == []
    assert evaluation.settings["attacks"]["aa"] == {
        "implementation": "deat",
        "parts": list(AUTOATTACK_PARTS),
        "targets": {"apgd-t": 9, "fab-t": 9},
        "targeted_loss": "dlr",
        "standard": True,
    }


@pytest.mark.usefixtures("_small_budget")
@threats
def test_aa_equals_the_reference_on_the_same_blocks_in_every_norm(threat):
    net = tiny()
    x, y = images_with_a_misclassified_one(net, 10)
    _, correct = run_reference(net, x, y, threat, "aa", seed=1, block=6)
    evaluation = evaluate(net, (x, y), threat=threat, attacks=["aa"], seed=1, block=6, sanity=False)
    assert evaluation.verdicts["aa"] == correct.tolist()
    assert 0 < correct.sum() < 9
    assert evaluation.flags == []
    assert evaluation.settings["attacks"]["aa"]["targets"] == {"apgd-t": 5 if threat.name == "l1" else 9, "fab-t": 9}


@pytest.mark.usefixtures("_small_budget")
@threats
@pytest.mark.parametrize("name", AUTOATTACK_PARTS)
def test_each_part_alone_equals_the_reference_image_by_image(name, threat):
    net, (x, y) = tiny(), digits(6)
    _, correct = run_reference(net, x, y, threat, name, seed=2, block=6)
    generator = torch.Generator().manual_seed(derive_block_seed(2, name, 0))
    adv = AutoAttack(name, (name,))(net, x, y, threat, generator)
    assert torch.equal(net(adv).argmax(1) == y, correct)
    assert torch.equal(adv[correct], x[correct])
    assert threat.contains(x, adv).all()
    evaluation = evaluate(net, (x, y), threat=threat, attacks=[name], seed=2, block=6, sanity=False)
    assert evaluation.verdicts[name] == correct.tolist()
    assert evaluation.flags == []
    assert evaluation.settings["attacks"][name]["parts"] == [name]
    assert evaluation.settings["attacks"][name]["standard"] is False


@pytest.mark.usefixtures("_small_budget")
def test_aa_is_at_least_as_strong_as_its_first_part_and_counts_its_passes():
    evaluation = evaluate(tiny(), digits(12), threat=deat.Linf(0.2), attacks=["natural", "apgd-ce", "aa"], sanity=False)
    assert evaluation.accuracy["aa"] <= evaluation.accuracy["apgd-ce"] <= evaluation.accuracy["natural"]
    part, whole = evaluation.results[1:]
    assert part.forwards > part.backwards > 0
    assert whole.forwards > part.forwards
    assert whole.backwards > part.backwards


@pytest.mark.usefixtures("_small_budget")
def test_the_result_counts_the_images_that_each_part_fooled(tmp_path):
    net, data = tiny(), digits(30)
    options = {"threat": deat.Linf(0.15), "attacks": ["natural", "apgd-ce", "aa"], "sanity": False, "block": 12}
    evaluation = evaluate(net, data, save=tmp_path / "evaluation.json", **options)
    natural, part, whole = evaluation.results
    assert list(whole.num_fooled_by_stage) == list(AUTOATTACK_PARTS)
    assert sum(whole.num_fooled_by_stage.values()) == sum(natural.correct) - sum(whole.correct)
    assert whole.num_fooled_by_stage["apgd-ce"] > 0
    assert natural.num_fooled_by_stage == part.num_fooled_by_stage == {}
    data = json.loads((tmp_path / "evaluation.json").read_text())
    assert data["attacks"][2]["felled"] == whole.num_fooled_by_stage
    assert deat.load_evaluation(tmp_path / "evaluation.json") == evaluation


@pytest.mark.usefixtures("_small_budget")
@pytest.mark.parametrize(("left", "cascade"), [(1, False), (3, True), (6, False)])
def test_an_interruption_loses_one_part_of_one_block_at_most(left, cascade, tmp_path, monkeypatch):
    net, data, parts_run = tiny(), digits(12), []
    options = {"threat": deat.Linf(0.1), "attacks": ["natural", "pgd-1", "aa"], "block": 6, "sanity": False}
    whole = evaluate(net, data, cascade=cascade, **options)
    real = autoattack._run_part

    def interrupted(model, x, y, threat, part, seed):
        parts_run.append(part)
        if len(parts_run) == left + 1:
            raise KeyboardInterrupt
        return real(model, x, y, threat, part, seed)

    monkeypatch.setattr(autoattack, "_run_part", interrupted)
    log = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(net, data, cascade=cascade, resume_log=log, **options)
    evaluation = evaluate(net, data, cascade=cascade, resume_log=log, **options)
    parts = [*AUTOATTACK_PARTS, *AUTOATTACK_PARTS]
    assert parts_run == [*parts[: left + 1], *parts[left:]]
    assert evaluation.verdicts == whole.verdicts
    assert [(r.num_fooled_by_stage, r.forwards, r.backwards, r.invalid) for r in evaluation.results] == [
        (r.num_fooled_by_stage, r.forwards, r.backwards, r.invalid) for r in whole.results
    ]
    assert sum(whole.verdicts["aa"]) > 2


@pytest.mark.usefixtures("_small_budget")
def test_a_network_that_only_square_fools_is_flagged_without_other_attacks():
    evaluation = evaluate(quantised(tiny()), digits(40), threat=deat.Linf(0.25), attacks=["aa"], sanity=False)
    assert evaluation.results[0].num_fooled_by_stage["square"] > 2
    assert [flag.name for flag in evaluation.flags] == ["black_box_wins"]


@cache
def three_classes() -> nn.Module:
    return trainer_of("natural", conv_net(seed=2), data=learnable(60), epochs=25).fit().model


@pytest.mark.usefixtures("_small_budget")
@threats
def test_three_classes_are_attacked_by_targeted_cross_entropy_and_not_called_standard(threat, monkeypatch):
    def undefined(logits, y, target):
        raise AssertionError("the targeted DLR loss needs four classes")

    monkeypatch.setattr(auto_pgd, "_targeted_dlr_loss", undefined)
    net, (x, y) = three_classes(), learnable(8)
    threat = type(threat)({"linf": 0.3, "l2": 0.8, "l1": 2.0}[threat.name])
    evaluation = evaluate(net, (x, y), threat=threat, attacks=["natural", "apgd-t", "aa"], sanity=False)
    settings = evaluation.settings["attacks"]["aa"]
    assert settings == {
        "implementation": "deat",
        "parts": list(AUTOATTACK_PARTS),
        "targets": {"apgd-t": 2, "fab-t": 2},
        "targeted_loss": "ce",
        "standard": False,
    }
    assert evaluation.accuracy["natural"] == 1
    assert evaluation.accuracy["apgd-t"] < 1
    assert evaluation.accuracy["aa"] <= evaluation.accuracy["apgd-t"]
    assert evaluation.flags == []


@pytest.mark.usefixtures("_small_budget")
@threats
def test_two_classes_work(threat):
    net = Around(three_classes(), lambda x: x, lambda logits: logits[:, :2])
    x, y = (part[learnable(12)[1] < 2] for part in learnable(12))
    threat = type(threat)({"linf": 0.35, "l2": 1.0, "l1": 3.0}[threat.name])
    evaluation = evaluate(net, (x, y), threat=threat, attacks=["natural", "aa"], sanity=False)
    settings = evaluation.settings["attacks"]["aa"]
    assert (settings["targets"], settings["standard"]) == ({"apgd-t": 1, "fab-t": 1}, False)
    assert evaluation.accuracy["aa"] < evaluation.accuracy["natural"]
    assert evaluation.flags == []


def test_the_settings_depend_on_the_network_s_classes_not_on_those_of_the_images():
    x, y = digits(40)
    evaluation = evaluate(tiny(), (x[y < 2], y[y < 2]), threat=deat.Linf(0.5), attacks=["aa"], n=2, sanity=False)
    assert evaluation.settings["attacks"]["aa"]["targeted_loss"] == "dlr"
    assert evaluation.settings["attacks"]["aa"]["standard"] is True


@pytest.mark.parametrize(("classes", "loss"), [(2, "ce"), (3, "ce"), (4, "dlr"), (10, "dlr"), (1000, "dlr")])
def test_standard_needs_four_classes_and_targets_are_at_most_the_wrong_classes(classes, loss):
    settings = AutoAttack().describe(deat.Linf(0.1), classes)
    assert (settings["targeted_loss"], settings["standard"]) == (loss, loss == "dlr")
    assert settings["targets"] == {"apgd-t": min(9, classes - 1), "fab-t": min(9, classes - 1)}


@pytest.mark.usefixtures("_small_budget")
def test_aa_prints_nothing_and_leaves_generators_gradients_and_tracing_unchanged(caplog, capfd):
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
        trace_after = sys.gettrace()
    finally:
        sys.settrace(traced)
    assert trace_after is trace
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
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


class MovementDetector(nn.Module):
    """A network that gives the original images class 0 and perturbed ones class 1."""

    def __init__(self, x):
        super().__init__()
        self.register_buffer("x", x.flatten(1))

    def forward(self, x):
        moved = (x.flatten(1)[:, None] - self.x).abs().amax(2).amin(1) > 1e-6
        return nn.functional.one_hot(moved.long(), 10).float()


@threats
def test_examples_that_rounding_puts_outside_the_ball_are_projected_into_it(threat, monkeypatch):
    def round_out(model, x, y, threat, draws):
        signs = torch.where(x < 0.5, 1.0, -1.0)
        return x + (1 + 1e-5) * threat.eps / threat.norm(signs).view(-1, 1, 1, 1) * signs

    monkeypatch.setattr(autoattack, "standard_part", lambda *_: round_out)
    x, y = digits(8)[0], torch.zeros(8, dtype=torch.int64)
    assert not threat.contains(x, round_out(None, x, y, threat, None)).any()
    assert threat.contains(x, AutoAttack()(MovementDetector(x), x, y, threat)).all()
    evaluation = evaluate(MovementDetector(x), (x, y), threat=threat, attacks=["aa"], sanity=False)
    assert (evaluation.accuracy["aa"], evaluation.flags) == (0, [])


def test_every_seed_block_and_attack_has_its_own_seed():
    seeds = {derive_block_seed(seed, "aa", block) for seed in range(10) for block in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_block_seed(0, "aa", 0) != derive_block_seed(0, "square", 0)


@pytest.mark.parametrize("project", [projection_linf, projection_l2, projection_l1])
def test_the_step_to_a_hyperplane_is_the_reference_s(project):
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(40, 30, generator=generator).round(decimals=1)  # some in the corners of the box
    normal = torch.randn(40, 30, generator=generator)
    offset = (normal * points).sum(1) + 4 * torch.randn(40, generator=generator)  # some out of the box's reach
    steps = step_to_hyperplane(points, normal, offset, project.__name__.removeprefix("projection_"))
    torch.testing.assert_close(steps, project(points, normal, offset), rtol=1e-3, atol=1e-5)
    assert ((points + steps).clamp(0, 1) - points - steps).abs().max() < 1e-6


@pytest.mark.usefixtures("_small_budget")
def test_an_evaluation_says_which_implementation_it_is_by_and_one_of_another_is_not_replaced(tmp_path):
    file, data = tmp_path / "evaluation.json", digits(6)
    evaluation = evaluate(tiny(), data, threat=deat.Linf(0.1), attacks=["aa"], sanity=False)
    older = {name: value for name, value in evaluation.settings["attacks"]["aa"].items() if name != "implementation"}
    replace(evaluation, settings={**evaluation.settings, "attacks": {"aa": older}}).save(file)
    assert deat.load_evaluation(file).verdicts == evaluation.verdicts
    evaluation.save(file)
    assert deat.load_evaluation(file) == evaluation
    assert (tmp_path / "evaluation-1.json").exists()


@pytest.mark.parametrize("name", ["autoattack", "AutoAttack", "auto-attack", " AA "])
def test_autoattack_may_be_written_out(name):
    assert get_attack(name) == AutoAttack()
    assert get_attack(name).name == "aa"


@pytest.mark.parametrize("part", [FastAdaptiveBoundary(steps=4), Square(queries=150)], ids=["fab-t", "square"])
def test_several_queries_of_an_image_in_a_batch_find_what_one_at_a_time_finds(part, monkeypatch):
    net, threat = tiny().double(), deat.Linf(0.18)
    net.block_images = 60
    x, y = digits(12)
    x, sizes = x.double(), []
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))

    def find(full_batch):
        sizes.clear()
        monkeypatch.setattr(attacks, "FULL_BATCH", full_batch)
        return part(net, x, y, threat, torch.Generator().manual_seed(1)), list(sizes)

    found, batches = find(128)
    one_at_a_time, small_batches = find(1)
    torch.testing.assert_close(found, one_at_a_time, rtol=0, atol=1e-9)
    fooled = net(found).argmax(1) != y
    assert 0 < fooled.sum() < len(y)
    assert len(batches) < 0.7 * len(small_batches)
    assert max(small_batches) == len(x) < max(batches) <= 60, "a batch never has more images than a block"


def test_square_looks_further_ahead_than_it_draws_at_once(monkeypatch):
    monkeypatch.setattr(square_attack, "DRAWN_AT_ONCE", 8)
    net, (x, y) = tiny(), digits(1)
    net.block_images = 128
    y = net(x).argmax(1)
    sizes = []
    net.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    found = Square(queries=400)(net, x, y, deat.Linf(0.001), torch.Generator().manual_seed(0))
    assert deat.Linf(0.001).contains(x, found).all()
    assert sizes[0] == 1
    assert max(sizes) > 8
