import json
import os

import pytest
import torch
from PIL import Image

from deat.data import ImageSet, LazyImages, as_source, image_archives, image_folder
from deat.data.folder_layout import infer_layout
from deat.data.image_decoding import open_image, to_tensor
from deat.errors import DataError
from helpers.data_sets import WRITERS, load, png, real_set, tree, write_folder, write_tar

MIXED = {f"train/dog/{i}.png": png(i, 9 + i, 9) for i in range(3)}
"""Images of several sizes, none of which is common."""


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of images as they are decoded."""
    seen: list[str] = []

    def counted(data: bytes, name: str) -> Image.Image:
        seen.append(name)
        return open_image(data, name)

    monkeypatch.setattr(image_folder, "open_image", counted)
    return seen


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_directory_and_every_kind_of_archive_give_the_same_set(kind, cache, tmp_path):
    files = tree()
    data = load(WRITERS[kind](tmp_path / kind, files), tmp_path / "root", cache=cache)
    assert data.train.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(data.train.images[4], to_tensor(open_image(files["train/dog/1.png"], "")))
    names = [sorted(files)[i] for i in infer_layout(tuple(sorted(files))).splits["test"][0]]
    assert torch.equal(data.test.images, torch.stack([to_tensor(open_image(files[name], name)) for name in names]))
    assert data.test.labels.tolist() == ["dog" in name for name in names]
    assert (data.eps, data.pad, data.flip) == (8 / 255, 4, True)
    assert cache or not (tmp_path / "root").exists()


@pytest.mark.parametrize("streamed", [False, True])
def test_the_test_images_are_shuffled_with_their_labels(streamed, tmp_path, monkeypatch):
    if streamed:
        monkeypatch.setattr(image_folder, "decode_splits", lambda *_: None)
    data = load(write_folder(tmp_path / "set", tree(per_class=50)), tmp_path / "root")
    assert 5 <= int(data.test.labels[:20].sum()) <= 15
    names = infer_layout(tuple(sorted(tree(per_class=50)))).splits["test"]
    assert sorted(names[0].tolist()) == list(range(100))  # "test/..." comes before "train/..."
    assert [int(index >= 50) for index in names[0]] == names[1].tolist() == data.test.labels.tolist()


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_the_test_folder_may_have_any_of_its_usual_names(test, tmp_path):
    assert len(load(write_folder(tmp_path / "set", tree(test=test)), tmp_path / "root").test) == 6


def test_class_folders_without_train_and_test_are_the_training_split(tmp_path):
    files = {name.removeprefix("train/"): data for name, data in tree(test=None).items()}
    data = load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert data.test is None
    assert data.train.classes == ("cat", "dog")


def test_one_folder_around_everything_and_other_files_are_ignored(tmp_path):
    files = {f"./outer/{name}": data for name, data in tree().items()}
    files |= {"outer/README.txt": b"", "outer/train/cat/._0.png": b"", "__MACOSX/outer/train/cat/0.png": b""}
    data = load(write_tar(tmp_path / "set.tar", files), tmp_path / "root")
    assert (len(data.train), len(data.test)) == (6, 6)


def test_large_images_get_the_imagenet_threat_model(tmp_path):
    data = load(write_folder(tmp_path / "set", tree(1, width=80, height=80)), tmp_path / "root")
    assert (data.eps, data.pad) == (4 / 255, 10)


def test_images_are_resized_to_the_given_size(tmp_path):
    data = load(write_folder(tmp_path / "set", tree(width=40, height=20)), tmp_path / "root", size=10)
    assert data.train.shape == (3, 10, 10)


def test_images_of_different_sizes_are_streamed(tmp_path):
    files = tree() | MIXED
    data = load(write_tar(tmp_path / "set.tar.gz", files, "w:gz"), tmp_path / "root")
    assert isinstance(data.train, LazyImages)
    assert data.train.decode(5).shape == (3, 224, 224)


@pytest.mark.parametrize("odd", ["train/cat/0.png", "train/dog/2.png", "test/dog/1.png"])
def test_a_few_images_of_another_size_are_named_with_the_size_to_pass(odd, tmp_path):
    path = write_folder(tmp_path / "set", tree(6, width=16, height=12) | {odd: png(0, 9, 7)})
    with pytest.warns(UserWarning, match=rf"16x12, but not '{odd}' \(9x7\).*224x224.*--size 12") as warned:
        assert isinstance(load(path, tmp_path / "root").train, LazyImages)
    assert warned[0].filename.endswith("data_sets.py"), "it points at the caller of load_data"
    assert load(path, tmp_path / "root", size=12).train.shape == (3, 12, 12)


def test_of_many_images_of_another_size_the_first_are_named(tmp_path):
    files = tree(50) | {f"train/cat/{i}.png": png(i, 9, 9) for i in range(10, 20)}
    with pytest.warns(UserWarning, match=r"'train/cat/14\.png' \(9x9\), \.\.\.") as warned:
        load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert str(warned[0].message).count("train/cat") == 5


def test_large_images_of_different_sizes_are_resized_without_a_warning(tmp_path):
    files = {name: png(i, 600, 2) for i, name in enumerate(tree(6))} | {"train/dog/2.png": png(0, 9, 9)}
    assert isinstance(load(write_folder(tmp_path / "set", files), tmp_path / "root").train, LazyImages)


def test_a_set_too_large_for_memory_is_streamed(tmp_path, monkeypatch):
    path = write_folder(tmp_path / "set", tree())
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 100)
    assert isinstance(load(path, tmp_path / "root", size=8).train, LazyImages)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_second_start_decodes_nothing(kind, tmp_path, decodes):
    path = WRITERS[kind](tmp_path / kind, tree())
    first = load(path, tmp_path / "root")
    assert len(decodes) == 12
    second = load(path, tmp_path / "root")
    assert len(decodes) == 12
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)
    assert second.train.classes == first.train.classes


def test_the_second_start_of_a_streamed_archive_does_not_unpack_it_again(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "set.tar.xz", tree() | MIXED, "w:xz")
    first = load(path, tmp_path / "root").train
    monkeypatch.setattr(image_archives, "pack_tar_images", lambda *_: pytest.fail("unpacked"))
    assert torch.equal(load(path, tmp_path / "root").train.decode(2), first.decode(2))


@pytest.mark.parametrize("kind", ["set", "set.tar"])
def test_changed_data_is_decoded_again(kind, tmp_path, decodes):
    path = WRITERS[kind](tmp_path / kind, tree())
    load(path, tmp_path / "root")
    WRITERS[kind](path, tree() | {"train/cat/9.png": png(90)})
    os.utime(path, ns=(1, 1))
    assert len(load(path, tmp_path / "root").train) == 7


@pytest.mark.parametrize("damage", ["cut", "flip", "absent", "manifest"])
def test_a_damaged_cache_is_noticed_and_rebuilt(damage, tmp_path, decodes):
    path = write_folder(tmp_path / "set", tree())
    first = load(path, tmp_path / "root")
    expected = first.train.images.clone()
    del first
    (entry,) = (tmp_path / "root" / "decoded").iterdir()
    file = entry / "train_images.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    if damage == "manifest":
        (entry / "manifest.json").write_text("[]")
    elif damage == "absent":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "cut" else data)
    assert torch.equal(load(path, tmp_path / "root").train.images, expected)
    assert len(decodes) == 24


def test_the_cache_holds_no_path_and_no_leftovers(tmp_path):
    load(write_tar(tmp_path / "set.tar.gz", tree(), "w:gz"), tmp_path / "root")
    (entry,) = (tmp_path / "root" / "decoded").iterdir()
    assert sorted(json.loads((entry / "manifest.json").read_text())) == [
        "classes.json",
        "remarks.json",
        "test_images.npy",
        "test_labels.npy",
        "train_images.npy",
        "train_labels.npy",
    ]
    assert not any(str(tmp_path).encode() in file.read_bytes() for file in entry.iterdir())


def test_writing_to_a_cached_set_does_not_change_the_cache(tmp_path):
    path = write_folder(tmp_path / "set", tree())
    load(path, tmp_path / "root")
    images = load(path, tmp_path / "root").train.images
    images.zero_()
    assert load(path, tmp_path / "root").train.images.any()


def test_a_cache_that_cannot_be_written_costs_only_speed(tmp_path):
    (tmp_path / "root").write_text("not a folder")
    assert len(load(write_folder(tmp_path / "set", tree()), tmp_path / "root").train) == 6


def test_a_compressed_tar_without_space_to_unpack_is_refused_with_the_remedies(tmp_path):
    path = write_tar(tmp_path / "set.tar.gz", tree(), "w:gz")
    (tmp_path / "root").write_text("not a folder")
    with pytest.raises(DataError, match=r"'set\.tar\.gz'.*DEAT_DATA.*cache=False"):
        load(path, tmp_path / "root")
    assert len(load(path, tmp_path / "root", cache=False).train) == 6


def test_paths_that_are_no_image_folder_are_refused_with_what_is_accepted(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="train/CLASS/IMAGE"):
        load(tmp_path / "empty", tmp_path / "root")
    with pytest.raises(DataError, match=r"there is no .*absent.*\.zip"):
        load(tmp_path / "absent", tmp_path / "root")
    (tmp_path / "file.rar").write_bytes(b"x")
    with pytest.raises(DataError, match=r"file\.rar.*\.tar\.xz"):
        load(tmp_path / "file.rar", tmp_path / "root")


@pytest.mark.parametrize("size", [None, 8])
def test_unreadable_images_are_all_named_at_once(size, tmp_path):
    bad = [f"train/{c}/{i}.png" for c, i in (("cat", 0), ("cat", 2), ("dog", 1))]
    files = tree() | dict.fromkeys(bad, b"x") | {"test/dog/1.png": png()[:80]}
    with pytest.raises(
        DataError, match=r"^4 images cannot be read: 'train/cat/0\.png', .*The first: 'train/"
    ) as caught:
        load(write_folder(tmp_path / "set", files), tmp_path / "root", size=size)
    assert all(repr(name) in str(caught.value) for name in (*bad, "test/dog/1.png"))


def test_of_many_unreadable_images_the_first_and_their_number_are_named(tmp_path):
    files = tree(20) | {f"train/{c}/{i}.png": b"x" for c in ("cat", "dog") for i in range(3, 18)}
    with pytest.raises(DataError, match=r"^30 images cannot be read: .* and 20 more\. The first:") as caught:
        load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert str(caught.value).count("train/") == 11


def test_a_single_unreadable_image_has_its_own_message(tmp_path):
    for name in ("train/cat/0.png", "train/dog/2.png"):
        path = write_folder(tmp_path / name.replace("/", "-"), tree() | {name: b"x"})
        with pytest.raises(DataError, match=f"^'{name}' is not an image"):
            load(path, tmp_path / "root")


def test_cifar10_as_jpeg_is_read_whole_and_decoded_once(tmp_path_factory, decodes):
    path, root = real_set("cifar10-jpeg.tar.xz"), tmp_path_factory.mktemp("root")
    data = load(path, root)
    assert isinstance(data.train, ImageSet)
    assert (len(data.train), len(data.test), data.train.shape) == (50_000, 10_000, (3, 32, 32))
    assert torch.bincount(data.train.labels).tolist() == [5_000] * 10
    assert data.train.classes[0] == "airplane"
    first = len(decodes)
    assert torch.equal(load(path, root).test.images, data.test.images)
    assert len(decodes) == first


def test_imagenette_can_be_streamed_from_its_archive(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    data = load(real_set("imagenette96.tar.xz"), tmp_path_factory.mktemp("root"), size=64)
    assert isinstance(data.train, LazyImages)
    assert (len(data.train), len(data.test), data.train.num_classes) == (9_469, 3_925, 10)
    source = as_source(data.train.subset(range(0, 9_469, 1_000)), batch_size=5)
    source.check()
    assert [tuple(x.shape) for x, _ in source.epoch(0)] == [(5, 3, 64, 64)] * 2
