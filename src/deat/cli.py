"""The command line: `deat train`, `resume`, `evaluate`, `bench`, `report`, `import`, `export` and `list`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from deat.commands.bench import Bench
from deat.commands.ending import ended, tolerate_any_terminal
from deat.commands.evaluate import run_evaluation
from deat.commands.flags import MaybeNumber, MaybeText, MaybeWhole, Norm, Whole
from deat.commands.lists import List
from deat.commands.report import Report
from deat.commands.resume import Resume
from deat.commands.train import Train
from deat.commands.weights import Export, Import
from deat.training.folder import has_checkpoint
from deat.versions import VERSION


@dataclass(frozen=True)
class Evaluate:
    """Judge a run or a weights file by attacks. Exits with 6 where the number should not be believed."""

    goes_on: ClassVar[bool] = True

    target: Annotated[Positional[str], arg(metavar="RUN")]
    """A run's folder, or a .safetensors file."""
    data: MaybeText = None
    """The data set, as for train; a run knows its own. Its test part is judged."""
    model: MaybeText = None
    """The network, as for train; a run knows its own, unless it came from a file."""
    attacks: str = "natural,fgsm,pgd-20,cw-20"
    """Names from `deat list attacks`, with commas: pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square, aa, ..."""
    n: MaybeWhole = None
    """The first images only; the number is then marked as a sample."""
    eps: MaybeNumber = None
    """Another radius than the run's or the data set's."""
    norm: Norm = None
    """Another norm."""
    alpha: MaybeNumber = None
    """The step of pgd and cw (a quarter of eps)."""
    epoch: Literal["best", "last"] = "best"
    """Which of a run's weights."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network of a weights file that says nothing of it, as for train; a run knows."""
    cascade: bool = False
    """Send only survivors on to the next attack; faster, but single attacks then have no accuracy."""
    seed: Whole = 0
    """Where every random draw comes from."""
    block: Whole = 500
    """Images attacked at once; verdicts depend on it, so it is recorded."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """What attacks compute in: auto is fp16 on a GPU and fp32 elsewhere. Verdicts are always settled in float32."""
    engine: Literal["auto", "graph", "compile"] = "auto"
    """How attacks run on a GPU: graph records passes, compile compiles them first; auto compiles long evaluations."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    out: MaybeText = None
    """The result's file (evaluation.json in the run's folder, or beside the weights)."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    json: bool = False
    """Print evaluation.json instead of a table."""

    def run(self) -> int:
        """Evaluate."""
        return run_evaluation(vars(self))


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Resume, subcommand("resume")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Import, subcommand("import")]
    | Annotated[Export, subcommand("export")]
    | Annotated[List, subcommand("list")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status says how it ended."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    tolerate_any_terminal()
    order: list[Command] = []

    def command() -> int:
        """Read the command line and obey it."""
        status = 0
        if given == ["--version"]:
            print(f"deat {VERSION}")
        else:
            order.append(tyro.cli(Command, prog="deat", args=given, config=(FlagCreatePairsOff,)))
            status = order[0].run()
        sys.stdout.flush()  # here, where it is noticed that nobody reads any more
        return status

    return ended(command, lambda: getattr(order[0], "goes_on", False) if order else _would_go_on(given))


def _would_go_on(given: list[str]) -> bool:
    """Whether a command goes on where it was, as far as words say that nobody has read yet."""
    if given[:1] != ["train"]:
        return given[:1] in (["resume"], ["evaluate"], ["bench"])
    named = dict(pairwise(word for text in given for word in text.split("=", 1)))
    return named.get("--resume") == "auto" and "--out" in named and has_checkpoint(Path(named["--out"]).expanduser())
