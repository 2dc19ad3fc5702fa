"""Bad arguments of an evaluation are refused before any work, with what to do."""

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


class NeverCalled(torch.nn.Module):
    """A network that must not be called."""

    def forward(self, x):
        raise AssertionError("work began")


def assert_refused(match, *, error=UsageError, data=None, **options):
    with pytest.raises(error, match=match) as caught:
        evaluate(NeverCalled(), data or images(), **{"threat": "linf:0.1", "attacks": ["natural"], **options})
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
def test_an_unknown_attack_is_refused_with_near_names_and_all_known_names(name, near):
    with pytest.raises(UsageError, match=f"'{name}'.*Did you mean.*'{near}'"):
        get_attack(name)
    assert_refused(
        "aa, apgd-ce, apgd-t, cw-20, fab-t, fgsm, natural, pgd-20, segpgd-20, square", attacks=["natural", name]
    )


@pytest.mark.parametrize(
    "name", ["pgd", "pgd-0", "pgd-20x0", "cw-", "aa-20", "natural-last", "aax2", "worst", "pgd-1000000"]
)
def test_incomplete_and_overlong_names_are_refused(name):
    assert_refused(f"unknown attack '{name}'", attacks=[name])


def test_names_are_read_in_any_case():
    assert get_attack(" AA ").name == "aa"
    assert get_attack("Square").parts == ("square",)
    assert get_attack("PGD-20").name == "pgd-20"


@pytest.mark.parametrize("value", [-1, 1.5, "1", True, None])
def test_a_seed_that_is_no_whole_number_from_0_is_refused(value):
    assert_refused(f"seed .*>= 0, not {value!r}", seed=value)


def test_an_empty_list_of_attacks_is_refused_with_examples():
    assert_refused("no attack .*pgd-20", attacks=[])
    assert_refused("no attack .*pgd-20", attacks=" , ")


def test_attacks_may_be_named_in_one_text_as_on_the_command_line():
    assert [attack.name for attack in get_attacks("natural, PGD-3,aa")] == ["natural", "pgd-3", "aa"]
    assert [attack.name for attack in get_attacks("aa")] == ["aa"]
    evaluation = evaluate(conv_net(), images(8), threat="linf:0.1", attacks="natural,pgd-2", sanity=False)
    assert list(evaluation.accuracy) == ["natural", "pgd-2", "worst"]


@pytest.mark.parametrize("bad", [None, 3, [3], [None], [lambda *a: None]])
def test_an_object_that_is_no_attack_is_refused(bad):
    assert_refused("attack", attacks=bad)


def test_an_attack_named_twice_is_refused():
    assert_refused("twice", attacks=["pgd-20", "natural", " PGD-20 "])
    assert_refused("twice", attacks=["pgd-20", Own("pgd-20")])


def test_an_attack_cannot_be_named_worst():
    assert_refused("'worst'", attacks=[Own("worst")])


class LookalikeOfNatural(Attack):
    """An attack with the settings of natural, and code of its own."""


@pytest.mark.parametrize(
    "attack",
    [
        Own("natural"),
        Attack("natural", steps=0),
        LookalikeOfNatural("natural", steps=0, start="zero"),
    ],
)
def test_an_attack_that_does_something_cannot_be_named_natural(attack):
    assert_refused("'natural'", attacks=[attack])


@pytest.mark.parametrize("option", ["n", "block"])
@pytest.mark.parametrize("value", [0, -1, "10", 10.5, True])
def test_a_number_of_images_below_1_or_not_whole_is_refused(option, value):
    assert_refused(f"{option} .*>= 1, not {value!r}", **{option: value})


@pytest.mark.parametrize("value", [0, 1.5, "2"])
def test_a_number_of_threads_below_1_or_not_whole_is_refused(value):
    assert_refused(f"threads .*>= 1, not {value!r}", threads=value)


def test_whole_numbers_of_numpy_are_accepted_and_can_be_saved(tmp_path):
    options = {"threat": "linf:0.125", "attacks": "natural,pgd-2", "sanity": False}
    numbers = {"n": 6, "block": 4, "seed": 1}
    plain = evaluate(conv_net(), images(8), **options, **numbers)
    options["threat"] = Linf(np.float32(0.125))
    numpy_numbers = {"n": np.int64(6), "block": np.int32(4), "seed": np.int64(1)}
    evaluation = evaluate(conv_net(), images(8), **options, **numpy_numbers, save=tmp_path / "e.json")
    assert evaluation.verdicts == plain.verdicts
    assert evaluation.as_json()["settings"] == plain.as_json()["settings"]
    assert load_evaluation(tmp_path / "e.json").verdicts == plain.verdicts


def test_a_radius_in_levels_of_255_is_refused_with_the_radius_that_was_meant():
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
        (float("nan"), r"nan .*linf:8/255"),
        ("linf:1", "linf eps 1 reaches every image of .*usual is 4/255 to 8/255"),
        ("l2:99", "l2 eps 99 reaches every image of .*usual is 0.5 to 3"),
        ("l1:9999", "l1 eps 9999 reaches every image of .*usual is 12 and more"),
    ],
)
def test_a_threat_without_a_usable_radius_is_refused(threat, match):
    assert_refused(match, threat=threat)


def test_data_without_images_in_range_and_class_numbers_is_refused():
    zeros = torch.zeros(3, dtype=torch.int64)
    assert_refused("expected class numbers", error=DataError, data=(torch.rand(3, 1, 4, 4), torch.rand(3)))
    assert_refused("is empty", error=DataError, data=(torch.rand(0, 1, 4, 4), zeros[:0]))
    assert_refused("divide by 255", error=DataError, data=(255 * torch.rand(3, 1, 4, 4), zeros))


@pytest.mark.parametrize("data", [None, 3])
def test_data_of_another_type_is_refused_with_the_accepted_types(data):
    with pytest.raises(UsageError, match=f"{type(data).__name__}.*ImageSet"):
        evaluate(NeverCalled(), data, threat="linf:0.1")


@pytest.mark.parametrize("model", [lambda x: x, "resnet", None])
def test_a_model_that_is_no_module_is_refused_with_what_to_wrap_it_in(model):
    with pytest.raises(UsageError, match=f"{type(model).__name__}.*torch.nn.Module"):
        evaluate(model, images(), threat="linf:0.1")


def test_a_model_made_in_inference_mode_is_refused_and_one_made_outside_is_evaluated_in_it():
    options = {"threat": "linf:0.1", "attacks": "fgsm"}
    outside = conv_net()
    with torch.inference_mode():
        with pytest.raises(UsageError, match=r"inference_mode\(\).*outside"):
            evaluate(conv_net(), images(), **options)
        inside = evaluate(outside, images(), **options)
    assert inside.verdicts == evaluate(outside, images(), **options).verdicts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_model_with_weights_of_another_dtype_is_refused_with_how_to_convert_it(dtype):
    with pytest.raises(UsageError, match=rf"{dtype}.*torch.float32.*model.float\(\)"):
        evaluate(conv_net().to(dtype), images(), threat="linf:0.1")


def test_a_model_that_casts_its_input_itself_is_evaluated():
    casting = Around(conv_net().double(), lambda x: x.double(), lambda logits: logits.float())
    cast, plain = (evaluate(net, images(), threat="linf:0.1", attacks="pgd-3") for net in (casting, conv_net()))
    assert cast.verdicts["pgd-3"] == plain.verdicts["pgd-3"]


def test_an_error_inside_the_model_is_raised_unchanged():
    class Broken(torch.nn.Linear):
        def forward(self, x):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match=r"^inside$"):
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
def test_a_model_that_does_not_return_logits_is_refused(behind, shown):
    with pytest.raises(UsageError, match=rf"{shown}.*shape"):
        evaluate(Around(conv_net(), lambda x: x, behind), images(), threat="linf:0.1")


@pytest.mark.parametrize("sanity", [True, False])
def test_a_model_that_modifies_its_input_is_refused_and_the_images_are_unchanged(sanity):
    x, y = images()
    original = x.clone()
    with pytest.raises(UsageError, match="x = x - mean"):
        evaluate(Around(conv_net(), lambda x: x.sub_(0.1), same), (x, y), threat="linf:0.1", sanity=sanity)
    assert torch.equal(x, original)


@pytest.mark.parametrize("bad", ["text", 3, {"model": object()}, {"size": float("nan")}])
def test_about_values_that_json_does_not_have_are_refused(bad):
    assert_refused("about must be a dict", about=bad)


def test_a_model_with_fewer_outputs_than_classes_is_refused_with_the_image_of_a_larger_label():
    x, y = images(12)
    index = int((y == 2).nonzero()[0])
    with pytest.raises(UsageError, match=f"3 outputs.*5 classes.*Image {index} has the label 4"):
        evaluate(conv_net(), (x, torch.where(y == 2, 4, y)), threat="linf:0.1", attacks=["fgsm"])


def test_labels_that_count_from_1_are_refused_with_what_to_do():
    x, y = images(12)
    with pytest.raises(UsageError, match="from 1, subtract 1"):
        evaluate(conv_net(), (x, y + 1), threat="linf:0.1", attacks=["fgsm"])


def test_a_save_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for save in (tmp_path, tmp_path / "file" / "e.json", str(tmp_path / "file" / "folder" / "e.json")):
        assert_refused("cannot be written", error=CheckpointError, save=save)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("data", [b"notes", b"\xff\x00", b"", b"{}", b"[" * 100_000], ids=lambda data: str(data[:5]))
def test_a_file_that_is_no_evaluation_is_not_replaced(data, tmp_path):
    file = tmp_path / "best.safetensors"
    file.write_bytes(data)
    assert_refused(r"save '.*best\.safetensors'.*not replaced", save=file)
    assert file.read_bytes() == data


def test_an_earlier_evaluation_is_replaced(tmp_path):
    file, options = tmp_path / "e.json", {"threat": "linf:0.1", "attacks": ["natural"], "sanity": False}
    evaluate(conv_net(), images(), **options, save=file)
    evaluate(conv_net(), images(9), **options, save=str(file))
    assert len(load_evaluation(file).labels) == 9


def test_a_resume_log_that_cannot_be_written_or_read_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    options = {"threat": "linf:0.1", "attacks": ["natural"]}
    with pytest.raises(CheckpointError, match="cannot write the resume log"):
        evaluate(conv_net(), images(), resume_log=file / "log.jsonl", **options)
    with pytest.raises(CheckpointError, match="cannot read the resume log"):
        evaluate(conv_net(), images(), resume_log=tmp_path, **options)


def test_a_radius_too_small_for_its_norm_is_warned_of_unless_checks_are_off():
    options = {"attacks": ["natural", "fgsm"], "progress": False}
    with pytest.warns(RuntimeWarning, match="l2 eps 8/255 .*linf") as caught:
        evaluate(conv_net(), images(), threat="l2:8/255", **options)
    assert caught[0].filename == __file__
    evaluate(conv_net(), images(), threat="l2:8/255", sanity=False, **options)
    evaluate(conv_net(), images(), threat="l2:0", **options)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("normalize", "deat.add_normalization(model, mean, std)"),
        ("device", "model.to('cuda')"),
        ("batch_size", "is block"),
        ("eps", "threat=deat.Linf(8 / 255)"),
        ("attack", "Did you mean 'attacks'"),
    ],
)
def test_a_keyword_that_evaluate_does_not_have_is_refused_with_what_to_use(name, fix):
    with pytest.raises(UsageError, match=f"unknown keyword of evaluate '{name}'") as caught:
        evaluate(conv_net(), images(), threat="linf:0.1", **{name: 1})
    assert fix in str(caught.value)
    assert "unknown," not in str(caught.value)
