"""The command line: `deat train`, `resume`, `evaluate`, `bench`, `report`, `import`, `export` and `list`."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, subcommand

from deat.cli.bench import BenchCommand
from deat.cli.evaluate import EvaluateCommand
from deat.cli.exit_handling import replace_unprintable_characters, run_to_exit_status, short_warnings
from deat.cli.flags import check_flag_names
from deat.cli.list import ListCommand
from deat.cli.report import ReportCommand
from deat.cli.train import ResumeCommand, TrainCommand
from deat.cli.weights import ExportCommand, ImportCommand
from deat.runs.run_dir import has_checkpoint
from deat.version import VERSION

Command = (
    Annotated[TrainCommand, subcommand("train")]
    | Annotated[ResumeCommand, subcommand("resume")]
    | Annotated[EvaluateCommand, subcommand("evaluate")]
    | Annotated[BenchCommand, subcommand("bench")]
    | Annotated[ReportCommand, subcommand("report")]
    | Annotated[ImportCommand, subcommand("import")]
    | Annotated[ExportCommand, subcommand("export")]
    | Annotated[ListCommand, subcommand("list")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status says how it ended."""
    given = list(sys.argv[1:] if argv is None else argv)
    replace_unprintable_characters()
    order: list[Command] = []

    def command() -> int:
        """Read the command line and obey it."""
        status = 0
        if given == ["--version"]:
            print(f"deat {VERSION}")
        else:
            check_flag_names(
                given,
                (
                    TrainCommand,
                    ResumeCommand,
                    EvaluateCommand,
                    BenchCommand,
                    ReportCommand,
                    ImportCommand,
                    ExportCommand,
                    ListCommand,
                ),
            )
            order.append(tyro.cli(Command, prog="deat", args=given, config=(FlagCreatePairsOff,)))
            status = order[0].run()
        sys.stdout.flush()  # here, where it is noticed that nobody reads any more
        return status

    with short_warnings():
        return run_to_exit_status(
            command, lambda: getattr(order[0], "goes_on", False) if order else _is_resumable(given)
        )


def _is_resumable(argv: list[str]) -> bool:
    """Whether a command goes on where it was, as far as words say that nobody has read yet."""
    if argv[:1] != ["train"]:
        return argv[:1] in (["resume"], ["evaluate"], ["bench"])
    named = dict(pairwise(word for text in argv for word in text.split("=", 1)))
    return named.get("--resume") == "auto" and "--out" in named and has_checkpoint(Path(named["--out"]).expanduser())
