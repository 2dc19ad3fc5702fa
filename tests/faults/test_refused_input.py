"""Tensors and optimizers that torch itself would refuse in the middle of a training, or take silently."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deat
from deat.errors import DataError, UsageError
from helpers.nets import Items, conv_net, learnable, same, weights

OPTIONS = {"method": "fgsm", "epochs": 1, "batch_size": 8, "threat": "linf:0.05", "progress": False}
X, Y = learnable(24)

TENSORS = {
    "sparse": (lambda t: t.to_sparse(), "a sparse tensor"),
    "compressed": (lambda t: t.flatten(1).to_sparse_csr() if t.ndim > 1 else t.to_sparse(), "a sparse tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([row.reshape(1, -1) for row in t]), "a nested tensor"),
    "without numbers": (lambda t: t.to("meta"), "device 'meta'"),
    "objects": (lambda t: t.numpy().astype(object), "an array of objects"),
    "masked": (lambda t: np.ma.masked_array(t.numpy(), mask=t.numpy() > 0.5), "a masked array"),
}


@pytest.mark.promise("P168")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("part", ["images", "labels"])
def test_tensor_without_all_its_numbers_in_place_is_refused(kind, part):
    spoil, message = TENSORS[kind]
    data = (spoil(X), Y) if part == "images" else (X, spoil(Y))
    with pytest.raises(DataError, match=f"{part} are {message}|{part} are on the {message}"):
        deat.fit(conv_net(), data, **OPTIONS)
    with pytest.raises(DataError, match=part):
        deat.evaluate(conv_net(), data, threat="linf:0.05", attacks=["fgsm"], progress=False)


def sparse_batch(items):
    x, y = zip(*items, strict=True)
    return torch.stack(x).to_sparse(), torch.tensor(y)


@pytest.mark.promise("P168")
@pytest.mark.parametrize(
    "data",
    [Items(list(map(torch.Tensor.to_sparse, X)), Y), DataLoader(Items(X, Y), batch_size=8, collate_fn=sparse_batch)],
    ids=["data set", "loader"],
)
def test_sparse_images_of_a_data_set_or_loader_are_refused(data):
    options = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    with pytest.raises(DataError, match="sparse"):
        deat.fit(conv_net(), data, **options)


OPTIMIZERS = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS.step needs a closure"),
    "sparse": (lambda params: torch.optim.SparseAdam(list(params)), "sparse gradients"),
    "none": (lambda params: None, "returned a NoneType"),
    "of others": (lambda params: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), "none of the network's"),
    "maximising": (lambda params: torch.optim.SGD(params, lr=0.1, maximize=True), "maximize"),
}


@pytest.mark.promise("P169")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_that_cannot_train_the_network_is_refused_before_the_first_batch(kind):
    factory, message = OPTIMIZERS[kind]
    net = conv_net(batch_norm=True)
    before = weights(net)
    with pytest.raises(UsageError, match=message):
        deat.fit(net, (X, Y), optimizer=factory, **OPTIONS)
    assert same(weights(net), before)


@pytest.mark.promise("P169")
def test_optimizer_of_a_part_of_the_network_trains_that_part():
    net = conv_net()
    before = weights(net)
    deat.fit(net, (X, Y), optimizer=lambda params: torch.optim.SGD(list(net[-1].parameters()), lr=0.1), **OPTIONS)
    changed = [not torch.equal(old, new) for old, new in zip(before, weights(net), strict=True)]
    assert changed == [False] * (len(before) - 2) + [True, True]
