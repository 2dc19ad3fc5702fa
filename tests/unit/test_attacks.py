"""FGSM, PGD-n and CW-n as the paper evaluates with them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.errors import UsageError
from deat.evaluation.attacks import Attack, compute_gradient, correct_under_attack, parse_attack
from deat.tasks.per_example_losses import cross_entropy, margin_loss
from helpers.games import THREATS, trainer_of
from helpers.nets import conv_net, images, learnable, same, weights

every_threat = pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
every_attack = pytest.mark.parametrize("name", ["natural", "fgsm", "pgd-5", "cw-5"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trained() -> nn.Module:
    """A naturally trained network that has learnt its task."""
    return trainer_of("natural", conv_net(seed=2), data=learnable(60), epochs=25).fit().model


@pytest.mark.parametrize(
    ("name", "steps", "alpha", "start", "loss"),
    [
        ("natural", 0, 0.25, "zero", "ce"),
        ("fgsm", 1, 1.0, "zero", "ce"),
        ("pgd-20", 20, 0.25, "uniform", "ce"),
        ("PGD-100", 100, 0.25, "uniform", "ce"),
        (" cw-20 ", 20, 0.25, "uniform", "margin"),
    ],
)
def test_names_parse_to_the_paper_s_settings(name, steps, alpha, start, loss):
    found = parse_attack(name)
    assert (found.name, found.steps, found.alpha) == (name.strip().lower(), steps, alpha)
    assert (found.start, found.loss, found.freeze) == (start, loss, True)


@pytest.mark.parametrize("name", ["pgd", "pgd-0", "pgd-x", "pdg-20", "cw20", "fgsm-3", "", "pgd--5", "pgd-20\ncw-20"])
def test_bad_names_are_refused_with_what_is_known(name):
    with pytest.raises(UsageError, match=r"cw-20, fgsm, natural, pgd-20.*any number of steps"):
        parse_attack(name)


def test_near_names_are_suggested_and_an_attack_is_itself():
    with pytest.raises(UsageError, match="Did you mean 'pgd-20'"):
        parse_attack("pdg-20")
    mine = Attack("mine", steps=3)
    assert parse_attack(mine) is mine


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "pgd-20", "steps": 3},
        {"name": "PGD-20 ", "steps": 3},
        {"name": "pgd-20", "steps": 20, "loss": "margin"},
        {"name": "cw-20", "steps": 20},
        {"name": "pgd-20x10", "steps": 20},
        {"name": "pgd-20-last", "steps": 20},
        {"name": "pgd-20", "steps": 20, "restarts": 2},
        {"name": "fgsm", "steps": 0},
        {"name": "natural", "steps": 5},
        {"name": "aa", "steps": 100},
        {"name": "square", "steps": 100},
        {"name": 20, "steps": 20},
    ],
)
def test_a_name_that_says_something_else_than_the_settings_is_refused(settings):
    with pytest.raises(UsageError, match="name"):
        Attack(**settings)


def test_a_name_may_repeat_the_settings():
    for name in ("natural", "fgsm", "pgd-20", "cw-7", "pgd-5x3", "pgd-5-last", "cw-5x2-last", "segpgd-3"):
        attack = parse_attack(name)
        assert replace(attack, alpha=0.1).name == name
    assert Attack("pgd-20", steps=20).steps == 20
    assert Attack("pgd-20 doubled", steps=40).steps == 40


@every_threat
@every_attack
def test_adversarial_images_are_in_ball_and_box_and_the_model_is_left_alone(name, threat):
    net, (x, y) = conv_net(batch_norm=True, dropout=0.3), images()
    net[1].eval()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    modes, copies = [m.training for m in net.modules()], (x.clone(), y.clone())
    adv = parse_attack(name)(net, x, y, threat, generator())
    assert threat.contains(x, adv).all()
    assert not adv.requires_grad
    assert torch.equal(adv, x) == (name == "natural")
    assert [m.training for m in net.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])


def test_modes_are_restored_when_the_network_fails():
    net = conv_net(batch_norm=True)
    net.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parse_attack("fgsm")(net, *images(), THREATS[0])
    assert all(m.training for m in net.modules())


@every_attack
def test_attacks_see_the_network_in_eval_mode(name):
    net, modes = conv_net(dropout=0.5), []
    net.register_forward_pre_hook(lambda m, i: modes.extend(k.training for k in m.modules()))
    correct_under_attack(net, *images(), parse_attack(name), THREATS[0], generator())
    assert modes
    assert not any(modes)


@every_attack
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attacks_work_where_gradients_are_off(name, mode):
    net, (x, y) = conv_net(), images()
    expected = parse_attack(name)(net, x, y, THREATS[0], generator())
    hits = correct_under_attack(net, x, y, parse_attack(name), THREATS[0], generator())
    with mode():
        inside = x + 0  # an inference tensor, where there are such
        assert torch.equal(parse_attack(name)(net, inside, y, THREATS[0], generator()), expected)
        assert torch.equal(correct_under_attack(net, inside, y, parse_attack(name), THREATS[0], generator()), hits)


def one_by_one(net: nn.Module, x: Tensor, y: Tensor, start: Tensor, how: Attack, threat, loss) -> Tensor:
    """The attack on each image alone, which stops as soon as the image is misclassified."""
    done = []
    for i in range(len(y)):
        image, label, delta = x[i : i + 1], y[i : i + 1], start[i : i + 1].clone()
        for _ in range(how.steps):
            delta.requires_grad_()
            logits = net(image + delta)
            if how.freeze and logits.argmax(1).item() != label.item():
                break
            (grad,) = torch.autograd.grad(loss(logits, label).sum(), delta)
            delta = threat.pgd_step(image, delta.detach(), grad, how.alpha * threat.eps)
        done.append((image + delta).detach())
    return torch.cat(done)


@every_threat
@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize(("kind", "loss"), [("ce", cross_entropy), ("margin", margin_loss)])
def test_attack_equals_a_loop_that_freezes_an_image_once_it_is_fooled(threat, freeze, kind, loss):
    net, (x, y) = conv_net(seed=1).double().eval(), images(16, seed=3)
    x, how = x.double(), Attack("mine", steps=6, alpha=0.3, loss=kind, freeze=freeze)
    start = threat.initial_delta(x, "uniform", generator())
    expected = one_by_one(net, x, y, start, how, threat, loss)
    torch.testing.assert_close(how(net, x, y, threat, generator()), expected, rtol=0, atol=1e-9)
    fooled = net(x + start).argmax(1) != y
    assert 0 < fooled.sum() < len(y)
    stayed = (expected == x + start).flatten(1).all(1)
    assert torch.equal(stayed, fooled & freeze)


def test_frozen_images_stay_fooled_so_that_the_worst_iterate_is_scored():
    net, (x, y) = conv_net(seed=1).eval(), images(64, seed=3)
    robust = {
        n: correct_under_attack(net, x, y, parse_attack(f"pgd-{n}"), THREATS[0], generator()) for n in (1, 2, 5, 10)
    }
    for few, many in ((1, 2), (2, 5), (5, 10)):
        assert not (robust[many] & ~robust[few]).any()
    assert robust[10].sum() < robust[1].sum()


def test_fgsm_is_one_step_of_eps_from_the_image_itself():
    net, (x, y) = conv_net().eval(), images()
    eps = 0.1
    point = x.clone().requires_grad_()
    logits = net(point)
    (grad,) = torch.autograd.grad(cross_entropy(logits, y).sum(), point)
    right = (logits.argmax(1) == y).view(-1, 1, 1, 1)
    expected = torch.where(right, (x + eps * grad.sign()).clamp(0, 1), x)
    assert right.any()
    torch.testing.assert_close(parse_attack("fgsm")(net, x, y, deat.Linf(eps)), expected, rtol=0, atol=1e-6)


def test_pgd_steps_by_a_quarter_of_eps():
    net, (x, y) = conv_net().double().eval(), images(24)
    threat, x = deat.Linf(0.1), 0.3 + 0.4 * x.double()  # far from the box
    one, two = (parse_attack(f"pgd-{n}")(net, x, y, threat, generator()) for n in (1, 2))
    moved = (two - one).abs()
    assert moved.max().item() == pytest.approx(0.025, rel=1e-9)


def test_undefended_network_falls():
    net, (x, y) = trained(), learnable(60)
    threat = deat.Linf(0.35)
    accuracy = {
        name: correct_under_attack(net, x, y, parse_attack(name), threat, generator()).double().mean().item()
        for name in ("natural", "fgsm", "pgd-20", "cw-20")
    }
    assert accuracy["natural"] > 0.95
    assert accuracy["pgd-20"] <= 0.05
    assert accuracy["cw-20"] <= 0.05
    assert accuracy["fgsm"] < accuracy["natural"]


@every_attack
def test_nan_is_no_answer_not_even_the_class_that_argmax_names(name):
    net, (x, _) = conv_net(), images()
    net[-1].bias.data.fill_(torch.nan)
    first = torch.zeros(len(x), dtype=torch.int64)  # what argmax gives for a row of NaN
    assert not correct_under_attack(net, x, first, parse_attack(name), THREATS[0]).any()
    found = deat.evaluate(net, (x, first), threat=THREATS[0], attacks=[name])
    assert set(found.accuracy.values()) == {0.0}
    assert [flag.name for flag in found.flags] == ["not_finite"]


def test_radius_zero_changes_nothing():
    net, (x, y) = trained(), learnable(60)
    natural = correct_under_attack(net, x, y, parse_attack("natural"), deat.Linf(0.0), generator())
    assert torch.equal(correct_under_attack(net, x, y, parse_attack("pgd-5"), deat.Linf(0.0), generator()), natural)


def test_verdict_does_not_depend_on_the_batch():
    net, (x, y) = conv_net(batch_norm=True, seed=1).double(), images(12, seed=3)
    how = Attack("from zero", steps=5, start="zero")
    whole = correct_under_attack(net, x.double(), y, how, THREATS[0])
    parts = [correct_under_attack(net, x[i : i + 5].double(), y[i : i + 5], how, THREATS[0]) for i in (0, 5, 10)]
    assert torch.equal(whole, torch.cat(parts))


def test_attack_that_cheats_counts_as_no_attack():
    class Cheat(Attack):
        def __call__(self, model, x, y, threat, generator=None):
            return torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) % 2 == 0, 1 - x, x * float("nan"))

    net, (x, y) = trained(), learnable(60)
    threat = deat.Linf(0.05)
    natural = correct_under_attack(net, x, y, parse_attack("natural"), threat)
    assert torch.equal(correct_under_attack(net, x, y, Cheat("cheat", steps=1), threat), natural)


def test_same_generator_gives_the_same_images_and_another_does_not():
    net, (x, y) = conv_net(), images()
    first, again, other = (parse_attack("pgd-3")(net, x, y, THREATS[0], generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert same(weights(net), weights(conv_net()))


def test_a_gradient_may_be_along_a_slope_and_is_zero_where_none_gets_through():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert compute_gradient((x**2).sum(), x).tolist() == [2.0, 4.0]
    assert compute_gradient(x**2, x, torch.tensor([1.0, -0.5])).tolist() == [2.0, -2.0]
    for closed in (x.detach() ** 2, torch.ones(2, requires_grad=True) * 1.0):
        assert compute_gradient(closed, x, torch.ones(2)).tolist() == [0.0, 0.0]
