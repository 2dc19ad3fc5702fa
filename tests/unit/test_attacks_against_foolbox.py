"""FGSM and PGD agree with foolbox, image by image, on one fixed network."""

import warnings

import pytest
import torch

import deat
from deat.evaluation.attacks import Attack, correct_under_attack, parse_attack
from deat.evaluation.evaluator import evaluate
from helpers.eval_nets import Around, digits, robust, undefended

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its imports of SciPy are old
    foolbox = pytest.importorskip("foolbox", reason="needs foolbox")

nets = pytest.mark.parametrize("build", [robust, undefended], ids=["robust", "undefended"])
radii = pytest.mark.parametrize("eps", [0.03, 0.15])


def correctly_classified(net, n=150):
    """Images that the network classifies correctly."""
    x, y = digits(n)
    right = net(x).argmax(1) == y
    return x[right], y[right]


def run_foolbox(attack, net, x, y, eps):
    """(adversarial images, still correct) by foolbox."""
    adv, _, fooled = attack(foolbox.PyTorchModel(net, bounds=(0, 1), device="cpu"), x, y, epsilons=eps)
    return adv, ~fooled


@nets
@radii
def test_fgsm_equals_foolbox_image_by_image(build, eps):
    net = build()
    x, y = correctly_classified(net)
    theirs, correct = run_foolbox(foolbox.attacks.LinfFastGradientAttack(), net, x, y, eps)
    ours = parse_attack("fgsm")(net, x, y, deat.Linf(eps))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    evaluation = evaluate(net, (x, y), threat=deat.Linf(eps), attacks=["fgsm"], sanity=False)
    assert evaluation.verdicts["fgsm"] == correct.tolist()
    assert 0 < correct.sum() < len(y)


@nets
@radii
@pytest.mark.parametrize("steps", [1, 20])
def test_pgd_without_freezing_equals_foolbox_image_by_image(build, eps, steps):
    net = Around(
        build().double(), lambda x: x.double(), lambda logits: logits
    ).eval()  # so that rounding changes no sign
    x, y = correctly_classified(net)
    attack = foolbox.attacks.LinfProjectedGradientDescentAttack(steps=steps, abs_stepsize=eps / 4, random_start=False)
    theirs, correct = run_foolbox(attack, net, x, y, eps)
    plain = Attack("pgd", steps=steps, start="zero", freeze=False)
    torch.testing.assert_close(plain(net, x, y, deat.Linf(eps)), theirs, rtol=0, atol=1e-5)
    evaluation = evaluate(net, (x, y), threat=deat.Linf(eps), attacks=[plain], sanity=False)
    assert evaluation.verdicts["pgd"] == correct.tolist()


@pytest.mark.parametrize("norm", ["l2", "l1"])
@nets
def test_pgd_is_about_as_strong_as_foolbox_in_l2_and_at_least_as_strong_in_l1(build, norm):
    net, eps = build(), {"l2": 0.6, "l1": 2.0}[norm]
    x, y = correctly_classified(net)
    kind = {
        "l2": foolbox.attacks.L2ProjectedGradientDescentAttack,
        "l1": foolbox.attacks.SparseL1DescentAttack,
    }[norm]
    _, correct = run_foolbox(kind(steps=20, abs_stepsize=eps / 4, random_start=False), net, x, y, eps)
    ours = correct_under_attack(
        net, x, y, Attack("pgd", steps=20, start="zero", freeze=False), deat.threat.parse_threat(f"{norm}:{eps}")
    )
    assert ours.double().mean() <= correct.double().mean() + 0.03


@nets
@radii
def test_pgd_that_freezes_fools_every_image_that_plain_pgd_fools(build, eps):
    net = build()
    x, y = correctly_classified(net)
    frozen, plain = (
        correct_under_attack(net, x, y, Attack("pgd", steps=20, start="zero", freeze=freeze), deat.Linf(eps))
        for freeze in (True, False)
    )
    assert not (frozen & ~plain).any()
