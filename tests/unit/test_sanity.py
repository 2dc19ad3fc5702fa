"""Sanity checks raise each flag on models and attacks that deserve it, and none on sound ones."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.errors import DataError
from deat.evaluation import autoattack
from deat.evaluation.attack_registry import describe_attack, get_attack
from deat.evaluation.attacks import Attack
from deat.evaluation.block_evaluation import sample_indices
from deat.evaluation.evaluator import DEFAULT_ATTACKS, evaluate
from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import FLAG_ADVICE, Flag, accuracy_tolerance, check_consistency
from deat.evaluation.sanity.flag_advice import DOCS_PAGE
from deat.evaluation.square_attack import Square
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
    monkeypatch.setattr(autoattack, "standard_part", lambda name, threat: Square(queries=100))


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
def test_a_sound_model_raises_no_flag(build, threat):
    assert flags(build(), ["natural", "fgsm", "pgd-20", "cw-20"], n=130, threat=threat) == set()


def test_a_sound_convolutional_network_raises_no_flag():
    assert flags(convolutional(), n=130) == set()


@nets
@pytest.mark.parametrize("threat", ["linf:0.25", "l2:1", "l1:4"])
def test_a_sound_model_raises_no_flag_at_a_radius_at_which_few_images_are_correct(build, threat):
    assert flags(build(), threat=threat) == set()


@nets
@pytest.mark.parametrize(
    "chosen", [["natural"], ["fgsm"], ["natural", "pgd-20"], ["cw-20"], ["pgd-20x2", "pgd-20-last"]]
)
def test_a_sound_model_raises_no_flag_whatever_the_attacks(build, chosen):
    assert flags(build(), chosen) == set()


@nets
@pytest.mark.parametrize("n", [1, 8, 20])
def test_a_sound_model_raises_no_flag_on_a_few_images(build, n):
    assert flags(build(), n=n) == set()


@nets
@pytest.mark.parametrize("options", [{"cascade": True}, {"block": 16}, {"seed": 7}], ids=str)
def test_a_sound_model_raises_no_flag_in_a_cascade_in_small_blocks_or_with_another_seed(build, options):
    assert flags(build(), **options) == set()


@pytest.mark.usefixtures("_few_queries")
@nets
def test_a_sound_model_raises_no_flag_with_a_black_box_attack(build):
    assert flags(build(), ["natural", "pgd-20", "square"], n=40) == set()


@pytest.mark.usefixtures("_few_queries")
def test_a_black_box_attack_that_beats_only_one_step_raises_no_flag():
    assert flags(undefended(), [Attack("tiny step", steps=1, alpha=0.01), "square"], n=40) == set()


@nets
def test_a_sound_model_raises_no_flag_at_radius_zero_and_at_a_radius_that_cannot_be_doubled(build):
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


def test_weights_that_are_not_finite_are_flagged_as_not_finite_and_not_as_randomised():
    net = robust()
    next(net.parameters()).data.fill_(float("nan"))
    names = flags(net)
    assert "not_finite" in names
    assert not names & {"randomised", "zero_gradients", "probabilities"}


def test_one_label_for_all_images_is_not_flagged_where_most_images_have_it():
    x, y = digits(130)
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))
    net[1].bias.data = torch.tensor([9.0, -9.0])
    evaluation = evaluate(net, (x, (y == 8).long()), threat=THREAT)
    assert evaluation.worst == evaluation.accuracy["natural"] > 0.85
    assert evaluation.flags == []


def test_robust_to_anything_is_flagged_on_sorted_data_too():
    x, y = (part.repeat(4, *[1] * (part.dim() - 1)) for part in digits(400))
    order = y.argsort(stable=True)
    assert y[order][:128].tolist() == 128 * [0]
    evaluation = evaluate(masked(robust(), nowhere), (x[order], y[order]), threat=THREAT, attacks=["natural"])
    assert "robust_to_anything" in {flag.name for flag in evaluation.flags}


FORMS = {
    "tensors": lambda x, y: (x, y),
    "items": Items,
    "loader": lambda x, y: list(zip(x.split(64), y.split(64), strict=True)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_one_label_for_all_images_is_flagged_at_chance_however_the_data_is_sorted(form, order):
    x, y = digits(400)[0], torch.arange(400) // 100
    mixed = torch.randperm(400, generator=torch.Generator().manual_seed(0)) if order == "mixed" else torch.arange(400)
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    net[1].bias.data = torch.tensor([9.0, 0, 0, 0])
    evaluation = evaluate(net, form(x[mixed], y[mixed]), threat=THREAT, attacks=["natural", "pgd-5"])
    assert evaluation.accuracy["natural"] == 0.25
    assert [flag.name for flag in evaluation.flags] == ["at_chance"]


@pytest.mark.parametrize("images", [1, 128, 129, 200, 1280, 10_000])
def test_the_checked_images_are_spread_over_all_images_and_always_the_same(images):
    indices = sample_indices(images, 128)
    assert len(indices) == min(128, images)
    assert (indices.diff() > 0).all()
    assert indices[0] <= images / 128
    assert indices[-1] >= images - 1 - images / 128
    assert torch.equal(indices, sample_indices(images, 128))
    assert len(set((indices % 10).tolist())) == min(10, images), "a class is missing where classes alternate"


def test_reversed_gradients_lose_to_noise():
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
}


@pytest.mark.parametrize("others", [["natural"], ["natural", "fgsm", "cw-20"]], ids=["alone", "beside others"])
@pytest.mark.parametrize("weak", WEAK.values(), ids=WEAK)
def test_an_attack_that_hardly_moves_is_flagged(weak, others):
    assert "not_converged" in flags(undefended(), [*others, weak])


@pytest.mark.parametrize("weak", WEAK.values(), ids=WEAK)
def test_an_attack_that_hardly_moves_is_flagged_on_a_robust_network(weak):
    assert flags(robust(), ["natural", weak], n=130) == {"not_converged"}


def test_an_attack_with_too_few_steps_is_flagged_and_one_with_enough_is_not():
    assert flags(undefended(), ["pgd-2"]) == {"not_converged"}
    assert flags(undefended(), ["pgd-100"]) == set()


@pytest.mark.parametrize("threat", ["l2:0.5", "l1:2"])
def test_masked_gradients_are_flagged_in_every_norm(threat):
    for mask in (quantised, scaled, saturated):
        assert "zero_gradients" in flags(mask(robust()), ["natural", "fgsm"], threat=threat)
    assert "robust_to_anything" in flags(masked(robust(), backwards), ["natural", "fgsm"], threat=threat)


def test_a_gradient_of_nan_counts_as_zero():
    net = Around(robust(), lambda x: x + (x - x.detach()).square().sum((1, 2, 3), keepdim=True).sqrt(), same)
    assert "zero_gradients" in flags(net, ["natural", "fgsm"])


def test_flags_about_the_model_are_raised_in_a_cascade_too():
    assert {"zero_gradients", "robust_to_anything"} <= flags(quantised(robust()), cascade=True)


def test_without_sanity_checks_only_flags_from_the_results_are_raised():
    assert flags(quantised(robust()), sanity=False) == set()
    assert flags(masked(undefended(), true_at_data_only), sanity=False) == {"one_step_wins"}


def test_a_flag_says_what_was_observed_in_numbers_and_what_to_do():
    for net in (quantised(robust()), softmax(robust()), masked(undefended(), true_at_data_only)):
        for flag in evaluate(net, digits(40), threat=THREAT).flags:
            assert flag.name.replace("_", "").isalpha()
            assert any(c.isdigit() for c in flag.seen) or flag.name == "probabilities"
            assert flag.advice.endswith(".")
            assert len(flag.advice) > 30


def test_a_model_in_training_mode_is_evaluated_in_eval_mode_without_a_flag():
    net = nn.Sequential(nn.Dropout(0.5), robust()).train()
    assert flags(net) == set()
    assert net.training


def test_checks_leave_the_model_the_generator_and_autograd_unchanged():
    net, real = Purifying(robust()).train(), dict(vars(torch.autograd))
    state = torch.get_rng_state()
    flags(net, n=20)
    assert vars(torch.autograd) == real
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in net.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("cut", [Tensor.detach, lambda x: (7 * x).to(torch.uint8) / 7], ids=["detached", "bytes"])
def test_a_model_without_a_gradient_is_attacked_by_the_start_only_and_flagged(cut):
    net = Around(robust(), cut, lambda logits: logits)
    assert flags(net) == {"zero_gradients", "robust_to_anything"}
    for p in net.parameters():
        p.requires_grad_(False)
    assert "zero_gradients" in flags(net, ["natural", "fgsm"], n=40)


@dataclass(frozen=True)
class UserAttack:
    """A user's attack that has steps, and a setting that deat's attacks do not have."""

    name: str = "theirs"
    steps: int = 10
    momentum: float = 0.9

    def __call__(self, model, x, y, threat, generator=None):
        return x


def test_the_results_of_users_attacks_are_checked():
    evaluation = evaluate(undefended(), digits(60), threat=THREAT, attacks=["fgsm", UserAttack(), Own("idle")])
    assert [flag.name for flag in evaluation.flags] == ["one_step_wins"]
    assert evaluation.settings["attacks"]["theirs"] == {
        "name": "theirs",
        "steps": 10,
        "momentum": 0.9,
        "kind": "UserAttack",
    }


@pytest.mark.parametrize(("n", "allowed"), [(20, 2), (100, 2), (400, 2), (1000, 5), (10_000, 50)])
def test_accuracies_may_differ_by_half_a_point_or_two_images_without_a_flag(n, allowed):
    def make_evaluation(one, other):
        correct = {"fgsm": one, "pgd-20": other, "square": one}
        results = [AttackResult(name, [i < k for i in range(n)], 0, 1.0, n, n) for name, k in correct.items()]
        steps = {"fgsm": {"steps": 1}, "pgd-20": {"steps": 20}, "square": {"parts": ["square"]}}
        return Evaluation(results, [0] * n, ["a"], {"cascade": False, "attacks": steps})

    assert accuracy_tolerance(n) * n == pytest.approx(allowed, abs=1e-3)
    assert check_consistency(make_evaluation(n // 2, n // 2 + allowed)) == []
    assert check_consistency(make_evaluation(n // 2 + allowed, n // 2)) == []
    assert [flag.name for flag in check_consistency(make_evaluation(n // 2, n // 2 + allowed + 1))] == [
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
def test_the_first_images_of_sorted_data_are_flagged_as_a_one_sided_sample(labels, n, flagged):
    x, _ = digits(200)
    evaluation = evaluate(robust(), (x, labels), threat=THREAT, attacks=["natural"], n=n, sanity=False)
    assert ("one_sided_sample" in {flag.name for flag in evaluation.flags}) == flagged


@pytest.mark.parametrize("block", [1, 2])
def test_the_checks_use_images_of_all_blocks_however_small(block):
    assert "zero_gradients" in flags(quantised(robust()), ["natural"], block=block)
    assert "batch_dependent" in flags(batch_normed(robust()), ["natural"], block=block)
    assert flags(robust(), ["natural", "pgd-5"], n=30, block=block) == set()


@pytest.mark.parametrize("n", [4, 7, 8, 50])
def test_batch_dependent_outputs_are_flagged_on_a_few_images_too(n):
    assert "batch_dependent" in flags(batch_normed(undefended()), ["natural"], n=n)


def test_flags_about_the_model_are_reported_before_the_first_attack_and_in_the_result():
    reported = []

    def act(model, x, y, threat):
        assert reported, "the attack came first"
        return x

    mine = Own("mine", act)
    evaluation = evaluate(
        softmax(robust()), digits(40), threat=THREAT, attacks=[mine], block=8, on_flag=reported.append
    )
    assert [flag.name for flag in reported] == ["probabilities"]
    assert mine.images
    assert evaluation.flags[0] == reported[0]


def test_no_flag_is_reported_for_a_sound_model_or_without_sanity_checks():
    reported = []
    evaluate(robust(), digits(50), threat=THREAT, attacks=["natural"], on_flag=reported.append)
    evaluate(softmax(robust()), digits(50), threat=THREAT, attacks=["natural"], on_flag=reported.append, sanity=False)
    assert reported == []


class PrecisionRecorder(nn.Module):
    """A network that records the precision that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = robust(), set()

    def forward(self, x):
        self.seen.add((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))
        return self.net(x)


def test_checks_run_the_model_in_exact_float32():
    net, before = PrecisionRecorder(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16):
            evaluation = evaluate(net, digits(30), threat=THREAT, attacks=["natural"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert evaluation.flags == []
    assert net.seen == {(False, "highest")}


@pytest.mark.parametrize("n", [10, 49])
def test_at_chance_is_not_flagged_on_too_few_images(n):
    assert "at_chance" not in flags(Around(robust(), lambda x: x / 255, same), ["natural"], n=n)


def test_at_chance_is_not_flagged_on_images_of_one_class():
    evaluation = evaluate(
        robust(), (digits(200)[0], torch.arange(200) // 100), threat=THREAT, attacks=["natural"], n=60
    )
    assert "at_chance" not in {flag.name for flag in evaluation.flags}


class PartlyScaledLoader:
    """A loader in which some batches, by their numbers, are multiplied by a factor."""

    def __init__(self, factor: float, *scaled_batches: int) -> None:
        self.factor, self.scaled_batches = factor, scaled_batches

    def __iter__(self):
        x, y = digits(40)
        for number, (images, labels) in enumerate(zip(x.split(8), y.split(8), strict=True), 1):
            yield (self.factor * images if number in self.scaled_batches else images), labels


@pytest.mark.parametrize(("factor", "words"), [(1.3, "outside"), (255.0, "divide by 255"), (float("nan"), "nan")])
def test_a_later_batch_out_of_range_is_refused_by_its_number(factor, words):
    with pytest.raises(DataError, match=rf"batch 4 of the data: image \d+ .*{words}"):
        evaluate(robust(), PartlyScaledLoader(factor, 4, 5), threat=THREAT, attacks=["fgsm"], block=10)
    assert flags(robust(), ["fgsm"], n=30) == set()


def test_every_flag_is_documented():
    page = (Path(__file__).parents[2] / DOCS_PAGE).read_text(encoding="utf-8")
    rows = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \| .+ \| .+ \|$', page, flags=re.MULTILINE)
    assert [anchor for anchor, _ in rows] == [name for _, name in rows] == list(FLAG_ADVICE)
    flag = Flag("noise_wins", "seen", "advice")
    assert flag.link == "docs/evaluation.md#noise_wins"
    assert flag.link in flag.line


N = 1000


def consistency_flags(cascade=False, num_fooled_by_stage=None, **percent: float) -> list[str]:
    """The flags of an evaluation whose attacks leave these accuracies in percent; _ in a name stands for -."""
    counts = {name.replace("_", "-"): round(N * share / 100) for name, share in percent.items()}
    results = [
        AttackResult(name, [i < k for i in range(N)], 0, 1.0, N, N, (num_fooled_by_stage or {}).get(name, {}))
        for name, k in counts.items()
    ]
    attacks = {name: describe_attack(get_attack(name), THREAT) for name in counts}
    evaluation = Evaluation(results, [0] * N, ["a"], {"cascade": cascade, "attacks": attacks})
    return [flag.name for flag in check_consistency(evaluation)]


@pytest.mark.parametrize(
    ("percent", "expected"),
    [
        ({"fgsm": 30, "pgd_20": 50, "cw_20": 25}, ["one_step_wins"]),
        ({"fgsm": 30, "pgd_20": 25, "cw_20": 50}, []),
        ({"fgsm": 30, "pgd_2": 50, "pgd_20": 25}, []),
        ({"fgsm": 30, "cw_20": 50}, ["one_step_wins"]),
        ({"pgd_20": 30, "pgd_20x10": 50}, ["one_start_wins"]),
        ({"pgd_20x5": 30, "pgd_20": 50, "pgd_20x10": 35}, ["one_start_wins"]),
        ({"pgd_20": 30, "pgd_20x10": 30.5}, []),
        ({"pgd_20": 30, "pgd_20x10": 20}, []),
        ({"pgd_20": 30, "pgd_10x10": 50, "pgd_20x10_last": 50}, []),
        ({"pgd_20": 30, "aa": 50}, ["ensemble_loses"]),
        ({"cw_20": 30, "aa": 50}, ["ensemble_loses"]),
        ({"apgd_ce": 30, "aa": 50}, ["ensemble_loses"]),
        ({"pgd_20": 30, "aa": 30.5}, []),
        ({"pgd_20": 30, "cw_20": 28, "aa": 25}, []),
        ({"natural": 20, "aa": 50}, []),
        ({"pgd_20": 50, "square": 30}, ["black_box_wins"]),
        ({"pgd_20": 50, "aa": 30, "square": 30}, ["black_box_wins"]),
        ({"pgd_20": 30, "aa": 25, "square": 40}, []),
        ({"apgd_t": 50, "square": 30}, ["black_box_wins"]),
        ({"fgsm": 50, "square": 30}, []),
    ],
    ids=str,
)
def test_a_weaker_attack_must_not_leave_a_lower_accuracy_than_a_stronger_one(percent, expected):
    assert consistency_flags(**percent) == expected
    assert consistency_flags(cascade=True, **percent) == []


def test_the_attack_that_does_nothing_is_identified_by_its_settings_not_by_its_name():
    results = [
        AttackResult(name, [i < k for i in range(N)], 0, 1.0, N, N) for name, k in (("natural", 300), ("pgd", 500))
    ]
    attacks = {
        "natural": describe_attack(get_attack("fgsm"), THREAT),
        "pgd": describe_attack(get_attack("pgd-20"), THREAT),
    }
    evaluation = Evaluation(results, [0] * N, ["a"], {"cascade": False, "attacks": attacks})
    assert [flag.name for flag in check_consistency(evaluation)] == ["one_step_wins"]


@pytest.mark.parametrize(("fooled", "expected"), [(0, []), (5, []), (6, ["black_box_wins"])])
@pytest.mark.parametrize("cascade", [False, True])
def test_images_that_only_square_fools_are_flagged(fooled, expected, cascade):
    num_fooled_by_stage = {"aa": {"apgd-ce": 400, "apgd-t": 50, "fab-t": 0, "square": fooled}}
    assert consistency_flags(cascade, num_fooled_by_stage, aa=50) == expected
    assert consistency_flags(cascade, {"aa": {"square": fooled, "apgd-ce": 400}}, aa=50) == []


class Remembers(nn.Module):
    """Keeps the first image that it sees, and gives images near one of them the answer for it."""

    def __init__(self, net: nn.Module, eps: float) -> None:
        super().__init__()
        self.net, self.eps = net, eps
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        rows = []
        for image, row in zip(x.detach(), outputs, strict=True):
            near = next((r for old, r in self.seen if float((old - image).abs().max()) <= 1.01 * self.eps), None)
            if near is None:
                self.seen.append((image.clone(), row.detach().clone()))
            rows.append(row if near is None else near + 0 * row)
        return torch.stack(rows)


class AfterCalls(nn.Module):
    """Adds noise to its inputs after a number of calls."""

    def __init__(self, net: nn.Module, calls: int) -> None:
        super().__init__()
        self.net, self.left = net, calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        return self.net(x if self.left >= 0 else (x + 0.3 * torch.randn_like(x)).clamp(0, 1))


class InLargeBatches(nn.Module):
    """Another network in batches above 128: one whose gradient is masked, or whose inputs are noisy."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 128:
            return self.net(x)
        return self.net(x + 0.2 * torch.randn_like(x)) if self.kind == "noise" else self.net(x.detach()) + 0 * x.sum()


@pytest.mark.promise("P130")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Remembers(undefended(), 0.15), "remembers"),
        (lambda: AfterCalls(robust(), 40), "remembers"),
        (lambda: InLargeBatches(undefended(), "noise"), "batch_dependent"),
        (lambda: InLargeBatches(undefended(), "gradient"), "zero_gradients"),
    ],
)
def test_a_model_that_is_another_for_the_attack_than_for_the_checks_is_flagged(build, expected):
    torch.manual_seed(0)
    assert expected in flags(build(), ["natural", "pgd-5"], n=150)


def test_a_model_that_cannot_be_copied_is_evaluated_without_that_check():
    class Locked(nn.Module):
        """Refuses to be copied."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def __deepcopy__(self, memo: object) -> nn.Module:
            raise RuntimeError("no copies")

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    assert flags(Locked(robust()), ["natural", "pgd-20"]) == set()
