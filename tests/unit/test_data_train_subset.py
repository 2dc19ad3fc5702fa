"""A part of the training images: the classes keep their shares, the choice is the same every time."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.cli.main import main
from deat.data.train_subset import select_train_indices, take_train_images
from deat.errors import UsageError
from deat.runs.record_files import read_record
from deat.training.data_split import take_train_part
from helpers.nets import conv_net, learnable

LABELS = [0] * 700 + [1] * 200 + [2] * 97 + [3] * 3
X, Y = learnable()


def test_classes_keep_their_shares_and_none_is_missing() -> None:
    counts = Counter(LABELS[i] for i in select_train_indices(LABELS, 1000, 100).tolist())
    assert sum(counts.values()) == 100
    assert counts.keys() == {0, 1, 2, 3}
    for label, share in enumerate((70, 20, 9.7, 0.3)):
        assert abs(counts[label] - share) <= 1


def test_a_smaller_part_is_in_a_larger_one_and_all_of_it_is_the_whole() -> None:
    small, large = (set(select_train_indices(LABELS, 1000, n).tolist()) for n in (50, 400))
    assert small < large
    assert select_train_indices(LABELS, 1000, 1000).tolist() == list(range(1000))
    assert small != set(range(50))


def test_without_classes_the_choice_is_random() -> None:
    chosen = select_train_indices([], 1000, 300)
    assert len(chosen.unique()) == 300
    assert 400 < chosen.double().mean() < 600


@pytest.mark.parametrize("n_train", [0, -1, 1001, 2.0, True, "10"])
def test_other_numbers_are_refused(n_train: object) -> None:
    with pytest.raises(UsageError, match="n_train must be a whole number from 1 to 1,000"):
        select_train_indices(LABELS, 1000, n_train)  # type: ignore[arg-type]


def test_load_data_and_fit_choose_the_same_images() -> None:
    digits, part = deat.load_data("digits"), deat.load_data("digits", n_train=150)
    assert (len(part.train), part.n_train, len(part.test or ())) == (150, 150, 400)
    assert Counter(part.train.labels.tolist()).keys() == set(range(10))
    assert torch.equal(take_train_images(digits.train, 150).images, part.train.images)  # type: ignore[union-attr]
    net = deat.build_model("small", in_channels=1, image_size=8)
    options = {"method": "fgsm", "epochs": 1, "batch_size": 32, "val": 0.2, "progress": False}
    result = deat.fit(net, digits, n_train=150, **options)
    assert (result.record["data"]["n_train"], result.record["data"]["train"]) == (150, 120)
    assert result.record["data"]["held_out"] == 30


def test_data_sets_are_taken_by_index_and_loaders_refused() -> None:
    class Photos(torch.utils.data.Dataset):  # type: ignore[type-arg]
        targets = LABELS

        def __len__(self) -> int:
            return len(LABELS)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((1, 8, 8), index / 1000), LABELS[index]

    part = take_train_part(Photos(), 100)
    assert {part[i][1] for i in range(100)} == {0, 1, 2, 3}
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    with pytest.raises(UsageError, match=r"no fixed order.*Dataset in place of its loader"):
        deat.fit(conv_net(), loader, n_train=10, progress=False)


def test_resuming_with_another_part_is_refused(tmp_path: Path) -> None:
    options = {"method": "fgsm", "epochs": 1, "batch_size": 8, "progress": False, "checkpoints": tmp_path}
    deat.fit(conv_net(), (X, Y), n_train=16, **options)
    with pytest.raises(UsageError, match=r"data\.n_train: 16, now 24"):
        deat.fit(conv_net(), (X, Y), n_train=24, **options)


def test_the_command_line_records_the_part_and_resumes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    argv = f"train --n-train 200 --epochs 1 --test-images 0 --baseline no --method fgsm --out {out}".split()
    assert main(argv) == 0
    assert "200 images of 1x8x8 in 10 classes, 20 of them held out" in capsys.readouterr().out
    record = read_record(out)
    assert (record.request.n_train, record.num_train_images) == (200, 180)
    assert main(["resume", str(out)]) == 0
    argv[2] = "300"
    assert main([*argv, "--resume", "auto"]) == 2
    assert "data.n_train: 200, now 300" in capsys.readouterr().err
