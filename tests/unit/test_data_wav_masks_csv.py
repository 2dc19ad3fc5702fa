"""Wav folders, folders of images and masks, and tables: what is read, and what is refused."""

import csv
import json
import wave

import numpy as np
import pytest
import torch
from PIL import Image

import deat
from deat.cli.main import main
from deat.errors import DataError, UsageError
from deat.report.model_card import render_model_card


def write_wav(path, samples, rate=8000, width=2, channels=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as stream:
        stream.setnchannels(channels)
        stream.setsampwidth(width)
        stream.setframerate(rate)
        stream.writeframes(samples)


def wav_folder(root):
    tone = (np.sin(np.arange(100)) * 16384).astype("<i2")
    for part, n in (("train", 6), ("test", 2)):
        for label in ("one", "two"):
            for i in range(n):
                write_wav(root / part / label / f"{i}.wav", tone[: 40 + 10 * i].tobytes())
    return root


def test_recordings_are_cut_or_padded_to_one_length(tmp_path):
    data = deat.load_data(f"audio:{wav_folder(tmp_path)}", size=60)
    assert data.train.shape == (1, 60)
    assert data.train.classes == ("one", "two")
    assert (len(data.train), len(data.test)) == (12, 4)
    assert data.features["box"] == (-1.0, 1.0)
    short, long = data.train.images[0, 0], data.train.images[5, 0]
    assert not short[40:].any()
    tone = torch.sin(torch.arange(100.0)) / 2
    torch.testing.assert_close(short[:40], tone[:40], atol=1e-4, rtol=0)
    torch.testing.assert_close(long, tone[15:75], atol=1e-4, rtol=0)
    assert deat.load_data(f"audio:{tmp_path}").train.shape == (1, 65)  # the median


@pytest.mark.parametrize(
    ("width", "raw"), [(1, bytes([128, 192, 64])), (3, bytes([0, 0, 0, 0, 0, 64, 0, 0, 192])), (4, None)]
)
def test_every_width_of_samples_is_scaled_to_one(tmp_path, width, raw):
    raw = raw or np.array([0, 2**30, -(2**30)], dtype="<i4").tobytes()
    for label in ("a", "b"):
        write_wav(tmp_path / label / "x.wav", raw, width=width)
    images = deat.load_data(f"audio:{tmp_path}").train.images
    torch.testing.assert_close(images[0, 0], torch.tensor([0.0, 0.5, -0.5]), atol=1e-6, rtol=0)


def test_channels_are_averaged(tmp_path):
    stereo = np.array([[16384, 0], [-16384, -16384]], dtype="<i2")
    for label in ("a", "b"):
        write_wav(tmp_path / label / "x.wav", stereo.tobytes(), channels=2)
    assert deat.load_data(f"audio:{tmp_path}").train.images[0, 0].tolist() == [0.25, -0.5]


def test_recordings_that_cannot_be_used_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="no wav files"):
        deat.load_data(f"audio:{tmp_path}")
    wav_folder(tmp_path)
    write_wav(tmp_path / "train" / "one" / "other.wav", b"\0\0" * 50, rate=16000)
    with pytest.raises(DataError, match=r"sampling rate of 16000 Hz|16000 Hz"):
        deat.load_data(f"audio:{tmp_path}")
    (tmp_path / "train" / "one" / "other.wav").write_bytes(b"ID3 not a wav")
    with pytest.raises(DataError, match=r"other\.wav"):
        deat.load_data(f"audio:{tmp_path}")


def mask_folder(root, void=255):
    values = np.arange(48, dtype=np.uint8).reshape(6, 8) % 3
    for part in ("train", "val", "test"):
        for name, folder, array in (("a", "images", np.zeros((6, 8, 3), np.uint8)), ("a", "labels", values)):
            (root / part / folder).mkdir(parents=True, exist_ok=True)
            array = array.copy()
            if folder == "labels":
                array[0] = void
            Image.fromarray(array).save(root / part / folder / f"{name}.png")
    return root


def test_images_and_masks_are_read_with_the_void_label(tmp_path):
    data = deat.load_data(f"segmentation:{mask_folder(tmp_path)}")
    assert data.task == deat.tasks.Segmentation(ignore_index=255)
    assert data.train.shape == (3, 6, 8)
    assert data.train.num_classes == 3
    assert data.train.labels[0, 1].tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
    assert len(data.val) == len(data.test) == 1
    data = deat.load_data(f"segmentation:{mask_folder(tmp_path, 11)}", task="segmentation:ignore_index=11")
    assert data.train.num_classes == 3


def test_images_without_a_mask_or_of_another_size_are_refused_by_name(tmp_path):
    mask_folder(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "images" / "b.png")
    with pytest.raises(DataError, match=r"b\.png.*no mask"):
        deat.load_data(f"segmentation:{tmp_path}")
    Image.new("L", (4, 4)).save(tmp_path / "train" / "labels" / "b.png")
    with pytest.raises(DataError, match=r"b\.png.*4x4.*8x6"):
        deat.load_data(f"segmentation:{tmp_path}")
    Image.new("RGB", (8, 6)).save(tmp_path / "train" / "labels" / "b.png")
    Image.new("RGB", (8, 6)).save(tmp_path / "train" / "images" / "b.png")
    with pytest.raises(DataError, match="grey or palette"):
        deat.load_data(f"segmentation:{tmp_path}")


def table(path, rows, header=("age", "city", "pressure", "outcome")):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return f"csv:{path}"


ROWS = [(20 + i, ("Ulm", "Bonn")[i % 2], 100 + 0.5 * i, ("well", "ill")[i % 3 == 0]) for i in range(50)]


def test_a_table_has_numbers_and_fixed_categories(tmp_path):
    data = deat.load_data(table(tmp_path / "t.csv", ROWS), target="outcome")
    assert (len(data.train), len(data.test)) == (40, 10)
    assert data.train.shape == (4,)  # age, two cities, pressure
    assert data.train.classes == ("ill", "well")
    assert data.mutable == (True, False, False, True)
    assert data.scale[1:3] == (1.0, 1.0)
    assert data.scale[0] == pytest.approx(float(data.train.images[:, 0].std()), rel=1e-5)
    assert bool((data.train.images[:, 1:3].sum(1) == 1).all())
    assert data.box is None
    threat = deat.threat.parse_threat("linf:0.1", **data.features)
    assert not threat.initial_delta(data.train.images, "uniform")[:, 1:3].any()


def test_a_target_of_numbers_is_a_regression_in_deviations(tmp_path):
    data = deat.load_data(table(tmp_path / "t.csv", ROWS), target="pressure")
    assert data.task == deat.tasks.Regression()
    assert float(data.train.labels.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.train.labels.std()) == pytest.approx(1, rel=1e-5)
    assert deat.load_data(f"csv:{tmp_path / 't.csv'}", target="age", task="classification").train.num_classes == 50


def test_a_folder_has_its_own_test_part(tmp_path):
    table(tmp_path / "train.csv", ROWS[:30])
    table(tmp_path / "test.csv", ROWS[30:])
    data = deat.load_data(f"csv:{tmp_path}", target="outcome")
    assert (len(data.train), len(data.test)) == (30, 20)
    assert data.train.images[0, 0] == 20


@pytest.mark.parametrize(
    ("rows", "target", "error", "remedy"),
    [
        (ROWS, None, UsageError, "--target COLUMN.*outcome"),
        (ROWS, "outcom", UsageError, "Did you mean 'outcome'"),
        ([*ROWS, (1, "", 2, "ill")], "outcome", DataError, "line 52.*missing"),
        ([(i, f"id{i}", 1.0 * i, "ill") for i in range(200)], "outcome", DataError, "identifies rows"),
        ([], "outcome", DataError, "no rows"),
        ([*ROWS, (1, "Ulm", "NaN", "ill")], "outcome", DataError, "'pressure' has no number in 1 of 51 rows.*'NaN'"),
        ([*ROWS, (1, "Ulm", "?", "ill")], "pressure", DataError, "'pressure' has no number"),
        ([(i, "Ulm", 1.5 * i, f"patient {i}") for i in range(200)], "outcome", DataError, "no classes"),
        ([(i % 2, "Ulm", i, "ill") for i in range(20)], "outcome", DataError, "nothing could be attacked"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path, rows, target, error, remedy):
    with pytest.raises(error, match=remedy):
        deat.load_data(table(tmp_path / "t.csv", rows), target=target)


def test_numbers_with_two_values_and_row_numbers_cannot_change(tmp_path):
    rows = [(i + 1, i % 2, 0.5 * (i % 7), 3 * i, "ab"[i % 3 > 0]) for i in range(50)]
    data = deat.load_data(table(tmp_path / "t.csv", rows, ("id", "smokes", "dose", "cost", "y")), target="y")
    assert data.mutable == (False, False, True, True)


def test_a_column_of_numbers_with_some_text_is_a_category_with_a_word_about_it(tmp_path):
    rows = [(i % 5, "3+" if i % 4 == 0 else i % 3, 0.5 * i, "ab"[i % 3 > 0]) for i in range(50)]
    with pytest.warns(UserWarning, match=r"'children'.*'3\+'.*categories"):
        data = deat.load_data(table(tmp_path / "t.csv", rows, ("age", "children", "dose", "y")), target="y")
    assert data.train.shape == (6,)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("", "no header"), ("a,b,a,y\n1,2,3,4\n", "two columns of the name 'a'"), ("a;b;y\n1;2;0\n", "by commas")],
)
def test_a_file_that_is_no_table_is_refused_with_what_is_wrong(tmp_path, text, remedy):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=remedy):
        deat.load_data(f"csv:{tmp_path / 't.csv'}", target="y")


@pytest.mark.parametrize("length", [1, 100, 1500])
def test_the_network_for_waveforms_takes_recordings_of_any_length(length):
    net = deat.build_model("audio_cnn", num_classes=3, in_channels=1)
    assert net(torch.rand(2, 1, length)).shape == (2, 3)


def test_what_belongs_to_other_data_is_refused(tmp_path):
    for spec, options in (("digits", {"target": "x"}), ("digits", {"task": "regression"}), ("csv:x.csv", {"size": 3})):
        with pytest.raises(UsageError):
            deat.load_data(spec, **options)


def test_a_table_is_trained_and_evaluated_by_the_commands(tmp_path, capsys):

    rows = [(i % 17, ("Ulm", "Bonn")[i % 2], (i * 7) % 13, 3.0 * (i % 17) + (i * 7) % 13) for i in range(120)]
    spec = table(tmp_path / "t.csv", rows)
    out = tmp_path / "run"
    train = ["train", "--data", spec, "--target", "outcome", "--method", "m+trades", "--epochs", "2"]
    assert main([*train, "--batch-size", "16", "--out", str(out)]) == 0
    assert main(["evaluate", str(out), "--attacks", "natural,pgd-5"]) in (0, 6)
    assert "RMSE" in capsys.readouterr().out
    run = deat.load_run(out)
    assert run.task == deat.tasks.Regression()
    assert run.threat.mutable.values == (1.0, 0.0, 0.0, 1.0)
    assert run.evaluations["evaluation.json"].metric == "R2"
    card = render_model_card(out)
    for says in (
        "in units of a scale",
        "2 of 4 features cannot change",
        "no bounds",
        "## Targets",
        "examples in any range",
    ):
        assert says in card
    for is_untrue in ("deat predict", "natural,aa", "images in [0, 1], shape", "calibrated"):
        assert is_untrue not in card


def test_another_table_is_read_as_the_one_that_a_network_was_trained_on(tmp_path, capsys):
    rows = [f"{i % 7},{'left' if i % 3 else 'right'},{i % 11}.5" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["size,side,dose", *rows]))
    other = [f"{900 + i}.5,left,{i % 7 * 10}" for i in range(20)]  # other columns' order, categories, units
    (tmp_path / "b.csv").write_text("\n".join(["dose,side,size", *other]))
    first = deat.load_data(f"csv:{tmp_path / 'a.csv'}", target="dose")
    again = deat.load_data(f"csv:{tmp_path / 'b.csv'}", target="dose", table=first.table)
    mean, deviation = first.table.target
    assert set(again.train.images[:, 2].tolist()) == {0.0}  # never right, which still has its column
    assert again.scale == first.scale
    doses = again.train.labels.double() * deviation + mean
    assert doses.min() >= 900 - 0.01

    run = str(tmp_path / "run")
    options = ["--method", "natural", "--epochs", "1", "--batch-size", "16", "--out", run, "--baseline", "no"]
    assert main(["train", "--data", f"csv:{tmp_path / 'a.csv'}", "--target", "dose", *options]) == 0
    evaluate = ["evaluate", run, "--attacks", "natural", "--data"]
    assert main([*evaluate, f"csv:{tmp_path / 'b.csv'}"]) == 0
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["metrics"]["natural"]["MAE"] > 100
    (tmp_path / "c.csv").write_text((tmp_path / "b.csv").read_text().replace("left", "top"))
    capsys.readouterr()
    assert main([*evaluate, f"csv:{tmp_path / 'c.csv'}"]) != 0
    assert "'top'" in capsys.readouterr().err
    (tmp_path / "d.csv").write_text((tmp_path / "b.csv").read_text().replace("size", "width"))
    assert main([*evaluate, f"csv:{tmp_path / 'd.csv'}"]) != 0
    assert "width added" in capsys.readouterr().err
