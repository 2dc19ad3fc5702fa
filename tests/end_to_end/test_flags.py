"""The command line's flags, frozen: a new one is added here on purpose or not at all. Each reads what it says."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from deat.cli.bench import BenchCommand
from deat.cli.evaluate import EvaluateCommand
from deat.cli.flag_types import FLAG_BY_SYNONYM, SYNONYMS_BY_FLAG, check_flag_names
from deat.cli.import_export import ExportCommand, ImportCommand
from deat.cli.list import ListCommand
from deat.cli.main import COMMANDS as COMMAND_NAMES
from deat.cli.main import load_command, main
from deat.cli.predict_and_attack import AttackCommand, PredictCommand
from deat.cli.report import ReportCommand
from deat.cli.share import CardCommand, ClaimCommand, PullCommand, PushCommand
from deat.cli.train import ResumeCommand, TrainCommand
from deat.cli.watch_server import WatchCommand

TRAIN = """data target task model method epochs eps norm threat threat_rule out overwrite resume inexact seed batch_size lr
lr_schedule weight_decay optimizer momentum betas ema clip_grad_norm label_smoothing class_weights mixup cutmix
random_erasing init rules alpha gamma max_steps beta tau g_weight g_step g_form
awp_gamma awp_warmup start persistent compact n_train held_out val_attack watch
normalize augment test_images baseline precision sync_bn engine device threads deterministic workers log
log_every log_checkpoints data_root download size dry_run json"""
RESUME = "run_folder method model inexact log log_every log_checkpoints data_root json"
EVALUATE = """target data model attacks n eps norm threat alpha epoch normalize cascade seed block precision engine device out
data_root size json"""
BENCH = """recipe methods rows seeds data model set budget_bp jobs parallel out data_root download dry_run json"""
REPORT = """runs out title against sweep gallery no_figures model device data_root json"""


@pytest.mark.promise("P53")
def test_no_flag_appears_by_accident() -> None:
    assert [f.name for f in fields(TrainCommand)] == TRAIN.split()
    assert [f.name for f in fields(EvaluateCommand)] == EVALUATE.split()
    assert [f.name for f in fields(ResumeCommand)] == RESUME.split()
    assert [f.name for f in fields(ImportCommand)] == ["file", "out", "part"]
    assert [f.name for f in fields(ExportCommand)] == ["run_folder", "out", "epoch", "shard_size", "model"]
    assert [f.name for f in fields(BenchCommand)] == BENCH.split()
    assert [f.name for f in fields(ReportCommand)] == REPORT.split()
    assert [f.name for f in fields(ListCommand)] == ["kind", "code", "json"]


def test_help_names_what_a_positional_argument_is(capsys: Any) -> None:
    named = {
        "resume": "RUN",
        "evaluate": "RUN",
        "bench": "RECIPE",
        "report": "RUN [RUN ...]",
        "export": "RUN",
        "attack": "RUN IMAGES",
    }
    for command, name in {**named, "import": "FILE"}.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        usage = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
        assert f" {name}" in usage, command
        assert "STR" not in usage, command


def test_names_from_other_programs_lead_to_flags_and_are_none_themselves() -> None:
    flags = {f.name.replace("_", "-") for command in COMMANDS for f in fields(command)}
    assert set(SYNONYMS_BY_FLAG) <= flags
    assert not FLAG_BY_SYNONYM.keys() & flags


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("evaluate run --epsilon 0.1", "--eps"),
        ("bench quick --epochs 3", "--set epochs=..."),
        ("bench quick --learning-rate=3", "--set lr=..."),
        ("bench quick --batch 3", "--set batch_size=..."),
        ("export run --output x", "--out"),
        ("evaluate --epsilon 0.1 run", "--eps"),  # before the argument that the parser would miss first
        ("bench --epochs 3 quick", "--set epochs=..."),
        ("train --epoch 3", "--epochs"),
        ("train --batchsize=64", "--batch-size"),
        ("train --rate flat", "--lr-schedule"),
        ("bench quick --lr-scheduler flat", "--set lr_schedule=..."),
    ],
)
def test_what_a_flag_is_called_here_depends_on_the_command(command: str, hint: str, capsys: Any) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err.endswith(f"Did you mean {hint}?\n")


def test_a_name_is_not_guessed_for_a_command_that_has_no_such_flag(capsys: Any) -> None:
    assert main(["resume", "run", "--learning-rate", "1"]) == 2
    message = capsys.readouterr().err
    assert "unknown option '--learning-rate'" in message
    assert "Did you mean" not in message
    assert "deat resume --help" in message


def test_every_flag_in_the_help_is_known_under_either_spelling(capsys: Any) -> None:
    for command in COMMAND_NAMES:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        flags = set(re.findall(r"(?<= )--[a-z][\w-]*(?= )", capsys.readouterr().out))
        assert len(flags) > 1, command
        for flag in flags:
            check_flag_names(
                command, load_command(command), [flag, f"{flag}=1", flag.replace("-", "_").replace("__", "--")]
            )


def test_what_follows_two_dashes_is_no_flag() -> None:
    check_flag_names("evaluate", EvaluateCommand, ["--eps", "0.1", "--", "--strange-run"])


@pytest.mark.parametrize("rest", [[], ["--help"], ["--epochs", "3"]], ids=" ".join)
def test_an_unknown_command_is_named_with_those_there_are(rest: list[str], capsys: Any) -> None:
    assert main(["evalute", *rest]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "unknown command 'evalute'" in output.err
    assert "'evaluate'" in output.err.partition("Known")[0]
    assert all(command in output.err.partition("Known")[2] for command in COMMAND_NAMES)


@pytest.mark.parametrize("command", ["", *COMMAND_NAMES])
def test_help_is_printed_and_is_no_error(command: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"usage: deat {command}".strip())
    assert output.err == ""


def test_the_overview_describes_each_command_by_its_class(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    overview = " ".join(re.sub(r"[│•╭╮╰╯─]", " ", capsys.readouterr().out).split())
    for command in COMMAND_NAMES:
        summary = (load_command(command).__doc__ or "").partition(". ")[0]
        assert f"{command} {' '.join(summary.split())}" in overview


COMMANDS: dict[type[Any], list[str]] = {
    TrainCommand: ["train"],
    ResumeCommand: ["resume", "run"],
    EvaluateCommand: ["evaluate", "run"],
    BenchCommand: ["bench", "quick"],
    ReportCommand: ["report", "run"],
    ImportCommand: ["import", "file.pt"],
    ExportCommand: ["export", "run"],
    ListCommand: ["list", "data"],
    PredictCommand: ["predict", "run", "image.png"],
    AttackCommand: ["attack", "run", "image.png"],
    CardCommand: ["card", "run"],
    PushCommand: ["push", "run", "./model"],
    PullCommand: ["pull", "./model"],
    ClaimCommand: ["claim", "run"],
    WatchCommand: ["watch", "run"],
}


def numbers() -> Iterator[tuple[list[str], str]]:
    """Every flag that takes a number: the command up to its value, and the kind of number."""
    for command, start in COMMANDS.items():
        for name, hint in get_type_hints(command).items():
            kinds = {int, float} & {hint, *get_args(hint)}
            if kinds:
                yield [*start, f"--{name.replace('_', '-')}"], kinds.pop().__name__


def texts() -> Iterator[tuple[list[str], str]]:
    """Every flag that may be left out and takes a text: the command, and the flag."""
    for command, start in COMMANDS.items():
        for name, hint in get_type_hints(command).items():
            if hint == str | None:
                yield start, f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(("start", "flag"), list(texts()), ids=lambda part: "".join(part))
def test_a_variable_that_is_not_set_is_not_taken_for_a_flag_that_was_left_out(
    start: list[str], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main([*start, flag, ""])
    assert left.value.code == 2
    assert f"{flag}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


NUMBERS = {" ".join(start): (start, kind) for start, kind in numbers()}


def test_flags_that_take_numbers_are_found() -> None:
    assert {"bench quick --jobs", "train --eps", "evaluate run --n", "report run --gallery"} <= NUMBERS.keys()


@pytest.mark.promise("P48")
@pytest.mark.parametrize("value", ["x", "", "1,5", "1e999", "9" * 5000 + "x"], ids=lambda value: value[:5])
@pytest.mark.parametrize("flag", NUMBERS)
def test_what_is_no_number_is_named_with_what_is_accepted(
    flag: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    start, kind = NUMBERS[flag]
    with pytest.raises(SystemExit) as left:
        main([*start, value])
    said = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert left.value.code == 2
    assert f"{start[-1]}: {repr(value)[:20]}" in said
    assert {"int": "is not a whole number", "float": "is not a number"}[kind] in said
    assert "such as" in said
    assert "invalid literal" not in said
    assert "could not convert" not in said
    assert list(tmp_path.iterdir()) == []
