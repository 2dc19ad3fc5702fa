"""The command line: one class for each command, which is imported when the command is given."""

import ast
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from deat.errors import unknown_name_error
from deat.utils.garbage_collection import without_garbage_collection
from deat.utils.standard_streams import prepare_standard_streams
from deat.version import VERSION

if TYPE_CHECKING:
    from deat.cli.exit_handling import Command

COMMANDS = {
    "train": "deat.cli.train:TrainCommand",
    "resume": "deat.cli.train:ResumeCommand",
    "evaluate": "deat.cli.evaluate:EvaluateCommand",
    "bench": "deat.cli.bench:BenchCommand",
    "report": "deat.cli.report:ReportCommand",
    "watch": "deat.cli.watch_server:WatchCommand",
    "predict": "deat.cli.predict_and_attack:PredictCommand",
    "attack": "deat.cli.predict_and_attack:AttackCommand",
    "card": "deat.cli.share:CardCommand",
    "push": "deat.cli.share:PushCommand",
    "pull": "deat.cli.share:PullCommand",
    "claim": "deat.cli.share:ClaimCommand",
    "import": "deat.cli.import_export:ImportCommand",
    "export": "deat.cli.import_export:ExportCommand",
    "list": "deat.cli.list:ListCommand",
}
"""The module and the class of each command."""
HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True)
class VersionCommand:
    """Print the version (`deat --version`)."""

    is_resumable: ClassVar[bool] = False

    def run(self) -> int:
        """Print the version."""
        print(f"deat {VERSION}")
        return 0


def load_command(name: str) -> "type[Command]":
    """Import a command's class.

    Args:
        name: The command's name, such as "train".
    """
    module, _, class_name = COMMANDS[name].partition(":")
    with without_garbage_collection():
        command: type[Command] = getattr(import_module(module), class_name)
    return command


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
    if len(args) == 1 and args[0] in HELP_FLAGS:
        _parse(args)
    # Only in a process of its own: in others, more names may be registered.
    listed_kind = _find_saved_kind(args) if ends_process and args[:1] == ["list"] else None
    if listed_kind and _print_saved_listing(listed_kind, as_json="--json" in args):
        return 0
    with without_garbage_collection():
        from deat.cli.exit_handling import run_to_exit_status, short_warnings  # needs torch, which takes long to import

    with short_warnings():
        status = run_to_exit_status(lambda: parse_command(args), ends_process=ends_process)
    if listed_kind and status == 0:
        from deat.cli.list import compute_rows
        from deat.cli.saved_listings import save_rows

        save_rows(listed_kind, compute_rows(listed_kind))
    return status


def _find_saved_kind(args: list[str]) -> str | None:
    from deat.cli.saved_listings import find_saved_kind

    return find_saved_kind(args)


def _print_saved_listing(kind: str, *, as_json: bool) -> bool:
    """Print a saved listing. Return False if none is saved or it cannot be printed: the usual way then reports the error."""
    from deat.cli.saved_listings import load_rows, print_rows

    rows = load_rows(kind)
    if rows is None:
        return False
    try:
        print_rows(kind, rows, as_json=as_json)
        sys.stdout.flush()
    except OSError:  # such as a closed pipe
        return False
    return True


def run_process() -> int:
    """Run the command line in a process that exits with the result: what the program `deat` does."""
    return main(ends_process=True)


def parse_command(argv: Sequence[str]) -> "Command":
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
        from deat.cli.flag_types import check_flag_names

        check_flag_names(argv[0], load_command(argv[0]), argv[1:])
    command: Command = _parse(argv)
    return command


def _parse(argv: Sequence[str]) -> Any:
    """Parse the command line; only the given command is imported, the others have their descriptions."""
    from tyro.conf import FlagCreatePairsOff
    from tyro.extras import subcommand_cli_from_dict

    name = argv[0] if argv else None
    # Descriptions of the other commands are shown only where none is given.
    names = [name] if name in COMMANDS else list(COMMANDS)
    commands = {each: load_command(each) if each == name else _describe_command(each) for each in names}
    return subcommand_cli_from_dict({**commands}, prog="deat", args=argv, config=(FlagCreatePairsOff,))


def _describe_command(name: str) -> type[Any]:
    """Make a class without flags that has the description of a command, which is read from its source."""
    module, _, class_name = COMMANDS[name].partition(":")
    spec = find_spec(module)
    try:
        tree = ast.parse(Path(spec.origin or "").read_bytes()) if spec else ast.Module([], [])
    except OSError:  # installed without its sources
        return load_command(name)
    docstrings = [
        ast.get_docstring(node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    stub = make_dataclass(class_name, [])
    stub.__doc__ = inspect.cleandoc(docstrings[0] or "")
    return stub
