"""`deat export` and `deat.export`: the suffix says the format, and what was written answers as the network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.cli.main import main
from deat.errors import CheckpointError, UsageError
from deat.models import export_network
from deat.models.weights import read_weights

PROGRAMS = [".onnx", ".pt2", ".ts", ".torchscript"]
MEAN, STD = [0.3], [0.4]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a network with batch norm behind a normalisation."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "run"
    net = deat.build_model("preact_resnet8", 10, 1, 8)
    digits = deat.load_data("digits")
    options: Any = {"epochs": 1, "method": "natural", "val": 0.1, "lr": 0.01, "progress": False}
    deat.fit(net, digits, normalize=(MEAN, STD), **options).save(folder)
    return folder


def images(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(count))


def read(file: Path) -> Any:
    """A program, read as a user would without deat."""
    if file.suffix == ".pt2":
        return torch.export.load(file).module()
    if file.suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
        return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])
    return torch.jit.load(str(file))


@pytest.mark.promise("P83")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("suffix", PROGRAMS)
def test_a_program_has_the_normalisation_inside_and_takes_any_number_of_images(suffix: str, run: Path) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    file = Path(f"net{suffix}")
    assert main(["export", str(run), "--out", str(file), "--model", "preact_resnet8"]) == 0
    model = deat.load_run(run, model="preact_resnet8", device="cpu").model
    program = read(file)
    for count in (1, 3, 17):
        with torch.no_grad():
            assert torch.allclose(program(images(count)), model(images(count)), atol=1e-4)
    assert [path.name for path in Path().iterdir()] == [file.name]


@pytest.mark.promise("P83")
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_weights_have_the_network_s_own_names_and_record_the_normalisation(suffix: str, run: Path) -> None:
    file = Path(f"w{suffix}")
    exported = deat.export(run, file)
    assert (exported.path, exported.max_difference) == (file, 0.0)
    assert "normalised by mean 0.3 and std 0.4" in exported.note
    net = deat.build_model("preact_resnet8", 10, 1, 8)
    if suffix != ".safetensors":
        net.load_state_dict(torch.load(file, weights_only=True))
    with pytest.raises(CheckpointError, match="add_normalization"):
        deat.load_weights(net, file)
    deat.load_weights(other := deat.add_normalization(net, [0.0], [1.0]), file)
    assert read_weights(file).normalization["mean"] == pytest.approx(MEAN)
    model = deat.load_run(run, model="preact_resnet8", device="cpu").model
    with torch.no_grad():
        assert torch.equal(other.eval()(images(4)), model(images(4)))
    if suffix != ".safetensors":
        assert main(["import", str(file), "--out", "back.safetensors"]) == 0
        assert read_weights("back.safetensors").normalization["mean"] == pytest.approx(MEAN)


@pytest.mark.promise("P83")
@pytest.mark.parametrize("name", ["net.h5", "net", "net.onnx.gz", "net.bin"])
def test_other_suffixes_are_refused_with_those_that_are_accepted(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", name]) == 2
    told = capsys.readouterr().err
    assert all(suffix in told for suffix in (name, ".safetensors", ".pt", ".onnx", ".pt2", ".ts"))
    assert not list(Path().iterdir())


class Counting(nn.Module):
    """Divides by the number of images, which a tracer takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.last(x.flatten(1)) / float(len(x))
        return answers


class Chance(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(len(x), 10)


@pytest.mark.promise("P83")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("net", [Counting(), Chance()], ids=["the number of images", "chance"])
def test_a_program_that_answers_differently_is_removed(net: nn.Module) -> None:
    with pytest.raises(CheckpointError, match=r"does not answer as the network does.*net\.ts was removed"):
        deat.export(net, "net.ts", example=images(2))
    assert not list(Path().iterdir())


@pytest.mark.promise("P83")
def test_weights_that_are_read_back_otherwise_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    name, encode, read_file = export_network.WEIGHTS_FORMATS[".pt"]
    spoilt = (name, lambda tensors, note: encode({k: t + 1 for k, t in tensors.items()}, note), read_file)
    monkeypatch.setitem(export_network.WEIGHTS_FORMATS, ".pt", spoilt)
    with pytest.raises(CheckpointError, match="not those that were written"):
        deat.export(nn.Linear(2, 2), "w.pt")
    assert not list(Path().iterdir())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_network_in_memory_is_exported_and_stays_as_it_is() -> None:
    net = deat.add_normalization(deat.build_model("small", 10, 1, 8), MEAN, STD).train()
    with pytest.raises(UsageError, match=r"example=torch\.rand"):
        deat.export(net, "net.ts")
    for example, words in ((images(1)[0], "shape \\(1, 8, 8\\)"), (torch.ones(1, 1, 8, 8, dtype=torch.uint8), "/ 255")):
        with pytest.raises(UsageError, match=words):
            deat.export(net, "net.ts", example=example)
    exported = deat.export(torch.compile(net), "net.ts", example=images(1))
    assert exported.max_difference is not None
    assert exported.max_difference < 1e-5
    assert net.training
    assert all(p.requires_grad for p in net.parameters())
    with pytest.raises(UsageError, match="exists already"):
        deat.export(net, "net.ts", example=images(1))
    deat.export(net, "w.safetensors")
    assert read_weights("w.safetensors").normalization["std"] == pytest.approx(STD)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"pip install 'deat\[export\]'"):
        deat.export(deat.build_model("small", 10, 1, 8), "net.onnx", example=images(1))


def test_without_onnx_runtime_the_file_is_checked_and_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    pytest.importorskip("onnxscript")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    exported = deat.export(deat.build_model("small", 10, 1, 8), "net.onnx", example=images(1))
    assert exported.max_difference is None
    assert "ONNX Runtime is not installed" in exported.note
