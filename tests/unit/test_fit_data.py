"""Data that `deat.fit` cannot train on is refused by the image that is wrong, as the user counts, with what to do."""

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
from deat.data import ImageSet, as_source, loaders
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
"""The number of the image, or label, that is made wrong."""


class Named(Items):
    """One that names its classes, so that nobody reads it before it is trained on."""

    classes = ("a", "b", "c")


class Flow(IterableDataset[Any]):
    """Images one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Pictures(Dataset[Any]):
    """What a folder of images gives without a transform."""

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


GIVEN = [(kind, None) for kind in KINDS] + [(kind, 0.25) for kind in ("tensors", "own data set", "one with classes")]
"""Each kind of data, and a part held out of those that it can be held out of."""


def spoilt(value: float) -> tuple[Tensor, Tensor]:
    x = X.clone()
    x[BAD, 0, 1, 1] = value
    return x, Y


def mislabelled(label: int = -7) -> tuple[Tensor, Tensor]:
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
def test_more_labels_than_images_or_fewer_are_refused_before_anything_is_held_out(images, labels, as_arrays, val):
    x, y = X[images], Y[labels]
    expected = f"{len(x)} images but {len(y)} labels; each image needs one label."
    assert refusal((x.numpy(), y.numpy()) if as_arrays else (x, y), val=val) == expected
    assert refusal(ImageSet(x, y, ("a", "b", "c")), val=val) == expected


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "nan"), (200.0, "divide by 255"), (-0.5, "normalize=")])
@pytest.mark.parametrize(("kind", "val"), GIVEN)
def test_a_bad_pixel_anywhere_is_refused_by_the_number_of_its_image_in_what_was_given(kind, value, words, val):
    message = refusal(KINDS[kind](*spoilt(value)), val=val)
    assert f"image {BAD} holds" in message
    assert words in message
    assert ("batch 5 of the data: image" in message) == ("loader" in kind or kind == "batches")


@pytest.mark.parametrize(("kind", "val"), GIVEN)
def test_a_bad_label_is_refused_by_its_number_in_what_was_given_with_what_fit_can_be_told(kind, val):
    message = refusal(KINDS[kind](*mislabelled()), val=val)
    assert f"label {BAD} is -7; with 3 classes labels run from 0 to 2. Renumber the labels" in message
    assert "num_classes" not in message


def test_a_label_beyond_the_classes_that_are_named_is_refused_with_where_to_name_them():
    assert "let an ImageSet or a Dataset name all of its classes" in refusal(Named(*mislabelled(3)))


@pytest.mark.parametrize("kind", ["own data set", "loader", "batches"])
def test_what_is_read_once_to_count_its_classes_is_refused_before_training(kind):
    model = conv_net()
    before = weights(model)
    refusal(KINDS[kind](*spoilt(200.0)), model)
    assert same(before, weights(model))


def test_a_part_that_the_user_cut_off_has_the_user_s_numbers():
    assert f"image {BAD - 8} holds nan" in refusal(Subset(Items(*spoilt(float("nan"))), range(8, 48)))


@pytest.mark.parametrize("kind", ["tensors", "own data set", "loader"])
def test_validation_data_of_its_own_is_named_as_such(kind):
    message = refusal((X, Y), val=KINDS[kind](*(part[30:] for part in spoilt(float("nan")))))
    assert f"image {BAD - 30} holds nan" in message
    assert message.startswith("the validation data (val): ")


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_looked_at_in_one_epoch_alone(kind, monkeypatch):
    source = as_source(KINDS[kind](X, Y), batch_size=8)
    source.check()
    list(source.epoch(0))
    monkeypatch.setattr(loaders, "check_images", lambda *_: pytest.fail("looked again"))
    list(source.epoch(1))


def test_an_epoch_that_was_begun_in_its_middle_leaves_the_images_before_to_be_looked_at():
    source = as_source(Named(*spoilt(200.0)), batch_size=8, shuffle=False)
    assert len(list(source.epoch(0, 5))) == 1
    with pytest.raises(DataError, match=f"image {BAD} holds"):
        list(source.epoch(0))


def test_batches_on_a_device_are_not_read():
    """A meta tensor has no values: whoever reads one fails."""
    loader = DataLoader(TensorDataset(X.to("meta"), Y.to("meta")), 8)
    source = as_source(loader, batch_size=8, num_classes=CLASSES, device="meta")
    assert [len(y) for _, y in source.epoch(0)] == [8] * 6


def test_a_loader_takes_neither_another_batch_size_nor_an_augmentation():
    loader = DataLoader(TensorDataset(X, Y), 8)
    message = refusal(loader, error=UsageError, batch_size=16)
    assert message.startswith("batch_size=16 is not for data that comes in its own batches, here of 8.")
    for data in (loader, Items(X, Y)):
        message = refusal(data, error=UsageError, augment=deat.Augment(1))
        assert f"a {type(data).__name__} gives its images as they are trained on" in message
    assert "a Items gives" in refusal(Items(X, Y), error=UsageError, augment=deat.Augment(1), val=0.25)
    own = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    assert deat.fit(conv_net(), loader, **own).history[-1].examples == 48
    assert deat.fit(conv_net(), loader, **OPTIONS).history[-1].examples == 48


@pytest.mark.parametrize("val", [0, 1, 5, True])
def test_a_whole_number_is_no_validation_data_and_what_is_accepted_is_said(val):
    message = refusal((X, Y), error=UsageError, val=val)
    assert message.startswith(f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data")


def test_nothing_can_be_held_out_of_nothing():
    for data in ((X[:0], Y[:0]), Items(X[:0], Y[:0])):
        assert "the data set is empty" in refusal(data, val=0.1)


def test_a_fraction_of_what_has_no_numbers_is_refused_with_what_can_be_done():
    assert refusal(Flow(), val=0.1).endswith("Pass val= as data of its own.")
    assert "Flow" in refusal(Flow(), val=0.1)
    assert refusal(DataLoader(Flow(), 8), val=0.1).endswith("Pass val= as data of its own.")
    assert "the loader's .dataset in place of the loader" in refusal(DataLoader(Items(X, Y), 8), val=0.1)


@pytest.mark.parametrize("as_loader", [False, True])
def test_pictures_that_are_no_tensors_are_refused_with_the_transform(as_loader):
    message = refusal(DataLoader(Pictures(), 8) if as_loader else Pictures())
    assert "gives a PIL.Image.Image, of which no batch can be made" in message
    assert "ToTensor()" in message


def test_a_type_error_of_a_data_set_s_own_is_not_explained_away():
    class Broken(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise TypeError("my own")

    assert refusal(Broken(X, Y), error=TypeError) == "my own"


def test_where_most_is_held_out_less_is_to_be_held_out():
    assert refusal((X, Y), val=0.97).endswith(
        "and 1 left, fewer than one batch of 8. Hold out at most 40 (val, --held-out)."
    )
    both = "Hold out at most 8 (val, --held-out), or use a batch size (batch_size, --batch-size) of at most 36."
    assert refusal((X, Y), val=0.25, batch_size=40).endswith(both)


def test_too_few_outputs_for_classes_with_names_say_nothing_of_labels_that_count_from_one():
    message = refusal(ImageSet(X, (Y + 1), ("cat", "cow", "dog", "hen")), error=UsageError)
    assert message.endswith("one for each class. The classes are 'cat', 'cow', 'dog', 'hen'.")


class Answer(nn.Module):
    """A network that answers with more than its logits."""

    def __init__(self, how: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.how = conv_net(), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.net(x), x)


ANSWERS = {
    "tuple": (lambda logits, x: (x, logits), "[1]"),
    "dict": (lambda logits, x: {"features": x, "logits": logits}, "['logits']"),
    "SimpleNamespace": (lambda logits, x: SimpleNamespace(loss=None, logits=logits), ".logits"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_fit_and_evaluate_say_alike_what_a_network_answers_and_where_its_logits_are(kind):
    how, place = ANSWERS[kind]
    words = f"with a {kind}; let it return logits", f"Its {place} has that shape: wrap .* returns self.net(x){place}."
    pattern = ".*".join(re.escape(part).replace(r"\.\*", ".*") for part in words)
    assert re.search(f"two images {pattern}", refusal((X, Y), Answer(how), UsageError))
    with pytest.raises(UsageError, match=f"one image {pattern}"):
        deat.evaluate(Answer(how), (X, Y), threat="linf:0.1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_half_precision_is_refused_with_what_makes_it_whole(dtype):
    assert refusal((X, Y), conv_net().to(dtype), UsageError).endswith("torch.float32: give it as model.float().")


def test_a_network_in_float64_that_cannot_read_images_is_not_blamed_for_its_precision():
    net = nn.Sequential(nn.Flatten(), nn.Linear(7, CLASSES)).double()
    assert refusal((X, Y), net, UsageError).startswith("the model cannot read images of shape")


@pytest.mark.parametrize(
    ("pooled", "norm"), [((), nn.BatchNorm2d), ((nn.Flatten(),), nn.BatchNorm1d)], ids=["2d", "1d"]
)
def test_a_last_batch_of_one_is_refused_before_training_where_a_batch_norm_would_see_one_value(pooled, norm):
    layers = nn.Conv2d(X.shape[1], 4, 3), nn.AdaptiveAvgPool2d(1), *pooled, norm(4), nn.Flatten(), nn.Linear(4, CLASSES)
    words = f"41 images in batches of 8 leave a batch of one, on which {norm.__name__} cannot train here. Use another"
    assert refusal((X[:41], Y[:41]), nn.Sequential(*layers)).startswith(words)
    assert deat.fit(nn.Sequential(*layers), (X, Y), **OPTIONS).history
    wide = nn.Sequential(layers[0], nn.BatchNorm2d(4), nn.Flatten(2), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1))
    assert deat.fit(nn.Sequential(wide, nn.Flatten(), layers[-1]), (X[:41], Y[:41]), **OPTIONS).history


class Head(nn.Module):
    """A network whose batch norm is asked by a keyword, and may be one that stays in eval mode."""

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


def test_a_last_batch_of_one_is_trained_on_where_the_batch_norm_is_frozen():
    net = Head(frozen=True)
    assert deat.fit(net, (X[:41], Y[:41]), **OPTIONS).history
    assert not net.norm.running_mean.any(), "it took statistics"


def test_a_batch_norm_that_is_asked_by_a_keyword_is_looked_at_like_any_other():
    assert "leave a batch of one, on which BatchNorm1d cannot train" in refusal((X[:41], Y[:41]), Head())
    assert deat.fit(Head(), (X, Y), **OPTIONS).history


class Told(Items):
    """One whose labels are what a function makes of them."""

    def __init__(self, tell: Callable[[int], Any]) -> None:
        super().__init__(X, Y)
        self.tell = tell

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.tell(int(self.y[index]))


class Whole(Items):
    """One that gives an image by name, as some libraries' data sets do."""

    def __getitem__(self, index: int) -> Any:
        return {"image": self.x[index], "label": int(self.y[index])}


def test_labels_that_are_texts_are_refused_with_what_numbers_them():
    names = ["cat", "dog", "owl"]
    for data in (Told(names.__getitem__), (X, [names[y] for y in Y])):
        assert re.match(
            "labels are texts, such as '(cat|dog|owl)'; expected class numbers. Number them: ", refusal(data)
        )


def test_labels_that_are_true_or_false_or_a_list_are_class_numbers():
    two = [y > 0 for y in Y.tolist()]

    def losses(data: Any) -> list[float]:
        net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 2)), 0)
        return [stats.loss for stats in deat.fit(net, data, **OPTIONS).history]

    numbers = losses((X, torch.tensor(two).long()))
    assert losses((X, two)) == losses((X, torch.tensor(two))) == numbers
    assert losses(Told(bool)) == losses(Told(lambda y: int(y > 0)))


def test_a_batch_that_is_no_pair_is_refused_with_what_it_holds():
    assert refusal(Whole(X, Y)).startswith("a batch is a dict with 'image', 'label', not a pair.")
    three = DataLoader(TensorDataset(X, Y, Y), 8)
    assert refusal(three).startswith("a batch is a list of 3, not a pair.")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("other", [(3, SIDE, SIDE), (1, SIDE + 4, SIDE)])
def test_validation_images_of_another_shape_are_refused_with_both_shapes(kind, other):
    shown = f"have shape {other}, the training images {(1, SIDE, SIDE)}"
    with pytest.raises(DataError, match=re.escape(shown)):
        deat.fit(conv_net(), (X, Y), val=kind(torch.rand(len(X), *other), Y), **OPTIONS)


STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "augment": ({"augment": True}, r"augment=True is no augmentation: use deat\.Augment\(pad=4"),
    "no augment": ({"augment": False}, r"augment=False is no augmentation"),
    "auto augment": ({"augment": "auto"}, r"augment='auto' is no augmentation"),
    "class of augment": ({"augment": deat.data.Augment}, r"is no augmentation"),
    "normalize": ({"normalize": True}, r"normalize=True is not accepted: give \(mean, std\)"),
    "mean alone": ({"normalize": ([0.5],)}, r"normalize=\(\[0\.5\],\) is not accepted"),
    "milestones": ({"milestones": 5}, r"milestones must be epochs, such as \(25, 40\) or \(25,\), not 5"),
    "rate": ({"rate": len}, r"unknown learning-rate schedule <built-in function len>\. Known: cosine, cyclic"),
}


@pytest.mark.parametrize(("given", "says"), STRANGE.values(), ids=STRANGE.keys())
def test_a_keyword_of_another_type_is_refused_with_what_is_accepted(given, says):
    with pytest.raises(UsageError, match=says):
        deat.fit(conv_net(), (X, Y), **(OPTIONS | given))


class Uneven(Items):
    """One that holds a single image of another size."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(index)
        return (torch.rand(1, SIDE + 1, SIDE) if index == BAD else x), y


@pytest.mark.parametrize("val", [None, 0.25])
def test_the_one_image_of_another_size_is_named_as_it_was_given(val):
    with pytest.raises(DataError, match=rf"image {BAD} has (shape )?\[1, {SIDE + 1}, {SIDE}\]"):
        deat.fit(conv_net(), Uneven(X, Y), val=val, **OPTIONS)


def test_images_of_several_sizes_are_refused_in_words_by_workers_too():
    with pytest.raises(DataError, match=r"image \d+ (has shape|and others of its batch differ in shape).*Resize"):
        deat.fit(conv_net(), Uneven(X, Y), **(OPTIONS | {"workers": 1}))


def test_the_image_of_another_size_in_a_loader_is_counted_in_its_order():
    with pytest.raises(DataError, match=rf"^image {BAD} has shape .*, and image {BAD - BAD % 8} has .*Resize"):
        deat.fit(conv_net(), DataLoader(Uneven(X, Y), 8), **{k: v for k, v in OPTIONS.items() if k != "batch_size"})
