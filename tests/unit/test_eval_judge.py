"""The judge distrusts everyone, and leaves everything as it found it."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import deat
from deat.engine import precision
from deat.errors import UsageError
from deat.evaluation import fast_model
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.fast_model import full_precision, padded_size
from deat.evaluation.judge import AttackLike, CountingModel, Judge
from helpers.eval_attackers import Interrupted, Own
from helpers.eval_nets import THREAT, digits, undefended
from helpers.games import THREATS
from helpers.nets import conv_net, images, weights

EVERY = ["natural", "fgsm", "pgd-3", "cw-3"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def pgd_then(change):
    """An attack that fools the undefended network, and then breaks a rule."""
    return lambda model, x, y, threat: change(parse_attack("pgd-20")(model, x, y, threat, generator()))


def negative(model, x, y, threat):
    """Far from every image, and another class for most."""
    return 1 - x


def lowest(adv):
    return adv.flatten(1).amin(1).view(-1, 1, 1, 1)


def highest(adv):
    return adv.flatten(1).amax(1).view(-1, 1, 1, 1)


def judged(act, *, sanity=False):
    """What an attack of one's own leaves of the undefended network."""
    return evaluate(undefended(), digits(24), threat=THREAT, attacks=["natural", Own("mine", act)], sanity=sanity)


def test_an_honest_attack_of_one_s_own_counts_and_raises_no_flag():
    found = judged(pgd_then(lambda adv: adv))
    assert found.accuracy["mine"] < 0.3
    assert found.accuracy["natural"] > 0.9
    assert found.results[1].invalid == 0
    assert found.flags == []


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
def test_an_example_that_is_not_allowed_counts_as_no_attack_and_is_flagged(act):
    found = judged(act)
    right = sum(found.verdicts["natural"])
    assert found.verdicts["mine"] == found.verdicts["natural"]
    assert found.results[1].invalid == right > 0
    assert [flag.name for flag in found.flags] == ["invalid_examples"]
    assert f"mine: {right}" in found.flags[0].seen


def test_an_invalid_example_is_flagged_with_the_sanity_checks_too():
    assert [flag.name for flag in judged(negative, sanity=True).flags] == ["invalid_examples"]


def test_only_the_examples_that_break_a_rule_are_struck_out():
    def every_other(adv):
        return torch.where((torch.arange(len(adv)) % 2 == 0).view(-1, 1, 1, 1), 2.0, adv)

    honest, found = judged(pgd_then(lambda adv: adv)), judged(pgd_then(every_other))
    attacked = [i for i, hit in enumerate(found.verdicts["natural"]) if hit]
    for place, i in enumerate(attacked):
        assert found.verdicts["mine"][i] == (place % 2 == 0 or honest.verdicts["mine"][i])
    assert found.results[1].invalid == -(-len(attacked) // 2)


@pytest.mark.parametrize("threat", THREATS, ids=lambda t: t.name)
def test_the_edge_belongs_to_the_ball_and_what_lies_beyond_does_not(threat):
    def towards_grey(share):
        def act(model, x, y, threat):
            signs = torch.where(x < 0.5, 1.0, -1.0)
            return x + share * threat.eps / threat.norm(signs).view(-1, 1, 1, 1) * signs

        return Own("mine", act)

    judge, (x, y) = Judge(undefended(), threat, 0), digits(8)
    right = sum(judge.rule(parse_attack("natural"), x, y, 0).correct)
    assert judge.rule(towards_grey(1.0), x, y, 0).invalid == 0
    assert judge.rule(towards_grey(1.001), x, y, 0).invalid == right > 0


def test_an_attack_cannot_move_the_images_or_labels_that_it_is_judged_by():
    def overwrite(model, x, y, threat):
        x.zero_()
        y.fill_(3)
        return x

    x, y = digits(24)
    kept = x.clone(), y.clone()
    found = evaluate(undefended(), (x, y), threat=THREAT, attacks=["natural", Own("mine", overwrite)], sanity=False)
    assert found.verdicts["mine"] == found.verdicts["natural"]
    assert found.results[1].invalid == sum(found.verdicts["natural"])
    assert found.labels == kept[1].tolist()
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


def test_verdicts_are_the_judge_s_own_classification_of_what_the_attack_returned():
    net, (x, y), returned = undefended(), digits(40), []

    def keep(model, x, y, threat):
        returned.append(parse_attack("pgd-2")(model, x, y, threat, generator()))
        return returned[0]

    right = net(x).argmax(1) == y
    ruling = Judge(net, THREAT, 0).rule(Own("mine", keep), x, y, 0)
    expected = right.clone()
    expected[right] = net(returned[0]).argmax(1) == y[right]
    assert ruling.correct == expected.tolist()
    assert 0 < sum(ruling.correct) < right.sum()


def test_an_attack_that_leaves_the_network_in_training_mode_changes_no_verdict_and_no_mode():
    def spoil(model, x, y, threat):
        model.train()
        return x

    net = nn.Sequential(nn.Dropout(0.9), undefended()).eval()
    found = evaluate(net, digits(40), threat=THREAT, attacks=["natural", Own("mine", spoil)], sanity=False)
    assert found.verdicts["mine"] == found.verdicts["natural"]
    assert not any(m.training for m in net.modules())


def test_images_that_are_wrong_to_begin_with_are_never_shown_to_an_attack():
    net, (x, y) = undefended(), digits(60)
    wrong = torch.arange(60) % 3 == 0
    y = torch.where(wrong, (y + 1) % 10, y)
    right = net(x).argmax(1) == y
    own = Own("mine")
    ruling = Judge(net, THREAT, 0).rule(own, x, y, 0)
    assert torch.equal(torch.cat(own.seen), x[right])
    assert ruling.correct == right.tolist()
    assert (ruling.forwards, ruling.backwards) == (int(right.sum()), 0)


def test_a_block_without_a_right_answer_costs_its_classification_only():
    net, (x, _), own = undefended(), digits(20), Own("mine")
    wrong = (net(x).argmax(1) + 1) % 10
    ruling = Judge(net, THREAT, 0).rule(own, x, wrong, 0)
    assert own.seen == []
    assert (ruling.forwards, ruling.backwards, ruling.invalid) == (0, 0, 0)


@dataclass
class Staged:
    """An attack of one stage."""

    name: str
    stages: tuple[AttackLike, ...]

    def __call__(self, model, x, y, threat, generator=None):
        raise AssertionError("its stage is called in its place")


@pytest.mark.parametrize("cascade", [False, True])
def test_a_stage_that_is_called_natural_is_an_attack_like_any_other(cascade):
    stage = Own("natural", pgd_then(lambda adv: adv))
    asked = ["natural", Staged("mine", (stage, Own("idle")))]
    found = evaluate(undefended(), digits(24), threat=THREAT, attacks=asked, sanity=False, cascade=cascade)
    assert stage.images > 0
    assert found.worst < 0.3


def test_what_leaves_an_image_as_it_is_costs_one_classification_whatever_its_name():
    net, (x, y) = undefended(), digits(20)
    found = [Judge(net, THREAT, 0).rule(Attack(name, 0, start="zero"), x, y, 0) for name in ("natural", "clean")]
    assert [(ruling.forwards, ruling.backwards) for ruling in found] == [(20, 0)] * 2


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
    ruling = Judge(net, THREAT, 0).rule(parse_attack(name), x, y, 0)
    assert ruling.forwards == (50 if name == "natural" else right * forwards)
    assert ruling.backwards == right * backwards


def test_fooled_images_leave_the_batch_and_cost_no_more_passes():
    net, (x, y) = undefended(), digits(50)
    right = int((net(x).argmax(1) == y).sum())
    ruling = Judge(net, THREAT, 0).rule(parse_attack("pgd-20"), x, y, 0)
    survivors = sum(ruling.correct)
    assert survivors < right
    assert 20 * survivors <= ruling.backwards < 20 * right


class Doubting(torch.nn.Module):
    """Claims that every image is fooled from the start; the exact model knows better."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).neg()

    def surely_correct(self, x, y):
        with torch.no_grad():
            return self.net(x).argmax(1) == y


def test_an_image_whose_fall_the_exact_model_denies_is_pushed_on_until_it_falls():
    net, (x, y) = undefended(), digits(50)
    x, y = x[(right := net(x).argmax(1) == y)], y[right]
    found = Attack("own", steps=20, start="zero")(Doubting(net), x, y, THREAT)
    moved = (found - x).flatten(1).abs().amax(1)
    assert bool((moved > 0.9 * THREAT.eps).any()), "images that only the twin holds for fooled must move on"


class Hasty(Doubting):
    """Claims the same, but knows which way to go: the answer is always its second choice."""

    def forward(self, x):
        logits = self.net(x)
        return logits - 1e3 * nn.functional.one_hot(logits.argmax(1), 10)


def test_restarts_attack_everyone_whom_the_exact_model_still_gets_right_and_nobody_else():
    net, (x, y) = undefended(), digits(100)
    x, y = x[(right := net(x).argmax(1) == y)], y[right]
    once, thrice = (parse_attack(name)(Hasty(net), x, y, THREAT, generator()) for name in ("pgd-3", "pgd-3x3"))
    stands = net(once).argmax(1) == y
    moved = (once != thrice).flatten(1).any(1)
    assert 0 < stands.sum() < len(y)
    assert torch.equal(moved, stands)


def restarted(net, x, y, how):
    """Each restart on all images, which keep the first example that fooled; and how many stood before each."""
    draw, found, standing = generator(), x, []
    for _ in range(how.restarts):
        stands = net(found).argmax(1) == y
        tried = replace(how, restarts=1)(net, x, y, THREAT, draw)
        found = torch.where(stands.view(-1, 1, 1, 1), tried, found)
        standing.append(int(stands.sum()))
    return found, standing


@pytest.mark.parametrize("name", ["pgd-2x4", "cw-2x4", "pgd-2x4-last"])
def test_restarts_on_survivors_alone_end_where_restarts_on_everyone_would(name):
    net, (x, y) = undefended().double(), digits(60)
    x, y = x[(right := net(x.double()).argmax(1) == y)].double(), y[right]
    counted = CountingModel(net)
    found = parse_attack(name)(counted, x, y, THREAT, generator())
    expected, standing = restarted(net, x, y, parse_attack(name))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert 0 < standing[3] < standing[0] == len(y)
    assert counted.backwards <= 2 * sum(standing)
    if name.endswith("last"):  # where nobody leaves on the way
        assert (counted.forwards, counted.backwards) == (2 * sum(standing) + sum(standing[:3]), 2 * sum(standing))


def test_counts_and_seconds_of_an_evaluation_are_the_sums_over_its_blocks():
    net, (x, y) = undefended(), digits(50)
    right = int((net(x).argmax(1) == y).sum())
    found = evaluate(net, (x, y), threat=THREAT, attacks=["fgsm", "pgd-3-last"], block=16, sanity=False)
    assert [(r.forwards, r.backwards) for r in found.results] == [(2 * right, right), (4 * right, 3 * right)]
    assert all(r.seconds > 0 for r in found.results)


def test_modes_gradients_weights_and_requires_grad_are_left_as_they_were():
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


def test_the_network_is_judged_in_eval_mode():
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


class Precise(nn.Module):
    """A network that notes the precision it runs in."""

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
    net, (x, y) = Precise(), images(12)
    with torch.autocast("cpu", torch.bfloat16):
        Judge(net, THREATS[0], 0).rule(parse_attack("pgd-2"), x, y, 0)
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


def test_evaluation_leaves_the_global_generator_and_the_weights_alone():
    net = undefended()
    state, before = torch.get_rng_state(), weights(net)
    evaluate(net, digits(20), threat=THREAT, attacks=EVERY)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_radius_zero_leaves_the_natural_accuracy():
    found = evaluate(undefended(), digits(40), threat=deat.Linf(0.0), attacks=["natural", "fgsm", "pgd-5"])
    assert found.verdicts["fgsm"] == found.verdicts["pgd-5"] == found.verdicts["natural"]
    assert found.flags == []


def test_restarts_and_the_plain_variant_are_judged_by_their_own_settings():
    net, data = undefended(), digits(60)
    chosen = ["pgd-3", "pgd-3x5", "pgd-3-last", Attack("mine", steps=3, alpha=0.5)]
    found = evaluate(net, data, threat=deat.Linf(0.05), attacks=chosen, sanity=False)
    told = found.settings["attacks"]
    assert [told[name]["restarts"] for name in ("pgd-3", "pgd-3x5")] == [1, 5]
    assert [told[name]["freeze"] for name in ("pgd-3", "pgd-3-last")] == [True, False]
    assert told["pgd-3"]["alpha"] == pytest.approx(0.0125)
    assert told["mine"]["alpha"] == pytest.approx(0.025)
    assert found.accuracy["pgd-3x5"] <= found.accuracy["pgd-3"] + 0.02


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_quick_precision_needs_a_gpu(precision):
    net, data = undefended(), digits(4)
    with pytest.raises(UsageError, match=f"{precision} need a CUDA device"):
        evaluate(net, data, threat=THREAT, attacks=["fgsm"], precision=precision)


def test_an_unknown_precision_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="fp16"):
        evaluate(undefended(), digits(4), threat=THREAT, attacks=["fgsm"], precision="fp61")


def test_an_evaluation_has_the_engines_that_training_has():
    assert fast_model.ENGINES == precision.ENGINES
    with pytest.raises(UsageError, match=r"unknown engine 'fast'.*Known: auto, compile, eager, graph"):
        evaluate(undefended(), digits(4), threat=THREAT, engine="fast")


@pytest.mark.parametrize("name", ["graph", "compile"])
def test_an_engine_of_cuda_s_needs_a_gpu(name):
    with pytest.raises(
        UsageError, match=f"engine '{name}' needs a CUDA device for an evaluation; use 'auto' or 'eager'"
    ):
        evaluate(undefended(), digits(4), threat=THREAT, engine=name)


def test_an_eager_evaluation_is_the_usual_one_where_there_is_no_gpu():
    usual, eager = (evaluate(undefended(), digits(8), threat=THREAT, engine=name) for name in ("auto", "eager"))
    assert usual.verdicts == eager.verdicts


@pytest.mark.parametrize(
    ("wanted", "device", "passes", "chosen"),
    [
        ("auto", "cpu", 10**9, "eager"),
        ("eager", "cpu", 10**9, "eager"),
        ("auto", "cuda", fast_model.COMPILE_MIN_PASSES - 1, "graph"),
        ("auto", "cuda", fast_model.COMPILE_MIN_PASSES, "compile"),
        ("eager", "cuda", 10**9, "eager"),
        ("graph", "cuda", 10**9, "graph"),
        ("compile", "cuda", 1, "compile"),
    ],
)
def test_auto_records_on_a_gpu_and_compiles_what_is_long(wanted, device, passes, chosen):
    assert fast_model.choose_engine(wanted, torch.device(device), passes) == chosen


def test_batches_are_padded_by_a_quarter_at_most():
    sizes = [padded_size(n) for n in range(1, 5000)]
    assert all(n <= size <= max(32, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 40
