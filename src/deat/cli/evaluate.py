"""`deat evaluate`: attack a run's network or a weights file, and print a table of accuracies."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn
from tyro.conf import Positional, arg

from deat.cli.flag_types import IntFlag, NormChoice, OptionalFloat, OptionalInt, OptionalStr
from deat.cli.train import print_recorded_data_root
from deat.errors import Interrupted, UsageError
from deat.evaluation.attack_registry import get_attacks
from deat.evaluation.attack_verifier import AttackLike
from deat.evaluation.attacks import Attack
from deat.evaluation.evaluation_request import check_evaluation_arguments, check_replaceable
from deat.evaluation.evaluator import DEFAULT_ATTACKS, DEFAULT_BLOCK_SIZE, evaluate
from deat.evaluation.progress import EvaluationProgress, ProgressCallback, ProgressPrinter, format_progress
from deat.evaluation.results import Evaluation, keep_other_evaluation
from deat.evaluation.resume_log import lock_evaluation, resume_log_path
from deat.evaluation.sanity import SANITY_IMAGES, Flag
from deat.methods.change_settings import MAX_ALPHA, check_alpha
from deat.runs.record_files import (
    EVALUATION_FILE,
    HISTORY_FILE,
    SUMMARY_FILE,
    EpochChoice,
    RunRecord,
    describe_record_change,
)
from deat.runs.resolve_request import Run
from deat.runs.trained_run import TrainedRun, get_test_split, load_run_model, load_trained_run
from deat.threat import ThreatModel, format_threat
from deat.training.messages import format_command
from deat.utils.console import PlainConsole, is_all_output_terminal, is_stdout_terminal, print_stderr
from deat.utils.distributed import Distributed
from deat.utils.safe_write import check_no_symlinks
from deat.utils.text import format_seconds, make_printable
from deat.utils.user_paths import expand_path

MAX_TABLE_CLASSES = 20
"""With more classes than this, accuracies by class are only in the file."""
FIRST_TO_FOOL_NOTE = (
    "first to fool counts examples that are wrong without any attack; name natural first to count them apart"
)
"""The note for evaluations whose first attack is not `natural`."""
NO_WORST_CASE_NOTE = (
    "no worst case: it needs an attack of more than one step. Add pgd-20, or aa for the number to report"
)
"""The note for evaluations without an attack, or with FGSM alone."""
FEW_CLASSES_NOTE = (
    "with fewer than four classes its targeted DLR loss is undefined and cross-entropy takes its place, "
    "so this is not the standard AutoAttack"
)
"""The note for AutoAttack on two or three classes."""


def print_evaluation(evaluation: Evaluation, out: Path, printed_flags: Sequence[Flag] = ()) -> None:
    """Print the tables of an evaluation, with notes and flags.

    Args:
        evaluation: The evaluation.
        out: The file it is in.
        printed_flags: Flags that were printed before; only their names are printed.
    """
    console = PlainConsole(soft_wrap=not is_stdout_terminal())
    console.print(make_printable(_describe_target(evaluation)))
    console.print(_build_attack_table(evaluation))
    if evaluation.labels and len(evaluation.classes) <= MAX_TABLE_CLASSES:
        console.print(_build_class_table(evaluation))
    if evaluation.results[0].name != "natural" and not evaluation.task.is_graded:
        console.print(FIRST_TO_FOOL_NOTE)
    if evaluation.settings["sample"]:
        console.print(
            f"a sample of {evaluation.num_images:,} {evaluation.inputs_noun}: not comparable with numbers on the whole test set"
        )
    if not evaluation.has_worst_case:
        console.print(NO_WORST_CASE_NOTE)
    for name, attack in evaluation.settings["attacks"].items():
        if attack.get("targeted_loss") == "ce" and "apgd-t" in attack["parts"]:
            console.print(f"{name}: {FEW_CLASSES_NOTE}")
    for text in _describe_check_time(evaluation):
        console.print(text)
    for flag in evaluation.flags:
        console.print(f"FLAG {flag.name}, see above" if flag in printed_flags else flag.line, style="bold red")
    console.print(f"all settings and verdicts are in {out}")


def _describe_check_time(evaluation: Evaluation) -> list[str]:
    """Describe the time of the sanity checks, if they took longer than the attacks."""
    attacks = sum(r.seconds for r in evaluation.results)
    if evaluation.check_seconds <= attacks:
        return []
    n, noun = evaluation.num_images, evaluation.inputs_noun
    checked = f"all {n} {noun}" if n <= SANITY_IMAGES else f"{SANITY_IMAGES} evenly spaced {noun}"
    return [
        f"sanity checks took {format_seconds(evaluation.check_seconds)} s and the attacks {format_seconds(attacks)} s: the "
        f"checks use {checked}, and never more than {SANITY_IMAGES}"
    ]


def _describe_target(evaluation: Evaluation) -> str:
    """Describe which weights were evaluated, and on which images."""
    about = evaluation.settings["about"]
    epoch = about["epoch"]
    weights = "the averaged weights, " if epoch == "averaged" else f"the {epoch} epoch's weights, " if epoch else ""
    inputs = f"{evaluation.num_images:,} test {evaluation.inputs_noun}"
    return f"evaluated: {weights}{about['weights']}, on {inputs} of {about['data']}"


def _build_attack_table(evaluation: Evaluation) -> Table:
    settings = evaluation.settings
    sample = f" (a sample of {settings['available']:,})" if settings["sample"] else ""
    inputs = f"{evaluation.num_images:,} {evaluation.inputs_noun}{sample}"
    title = f"{format_threat(settings['threat'])}, {inputs}, seed {settings['seed']}"
    title += ", cascade: each attack saw survivors only" if settings["cascade"] else ""
    if evaluation.task.is_graded:
        return _build_metric_table(evaluation, title)
    columns = ("accuracy", "95 % interval", *_ball_columns(evaluation), "first to fool", "seconds")
    table = Table("attack", *columns, title=title, box=None, pad_edge=False)
    for r in evaluation.results:
        shown = r.name in evaluation.accuracy
        share = (
            [f"{evaluation.accuracy[r.name]:.2%}", _format_interval(evaluation.intervals[r.name])]
            if shown
            else ["", ""]
        )
        share += _ball_cells(evaluation, r.name, ".2%")
        table.add_row(r.name, *share, f"{evaluation.newly_fooled[r.name]:,}", f"{r.seconds:.1f}")
    if evaluation.has_worst_case:
        worst = [f"{evaluation.worst:.2%}", _format_interval(evaluation.intervals["worst"])]
        worst += _ball_cells(evaluation, "worst", ".2%")
        table.add_row("worst of all", *worst, "", "", style="bold")
    return table


def _ball_columns(evaluation: Evaluation) -> list[str]:
    """The columns of a union's balls; none for a single ball."""
    return [f"in {name}" for name in evaluation.balls]


def _ball_cells(evaluation: Evaluation, attack: str, format_spec: str) -> list[str]:
    """The accuracy, or first metric, in each ball of a union."""
    return [
        f"{ball.accuracy[attack]:{format_spec}}" if attack in ball.accuracy else ""
        for ball in evaluation.balls.values()
    ]


def _build_metric_table(evaluation: Evaluation, title: str) -> Table:
    """Every metric with its interval, for a graded task."""
    names, console_name = evaluation.task.metric_names, {"worst": "worst of all"}
    columns = [column for name in names for column in (name, "95 % interval")]
    table = Table("attack", *columns, *_ball_columns(evaluation), "seconds", title=title, box=None, pad_edge=False)
    seconds = {result.name: f"{result.seconds:.1f}" for result in evaluation.results}
    shown = {name: evaluation.metrics[name] for name in evaluation.accuracy}
    for attack, metrics in shown.items():
        cells = [
            cell
            for name in names
            for cell in (f"{metrics[name]:.4f}", "{:.3f} to {:.3f}".format(*evaluation.metric_intervals[attack][name]))
        ]
        style = "bold" if attack == "worst" else ""
        cells += _ball_cells(evaluation, attack, ".4f")
        table.add_row(console_name.get(attack, attack), *cells, seconds.get(attack, ""), style=style)
    return table


def _build_class_table(evaluation: Evaluation) -> Table:
    names = " and ".join(result.name for result in evaluation.results)
    what = "worst of all" if evaluation.has_worst_case else names
    table = Table("class", what, "95 % interval", evaluation.inputs_noun, box=None, pad_edge=False)
    for name, (hits, images, pair) in evaluation.per_class().items():
        table.add_row(
            Text(make_printable(name)), f"{hits / images:.1%}" if images else "", _format_interval(pair), f"{images:,}"
        )
    return table


def _format_interval(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.1%} to {pair[1]:.1%}"


def check_output_path(out: Path) -> None:
    """Check that a file may be written: it is new or an earlier evaluation, and no link.

    Args:
        out: The file.

    Raises:
        UsageError: It may not be written.
    """
    check_no_symlinks([out])
    if not out.name or out.is_dir():
        raise UsageError(f"--out {str(out)!r} is a folder; name a file, such as evaluation.json.")
    check_replaceable(out, "--out")


def save_evaluation(evaluation: Evaluation, out: Path) -> None:
    """Write an evaluation; a different one in the same file is copied first, and a line says so.

    Args:
        evaluation: The evaluation.
        out: The file.

    Raises:
        CheckpointError: A file cannot be written.
    """
    if copied := keep_other_evaluation(out, evaluation):
        print_stderr(copied)
    evaluation.save(out)


EXIT_FLAGGED = 6
"""The exit status of an evaluation that finished with a sanity flag."""


@dataclass(frozen=True)
class EvaluateCommand:
    """Evaluate a run or a weights file with attacks. Exits with 6 if a sanity flag is raised."""

    is_resumable: ClassVar[bool] = True

    target: Annotated[Positional[str], arg(metavar="RUN_FILE")]
    """A run's folder, a .safetensors file, or a folder of them that `deat export --shard-size` made."""
    data: OptionalStr = None
    """The data set, as for train; a run has its own. Its test split is used."""
    model: OptionalStr = None
    """The network, as for train; a run has its own, unless that is in a file."""
    attacks: str = ",".join(DEFAULT_ATTACKS)
    """Names from `deat list attacks`, separated by commas: pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square, aa, ..."""
    n: OptionalInt = None
    """Use only the first N images; the result is then marked as a sample."""
    eps: OptionalFloat = None
    """The radius, if not that of the run or the data set."""
    norm: NormChoice = None
    """The norm, if not that of the run or the data set."""
    threat: OptionalStr = None
    """Norm and radius in one, in place of --norm and --eps, and several of them at once: linf:8/255+l2:0.5+l1:12."""
    alpha: OptionalFloat = None
    """The step length of pgd and cw (a quarter of eps)."""
    epoch: EpochChoice = "best"
    """Which weights of a run."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """The normalisation layer of a network whose weights file records none, as for train."""
    cascade: bool = False
    """Run each attack only on images that resisted the earlier ones; faster, but attacks have no accuracy of their own."""
    seed: IntFlag = 0
    """The seed of all random draws."""
    block: IntFlag = DEFAULT_BLOCK_SIZE
    """The number of images attacked at once; results depend on it, so it is recorded."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """The precision of attacks: auto is fp16 on a GPU, bf16 on a CPU that is fast at it (classifiers with 200,000 weights
    or more) and fp32 elsewhere. Results are always verified in float32."""
    engine: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How attacks run on a GPU: graph records passes, compile also compiles them, eager neither; auto decides."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    out: OptionalStr = None
    """The output file (evaluation.json in the run's folder, or WEIGHTS.evaluation.json)."""
    data_root: OptionalStr = None
    """The folder of data sets ($DEAT_DATA, or ~/.cache/deat)."""
    size: OptionalInt = None
    """folder: the size to which images are resized and cropped (their own if all have the same, else 224)."""
    json: bool = False
    """Print the JSON of evaluation.json instead of a table."""

    def run(self) -> int:
        """Run the command and return its exit status."""
        return run_evaluation(self)


def run_evaluation(args: EvaluateCommand) -> int:
    """Evaluate, write evaluation.json and print the table.

    Args:
        args: The command's flags.

    Returns:
        The exit status: 6 if a sanity flag is raised, else 0.

    Raises:
        UsageError: A flag has no valid value.
        Interrupted: The evaluation was interrupted.
    """
    requested = get_attacks(args.attacks)
    check_evaluation_arguments(requested, args.n, args.block, args.seed)
    distributed = Distributed.initialize(args.device)
    with distributed.local_main_first():
        trained = _load_target(args)
    run, record, target = trained.run, trained.record, expand_path(args.target)
    attacks = [_with_step_size(attack, args.alpha, run.threat) for attack in requested]
    out = expand_path(args.out) if args.out is not None else _default_output_path(target)
    distributed.run_on_main(lambda: check_output_path(out))
    model = load_run_model(run, trained.weights)
    if distributed.is_main:
        print_recorded_data_root(run.splits)
        if record:
            _warn_if_unfinished(target, record)
            if changed := describe_record_change(target):
                print_stderr(changed)
            _warn_if_classes_differ(record, run)
        _print_assumed_normalization(trained)
    about = run.about(trained.weights, args.epoch if record else None)
    printed_flags: list[Flag] = []
    with ExitStack() as stack:
        distributed.run_on_main(lambda: stack.enter_context(lock_evaluation(out)))
        try:
            evaluation = _evaluate(args, run, model, attacks, out, about, distributed, printed_flags)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; finished images are saved next to {out}; the same command resumes"
            ) from None
    if distributed.is_main and args.json:
        print(json.dumps(evaluation.as_json()))
    elif distributed.is_main:
        print_evaluation(evaluation, out, printed_flags if is_all_output_terminal() else ())
    return EXIT_FLAGGED if evaluation.flags else 0


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
    """Evaluate, showing progress and printing flags as soon as they are raised."""

    def print_flag(flag: Flag) -> None:
        """Print a flag and remember it."""
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
            save=lambda evaluation: save_evaluation(evaluation, out),
            about=about,
            progress=progress,
            on_flag=print_flag,
            distributed=distributed,
        )


def _load_target(args: EvaluateCommand) -> TrainedRun:
    """Load the run or weights file, with the settings that flags replace."""
    return load_trained_run(
        expand_path(args.target),
        epoch=args.epoch,
        model=args.model,
        data=args.data,
        norm=args.norm,
        eps=args.eps,
        threat=args.threat,
        normalize=None if args.normalize == "auto" else args.normalize,
        size=args.size,
        data_root=args.data_root,
        device=args.device,
    )


def _warn_if_unfinished(target: Path, record: RunRecord) -> None:
    """Print a warning if the run is not finished."""
    if not (target / SUMMARY_FILE).is_file():
        num_epochs = (target / HISTORY_FILE).read_bytes().count(b"\n") if (target / HISTORY_FILE).is_file() else 0
        command = format_command("resume", target, vars(record.request))
        print_stderr(
            f"this run is not finished: it is at {num_epochs} of {record.config.epochs} epochs. Resume it with: {command}"
        )


def _warn_if_classes_differ(record: RunRecord, run: Run) -> None:
    """Print a warning if the data names other classes than the run; they are matched by their order."""
    pairs = zip(record.classes, map(str, run.splits.train.classes), strict=False)
    differences = [f"{make_printable(new)!r} for {make_printable(old)!r}" for old, new in pairs if old != new]
    if differences:
        first = ", ".join(differences[:3]) + (", ..." if len(differences) > 3 else "")
        print_stderr(f"this data names other classes than the run's, matched by their order: {first}.")


def _print_assumed_normalization(trained: TrainedRun) -> None:
    """Print the normalisation that is assumed for a weights file that records none."""
    run = trained.run
    if run.statistics and not run.recorded and run.request.normalize == "auto":
        print_stderr(
            f"{trained.weights.name} does not record its normalisation, so the data's is used: "
            f"{run.statistics.describe()}. Use --normalize none for a network without one."
        )


def _with_step_size(attack: AttackLike, alpha: float | None, threat: ThreatModel) -> AttackLike:
    if alpha is not None and not 0 <= alpha <= MAX_ALPHA:
        raise UsageError(f"alpha must be a step size from 0 to {MAX_ALPHA:g}, such as 2/255, not {alpha!r}.")
    if alpha is not None and len(threat.balls) > 1:
        raise UsageError(
            f"--alpha {alpha!r} is one length, and the balls of {threat.text} have radii of their own, of which each attack "
            "takes its share. Leave --alpha out."
        )
    if alpha is not None:
        check_alpha(alpha, threat)
    if alpha is None or not isinstance(attack, Attack) or attack.start == "zero" or not threat.eps:
        return attack  # natural has no step, and FGSM a single one of length eps
    return replace(attack, alpha=alpha / threat.eps)


def _default_output_path(target: Path) -> Path:
    return target / EVALUATION_FILE if target.is_dir() else target.with_name(f"{target.stem}.evaluation.json")


@contextmanager
def _show_progress(quiet: bool) -> Iterator[ProgressCallback]:
    """Show a progress line that is redrawn by time; in a pipe, print lines to standard error."""
    if quiet or not is_stdout_terminal():
        yield (lambda progress: None) if quiet else ProgressPrinter()
        return
    latest: deque[EvaluationProgress] = deque(maxlen=1)
    live = Live(
        get_renderable=lambda: Text(format_progress(latest[-1], with_bar=True) if latest else ""),
        transient=True,
        refresh_per_second=4,
        redirect_stderr=is_all_output_terminal(),  # stderr that goes to a file is not redirected
    )
    with live:
        yield latest.append
