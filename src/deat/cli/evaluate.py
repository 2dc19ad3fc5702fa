"""`deat evaluate`: from a run's folder or a weights file to a table one can believe, or is told not to."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from tyro.conf import Positional, arg

from deat.cli.flags import IntFlag, NormChoice, OptionalFloat, OptionalInt, OptionalStr
from deat.cli.train import print_recorded_data_root
from deat.errors import CheckpointError, Interrupted, UsageError
from deat.evaluation.arguments import check_evaluation_arguments, check_replaceable
from deat.evaluation.attack_registry import get_attacks
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluator import DEFAULT_ATTACKS, DEFAULT_BLOCK_SIZE, evaluate
from deat.evaluation.judge import AttackLike
from deat.evaluation.progress import EvaluationProgress, ProgressCallback, ProgressPrinter, format_progress
from deat.evaluation.results import Evaluation, read_evaluation_json
from deat.evaluation.resume_log import lock_evaluation, resume_log_path
from deat.evaluation.sanity import SANITY_IMAGES, Flag
from deat.methods.configure import MAX_ALPHA, check_alpha
from deat.runs.load_run import TrainedRun, get_test_split, load_run_model, load_trained_run
from deat.runs.request import Run
from deat.runs.schema import EVALUATION_FILE, HISTORY_FILE, SUMMARY_FILE, EpochChoice, RunRecord
from deat.threat import ThreatModel
from deat.training.messages import format_command
from deat.utils.distributed import Distributed
from deat.utils.files import check_no_symlinks, write_atomic
from deat.utils.terminal import PlainConsole, is_all_output_terminal, is_stdout_terminal, print_stderr
from deat.utils.text import format_eps, format_seconds, make_printable

MAX_TABLE_CLASSES = 20
"""Classes above which the table by class stays in the file."""
FIRST_TO_FOOL_NOTE = (
    "first to fool counts images that are wrong without any attack; name natural first to count them apart"
)
"""What is said where the first attack is given images that it did not have to fool."""
FEW_CLASSES_NOTE = (
    "with fewer than four classes its targeted DLR loss is undefined and cross-entropy takes its place, "
    "so this is not the standard AutoAttack"
)
"""What is said of AutoAttack on two or three classes."""


def print_evaluation(evaluation: Evaluation, out: Path, printed_flags: Sequence[Flag] = ()) -> None:
    """Print what was judged, the tables, and what a reader must know to believe them; flags told above, by name."""
    console = PlainConsole(soft_wrap=not is_stdout_terminal())
    console.print(make_printable(_describe_target(evaluation)))
    console.print(_build_attack_table(evaluation))
    if len(evaluation.classes) <= MAX_TABLE_CLASSES:
        console.print(_build_class_table(evaluation))
    if evaluation.results[0].name != "natural":
        console.print(FIRST_TO_FOOL_NOTE)
    if evaluation.settings["sample"]:
        console.print(
            f"a sample of {len(evaluation.labels):,} images: not comparable with numbers on the whole test set"
        )
    for name, how in evaluation.settings["attacks"].items():
        if how.get("targeted_loss") == "ce" and "apgd-t" in how["parts"]:
            console.print(f"{name}: {FEW_CLASSES_NOTE}")
    for text in _describe_check_time(evaluation):
        console.print(text)
    for flag in evaluation.flags:
        console.print(f"FLAG {flag.name}, as said above" if flag in printed_flags else flag.line, style="bold red")
    console.print(f"every setting and verdict is in {out}")


def _describe_check_time(evaluation: Evaluation) -> list[str]:
    """How the time was split, where most of it did not go into attacks."""
    attacks = sum(r.seconds for r in evaluation.results)
    if evaluation.check_seconds <= attacks:
        return []
    images = len(evaluation.labels)
    seen = f"all {images} images" if images <= SANITY_IMAGES else f"{SANITY_IMAGES} images from all over the set"
    return [
        f"sanity checks took {format_seconds(evaluation.check_seconds)} s and the attacks {format_seconds(attacks)} s: the "
        f"checks look at {seen}, and at no more than {SANITY_IMAGES} however many are judged"
    ]


def _describe_target(evaluation: Evaluation) -> str:
    """Whose weights the numbers are about, and on which images."""
    about = evaluation.settings["about"]
    whose = f"the {about['epoch']} epoch's weights, " if about["epoch"] else ""
    return f"judged: {whose}{about['weights']}, on {len(evaluation.labels):,} test images of {about['data']}"


def _build_attack_table(evaluation: Evaluation) -> Table:
    settings = evaluation.settings
    norm, eps = (settings["threat"][name] for name in ("norm", "eps"))
    sample = f" (a sample of {settings['available']:,})" if settings["sample"] else ""
    title = f"{norm} eps {format_eps(eps)}, {len(evaluation.labels):,} images{sample}, seed {settings['seed']}"
    title += ", cascade: each attack saw survivors only" if settings["cascade"] else ""
    table = Table(
        "attack", "accuracy", "95 % interval", "first to fool", "seconds", title=title, box=None, pad_edge=False
    )
    for r in evaluation.results:
        shown = r.name in evaluation.accuracy
        share = (
            [f"{evaluation.accuracy[r.name]:.2%}", _format_interval(evaluation.intervals[r.name])]
            if shown
            else ["", ""]
        )
        table.add_row(r.name, *share, f"{evaluation.newly_fooled[r.name]:,}", f"{r.seconds:.1f}")
    table.add_row(
        "worst of all", f"{evaluation.worst:.2%}", _format_interval(evaluation.intervals["worst"]), "", "", style="bold"
    )
    return table


def _build_class_table(evaluation: Evaluation) -> Table:
    table = Table("class", "worst of all", "95 % interval", "images", box=None, pad_edge=False)
    for name, (hits, images, pair) in evaluation.per_class().items():
        table.add_row(
            Text(make_printable(name)), f"{hits / images:.1%}" if images else "", _format_interval(pair), f"{images:,}"
        )
    return table


def _format_interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1%} to {pair[1]:.1%}"


EvaluationDict = dict[str, Any]
"""An evaluation.json, or a part of one."""


def check_output_path(out: Path) -> None:
    """Refuse to replace anything but an earlier evaluation, and to write through a link."""
    check_no_symlinks([out])
    if not out.name or out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a folder; name a file, such as evaluation.json.")
    check_replaceable(out, "--out")


def save_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Write an evaluation, and keep another that is there by then."""
    try:
        back_up_other_evaluation(out, {"settings": evaluation.settings, "images": len(evaluation.labels)})
    except OSError as error:
        raise CheckpointError(f"cannot keep the {out.name} that is there: {error.strerror}.") from None
    evaluation.save(out)


def back_up_other_evaluation(out: Path, new_evaluation: EvaluationDict) -> None:
    """Keep an earlier evaluation that the new one does not answer anew, under the next free number."""
    held = read_evaluation_json(out) if out.exists() else None
    if held is None or _is_covered(old := _evaluation_request(held), new := _evaluation_request(new_evaluation)):
        return
    why = "answers another question" if old["model"] == new["model"] else "is about other weights"
    data = out.read_bytes()
    for number in count(1):
        copy = out.with_name(f"{out.stem}-{number}{out.suffix}")
        if not copy.exists():
            write_atomic(copy, data)
            print_stderr(f"{out.name} {why}; it is kept as {copy.name}.")
        if copy.read_bytes() == data:
            return


def _evaluation_request(evaluation: EvaluationDict) -> EvaluationDict:
    """What an evaluation was asked: of which weights, on which images and how many, by which attacks, and how.

    Weights are known by their hash, since a file of the same name may hold others.
    """
    settings = evaluation.get("settings", {})
    how = {name: settings.get(name) for name in ("model", "threat", "seed", "block", "cascade")}
    about = {name: settings.get("about", {}).get(name) for name in ("epoch", "data", "size", "normalize")}
    n = evaluation.get("images") if settings.get("sample") else None
    return {"attacks": settings.get("attacks", {}), "n": n, **how, **about}


def _is_covered(old: EvaluationDict, new: EvaluationDict) -> bool:
    """Whether the new question is the old one, by the same attacks or by more."""
    rest = [{name: value for name, value in asked.items() if name != "attacks"} for asked in (old, new)]
    return rest[0] == rest[1] and old["attacks"].items() <= new["attacks"].items()


EXIT_FLAGGED = 6
"""The exit status of an evaluation that finished but should not be believed."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Judge a run or a weights file by attacks. Exits with 6 where the number should not be believed."""

    is_resumable: ClassVar[bool] = True

    target: Annotated[Positional[str], arg(metavar="RUN_FILE")]
    """A run's folder, a .safetensors file, or a folder of them that `deat export --shard-size` made."""
    data: OptionalStr = None
    """The data set, as for train; a run knows its own. Its test part is judged."""
    model: OptionalStr = None
    """The network, as for train; a run knows its own, unless it came from a file."""
    attacks: str = ",".join(DEFAULT_ATTACKS)
    """Names from `deat list attacks`, with commas: pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square, aa, ..."""
    n: OptionalInt = None
    """The first images only; the number is then marked as a sample."""
    eps: OptionalFloat = None
    """Another radius than the run's or the data set's."""
    norm: NormChoice = None
    """Another norm."""
    alpha: OptionalFloat = None
    """The step of pgd and cw (a quarter of eps)."""
    epoch: EpochChoice = "best"
    """Which of a run's weights."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network of a weights file that says nothing of it, as for train; a run knows."""
    cascade: bool = False
    """Send only survivors on to the next attack; faster, but single attacks then have no accuracy."""
    seed: IntFlag = 0
    """Where every random draw comes from."""
    block: IntFlag = DEFAULT_BLOCK_SIZE
    """Images attacked at once; verdicts depend on it, so it is recorded."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """What attacks compute in: auto is fp16 on a GPU and fp32 elsewhere. Verdicts are always settled in float32."""
    engine: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How attacks run on a GPU: graph records passes, compile compiles them too, eager neither; auto sees what pays."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    out: OptionalStr = None
    """The result's file (evaluation.json in the run's folder, or beside the weights)."""
    data_root: OptionalStr = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    size: OptionalInt = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    json: bool = False
    """Print evaluation.json instead of a table."""

    def run(self) -> int:
        """Evaluate."""
        return run_evaluation(self)


def run_evaluation(args: EvaluateCommand) -> int:
    """Evaluate, write evaluation.json and show the table; 6 where a sanity flag was raised."""
    named = get_attacks(args.attacks)
    check_evaluation_arguments(named, args.n, args.block, args.seed)
    ranks = Distributed.initialize(args.device)
    with ranks.local_main_first():
        trained = _load_target(args)
    run, record, target = trained.run, trained.record, Path(args.target).expanduser()
    chosen = [_with_step_size(how, args.alpha, run.threat) for how in named]
    out = Path(args.out).expanduser() if args.out is not None else _default_output_path(target)
    ranks.run_on_main(lambda: check_output_path(out))
    model = load_run_model(run, trained.weights)
    if ranks.is_main:
        print_recorded_data_root(run.splits)
        if record:
            _warn_if_unfinished(target, record)
            _warn_if_classes_differ(record, run)
        _print_assumed_normalization(trained)
    about = run.about(trained.weights, args.epoch if record else None)
    told: list[Flag] = []
    with ExitStack() as stack:
        ranks.run_on_main(lambda: stack.enter_context(lock_evaluation(out)))
        try:
            found = _evaluate(args, run, model, chosen, out, about, ranks, told)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; what was judged is kept beside {out}; the same command goes on") from None
    if ranks.is_main:
        print(json.dumps(found.as_json())) if args.json else print_evaluation(
            found, out, told if is_all_output_terminal() else ()
        )
    return EXIT_FLAGGED if found.flags else 0


def _evaluate(
    args: EvaluateCommand,
    run: Run,
    model: nn.Module,
    attacks: list[AttackLike],
    out: Path,
    about: dict[str, Any],
    distributed: Distributed,
    printed_flags: list[Flag],
) -> Evaluation:
    """The evaluation that was ordered, with a line that says how far it is, and flags that are told at once."""

    def tell(flag: Flag) -> None:
        """Say a flag before the first attack."""
        printed_flags.append(flag)
        print_stderr(flag.line)

    with _show_progress(args.json or not distributed.is_main) as progress:
        return evaluate(
            model,
            get_test_split(run),
            threat=run.threat,
            attacks=attacks,
            n=args.n,
            seed=args.seed,
            block=args.block,
            cascade=args.cascade,
            precision=args.precision,
            engine=args.engine,
            threads=run.config.threads,
            resume_log=resume_log_path(out),
            save=lambda found: save_evaluation(found, out),
            about=about,
            progress=progress,
            on_flag=tell,
            distributed=distributed,
        )


def _load_target(args: EvaluateCommand) -> TrainedRun:
    """The run, or the file of weights, that the command names, with what its flags replace."""
    return load_trained_run(
        Path(args.target).expanduser(),
        epoch=args.epoch,
        model=args.model,
        data=args.data,
        norm=args.norm,
        eps=args.eps,
        normalize=None if args.normalize == "auto" else args.normalize,
        size=args.size,
        data_root=args.data_root,
        device=args.device,
    )


def _warn_if_unfinished(target: Path, record: RunRecord) -> None:
    """A run that was cut short is judged like any other, but never taken for a finished one."""
    if not (target / SUMMARY_FILE).is_file():
        done = (target / HISTORY_FILE).read_bytes().count(b"\n") if (target / HISTORY_FILE).is_file() else 0
        going_on = format_command("resume", target, vars(record.request))
        print_stderr(
            f"this run is not finished: it is at {done} of {record.config.epochs} epochs. Go on with: {going_on}"
        )


def _warn_if_classes_differ(record: RunRecord, run: Run) -> None:
    """Labels are numbers, so classes of other names are matched by their order, which may not be meant."""
    pairs = zip(record.classes, map(str, run.splits.train.classes), strict=False)
    other = [f"{make_printable(seen)!r} for {make_printable(mine)!r}" for mine, seen in pairs if mine != seen]
    if other:
        shown = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
        print_stderr(f"this data names other classes than the run's, matched by their order: {shown}.")


def _print_assumed_normalization(trained: TrainedRun) -> None:
    """A bare file of weights says nothing of normalisation, so what is put before the network is said."""
    run = trained.run
    if run.statistics and not run.recorded and run.request.normalize == "auto":
        print_stderr(
            f"{trained.weights.name} says nothing of normalisation, so the data's goes before the network: "
            f"{run.statistics.describe()}. With --normalize none it is taken as it is."
        )


def _with_step_size(attacker: AttackLike, alpha: float | None, threat: ThreatModel) -> AttackLike:
    if alpha is not None and not 0 <= alpha <= MAX_ALPHA:
        raise UsageError(f"alpha must be a step size from 0 to {MAX_ALPHA:g}, such as 2/255, not {alpha!r}.")
    if alpha is not None:
        check_alpha(alpha, threat)
    if alpha is None or not isinstance(attacker, Attack) or attacker.start == "zero" or not threat.eps:
        return attacker  # from the image itself go natural, of no step, and FGSM, whose one step is eps
    return replace(attacker, alpha=alpha / threat.eps)


def _default_output_path(target: Path) -> Path:
    return target / EVALUATION_FILE if target.is_dir() else target.with_name(f"{target.stem}.evaluation.json")


@contextmanager
def _show_progress(quiet: bool) -> Iterator[ProgressCallback]:
    """A line that rich redraws from the clock, however long a ruling takes; in a pipe, lines on standard error."""
    if quiet or not is_stdout_terminal():
        yield (lambda pace: None) if quiet else ProgressPrinter()
        return
    known: deque[EvaluationProgress] = deque(maxlen=1)
    shown = Live(
        get_renderable=lambda: Text(format_progress(known[-1]) if known else ""),
        transient=True,
        refresh_per_second=4,
        redirect_stderr=is_all_output_terminal(),  # what goes into a file is left on its way
    )
    with shown:
        yield known.append
