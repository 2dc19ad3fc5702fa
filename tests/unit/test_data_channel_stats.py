import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import deat
from deat.cli.main import main
from deat.data import DataSplits, ImageSet, LazyImages, image_folder
from deat.data.channel_stats import ChannelStats, measure_channel_stats
from deat.data.image_set import split_indices
from deat.errors import UsageError
from helpers.data_sets import load, png, random_set, tree, write_folder

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
QUICK = {"epochs": 1, "batch_size": 6, "method": "natural", "device": "cpu"}


def exact_stats(images: torch.Tensor) -> ChannelStats:
    pixels = images.double().transpose(0, 1).flatten(1) / 255
    mean, std = (tuple(round(v, 4) for v in t.tolist()) for t in (pixels.mean(1), pixels.std(1, correction=0)))
    return ChannelStats(mean, std, len(images))


def photos(tmp_path, **options: object) -> DataSplits:
    return load(write_folder(tmp_path / "set", tree(6)), tmp_path / "root", **options)


def test_statistics_are_those_of_all_pixels_per_channel():
    dark = random_set(50)
    dark = replace(dark, images=dark.images // torch.tensor([1, 2, 4], dtype=torch.uint8).view(1, 3, 1, 1))
    assert measure_channel_stats(dark) == exact_stats(dark.images)
    floats = replace(dark, images=dark.images.float() / 255)
    assert measure_channel_stats(floats) == exact_stats(dark.images)


def test_a_large_set_is_measured_on_a_thousand_images_or_more():
    large = random_set(3_500, shape=(1, 2, 2))
    stats = measure_channel_stats(large)
    assert stats == exact_stats(large.images[::3])
    assert 1_000 <= stats.images < 2_000


def test_a_streamed_set_is_measured_as_it_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    train = photos(tmp_path, size=8).train
    assert isinstance(train, LazyImages)
    assert measure_channel_stats(train) == exact_stats(torch.stack([train.decode(i) for i in range(len(train))]))


def test_a_channel_that_hardly_varies_is_not_amplified():
    black = ImageSet(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4), tuple("abcd"))
    assert measure_channel_stats(black) == ChannelStats((0.0,), (round(1 / 255, 4),), 4)


@pytest.mark.parametrize("size", [8, 80])
def test_a_folder_is_measured_on_the_images_that_are_trained_on(size, tmp_path):
    data = photos(tmp_path, size=size)
    assert (data.mean, data.std) == (None, None)
    subset = data.train.subset(range(0, 12, 2))
    assert data.channel_stats(subset) == exact_stats(subset.images)


def test_data_sets_with_published_statistics_keep_them(tmp_path):
    files = {name.replace("cat", "n01440764").replace("dog", "n02102040"): data for name, data in tree().items()}
    imagenet = load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert imagenet.channel_stats(imagenet.train) == ChannelStats(*IMAGENET)
    for side, is_cifar in ((32, True), (8, False)):
        names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
        files = {f"train/{name}/{i}.png": png(i, side, side) for i in range(2) for name in names}
        copy = load(write_folder(tmp_path / f"cifar-{side}", files), tmp_path / "root")
        assert ((copy.mean, copy.std) == CIFAR) is is_cifar, "a copy of CIFAR-10 is known by its classes and its size"
    cifar = DataSplits("cifar10", random_set(), None, *CIFAR, eps=8 / 255)
    assert cifar.channel_stats(cifar.train) == ChannelStats(*CIFAR)
    digits = deat.load_data("digits")
    assert digits.channel_stats(digits.train) is None


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def test_fit_adds_no_normalisation_unless_requested(tmp_path):
    photo_set, mine = photos(tmp_path), net()
    for data in (photo_set, photo_set.train):
        assert deat.make_trainer(mine, data, **trainer_options()).model is mine
        assert deat.make_trainer(mine, data, normalize="none", **trainer_options()).model is mine
    behind = deat.make_trainer(mine, photo_set, normalize=CIFAR, **trainer_options()).model
    assert behind.normalize.mean.flatten().tolist() == pytest.approx(CIFAR[0])
    assert deat.make_trainer(behind, photo_set, normalize="data", **trainer_options()).model is behind, "it has its own"


def trainer_options() -> dict[str, object]:
    return {"method": "natural", "config": deat.TrainConfig(epochs=1, batch_size=6, device="cpu")}


@pytest.mark.parametrize("whole", [True, False])
def test_fit_measures_training_images_and_never_held_out_ones(whole, tmp_path):
    data = photos(tmp_path)
    kept, held_out = split_indices(12, 3, 0)
    expected = exact_stats(data.train.images[kept])
    data.train.images[held_out] = 255
    result = deat.fit(net(), data if whole else data.train, normalize="data", val=0.25, val_attack="fgsm", **QUICK)
    assert result.model.normalize.mean.flatten().tolist() == pytest.approx(expected.mean)
    assert result.model.normalize.std.flatten().tolist() == pytest.approx(expected.std)


def test_fit_prefers_published_statistics(tmp_path):
    data = replace(photos(tmp_path), mean=CIFAR[0], std=CIFAR[1], stats_from_train=False)
    front = deat.make_trainer(net(), data, normalize="data", **trainer_options()).model.normalize
    assert front.mean.flatten().tolist() == pytest.approx(CIFAR[0])


def test_data_that_cannot_be_measured_is_refused_with_what_to_pass():
    images = (torch.rand(12, 3, 8, 8), torch.arange(12) % 2)
    loader = DataLoader(torch.utils.data.TensorDataset(*images), batch_size=6)
    with pytest.raises(UsageError, match=r"DataLoader; give \(mean, std\)"):
        deat.fit(net(), loader, normalize="data", **QUICK)
    with pytest.raises(UsageError, match=r"unknown normalize 'cifar'.*data.*\(mean, std\)"):
        deat.fit(net(), images, normalize="cifar", **QUICK)


def test_the_number_of_processors_changes_nothing(monkeypatch):
    before = measure_channel_stats(random_set(40))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert measure_channel_stats(random_set(40)) == before


def test_a_normalisation_that_is_asked_for_is_never_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = deat.load_data("digits")
    assert digits.channel_stats(digits.train, on_request=True) == exact_stats(digits.train.images)
    flags = ["--epochs", "1", "--baseline", "no", "--test-images", "0", "--val-attack", "none", "--normalize", "data"]
    assert main(["train", *flags, "--out", "run"]) == 0
    mean, std = json.loads(Path("run/run.json").read_text())["data"]["normalized_by"]
    assert (mean[0], std[0]) == pytest.approx((0.31, 0.38), abs=0.02)
    net = deat.fit(deat.build_model("small", in_channels=1, image_size=8), digits, epochs=1, normalize="data").model
    assert deat.models.get_input_std(net) is not None
