"""Nothing that is read may run, hang or reach outside; nothing that is written tells who or where one is."""

import getpass
import io
import json
import os
import pickle
import platform
import shutil
import socket
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import deat
from deat.cli.bench import print_results
from deat.cli.main import main
from deat.errors import CheckpointError
from deat.report.run_results import load_bench
from deat.runs.run_dir import create_unique_folder
from deat.utils.anonymize_paths import anonymize_paths, restore_user_paths
from deat.utils.console import print_stderr
from deat.utils.safetensors_files import read_note, read_tensors
from deat.utils.text import escape_markdown, make_printable
from helpers.children import Children
from helpers.runs import make_bench, make_run, one_run

from .conftest import SHORT
from .test_resume_checks import rewrite_state


def images(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 8) -> None:
    """A small set of images in class folders."""
    draw = np.random.default_rng(sum(folder.name.encode()))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")


FOLDER = [
    "train",
    "--data",
    "folder:set",
    "--data-root",
    "cache",
    "--epochs",
    "1",
    "--batch-size",
    "4",
    "--threads",
    "1",
]
FOLDER += ["--held-out", "4", "--val-attack", "pgd-1", "--baseline", "no", "--test-images", "0"]


class Bomb:
    """A pickle that would leave a marker."""

    def __reduce__(self):
        return os.mkdir, ("marker",)


@pytest.fixture
def bomb() -> Path:
    torch.save({"weight": Bomb()}, "bomb.pt")
    return Path("bomb.pt")


@pytest.mark.promise("P54")
@pytest.mark.parametrize("name", ["bomb.pt", "bomb.safetensors"])
@pytest.mark.parametrize("command", ["train", "resume", "evaluate", "import"])
def test_pickle_as_weights_is_refused_everywhere_and_never_runs(command, name, bomb, whole, capsys):
    if name != "bomb.pt":
        Path(name).write_bytes(bomb.read_bytes())
    shutil.copytree(whole, "run")
    for file in Path("run").rglob("model.safetensors"):
        file.unlink()
        file.write_bytes(bomb.read_bytes())
    flags = {
        "train": ["train", "--init", name],
        "resume": ["resume", "run"],
        "evaluate": ["evaluate", name, "--data", "digits"],
        "import": ["import", name, "--out", "new.safetensors"],
    }
    assert main(flags[command]) == 4
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("marker").exists()
    assert not Path("new.safetensors").exists()


def test_plain_pickle_is_refused_by_import_too(capsys):
    Path("plain.pt").write_bytes(pickle.dumps(Bomb()))
    Path("text.pt").write_text("not weights")
    torch.save([1, 2], "list.pt")
    torch.save({"state_dict": {"epoch": 3}}, "empty.pt")
    for name in ("plain.pt", "text.pt", "list.pt", "empty.pt", "nowhere.pt"):
        assert main(["import", name]) == 4, name
    assert not Path("marker").exists()
    assert not list(Path().glob("*.safetensors"))


@pytest.mark.parametrize("path", ["", ".", "/", "~"])
def test_import_of_a_folder_is_one_clean_error(path, capsys):
    assert main(["import", path]) == 4
    assert capsys.readouterr().err.startswith("deat: there is no file ")


def test_a_whole_pickled_model_is_refused_in_words_of_our_own(capsys):
    torch.save(torch.nn.Linear(2, 2), "whole.pt")
    assert main(["import", "whole.pt"]) == 4
    said = capsys.readouterr().err
    assert "whole.pt" in said
    assert "torch.save(model.state_dict(), 'weights.pt')" in said
    assert not any(word in said.lower() for word in ("weights_only", "two options", "\x1b", "?[", "global"))


def holds_itself() -> dict[str, object]:
    found: dict[str, object] = {}
    found["model"] = found
    return found


STRANGE = {
    "more numbers than the file has": lambda: {"w": torch.zeros(1).expand(10**13)},
    "no numbers": lambda: {"w": torch.empty(3, device="meta")},
    "sparse": lambda: {"w": torch.eye(3).to_sparse()},
    "jagged": lambda: {"w": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)},
    "a name of the format's own": lambda: {"__metadata__": torch.zeros(3)},
    "a name that is no text": lambda: {"a\ud800": torch.zeros(3)},
    "itself": holds_itself,
}


@pytest.mark.promise("P54")
@pytest.mark.parametrize("kind", STRANGE)
def test_weights_that_no_file_can_hold_are_one_clean_error(kind, capsys):
    torch.save(STRANGE[kind](), "strange.pt")
    assert main(["import", "strange.pt"]) == 4
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("strange.safetensors").exists()


def repacked(found: object, **changes: object) -> None:
    """packed.pt: what torch saves, put into its archive in another way."""
    torch.save(found, "whole.pt")
    with zipfile.ZipFile("whole.pt") as whole, zipfile.ZipFile("packed.pt", "w", **changes) as packed:
        for member in whole.infolist():
            packed.writestr(member.filename, whole.read(member))


@pytest.mark.promise("P54")
def test_weights_that_unpack_to_more_than_their_file_are_refused_unread(monkeypatch, capsys):
    repacked({"w": torch.zeros(1_000_000)}, compression=zipfile.ZIP_DEFLATED)
    assert Path("packed.pt").stat().st_size < 20_000
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    assert main(["import", "packed.pt"]) == 4
    assert "is compressed or would unpack" in capsys.readouterr().err
    Path("cut.pt").write_bytes(Path("whole.pt").read_bytes()[:5000])
    assert main(["import", "cut.pt"]) == 4
    assert not list(Path().glob("*.safetensors"))


def test_weights_that_are_stored_in_another_archive_are_still_weights(capsys):
    repacked({"w": torch.arange(3.0)})
    assert main(["import", "packed.pt"]) == 0
    assert read_tensors("packed.safetensors")["w"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.promise("P54")
def test_weights_that_share_their_numbers_may_not_grow_without_end(capsys):
    shared = torch.zeros(10_000)
    torch.save({f"w{i}": shared[i:] for i in range(100)}, "many.pt")
    torch.save({"a": shared, "b": shared, "half": shared[:5000]}, "tied.pt")
    assert main(["import", "many.pt"]) == 4
    assert "repeat its numbers" in capsys.readouterr().err
    assert main(["import", "tied.pt"]) == 0
    assert not Path("many.safetensors").exists()


@pytest.mark.parametrize("wrap", [lambda w: w, lambda w: {"epoch": 3, "state_dict": w}, lambda w: {"model": w}])
def test_foreign_weights_are_converted_once_and_train_on(wrap, capsys):
    model = deat.build_model("small", 10, 1, 8)
    weights = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save(wrap(weights), "theirs.pt")
    assert main(["import", "theirs.pt"]) == 0
    found = read_tensors("theirs.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert main(["import", "theirs.pt"]) == 2  # nothing is overwritten
    assert main([*SHORT, "--epochs", "1", "--init", "theirs.safetensors"]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.float8_e5m2])
def test_weights_that_are_not_finite_are_refused_before_anything_is_created(value, kind, capsys):
    weights = dict(deat.build_model("small", 10, 1, 8).state_dict())
    name = next(name for name, tensor in weights.items() if tensor.dim() == 4)
    weights[name] = weights[name].clone().index_fill_(0, torch.tensor(1), value).to(kind)
    torch.save(weights, "theirs.pt")
    save_file(weights, "broken.safetensors")
    for command, file in ((["import", "theirs.pt"], "theirs.pt"), ([*SHORT, "--init", "broken.safetensors"], "broken")):
        assert main(command) == 4
        message = capsys.readouterr().err
        assert name in message
        assert file in message
        assert "not finite" in message
    assert sorted(path.name for path in Path().iterdir()) == ["broken.safetensors", "theirs.pt"]


def test_numbers_of_eight_bits_are_weights_if_they_are_finite(capsys):
    torch.save({"w": torch.ones(3).to(torch.float8_e4m3fn), "count": torch.tensor(3)}, "small.pt")
    assert main(["import", "small.pt"]) == 0
    torch.save({"w": torch.full((3,), torch.nan).to(torch.float8_e4m3fn)}, "broken.pt")
    assert main(["import", "broken.pt"]) == 4


class Spoilt:
    """Weights that are lost after the first epoch, which so stays the best one."""

    def on_epoch(self, trainer, stats, timing):
        for weight in trainer.model.parameters():
            weight.detach().zero_()


def test_weights_of_checkpoints_that_fit_keeps_are_exported_best_and_last(capsys):
    torch.manual_seed(0)
    net = deat.build_model("small", num_classes=10, in_channels=1, image_size=8)
    options = {
        "val": 0.2,
        "epochs": 2,
        "method": "natural",
        "lr": 0.05,
        "normalize": ((0.3,), (0.4,)),
        "progress": False,
    }
    result = deat.fit(net, deat.load_data("digits"), **options, callbacks=[Spoilt()], checkpoints="kept")
    assert result.best.epoch == 0
    for command in (["export", "kept"], ["export", "kept", "--epoch", "last", "--out", "last.safetensors"]):
        assert main(command) == 0
        assert "normalised by mean 0.3 and std 0.4" in capsys.readouterr().out
    best, last = read_tensors("kept.safetensors"), read_tensors("last.safetensors")
    assert best.keys() == last.keys() == net.state_dict().keys()
    assert all(torch.equal(best[name], result.best.weights[f"net.{name}"]) for name in best)
    assert not any(last[name].any() for name in last if name.endswith("weight"))


KEPT = {
    "resume": (["resume", "kept"], 4, "same call of deat.fit"),
    "evaluate": (["evaluate", "kept", "--data", "digits", "--model", "small"], 4, "its checkpoints: deat export kept"),
    "init": (["train", "--init", "kept", "--epochs", "1"], 4, "its checkpoints: deat export kept"),
}


@pytest.mark.parametrize("command", KEPT)
def test_commands_that_need_a_run_say_what_can_be_done_with_checkpoints_of_fit(command, capsys):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    deat.fit(net, deat.load_data("digits"), epochs=1, method="natural", checkpoints="kept", progress=False)
    given, status, words = KEPT[command]
    assert main(given) == status
    assert words in capsys.readouterr().err


def test_exported_weights_have_the_network_s_own_names_and_can_be_split(capsys):
    images(Path("set/train"))
    assert main([*FOLDER, "--model", "small", "--out", "run"]) == 0
    assert main(["export", "run"]) == 0
    net = deat.build_model("small", 2, 3, 8)
    found = read_tensors("run.safetensors")
    assert found.keys() == net.state_dict().keys()
    net.load_state_dict(found)
    assert main(["export", "run", "--shard-size", "20KB", "--epoch", "last"]) == 0
    index = json.loads(Path("run-weights/model.safetensors.index.json").read_text())
    parts = {name: read_tensors(Path("run-weights") / name) for name in set(index["weight_map"].values())}
    assert len(parts) > 1
    assert all(torch.equal(parts[part][name], found[name]) for name, part in index["weight_map"].items())
    assert index["weight_map"].keys() == found.keys()
    assert "more than the 20,000 of --shard-size: its file is larger" in capsys.readouterr().out
    whole = read_note("run.safetensors")
    assert "normalize" in json.loads(whole)
    assert {read_note(Path("run-weights") / part) for part in parts} == {whole}
    assert index["metadata"]["deat"] == whole
    assert main(["export", "run", "--shard-size", "1GB", "--out", "one"]) == 0
    assert "larger" not in capsys.readouterr().out
    assert main(["export", "run"]) == 2
    assert main(["export", "run", "--shard-size", "much", "--out", "x"]) == 2
    assert main(["export", "nowhere"]) == 4


def test_weights_in_parts_are_weights_wherever_a_file_of_them_is(capsys):
    images(Path("set/train"))
    images(Path("set/test"))
    main([*FOLDER, "--model", "small", "--out", "run"])
    main(["export", "run", "--out", "whole.safetensors"])
    main(["export", "run", "--shard-size", "20KB", "--out", "parts"])
    index = Path("parts/model.safetensors.index.json")
    assert len(list(Path("parts").glob("*.safetensors"))) > 1
    assert read_note(index) == read_note("whole.safetensors")
    nets = [deat.build_model("small", 2, 3, 8) for _ in range(2)]
    for net, weights in zip(nets, ("whole.safetensors", "parts"), strict=True):
        deat.load_weights(net, weights, ignore_normalization=True)
    assert all(torch.equal(a, b) for a, b in zip(*(net.state_dict().values() for net in nets), strict=True))
    assert main([*FOLDER, "--model", "small", "--init", "parts", "--out", "tuned"]) == 0
    how, judged = ["--data", "folder:set", "--data-root", "cache", "--attacks", "natural", "--out", "e.json"], set()
    capsys.readouterr()
    for target in ("parts", str(index), "whole.safetensors"):
        main(["evaluate", target, "--model", "small", *how])
        judged.add(json.loads(Path("e.json").read_text())["settings"]["model"])
    assert len(judged) == 1
    assert "does not record its normalisation" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"weight_map": {}}',
        '{"weight_map": ["w.safetensors"]}',
        '{"weight_map": {"w": ["w.safetensors"]}}',
        '{"weight_map": {"w": "../w.safetensors"}}',
        '{"weight_map": {"w": "/etc/passwd"}}',
        '{"weight_map": {"w": "pipe.safetensors"}}',
        '{"weight_map": {"w": "absent.safetensors"}}',
        '{"weight_map": {"other": "w.safetensors"}}',
    ],
    ids=lambda text: text[:50],
)
def test_index_that_names_no_weights_beside_it_is_refused(index):
    Path("parts").mkdir()
    os.mkfifo("parts/pipe.safetensors")
    for place in ("w.safetensors", "parts/w.safetensors"):
        save_file({"w": torch.ones(1)}, place)
    Path("parts/model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        deat.load_weights(torch.nn.Linear(1, 1), "parts")
    assert read_note("parts/model.safetensors.index.json") is None


@pytest.mark.promise("P45")
def test_pipe_among_the_images_is_refused_and_does_not_hang(capsys):
    images(Path("set"))
    os.mkfifo("set/cat/9.png")
    assert main([*FOLDER, "--out", "run"]) == 3
    assert "9.png" in capsys.readouterr().err


@pytest.mark.promise("P45")
def test_link_that_leads_in_a_circle_is_not_followed():
    images(Path("set"))
    Path("set/cat/loop").symlink_to(Path("set").resolve())
    Path("set/dog/self").symlink_to(".")
    corpus = deat.load_data("folder:set", root="cache")
    assert len(corpus.train) == 16


def test_link_to_a_class_folder_is_followed():
    images(Path("elsewhere"), ("dog",))
    images(Path("set"), ("cat",))
    Path("set/dog").symlink_to(Path("elsewhere/dog").resolve())
    assert deat.load_data("folder:set", root="cache").train.classes == ("cat", "dog")


def test_home_in_out_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main([*SHORT[:-1], "~/there", "--epochs", "1"]) == 0
    assert (tmp_path / "there/report.md").is_file()
    assert not Path("~").exists()


def test_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"deat {deat.__version__}\n"


def test_terminal_of_few_characters_shows_what_it_can(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["--version"]) == 0
    print("\u2501", flush=True)
    assert b"?" in terminal.buffer.getvalue()


@pytest.mark.parametrize("command", [["list", "methods"], ["list", "methods", "--json"], ["--version"]])
def test_reader_that_left_is_status_141(command, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(command) == 141
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


OWN = """import deat
from dataclasses import replace
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
class Broken(type(deat.get_method("natural").play)):
    def __call__(self, game, x, y, budget):
        open(__file__ + ".nothing")
own = deat.get_method("pgd-2")
broken = replace(deat.get_method("natural"), name="broken", play=Broken())
"""
NET = """import torch
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))
    def forward(self, x):
        if self.training:
            raise KeyError("my own mistake")
        return super().forward(x)
"""


def test_error_in_the_user_s_own_network_is_reported_to_be_theirs(capsys):
    Path("mine.py").write_text(NET)
    assert main([*SHORT, "--model", "mine.py:Net"]) == 2
    message = capsys.readouterr().err
    assert "my own mistake" in message
    assert "mine.py, line 8" in message
    assert "internal error" not in message


@pytest.mark.promise("P60")
def test_no_command_needs_the_network(monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("somebody opened a socket")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    assert main([*SHORT, "--test-images", "20"]) == 0
    assert main(["resume", "run"]) == 0
    assert main(["evaluate", "run", "--attacks", "natural,pgd-2", "--n", "20"]) == 0
    assert main(["export", "run"]) == 0
    assert main(["report", "run", "--sweep", "4", "--gallery", "2"]) == 0
    assert Path("run/report/index.html").is_file()


@pytest.mark.promise("P61")
def test_nothing_that_is_written_names_the_user_the_machine_or_the_home(monkeypatch, tmp_path):
    home = tmp_path / "home-of-somebody"
    images(home / "set/train")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "somebody-special")
    monkeypatch.setenv("LOGNAME", "somebody-special")
    assert getpass.getuser() == "somebody-special"
    for owner, name in ((socket, "gethostname"), (platform, "node")):
        monkeypatch.setattr(owner, name, lambda: "machine-of-somebody")
    flags = [f"folder:{home}/set" if flag == "folder:set" else flag for flag in FOLDER]
    assert main([*flags, "--model", "small", "--out", str(home / "run")]) == 0
    assert main(["resume", str(home / "run")]) == 0
    assert main(["export", str(home / "run"), "--out", str(home / "run/weights.safetensors")]) == 0
    assert_untold(home / "run", home)


@pytest.mark.parametrize("root", ["nowhere", None], ids=["root of its own", "usual root"])
def test_record_that_asks_for_a_download_fetches_nothing(root, whole, monkeypatch, capsys):
    monkeypatch.setenv("DEAT_DATA", str(Path("usual").resolve()))
    monkeypatch.setattr("deat.data.cifar.download_file", lambda *_, **__: pytest.fail("something was fetched"))
    shutil.copytree(whole, "run")
    record = json.loads(Path("run/run.json").read_text())
    record["request"] |= {"data": "cifar10", "download": True, "data_root": root and str(Path(root).resolve())}
    Path("run/run.json").write_text(json.dumps(record))
    assert main(["resume", "run"]) == 3
    assert "cifar10 is not in" in capsys.readouterr().err
    assert not Path("nowhere").exists()
    assert not Path("usual").exists()


@pytest.mark.promise("P61")
def test_network_and_method_from_files_at_home_leave_no_trace_of_it(monkeypatch, tmp_path, capsys):
    home = tmp_path / "home-of-somebody"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DEAT_DATA", str(tmp_path / "data"))
    (home / "code").mkdir(parents=True)
    (home / "code/mine.py").write_text(OWN)
    net, method, run = f"{home}/code/mine.py:Net", f"m+{home}/code/mine.py:own", home / "run"
    flags = [*SHORT[:-1], str(run), "--epochs", "1", "--model", net, "--method", method]
    assert main(flags) == 0
    assert main([*flags, "--resume", "auto"]) == 0
    assert main(["resume", str(run), "--model", net, "--method", method]) == 0
    assert main(["evaluate", str(run), "--model", net, "--attacks", "natural", "--n", "20"]) in (0, 6)
    table = ["bench", "quick", "--methods", f"natural,{home}/code/mine.py:broken", "--model", net, "--seeds", "0"]
    small = ["--set", "epochs=1", "--set", "batch_size=256", "--set", "attacks=natural", "--set", "n=20"]
    assert main([*table, *small, "--out", str(home / "bench")]) == 1
    assert main(["report", str(home / "bench"), "--out", str(run / "report")]) == 0
    assert_untold(run, home)
    assert_untold(home / "bench", home)


@pytest.mark.parametrize("home", ["/home/ann", "/"])
@pytest.mark.parametrize("path", ["/home/ann/x", "/home/anna/x", "/data/a~b/~/c", "/srv/home/ann/x", "x~y", "~"])
@pytest.mark.parametrize("form", ["folder:{}", "{}", "m+{}.py:own"])
def test_recorded_path_comes_back_as_it_was(form, path, home, monkeypatch):
    monkeypatch.setenv("HOME", home)
    given = form.format(path if path != "~" else home)
    assert restore_user_paths(anonymize_paths(given)) == given
    assert ("ann/" in anonymize_paths(given)) == ("ann/" in given and (home == "/" or "/srv" in given))


@pytest.fixture
def alice(monkeypatch) -> None:
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "alice")
    assert getpass.getuser() == "alice"


PARTS = {
    "/x/alice/set": "/x/$USER/set",
    "folder:/x/alice": "folder:/x/$USER",
    "folder:alice/set": "folder:$USER/set",
    "folder:alice": "folder:$USER",
    "m+/x/alice/mine.py:own": "m+/x/$USER/mine.py:own",
    "alice/mine.py:alice": "$USER/mine.py:alice",
    "/alice/alice/x": "/$USER/$USER/x",
    "/x/alice2/malice/alice.d/alice-x": "/x/alice2/malice/alice.d/alice-x",
    "alice": "alice",
}


@pytest.mark.parametrize("path", PARTS)
def test_user_s_name_in_a_path_is_not_recorded_and_comes_back(path, alice):
    assert anonymize_paths(path) == PARTS[path]
    assert restore_user_paths(anonymize_paths(path)) == path


@pytest.mark.parametrize("name", ["root", "me"])
def test_name_that_tells_nothing_stays(name, monkeypatch):
    monkeypatch.setenv("LOGNAME", name)
    assert anonymize_paths(f"/x/{name}/set") == f"/x/{name}/set"


def test_user_without_a_name_has_paths_all_the_same(monkeypatch):
    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert restore_user_paths(anonymize_paths("/x/alice/set")) == "/x/alice/set"


@pytest.mark.promise("P61")
def test_place_where_a_linked_home_really_lies_is_not_recorded(monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for home in ("real", "home"):
        assert anonymize_paths(f"folder:{tmp_path / home}/set") == "folder:~/set"
    assert restore_user_paths("folder:~/set") == f"folder:{tmp_path}/home/set"


@pytest.mark.promise("P61")
def test_data_under_a_user_s_name_leaves_no_trace_of_it_and_is_found_again(alice, tmp_path, capsys):
    own = tmp_path / "scratch/alice"
    images(own / "train")
    images(own / "test")
    flags = [{"folder:set": f"folder:{own}", "cache": str(own / "cache")}.get(flag, flag) for flag in FOLDER]
    assert main([*flags, "--model", "small", "--out", "run"]) == 0
    Path("run/report.md").unlink()
    assert main(["resume", "run"]) == 0
    assert main(["evaluate", "run", "--attacks", "natural", "--n", "4"]) in (0, 6)
    assert main(["report", "run", "--no-figures"]) == 0
    told = [path for path in Path("run").rglob("*") if path.is_file() and b"alice" in path.read_bytes()]
    assert told == []


def assert_untold(folder: Path, home: Path) -> None:
    written = b"".join(str(p).encode() + p.read_bytes() for p in folder.rglob("*") if p.is_file())
    written = written.replace(str(folder).encode(), b"")  # where the files lie themselves
    assert str(home).encode() not in written
    assert b"somebody-special" not in written
    assert b"machine-of-somebody" not in written


@pytest.mark.promise("P62")
def test_hostile_names_are_shown_as_text(capsys):
    name = "<script>x|\x1b[31m"
    images(Path("set") / name / "train")
    Path("set").rename("outer")
    images(Path("set") / name)
    assert (
        main([*[f"folder:set/{name}" if f == "folder:set" else f for f in FOLDER], "--out", "run", "--model", "small"])
        == 0
    )
    report = Path("run/report.md").read_text()
    shown = capsys.readouterr()
    assert "<script>" not in report
    assert "\x1b" not in report + shown.out + shown.err
    assert escape_markdown("a|<b>\n`c`") == "a\\|&lt;b&gt;?\\`c\\`"
    assert make_printable("caf\u00e9\x07") == "caf\u00e9?"


@pytest.mark.promise("P62")
def test_names_in_hostile_files_do_not_reach_the_terminal_as_they_are(whole, capsys):
    save_file({"x\x1b[2J\x07": torch.zeros(1)}, "bad.safetensors")
    assert main(["evaluate", "bad.safetensors", "--data", "digits"]) == 4
    shutil.copytree(whole, "run")
    rewrite_state(Path("run"), lambda state: state["config"].update({"a\x1b[2J\rb": 1}))
    assert main(["resume", "run"]) == 2
    message = capsys.readouterr().err
    assert "x?[2J?" in message
    assert "a?[2J?b" in message
    assert not {"\x1b", "\x07", "\r"} & set(message)
    print_stderr("one\x1b[2J\n\ttwo")
    assert capsys.readouterr().err == "deat: one?[2J\n        two\n"


def test_name_of_a_weights_file_does_not_reach_the_terminal_as_it_is(capsys):
    for part in ("train", "test"):
        images(Path("set") / part)
    net = deat.build_model("small", num_classes=2, in_channels=3, image_size=8)
    deat.save_weights(net, Path("w\x1b[2J.safetensors"))
    how = ["--data", "folder:set", "--data-root", "cache", "--attacks", "natural", "--out", "e.json"]
    main(["evaluate", "w\x1b[2J.safetensors", *how])
    message = capsys.readouterr().err
    assert "deat: w?[2J.safetensors does not record its normalisation" in message
    assert "\x1b" not in message


@pytest.mark.promise("P62")
def test_hostile_names_in_a_bench_are_shown_as_text(capsys):
    make_run(Path("table/a"), shares={"natural": 0.9, "x\x1b[31m": 0.5})
    runs = [one_run("a"), one_run("b", seed=1, status="failed", why="no\x1b[2J")]
    rows = [{"name": "m\x1b[31m", "method": "m+deat", "model": "small", "paper": None, "runs": runs}]
    print_results(load_bench(make_bench(Path("table"), rows)))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("m?[31m", "x?[31m", "no?[2J"))
    assert "\x1b" not in shown


@pytest.mark.parametrize("bad", [{"accuracy": 5}, {"accuracy": {"natural": "x"}}, {"images": "many"}], ids=str)
def test_scores_that_are_none_are_the_folder_s_fault(bad, capsys):
    score = {"name": "m+deat", "accuracy": {"natural": 0.9}, "images": 10, "backprops": 3, "seconds": 1.0}
    (make_run(Path("run")) / "scores.json").write_text(json.dumps([score | bad]))
    assert main(["report", "run", "--no-figures", "--gallery", "0"]) == 3
    message = capsys.readouterr().err
    assert "'run' holds records that deat did not write" in message
    assert "internal error" not in message


@pytest.mark.promise("P50")
@pytest.mark.parametrize("name", ["..", "../../x", "a/b", "a\0b", "x" * 300, "", "."])
def test_name_that_deat_gives_a_folder_stays_in_its_parent(name, tmp_path):
    path = create_unique_folder(tmp_path / "runs", f"{name}-m+deat")
    assert path.parent == tmp_path / "runs"
    assert path.is_dir()
    assert not path.name.startswith(".")


def test_folders_named_at_the_same_time_are_different(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: create_unique_folder(tmp_path, "digits-m+deat"), range(16)))
    assert len(set(found)) == 16


@pytest.mark.promise("P51")
def test_two_runs_started_together_do_not_share_a_folder(children: Children, tmp_path):
    started = [children.start(*SHORT[:-2], "--epochs", "1", cwd=tmp_path) for _ in range(2)]
    assert [children.wait(pid) for pid in started] == [0, 0]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-fgsm", "digits-fgsm-2"]


@pytest.mark.promise("P46")
def test_test_images_touch_neither_training_nor_selection(monkeypatch):
    def guarded(self, most):
        class Guard:
            num_examples, num_classes, shape, batch_size = 10, 10, (1, 8, 8), 10

            def check(self) -> None: ...

            def __len__(self) -> int:
                return 1

            def epoch(self, epoch):
                raise AssertionError("the test images were touched")

        return Guard()

    from deat.runs.final_scores import RunScorer
    from deat.runs.resolve_request import Run

    monkeypatch.setattr(Run, "test_images", guarded)
    monkeypatch.setattr(RunScorer, "score", lambda *_: None)
    assert main([*SHORT, "--test-images", "10"]) == 0


def test_lost_network_weights_are_no_reason_to_guess(whole):
    shutil.copytree(whole, "run")
    shutil.rmtree("run/best")
    assert main(["evaluate", "run", "--attacks", "natural", "--n", "10"]) == 4
