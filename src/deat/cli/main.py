"""The command line: one class for each command."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tyro.conf import FlagCreatePairsOff
from tyro.extras import subcommand_cli_from_dict

from deat.cli.bench import BenchCommand
from deat.cli.evaluate import EvaluateCommand
from deat.cli.exit_handling import Command, prepare_standard_streams, run_to_exit_status, short_warnings
from deat.cli.flag_types import check_flag_names
from deat.cli.import_export import ExportCommand, ImportCommand
from deat.cli.list import ListCommand
from deat.cli.predict_and_attack import AttackCommand, PredictCommand
from deat.cli.report import ReportCommand
from deat.cli.share import CardCommand, ClaimCommand, PullCommand, PushCommand
from deat.cli.train import ResumeCommand, TrainCommand
from deat.cli.watch_server import WatchCommand
from deat.errors import unknown_name_error
from deat.version import VERSION

COMMANDS: dict[str, type[Command]] = {
    "train": TrainCommand,
    "resume": ResumeCommand,
    "evaluate": EvaluateCommand,
    "bench": BenchCommand,
    "report": ReportCommand,
    "watch": WatchCommand,
    "predict": PredictCommand,
    "attack": AttackCommand,
    "card": CardCommand,
    "push": PushCommand,
    "pull": PullCommand,
    "claim": ClaimCommand,
    "import": ImportCommand,
    "export": ExportCommand,
    "list": ListCommand,
}


@dataclass(frozen=True)
class VersionCommand:
    """Print the version (`deat --version`)."""

    is_resumable: ClassVar[bool] = False

    def run(self) -> int:
        """Print the version."""
        print(f"deat {VERSION}")
        return 0


def main(argv: Sequence[str] | None = None, *, ends_process: bool = False) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. Default: those of this process.
        ends_process: Whether the process exits with the result. From the end of the command on, it ignores SIGTERM and
            SIGINT then, which would change its exit status.

    Returns:
        The exit status.

    Raises:
        SystemExit: After `--help` (status 0), and where the parser rejects an argument (status 2).

    Example:
        >>> main(["train", "--epochs", "5", "--out", "my-run"])
        0
    """
    args = list(sys.argv[1:] if argv is None else argv)
    prepare_standard_streams()
    with short_warnings():
        return run_to_exit_status(lambda: parse_command(args), ends_process=ends_process)


def run_process() -> int:
    """Run the command line in a process that exits with the result: what the program `deat` does."""
    return main(ends_process=True)


def parse_command(argv: Sequence[str]) -> Command:
    """Parse the command line into a command.

    Args:
        argv: Arguments without the program's name.

    Returns:
        The command, ready to run.

    Raises:
        UsageError: If the command or an option is unknown.
        SystemExit: After `--help` (status 0), and where the parser rejects an argument (status 2).
    """
    if list(argv) == ["--version"]:
        return VersionCommand()
    if argv and not argv[0].startswith("-"):
        if argv[0] not in COMMANDS:
            raise unknown_name_error("command", argv[0], COMMANDS)
        check_flag_names(argv[0], COMMANDS[argv[0]], argv[1:])
    return subcommand_cli_from_dict({**COMMANDS}, prog="deat", args=argv, config=(FlagCreatePairsOff,))
