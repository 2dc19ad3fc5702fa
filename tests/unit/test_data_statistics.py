import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deat
from deat.data import ImageSet, LazyImages, decoded_cache
from deat.data.datasets import DataSplits
from deat.data.image_set import split_indices
from deat.data.statistics import ChannelStats, measure_channel_stats
from deat.errors import UsageError
from helpers.data_sets import load, png, random_set, tree, write_folder

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
QUICK = {"epochs": 1, "batch_size": 6, "method": "natural", "device": "cpu"}


def true_numbers(images: torch.Tensor) -> ChannelStats:
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    mean, std = (tuple(round(v, 4) for v in t.tolist()) for t in (pixels.mean(1), pixels.std(1, correction=0)))
    return ChannelStats(mean, std, len(images))


def photos(tmp_path, **options: object) -> DataSplits:
    return load(write_folder(tmp_path / "set", tree(6)), tmp_path / "root", **options)


def test_the_numbers_are_those_of_all_pixels_by_channel():
    dark = random_set(50)
    dark = replace(dark, images=dark.images // torch.tensor([1, 2, 4], dtype=torch.uint8).view(1, 3, 1, 1))
    assert measure_channel_stats(dark) == true_numbers(dark.images)
    floats = replace(dark, images=dark.images.float() / 255)
    assert measure_channel_stats(floats) == true_numbers(dark.images)


def test_a_large_set_is_measured_on_a_thousand_images_or_more_spread_over_it():
    large = random_set(3_500, shape=(1, 2, 2))
    found = measure_channel_stats(large)
    assert found == true_numbers(large.images[::3])
    assert 1_000 <= found.images < 2_000


def test_a_streamed_set_is_measured_as_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(decoded_cache, "MAX_DECODED_BYTES", 0)
    train = photos(tmp_path, size=8).train
    assert isinstance(train, LazyImages)
    assert measure_channel_stats(train) == true_numbers(torch.stack([train.decode(i) for i in range(len(train))]))


def test_a_channel_that_hardly_varies_is_not_blown_up():
    black = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4), tuple("abcd"))
    assert measure_channel_stats(black) == ChannelStats((0.0,), (round(1 / 255, 4),), 4)


@pytest.mark.parametrize("size", [8, 80])
def test_a_folder_is_measured_on_the_images_that_are_trained_on(size, tmp_path):
    corpus = photos(tmp_path, size=size)
    assert (corpus.mean, corpus.std) == (None, None)
    part = corpus.train.subset(range(0, 12, 2))
    assert corpus.statistics(part) == true_numbers(part.images)


def test_sets_with_published_numbers_keep_them(tmp_path):
    files = {name.replace("cat", "n01440764").replace("dog", "n02102040"): data for name, data in tree().items()}
    imagenet = load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert imagenet.statistics(imagenet.train) == ChannelStats(*IMAGENET)
    for side, known in ((32, True), (8, False)):
        names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
        files = {f"train/{name}/{i}.png": png(i, side, side) for i in range(2) for name in names}
        copy = load(write_folder(tmp_path / f"cifar-{side}", files), tmp_path / "root")
        assert ((copy.mean, copy.std) == CIFAR) is known, "a copy of CIFAR-10 is known by its classes and its size"
    cifar = DataSplits("cifar10", random_set(), None, *CIFAR, eps=8 / 255)
    assert cifar.statistics(cifar.train) == ChannelStats(*CIFAR)
    digits = deat.load_data("digits")
    assert digits.statistics(digits.train) is None


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def test_fit_puts_nothing_before_a_network_unless_that_is_asked_for(tmp_path):
    corpus, mine = photos(tmp_path), net()
    for data in (corpus, corpus.train):
        assert deat.make_trainer(mine, data, **trainer_options()).model is mine
        assert deat.make_trainer(mine, data, normalize="none", **trainer_options()).model is mine
    behind = deat.make_trainer(mine, corpus, normalize=CIFAR, **trainer_options()).model
    assert behind.normalize.mean.flatten().tolist() == pytest.approx(CIFAR[0])
    assert deat.make_trainer(behind, corpus, normalize="data", **trainer_options()).model is behind, "it has its own"


def trainer_options() -> dict[str, object]:
    return {"method": "natural", "config": deat.TrainConfig(epochs=1, batch_size=6, device="cpu")}


@pytest.mark.parametrize("whole", [True, False])
def test_fit_measures_what_it_trains_on_and_never_what_it_holds_out(whole, tmp_path):
    corpus = photos(tmp_path)
    kept, held_out = split_indices(12, 3, 0)
    expected = true_numbers(corpus.train.images[kept])
    corpus.train.images[held_out] = 255
    result = deat.fit(net(), corpus if whole else corpus.train, normalize="data", val=0.25, val_attack="fgsm", **QUICK)
    assert result.model.normalize.mean.flatten().tolist() == pytest.approx(expected.mean)
    assert result.model.normalize.std.flatten().tolist() == pytest.approx(expected.std)


def test_fit_takes_published_numbers_of_a_set_that_has_them(tmp_path):
    corpus = replace(photos(tmp_path), mean=CIFAR[0], std=CIFAR[1], stats_from_train=False)
    front = deat.make_trainer(net(), corpus, normalize="data", **trainer_options()).model.normalize
    assert front.mean.flatten().tolist() == pytest.approx(CIFAR[0])


def test_what_cannot_be_measured_is_refused_with_what_can_be_given():
    images = (torch.rand(12, 3, 8, 8), torch.arange(12) % 2)
    loader = DataLoader(torch.utils.data.TensorDataset(*images), batch_size=6)
    with pytest.raises(UsageError, match=r"no DataLoader; give \(mean, std\)"):
        deat.fit(net(), loader, normalize="data", **QUICK)
    with pytest.raises(UsageError, match=r"unknown normalize 'cifar'.*data.*\(mean, std\)"):
        deat.fit(net(), images, normalize="cifar", **QUICK)


def test_the_number_of_processors_changes_nothing(monkeypatch):
    before = measure_channel_stats(random_set(40))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert measure_channel_stats(random_set(40)) == before
