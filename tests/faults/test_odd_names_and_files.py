"""Folders of odd names, pipes in the place of files, a download that trickles, and user code that ends the process."""

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import deat
from deat.cli.main import main
from deat.data import download
from deat.errors import DataError, UsageError
from deat.utils.text import quote_for_shell
from helpers.nets import conv_net, learnable

from .conftest import SHORT

ODD_NAMES = ["-dash", "tab\there", "a\x1b[31mred", "it's", "line\nbreak", "back\\slash\t'", "ü\x07", "a b", "$HOME"]


@pytest.mark.promise("P171")
@pytest.mark.parametrize("name", [*ODD_NAMES, os.fsdecode(b"no\xffutf8")], ids=ascii)
def test_quoted_name_reaches_a_command_as_it_is(name):
    told = quote_for_shell(name)
    assert told.isprintable()
    got = subprocess.run(["bash", "-c", f"printf %s {told}"], capture_output=True, check=True).stdout
    assert got == os.fsencode(f"./{name}" if name.startswith("-") else name)


@pytest.mark.promise("P171")
@pytest.mark.parametrize("name", ["-dash", "a\x1b[31mred\t'"], ids=ascii)
def test_printed_command_resumes_a_run_whatever_its_folder_is_called(name, capsys):
    assert main([*SHORT[:-1], f"{'./' * name.startswith('-')}{name}", "--epochs", "1"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main([*SHORT[:-2], f"--out={name}"]) == 2
    told = capsys.readouterr().err.strip()
    _, _, command = told.rpartition("deat resume ")
    shown = subprocess.run(["bash", "-c", f"printf %s {command}"], capture_output=True, text=True, check=True).stdout
    assert main(["resume", shown]) == 0


@pytest.mark.promise("P171")
def test_folder_whose_name_is_no_text_is_refused_before_any_work(capsys):
    name = os.fsdecode(b"no\xffutf8")
    for command in ([*SHORT[:-1], name], ["resume", name], ["evaluate", name], ["report", name]):
        assert main(command) == 2
        assert r"'no\udcffutf8' is not text in UTF-8" in capsys.readouterr().err
    with pytest.raises(UsageError, match="UTF-8"):
        deat.fit(conv_net(), learnable(24), method="fgsm", epochs=1, batch_size=8, checkpoints=name)
    assert list(Path().iterdir()) == []


COMMANDS = [
    ["resume", "run"],
    ["report", "run", "--no-figures"],
    [*SHORT, "--resume", "auto"],
    ["evaluate", "run"],
    ["export", "run"],
]


@pytest.mark.promise("P172")
@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "timing.jsonl", "evaluation.json", "scores.json"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_pipe_in_place_of_a_record_is_not_waited_for(command, name, whole, capsys):
    shutil.copytree(whole, "run")
    Path("run", name).unlink(missing_ok=True)
    os.mkfifo(Path("run", name))
    assert main(command) in (0, 2, 3, 4, 6)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.promise("P172")
@pytest.mark.parametrize("flag", [["--data", "csv:pipe"], ["--init", "pipe"], ["--model", "pipe:Net"]], ids=" ".join)
def test_pipe_in_place_of_a_file_of_the_user_s_is_refused(flag, capsys):
    os.mkfifo("pipe")
    assert main([*SHORT, *flag]) in (2, 3, 4)
    assert "pipe" in capsys.readouterr().err


@pytest.fixture
def trickle(monkeypatch):
    """The address of a file that comes a byte at a time, for ever."""

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            try:
                while not ended.wait(0.02):
                    self.wfile.write(b"x")
                    self.wfile.flush()
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    ended = threading.Event()
    server = HTTPServer(("127.0.0.1", 0), Trickle)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.5)
    yield f"http://127.0.0.1:{server.server_port}/"
    ended.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.promise("P173")
def test_download_that_trickles_ends_with_how_far_it_came(trickle):
    with pytest.raises(DataError, match="bytes came in"):
        download.download_file(trickle, Path("data/file"), 1 << 20, "0" * 64)
    assert list(Path("data").iterdir()) == []


LEAVING = """
import sys
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=10, in_channels=1, image_size=8):
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 20:
            sys.exit(0)
        return self.layer(x.flatten(1))
"""


@pytest.mark.promise("P174")
def test_network_that_ends_the_process_does_not_end_an_unfinished_run_with_0(capsys):
    Path("net.py").write_text(LEAVING)
    assert main([*SHORT, "--model", "net.py:Net", "--epochs", "9"]) == 2
    told = capsys.readouterr().err
    assert "sys.exit(0) was called in your code" in told
    assert "net.py, line 13" in told


@pytest.mark.promise("P174")
def test_network_that_ends_the_process_fails_its_row_of_a_bench(capsys):
    Path("net.py").write_text(LEAVING)
    small = ["--set", "epochs=9", "--set", "n=20", "--set", "attacks=natural", "--set", "held_out=20"]
    assert main(["bench", "quick", "--methods", "natural", "--seeds", "0", "--model", "net.py:Net", *small]) == 1
    (row,) = json.loads(Path("runs/bench-quick/bench.json").read_text())["rows"]
    assert [run["status"] for run in row["runs"]] == ["failed"]
    assert "SystemExit" in row["runs"][0]["why"]
