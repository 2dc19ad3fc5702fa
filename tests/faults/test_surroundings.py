"""What a process finds around it: output that is closed or full, a launcher's variables, no home folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deat
from deat.cli.main import main
from deat.errors import UsageError
from deat.utils.user_paths import expand_path, find_home

from .conftest import SHORT

DEAT = [sys.executable, "-m", "deat"]


def run_in_shell(command: list[str], redirect: str) -> subprocess.CompletedProcess[str]:
    words = " ".join(f"'{word}'" for word in command)
    return subprocess.run(["sh", "-c", f"{words} {redirect}"], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.promise("P161")
@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&- <&-"])
def test_command_whose_output_is_closed_does_its_work(redirect):
    process = run_in_shell([*DEAT, *SHORT, "--epochs", "1"], redirect)
    assert (process.returncode, process.stderr) == (0, "")
    assert main(["resume", "run"]) == 0
    for file in Path("run").rglob("*.*"):  # no file had the number of the closed output
        assert b"fgsm on digits" not in file.read_bytes() or file.suffix in (".json", ".md")


@pytest.mark.promise("P161")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize(
    "command", [["list", "methods"], ["list", "attacks", "--json"], [*SHORT, "--epochs", "1"]], ids=lambda c: c[0]
)
def test_output_that_is_full_is_status_4_and_not_called_a_defect(command):
    process = run_in_shell([*DEAT, *command], ">/dev/full")
    assert (process.returncode, process.stderr.count("No space left on device")) == (4, 1), process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.promise("P161")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_status_of_a_command_whose_error_cannot_be_printed_is_that_of_the_error():
    assert run_in_shell([*DEAT, "train", "--method", "nonsense"], "2>/dev/full").returncode == 2


LAUNCHED = {
    "number of processes alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK is not set"),
    "without an address": ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
    "no number": ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    "no processes": ({"WORLD_SIZE": "0"}, "RANK is 0, with a WORLD_SIZE of 0"),
    "rank too large": ({"RANK": "3"}, "RANK is 3, with a WORLD_SIZE of 1"),
    "negative rank": ({"RANK": "-1"}, "RANK is '-1'"),
}


@pytest.mark.promise("P162")
@pytest.mark.parametrize("variables", LAUNCHED)
def test_launcher_s_variables_without_a_launcher_are_named(variables, monkeypatch, capsys):
    values, message = LAUNCHED[variables]
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert main(SHORT) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "torchrun" in told
    assert list(Path().iterdir()) == []


@pytest.mark.promise("P163")
@pytest.mark.parametrize(
    "command",
    [
        [*SHORT[:-1], "~nobody-of-this-name/run"],
        [*SHORT, "--data", "folder:~nobody-of-this-name"],
        [*SHORT, "--method", "~nobody-of-this-name/my.py:method"],
        ["resume", "~nobody-of-this-name"],
        ["evaluate", "~nobody-of-this-name"],
        ["report", "~nobody-of-this-name"],
        ["export", "~nobody-of-this-name"],
        ["import", "~nobody-of-this-name"],
        ["bench", "quick", "--out", "~nobody-of-this-name"],
    ],
    ids=" ".join,
)
def test_home_of_a_user_who_does_not_exist_is_named(command, capsys):
    assert main(command) == 2
    assert "~nobody-of-this-name is not the home folder of a user" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.promise("P163")
def test_name_that_begins_with_a_tilde_is_reached_by_its_path():
    Path("~nobody-of-this-name").mkdir()
    assert expand_path("./~nobody-of-this-name").is_dir()
    with pytest.raises(UsageError, match=r"\./~nobody-of-this-name"):
        expand_path("~nobody-of-this-name")


@pytest.mark.promise("P163")
def test_process_without_a_home_folder_trains_resumes_and_evaluates(monkeypatch, capsys):
    def fail(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("DEAT_DATA", raising=False)
    monkeypatch.setattr("pwd.getpwuid", fail)  # as with the user id of a container that has no name
    assert find_home() is None
    assert main([*SHORT, "--epochs", "1"]) == 0
    assert main(["resume", "run"]) == 0
    assert main(["evaluate", "run", "--attacks", "fgsm", "--n", "20"]) in (0, 6)
    with pytest.raises(UsageError, match="home folder"):
        deat.load_run("~/run")


def test_standard_streams_are_not_replaced_where_they_are_open():
    before = (sys.stdin, sys.stdout, sys.stderr)
    assert main(["list", "methods"]) == 0
    assert (sys.stdin, sys.stdout, sys.stderr) == before
    assert os.fstat(2)
