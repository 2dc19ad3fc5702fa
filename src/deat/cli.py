"""The command line: `deat train`, `deat evaluate`, `deat bench`, `deat report` and `deat list`."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg, subcommand
from tyro.constructors import PrimitiveConstructorSpec

from deat.commands.bench import run_bench
from deat.commands.evaluate import run_evaluation
from deat.commands.lists import list_things
from deat.commands.report import run_report
from deat.commands.train import run_training
from deat.errors import DeatError
from deat.threat import number


def _flag(metavar: str, parse: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    """A flag that is left out by default and whose text is read by `parse`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value)],
    )


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number, such as 30") from None


_QUIET = arg(help_behavior_hint="")
MaybeNumber = Annotated[float | None, _flag("NUMBER", number), _QUIET]
"""A number that may be written as a fraction, such as 8/255."""
MaybeWhole = Annotated[int | None, _flag("INT", _whole), _QUIET]
MaybeText = Annotated[str | None, _flag("TEXT", str), _QUIET]
Norm = Annotated[Literal["linf", "l2", "l1"] | None, arg(metavar="linf|l2|l1", help_behavior_hint="")]
Shape = Annotated[
    Literal["cyclic", "multistep", "cosine", "flat"] | None,
    arg(metavar="cyclic|multistep|cosine|flat", help_behavior_hint=""),
]
Watch = Annotated[
    Literal["none", "warn", "stop", "rollback"] | None,
    arg(metavar="none|warn|stop|rollback", help_behavior_hint=""),
]
Start = Annotated[
    Literal["zero", "uniform", "normal", "bernoulli", "jitter"] | None,
    arg(metavar="zero|uniform|normal|bernoulli|jitter", help_behavior_hint=""),
]


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
    seed: int = 0
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
    test_images: int = 1000
    """Test images scored at the end by natural, FGSM and PGD-20; 0 for none."""
    baseline: Literal["auto", "yes", "no"] = "auto"
    """Also train naturally, to compare; auto does so on digits only."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto is bf16 where the hardware is fast at it."""
    engine: Literal["auto", "eager", "graph"] = "auto"
    """How moves run: graph records them as CUDA graphs; auto does so on a GPU where it can."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    threads: MaybeWhole = None
    """CPU threads; small networks use one by default."""
    workers: MaybeWhole = None
    """Processes that decode images which do not fit in memory."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped."""
    dry_run: bool = False
    """Say what the run would cost in backprops, time and memory, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Train."""
        return run_training(vars(self))


@dataclass(frozen=True)
class Evaluate:
    """Judge a run or a weights file by attacks. Exits with 6 where the number should not be believed."""

    target: Positional[str]
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
    cascade: bool = False
    """Send only survivors on to the next attack; faster, but single attacks then have no accuracy."""
    seed: int = 0
    """Where every random draw comes from."""
    block: int = 500
    """Images attacked at once; verdicts depend on it, so it is recorded."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    out: MaybeText = None
    """The result's file (evaluation.json in the run's folder, or beside the weights)."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    size: MaybeWhole = None
    """folder: side to which images are resized and cropped."""
    json: bool = False
    """Print evaluation.json instead of a table."""

    def run(self) -> int:
        """Evaluate."""
        return run_evaluation(vars(self))


@dataclass(frozen=True)
class Bench:
    """Run a recipe's whole table: every method and seed, trained and judged. The same command goes on where it was."""

    recipe: Positional[str]
    """A name from `deat list recipes`."""
    methods: MaybeText = None
    """Other methods than the recipe's, with commas: names, or my_file.py:NAME."""
    seeds: MaybeText = None
    """Seeds, with commas: 0,1,2; each recipe has its own."""
    data: MaybeText = None
    """Another data set, as for train."""
    model: MaybeText = None
    """Other networks than the recipe's, with commas."""
    set: UseAppendAction[tuple[str, ...]] = ()
    """Any setting of the recipe, as key=value, such as epochs=5; may be given again and again."""
    budget_bp: MaybeWhole = None
    """Train each method for as many epochs as cannot spend more backprops than this."""
    jobs: int = 1
    """Runs at once, each with one thread; times are then marked."""
    parallel: Annotated[Literal["ray"] | None, arg(metavar="ray", help_behavior_hint="")] = None
    """ray: spread the runs over a Ray cluster ($RAY_ADDRESS, or this machine's cores and GPUs)."""
    out: MaybeText = None
    """The bench's folder (runs/bench-RECIPE)."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Run the table."""
        return run_bench(vars(self))


@dataclass(frozen=True)
class Report:
    """Compare runs: tables (Markdown, LaTeX, CSV), figures, and one page to look at without a network."""

    runs: Positional[tuple[str, ...]]
    """Run folders and bench folders; runs that differ in their seed alone make one row."""
    out: MaybeText = None
    """The report's folder (report/ in the only folder named, or beside the first of several)."""
    against: MaybeText = None
    """The row that others are tested against, image by image (the first)."""
    sweep: MaybeWhole = None
    """Also attack the first so many test images at radii from 0 to 3 eps, and draw the curves."""
    gallery: int = 6
    """Adversarial examples to show, against the most robust row that kept its weights; 0 for none."""
    no_figures: bool = False
    """Leave out the pictures, which need matplotlib; the page and the tables do not."""
    device: str = "auto"
    """Where networks run for --sweep and --gallery: cpu, cuda, ..."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    json: bool = False
    """Print the numbers as one JSON document."""

    def run(self) -> int:
        """Report."""
        return run_report(vars(self))


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
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Report, subcommand("report")]
    | Annotated[List, subcommand("list")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status says how it ended."""
    try:
        command = tyro.cli(Command, prog="deat", args=arguments, config=(FlagCreatePairsOff,))
        return int(command.run())
    except DeatError as error:
        print(f"deat: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("deat: interrupted; a run keeps the weights of its last finished epoch in its folder.", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        print("deat: this is a defect of deat's; the lines above say where.", file=sys.stderr)
        return DeatError.exit_code
