"""Bad input to an evaluation is refused before any work, with what to do."""

import numpy as np
import pytest
import torch

from deat.errors import CheckpointError, DataError, DeatError, UsageError
from deat.evaluation.attack_registry import get_attack, get_attacks
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import load_evaluation
from deat.threat import Linf
from helpers.eval_attackers import Own
from helpers.eval_nets import Around, same
from helpers.nets import conv_net, images


class Untouched(torch.nn.Module):
    """A network that must not be asked."""

    def forward(self, x):
        raise AssertionError("work began")


def assert_refused(match, *, error=UsageError, data=None, **options):
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
        get_attack(name)
    assert_refused("Known: aa, apgd-ce, apgd-t, cw-20, fab-t, fgsm, natural, pgd-20, square", attacks=["natural", name])


@pytest.mark.parametrize(
    "name", ["pgd", "pgd-0", "pgd-20x0", "cw-", "aa-20", "natural-last", "aax2", "worst", "pgd-1000000"]
)
def test_names_that_say_too_little_or_too_much_are_refused(name):
    assert_refused("unknown attack", attacks=[name])


def test_names_are_read_in_any_case():
    assert get_attack(" AA ").name == "aa"
    assert get_attack("Square").parts == ("square",)
    assert get_attack("PGD-20").name == "pgd-20"


def test_a_negative_seed_is_refused():
    assert_refused("seed must be a whole number >= 0, not -1", seed=-1)


@pytest.mark.parametrize("value", [1.5, "1", True, None])
def test_a_seed_that_is_no_whole_number_is_refused(value):
    assert_refused(f"seed must be a whole number >= 0, not {value!r}", seed=value)


def test_numbers_of_numpy_are_taken_and_can_be_written(tmp_path):
    asked = {"attacks": ["natural"], "n": np.int64(6), "block": np.int32(4), "seed": np.int64(3)}
    found = evaluate(conv_net(), images(8), threat=Linf(np.float32(0.125)), **asked, save=tmp_path / "found.json")
    assert (len(found.labels), found.settings["block"], found.settings["seed"]) == (6, 4, 3)
    assert (tmp_path / "found.json").is_file()


def test_an_empty_list_of_attacks_is_refused():
    assert_refused("no attack was named", attacks=[])
    assert_refused("no attack was named", attacks=" , ")


def test_attacks_may_be_named_in_one_text_as_on_the_command_line():
    assert [how.name for how in get_attacks("natural, PGD-3,aa")] == ["natural", "pgd-3", "aa"]
    assert [how.name for how in get_attacks("aa")] == ["aa"]
    found = evaluate(conv_net(), images(8), threat="linf:0.1", attacks="natural,fgsm", sanity=False)
    assert list(found.accuracy) == ["natural", "fgsm", "worst"]


@pytest.mark.parametrize("bad", [None, 3, [3], [None], [lambda *a: None]])
def test_what_is_no_attack_is_refused(bad):
    assert_refused("is no attack", attacks=bad)


def test_an_attack_named_twice_is_refused():
    assert_refused("named twice", attacks=["pgd-20", "natural", " PGD-20 "])
    assert_refused("named twice", attacks=["pgd-20", Own("pgd-20")])


def test_an_attack_cannot_have_the_headline_s_name():
    assert_refused("worst", attacks=[Own("worst")])


class Moving(Attack):
    """An attack whose settings are those of none, and whose making is its own."""


@pytest.mark.parametrize(
    "how",
    [
        Own("natural"),
        Attack("natural", steps=20),
        Attack("natural", steps=0),
        Attack("natural", steps=1, start="zero"),
        Moving("natural", steps=0, start="zero"),
    ],
)
def test_an_attack_cannot_have_the_name_of_none(how):
    assert_refused("an attack cannot be named 'natural'", attacks=[how])


@pytest.mark.parametrize("option", ["n", "block"])
@pytest.mark.parametrize("value", [0, -1, "10", 10.5, True])
def test_a_number_of_images_that_is_none_is_refused(option, value):
    assert_refused(f"{option} must be a number of images >= 1, not {value!r}", **{option: value})


def test_numpy_s_whole_numbers_are_numbers():
    options = {"threat": "linf:0.1", "attacks": "natural,pgd-2", "sanity": False}
    numbers = {"n": 6, "block": 4, "seed": 1}
    plain = evaluate(conv_net(), images(8), **options, **numbers)
    found = evaluate(conv_net(), images(8), **options, **{name: np.int64(v) for name, v in numbers.items()})
    assert found.verdicts == plain.verdicts
    assert found.as_json()["settings"] == plain.as_json()["settings"]


def test_a_radius_in_levels_of_255_is_refused():
    assert_refused("did you mean 8/255", threat="linf:8")


@pytest.mark.parametrize(
    ("threat", "match"),
    [
        ("linf", "has no radius"),
        ("l3:1", "unknown threat model 'l3'"),
        ("linf:x", "not a number"),
        ("linf:-0.1", "negative"),
        ("linf:nan", "not a number"),
        ("linf:inf", "not a number"),
        (float("nan"), "unknown threat model 'nan'"),
        ("linf:1", "linf eps 1 reaches every image of .*usual is 4/255 to 8/255"),
        ("l2:99", "l2 eps 99 reaches every image of .*usual is 0.5 to 3"),
        ("l1:9999", "l1 eps 9999 reaches every image of .*usual is 12 and more"),
    ],
)
def test_a_threat_that_is_none_is_refused(threat, match):
    assert_refused(match, threat=threat)


def test_data_that_is_none_is_refused():
    zeros = torch.zeros(3, dtype=torch.int64)
    assert_refused("expected class numbers", error=DataError, data=(torch.rand(3, 1, 4, 4), torch.rand(3)))
    assert_refused("is empty", error=DataError, data=(torch.rand(0, 1, 4, 4), zeros[:0]))
    assert_refused("divide by 255", error=DataError, data=(255 * torch.rand(3, 1, 4, 4), zeros))


@pytest.mark.parametrize("data", [None, 3])
def test_what_holds_no_images_is_refused_without_a_word_of_training(data):
    with pytest.raises(UsageError, match=f"cannot read images from a {type(data).__name__}; pass an ImageSet"):
        evaluate(Untouched(), data, threat="linf:0.1")


@pytest.mark.parametrize("model", [lambda x: x, "resnet", None])
def test_a_model_that_is_no_module_is_refused(model):
    with pytest.raises(UsageError, match=f"the model is a {type(model).__name__}; wrap it in a torch.nn.Module"):
        evaluate(model, images(), threat="linf:0.1")


def test_a_model_made_in_inference_mode_is_refused_and_one_made_outside_is_judged_in_it():
    options = {"threat": "linf:0.1", "attacks": "fgsm"}
    outside = conv_net()
    with torch.inference_mode():
        with pytest.raises(UsageError, match=r"made in torch.inference_mode\(\).*make it outside"):
            evaluate(conv_net(), images(), **options)
        found = evaluate(outside, images(), **options)
    assert found.verdicts == evaluate(outside, images(), **options).verdicts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_model_whose_weights_cannot_take_float32_images_is_refused_with_what_to_do(dtype):
    with pytest.raises(UsageError, match=rf"weights are {dtype}, and images torch.float32: give it as model.float\(\)"):
        evaluate(conv_net().to(dtype), images(), threat="linf:0.1")


def test_a_model_that_casts_by_itself_is_judged():
    inside = Around(conv_net().double(), lambda x: x.double(), lambda logits: logits.float())
    found, plain = (evaluate(net, images(), threat="linf:0.1", attacks="pgd-3") for net in (inside, conv_net()))
    assert found.verdicts["pgd-3"] == plain.verdicts["pgd-3"]


def test_an_error_of_the_model_s_own_is_not_explained_away():
    class Broken(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        evaluate(Broken(2, 2), images(), threat="linf:0.1")


@pytest.mark.parametrize(
    ("behind", "shown"),
    [
        (lambda logits: (logits, logits), "tuple"),
        (lambda logits: logits[:, 0], r"shape \(1,\)"),
        (lambda logits: logits[:, :, None], r"shape \(1, 3, 1\)"),
        (lambda logits: logits.argsort(1), "torch.int64"),
    ],
)
def test_a_model_that_does_not_answer_with_logits_is_refused(behind, shown):
    with pytest.raises(UsageError, match=rf"{shown}.*return logits of shape \(images, classes\)"):
        evaluate(Around(conv_net(), lambda x: x, behind), images(), threat="linf:0.1")


@pytest.mark.parametrize("sanity", [True, False])
def test_a_model_that_changes_the_images_it_is_given_is_refused_and_they_are_left_as_they_were(sanity):
    x, y = images()
    held = x.clone()
    with pytest.raises(UsageError, match="the model changes the images it is given: write x = x - mean"):
        evaluate(Around(conv_net(), lambda x: x.sub_(0.1), same), (x, y), threat="linf:0.1", sanity=sanity)
    assert torch.equal(x, held)


@pytest.mark.parametrize("bad", ["text", 3, {"model": object()}, {"size": float("nan")}])
def test_what_a_record_cannot_say_of_itself_is_refused_before_any_work(bad):
    assert_refused("about must be a dict", about=bad)


def test_a_network_that_cannot_tell_all_classes_apart_is_refused():
    x, y = images(12)
    at = int((y == 2).nonzero()[0])
    with pytest.raises(UsageError, match=rf"\b3 classes.*\b5\b.*Image {at} has the label 4"):
        evaluate(conv_net(), (x, torch.where(y == 2, 4, y)), threat="linf:0.1", attacks=["fgsm"])


def test_labels_that_count_from_one_are_told_to_begin_at_zero():
    x, y = images(12)
    with pytest.raises(UsageError, match=r"labels count from 1, subtract 1"):
        evaluate(conv_net(), (x, y + 1), threat="linf:0.1", attacks=["fgsm"])


def test_a_file_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    for save in (tmp_path, tmp_path / "file" / "e.json", str(tmp_path / "file" / "folder" / "e.json")):
        assert_refused("cannot be written; name a file", error=CheckpointError, save=save)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("held", [b"notes", b"\xff\x00", b"", b"{}", b"[" * 100_000], ids=lambda held: str(held[:5]))
def test_a_file_that_is_no_evaluation_is_not_replaced(held, tmp_path):
    file = tmp_path / "best.safetensors"
    file.write_bytes(held)
    assert_refused("exists and is no evaluation, so it is not replaced", save=file)
    assert file.read_bytes() == held


def test_an_earlier_evaluation_is_replaced(tmp_path):
    file, asked = tmp_path / "e.json", {"threat": "linf:0.1", "attacks": ["natural"], "sanity": False}
    evaluate(conv_net(), images(), **asked, save=file)
    evaluate(conv_net(), images(9), **asked, save=str(file))
    assert len(load_evaluation(file).labels) == 9


def test_a_ledger_that_cannot_be_written_or_read_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    options = {"threat": "linf:0.1", "attacks": ["natural"]}
    with pytest.raises(DeatError, match="cannot write rulings"):
        evaluate(conv_net(), images(), resume_log=file / "rulings", **options)
    with pytest.raises(DeatError, match="cannot read rulings"):
        evaluate(conv_net(), images(), resume_log=tmp_path, **options)


def test_a_radius_that_says_nothing_of_robustness_is_remarked_on_unless_checks_are_off():
    given = {"attacks": ["natural", "fgsm"], "progress": False}
    with pytest.warns(RuntimeWarning, match="l2 eps 0.0314 is less than .* looks like one for linf") as said:
        evaluate(conv_net(), images(), threat="l2:8/255", **given)
    assert said[0].filename == __file__
    evaluate(conv_net(), images(), threat="l2:8/255", sanity=False, **given)
    evaluate(conv_net(), images(), threat="l2:0", **given)
