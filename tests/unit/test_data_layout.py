import pytest

import deat
from deat.data import LazyImages, decoded_cache
from deat.errors import DataError, UsageError
from helpers.data_sets import WRITERS, load, png, tree


@pytest.mark.parametrize("kind", WRITERS)
def test_a_class_that_the_test_part_lacks_is_named_at_every_start(kind, tmp_path):
    path = WRITERS[kind](tmp_path / kind, tree() | {"train/owl/0.png": png(90)})
    for _ in range(2):
        with pytest.warns(UserWarning, match="^the test part has no images of 'owl', so accuracy") as said:
            assert load(path, tmp_path / "root").train.classes == ("cat", "dog", "owl")
        assert said[0].filename.endswith("data_sets.py"), "it points at who loads the data"


def test_of_many_classes_that_the_test_part_lacks_the_first_are_named(tmp_path):
    path = WRITERS["set"](tmp_path / "set", tree() | {f"train/owl{i}/0.png": png(20 + i) for i in range(7)})
    with pytest.warns(UserWarning, match=r"'owl4' and 2 more, so accuracy on it says nothing of these classes\."):
        load(path, tmp_path / "root", cache=False)


VAL = {"val/cat/0.png": png(30), "val/dog/0.png": png(31)}


@pytest.mark.parametrize("most", [decoded_cache.MAX_DECODED_BYTES, 100], ids=["decoded", "streamed"])
@pytest.mark.parametrize("kind", ["set", "set.zip"])
def test_a_val_part_beside_a_test_part_is_a_part_of_its_own_at_every_start(kind, most, tmp_path, monkeypatch):
    monkeypatch.setattr(decoded_cache, "MAX_DECODED_BYTES", most)
    path = WRITERS[kind](tmp_path / kind, tree() | VAL)
    for _ in range(2):
        corpus = load(path, tmp_path / "root")
        assert isinstance(corpus.train, LazyImages) == (most == 100)
        assert corpus.test is not None
        assert corpus.val is not None
        assert (len(corpus.test), len(corpus.val)) == (6, 2)
        assert sorted(corpus.val.labels.tolist()) == [0, 1]


def test_a_val_part_without_a_test_part_is_the_test_part(tmp_path):
    corpus = load(WRITERS["set"](tmp_path / "set", tree(test=None) | VAL), tmp_path / "root")
    assert corpus.test is not None
    assert len(corpus.test) == 2
    assert corpus.val is None


def test_a_folder_that_could_be_the_val_part_too_is_said_to_be_unused(tmp_path):
    more = {name.replace("val/", "valid/"): png(40 + i) for i, name in enumerate(VAL)}
    said = "^'valid/' is not used, since 'test/' is the test part and 'val/' is the val part"
    with pytest.warns(UserWarning, match=said):
        corpus = load(WRITERS["set"](tmp_path / "set", tree() | VAL | more), tmp_path / "root")
    assert corpus.val is not None


def test_classes_that_a_val_part_lacks_are_named_and_those_that_it_alone_has_refused(tmp_path):
    lacking = {"val/cat/0.png": png(30)}
    with pytest.warns(UserWarning, match="^the val part has no images of 'dog'"):
        load(WRITERS["set"](tmp_path / "lacking", tree() | lacking), tmp_path / "root")
    with pytest.raises(DataError, match=r"has the class 'owl', which .* take it out of the val part"):
        load(WRITERS["set"](tmp_path / "more", tree() | VAL | {"val/owl/0.png": png(32)}), tmp_path / "root")


FLAT = {"train/0.png": png(0), "train/1.png": png(1)}


@pytest.mark.parametrize("outer", ["", "photos/"])
@pytest.mark.parametrize("more", [{}, {"test/0.png": png(2)}, {"val/cat/0.png": png(3)}])
def test_a_training_part_without_class_folders_is_refused_with_where_images_belong(outer, more, tmp_path):
    files = {f"{outer}{name}": data for name, data in (FLAT | more).items()}
    with pytest.raises(DataError, match=r"'train/' itself, which must hold one folder for each class: train/CLASS"):
        load(WRITERS["set"](tmp_path / "set", files), tmp_path / "root")


def test_train_beside_other_classes_is_a_class(tmp_path):
    path = WRITERS["set"](tmp_path / "set", FLAT | {"car/0.png": png(4)})
    assert load(path, tmp_path / "root").train.classes == ("car", "train")


def test_a_path_is_loaded_as_its_folder(tmp_path):
    path = WRITERS["set"](tmp_path / "set", tree())
    assert deat.load_data(path, root=tmp_path / "root").name == "folder:set"


@pytest.mark.parametrize("spec", [5, None, ["cifar10"]])
def test_what_is_neither_a_name_nor_a_path_is_refused(spec):
    with pytest.raises(UsageError, match=r"data has a name, such as digits, .* is neither"):
        deat.load_data(spec)


@pytest.mark.parametrize("size", ["40", 40.5, True])
def test_a_side_that_is_no_whole_number_is_refused(size, tmp_path):
    with pytest.raises(UsageError, match=f"size must be a whole number of pixels from 1 to 4096, not {size!r}"):
        deat.load_data(f"folder:{tmp_path}", size=size)
