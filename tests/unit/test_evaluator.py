"""What an evaluation counts: each attack alone, the worst of all, the newly fooled images, and the cascade."""

from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.data import as_source
from deat.evaluation import quick_scores
from deat.evaluation.attack_verifier import derive_block_seed
from deat.evaluation.attacks import Attack, parse_attack
from deat.evaluation.evaluator import evaluate
from deat.tasks.per_example_losses import cross_entropy, margin_loss
from deat.utils.seeding import derive_seed
from helpers.eval_attackers import Own
from helpers.eval_nets import THREAT, digits, robust, undefended
from helpers.games import THREATS

LIST = ["natural", "fgsm", "pgd-5", "cw-5"]
RADII = {"linf": 0.15, "l2": 0.8, "l1": 3.0}
threats = pytest.mark.parametrize("threat", [type(t)(RADII[t.name]) for t in THREATS], ids=lambda t: t.name)


def slow_verdicts(net, x, y, name, threat, *, seed, block):
    """Each image attacked alone until it is fooled, from the start that its block draws."""
    attack, loss = parse_attack(name), margin_loss if name.startswith("cw") else cross_entropy
    verdicts = []
    for number, first in enumerate(range(0, len(y), block)):
        images, labels = x[first : first + block], y[first : first + block]
        right = net(images).argmax(1) == labels
        generator = torch.Generator().manual_seed(derive_block_seed(seed, name, number))
        starts = iter(threat.initial_delta(images[right], attack.start, generator))
        for image, label, known in zip(images, labels, right, strict=True):
            verdicts.append(bool(known) and is_still_correct(net, image, label, next(starts), attack, loss, threat))
    return verdicts


def is_still_correct(net, image, label, start, attack, loss, threat):
    image, label, delta = image[None], label[None], start[None]
    for _ in range(attack.steps):
        delta.requires_grad_()
        logits = net(image + delta)
        if logits.argmax(1) != label:
            return False
        (grad,) = torch.autograd.grad(loss(logits, label).sum(), delta)
        delta = threat.pgd_step(image, delta.detach(), grad, attack.alpha * threat.eps)
    return bool(net(image + delta).argmax(1) == label)


@threats
def test_each_attack_equals_a_slow_computation_image_by_image(threat):
    net, (x, y) = robust(), digits(60)
    evaluation = evaluate(net, (x, y), threat=threat, attacks=LIST, seed=3, block=25, sanity=False)
    for name in LIST:
        expected = slow_verdicts(net, x, y, name, threat, seed=3, block=25)
        assert evaluation.verdicts[name] == expected
        assert evaluation.accuracy[name] == sum(expected) / 60
    assert 0 < evaluation.accuracy["pgd-5"] < evaluation.accuracy["natural"]


def test_plain_accuracies_equal_a_slow_computation_with_starts_drawn_for_each_batch(monkeypatch):
    net, (x, y) = robust(), digits(60)
    real, seeds = quick_scores.logits_under_attack, []

    def record_seed(*arguments):
        seeds.append(arguments[5].initial_seed())
        return real(*arguments)

    monkeypatch.setattr(quick_scores, "logits_under_attack", record_seed)
    source = as_source((x, y), batch_size=25, shuffle=False)
    accuracies = quick_scores.compute_accuracies(net, source, LIST, THREAT, seed=3)
    assert seeds == [derive_seed(3, f"score {name}", batch) for batch in range(3) for name in LIST]
    for name in LIST:
        attack, loss = parse_attack(name), margin_loss if name.startswith("cw") else cross_entropy
        hits = []
        for batch, (images, labels) in enumerate(source.epoch(0)):
            generator = torch.Generator().manual_seed(derive_seed(3, f"score {name}", batch))
            starts = THREAT.initial_delta(images, attack.start, generator)
            hits += [
                is_still_correct(net, *item, attack, loss, THREAT) for item in zip(images, labels, starts, strict=True)
            ]
        assert accuracies[name] == pytest.approx(sum(hits) / 60)
    assert 0 < accuracies["pgd-5"] < accuracies["natural"]


def test_an_attack_s_verdicts_do_not_depend_on_the_other_attacks():
    net, data = robust(), digits(60)
    together = evaluate(net, data, threat=THREAT, attacks=LIST, block=25, sanity=False).verdicts
    for name in LIST:
        assert (
            evaluate(net, data, threat=THREAT, attacks=[name], block=25, sanity=False).verdicts[name] == together[name]
        )


def test_worst_is_the_conjunction_of_all_verdicts_image_by_image():
    evaluation = evaluate(robust(), digits(100), threat=THREAT, attacks=LIST, sanity=False)
    columns = [evaluation.verdicts[name] for name in LIST]
    worst = [all(hits) for hits in zip(*columns, strict=True)]
    assert evaluation.verdicts["worst"] == worst
    assert evaluation.worst == evaluation.accuracy["worst"] == sum(worst) / 100
    assert evaluation.worst <= min(evaluation.accuracy[name] for name in LIST)


def test_worst_is_below_every_attack_where_attacks_fool_different_images():
    def fools(which):
        def act(model, x, y, threat):
            adv = parse_attack("pgd-20")(model, x, y, threat, torch.Generator().manual_seed(0))
            return torch.where((torch.arange(len(x)) % 2 == which).view(-1, 1, 1, 1), adv, x)

        return Own(f"half {which}", act)

    evaluation = evaluate(undefended(), digits(40), threat=THREAT, attacks=[fools(0), fools(1)], sanity=False)
    assert evaluation.worst < min(evaluation.accuracy["half 0"], evaluation.accuracy["half 1"]) - 0.3


def test_newly_fooled_counts_the_images_that_each_attack_was_the_first_to_fool():
    evaluation = evaluate(robust(), digits(100), threat=THREAT, attacks=LIST, sanity=False)
    survivors = [True] * 100
    for name in LIST:
        left = [a and b for a, b in zip(survivors, evaluation.verdicts[name], strict=True)]
        assert evaluation.newly_fooled[name] == sum(survivors) - sum(left)
        survivors = left
    assert sum(evaluation.newly_fooled.values()) == 100 - sum(evaluation.verdicts["worst"])
    assert evaluation.newly_fooled["natural"] == 100 - sum(evaluation.verdicts["natural"])


@pytest.mark.parametrize(
    "order", [["natural", "fgsm", "pgd-5", "cw-5"], ["pgd-5", "natural", "cw-5"], ["fgsm", "pgd-5"]]
)
def test_a_cascade_has_no_accuracy_of_a_single_attack_but_natural(order):
    net, data = robust(), digits(100)
    evaluation = evaluate(net, data, threat=THREAT, attacks=order, block=40, cascade=True, sanity=False)
    assert set(evaluation.accuracy) == set(evaluation.intervals) == {"natural", "worst"} & {*order, "worst"}
    assert set(evaluation.as_json()["accuracy"]) == set(evaluation.as_json()["per_class"]) == set(evaluation.accuracy)
    assert evaluation.settings["cascade"] is True
    natural = evaluate(net, data, threat=THREAT, attacks=["natural"], sanity=False)
    assert evaluation.accuracy.get("natural") in (None, natural.accuracy["natural"])
    assert evaluation.verdicts["worst"] == [
        all(hits) for hits in zip(*(evaluation.verdicts[a] for a in order), strict=True)
    ]
    assert sum(evaluation.newly_fooled.values()) == 100 - sum(evaluation.verdicts["worst"])


@pytest.mark.parametrize("place", range(4))
def test_a_cascade_gives_each_attack_only_the_survivors_of_those_before_it_wherever_natural_is_named(place):
    def fool_first(count):
        def act(model, x, y, threat):
            adv = parse_attack("pgd-20")(model, x, y, threat, torch.Generator().manual_seed(0))
            return torch.where((torch.arange(len(x)) < count).view(-1, 1, 1, 1), adv, x)

        return act

    net, (x, y) = undefended(), digits(40)
    chain = [Own("a", fool_first(10)), Own("b", fool_first(5)), Own("c")]
    order = [*chain[:place], "natural", *chain[place:]]
    evaluation = evaluate(net, (x, y), threat=THREAT, attacks=order, cascade=True, sanity=False)
    alive = torch.tensor(evaluation.verdicts["natural"])
    for own in chain:
        assert torch.equal(torch.cat(own.seen), x[alive])
        alive = alive & torch.tensor(evaluation.verdicts[own.name])
    assert evaluation.verdicts["worst"] == alive.tolist()
    assert chain[0].images > chain[1].images > chain[2].images


def test_an_image_that_the_first_attack_fools_alone_is_fooled_in_a_cascade():
    net, data = robust(), digits(100)
    alone = evaluate(net, data, threat=THREAT, attacks=["pgd-5"], sanity=False)
    chain = evaluate(net, data, threat=THREAT, attacks=["pgd-5", "cw-5"], cascade=True, sanity=False)
    assert chain.verdicts["pgd-5"] == alone.verdicts["pgd-5"]
    assert chain.worst <= alone.worst


def test_a_cascade_makes_fewer_passes_than_the_attacks_alone():
    net, data = undefended(), digits(100)
    alone, chain = (
        evaluate(net, data, threat=THREAT, attacks=["pgd-5", "cw-5"], cascade=cascade, sanity=False)
        for cascade in (False, True)
    )
    assert chain.results[1].backwards < alone.results[1].backwards


def test_images_come_from_a_pair_a_data_set_a_loader_or_an_image_set_with_the_same_verdicts():
    net, (x, y) = robust(), digits(60)
    kinds = [
        (x, y),
        (x.numpy(), y.numpy()),
        TensorDataset(x, y),
        DataLoader(TensorDataset(x, y), batch_size=13),
        [(x[:20], y[:20]), (x[20:], y[20:])],
        deat.load_data("digits").test,
    ]
    every = [evaluate(net, data, threat="linf:0.15", attacks=LIST, n=60, sanity=False).verdicts for data in kinds]
    assert all(verdicts == every[0] for verdicts in every)


def test_the_undefended_network_loses_its_accuracy_and_the_robust_one_keeps_most_of_it():
    def shares(net, threat):
        evaluation = evaluate(net, digits(), threat=threat, attacks=["natural", "pgd-20"], sanity=False)
        return evaluation.accuracy["natural"], evaluation.accuracy["pgd-20"]

    natural, attacked = shares(undefended(), THREAT)
    assert natural > 0.95
    assert attacked < 0.3
    assert shares(undefended(), deat.Linf(0.25))[1] < 0.02
    natural, attacked = shares(robust(), THREAT)
    assert natural > 0.95
    assert attacked > 0.65


def test_accuracy_falls_with_the_radius_from_the_natural_one_to_chance():
    radii = [0, 2 / 255, 4 / 255, 8 / 255, 16 / 255, 32 / 255, 128 / 255]
    for net in (robust(), undefended()):
        swept = [
            evaluate(net, digits(100), threat=deat.Linf(r), attacks=["natural", "pgd-20"], sanity=False) for r in radii
        ]
        shares = [evaluation.accuracy["pgd-20"] for evaluation in swept]
        assert shares[0] == swept[0].accuracy["natural"]
        assert all(more <= less + 0.02 for less, more in pairwise(shares))
        assert shares[-1] <= 0.1


def test_an_attack_without_a_random_start_does_not_depend_on_the_order_of_images():
    net, (x, y) = robust(), digits(100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    chosen = ["natural", "fgsm", Attack("from zero", steps=10, start="zero")]
    plain = evaluate(net, (x, y), threat=THREAT, attacks=chosen, block=30, sanity=False)
    mixed = evaluate(net, (x[order], y[order]), threat=THREAT, attacks=chosen, block=17, sanity=False)
    for name, hits in plain.verdicts.items():
        assert mixed.verdicts[name] == [hits[i] for i in order]


def test_a_threat_may_be_given_as_text_and_progress_is_reported_after_each_result():
    reports = []
    evaluation = evaluate(
        undefended(),
        digits(50),
        threat="l2:0.5",
        attacks=["natural", "fgsm"],
        block=20,
        sanity=False,
        progress=lambda progress: reports.append((progress.done, progress.total, progress.name)),
    )
    assert evaluation.settings["threat"] == {"norm": "l2", "eps": 0.5}
    assert reports.pop(0) == (0, 6, "")
    assert [done for done, _, _ in reports] == list(range(1, 7))
    assert {total for _, total, _ in reports} == {6}
    assert [name for _, _, name in reports] == ["natural", "fgsm"] * 3


def test_a_small_network_uses_one_thread_unless_threads_is_given_and_the_caller_s_number_is_restored():
    used = []

    def note(model, x, y, threat):
        used.append(torch.get_num_threads())
        return x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        evaluate(robust(), digits(20), threat=THREAT, attacks=[Own("note", note)], sanity=False)
        assert (used, torch.get_num_threads()) == ([1], 2)
        evaluate(robust(), digits(20), threat=THREAT, attacks=[Own("note", note)], sanity=False, threads=2)
        assert used == [1, 2]
    finally:
        torch.set_num_threads(before)
