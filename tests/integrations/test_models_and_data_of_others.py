"""Networks, weights and data sets from other people's libraries, by the real libraries."""

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import deat
from deat.cli.main import main
from deat.data import ImageSet, LazyImages
from deat.data.webdataset_shards import JoinedFiles
from deat.errors import CheckpointError, DataError, UsageError
from deat.models import fetch_pretrained, get_input_std
from deat.models.pretrained import fetch_architecture
from helpers.hub_server import serve_hub
from helpers.together import together

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
QUICK = {"epochs": 1, "batch_size": 4, "method": "fgsm", "progress": False, "lr": 0.01}


def skip_without(name: str) -> None:
    """Skip where a package is missing that `make test` does not bring: its wheels are for GPUs."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def encoded(seed: int, side: int = 8, suffix: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, suffix)
    return data.getvalue()


def pixels_of(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)


# Hugging Face datasets


def photos(count: int = 12, side: int = 8, labels: list[int] | None = None) -> Any:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    features = datasets.Features({"photo": datasets.Image(), "animal": datasets.ClassLabel(names=["cat", "dog"])})
    rows = [{"bytes": encoded(i, side), "path": None} for i in range(count)]
    given = labels or [i % 2 for i in range(count)]
    return datasets.Dataset.from_dict({"photo": rows, "animal": given}, features=features)


def test_a_hugging_face_dataset_becomes_its_images_with_class_names():
    data = deat.load_data(photos())
    assert isinstance(data.train, ImageSet)
    assert (data.train.classes, data.train.labels.tolist()) == (("cat", "dog"), [i % 2 for i in range(12)])
    assert all(torch.equal(data.train.images[i], pixels_of(encoded(i))) for i in range(12))


def test_fit_and_evaluate_take_datasets_and_their_parts():
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    whole = datasets.DatasetDict({"train": photos(), "validation": photos(6), "test": photos(8)})
    net = deat.build_model("small", num_classes=2, image_size=8)
    result = deat.fit(net, whole, **QUICK)
    assert result.history[0].val_natural is not None
    assert deat.evaluate(net, whole, attacks=["natural"], progress=False).num_images == 8
    one = deat.fit(net, whole["train"], val=whole["validation"], **QUICK)
    assert one.history[0].val_natural is not None
    assert deat.evaluate(net, whole["test"], threat="linf:0.1", attacks=["natural"], progress=False).num_images == 8


def test_large_or_uneven_images_are_decoded_as_they_are_read():
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    mixed = datasets.concatenate_datasets([photos(4, 8), photos(4, 12)])
    lazy = deat.load_data(mixed, size=None)
    assert isinstance(lazy.train, LazyImages)
    assert lazy.train.decode(5).shape == lazy.train.shape
    assert deat.load_data(mixed, size=8).train.images.shape == (8, 3, 8, 8)


def test_columns_that_cannot_be_chosen_are_named():
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    numbers = datasets.Dataset.from_dict({"x": [1, 2], "y": [0, 1]})
    with pytest.raises(UsageError, match=r"feature Image.*x, y"):
        deat.load_data(numbers)
    two = photos().add_column("kind", [0, 1, 2] * 4)
    assert deat.load_data(two, label="kind").train.classes == ("0", "1", "2")
    with pytest.raises(UsageError, match="train"):
        deat.load_data(datasets.DatasetDict({"test": photos()}))
    with pytest.raises(DataError, match=r"row 3 .*-1"):
        deat.load_data(photos(6, labels=[0, 1, 0, -1, 0, 1]))
    with pytest.raises(UsageError, match="image and label"):
        deat.load_data("digits", label="kind")


# WebDataset


def write_shard(path: Path, entries: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path, per_shard: int = 4, shards: int = 3, side: int = 8) -> None:
    for shard in range(shards):
        rows = range(shard * per_shard, (shard + 1) * per_shard)
        entries = {}
        for i in rows:
            entries |= {f"{i:05d}.png": encoded(i, side), f"{i:05d}.cls": str(i % 3).encode()}
        write_shard(folder / f"train-{shard:03d}.tar", entries)
    write_shard(folder / "val-000.tar", {"a/0.jpg": encoded(99, side, "JPEG"), "a/0.cls": b"2\n", "a/0.json": b"{}"})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
def test_shards_have_the_images_and_labels_that_webdataset_reads(tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
    write_shards(tmp_path)
    data = deat.load_data(f"webdataset:{tmp_path}")
    theirs = (
        webdataset.WebDataset(str(tmp_path / "train-{000..002}.tar"), shardshuffle=False)
        .decode("pil")
        .to_tuple("png", "cls")
    )
    rows = [(torch.from_numpy(np.array(image)).permute(2, 0, 1), label) for image, label in theirs]
    assert data.train.labels.tolist() == [label for _, label in rows]
    assert all(map(torch.equal, data.train.images, [image for image, _ in rows]))
    assert (len(data.val), data.val.labels.tolist()) == (1, [2])


@pytest.mark.parametrize("pattern", ["train-{000..002}.tar", "train-*.tar", "train-00{0..2}.tar"])
def test_shards_are_named_by_a_pattern(tmp_path, pattern):
    write_shards(tmp_path)
    (tmp_path / "classes.txt").write_text("cat\ndog\nfox\n")
    data = deat.load_data(f"webdataset:{tmp_path / pattern}")
    assert (len(data.train), data.train.classes, data.val) == (12, ("cat", "dog", "fox"), None)


def test_shards_of_large_images_are_read_in_place_and_in_any_order(tmp_path):
    write_shards(tmp_path, side=8)
    entries = {"x.png": encoded(50, 20), "x.cls": b"1"}
    write_shard(tmp_path / "train-003.tar", entries)
    lazy = deat.load_data(f"webdataset:{tmp_path}").train
    assert isinstance(lazy, LazyImages)
    assert len(lazy) == 13
    assert torch.equal(lazy.subset([12]).decode(0), lazy.decode(12))
    assert lazy.files.read(12) == encoded(50, 20)
    assert lazy.files.read(5) == encoded(5)


def train_on_shards(distributed: deat.Distributed, folder: str) -> Any:
    """The losses of a training, and the images that this process read for it."""
    read: list[int] = []
    real = JoinedFiles.read

    def note(files: JoinedFiles, index: int) -> bytes:
        read.append(index)
        return real(files, index)

    data = deat.load_data(f"webdataset:{folder}")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 8, stride=16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JoinedFiles, "read", note)
        result = deat.fit(net, data.train, distributed=distributed, workers=0, **{**QUICK, "epochs": 2})
    return [stats.loss for stats in result.history], read


def test_several_processes_each_read_their_share_of_shards(tmp_path):
    write_shards(tmp_path, per_shard=4, shards=4)
    (tmp_path / "val-000.tar").unlink()
    write_shard(
        tmp_path / "train-004.tar",
        {f"{i}.{end}": data for i in range(4) for end, data in (("png", encoded(i, 20)), ("cls", b"1"))},
    )
    losses, read = train_on_shards(deat.Distributed(), str(tmp_path))
    (first, ours), (second, theirs) = together(train_on_shards, str(tmp_path))
    assert first == second == pytest.approx(losses, rel=1e-4)
    assert {*ours, *theirs} == {*read}
    assert max(len(ours), len(theirs)) <= len(read) / 2 + 1, "one image is read to check the network"


def test_the_command_trains_on_shards(tmp_path):
    write_shards(tmp_path, per_shard=16)
    flags = ["--method", "fgsm", "--epochs", "1", "--batch-size", "8", "--model", "small", "--baseline", "no"]
    assert main(["train", "--data", f"webdataset:{tmp_path}", *flags, "--out", str(tmp_path / "run")]) == 0
    assert deat.load_run(tmp_path / "run").data == f"webdataset:{tmp_path}"


BAD_SHARDS = {
    "no label": ({"a.png": encoded(0)}, r"a\.cls"),
    "a label that is no number": ({"a.png": encoded(0), "a.cls": b"cat"}, "'cat'.*class number"),
    "no images": ({"a.txt": b"x"}, "no images"),
    "two images of a key": ({"a.png": encoded(0), "a.jpg": encoded(1), "a.cls": b"0"}, "two images"),
    "a path outside": ({"../a.png": encoded(0), "../a.cls": b"0"}, "outside"),
}


@pytest.mark.promise("P43")
@pytest.mark.parametrize(("entries", "message"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_damaged_shards_are_refused_by_name(tmp_path, entries, message):
    write_shard(tmp_path / "train-000.tar", entries)
    with pytest.raises(DataError, match=message):
        deat.load_data(f"webdataset:{tmp_path}")


def test_missing_and_cut_shards_are_refused(tmp_path):
    with pytest.raises(DataError, match="no shards"):
        deat.load_data(f"webdataset:{tmp_path / 'none-*.tar'}")
    write_shards(tmp_path)
    with pytest.raises(DataError, match=r"train-003\.tar.* is missing"):
        deat.load_data(f"webdataset:{tmp_path / 'train-{000..003}.tar'}")
    whole = (tmp_path / "train-001.tar").read_bytes()
    (tmp_path / "train-001.tar").write_bytes(whole[: len(whole) // 3])
    with pytest.raises(DataError):
        deat.load_data(f"webdataset:{tmp_path}").train.images.sum()
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "train-001.tar").write_bytes(whole)
    with pytest.raises(DataError, match=r"classes\.txt.*names 1"):
        deat.load_data(f"webdataset:{tmp_path}")


# Networks and weights


def save_vit(folder: Path, labels: int = 3, channels: int = 3) -> Any:
    transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"image_size": 8, "patch_size": 4, "num_channels": channels}
    torch.manual_seed(0)
    net = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=labels))
    net.save_pretrained(folder)
    processing = {"image_processor_type": "ViTImageProcessor"}
    processing |= {"image_mean": [0.4] * channels, "image_std": [0.2] * channels}
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return net.eval()


def test_a_network_of_transformers_is_built_by_name_and_trained(tmp_path):
    save_vit(tmp_path / "vit")
    net = deat.build_model(f"hf:{tmp_path / 'vit'}", num_classes=5, image_size=8)
    x = torch.rand(8, 3, 8, 8)
    assert net(x).shape == (8, 5)
    assert deat.fit(net, (x, torch.arange(8) % 5), **QUICK).history
    with pytest.raises(UsageError, match="hf:"):
        deat.build_model(f"hf:{tmp_path / 'nothing'}")


def test_weights_of_transformers_come_with_their_normalisation_and_a_fresh_head(tmp_path):
    original = save_vit(tmp_path / "vit")
    spec = f"hf:{tmp_path / 'vit'}"
    weights = fetch_pretrained(spec, tmp_path / "kept")
    net = deat.add_normalization(deat.build_model(spec, num_classes=3, image_size=8), [0.5] * 3, [0.5] * 3).eval()
    assert deat.load_weights(net, weights) == []
    x = torch.rand(4, 3, 8, 8)
    assert torch.allclose(net(x), original((x - 0.4) / 0.2).logits, atol=1e-6)
    assert get_input_std(net).flatten().tolist() == pytest.approx([0.2] * 3)
    other = deat.add_normalization(deat.build_model(spec, num_classes=5, image_size=8), [0.5] * 3, [0.5] * 3)
    assert [name.rpartition(".")[2] for name in deat.load_weights(other, weights, fresh_head=True)] == [
        "weight",
        "bias",
    ]


def test_training_starts_from_published_weights(tmp_path, monkeypatch):
    save_vit(tmp_path / "vit")
    monkeypatch.setenv("DEAT_DATA", str(tmp_path / "root"))
    write_shards(tmp_path, per_shard=16)
    spec = f"hf:{tmp_path / 'vit'}"
    flags = [
        "--method",
        "fgsm",
        "--epochs",
        "1",
        "--batch-size",
        "8",
        "--baseline",
        "no",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(["train", "--data", f"webdataset:{tmp_path}", "--model", spec, "--init", spec, *flags]) == 0
    assert list((tmp_path / "root" / "pretrained").glob("hf-*.safetensors"))


FETCH = """
import json, os, sys
os.environ.update(json.loads(sys.argv[1]))
from deat.cli.main import main
from helpers.torchvision_import import make_torchvision_importable

make_torchvision_importable()
flags = ["--epochs", "1", "--baseline", "no", "--test-images", "0"]
named = ["--model", "hf:org/vit", "--init", "hf:org/vit"]
statuses = [main(["train", *named, *flags, "--out", "refused"])]
statuses += [main(["train", "--model", "hf:org/none", "--download", *flags, "--out", "none"])]
statuses += [main(["train", *named, "--download", *flags, "--out", "run"])]
statuses += [main(["train", "--model", "hf:org/vit", *flags, "--out", "again"])]
json.dump(statuses, open("statuses.json", "w"))
"""


def test_a_network_of_the_hub_is_fetched_only_where_that_is_allowed(tmp_path, children):
    save_vit(tmp_path / "vit", channels=1)
    (tmp_path / "script.py").write_text(FETCH)
    with serve_hub() as hub:
        hub.repos["org/vit"] = {file.name: file.read_bytes() for file in (tmp_path / "vit").iterdir()}
        settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "DEAT_DATA": str(tmp_path / "data")}
        assert children.run_script(tmp_path / "script.py", json.dumps(settings), cwd=tmp_path) == 0
    assert json.loads((tmp_path / "statuses.json").read_text()) == [4, 4, 0, 0]
    errors = (tmp_path / "err").read_text()
    assert "Fetch them: --download" in errors
    assert "hf:org/none cannot be fetched" in errors
    assert list((tmp_path / "data" / "pretrained").glob("hf-org--vit.safetensors"))


def test_weights_that_are_not_in_the_cache_are_never_fetched_without_consent(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs Hugging Face transformers")
    with pytest.raises(CheckpointError, match="--download"):
        fetch_pretrained("hf:nobody/nothing-here", tmp_path)
    with pytest.raises(UsageError, match="timm:NAME"):
        fetch_pretrained("weights.pt", tmp_path)


def test_a_package_that_cannot_be_imported_is_no_defect_of_deat(tmp_path, monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "transformers", Broken("transformers"))
    for function in (fetch_pretrained, deat.build_model, fetch_architecture):
        with pytest.raises(UsageError, match=r"transformers is installed but cannot be imported.*nms"):
            function("hf:you/vit")


def test_weights_of_timm_are_read_from_the_hubs_cache(tmp_path, monkeypatch):
    skip_without("torchvision")
    skip_without("timm")
    import huggingface_hub as hub
    import timm

    torch.manual_seed(0)
    original, cfg = timm.create_model("resnet10t").eval(), timm.get_pretrained_cfg("resnet10t")
    file = tmp_path / "model.safetensors"
    deat.save_weights(original, file)
    with pytest.raises(CheckpointError, match="--download"):
        fetch_pretrained("timm:resnet10t", tmp_path / "kept")

    def find(repository: str, name: str) -> str | None:
        return str(file) if repository == cfg.hf_hub_id else None

    monkeypatch.setattr(hub, "try_to_load_from_cache", find)
    weights = fetch_pretrained("timm:resnet10t", tmp_path / "kept")
    net = deat.add_normalization(
        deat.build_model("timm:resnet10t", num_classes=1000, image_size=32), [0.5] * 3, [0.5] * 3
    ).eval()
    deat.load_weights(net, weights)
    x = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (cfg.mean, cfg.std))
    assert torch.allclose(net(x), original((x - mean) / std), atol=1e-5)


def test_weights_of_torchvision_are_read_from_its_cache(tmp_path, monkeypatch):
    skip_without("torchvision")
    from torchvision import models

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    with pytest.raises(CheckpointError, match="--download"):
        fetch_pretrained("torchvision:squeezenet1_1", tmp_path / "kept")
    original = models.squeezenet1_1().eval()
    url = models.SqueezeNet1_1_Weights.DEFAULT.url
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(original.state_dict(), tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2])
    monkeypatch.setattr("torchvision.models._api.WeightsEnum.get_state_dict", lambda self, **_: original.state_dict())
    net = deat.add_normalization(
        deat.build_model("torchvision:squeezenet1_1", num_classes=1000), [0.5] * 3, [0.5] * 3
    ).eval()
    deat.load_weights(net, fetch_pretrained("torchvision:squeezenet1_1", tmp_path / "kept"))
    assert get_input_std(net).flatten().tolist() == pytest.approx([0.229, 0.224, 0.225])


def test_data_sets_of_torchvision_are_trained_on_as_they_are(tmp_path):
    skip_without("torchvision")
    from torchvision import datasets, transforms

    data = datasets.FakeData(16, (3, 8, 8), 3, transform=transforms.ToTensor())
    net = deat.build_model("small", num_classes=3, image_size=8)
    assert deat.fit(net, data, val=data, **QUICK).history[0].examples == 16
