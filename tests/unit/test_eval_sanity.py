"""Flags on models and attacks that deserve each, and none on honest ones."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pyautoattack.square import SquareAttack
from torch import Tensor, nn

import deat
from deat.errors import DataError
from deat.evaluation.attacks import Attack
from deat.evaluation.blocks import sample_indices
from deat.evaluation.evaluator import DEFAULT_ATTACKS, evaluate
from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import FLAG_ADVICE, Flag, accuracy_tolerance, check_consistency
from deat.evaluation.sanity.flags import DOCS_PAGE
from helpers.eval_attackers import Own
from helpers.eval_nets import (
    EPS,
    THREAT,
    Around,
    Purifying,
    Remembering,
    Stuck,
    backwards,
    convolutional,
    digits,
    dropping,
    masked,
    nowhere,
    quantised,
    robust,
    same,
    saturated,
    scaled,
    softmax,
    true_at_data_only,
    undefended,
)
from helpers.nets import Items, seeded

nets = pytest.mark.parametrize("build", [robust, undefended], ids=["robust", "undefended"])


@pytest.fixture
def _few_queries(monkeypatch):
    """Square with a small budget: its full one takes seconds."""
    real = SquareAttack.perturb

    def perturb(self, *args):
        self.n_queries = 100
        return real(self, *args)

    monkeypatch.setattr(SquareAttack, "perturb", perturb)


def flags(net, attacks=DEFAULT_ATTACKS, *, n=50, threat=THREAT, **options) -> set[str]:
    return {flag.name for flag in evaluate(net, digits(n), threat=threat, attacks=attacks, **options).flags}


def stuck() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    return Stuck(*layers)


def batch_normed(net: nn.Module) -> nn.Module:
    """A network that standardises by the statistics of the batch that it is shown, in eval mode too."""
    return nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), net)


def by_backward(loss: Tensor, inputs: Tensor) -> tuple[Tensor]:
    loss.backward(inputs=[inputs])
    assert inputs.grad is not None
    return (inputs.grad,)


@nets
@pytest.mark.parametrize("threat", ["linf:0.15", "l2:0.5", "l1:2"])
def test_an_honest_model_raises_no_flag(build, threat):
    assert flags(build(), ["natural", "fgsm", "pgd-20", "cw-20"], n=130, threat=threat) == set()


def test_an_honest_network_of_convolutions_raises_no_flag():
    assert flags(convolutional(), n=130) == set()


@nets
@pytest.mark.parametrize("threat", ["linf:0.25", "l2:1", "l1:4"])
def test_an_honest_model_raises_no_flag_at_a_radius_that_few_images_withstand(build, threat):
    assert flags(build(), threat=threat) == set()


@nets
@pytest.mark.parametrize(
    "chosen", [["natural"], ["fgsm"], ["natural", "pgd-20"], ["cw-20"], ["pgd-20x2", "pgd-20-last"]]
)
def test_an_honest_model_raises_no_flag_whatever_the_list(build, chosen):
    assert flags(build(), chosen) == set()


@nets
@pytest.mark.parametrize("n", [1, 8, 20])
def test_an_honest_model_raises_no_flag_on_a_few_images(build, n):
    assert flags(build(), n=n) == set()


@nets
@pytest.mark.parametrize("options", [{"cascade": True}, {"block": 16}, {"seed": 7}], ids=str)
def test_an_honest_model_raises_no_flag_in_a_cascade_in_small_blocks_or_by_another_seed(build, options):
    assert flags(build(), **options) == set()


@pytest.mark.usefixtures("_few_queries")
@nets
def test_an_honest_model_raises_no_flag_beside_a_black_box_attack(build):
    assert flags(build(), ["natural", "pgd-20", "square"], n=40) == set()


@pytest.mark.usefixtures("_few_queries")
def test_a_black_box_attack_that_beats_one_step_only_accuses_nobody():
    assert flags(undefended(), [Attack("tiny step", steps=1, alpha=0.01), "square"], n=40) == set()


@nets
def test_an_honest_model_raises_no_flag_at_radii_without_room_to_grow(build):
    assert flags(build(), threat=deat.Linf(0.6)) == set()
    assert flags(build(), threat=deat.Linf(0.0)) == set()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: quantised(robust()), {"zero_gradients", "robust_to_anything"}),
        (lambda: quantised(undefended()), {"zero_gradients", "robust_to_anything"}),
        (lambda: scaled(robust()), {"zero_gradients", "robust_to_anything"}),
        (lambda: scaled(undefended()), {"zero_gradients", "robust_to_anything"}),
        (lambda: saturated(robust()), {"zero_gradients", "robust_to_anything"}),
        (lambda: saturated(undefended()), {"zero_gradients", "robust_to_anything"}),
        (lambda: softmax(robust()), {"probabilities"}),
        (lambda: softmax(undefended()), {"probabilities"}),
        (lambda: seeded(stuck), {"training_mode", "at_chance"}),
        (lambda: batch_normed(robust()), {"batch_dependent"}),
        (lambda: Around(robust(), lambda x: x / 255, same), {"at_chance"}),
        (lambda: Purifying(robust()), {"autograd_inside"}),
        (lambda: Purifying(robust(), by_backward), {"autograd_inside"}),
        (lambda: masked(robust(), nowhere), {"robust_to_anything"}),
        (lambda: masked(undefended(), true_at_data_only), {"one_step_wins", "robust_to_anything"}),
        (lambda: Remembering(undefended(), *digits(100), 1.2 * EPS), {"not_monotone", "robust_to_anything"}),
    ],
    ids=[
        "quantiser, robust",
        "quantiser, undefended",
        "logits times 10000, robust",
        "logits times 10000, undefended",
        "saturated sigmoid, robust",
        "saturated sigmoid, undefended",
        "softmax, robust",
        "softmax, undefended",
        "stuck in training mode",
        "batch norm of the batch",
        "another input range",
        "autograd inside",
        "autograd inside, by backward()",
        "gradients that tell nothing",
        "gradients at data only",
        "looks far images up",
    ],
)
def test_a_model_that_deserves_a_flag_gets_it_and_no_other(build, expected):
    assert flags(build()) == expected


@nets
def test_dropout_left_on_is_flagged_as_randomised(build):
    assert "randomised" in flags(dropping(build()))


def test_weights_that_are_not_finite_are_called_that_and_not_randomised():
    net = robust()
    next(net.parameters()).data.fill_(float("nan"))
    found = flags(net)
    assert "not_finite" in found
    assert not found & {"randomised", "zero_gradients", "probabilities"}


def test_one_answer_for_all_is_no_wonder_where_most_images_are_of_one_class():
    x, y = digits(130)
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))
    net[1].bias.data = torch.tensor([9.0, -9.0])
    found = evaluate(net, (x, (y == 8).long()), threat=THREAT)
    assert found.worst == found.accuracy["natural"] > 0.85
    assert found.flags == []


def test_a_sorted_set_hides_no_model_that_is_robust_to_anything():
    x, y = (part.repeat(4, *[1] * (part.dim() - 1)) for part in digits(400))
    order = y.argsort(stable=True)
    assert y[order][:128].tolist() == 128 * [0]
    found = evaluate(masked(robust(), nowhere), (x[order], y[order]), threat=THREAT, attacks=["natural"])
    assert "robust_to_anything" in {flag.name for flag in found.flags}


FORMS = {
    "tensors": lambda x, y: (x, y),
    "items": Items,
    "loader": lambda x, y: list(zip(x.split(64), y.split(64), strict=True)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_one_answer_for_all_is_at_chance_however_the_set_is_sorted(form, order):
    x, y = digits(400)[0], torch.arange(400) // 100
    mixed = torch.randperm(400, generator=torch.Generator().manual_seed(0)) if order == "mixed" else torch.arange(400)
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    net[1].bias.data = torch.tensor([9.0, 0, 0, 0])
    found = evaluate(net, form(x[mixed], y[mixed]), threat=THREAT, attacks=["natural", "pgd-5"])
    assert found.accuracy["natural"] == 0.25
    assert [flag.name for flag in found.flags] == ["at_chance"]


@pytest.mark.parametrize("images", [1, 128, 129, 200, 1280, 10_000])
def test_checks_look_all_over_the_images_that_are_judged_and_always_at_the_same(images):
    found = sample_indices(images, 128)
    assert len(found) == min(128, images)
    assert (found.diff() > 0).all()
    assert found[0] <= images / 128
    assert found[-1] >= images - 1 - images / 128
    assert torch.equal(found, sample_indices(images, 128))
    assert len(set((found % 10).tolist())) == min(10, images)  # classes that take turns are all met


def test_gradients_turned_round_lose_to_noise():
    assert "noise_wins" in flags(masked(undefended(), backwards), ["natural", "pgd-20"], threat=deat.Linf(0.3))


@pytest.mark.usefixtures("_few_queries")
@nets
@pytest.mark.parametrize("mask", [lambda net: masked(net, nowhere), quantised], ids=["nowhere", "quantised"])
def test_a_black_box_attack_that_beats_the_gradient_is_flagged(build, mask):
    assert "black_box_wins" in flags(mask(build()), ["natural", "pgd-20", "square"])


WEAK = {
    "no step": Attack("pgd-20", steps=20, alpha=0.0),
    "small step": Attack("pgd-20", steps=20, alpha=0.001),
    "wrong way": Attack("pgd-20", steps=20, alpha=-0.25),
    "one step": Attack("pgd-20", steps=1),
    "fgsm": Attack("pgd-20", steps=1, alpha=1.0, start="zero"),
    "no steps": Attack("pgd-20", steps=0),
}


@pytest.mark.parametrize("others", [["natural"], ["natural", "fgsm", "cw-20"]], ids=["alone", "beside others"])
@pytest.mark.parametrize("weak", WEAK.values(), ids=WEAK)
def test_an_attack_weaker_than_its_name_is_flagged(weak, others):
    assert "not_converged" in flags(undefended(), [*others, weak])


@pytest.mark.parametrize("weak", WEAK.values(), ids=WEAK)
def test_an_attack_weaker_than_its_name_is_flagged_on_a_robust_network(weak):
    assert flags(robust(), ["natural", weak], n=130) == {"not_converged"}


def test_an_attack_that_stops_early_is_flagged_and_one_that_goes_on_is_not():
    assert flags(undefended(), ["pgd-2"]) == {"not_converged"}
    assert flags(undefended(), ["pgd-100"]) == set()


@pytest.mark.parametrize("threat", ["l2:0.5", "l1:2"])
def test_masked_gradients_are_flagged_in_every_norm(threat):
    for mask in (quantised, scaled, saturated):
        assert "zero_gradients" in flags(mask(robust()), ["natural", "fgsm"], threat=threat)
    assert "robust_to_anything" in flags(masked(robust(), backwards), ["natural", "fgsm"], threat=threat)


def test_a_gradient_that_is_nan_is_told_as_none():
    net = Around(robust(), lambda x: x + (x - x.detach()).square().sum((1, 2, 3), keepdim=True).sqrt(), same)
    assert "zero_gradients" in flags(net, ["natural", "fgsm"])


def test_flags_on_the_model_itself_are_raised_in_a_cascade_too():
    assert {"zero_gradients", "robust_to_anything"} <= flags(quantised(robust()), cascade=True)


def test_without_sanity_checks_only_what_the_results_show_is_flagged():
    assert flags(quantised(robust()), sanity=False) == set()
    assert flags(masked(undefended(), true_at_data_only), sanity=False) == {"one_step_wins"}


def test_a_flag_says_what_was_seen_and_what_to_do():
    for net in (quantised(robust()), softmax(robust()), masked(undefended(), true_at_data_only)):
        for flag in evaluate(net, digits(40), threat=THREAT).flags:
            assert flag.name.replace("_", "").isalpha()
            assert any(c.isdigit() for c in flag.seen) or flag.name == "probabilities"
            assert flag.advice.endswith(".")
            assert len(flag.advice) > 30


def test_a_model_that_is_only_in_training_mode_is_switched_over_and_not_accused():
    net = nn.Sequential(nn.Dropout(0.5), robust()).train()
    assert flags(net) == set()
    assert net.training


def test_checks_leave_the_model_the_generator_and_autograd_as_they_were():
    net, real = Purifying(robust()).train(), dict(vars(torch.autograd))
    state = torch.get_rng_state()
    flags(net, n=20)
    assert vars(torch.autograd) == real
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in net.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("cut", [Tensor.detach, lambda x: (7 * x).to(torch.uint8) / 7], ids=["detached", "bytes"])
def test_a_model_that_lets_no_gradient_through_is_attacked_from_its_start_and_flagged(cut):
    net = Around(robust(), cut, lambda logits: logits)
    assert flags(net) == {"zero_gradients", "robust_to_anything"}
    for p in net.parameters():
        p.requires_grad_(False)
    assert "zero_gradients" in flags(net, ["natural", "fgsm"], n=40)


@dataclass(frozen=True)
class Stepping:
    """Somebody's own attack that has steps, and settings that ours do not know."""

    name: str = "theirs"
    steps: int = 10
    momentum: float = 0.9

    def __call__(self, model, x, y, threat, generator=None):
        return x


def test_attacks_of_one_s_own_are_checked_by_what_they_leave():
    found = evaluate(undefended(), digits(60), threat=THREAT, attacks=["fgsm", Stepping(), Own("idle")])
    assert [flag.name for flag in found.flags] == ["one_step_wins"]
    assert found.settings["attacks"]["theirs"] == {"name": "theirs", "steps": 10, "momentum": 0.9, "kind": "Stepping"}


@pytest.mark.parametrize(("n", "allowed"), [(20, 2), (100, 2), (400, 2), (1000, 5), (10_000, 50)])
def test_differences_count_beyond_half_a_point_or_two_images(n, allowed):
    def made(one, other):
        standing = {"fgsm": one, "pgd-20": other, "square": one}
        results = [AttackResult(name, [i < k for i in range(n)], 0, 1.0, n, n) for name, k in standing.items()]
        steps = {"fgsm": {"steps": 1}, "pgd-20": {"steps": 20}, "square": {"parts": ["square"]}}
        return Evaluation(results, [0] * n, ["a"], {"cascade": False, "attacks": steps})

    assert accuracy_tolerance(n) * n == pytest.approx(allowed, abs=1e-3)
    assert check_consistency(made(n // 2, n // 2 + allowed)) == []
    assert check_consistency(made(n // 2 + allowed, n // 2)) == []
    assert [flag.name for flag in check_consistency(made(n // 2, n // 2 + allowed + 1))] == [
        "one_step_wins",
        "black_box_wins",
    ]


@pytest.mark.parametrize(
    ("labels", "n", "flagged"),
    [
        (torch.arange(200) // 20, 100, True),  # five of ten classes
        (torch.arange(200) // 20, 120, False),
        (torch.arange(200) // 20, 40, False),  # too few to tell
        (torch.arange(200) // 20, None, False),  # all of it
        (torch.arange(200) % 10, 100, False),
    ],
)
def test_the_first_images_of_a_sorted_set_are_no_sample_of_it(labels, n, flagged):
    x, _ = digits(200)
    found = evaluate(robust(), (x, labels), threat=THREAT, attacks=["natural"], n=n, sanity=False)
    assert ("one_sided_sample" in {flag.name for flag in found.flags}) == flagged


@pytest.mark.parametrize("block", [1, 2])
def test_the_checks_look_at_images_of_all_blocks_however_small(block):
    assert "zero_gradients" in flags(quantised(robust()), ["natural"], block=block)
    assert "batch_dependent" in flags(batch_normed(robust()), ["natural"], block=block)
    assert flags(robust(), ["natural", "pgd-5"], n=30, block=block) == set()


@pytest.mark.parametrize("n", [4, 7, 8, 50])
def test_answers_that_depend_on_the_batch_are_flagged_on_a_few_images_too(n):
    assert "batch_dependent" in flags(batch_normed(undefended()), ["natural"], n=n)


def test_flags_on_the_model_are_told_before_the_first_attack_and_kept():
    told = []

    def act(model, x, y, threat):
        assert told, "the attack came first"
        return x

    mine = Own("mine", act)
    found = evaluate(softmax(robust()), digits(40), threat=THREAT, attacks=[mine], block=8, on_flag=told.append)
    assert [flag.name for flag in told] == ["probabilities"]
    assert mine.images
    assert found.flags[0] == told[0]


def test_nothing_is_told_of_an_honest_model_nor_without_sanity_checks():
    told = []
    evaluate(robust(), digits(50), threat=THREAT, attacks=["natural"], on_flag=told.append)
    evaluate(softmax(robust()), digits(50), threat=THREAT, attacks=["natural"], on_flag=told.append, sanity=False)
    assert told == []


class Noting(nn.Module):
    """A network that notes the precision in which it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = robust(), set()

    def forward(self, x):
        self.seen.add((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))
        return self.net(x)


def test_checks_ask_the_model_in_the_precision_of_verdicts():
    net, before = Noting(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16):
            found = evaluate(net, digits(30), threat=THREAT, attacks=["natural"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.flags == []
    assert net.seen == {(False, "highest")}


@pytest.mark.parametrize("n", [10, 49])
def test_too_few_images_do_not_show_that_a_model_is_at_chance(n):
    assert "at_chance" not in flags(Around(robust(), lambda x: x / 255, same), ["natural"], n=n)


def test_images_of_one_class_do_not_show_that_a_model_is_at_chance():
    found = evaluate(robust(), (digits(200)[0], torch.arange(200) // 100), threat=THREAT, attacks=["natural"], n=60)
    assert "at_chance" not in {flag.name for flag in found.flags}


class Scaling:
    """A loader, some of whose batches are scaled otherwise than the first."""

    def __init__(self, factor: float, *wrong: int) -> None:
        self.factor, self.wrong = factor, wrong

    def __iter__(self):
        x, y = digits(40)
        for number, (images, labels) in enumerate(zip(x.split(8), y.split(8), strict=True), 1):
            yield (self.factor * images if number in self.wrong else images), labels


@pytest.mark.parametrize(("factor", "words"), [(1.3, "outside"), (255.0, "divide by 255"), (float("nan"), "nan")])
def test_a_later_batch_out_of_range_is_refused_by_its_number(factor, words):
    with pytest.raises(DataError, match=rf"batch 4 of the data: image \d+ .*{words}"):
        evaluate(robust(), Scaling(factor, 4, 5), threat=THREAT, attacks=["fgsm"], block=10)
    assert flags(robust(), ["fgsm"], n=30) == set()


def test_every_flag_has_its_place_in_the_documentation():
    page = (Path(__file__).parents[2] / DOCS_PAGE).read_text(encoding="utf-8")
    rows = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \| .+ \| .+ \|$', page, flags=re.MULTILINE)
    assert [anchor for anchor, _ in rows] == [name for _, name in rows] == list(FLAG_ADVICE)
    flag = Flag("noise_wins", "seen", "advice")
    assert flag.link == "docs/evaluation.md#noise_wins"
    assert flag.link in flag.line
