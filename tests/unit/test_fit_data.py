"""Data that `deat.fit` cannot train on is refused with the index of the bad image in the user's data, and the remedy."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import deat
from deat.data import ImageSet, as_source, dataloader_source
from deat.errors import DataError, UsageError
from helpers.nets import CLASSES, SIDE, Items, conv_net, learnable, same, seeded, weights

OPTIONS: dict[str, Any] = {
    "method": "fgsm",
    "threat": "linf:0.05",
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.1,
    "workers": 0,
    "val_attack": "fgsm",
    "progress": False,
}
X, Y = learnable(48)
BAD = 37
"""The index of the image or label that is made bad."""


class Named(Items):
    """A data set that names its classes, so that it is not read before training."""

    classes = ("a", "b", "c")


class Flow(IterableDataset[Any]):
    """A stream of images without indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Pictures(Dataset[Any]):
    """A data set of PIL images, as a folder without a transform gives."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (SIDE, SIDE)), index % CLASSES


KINDS = {
    "tensors": lambda *pair: pair,
    "own data set": Items,
    "one with classes": Named,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), 8),
    "loader of one with classes": lambda x, y: DataLoader(Named(x, y), 8),
    "batches": lambda x, y: list(zip(x.split(8), y.split(8), strict=True)),
}


KINDS_AND_VAL = [(kind, None) for kind in KINDS] + [
    (kind, 0.25) for kind in ("tensors", "own data set", "one with classes")
]
"""Each kind of data, and a held-out fraction for those that can be split."""


def with_bad_pixel(value: float) -> tuple[Tensor, Tensor]:
    x = X.clone()
    x[BAD, 0, 1, 1] = value
    return x, Y


def with_bad_label(label: int = -7) -> tuple[Tensor, Tensor]:
    y = Y.clone()
    y[BAD] = label
    return X, y


def refusal(data: Any, model: nn.Module | None = None, error: type[Exception] = DataError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        deat.fit(model or conv_net(), data, **{**OPTIONS, **options})
    return str(caught.value)


@pytest.mark.parametrize("val", [None, 0.25])
@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize(("images", "labels"), [(slice(1, None), slice(None)), (slice(None), slice(47))])
def test_different_numbers_of_images_and_labels_are_refused_before_anything_is_held_out(images, labels, as_arrays, val):
    x, y = X[images], Y[labels]
    expected = f"{len(x)} images but {len(y)} labels"
    assert expected in refusal((x.numpy(), y.numpy()) if as_arrays else (x, y), val=val)
    assert expected in refusal(ImageSet(x, y, ("a", "b", "c")), val=val)


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "nan"), (200.0, "divide by 255"), (-0.5, "normalize=")])
@pytest.mark.parametrize(("kind", "val"), KINDS_AND_VAL)
def test_a_bad_pixel_is_refused_with_the_index_of_its_image(kind, value, words, val):
    message = refusal(KINDS[kind](*with_bad_pixel(value)), val=val)
    assert f"image {BAD} holds" in message
    assert words in message
    assert ("batch 5 of the data: image" in message) == ("loader" in kind or kind == "batches")


@pytest.mark.parametrize(("kind", "val"), KINDS_AND_VAL)
def test_a_bad_label_is_refused_with_its_index_and_a_remedy_that_fit_has(kind, val):
    message = refusal(KINDS[kind](*with_bad_label()), val=val)
    assert re.search(f"label {BAD} is -7; .*3 classes.*0 to 2.*Renumber", message)
    assert "num_classes" not in message


def test_a_label_beyond_the_named_classes_is_refused_with_where_to_name_them():
    assert "`classes`" in refusal(Named(*with_bad_label(3)))


@pytest.mark.parametrize("kind", ["own data set", "loader", "batches"])
def test_bad_data_that_is_read_to_count_its_classes_is_refused_before_training(kind):
    model = conv_net()
    before = weights(model)
    refusal(KINDS[kind](*with_bad_pixel(200.0)), model)
    assert same(before, weights(model))


def test_a_user_s_own_subset_has_its_own_indices():
    assert f"image {BAD - 8} holds nan" in refusal(Subset(Items(*with_bad_pixel(float("nan"))), range(8, 48)))


@pytest.mark.parametrize("kind", ["tensors", "own data set", "loader"])
def test_bad_validation_data_is_named_as_such(kind):
    message = refusal((X, Y), val=KINDS[kind](*(part[30:] for part in with_bad_pixel(float("nan")))))
    assert f"image {BAD - 30} holds nan" in message
    assert message.startswith("the validation data (val)")


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_checked_in_one_epoch_only(kind, monkeypatch):
    source = as_source(KINDS[kind](X, Y), batch_size=8)
    source.check()
    list(source.epoch(0))
    monkeypatch.setattr(dataloader_source, "check_images", lambda *_: pytest.fail("checked again"))
    list(source.epoch(1))


def test_images_before_a_start_in_the_middle_are_still_checked_later():
    source = as_source(Named(*with_bad_pixel(200.0)), batch_size=8, shuffle=False)
    assert len(list(source.epoch(0, 5))) == 1
    with pytest.raises(DataError, match=f"image {BAD} holds"):
        list(source.epoch(0))


def test_batches_on_a_device_are_not_read():
    # Reading a value of a meta tensor fails.
    loader = DataLoader(TensorDataset(X.to("meta"), Y.to("meta")), 8)
    source = as_source(loader, batch_size=8, num_classes=CLASSES, device="meta")
    assert [len(y) for _, y in source.epoch(0)] == [8] * 6


def test_a_loader_accepts_neither_another_batch_size_nor_an_augmentation():
    loader = DataLoader(TensorDataset(X, Y), 8)
    message = refusal(loader, error=UsageError, batch_size=16)
    assert re.search("batch_size=16 .* of 8", message)
    for data in (loader, Items(X, Y)):
        message = refusal(data, error=UsageError, augment=deat.Augment(1))
        assert f"a {type(data).__name__} gives its images" in message
    assert "a Items gives" in refusal(Items(X, Y), error=UsageError, augment=deat.Augment(1), val=0.25)
    own = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    assert deat.fit(conv_net(), loader, **own).history[-1].examples == 48
    assert deat.fit(conv_net(), loader, **OPTIONS).history[-1].examples == 48


@pytest.mark.parametrize("val", [0, 1, 5, True])
def test_an_integer_as_validation_data_is_refused_with_what_is_accepted(val):
    message = refusal((X, Y), error=UsageError, val=val)
    assert message.startswith(f"val={val!r} ")
    assert "0.1" in message


def test_nothing_can_be_held_out_of_nothing():
    for data in ((X[:0], Y[:0]), Items(X[:0], Y[:0])):
        assert "the data set is empty" in refusal(data, val=0.1)


def test_a_fraction_of_data_without_indices_is_refused_with_the_remedies():
    assert re.search("Flow.*Pass .*val=", refusal(Flow(), val=0.1))
    assert re.search("DataLoader.*Pass .*val=", refusal(DataLoader(Flow(), 8), val=0.1))
    assert ".dataset" in refusal(DataLoader(Items(X, Y), 8), val=0.1)


@pytest.mark.parametrize("as_loader", [False, True])
def test_images_that_are_not_tensors_are_refused_with_the_transform(as_loader):
    message = refusal(DataLoader(Pictures(), 8) if as_loader else Pictures())
    assert "PIL.Image.Image" in message
    assert "ToTensor()" in message


def test_a_type_error_of_the_user_s_own_is_not_converted():
    class Broken(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise TypeError("my own")

    assert refusal(Broken(X, Y), error=TypeError) == "my own"


def test_with_too_many_images_held_out_the_remedy_is_to_hold_out_fewer():
    message = refusal((X, Y), val=0.97)
    assert re.search("1 left.*one batch of 8.*at most 40 .*--held-out", message)
    assert "--batch-size" not in message
    both = "at most 8 .*--held-out.*--batch-size.* at most 36"
    assert re.search(both, refusal((X, Y), val=0.25, batch_size=40))


def test_too_few_outputs_for_named_classes_are_not_explained_by_labels_that_count_from_one():
    message = refusal(ImageSet(X, (Y + 1), ("cat", "cow", "dog", "hen")), error=UsageError)
    assert "'cat', 'cow', 'dog', 'hen'" in message
    assert "from 1" not in message


class Answer(nn.Module):
    """A network whose output has more than its logits."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.how = conv_net(), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.net(x), x)


ANSWERS = {
    "tuple": (lambda logits, x: (x, logits), "[1]"),
    "dict": (lambda logits, x: {"features": x, "logits": logits}, "['logits']"),
    "SimpleNamespace": (lambda logits, x: SimpleNamespace(loss=None, scores=logits), ".scores"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_fit_and_evaluate_say_where_the_logits_are_in_an_output_that_has_more(kind):
    how, place = ANSWERS[kind]
    pattern = rf"{kind}.*logits.*{re.escape(place)}.*returns self\.net\(x\){re.escape(place)}\."
    assert re.search(pattern, refusal((X, Y), Answer(how), UsageError))
    with pytest.raises(UsageError, match=pattern):
        deat.evaluate(Answer(how), (X, Y), threat="linf:0.1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_half_precision_is_refused_with_the_conversion(dtype):
    assert "model.float()" in refusal((X, Y), conv_net().to(dtype), UsageError)


def test_a_network_in_float64_of_another_input_shape_is_refused_for_its_shape():
    net = nn.Sequential(nn.Flatten(), nn.Linear(7, CLASSES)).double()
    message = refusal((X, Y), net, UsageError)
    assert re.search(rf"shape \(?1\D+{SIDE}\D+{SIDE}", message)
    assert "float" not in message


@pytest.mark.parametrize(
    ("pooled", "norm"), [((), nn.BatchNorm2d), ((nn.Flatten(),), nn.BatchNorm1d)], ids=["2d", "1d"]
)
def test_a_last_batch_of_one_image_is_refused_for_a_batch_norm_of_one_value_per_channel(pooled, norm):
    layers = nn.Conv2d(X.shape[1], 4, 3), nn.AdaptiveAvgPool2d(1), *pooled, norm(4), nn.Flatten(), nn.Linear(4, CLASSES)
    words = f"41 images in batches of 8 .*batch of one.*{norm.__name__}"
    assert re.search(words, refusal((X[:41], Y[:41]), nn.Sequential(*layers)))
    assert deat.fit(nn.Sequential(*layers), (X, Y), **OPTIONS).history
    wide = nn.Sequential(layers[0], nn.BatchNorm2d(4), nn.Flatten(2), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1))
    assert deat.fit(nn.Sequential(wide, nn.Flatten(), layers[-1]), (X[:41], Y[:41]), **OPTIONS).history


class Head(nn.Module):
    """A network whose batch norm is called with a keyword, and may stay in eval mode."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(X.shape[1], 4, 3), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        self.frozen = frozen

    def train(self, mode: bool = True) -> "Head":
        super().train(mode)
        self.norm.train(mode and not self.frozen)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(input=self.first(x).mean((2, 3))))
        return y


def test_a_last_batch_of_one_image_is_accepted_for_a_frozen_batch_norm():
    net = Head(frozen=True)
    assert deat.fit(net, (X[:41], Y[:41]), **OPTIONS).history
    assert not net.norm.running_mean.any(), "it has updated its statistics"


def test_a_batch_norm_that_is_called_with_a_keyword_is_checked_too():
    assert re.search("batch of one.*BatchNorm1d", refusal((X[:41], Y[:41]), Head()))
    assert deat.fit(Head(), (X, Y), **OPTIONS).history


class Relabelled(Items):
    """A data set whose labels are converted by a function."""

    def __init__(self, convert: Callable[[int], Any]) -> None:
        super().__init__(X, Y)
        self.convert = convert

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.convert(int(self.y[index]))


class NamedFields(Items):
    """A data set whose items are dicts, as those of some libraries."""

    def __getitem__(self, index: int) -> Any:
        return {"image": self.x[index], "label": int(self.y[index])}


def test_labels_that_are_strings_are_refused_with_the_call_that_numbers_them():
    names = ["cat", "dog", "owl"]
    for data in (Relabelled(names.__getitem__), (X, [names[y] for y in Y])):
        assert re.search("strings, such as '(cat|dog|owl)'.*class numbers.*enumerate", refusal(data))


def test_booleans_and_lists_are_accepted_as_labels():
    is_positive = [y > 0 for y in Y.tolist()]

    def losses(data: Any) -> list[float]:
        net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 2)), 0)
        return [stats.loss for stats in deat.fit(net, data, **OPTIONS).history]

    numbers = losses((X, torch.tensor(is_positive).long()))
    assert losses((X, is_positive)) == losses((X, torch.tensor(is_positive))) == numbers
    assert losses(Relabelled(bool)) == losses(Relabelled(lambda y: int(y > 0)))


def test_a_batch_that_is_not_a_pair_is_refused_with_its_contents():
    assert re.search("dict with 'image', 'label'.*pair", refusal(NamedFields(X, Y)))
    three = DataLoader(TensorDataset(X, Y, Y), 8)
    assert re.search("list of 3.*pair", refusal(three))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("other", [(3, SIDE, SIDE), (1, SIDE + 4, SIDE)])
def test_validation_images_of_another_shape_are_refused_with_both_shapes(kind, other):
    shown = f"have shape {other}, the training images {(1, SIDE, SIDE)}"
    with pytest.raises(DataError, match=re.escape(shown)):
        deat.fit(conv_net(), (X, Y), val=kind(torch.rand(len(X), *other), Y), **OPTIONS)


BAD_KEYWORDS: dict[str, tuple[dict[str, Any], str]] = {
    "augment": ({"augment": True}, r"augment=True is not .*deat\.Augment\(pad=4"),
    "no augment": ({"augment": False}, r"augment=False is not .*deat\.Augment"),
    "auto augment": ({"augment": "auto"}, r"augment='auto' is not .*deat\.Augment"),
    "class of augment": ({"augment": deat.data.Augment}, r"class .*Augment.* is not .*deat\.Augment"),
    "normalize": ({"normalize": True}, r"normalize=True is not accepted: give \(mean, std\)"),
    "mean alone": ({"normalize": ([0.5],)}, r"normalize=\(\[0\.5\],\) is not accepted"),
    "milestones": ({"milestones": 5}, r"milestones must be epochs, such as \(25, 40\) or \(25,\), not 5"),
    "lr_schedule": ({"lr_schedule": len}, r"unknown lr_schedule <built-in function len>\. Known: cosine, cyclic"),
}


@pytest.mark.parametrize(("options", "pattern"), BAD_KEYWORDS.values(), ids=BAD_KEYWORDS.keys())
def test_a_keyword_of_another_type_is_refused_with_what_is_accepted(options, pattern):
    with pytest.raises(UsageError, match=pattern):
        deat.fit(conv_net(), (X, Y), **(OPTIONS | options))


class Uneven(Items):
    """A data set with one image of another size."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(index)
        return (torch.rand(1, SIDE + 1, SIDE) if index == BAD else x), y


@pytest.mark.parametrize("val", [None, 0.25])
def test_the_only_image_of_another_size_is_named_by_its_index(val):
    with pytest.raises(DataError, match=rf"image {BAD} has (shape )?\[1, {SIDE + 1}, {SIDE}\]"):
        deat.fit(conv_net(), Uneven(X, Y), val=val, **OPTIONS)


def test_images_of_several_sizes_are_refused_with_the_remedy_in_workers_too():
    with pytest.raises(DataError, match=r"image \d+ (has shape|and others of its batch differ in shape).*Resize"):
        deat.fit(conv_net(), Uneven(X, Y), **(OPTIONS | {"workers": 1}))


def test_the_image_of_another_size_in_a_loader_is_counted_in_the_loader_s_order():
    with pytest.raises(DataError, match=rf"^image {BAD} has shape .*, and image {BAD - BAD % 8} has .*Resize"):
        deat.fit(conv_net(), DataLoader(Uneven(X, Y), 8), **{k: v for k, v in OPTIONS.items() if k != "batch_size"})
