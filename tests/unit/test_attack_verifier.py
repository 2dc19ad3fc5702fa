"""The judge verifies every adversarial example, classifies it again, and leaves model and settings unchanged."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import deat
from deat.evaluation.attack_verifier import AttackLike, AttackVerifier
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.fast_model import CountingModel
from deat.utils.float32_precision import full_precision
from helpers.eval_attackers import Interrupted, Own
from helpers.eval_nets import THREAT, digits, undefended
from helpers.games import THREATS
from helpers.nets import conv_net, images, weights

EVERY = ["natural", "fgsm", "pgd-3", "cw-3"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pgd_then(change):
    """An attack that fools the undefended network, and then changes its examples."""
    return lambda model, x, y, threat: change(parse_attack("pgd-20")(model, x, y, threat, generator()))


def negative(model, x, y, threat):
    """Far from every image, and another class for most."""
    return 1 - x


def lowest(adv):
    return adv.flatten(1).amin(1).view(-1, 1, 1, 1)


def highest(adv):
    return adv.flatten(1).amax(1).view(-1, 1, 1, 1)


def evaluate_own(act, *, sanity=False):
    """The undefended network under an attack made of a function."""
    return evaluate(undefended(), digits(24), threat=THREAT, attacks=["natural", Own("mine", act)], sanity=sanity)


def test_a_valid_attack_of_your_own_counts_and_raises_no_flag():
    evaluation = evaluate_own(pgd_then(lambda adv: adv))
    assert evaluation.accuracy["mine"] < 0.3
    assert evaluation.accuracy["natural"] > 0.9
    assert evaluation.results[1].invalid == 0
    assert evaluation.flags == []


@pytest.mark.parametrize(
    "act",
    [
        negative,
        pgd_then(lambda adv: adv * float("nan")),
        pgd_then(lambda adv: adv.index_fill(3, torch.tensor([0]), float("nan"))),
        pgd_then(lambda adv: adv + float("inf")),
        pgd_then(lambda adv: adv - lowest(adv) - 1e-3),
        pgd_then(lambda adv: adv - highest(adv) + 1.001),
        pgd_then(lambda adv: adv.double()),
        pgd_then(lambda adv: adv.half()),
        pgd_then(lambda adv: (adv * 255).to(torch.uint8)),
        pgd_then(lambda adv: adv.flatten(1)),
        pgd_then(lambda adv: adv[:1]),
    ],
    ids=["ball", "nan", "one nan", "inf", "below 0", "above 1", "float64", "float16", "uint8", "shape", "too few"],
)
def test_an_invalid_example_counts_as_no_attack_and_is_flagged(act):
    evaluation = evaluate_own(act)
    right = sum(evaluation.verdicts["natural"])
    assert evaluation.verdicts["mine"] == evaluation.verdicts["natural"]
    assert evaluation.results[1].invalid == right > 0
    assert [flag.name for flag in evaluation.flags] == ["invalid_examples"]
    assert f"mine: {right}" in evaluation.flags[0].seen


def test_an_invalid_example_is_flagged_once_with_sanity_checks_too():
    assert [flag.name for flag in evaluate_own(negative, sanity=True).flags] == ["invalid_examples"]


def test_only_the_invalid_examples_of_an_attack_are_rejected():
    def every_other(adv):
        return torch.where((torch.arange(len(adv)) % 2 == 0).view(-1, 1, 1, 1), 2.0, adv)

    valid, evaluation = evaluate_own(pgd_then(lambda adv: adv)), evaluate_own(pgd_then(every_other))
    attacked = [i for i, hit in enumerate(evaluation.verdicts["natural"]) if hit]
    for place, i in enumerate(attacked):
        assert evaluation.verdicts["mine"][i] == (place % 2 == 0 or valid.verdicts["mine"][i])
    assert evaluation.results[1].invalid == -(-len(attacked) // 2)


@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_an_example_on_the_edge_of_the_ball_is_valid_and_one_beyond_it_is_not(threat):
    def towards_grey(share):
        def act(model, x, y, threat):
            signs = torch.where(x < 0.5, 1.0, -1.0)
            return x + share * threat.eps / threat.norm(signs).view(-1, 1, 1, 1) * signs

        return Own("mine", act)

    judge, (x, y) = AttackVerifier(undefended(), threat, 0), digits(8)
    right = sum(judge.attack_block(parse_attack("natural"), x, y, 0).correct)
    assert judge.attack_block(towards_grey(1.0), x, y, 0).invalid == 0
    assert judge.attack_block(towards_grey(1.001), x, y, 0).invalid == right > 0


def test_an_attack_cannot_change_the_images_or_labels_that_it_is_evaluated_on():
    def overwrite(model, x, y, threat):
        x.zero_()
        y.fill_(3)
        return x

    x, y = digits(24)
    original = x.clone(), y.clone()
    evaluation = evaluate(
        undefended(), (x, y), threat=THREAT, attacks=["natural", Own("mine", overwrite)], sanity=False
    )
    assert evaluation.verdicts["mine"] == evaluation.verdicts["natural"]
    assert evaluation.results[1].invalid == sum(evaluation.verdicts["natural"])
    assert evaluation.labels == original[1].tolist()
    assert torch.equal(x, original[0])
    assert torch.equal(y, original[1])


def test_verdicts_are_the_judge_s_own_classification_of_the_returned_examples():
    net, (x, y), returned = undefended(), digits(40), []

    def keep(model, x, y, threat):
        returned.append(parse_attack("pgd-2")(model, x, y, threat, generator()))
        return returned[0]

    right = net(x).argmax(1) == y
    result = AttackVerifier(net, THREAT, 0).attack_block(Own("mine", keep), x, y, 0)
    expected = right.clone()
    expected[right] = net(returned[0]).argmax(1) == y[right]
    assert result.correct == expected.tolist()
    assert 0 < sum(result.correct) < right.sum()


def test_an_attack_that_leaves_the_network_in_training_mode_changes_no_verdict_and_no_mode():
    def spoil(model, x, y, threat):
        model.train()
        return x

    net = nn.Sequential(nn.Dropout(0.9), undefended()).eval()
    evaluation = evaluate(net, digits(40), threat=THREAT, attacks=["natural", Own("mine", spoil)], sanity=False)
    assert evaluation.verdicts["mine"] == evaluation.verdicts["natural"]
    assert not any(m.training for m in net.modules())


def test_misclassified_images_are_never_given_to_an_attack():
    net, (x, y) = undefended(), digits(60)
    wrong = torch.arange(60) % 3 == 0
    y = torch.where(wrong, (y + 1) % 10, y)
    right = net(x).argmax(1) == y
    own = Own("mine")
    result = AttackVerifier(net, THREAT, 0).attack_block(own, x, y, 0)
    assert torch.equal(torch.cat(own.seen), x[right])
    assert result.correct == right.tolist()
    assert (result.forwards, result.backwards) == (int(right.sum()), 0)


def test_a_block_without_a_correct_image_is_not_attacked():
    net, (x, _), own = undefended(), digits(20), Own("mine")
    wrong = (net(x).argmax(1) + 1) % 10
    result = AttackVerifier(net, THREAT, 0).attack_block(own, x, wrong, 0)
    assert own.seen == []
    assert (result.forwards, result.backwards, result.invalid) == (0, 0, 0)


@dataclass
class Staged:
    """An attack with stages."""

    name: str
    stages: tuple[AttackLike, ...]

    def __call__(self, model, x, y, threat, generator=None):
        raise AssertionError("its stages are called instead")


@pytest.mark.parametrize("cascade", [False, True])
def test_a_stage_named_natural_is_an_attack_like_any_other(cascade):
    stage = Own("natural", pgd_then(lambda adv: adv))
    attacks = ["natural", Staged("mine", (stage, Own("idle")))]
    evaluation = evaluate(undefended(), digits(24), threat=THREAT, attacks=attacks, sanity=False, cascade=cascade)
    assert stage.images > 0
    assert evaluation.worst < 0.3


def test_an_attack_that_does_nothing_costs_one_classification_whatever_its_name():
    net, (x, y) = undefended(), digits(20)
    attacks = [Attack(name, 0, start="zero") for name in ("natural", "clean")]
    results = [AttackVerifier(net, THREAT, 0).attack_block(attack, x, y, 0) for attack in attacks]
    assert [(result.forwards, result.backwards) for result in results] == [(20, 0)] * 2


@pytest.mark.parametrize(
    ("name", "forwards", "backwards"),
    [
        ("natural", 0, 0),
        ("fgsm", 1 + 1, 1),
        ("pgd-1", 1 + 1, 1),
        ("pgd-7-last", 7 + 1, 7),
        ("cw-7-last", 7 + 1, 7),
    ],
)
def test_forward_and_backward_counts_are_those_counted_by_hand(name, forwards, backwards):
    net, (x, y) = undefended(), digits(50)
    right = int((net(x).argmax(1) == y).sum())
    result = AttackVerifier(net, THREAT, 0).attack_block(parse_attack(name), x, y, 0)
    assert result.forwards == (50 if name == "natural" else right * forwards)
    assert result.backwards == right * backwards


def test_fooled_images_leave_the_batch_and_cost_no_more_passes():
    net, (x, y) = undefended(), digits(50)
    right = int((net(x).argmax(1) == y).sum())
    result = AttackVerifier(net, THREAT, 0).attack_block(parse_attack("pgd-20"), x, y, 0)
    survivors = sum(result.correct)
    assert survivors < right
    assert 20 * survivors <= result.backwards < 20 * right


class WrongFastModel(torch.nn.Module):
    """A fast model that misclassifies every image that the exact model classifies correctly."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).neg()

    def exact_outputs(self, x):
        with torch.no_grad():
            return self.net(x)


def test_an_image_that_fools_only_the_fast_model_is_attacked_further():
    net, (x, y) = undefended(), digits(50)
    x, y = x[(right := net(x).argmax(1) == y)], y[right]
    adv = Attack("own", steps=20, start="zero")(WrongFastModel(net), x, y, THREAT)
    moved = (adv - x).flatten(1).abs().amax(1)
    assert bool((moved > 0.9 * THREAT.eps).any()), "images that fool only the fast model must be attacked further"


class SecondChoiceFastModel(WrongFastModel):
    """A fast model that gives every image its second best class, so that its gradients are still useful."""

    def forward(self, x):
        logits = self.net(x)
        return logits - 1e3 * nn.functional.one_hot(logits.argmax(1), 10)


def test_restarts_attack_exactly_the_images_that_the_exact_model_classifies_correctly():
    net, (x, y) = undefended(), digits(100)
    x, y = x[(right := net(x).argmax(1) == y)], y[right]
    once, thrice = (
        parse_attack(name)(SecondChoiceFastModel(net), x, y, THREAT, generator()) for name in ("pgd-3", "pgd-3x3")
    )
    stands = net(once).argmax(1) == y
    moved = (once != thrice).flatten(1).any(1)
    assert 0 < stands.sum() < len(y)
    assert torch.equal(moved, stands)


def restart_on_all_images(net, x, y, attack):
    """The first example that fools, of restarts on all images; and how many images were correct before each."""
    draw, adv, counts = generator(), x, []
    for _ in range(attack.restarts):
        correct = net(adv).argmax(1) == y
        restarted = replace(attack, name="one start", restarts=1)(net, x, y, THREAT, draw)
        adv = torch.where(correct.view(-1, 1, 1, 1), restarted, adv)
        counts.append(int(correct.sum()))
    return adv, counts


@pytest.mark.parametrize("name", ["pgd-2x4", "cw-2x4", "pgd-2x4-last"])
def test_restarts_on_survivors_give_the_examples_of_restarts_on_all_images(name):
    net, (x, y) = undefended().double(), digits(60)
    x, y = x[(right := net(x.double()).argmax(1) == y)].double(), y[right]
    counting = CountingModel(net)
    adv = parse_attack(name)(counting, x, y, THREAT, generator())
    expected, counts = restart_on_all_images(net, x, y, parse_attack(name))
    torch.testing.assert_close(adv, expected, rtol=0, atol=1e-9)
    assert 0 < counts[3] < counts[0] == len(y)
    assert counting.backwards <= 2 * sum(counts)
    if name.endswith("last"):  # where no image leaves the batch between the steps
        assert (counting.forwards, counting.backwards) == (2 * sum(counts) + sum(counts[:3]), 2 * sum(counts))


def test_counts_and_seconds_of_an_evaluation_are_the_sums_over_its_blocks():
    net, (x, y) = undefended(), digits(50)
    right = int((net(x).argmax(1) == y).sum())
    evaluation = evaluate(net, (x, y), threat=THREAT, attacks=["fgsm", "pgd-3-last"], block=16, sanity=False)
    assert [(r.forwards, r.backwards) for r in evaluation.results] == [(2 * right, right), (4 * right, 3 * right)]
    assert all(r.seconds > 0 for r in evaluation.results)


def test_modes_gradients_weights_and_requires_grad_are_unchanged():
    net = conv_net(batch_norm=True, dropout=0.3)
    net.train()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    net[0].bias.grad = torch.ones_like(net[0].bias)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    modes, learning = [m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]
    evaluate(net, images(12), threat=THREATS[0], attacks=EVERY)
    assert [m.training for m in net.modules()] == modes
    assert True in modes
    assert False in modes
    assert [p.requires_grad for p in net.parameters()] == learning
    assert torch.equal(net[0].bias.grad, torch.ones_like(net[0].bias))
    assert all(p.grad is None for p in net.parameters() if p is not net[0].bias)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def test_modes_are_restored_when_an_attack_fails():
    def fail(model, x, y, threat):
        model.eval()
        raise Interrupted

    net = conv_net(batch_norm=True)
    net[1].eval()
    modes = [m.training for m in net.modules()]
    with pytest.raises(Interrupted):
        evaluate(net, images(60), threat=THREATS[0], attacks=[Own("mine", fail)])
    assert [m.training for m in net.modules()] == modes


def test_the_network_is_evaluated_in_eval_mode():
    net, seen = nn.Sequential(conv_net(dropout=0.5)).train(), []
    net.register_forward_pre_hook(lambda m, i: seen.extend(k.training for k in m.modules()))
    evaluate(net, images(12), threat=THREATS[0], attacks=EVERY)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_evaluation_is_the_same_where_gradients_are_off(mode, threat):
    net, data = conv_net(), images(12)
    plain = evaluate(net, data, threat=threat, attacks=EVERY)
    with mode():
        inside = evaluate(net, tuple(part + 0 for part in data), threat=threat, attacks=EVERY)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert inside.verdicts == plain.verdicts
    assert inside.flags == plain.flags
    assert (grad, inference) == (False, mode is torch.inference_mode)


class PrecisionRecorder(nn.Module):
    """A network that records the precision that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = conv_net(), set()

    def forward(self, x):
        backends = torch.backends
        matmul, conv = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        self.seen.add((matmul, conv, torch.is_autocast_enabled("cpu")))
        return self.net(x)


@pytest.fixture
def _precision():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("_precision")
@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("conv", [True, False])
def test_verdicts_are_plain_float32_and_tf32_flags_are_restored(matmul, conv):
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = conv
    net, (x, y) = PrecisionRecorder(), images(12)
    with torch.autocast("cpu", torch.bfloat16):
        AttackVerifier(net, THREATS[0], 0).attack_block(parse_attack("pgd-2"), x, y, 0)
    assert len(net.seen) == 1
    precision = net.seen.pop()
    assert "tf32" not in precision
    assert precision[2] is False
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cuda.matmul.allow_tf32 is (matmul != "highest")
    assert torch.backends.cudnn.allow_tf32 is conv


@pytest.mark.usefixtures("_precision")
def test_tf32_set_through_torch_s_newer_interface_is_switched_off_and_restored_too():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(Interrupted), full_precision():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
        raise Interrupted
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.usefixtures("_precision")
def test_tf32_flags_are_restored_when_an_attack_fails():
    def fail(model, x, y, threat):
        raise Interrupted

    torch.set_float32_matmul_precision("high")
    with pytest.raises(Interrupted):
        evaluate(undefended(), digits(4), threat=THREAT, attacks=[Own("mine", fail)])
    assert torch.get_float32_matmul_precision() == "high"


def test_evaluation_leaves_the_global_generator_and_the_weights_unchanged():
    net = undefended()
    state, before = torch.get_rng_state(), weights(net)
    evaluate(net, digits(20), threat=THREAT, attacks=EVERY)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_radius_zero_gives_the_natural_accuracy():
    evaluation = evaluate(undefended(), digits(40), threat=deat.Linf(0.0), attacks=["natural", "fgsm", "pgd-5"])
    assert evaluation.verdicts["fgsm"] == evaluation.verdicts["pgd-5"] == evaluation.verdicts["natural"]
    assert evaluation.flags == []


def test_restarts_and_the_plain_variant_have_their_own_settings():
    net, data = undefended(), digits(60)
    chosen = ["pgd-3", "pgd-3x5", "pgd-3-last", Attack("mine", steps=3, alpha=0.5)]
    evaluation = evaluate(net, data, threat=deat.Linf(0.05), attacks=chosen, sanity=False)
    settings = evaluation.settings["attacks"]
    assert [settings[name]["restarts"] for name in ("pgd-3", "pgd-3x5")] == [1, 5]
    assert [settings[name]["freeze"] for name in ("pgd-3", "pgd-3-last")] == [True, False]
    assert settings["pgd-3"]["alpha"] == pytest.approx(0.0125)
    assert settings["mine"]["alpha"] == pytest.approx(0.025)
    assert evaluation.accuracy["pgd-3x5"] <= evaluation.accuracy["pgd-3"] + 0.02
