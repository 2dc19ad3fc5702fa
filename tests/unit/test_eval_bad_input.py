"""Bad input to an evaluation is refused before any work, with what to do."""

import pytest
import torch

from deat.errors import DataError, DeatError, UsageError
from deat.evaluation.evaluator import evaluate
from deat.evaluation.named import attacker
from helpers.eval_attackers import Own
from helpers.nets import conv_net, images


class Untouched(torch.nn.Module):
    """A network that must not be asked."""

    def forward(self, x):
        raise AssertionError("work began")


def refused(match, *, error=UsageError, data=None, **options):
    with pytest.raises(error, match=match) as caught:
        evaluate(Untouched(), data or images(), **{"threat": "linf:0.1", "attacks": ["natural"], **options})
    assert isinstance(caught.value, DeatError)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("pdg-20", "pgd-20"),
        ("fsgm", "fgsm"),
        ("apgd", "apgd-ce"),
        ("fab", "fab-t"),
        ("sqare", "square"),
        ("naturl", "natural"),
    ],
)
def test_an_unknown_attack_is_refused_with_near_names_and_all_that_are_known(name, near):
    with pytest.raises(UsageError, match=f"unknown attack '{name}'.*Did you mean.*'{near}'"):
        attacker(name)
    refused("Known: aa, apgd-ce, apgd-t, cw-20, fab-t, fgsm, natural, pgd-20, square", attacks=["natural", name])


@pytest.mark.parametrize(
    "name", ["pgd", "pgd-0", "pgd-20x0", "cw-", "aa-20", "natural-last", "aax2", "worst", "pgd-1000000"]
)
def test_names_that_say_too_little_or_too_much_are_refused(name):
    refused("unknown attack", attacks=[name])


def test_names_are_read_in_any_case():
    assert attacker(" AA ").name == "aa"
    assert attacker("Square").parts == ("square",)
    assert attacker("PGD-20").name == "pgd-20"


def test_a_negative_seed_is_refused():
    refused("seed must be a whole number >= 0, not -1", seed=-1)


def test_an_empty_list_of_attacks_is_refused():
    refused("no attack was named", attacks=[])


def test_an_attack_named_twice_is_refused():
    refused("named twice", attacks=["pgd-20", "natural", " PGD-20 "])
    refused("named twice", attacks=["pgd-20", Own("pgd-20")])


def test_an_attack_cannot_have_the_headline_s_name():
    refused("worst", attacks=[Own("worst")])


@pytest.mark.parametrize("option", ["n", "block"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_images_below_one_is_refused(option, value):
    refused(f"{option} must be a number of images >= 1, not {value}", **{option: value})


def test_a_radius_in_levels_of_255_is_refused():
    refused("did you mean 8/255", threat="linf:8")


@pytest.mark.parametrize(
    ("threat", "match"),
    [
        ("linf", "has no radius"),
        ("l3:1", "unknown threat model 'l3'"),
        ("linf:x", "not a number"),
        ("linf:-0.1", "negative"),
        ("linf:nan", "not a number"),
    ],
)
def test_a_threat_that_is_none_is_refused(threat, match):
    refused(match, threat=threat)


def test_data_that_is_none_is_refused():
    zeros = torch.zeros(3, dtype=torch.int64)
    refused("expected class numbers", error=DataError, data=(torch.rand(3, 1, 4, 4), torch.rand(3)))
    refused("is empty", error=DataError, data=(torch.rand(0, 1, 4, 4), zeros[:0]))
    refused("divide by 255", error=DataError, data=(255 * torch.rand(3, 1, 4, 4), zeros))


def test_a_network_that_cannot_tell_all_classes_apart_is_refused():
    x, y = images(12)
    with pytest.raises(UsageError, match="tells 3 classes apart, but the data has 5"):
        evaluate(conv_net(), (x, torch.where(y == 2, 4, y)), threat="linf:0.1", attacks=["fgsm"])


def test_a_ledger_that_cannot_be_written_or_read_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    options = {"threat": "linf:0.1", "attacks": ["natural"]}
    with pytest.raises(DeatError, match="cannot write rulings"):
        evaluate(conv_net(), images(), ledger=file / "rulings", **options)
    with pytest.raises(DeatError, match="cannot read rulings"):
        evaluate(conv_net(), images(), ledger=tmp_path, **options)
