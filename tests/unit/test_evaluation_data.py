"""What evaluate accepts as data, and where its threat model comes from."""

from dataclasses import replace

import pytest
import torch

import deat
from deat.errors import DataError, UsageError
from helpers.nets import conv_net, images

OPTIONS = {"attacks": "natural,fgsm", "sanity": False, "progress": False}


@pytest.fixture(scope="module")
def digits() -> deat.DataSplits:
    whole = deat.load_data("digits")
    first = range(24)
    return replace(whole, train=whole.train.subset(range(24, 48)), test=whole.test.subset(first))


def net() -> torch.nn.Module:
    return deat.build_model("small", in_channels=1, image_size=8)


def test_a_data_set_is_evaluated_on_its_test_part_against_its_own_threat_model(digits):
    model = net()
    whole = deat.evaluate(model, digits, **OPTIONS)
    part = deat.evaluate(model, digits.test, threat="linf:0.15", **OPTIONS)
    assert whole.verdicts == part.verdicts
    assert whole.labels == digits.test.labels.tolist()
    assert whole.settings["threat"] == {"norm": "linf", "eps": 0.15}
    assert whole.settings["about"]["data"] == "digits"
    assert digits.threat == "linf:0.15"


def test_another_threat_model_than_the_data_set_s_is_used_where_it_is_given(digits):
    assert deat.evaluate(net(), digits, threat="l2:0.5", **OPTIONS).settings["threat"] == {"norm": "l2", "eps": 0.5}


def test_a_data_set_without_test_images_is_evaluated_on_its_val_part(digits):
    evaluation = deat.evaluate(net(), replace(digits, test=None, val=digits.train), **OPTIONS)
    assert evaluation.labels == digits.train.labels.tolist()
    both = replace(digits, val=digits.train)
    assert deat.evaluate(net(), both, **OPTIONS).labels == digits.test.labels.tolist()


def test_a_data_set_without_test_and_val_images_is_refused_with_where_to_put_them(digits):
    with pytest.raises(DataError, match=r"'digits' has neither a test part nor a val part.*test/ or val/"):
        deat.evaluate(net(), replace(digits, test=None), **OPTIONS)


@pytest.mark.parametrize("data", [images(), [images()], "digits"], ids=["tensors", "batches", "name"])
def test_other_data_needs_a_threat_model(data):
    with pytest.raises(UsageError, match=r"threat=deat\.Linf\(8 / 255\)"):
        deat.evaluate(conv_net(), data, **OPTIONS)


def test_fit_and_evaluate_take_the_same_data_set_with_the_same_threat_model(digits):
    result = deat.fit(net(), digits, method="fgsm", epochs=1, batch_size=8, progress=False)
    evaluation = deat.evaluate(result.model, digits, **OPTIONS)
    assert evaluation.settings["threat"] == {"norm": "linf", "eps": 0.15}
    assert result.history[0].alpha == pytest.approx(1.25 * 0.15)
