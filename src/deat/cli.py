"""The command line: `deat train`, `resume`, `evaluate`, `bench`, `report`, `import`, `export` and `list`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from deat.commands.bench import Bench
from deat.commands.ending import ended, tolerate_any_terminal
from deat.commands.evaluate import run_evaluation
from deat.commands.flags import MaybeNumber, MaybeText, MaybeWhole, Norm, Shape, Start, Watch, Whole
from deat.commands.lists import list_things
from deat.commands.report import Report
from deat.commands.resume import run_resume
from deat.commands.train import run_training
from deat.commands.weights import run_export, run_import
from deat.training.folder import has_checkpoint
from deat.versions import VERSION


@dataclass(frozen=True)
class Train:
    """Train a classifier robustly. Without flags: m+deat on digits, and a table beside natural training."""

    data: str = "digits"
    """digits, cifar10, cifar100, or folder:PATH (a folder or archive with one folder of images a class)."""
    model: str = "auto"
    """A name from `deat list models`, timm:NAME, torchvision:NAME or my_file.py:NAME; auto fits the images."""
    method: str = "m+deat"
    """A name from `deat list methods` (numbers may change, m+ and f+ compose) or my_file.py:NAME."""
    epochs: MaybeWhole = None
    """How often the training set is seen (30)."""
    eps: MaybeNumber = None
    """The threat model's radius in [0, 1] pixels, such as 8/255; each data set has a default."""
    norm: Norm = None
    """The threat model's norm (linf)."""
    out: MaybeText = None
    """The run's folder, which must not exist; by default a new one under runs/."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Literal["no", "auto"] = "no"
    """auto goes on with the run that is in --out, if there is one of the same settings, and else starts it."""
    inexact: bool = False
    """--resume: go on even where the numbers will differ from an uninterrupted run's."""
    seed: Whole = 0
    """Where every random draw comes from."""
    batch_size: MaybeWhole = None
    """Images in a batch (128; digits 64)."""
    lr: MaybeNumber = None
    """The (peak) learning rate (0.1; digits 0.05)."""
    rate: Shape = None
    """The learning rate's shape (cyclic)."""
    weight_decay: MaybeNumber = None
    """Weight decay (5e-4)."""
    momentum: MaybeNumber = None
    """SGD's momentum (0.9)."""
    init: MaybeText = None
    """Weights to fine-tune: a safetensors file or a run's folder."""
    rules: Literal["paper", "released"] = "paper"
    """The paper as written, or the code that made its tables."""
    alpha: MaybeNumber = None
    """The adversary's step size, such as 10/255; each method has a default."""
    gamma: MaybeNumber = None
    """M+: how far l_X must outgrow its last threshold (1.01)."""
    max_steps: MaybeWhole = None
    """M+: the largest k."""
    beta: MaybeNumber = None
    """TRADES and MART: the weight of the robust term (6)."""
    tau: MaybeWhole = None
    """FAT and F+: steps granted after an example is misclassified (3)."""
    start: Start = None
    """Where the perturbation starts."""
    persistent: bool = False
    """Carry the perturbation from batch to batch, as FREE originally does."""
    compact: bool = False
    """FAT and F+: shrink the batch instead of masking it."""
    held_out: MaybeWhole = None
    """Training images held out to choose the best epoch (a tenth, at most 1000)."""
    val_attack: MaybeText = None
    """The attack on them: cw-20 (default), pgd-20, ..., or none."""
    watch: Watch = None
    """On catastrophic overfitting: warn (default where images are held out), stop, roll back and step less, or none."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network: the data's mean and deviation; auto takes a network of your own as it is."""
    augment: Literal["auto", "none"] = "auto"
    """Random crops and flips, where the data set has them; none trains on the images as they are."""
    test_images: Whole = 1000
    """Test images scored at the end by natural, FGSM and PGD-20; 0 for none."""
    baseline: Literal["auto", "yes", "no"] = "auto"
    """Also train naturally, to compare; auto does so on digits only."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is bf16 where the hardware is fast at it."""
    sync_bn: bool = False
    """With several processes on GPUs: batch-norm statistics of the whole batch, not of each process's share."""
    engine: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How moves run: graph records them as CUDA graphs, compile compiles them first; auto records on a GPU, and
    compiles where the run is long enough to earn that back."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    threads: MaybeWhole = None
    """CPU threads; small networks use one by default."""
    deterministic: bool = False
    """On a GPU, the same bits every time, so that a resumed run is exact; slower. A CPU is so anyway."""
    workers: MaybeWhole = None
    """Processes that decode images which do not fit in memory."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    dry_run: bool = False
    """Say what the run would cost in backprops, time and memory, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    @property
    def goes_on(self) -> bool:
        """Whether the same command goes on where it was: there is a run, and it may be taken up."""
        return self.resume == "auto" and self.out is not None and has_checkpoint(Path(self.out).expanduser())

    def run(self) -> int:
        """Train."""
        return run_training(vars(self))


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was interrupted or killed, to the bytes that an uninterrupted one would have given."""

    goes_on: ClassVar[bool] = True

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    method: MaybeText = None
    """The run's method again, where it came from a file: my_file.py:NAME."""
    model: MaybeText = None
    """The run's model again, where it came from a file: my_file.py:NAME."""
    inexact: bool = False
    """Go on even where the numbers will differ from an uninterrupted run's."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Go on."""
        return run_resume(vars(self))


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


@dataclass(frozen=True)
class Import:
    """Convert a .pt or .pth file of weights to safetensors, once; nothing in it is run."""

    file: Annotated[Positional[str], arg(metavar="FILE")]
    """The file: a state dict, or a checkpoint that holds one."""
    out: MaybeText = None
    """The new file (FILE with the ending .safetensors)."""

    def run(self) -> int:
        """Convert."""
        return run_import(self.file, self.out)


@dataclass(frozen=True)
class Export:
    """Write a run's weights under the network's own names, for use without deat."""

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    out: MaybeText = None
    """The new file (RUN.safetensors), or with --shard-size the new folder."""
    epoch: Literal["best", "last"] = "best"
    """Which of the run's weights."""
    shard_size: MaybeText = None
    """Several files of at most this size, such as 500MB or 2GB, with an index."""

    def run(self) -> int:
        """Export."""
        return run_export(self.run_folder, self.out, self.epoch, self.shard_size)


@dataclass(frozen=True)
class List:
    """List what can be named: methods, models, data, attacks or recipes."""

    kind: Positional[Literal["methods", "models", "data", "attacks", "recipes"]]
    """What to list."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Print the list."""
        return list_things(self.kind, as_json=self.json)


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
    order: list[Any] = []

    def command() -> int:
        """Read the command line and obey it."""
        status = 0
        if given == ["--version"]:
            print(f"deat {VERSION}")
        else:
            order.append(tyro.cli(Command, prog="deat", args=given, config=(FlagCreatePairsOff,)))
            status = int(order[0].run())
        sys.stdout.flush()  # here, where it is noticed that nobody reads any more
        return status

    return ended(command, lambda: getattr(order[0], "goes_on", False) if order else _would_go_on(given))


def _would_go_on(given: list[str]) -> bool:
    """Whether a command goes on where it was, as far as words say that nobody has read yet."""
    if given[:1] != ["train"]:
        return given[:1] in (["resume"], ["evaluate"], ["bench"])
    named = dict(pairwise(word for text in given for word in text.split("=", 1)))
    return named.get("--resume") == "auto" and "--out" in named and has_checkpoint(Path(named["--out"]).expanduser())
