import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import deat.data
from deat.data import ImageSet, LazyImages, archives, decoded_cache
from deat.data.decode import centre_crop, open_image, to_tensor
from deat.data.folder_layout import infer_layout
from deat.errors import DataError, UsageError
from helpers.data_sets import WRITERS, load, png, real_set, tree, write_folder, write_tar

MIXED = {f"train/dog/{i}.png": png(i, 9 + i, 9) for i in range(3)}
"""Images of several sizes, none of which is the others'."""


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of images as they are decoded."""
    seen: list[str] = []

    def counted(data: bytes, name: str) -> Image.Image:
        seen.append(name)
        return open_image(data, name)

    monkeypatch.setattr(decoded_cache, "open_image", counted)
    return seen


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_directory_and_every_kind_of_archive_give_the_same_set(kind, cache, tmp_path):
    files = tree()
    corpus = load(WRITERS[kind](tmp_path / kind, files), tmp_path / "root", cache=cache)
    assert corpus.train.classes == ("cat", "dog")
    assert corpus.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(corpus.train.images[4], to_tensor(open_image(files["train/dog/1.png"], "")))
    names = [sorted(files)[i] for i in infer_layout(tuple(sorted(files))).parts["test"][0]]
    assert torch.equal(corpus.test.images, torch.stack([to_tensor(open_image(files[name], name)) for name in names]))
    assert corpus.test.labels.tolist() == ["dog" in name for name in names]
    assert (corpus.eps, corpus.pad, corpus.flip) == (8 / 255, 4, True)
    assert cache or not (tmp_path / "root").exists()


@pytest.mark.parametrize("streamed", [False, True])
def test_the_first_images_of_a_test_part_are_of_all_classes_and_keep_their_labels(streamed, tmp_path, monkeypatch):
    if streamed:
        monkeypatch.setattr(decoded_cache, "decode_splits", lambda *_: None)
    corpus = load(write_folder(tmp_path / "set", tree(per_class=50)), tmp_path / "root")
    assert 5 <= int(corpus.test.labels[:20].sum()) <= 15
    names = infer_layout(tuple(sorted(tree(per_class=50)))).parts["test"]
    assert sorted(names[0].tolist()) == list(range(100))  # "test/..." comes before "train/..."
    assert [int(member >= 50) for member in names[0]] == names[1].tolist() == corpus.test.labels.tolist()


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_the_test_part_goes_by_its_usual_names(test, tmp_path):
    assert len(load(write_folder(tmp_path / "set", tree(test=test)), tmp_path / "root").test) == 6


def test_class_folders_alone_are_a_training_part(tmp_path):
    files = {name.removeprefix("train/"): data for name, data in tree(test=None).items()}
    corpus = load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert corpus.test is None
    assert corpus.train.classes == ("cat", "dog")


def test_one_folder_around_everything_and_other_files_are_ignored(tmp_path):
    files = {f"./outer/{name}": data for name, data in tree().items()}
    files |= {"outer/README.txt": b"", "outer/train/cat/._0.png": b"", "__MACOSX/outer/train/cat/0.png": b""}
    corpus = load(write_tar(tmp_path / "set.tar", files), tmp_path / "root")
    assert (len(corpus.train), len(corpus.test)) == (6, 6)


def test_large_images_get_the_imagenet_threat_model(tmp_path):
    corpus = load(write_folder(tmp_path / "set", tree(1, width=80, height=80)), tmp_path / "root")
    assert (corpus.eps, corpus.pad) == (4 / 255, 10)


def test_size_resizes_the_shorter_side_and_crops_the_centre(tmp_path):
    left, right = Image.new("RGB", (40, 20), "red"), Image.new("RGB", (10, 20), "blue")
    left.paste(right, (30, 0))
    square = to_tensor(centre_crop(left, 10))
    assert square.shape == (3, 10, 10)
    assert square[0, :, :9].eq(255).all()
    assert square[2].eq(0)[:, :9].all()
    corpus = load(write_folder(tmp_path / "set", tree(width=40, height=20)), tmp_path / "root", size=10)
    assert corpus.train.shape == (3, 10, 10)


def test_images_of_different_sizes_are_left_to_be_streamed(tmp_path):
    files = tree() | MIXED
    corpus = load(write_tar(tmp_path / "set.tar.gz", files, "w:gz"), tmp_path / "root")
    assert isinstance(corpus.train, LazyImages)
    assert corpus.train.decode(5).shape == (3, 224, 224)


@pytest.mark.parametrize("odd", ["train/cat/0.png", "train/dog/2.png", "test/dog/1.png"])
def test_a_few_images_that_alone_keep_a_set_from_its_size_are_named_with_the_size_to_ask_for(odd, tmp_path):
    path = write_folder(tmp_path / "set", tree(6, width=16, height=12) | {odd: png(0, 9, 7)})
    with pytest.warns(
        UserWarning, match=rf"images are 16x12, but not '{odd}' \(9x7\), so .*224x224.*--size 12 "
    ) as said:
        assert isinstance(load(path, tmp_path / "root").train, LazyImages)
    assert said[0].filename.endswith("data_sets.py"), "it points at who loads the data"
    assert load(path, tmp_path / "root", size=12).train.shape == (3, 12, 12)


def test_of_many_images_that_differ_the_first_are_named(tmp_path):
    files = tree(50) | {f"train/cat/{i}.png": png(i, 9, 9) for i in range(10, 20)}
    with pytest.warns(UserWarning, match=r"'train/cat/14\.png' \(9x9\), \.\.\., so") as said:
        load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert str(said[0].message).count("train/cat") == 5


def test_large_images_that_differ_are_resized_without_a_word(tmp_path):
    files = {name: png(i, 600, 2) for i, name in enumerate(tree(6))} | {"train/dog/2.png": png(0, 9, 9)}
    assert isinstance(load(write_folder(tmp_path / "set", files), tmp_path / "root").train, LazyImages)


def test_a_set_too_large_for_memory_is_left_to_be_streamed(tmp_path, monkeypatch):
    path = write_folder(tmp_path / "set", tree())
    monkeypatch.setattr(decoded_cache, "MAX_DECODED_BYTES", 100)
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
    monkeypatch.setattr(archives, "pack_tar_images", lambda *_: pytest.fail("unpacked"))
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
    kept = first.train.images.clone()
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
    assert torch.equal(load(path, tmp_path / "root").train.images, kept)
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


def test_a_compressed_tar_without_room_to_unpack_names_the_ways_out(tmp_path):
    path = write_tar(tmp_path / "set.tar.gz", tree(), "w:gz")
    (tmp_path / "root").write_text("not a folder")
    with pytest.raises(DataError, match=r"'set\.tar\.gz'.*DEAT_DATA.*cache=False"):
        load(path, tmp_path / "root")
    assert len(load(path, tmp_path / "root", cache=False).train) == 6


def test_what_is_no_set_of_images_is_refused_with_the_layout(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="train/CLASS/IMAGE"):
        load(tmp_path / "empty", tmp_path / "root")
    with pytest.raises(DataError, match=r"there is no .*absent.*\.zip"):
        load(tmp_path / "absent", tmp_path / "root")
    (tmp_path / "file.rar").write_bytes(b"x")
    with pytest.raises(DataError, match=r"file\.rar.*\.tar\.xz"):
        load(tmp_path / "file.rar", tmp_path / "root")


def test_a_class_only_the_test_part_has_is_refused(tmp_path):
    with pytest.raises(DataError, match="'fish'"):
        load(write_folder(tmp_path / "set", tree() | {"test/fish/0.png": png()}), tmp_path / "root")


@pytest.mark.parametrize("size", [None, 8])
def test_images_that_cannot_be_read_are_all_named_at_once(size, tmp_path):
    bad = [f"train/{c}/{i}.png" for c, i in (("cat", 0), ("cat", 2), ("dog", 1))]
    files = tree() | dict.fromkeys(bad, b"x") | {"test/dog/1.png": png()[:80]}
    with pytest.raises(DataError, match=r"^4 images cannot be read: 'train/cat/0\.png', .*The first: 'train/") as told:
        load(write_folder(tmp_path / "set", files), tmp_path / "root", size=size)
    assert all(repr(name) in str(told.value) for name in (*bad, "test/dog/1.png"))


def test_of_very_many_images_that_cannot_be_read_the_first_and_their_number_are_told(tmp_path):
    files = tree(20) | {f"train/{c}/{i}.png": b"x" for c in ("cat", "dog") for i in range(3, 18)}
    with pytest.raises(DataError, match=r"^30 images cannot be read: .* and 20 more\. The first:") as told:
        load(write_folder(tmp_path / "set", files), tmp_path / "root")
    assert str(told.value).count("train/") == 11


def test_a_single_image_that_cannot_be_read_is_told_in_its_own_words(tmp_path):
    for name in ("train/cat/0.png", "train/dog/2.png"):
        path = write_folder(tmp_path / name.replace("/", "-"), tree() | {name: b"x"})
        with pytest.raises(DataError, match=f"^'{name}' is no image that can be read"):
            load(path, tmp_path / "root")


def test_cifar10_as_jpeg_is_read_whole_and_decoded_once(tmp_path_factory, decodes):
    path, root = real_set("cifar10-jpeg.tar.xz"), tmp_path_factory.mktemp("root")
    corpus = load(path, root)
    assert isinstance(corpus.train, ImageSet)
    assert (len(corpus.train), len(corpus.test), corpus.train.shape) == (50_000, 10_000, (3, 32, 32))
    assert torch.bincount(corpus.train.labels).tolist() == [5_000] * 10
    assert corpus.train.classes[0] == "airplane"
    first = len(decodes)
    assert torch.equal(load(path, root).test.images, corpus.test.images)
    assert len(decodes) == first


def test_imagenette_can_be_streamed_from_its_archive(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(decoded_cache, "MAX_DECODED_BYTES", 0)
    corpus = load(real_set("imagenette96.tar.xz"), tmp_path_factory.mktemp("root"), size=64)
    assert isinstance(corpus.train, LazyImages)
    assert (len(corpus.train), len(corpus.test), corpus.train.num_classes) == (9_469, 3_925, 10)
    source = deat.data.as_source(corpus.train.subset(range(0, 9_469, 1_000)), batch_size=5)
    source.check()
    assert [tuple(x.shape) for x, _ in source.epoch(0)] == [(5, 3, 64, 64)] * 2


@pytest.mark.parametrize("size", [-7, 0, 4097, 10**9])
def test_a_side_that_no_image_has_is_refused_before_any_is_decoded(size, tmp_path, decodes):
    write_folder(tmp_path / "set", tree())
    with pytest.raises(UsageError, match=f"from 1 to 4096, not {size}"):
        load(tmp_path / "set", tmp_path / "root", size=size)
    assert decodes == []
    assert not (tmp_path / "root").exists()


def saved(pixels: Any, suffix: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, suffix)
    return out.getvalue()


RAMP = np.linspace(0, 65535, 64).reshape(8, 8).round()


@pytest.mark.parametrize("suffix", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled_to_8(suffix):
    pixels = to_tensor(open_image(saved(RAMP.astype(np.uint16), suffix), "grey"))
    assert torch.equal(pixels, torch.from_numpy((RAMP / 257).round()).to(torch.uint8).expand(3, 8, 8))
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)


def test_a_folder_of_16_bits_is_not_white(tmp_path):
    files = {f"{c}/{i}.png": saved(RAMP.astype(np.uint16), "PNG") for c in ("cat", "dog") for i in range(2)}
    train = load(write_folder(tmp_path / "set", files), tmp_path / "root").train
    assert float(train.images.double().mean()) == pytest.approx(127.5, abs=0.5)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_pixels_of_32_bits_have_no_scale_and_are_refused_by_their_file(kind, tmp_path):
    files = tree() | {"train/dog/deep.tif": saved(np.zeros((8, 8), kind), "TIFF")}
    with pytest.raises(DataError, match=r"'train/dog/deep\.tif' has pixels of 32 bits .*Save it with 8 or 16 bits"):
        load(write_folder(tmp_path / "set", files), tmp_path / "root")


def with_folders(root: Path, files: dict[str, bytes], *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return write_folder(root, files)


@pytest.mark.parametrize("outer", ["", "outer/"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_class_folder_without_images_that_no_other_part_knows_is_named_every_time(cache, outer, tmp_path):
    files = {f"{outer}{name}": data for name, data in tree().items()}
    path = with_folders(tmp_path / "set", files, f"{outer}train/cross", f"{outer}train/.hidden", f"{outer}logs/old")
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"^'{outer}train/cross': a class folder without an image") as said:
            assert load(path, tmp_path / "root", cache=cache).train.classes == ("cat", "dog")
        assert said[0].filename.endswith("data_sets.py"), "it points at who loads the data"
        assert len(said) == 1


def test_a_class_folder_without_images_beside_others_is_named_whatever_else_it_holds(tmp_path):
    files = {name.removeprefix("train/"): data for name, data in tree(test=None).items()}
    path = with_folders(tmp_path / "set", files | {"owl/0.heic": b""}, "emu")
    with pytest.warns(UserWarning, match="^'emu', 'owl': class folders without an image"):
        load(path, tmp_path / "root")


@pytest.mark.parametrize(("part", "other"), [("train", "test"), ("test", "train"), ("train", "valid")])
def test_a_class_folder_without_images_that_the_other_part_has_is_refused(part, other, tmp_path):
    files = tree(test=other if part == "train" else "test") | {f"{other}/owl/0.png": png(0)}
    path = with_folders(tmp_path / "set", files, f"{part}/owl")
    with pytest.raises(DataError, match=f"^'{part}/owl': a class folder without an image, and another part has"):
        load(path, tmp_path / "root")


def test_a_test_part_is_not_taken_for_the_training_part_that_is_empty(tmp_path):
    files = {name: data for name, data in tree().items() if name.startswith("test")}
    path = with_folders(tmp_path / "set", files, "train/cat", "train/dog")
    with pytest.raises(DataError, match=r"^'train/cat', 'train/dog': class folders without an image, and another part"):
        load(path, tmp_path / "root")


def test_nested_folders_with_images_are_no_empty_class(tmp_path, recwarn):
    load(
        with_folders(tmp_path / "set", tree() | {"train/cat/more/9.png": png(90)}, "train/cat/none"), tmp_path / "root"
    )
    assert not recwarn.list


def test_a_folder_without_any_image_is_named_with_what_is_expected(tmp_path):
    path = with_folders(tmp_path / "photos", {}, "train/cat")
    with pytest.raises(DataError, match=r"no images in class folders of '.*photos'; expected train/CLASS/IMAGE.*\.png"):
        load(path, tmp_path / "root")
