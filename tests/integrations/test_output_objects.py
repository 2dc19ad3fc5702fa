"""Networks whose outputs are objects with logits: trained, evaluated, saved and exported as any other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.models import LogitsModel

DIGITS = deat.load_data("digits")
OPTIONS: dict[str, Any] = {"threat": "linf:0.1", "epochs": 2, "batch_size": 64, "lr": 0.05, "progress": False}


class WithObject(nn.Module):
    """A network that returns an object, as those of Hugging Face transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = deat.build_model("small", in_channels=1, image_size=8)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.net(x))


@pytest.mark.parametrize("method", ["m+deat", "u-fgsm", "trades", "yopo-3-2", "f+pgd-3"])
def test_an_object_with_logits_is_trained_as_the_tensor_is(method):
    net, plain = WithObject(), WithObject().net
    result, expected = (deat.fit(model, DIGITS.train, method=method, val=0.1, **OPTIONS) for model in (net, plain))
    assert result.history == expected.history
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters(), strict=True))
    assert isinstance(net(torch.zeros(1, 1, 8, 8)), SimpleNamespace), "the network itself is as it was"


def test_an_object_with_logits_is_evaluated_as_the_tensor_is():
    net = WithObject()
    data = {"data": DIGITS, "n": 100, "attacks": "natural,pgd-3,apgd-ce", "progress": False}
    with_object, plain, wrapped = (deat.evaluate(model, **data) for model in (net, net.net, LogitsModel(net)))
    assert with_object.accuracy == plain.accuracy == wrapped.accuracy


def test_weights_keep_the_names_of_the_network(tmp_path):
    net = WithObject()
    result = deat.fit(net, DIGITS.train, method="fgsm", checkpoints=tmp_path / "kept", **OPTIONS)
    assert result.best.weights.keys() == net.state_dict().keys()
    deat.save_weights(result.model, tmp_path / "net.safetensors")
    other = WithObject()
    deat.load_weights(other, tmp_path / "net.safetensors")
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_a_program_is_exported_with_tensors_as_outputs(tmp_path):
    net = WithObject()
    file = deat.export(net, tmp_path / "net.pt2", example=torch.rand(1, 1, 8, 8))
    x = torch.rand(3, 1, 8, 8)
    assert torch.allclose(torch.export.load(file.path).module()(x), net.eval()(x).logits, atol=1e-5)
