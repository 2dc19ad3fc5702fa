"""`deat train` and `deat resume`: their flags, and what they print."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from rich.table import Table
from tyro.conf import Positional, arg

from deat.cli.flag_types import (
    BetasFlag,
    ClassWeightsFlag,
    FloatFlag,
    IntFlag,
    LrScheduleChoice,
    NormChoice,
    OptimizerChoice,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    PenaltyChoice,
    StartChoice,
    ThreatRuleChoice,
    WatchChoice,
)
from deat.cli.training_progress import PhaseTimer, TrainingProgress
from deat.data import DataSplits, LazyImages
from deat.data.image_label_checks import noun_of_shape
from deat.errors import CheckpointError, UsageError
from deat.integrations.loggers import RunLog, get_loggers
from deat.integrations.loggers.logging_callback import get_recorded_loggers, read_log_options
from deat.runs.final_scores import ModelScore, RunScorer, ScoreOptions, read_score_options, write_scores
from deat.runs.folder_training import FolderOptions, FolderTraining, ResumePolicy
from deat.runs.initial_scores import InitialScores, score_initial_weights
from deat.runs.record_files import RUN_FILE, SUMMARY_FILE, RunRecord, read_record
from deat.runs.resolve_request import Request, Run, resolve_request
from deat.runs.run_cost import estimate_run_cost
from deat.runs.run_dir import (
    LOGS_FOLDER,
    RunFolder,
    back_up_run,
    check_no_links,
    check_output_folder,
    create_folder,
    create_unique_folder,
    has_checkpoint,
    is_empty_run_folder,
    is_run_folder,
    unwritable_error,
)
from deat.runs.run_report import list_gradient_masking_warnings, write_summary
from deat.runs.trained_run import has_weights_to_resume, load_run_to_resume
from deat.tasks import CLASSIFICATION, Task
from deat.threat import format_threat
from deat.training.callbacks import CallbackLike
from deat.training.config import TrainConfig
from deat.training.messages import collect_start_notes, describe_resume_position, format_command
from deat.training.progress_lines import EpochPrinter, format_epoch
from deat.training.train_result import TrainResult
from deat.training.trainer import Trainer
from deat.training.training_cost import CostEstimate
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.console import PlainConsole, is_stdout_terminal, print_stderr
from deat.utils.distributed import Distributed
from deat.utils.numbers import check_int
from deat.utils.text import format_duration_range, ignore_message, make_printable
from deat.utils.user_paths import expand_path


@dataclass(frozen=True)
class TrainingDisplay:
    """What shows the training, if anything."""

    line: TrainingProgress | None
    callbacks: list[CallbackLike]

    def following(self, trainer: Trainer) -> list[CallbackLike]:
        """The callbacks, for this trainer."""
        if self.line:
            self.line.show_trainer(trainer)
        return self.callbacks


def describe_run(run: Run, trainer: Trainer) -> str:
    """Describe a run in a few lines: the method, the network, the images and the initial weights."""
    method, data, model = map(make_printable, (run.method.name, run.splits.name, run.model_name))
    engine = trainer.engine
    return (
        f"{method} on {data}: {model} ({trainer.num_parameters:,} parameters), {format_threat(run.threat, with_rule=True)}, "
        f"{run.config.epochs} epochs, {engine.precision} on {engine.device}\n"
        f"{_describe_method(run)}{_describe_images(run)}{_describe_init(run)}"
    )


def _describe_method(run: Run) -> str:
    """The summary of the method as a line; empty without one."""
    return make_printable(f"{run.method.name}: {run.method.summary}") + "\n" if run.method.summary else ""


def _describe_init(run: Run) -> str:
    """The initial weights and the learning rate of fine-tuning; empty without initial weights."""
    if not run.start:
        return ""
    lr = run.config.lr or run.default_lr
    return (
        f"\nstarting from {make_printable(run.start)} with a learning rate of {lr:g}, where training from random weights takes "
        f"{run.default_lr:g}; --lr sets another"
    )


def _describe_images(run: Run) -> str:
    """The images, their normalisation and their augmentation."""
    train = run.splits.train
    shape, noun = "x".join(map(str, train.shape)), noun_of_shape(train.shape)
    normalised = f"normalised by {run.statistics.describe(noun)}" if run.statistics else "not normalised"
    done = [normalised, *_describe_augmentation(run)]
    held_out = f", {run.held_out:,} of them held out" if run.held_out else ""
    held_out += f", {len(run.dataset_val):,} others to choose the best epoch" if run.dataset_val else ""
    return f"{len(train):,} {noun} of {shape} in {_describe_task(run)}{held_out}; {', '.join(done)}"


def _describe_task(run: Run) -> str:
    """The number of classes or other outputs, and the task if it is not classification."""
    count, noun = run.splits.train.num_classes, run.task.outputs_noun
    counted = f"{count} {noun if count != 1 else noun.removesuffix('s')}"
    return counted if run.task == CLASSIFICATION else f"{counted}, task {run.task}"


def _describe_augmentation(run: Run) -> list[str]:
    """What training changes in images at random."""
    augment = run.augment
    if augment and isinstance(run.splits.train, LazyImages):
        return ["randomly cropped", "mirrored half of the time"]
    shifted = [f"shifted by up to {augment.pad} pixels"] if augment and augment.pad else []
    return shifted + (["mirrored half of the time"] if augment and augment.flip else [])


def build_score_table(scores: list[ModelScore], task: Task = CLASSIFICATION, noun: str = "images") -> Table:
    """Accuracies, or the task's first metric, backprops and seconds, a row for each network."""
    table = Table(
        title=f"{task.metric_names[0]} on {scores[0].images:,} test {noun}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("")
    for name in (*scores[0].accuracy, "backprops", "seconds"):
        table.add_column(name, justify="right")
    for s in scores:
        table.add_row(s.name, *map(task.format_metric, s.accuracy.values()), f"{s.backprops:,}", f"{s.seconds:.1f}")
    return table


def print_plan(estimate: CostEstimate, as_json: bool, distributed: Distributed) -> int:
    """Print a plan, as the first of several processes."""
    if not distributed.is_main:
        return 0
    if as_json:
        print(json.dumps(asdict(estimate)))
        return 0
    few, many = estimate.backprops
    parts = ", ".join(f"{name} {format_duration_range(seconds)}" for name, seconds in estimate.parts.items())
    print(f"backprops  {few:,}" + ("" if few == many else f" to {many:,}, depending on what training shows"))
    print(f"time       {format_duration_range(estimate.seconds)}: {parts}")
    print(
        f"           {estimate.seconds_per_backprop * 1000:.1f} ms a backprop; the start of the program is not included"
    )
    print(f"memory     {estimate.memory / 2**30:.2f} GiB at the peak")
    print("a dry run: no run was created")
    return 0


@dataclass(frozen=True)
class TrainOptions:
    """The flags that do not change the training: its folder, its scores and its output."""

    out: str | None = None
    overwrite: bool = False
    resume: str = "no"
    inexact: bool = False
    test_images: int = 1000
    baseline: str = "auto"
    log: str | None = None
    log_every: int = 0
    log_checkpoints: bool = False
    dry_run: bool = False
    json: bool = False

    @property
    def place(self) -> Path | None:
        """The folder of --out, if it was given."""
        return None if self.out is None else expand_path(self.out)

    @property
    def scoring(self) -> ScoreOptions:
        """What is scored after training."""
        return ScoreOptions(self.test_images, self.baseline)


class TrainSession:
    """One `deat train` or `deat resume` from its first line to its table.

    Of several processes that share a run, the main one alone prints.
    """

    def __init__(self, run: Run, options: TrainOptions, trainer: Trainer, resume: ResumePolicy) -> None:
        self.run, self.options, self.trainer, self.distributed = run, options, trainer, trainer.distributed
        self.console = PlainConsole(
            quiet=options.json or not self.distributed.is_main, soft_wrap=not is_stdout_terminal()
        )
        self.notify = print_stderr if self.distributed.is_main else ignore_message
        if not self.distributed.is_main:
            warnings.simplefilter("ignore")
        self.phase_timer = PhaseTimer()
        self.initial: InitialScores | None = None
        self.scorer = RunScorer(run, trainer, options.scoring)
        folder_options = FolderOptions(
            create_folder=lambda: _create_run_folder(run, options, resume),
            resume=resume,
            inexact=options.inexact,
            recorded_options=asdict(options.scoring),
            resume_hint=lambda path: f"saved in {path}. Resume with: {self._format_command('resume')}",
            notify=self.notify,
        )
        self.training = FolderTraining(lambda: trainer, folder_options, run)
        self.loggers = [] if options.log is None else get_loggers(options.log)
        self.run_log: RunLog | None = None

    @property
    def out(self) -> Path:
        """The run's folder."""
        return self.training.path

    def play(self) -> int:
        """Train, score, write the results and print them. A signal ends it so that it can be resumed."""
        with self.training.session():
            if self.trainer.was_loaded_finished:
                scores = self.scorer.read_finished_scores(self.out)
                if scores is not None:
                    return self._show_finished_run(scores)
                self.console.print(f"the training in {self.out} is finished; it is scored now")
            elif self.training.resumed:
                self.console.print(f"resuming {self.out} at {describe_resume_position(self.trainer)}")
            self.scorer.check_baseline_weights(self.out)
            self._print_description()
            self.phase_timer = PhaseTimer()
            if self.run.start:
                self._score_initial_weights()
            with self._logging() as self.run_log:
                with self._display() as display:
                    result = self._fit(display)
                    if self.scorer.wants_baseline:
                        self._train_baseline(display)
                if self.run_log and self.scorer.scores:
                    self.run_log.log_table("scores", *_list_score_rows(self.scorer.scores))
            if self.distributed.is_main:
                self._write_results(result)
                self.console.print(self.phase_timer.summary())
                self._print_results(result)
        return 0

    def _show_finished_run(self, scores: list[ModelScore]) -> int:
        """Show the results of a finished run."""
        result, self.scorer.scores = self.trainer.fit(), scores
        if self.distributed.is_main:
            last = format_epoch(result.history[-1], self.trainer.config.epochs, self.trainer.task)
            self.console.print(f"{self.out} is finished, with nothing left to train. Its last epoch:\n{last}")
            self._print_results(result)
        return 0

    def _score_initial_weights(self) -> None:
        """Score the weights of --init before they are trained, once an interruption can be resumed from."""
        with self.trainer.session():
            if self.trainer.checkpointer:
                self.trainer.checkpointer.on_train_begin(self.trainer)
            self.initial = score_initial_weights(self.run, self.trainer, self.options.test_images)
        self.phase_timer.add_phase("scores")
        if self.initial is not None:
            self.console.print(self.initial.describe())
            if self.initial.warning:
                self.notify(self.initial.warning)

    def _fit(self, display: TrainingDisplay) -> TrainResult:
        folder, watch = self.training.store, self.training.watch
        assert isinstance(folder, RunFolder)
        self.trainer.callbacks += [*display.following(self.trainer), *filter(None, [self.run_log])]
        before, watched = len(folder.timings), watch.seconds if watch else 0.0
        result = self.trainer.fit()
        timings = folder.timings[before:]
        seconds = {"training": sum(t.train_seconds for t in timings), "validation": sum(t.val_seconds for t in timings)}
        self.phase_timer.add_phase("saving", **seconds, **({"watch": watch.seconds - watched} if watch else {}))
        self.scorer.score_epochs(result, self.trainer.game.cost.backprops)
        self._time_scores()
        return result

    def _train_baseline(self, display: TrainingDisplay) -> None:
        trainer = self.run.baseline().trainer(distributed=self.distributed)
        trainer.set_interruption(self.trainer.interruption)
        trainer.callbacks += display.following(trainer)
        result = trainer.fit()
        self.phase_timer.add_phase("baseline")
        self.scorer.score("natural training", result, trainer.game.cost.backprops)
        self._time_scores()

    def _time_scores(self) -> None:
        if self.scorer.images is not None:
            self.phase_timer.add_phase("scores")

    def _write_results(self, result: TrainResult) -> None:
        """Write the scores and the report."""
        scores, evaluate_command = self.scorer.scores, anonymize_paths(self._format_command("evaluate"))
        watch_message = self.training.watch.summary() if self.training.watch else None
        try:
            write_scores(self.out, scores)
            write_summary(
                self.out / SUMMARY_FILE,
                self.training.record,
                scores,
                result.history,
                evaluate_command,
                watch_message,
                [*([self.initial.describe()] if self.initial else []), result.choice.reason, *result.notes],
            )
        except OSError as error:
            raise unwritable_error(self.out, error) from None

    def _print_description(self) -> None:
        self.console.print(describe_run(self.run, self.trainer) + self._describe_processes())
        if self.trainer.engine_note:
            self.console.print(self.trainer.engine_note)
        for line in collect_start_notes(self.trainer):
            self.notify(line)

    def _format_command(self, verb: str) -> str:
        return format_command(verb, self.out, vars(self.run.request), self.distributed)

    def _describe_processes(self) -> str:
        size = self.distributed.size
        return f"; in {size} processes that share batches of {self.run.config.batch_size}" if size > 1 else ""

    def _print_results(self, result: TrainResult) -> None:
        scores, watch = self.scorer.scores, self.training.watch
        if self.options.json:
            alarms = watch.alarms if watch else []
            parts: dict[str, list[Any]] = {"scores": scores, "watch": alarms, "history": result.history}
            rows_by_part = {name: [asdict(row) for row in rows] for name, rows in parts.items()}
            initial = asdict(self.initial) if self.initial else None
            about = {"init": initial, "best_epoch": result.choice.as_json(), "notes": list(result.notes)}
            print(json.dumps({"out": str(self.out), **rows_by_part, **about}))
            return
        if scores:
            self.console.print(build_score_table(scores, self.run.task, noun_of_shape(self.run.splits.train.shape)))
            for line in (
                []
                if self.run.task.is_graded
                else list_gradient_masking_warnings(scores, self._format_command("evaluate"))
            ):
                self.console.print(line, soft_wrap=True)  # a command to copy is on one line
        elif self.run.splits.test is None:
            self.console.print(
                make_printable(_explain_missing_scores(self.run, self._format_command("evaluate"))),
                soft_wrap=True,
            )
        if watch and watch.collapses:
            self.console.print(make_printable(f"the watch saw {watch.summary()}"))
        for line in (result.choice.reason, *result.notes):
            self.console.print(line)
        self.console.print(f"run folder: {self.out}; full report: report.md")

    @contextmanager
    def _logging(self) -> Iterator[RunLog | None]:
        """What writes into the loggers of --log; a resumed run without the flag has those that it was started with."""
        folder = self.out / LOGS_FOLDER
        loggers, every, checkpoints = self.loggers, self.options.log_every, self.options.log_checkpoints
        if self.options.log is None and self.training.resumed:
            recorded = read_log_options(folder)
            loggers, every = get_recorded_loggers(folder, self.notify), every or recorded[0]
            checkpoints = checkpoints or recorded[1]
        if not loggers or not self.distributed.is_main:
            yield None
            return
        options: dict[str, Any] = {"every": every, "checkpoints": checkpoints}
        options |= {"name": self.out.name, "config": self.training.record}
        with RunLog(loggers, folder, notify=self.notify, **options) as log:
            yield log

    @contextmanager
    def _display(self) -> Iterator[TrainingDisplay]:
        if self.options.json or not self.distributed.is_main:
            yield TrainingDisplay(None, [])
        elif is_stdout_terminal():
            with TrainingProgress(self.console) as line:
                yield TrainingDisplay(line, [line])
        else:
            yield TrainingDisplay(None, [EpochPrinter()])


def _list_score_rows(scores: list[ModelScore]) -> tuple[list[str], list[list[Any]]]:
    """The columns and the rows of the final table, for loggers."""
    attacks = list(scores[0].accuracy) if scores else []
    rows = [[s.name, *s.accuracy.values(), s.images, s.backprops, s.seconds] for s in scores]
    return ["model", *attacks, "images", "backprops", "seconds"], rows


def _create_run_folder(run: Run, options: TrainOptions, resume: ResumePolicy) -> Path:
    """Make the run's folder, which is never another run's; or name the one to resume in."""
    if options.place is None:
        return create_unique_folder(Path("runs"), f"{run.splits.name}-{run.method.name}")
    if resume is ResumePolicy.NEVER:
        if options.overwrite:
            back_up_run(options.place)
        create_folder(options.place)
    return options.place


def _explain_missing_scores(run: Run, evaluate_command: str) -> str:
    data, noun = run.splits.name, noun_of_shape(run.splits.train.shape)
    kind = data.partition(":")[0]
    folders = "its folders" if kind == "segmentation" else "class folders"
    return (
        f"nothing was scored: {data} has no test {noun}. Put {folders} into train/ and test/ (or val/) there, or score this "
        f"run on such a folder: {evaluate_command} --data {kind}:PATH"
    )


FlagGroup = TypeVar("FlagGroup", Request, TrainOptions)


@dataclass(frozen=True)
class TrainCommand:
    """Train a network robustly. Without flags: m+deat on digits, then a table with natural training for comparison."""

    data: str = "digits"
    """digits, cifar10, cifar100 (cifar10:PATH: in the folder PATH), PATH or folder:PATH (a folder or archive with one
    folder of images a class), audio:PATH (class folders of wav files), segmentation:PATH (images and masks) or
    csv:FILE."""
    target: OptionalStr = None
    """csv: the column to predict."""
    task: OptionalStr = None
    """What labels mean, where the data leaves it open: classification or regression for csv, segmentation:ignore_index=N
    for masks."""
    model: str = "auto"
    """A name from `deat list models`, timm:NAME, torchvision:NAME, hf:NAME or my_file.py:NAME; auto fits the images."""
    method: str = "m+deat"
    """A name from `deat list methods` (numbers may change; m+, auto+, f+, g+, awp+ compose) or my_file.py:NAME, also m+NAME."""
    epochs: OptionalInt = None
    """Passes over the training set (30)."""
    eps: OptionalFloat = None
    """The threat model's radius in [0, 1] pixels, such as 8/255; each data set has a default."""
    norm: NormChoice = None
    """The threat model's norm (linf)."""
    threat: OptionalStr = None
    """Norm and radius in one, in place of --norm and --eps, and several of them at once: linf:8/255+l2:0.5+l1:12."""
    threat_rule: ThreatRuleChoice = None
    """How a training step picks among several: worst (default), random, error or magnitude."""
    out: OptionalStr = None
    """The run's folder, which must not exist; by default a new one under runs/."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Literal["no", "auto"] = "no"
    """auto resumes the run in --out if there is one with the same settings; otherwise it starts one."""
    inexact: bool = False
    """With --resume: resume even if the numbers will differ from those of an uninterrupted run."""
    seed: IntFlag = 0
    """Seed of all random draws."""
    batch_size: OptionalInt = None
    """Images in a batch (128; digits 64)."""
    lr: OptionalFloat = None
    """The (peak) learning rate (sgd 0.1, on digits 0.05; nadam 0.002; others 0.001; with --init a tenth of that)."""
    lr_schedule: LrScheduleChoice = None
    """The learning rate's shape: cyclic (default), multistep, cosine or flat."""
    weight_decay: OptionalFloat = None
    """Weight decay (sgd 5e-4, adamw 0.01, others 0)."""
    optimizer: OptimizerChoice = None
    """Which optimizer trains the weights (sgd)."""
    momentum: OptionalFloat = None
    """Momentum of sgd (0.9) and rmsprop (0)."""
    betas: BetasFlag = None
    """Decay rates of the averages of adam, adamw and nadam (0.9,0.999)."""
    ema: OptionalFloat = None
    """Also average the weights over all updates with this decay, such as 0.999; the best epoch may be of either."""
    clip_grad_norm: OptionalFloat = None
    """The largest norm of the weights' gradient, such as 1; a longer one is shortened."""
    label_smoothing: FloatFlag = 0.0
    """The share of each label that is spread over all classes in the learner's loss, such as 0.1."""
    class_weights: ClassWeightsFlag = None
    """balanced, or a weight of each class: 1,1,2.5; in the learner's loss."""
    mixup: FloatFlag = 0.0
    """Blend pairs of images by shares from Beta(A, A), such as 0.2."""
    cutmix: FloatFlag = 0.0
    """Paste parts of images into others, of areas from Beta(A, A), such as 1."""
    random_erasing: FloatFlag = 0.0
    """The share of training images with an erased rectangle, such as 0.25."""
    init: OptionalStr = None
    """Weights to fine-tune: a .safetensors, .pt or .pth file, a run's folder, one of `deat export --shard-size`, or
    published ones: timm:NAME, torchvision:NAME or hf:NAME, from the package's cache or with --download."""
    rules: Literal["default", "literal", "released"] = "default"
    """literal: the paper's text; default: that, with longer steps and a largest k in M+; released: the authors' code,
    which made the paper's tables."""
    alpha: OptionalFloat = None
    """The adversary's step size, such as 10/255; each method has a default."""
    gamma: OptionalFloat = None
    """M+: how far l_X must outgrow its last threshold (1.01)."""
    max_steps: OptionalInt = None
    """M+: the largest k."""
    beta: OptionalFloat = None
    """TRADES and MART: the weight of the robust term (6). FGSM-PGI: that of the change of the outputs (10)."""
    tau: OptionalInt = None
    """FAT and F+: steps granted after an example is misclassified (3)."""
    g_weight: OptionalFloat = None
    """G+: the weight of the penalty on the gradient with respect to the input (0.1). GradAlign: that of its penalty (0.2)."""
    g_step: OptionalFloat = None
    """G+: the step of its finite difference, in units of eps (0.25; curvature 1)."""
    g_form: PenaltyChoice = None
    """G+: gradient (default), or curvature, which costs one backprop a batch more."""
    awp_gamma: OptionalFloat = None
    """AWP+: the length of the weights' perturbation, relative to the norm of each tensor (0.005)."""
    awp_warmup: OptionalInt = None
    """AWP+: epochs at the beginning without it (0)."""
    start: StartChoice = None
    """Where the perturbation starts."""
    persistent: bool = False
    """Carry the perturbation from batch to batch, as FREE originally does."""
    compact: bool = False
    """FAT and F+: shrink the batch instead of masking it."""
    n_train: OptionalInt = None
    """Use only so many of the training images, held-out ones included: a random part, the same for every seed, in which
    each class keeps its share."""
    held_out: OptionalInt = None
    """Training images held out to choose the best epoch (a tenth, at most 1000; 0 where val/ is beside test/)."""
    val_attack: OptionalStr = None
    """The attack on them: cw-20 (default), pgd-20, ..., or none."""
    watch: WatchChoice = None
    """On catastrophic overfitting: warn (default where images are held out), stop, roll back and step less, or none."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """The normalisation before the network: the data's mean and deviation (a folder's own are measured); auto takes a network
    of your own as it is."""
    augment: Literal["auto", "none"] = "auto"
    """Random crops and flips, where the data set has them; none trains on the images as they are."""
    test_images: IntFlag = 1000
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
    """cpu, cuda, cuda:1, ...; auto is the first GPU, or the CPU without one."""
    threads: OptionalInt = None
    """CPU threads; small networks use one by default."""
    deterministic: bool = False
    """On a GPU, the same bits every time, so that a resumed run is exact; slower. A CPU is so anyway."""
    workers: OptionalInt = None
    """Processes that decode images which do not fit in memory."""
    log: OptionalStr = None
    """Where to log: names from `deat list loggers` with commas, such as tensorboard,csv; files go to logs/ in --out."""
    log_every: IntFlag = 0
    """Also log the loss of every so many batches; 0 for none."""
    log_checkpoints: bool = False
    """Also store every checkpoint as an artefact, where the tool has them."""
    data_root: OptionalStr = None
    """The folder of data sets ($DEAT_DATA, or ~/.cache/deat)."""
    download: bool = False
    """Download the data set, and what timm:NAME, torchvision:NAME and hf:NAME need, if it is not on disk."""
    size: OptionalInt = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224); audio: samples
    of a recording (the median)."""
    dry_run: bool = False
    """Print the cost of the run in backprops, time and memory, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    @property
    def is_resumable(self) -> bool:
        """Whether the same command resumes: there is a run in --out, and --resume allows it."""
        return self.resume == "auto" and self.out is not None and has_checkpoint(expand_path(self.out))

    def run(self) -> int:
        """Train."""
        return run_training(self)


def run_training(args: TrainCommand) -> int:
    """Resolve, check, train, score, report."""
    request, options = _select_flags(Request, args), _select_flags(TrainOptions, args)
    distributed = Distributed.initialize(args.device)
    is_run_there = distributed.run_on_main(lambda: _check_options(options))
    settings: dict[str, Any] = {f.name: vars(args).get(f.name) for f in fields(TrainConfig)}
    request = replace(request, persistent=request.persistent or None, compact=request.compact or None)
    record = _try_read_record(options) if is_run_there else None
    with distributed.local_main_first():
        run = resolve_request(request, statistics=record.statistics if record else None, **settings)
    run = record.with_original_split(run) if record else run
    goes_on = is_run_there and distributed.run_on_main(
        lambda: has_weights_to_resume(options.place or Path(), request.init)
    )
    run = replace(run, goes_on=goes_on)
    trainer = run.trainer(distributed=distributed, notify=print_stderr)
    if options.dry_run:
        if distributed.is_main and not options.json:
            print(describe_run(run, trainer), flush=True)  # before it is tried out, which takes a while
        estimate = estimate_run_cost(run, trainer, options.place or Path("runs"), options.scoring)
        return print_plan(estimate, options.json, distributed)
    resume = ResumePolicy.IF_STARTED if is_run_there else ResumePolicy.NEVER
    return TrainSession(run, options, trainer, resume).play()


def _try_read_record(options: TrainOptions) -> RunRecord | None:
    """The record of the run to resume; None if it cannot be read, since the checkpoint has its settings too."""
    with suppress(CheckpointError):
        return read_record(options.place or Path())
    return None


def _check_options(options: TrainOptions) -> bool:
    """Refuse bad options before any data is read; returns whether --resume has a run in --out."""
    check_int("test_images", options.test_images, 0)
    check_int("log_every", options.log_every, 0)
    get_loggers(options.log or "")
    place = options.place
    if place is not None:
        _check_is_valid_path(place)
    if options.resume == "auto":
        if place is None or options.overwrite:
            raise UsageError("--resume auto needs the run's folder, --out, and goes without --overwrite.")
        check_no_links(place)
        if place.exists() and (is_run_folder(place) or is_empty_run_folder(place)):
            return True
    if place is not None:
        check_output_folder(place, options.overwrite)
    return False


def _check_is_valid_path(path: Path) -> None:
    """Refuse what no file system takes as a folder's name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = f"{str(path)[:80]!r}" + ("..." if len(str(path)) > 80 else "")
        raise UsageError(f"--out {shown} cannot be a folder: {reason}. Choose another.") from None


def _select_flags(group: type[FlagGroup], args: TrainCommand) -> FlagGroup:
    """The part of a command line that is of one kind."""
    flags = vars(args)
    return group(**{f.name: flags[f.name] for f in fields(group) if f.name in flags})


@dataclass(frozen=True)
class ResumeCommand:
    """Resume a run that was interrupted or killed. The result has the bytes of an uninterrupted run."""

    is_resumable: ClassVar[bool] = True

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN_FILE")]
    """The run's folder."""
    method: OptionalStr = None
    """The run's method, if it is code in a file: my_file.py:NAME."""
    model: OptionalStr = None
    """The run's model, if it is code in a file: my_file.py:NAME."""
    inexact: bool = False
    """Resume even if the numbers will differ from those of an uninterrupted run."""
    log: OptionalStr = None
    """Where to log; by default where the run was logged so far."""
    log_every: IntFlag = 0
    """Also log the loss of every so many batches; 0 for none."""
    log_checkpoints: bool = False
    """Also store every checkpoint as an artefact, where the tool has them."""
    data_root: OptionalStr = None
    """The folder of data sets ($DEAT_DATA, or ~/.cache/deat)."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Resume the run."""
        return run_resume(self)


def run_resume(args: ResumeCommand) -> int:
    """Resolve the recorded request again, and train on from the newest checkpoint."""
    folder = expand_path(args.run_folder)
    if not (folder / RUN_FILE).is_file():
        more = " The same call of deat.fit resumes from its checkpoints." * has_checkpoint(folder)
        raise CheckpointError(f"there is no run in {str(folder)!r}: give the folder that `deat train` made.{more}")
    check_no_links(folder)
    check_int("log_every", args.log_every, 0)
    get_loggers(args.log or "")
    record = read_record(folder)
    scoring = read_score_options(folder, record.options)
    distributed = Distributed.initialize(record.config.device)
    with distributed.local_main_first():
        run = load_run_to_resume(record, method=args.method, model=args.model, data_root=args.data_root)
    if distributed.is_main:
        print_recorded_data_root(run.splits)
    logging: dict[str, Any] = {name: getattr(args, name) for name in ("log", "log_every", "log_checkpoints")}
    options = TrainOptions(out=str(folder), inexact=args.inexact, json=args.json, **logging, **asdict(scoring))
    return TrainSession(run, options, run.trainer(distributed=distributed), ResumePolicy.REQUIRED).play()


def print_recorded_data_root(splits: DataSplits) -> None:
    """Name the folder that a data set was read from because the run's record names it."""
    if splits.fallback_root:
        print_stderr(f"{splits.name} is read from {str(splits.fallback_root)!r}, which the run's record names.")
