"""Runs from Python: a result is saved as a run, a run is loaded, reported and exported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.cli.main import main
from deat.errors import CheckpointError, DataError, UsageError
from deat.models.normalize import Normalized
from deat.models.weights import read_weights

STATISTICS = ((0.3,), (0.4,))
NET = """from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, num_classes))
"""


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)


def fit(net: nn.Module | None = None, data: Any = None, **options: Any) -> deat.TrainResult:
    torch.manual_seed(0)
    options = {"epochs": 2, "val": 0.2, "method": "fgsm", "lr": 0.05, "progress": False, **options}
    return deat.fit(net or Net(), data or deat.load_data("digits"), **options)


def images() -> torch.Tensor:
    return deat.load_data("digits").test.images[:50] / 255


def answers(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(images())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network by name, evaluated twice."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    command = ["train", "--epochs", "3", "--method", "fgsm", "--baseline", "no", "--seed", "4", "--out", str(folder)]
    assert main(command) == 0
    for attacks, out in (("natural", "evaluation.json"), ("natural,pgd-2", "evaluation-2.json")):
        main(["evaluate", str(folder), "--attacks", attacks, "--n", "100", "--out", str(folder / out)])
    return folder


@pytest.mark.parametrize("epoch", ["best", "last"])
def test_a_run_is_loaded_with_all_that_is_in_its_folder(epoch: str, trained: Path) -> None:
    run = deat.load_run(trained, epoch=epoch, device="cpu")
    tensors = read_weights(trained / epoch).tensors
    assert all(torch.equal(tensors[name], value) for name, value in run.model.state_dict().items())
    assert not run.model.training
    assert [stats.epoch for stats in run.history] == [0, 1, 2]
    assert (run.settings.seed, run.settings.epochs, run.method, run.data) == (4, 3, "fgsm", "digits")
    assert (run.threat, run.image_shape, len(run.classes)) == (deat.Linf(0.15), (1, 8, 8), 10)
    assert run.evaluations.keys() == {"evaluation.json", "evaluation-2.json"}
    assert "pgd-2" in run.evaluations["evaluation-2.json"].accuracy
    for part in (str(trained), "fgsm on digits", f"{epoch} epoch", "evaluation-2.json"):
        assert part in repr(run)


def test_a_loaded_run_needs_no_data_and_code_must_be_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train", "--epochs", "1", "--method", "fgsm", "--baseline", "no", "--model", "net.py:Net"]
    assert main([*command, "--out", "own"]) == 0
    monkeypatch.setattr("deat.runs.resolve_request.load_data", lambda *_, **__: pytest.fail("data were read"))
    deat.load_run(trained)
    Path("net.py").rename("mine.py")
    with pytest.raises(UsageError, match=r"net\.py:Net', which is code"):
        deat.load_run("own")
    by_name, net = deat.load_run("own", model="mine.py:Net").model, Net()
    assert deat.load_run("own", model=net).model is net
    assert torch.equal(answers(by_name), answers(net))


@pytest.mark.promise("P79")
@pytest.mark.parametrize("folder", ["saved", "kept"])
def test_a_run_brings_its_normalisation_to_a_bare_network(folder: str) -> None:
    result = fit(normalize=STATISTICS, checkpoints="kept")
    expected = answers(result.model)
    result.save("saved")
    run = deat.load_run(folder, model=Net(), epoch="last")
    assert isinstance(run.model, Normalized)
    assert torch.equal(answers(run.model), expected)
    wrapped = deat.add_normalization(Net(), [0.0], [1.0])
    assert torch.equal(answers(deat.load_run(folder, model=wrapped, epoch="last").model), expected)
    best = deat.load_run(folder, model=Net()).model
    assert torch.equal(answers(best), answers(result.load_best()))


def test_folders_of_checkpoints_are_loaded_as_far_as_they_go() -> None:
    result = fit(checkpoints="kept", threat="l2:0.5")
    run = deat.load_run("kept", model=Net())
    assert run.history == result.history
    assert (run.method, run.data, run.threat, run.settings.lr) == ("fgsm", None, deat.L2(0.5), 0.05)
    with pytest.raises(UsageError, match=r"trained in Python.*model="):
        deat.load_run("kept")
    deat.evaluate(run.model, deat.load_data("digits"), attacks=["natural"], save="kept/evaluation.json", n=100)
    assert deat.load_run("kept", model=Net()).evaluations.keys() == {"evaluation.json"}


WRONG = {
    "no folder": ("nowhere", {}, CheckpointError, "is no run"),
    "a file": ("net.py", {}, CheckpointError, "is no run"),
    "another epoch": ("saved", {"epoch": "first", "model": "net.py:Net"}, UsageError, "best, last"),
    "another network": ("saved", {"model": nn.Linear(2, 2)}, CheckpointError, "does not fit the model"),
    "a class": ("saved", {"model": Net}, UsageError, "call it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_loaded_says_why(case: str) -> None:
    fit().save("saved")
    path, options, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        deat.load_run(path, **options)


@pytest.mark.promise("P82")
def test_a_saved_result_is_a_run_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(normalize=STATISTICS)
    accuracy = deat.evaluate(result.model, deat.load_data("digits"), attacks=["natural"], progress=False).accuracy
    assert result.save("saved") == Path("saved")
    assert deat.load_run("saved", model=Net()).history == result.history
    flags = ["--attacks", "natural", "--epoch", "last"]
    assert main(["evaluate", "saved", *flags]) == 2
    assert "--model" in capsys.readouterr().err
    assert main(["evaluate", "saved", "--model", "net.py:Net", *flags]) in (0, 6)
    assert "not finished" not in capsys.readouterr().err
    assert json.loads(Path("saved/evaluation.json").read_text())["accuracy"] == accuracy
    assert main(["report", "saved", "--no-figures", "--gallery", "0"]) == 0
    assert "fgsm" in Path("saved/report/table.md").read_text()
    assert main(["export", "saved", "--out", "w.safetensors"]) == 0
    assert read_weights("w.safetensors").normalization["mean"] == pytest.approx([0.3])
    assert main(["train", "--init", "saved", "--model", "net.py:Net", "--epochs", "1", "--baseline", "no"]) == 0
    assert main(["resume", "saved"]) != 0
    with pytest.raises(UsageError, match="new folder"):
        result.save("saved")


@pytest.mark.promise("P82")
def test_a_result_on_data_without_a_name_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    fit(data=(images(), torch.arange(50) % 10), threat="linf:0.15", batch_size=20).save("saved")
    flags = ["--model", "net.py:Net", "--attacks", "natural"]
    assert main(["evaluate", "saved", *flags]) == 2
    assert "add --data" in capsys.readouterr().err
    assert main(["evaluate", "saved", *flags, "--data", "digits"]) in (0, 6)
    assert main(["report", "saved", "--no-figures", "--gallery", "0"]) == 0


@pytest.mark.promise("P82")
def test_a_saved_result_is_evaluated_without_a_normalisation_that_it_was_not_trained_with() -> None:
    fit().save("saved")
    assert json.loads(Path("saved/run.json").read_text())["request"]["normalize"] == "none"


def test_weights_of_the_last_epoch_are_saved_only_while_the_model_has_them() -> None:
    class Spoil:
        def on_epoch(self, trainer: Any, stats: Any, timing: Any) -> None:
            for weight in trainer.model.parameters():
                weight.detach().zero_()

    result = fit(method="natural", batch_size=32, lr=0.2, callbacks=[Spoil()])
    assert result.best.epoch == 0
    result.save("whole")
    result.load_best()
    result.save("best alone")
    assert not read_weights("whole/last").tensors["1.weight"].any()
    assert read_weights("whole/best").tensors["1.weight"].any()
    assert not Path("best alone/last").exists()
    with pytest.raises(CheckpointError, match="no last weights"):
        deat.load_run("best alone", model=Net(), epoch="last")


def test_reports_are_written_from_python_as_by_the_command(trained: Path) -> None:
    shutil.copytree(trained, "run")
    fit(checkpoints="kept")
    fit().save("saved")
    written = deat.report("run", Path("kept"), "saved", out="mine", gallery=0, figures=False)
    assert written.page == Path("mine/index.html")
    assert main(["report", "run", "kept", "saved", "--out", "theirs", "--gallery", "0", "--no-figures"]) == 0
    for name in ("index.html", "table.md", "table.tex", "table.csv"):
        assert Path("mine", name).read_bytes() == Path("theirs", name).read_bytes()
    assert written.table == Path("mine/table.md").read_text()
    assert next(row["seeds"] for row in written.numbers["rows"]) == [4]
    assert deat.report("run", figures=False).folder == Path("run/report")
    assert callable(deat.report)
    with pytest.raises(DataError, match=r"neither run\.json nor bench\.json"):
        deat.report("nowhere")
    with pytest.raises(UsageError, match="at least one"):
        deat.report()


def test_a_report_of_checkpoints_shows_their_epochs_and_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(checkpoints="kept")
    assert main(["report", "kept", "--json", "--no-figures"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["held_out"] is not None or result.best.robust is not None
    deat.evaluate(result.model, deat.load_data("digits"), attacks=["natural", "pgd-2"], save="kept/evaluation.json")
    assert main(["report", "kept", "--json", "--no-figures", "--gallery", "0"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["accuracy"]["natural"]


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        ((["a", "b"],), {}, "one by one"),
        ((3,), {}, "give its path"),
        (("a",), {"model": nn.Linear(2, 2)}, r"my_net\.py:Net"),
    ],
)
def test_a_report_says_what_to_write_in_place_of_what_is_no_folder(arguments: Any, options: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        deat.report(*arguments, **options)


def test_a_result_that_is_not_saved_is_refused_by_report_with_how_to_save_it() -> None:
    with pytest.raises(UsageError, match=r"result\.save"):
        deat.report(fit())  # type: ignore[arg-type]
