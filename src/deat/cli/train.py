"""`deat train`: resolve, check, and hand over to a session."""

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from rich.table import Table
from tyro.conf import Positional, arg

from deat.checkpoint.state import matches_type
from deat.cli.flags import (
    IntFlag,
    LrScheduleChoice,
    NormChoice,
    OptionalFloat,
    OptionalInt,
    OptionalStr,
    StartChoice,
    WatchChoice,
)
from deat.cli.training_progress import PhaseTimer, TrainingProgress
from deat.data import LazyImages, Source
from deat.data.sources import InterruptibleSource
from deat.data.statistics import ChannelStats
from deat.errors import CheckpointError, Interrupted, NumericalError, UsageError
from deat.evaluation.scoring import compute_accuracies
from deat.models.weights import find_weights_file
from deat.report.run_summary import ModelScore, list_gradient_masking_warnings, read_scores, write_summary
from deat.runs.request import Request, Run, ignore_message, resolve_request
from deat.runs.run_dir import (
    HISTORY_FILE,
    RUN_FILE,
    SCORES_FILE,
    SUMMARY_FILE,
    WATCH_FILE,
    RunFolder,
    back_up_run,
    check_no_links,
    check_output_folder,
    create_folder,
    create_unique_folder,
    has_checkpoint,
    is_empty_run_folder,
    is_run_folder,
    restore_backup,
    unwritable_error,
)
from deat.runs.schema import (
    DAMAGED_RECORD_HINT,
    RunRecord,
    check_init_weights,
    confirm_code,
    read_record,
    recorded_data_root,
    recorded_init_hash,
)
from deat.training.best_epoch import TrainResult
from deat.training.callbacks import Callback
from deat.training.config import TrainConfig
from deat.training.cost_estimate import CostEstimate, estimate_cost
from deat.training.epoch_format import EpochPrinter, format_epoch
from deat.training.messages import collect_start_notes, describe_resume_position, describe_stop_position, format_command
from deat.training.overfit_watch import OverfitWatch
from deat.training.trainer import Trainer
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.files import write_json
from deat.utils.locks import lock_run_folder
from deat.utils.numbers import check_int, format_duration, format_eps
from deat.utils.paths import anonymize_paths, restore_user_paths
from deat.utils.signals import Interruption
from deat.utils.terminal import PlainConsole, is_stdout_terminal, print_stderr
from deat.utils.text import make_printable


@dataclass(frozen=True)
class TrainingDisplay:
    """Whoever shows the training, if anyone."""

    line: TrainingProgress | None
    callbacks: list[Callback]

    def following(self, trainer: Trainer) -> list[Callback]:
        """The callbacks, turned to this trainer."""
        if self.line:
            self.line.show_trainer(trainer)
        return self.callbacks


def print_recorded_data_root(run: Run) -> None:
    """Name the folder that a data set was found in on the record's word."""
    if run.splits.fallback_root:
        print_stderr(f"{run.splits.name} is read from {str(run.splits.fallback_root)!r}, which the run's record names.")


def describe_run(run: Run, trainer: Trainer) -> str:
    """A run in two lines: what is trained how, and on which images; in a third, which weights it starts from."""
    method, data, model = map(make_printable, (run.method.name, run.splits.name, run.model_name))
    engine = trainer.engine
    return (
        f"{method} on {data}: {model} ({trainer.num_parameters:,} parameters), {run.threat.name} eps "
        f"{format_eps(run.threat.eps)}, {run.config.epochs} epochs, {engine.precision} on {engine.device}\n{_describe_images(run)}"
        f"{_describe_init(run)}"
    )


def _describe_init(run: Run) -> str:
    """The weights that are fine-tuned, where there are any, and the learning rate that this takes."""
    if not run.start:
        return ""
    lr = run.config.lr or run.default_lr
    return (
        f"\nstarting from {make_printable(run.start)} with a learning rate of {lr:g}, where training from nothing takes "
        f"{run.default_lr:g}; --lr sets another"
    )


def _describe_images(run: Run) -> str:
    """What the images are, and what is done to them on their way into the network."""
    shape = "x".join(map(str, run.splits.train.shape))
    normalised = f"normalised by {describe_normalization(run.statistics)}" if run.statistics else "not normalised"
    done = [normalised, *_describe_augmentation(run)]
    held = f", {run.held_out:,} of them held out" if run.held_out else ""
    held += f", {len(run.dataset_val):,} others to choose the best epoch" if run.dataset_val else ""
    train = run.splits.train
    return f"{len(train):,} images of {shape} in {train.num_classes} classes{held}; {', '.join(done)}"


def describe_normalization(statistics: ChannelStats) -> str:
    """What images are normalised by, and on how many that was measured."""
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (statistics.mean, statistics.std))
    measured = f", measured on {statistics.images:,} training images" if statistics.images else ""
    return f"mean {mean} and std {std}{measured}"


def _describe_augmentation(run: Run) -> list[str]:
    """What training changes in images at random."""
    augment = run.augment
    if augment and isinstance(run.splits.train, LazyImages):
        return ["randomly cropped", "mirrored half of the time"]
    shifted = [f"shifted by up to {augment.pad} pixels"] if augment and augment.pad else []
    return shifted + (["mirrored half of the time"] if augment and augment.flip else [])


def build_score_table(scores: list[ModelScore]) -> Table:
    """Accuracies, backprops and seconds, a row for each network."""
    table = Table(title=f"accuracy on {scores[0].images:,} test images", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (*scores[0].accuracy, "backprops", "seconds"):
        table.add_column(name, justify="right")
    for s in scores:
        table.add_row(s.name, *(f"{v:.1%}" for v in s.accuracy.values()), f"{s.backprops:,}", f"{s.seconds:.1f}")
    return table


def print_plan(estimate: CostEstimate, as_json: bool, distributed: Distributed) -> int:
    """Print a plan, as the first of several processes."""
    if not distributed.main:
        return 0
    if as_json:
        print(json.dumps(asdict(estimate)))
        return 0
    (few, many), (quick, slow) = estimate.backprops, estimate.seconds
    print(f"backprops  {few:,}" + ("" if few == many else f" to {many:,}, depending on what training shows"))
    print(f"time       {format_duration(quick)}" + ("" if few == many else f" to {format_duration(slow)}"), end="")
    print(f", at {estimate.seconds_per_backprop * 1000:.1f} ms a backprop, validation aside")
    print(f"memory     {estimate.memory / 2**30:.2f} GiB at the peak")
    print("a dry run: no run was created")
    return 0


SCORE_ATTACKS = ("natural", "fgsm", "pgd-20")
MISSING_BASELINE_WEIGHTS_HINT = (
    "put it back, or go on without that: the run's own `deat train` with --resume auto --baseline no"
)
"""What is said to those who go on with a run whose baseline lacks its weights."""


@dataclass(frozen=True)
class TrainOptions:
    """What a person said beside the run itself: where it goes and how it is shown."""

    out: str | None = None
    overwrite: bool = False
    resume: str = "no"
    inexact: bool = False
    test_images: int = 1000
    baseline: str = "auto"
    dry_run: bool = False
    json: bool = False

    @property
    def place(self) -> Path | None:
        """The folder that was asked for, if any."""
        return None if self.out is None else Path(self.out).expanduser()


class TrainSession:
    """One `deat train` or `deat resume` from its first line to its table.

    Of several processes that share a run, the first one speaks and writes.
    """

    def __init__(self, run: Run, options: TrainOptions, *, resuming: bool = False) -> None:
        self.run, self.options, self.resuming = run, options, resuming
        self.console = PlainConsole(quiet=options.json, soft_wrap=not is_stdout_terminal())
        self.distributed, self.notify = SINGLE_PROCESS, print_stderr
        self.interruption = Interruption()
        self.scores: list[ModelScore] = []
        self.phase_timer = PhaseTimer()
        self.watch: OverfitWatch | None = None
        self.images: Source | None = None
        self.out = options.place or Path()

    def play(self, trainer: Trainer) -> int:
        """Train, score, write everything down and show it; a signal ends it where it can go on."""
        self._set_distributed(trainer.distributed)
        images = self.run.test_images(self.options.test_images)
        if images is not None:
            images.check()  # a broken test set must not end the run after its last epoch
            self.images = InterruptibleSource(images, self.interruption)
        self.watch = self.run.watch(trainer, notify=self.notify)
        trainer.set_interruption(self.interruption)
        with self.interruption.catch_signals():
            record = {**self.run.record(trainer), "options": _recordable_options(self.options)}
            with ExitStack() as stack:
                self.out = Path(self.distributed.run_on_main(lambda: str(self._create_folder(stack))))
                return self._run_with_cleanup(trainer, record)

    def _set_distributed(self, distributed: Distributed) -> None:
        """Share the work with other processes, silently unless this is the first one."""
        self.distributed, self.interruption.distributed = distributed, distributed
        if not distributed.main:
            self.console.quiet, self.notify = True, ignore_message
            warnings.simplefilter("ignore")

    def _create_folder(self, stack: ExitStack) -> Path:
        """Make the run's folder, which is never another run's, and own it."""
        if not self.resuming and self.options.place is None:
            self.out = create_unique_folder(Path("runs"), f"{self.run.splits.name}-{self.run.method.name}")
        elif not self.resuming:
            if self.options.overwrite:
                back_up_run(self.out)
            create_folder(self.out)
        stack.enter_context(lock_run_folder(self.out, self.notify))
        return self.out

    def _run_with_cleanup(self, trainer: Trainer, record: dict[str, Any]) -> int:
        folder = RunFolder(
            self.out, extra_config=self.run.identity(trainer), code_files=self.run.code, notify=self.notify
        )
        try:
            return self._play(trainer, folder, record)
        except Interrupted as error:
            at = describe_stop_position(trainer)
            raise Interrupted(
                f"{error}{at}; saved in {self.out}. Go on with: {self._format_command('resume')}"
            ) from None
        except NumericalError as error:
            if self.distributed.main:
                folder.write_failure({"error": str(error), **error.details})
            self._restore_replaced_run(trainer)
            raise
        except Exception:
            self._restore_replaced_run(trainer)
            raise

    def _restore_replaced_run(self, trainer: Trainer) -> None:
        """Put the run back that was to be replaced by one that came to nothing."""
        if self.distributed.main and not trainer.history:
            restore_backup(self.out)

    def _play(self, trainer: Trainer, folder: RunFolder, record: dict[str, Any]) -> int:
        if self.watch:
            self.watch.log = self.out / WATCH_FILE if self.distributed.main else None
            trainer.callbacks.append(self.watch)
        folder.attach(trainer)
        if not (self.resuming and self._resume(trainer, folder, record)):
            self.distributed.run_on_main(lambda: folder.write_record(record))
        if trainer.is_finished:
            held = self.distributed.run_on_main(self._read_scores)
            if held is not None:
                return self._show_finished_run(trainer, held)
            self.console.print(f"the training in {self.out} is finished; its scores are not, and are made now")
        self._check_baseline_weights()
        self._print_description(trainer)
        self.phase_timer = PhaseTimer()
        with self._display() as display:
            result = self._fit(trainer, folder, display)
            if self._wants_baseline():
                self._train_baseline(display)
        if self.distributed.main:
            self._write_results(record, result)
        return 0

    def _check_baseline_weights(self) -> None:
        """Miss weights that the baseline is to start from, or find others there, before the training, not after it."""
        start = self.run.request.init
        try:
            if start and self.run.goes_on and self._wants_baseline():
                find_weights_file(Path(start))
                check_init_weights(self.out, start)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; the baseline starts from it too: {MISSING_BASELINE_WEIGHTS_HINT}"
            ) from None

    def _read_scores(self) -> list[dict[str, Any]] | None:
        """The scores of a run that came to its end, unless others are asked for now."""
        try:
            asked = json.loads((self.out / RUN_FILE).read_text(encoding="utf-8"))["options"]
            found = [asdict(score) for score in read_scores(self.out / SCORES_FILE)]
            whole = asked == _recordable_options(self.options) and (self.out / SUMMARY_FILE).is_file()
            return found if whole and bool(found) == (self.images is not None) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # scores that cannot be read are made again

    def _show_finished_run(self, trainer: Trainer, scores: list[dict[str, Any]]) -> int:
        """Show what a finished run found."""
        result, self.scores = trainer.fit(), [ModelScore(**score) for score in scores]
        if self.distributed.main:
            last = format_epoch(result.history[-1], trainer.config.epochs)
            self.console.print(f"{self.out} is finished, with nothing left to train. Its last epoch:\n{last}")
            self._print_results(result)
        return 0

    def _write_results(self, record: dict[str, Any], result: TrainResult) -> None:
        """Write the scores and the report, and show them."""
        try:
            write_json(self.out / SCORES_FILE, [asdict(score) for score in self.scores], make_folder=False)
            seen = self.watch.summary() if self.watch else None
            judging = anonymize_paths(self._format_command("evaluate"))
            write_summary(self.out / SUMMARY_FILE, record, self.scores, result.history, judging, seen, result.notes)
        except OSError as error:
            raise unwritable_error(self.out, error) from None
        self.console.print(self.phase_timer.summary())
        self._print_results(result)

    def _resume(self, trainer: Trainer, folder: RunFolder, record: dict[str, Any]) -> bool:
        """Go on from the run's newest checkpoint; False for a run that was killed before its first one."""
        if not folder.resume(trainer, inexact=self.options.inexact):
            if self.options.resume == "auto" and not (self.out / HISTORY_FILE).exists():
                return False
            raise CheckpointError(f"there is no checkpoint in {str(self.out)!r} to go on from; nothing was changed.")
        if trainer.is_finished:
            return True
        if self.options.inexact:
            begun = {**record, "digest_of_init": recorded_init_hash(self.out)}
            inexact = {**begun, "exact": False, "not_exact_because": ["resumed with --inexact"]}
            self.distributed.run_on_main(lambda: folder.write_record(inexact))
        self.console.print(f"going on with {self.out} at {describe_resume_position(trainer)}")
        return True

    def _fit(self, trainer: Trainer, folder: RunFolder, display: TrainingDisplay) -> TrainResult:
        trainer.callbacks += display.following(trainer)
        before, watched = len(folder.timings), self._watch_seconds()
        result, spent = trainer.fit(), trainer.game.cost.backprops
        mine = folder.timings[before:]
        seconds = {"training": sum(t.train_seconds for t in mine), "validation": sum(t.val_seconds for t in mine)}
        self.phase_timer.add_phase(
            "saving", **seconds, **({"watch": self._watch_seconds() - watched} if self.watch else {})
        )
        name, best, last = make_printable(self.run.method.name), result.best.epoch, result.history[-1].epoch
        self._score(f"{name}, last epoch" if best != last else name, result, spent)
        if best != last:
            last_weights = {key: value.detach().clone() for key, value in result.model.state_dict().items()}
            result.load_best()
            self._score(f"{name}, best epoch ({best + 1})", result, spent)
            result.model.load_state_dict(last_weights)
        return result

    def _watch_seconds(self) -> float:
        return self.watch.seconds if self.watch else 0.0

    def _train_baseline(self, display: TrainingDisplay) -> None:
        trainer = self.run.baseline().trainer(distributed=self.distributed)
        trainer.set_interruption(self.interruption)
        trainer.callbacks += display.following(trainer)
        result = trainer.fit()
        self.phase_timer.add_phase("baseline")
        self._score("natural training", result, trainer.game.cost.backprops)

    def _score(self, name: str, result: TrainResult, backprops: int) -> None:
        images = self.images
        if images is not None:
            asked = images, SCORE_ATTACKS, self.run.threat, self.run.config.seed
            with self.run.limit_threads(result.model):
                found = compute_accuracies(result.model, *asked, distributed=self.distributed)
            self.scores.append(ModelScore(name, found, images.num_examples, backprops, result.seconds))
            self.phase_timer.add_phase("scores")

    def _wants_baseline(self) -> bool:
        if self.options.baseline != "auto":
            return self.options.baseline == "yes"
        return self.run.splits.name == "digits" and self.run.method.name != "natural"

    def _print_description(self, trainer: Trainer) -> None:
        self.console.print(describe_run(self.run, trainer) + self._describe_processes())
        if trainer.engine_note:
            self.console.print(trainer.engine_note)
        for line in collect_start_notes(trainer):
            self.notify(line)

    def _format_command(self, verb: str) -> str:
        return format_command(verb, self.out, vars(self.run.request), self.distributed)

    def _describe_processes(self) -> str:
        size = self.distributed.size
        return f"; in {size} processes that share batches of {self.run.config.batch_size}" if size > 1 else ""

    def _print_results(self, result: TrainResult) -> None:
        if self.options.json:
            fired = self.watch.alarms if self.watch else []
            parts: dict[str, list[Any]] = {"scores": self.scores, "watch": fired, "history": result.history}
            found = {name: [asdict(row) for row in rows] for name, rows in parts.items()}
            print(json.dumps({"out": str(self.out), **found, "notes": list(result.notes)}))
            return
        if self.scores:
            self.console.print(build_score_table(self.scores))
            for line in list_gradient_masking_warnings(self.scores, self._format_command("evaluate")):
                self.console.print(line, soft_wrap=True)  # what is to be copied is on one line
        elif self.run.splits.test is None:
            self.console.print(
                make_printable(_explain_missing_scores(self.run.splits.name, self._format_command("evaluate"))),
                soft_wrap=True,
            )
        if self.watch and self.watch.collapses:
            self.console.print(make_printable(f"the watch saw {self.watch.summary()}"))
        for line in result.notes:
            self.console.print(line)
        self.console.print(f"everything is in {self.out}; report.md tells it whole")

    @contextmanager
    def _display(self) -> Iterator[TrainingDisplay]:
        if self.options.json or not self.distributed.main:
            yield TrainingDisplay(None, [])
        elif is_stdout_terminal():
            with TrainingProgress(self.console) as line:
                yield TrainingDisplay(line, [line])
        else:
            yield TrainingDisplay(None, [EpochPrinter()])


def _explain_missing_scores(data: str, evaluate_command: str) -> str:
    return (
        f"nothing was scored: {data} has no test images. Put class folders into train/ and test/ (or val/) there, or "
        f"score this run on such a folder: {evaluate_command} --data folder:PATH"
    )


def _recordable_options(options: TrainOptions) -> dict[str, Any]:
    """The options that a resumed run takes up again."""
    return {"test_images": options.test_images, "baseline": options.baseline}


FlagGroup = TypeVar("FlagGroup", Request, TrainOptions)


@dataclass(frozen=True)
class TrainCommand:
    """Train a classifier robustly. Without flags: m+deat on digits, and a table beside natural training."""

    data: str = "digits"
    """digits, cifar10, cifar100, or folder:PATH (a folder or archive with one folder of images a class)."""
    model: str = "auto"
    """A name from `deat list models`, timm:NAME, torchvision:NAME or my_file.py:NAME; auto fits the images."""
    method: str = "m+deat"
    """A name from `deat list methods` (numbers may change, m+ and f+ compose) or my_file.py:NAME, also m+NAME."""
    epochs: OptionalInt = None
    """How often the training set is seen (30)."""
    eps: OptionalFloat = None
    """The threat model's radius in [0, 1] pixels, such as 8/255; each data set has a default."""
    norm: NormChoice = None
    """The threat model's norm (linf)."""
    out: OptionalStr = None
    """The run's folder, which must not exist; by default a new one under runs/."""
    overwrite: bool = False
    """Replace the run that is in --out."""
    resume: Literal["no", "auto"] = "no"
    """auto goes on with the run that is in --out, if there is one of the same settings, and else starts it."""
    inexact: bool = False
    """--resume: go on even where the numbers will differ from an uninterrupted run's."""
    seed: IntFlag = 0
    """Where every random draw comes from."""
    batch_size: OptionalInt = None
    """Images in a batch (128; digits 64)."""
    lr: OptionalFloat = None
    """The (peak) learning rate (0.1; digits 0.05; with --init a tenth of that)."""
    lr_schedule: LrScheduleChoice = None
    """The learning rate's shape: cyclic (default), multistep, cosine or flat."""
    weight_decay: OptionalFloat = None
    """Weight decay (5e-4)."""
    momentum: OptionalFloat = None
    """SGD's momentum (0.9)."""
    init: OptionalStr = None
    """Weights to fine-tune: a safetensors file, a run's folder, or one that `deat export --shard-size` made."""
    rules: Literal["paper", "released"] = "paper"
    """The paper as written, or the code that made its tables."""
    alpha: OptionalFloat = None
    """The adversary's step size, such as 10/255; each method has a default."""
    gamma: OptionalFloat = None
    """M+: how far l_X must outgrow its last threshold (1.01)."""
    max_steps: OptionalInt = None
    """M+: the largest k."""
    beta: OptionalFloat = None
    """TRADES and MART: the weight of the robust term (6)."""
    tau: OptionalInt = None
    """FAT and F+: steps granted after an example is misclassified (3)."""
    start: StartChoice = None
    """Where the perturbation starts."""
    persistent: bool = False
    """Carry the perturbation from batch to batch, as FREE originally does."""
    compact: bool = False
    """FAT and F+: shrink the batch instead of masking it."""
    held_out: OptionalInt = None
    """Training images held out to choose the best epoch (a tenth, at most 1000; 0 where val/ is beside test/)."""
    val_attack: OptionalStr = None
    """The attack on them: cw-20 (default), pgd-20, ..., or none."""
    watch: WatchChoice = None
    """On catastrophic overfitting: warn (default where images are held out), stop, roll back and step less, or none."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network: the data's mean and deviation (a folder's own are measured); auto takes a network
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
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    threads: OptionalInt = None
    """CPU threads; small networks use one by default."""
    deterministic: bool = False
    """On a GPU, the same bits every time, so that a resumed run is exact; slower. A CPU is so anyway."""
    workers: OptionalInt = None
    """Processes that decode images which do not fit in memory."""
    data_root: OptionalStr = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    size: OptionalInt = None
    """folder: side to which images are resized and cropped (their own where all have the same, else 224)."""
    dry_run: bool = False
    """Say what the run would cost in backprops, time and memory, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    @property
    def is_resumable(self) -> bool:
        """True if the same command resumes a run: there is one in --out, and --resume auto is given."""
        return self.resume == "auto" and self.out is not None and has_checkpoint(Path(self.out).expanduser())

    def run(self) -> int:
        """Train."""
        return run_training(self)


def run_training(args: TrainCommand) -> int:
    """Resolve, check, train, score, report."""
    request, options = _select_flags(Request, args), _select_flags(TrainOptions, args)
    ranks = Distributed.join(args.device)
    going_on = ranks.run_on_main(lambda: _check_options(options))
    settings: dict[str, Any] = {f.name: vars(args).get(f.name) for f in fields(TrainConfig)}
    request = replace(request, persistent=request.persistent or None, compact=request.compact or None)
    found = _try_read_record(options) if going_on else None
    with ranks.local_main_first():
        run = resolve_request(request, statistics=found.statistics if found else None, **settings)
    run = found.with_original_split(run) if found else run
    goes_on = going_on and ranks.run_on_main(lambda: _has_resumable_weights(options.place or Path(), request))
    trainer = (run := replace(run, goes_on=goes_on)).trainer(distributed=ranks, notify=print_stderr)
    if options.dry_run:
        if ranks.main and not options.json:
            print(describe_run(run, trainer), flush=True)  # before it is tried out, which takes a while
        return print_plan(estimate_cost(trainer), options.json, ranks)
    return TrainSession(run, options, resuming=going_on).play(trainer)


def _try_read_record(options: TrainOptions) -> RunRecord | None:
    """The record of the run that goes on, where it can be read; its checkpoint holds what matters of it too."""
    with suppress(CheckpointError):
        return read_record(options.place or Path())
    return None


def _has_resumable_weights(folder: Path, request: Request) -> bool:
    """Whether the run in a folder has weights to go on with; other weights to start from are refused."""
    begun = has_checkpoint(folder)
    if begun:
        check_init_weights(folder, request.init)
    return begun


def _check_options(options: TrainOptions) -> bool:
    """Refuse what cannot be, before any data is read; whether the run that is in --out goes on."""
    check_int("test_images", options.test_images, 0)
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
    given = vars(args)
    return group(**{f.name: given[f.name] for f in fields(group) if f.name in given})


@dataclass(frozen=True)
class ResumeCommand:
    """Go on with a run that was interrupted or killed, to the bytes that an uninterrupted one would have given."""

    is_resumable: ClassVar[bool] = True

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN_FILE")]
    """The run's folder."""
    method: OptionalStr = None
    """The run's method again, where it came from a file: my_file.py:NAME."""
    model: OptionalStr = None
    """The run's model again, where it came from a file: my_file.py:NAME."""
    inexact: bool = False
    """Go on even where the numbers will differ from an uninterrupted run's."""
    data_root: OptionalStr = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Go on."""
        return run_resume(self)


def run_resume(args: ResumeCommand) -> int:
    """Resolve the recorded request again, and play on from the newest checkpoint."""
    folder = Path(args.run_folder).expanduser()
    if not (folder / RUN_FILE).is_file():
        more = " Checkpoints of deat.fit are gone on with by the same call of fit." * has_checkpoint(folder)
        raise CheckpointError(f"there is no run in {str(folder)!r}: give the folder that `deat train` made.{more}")
    check_no_links(folder)
    found = read_record(folder)
    request = replace(
        found.request,
        method=confirm_code("method", found.request.method, args.method),
        model=confirm_code("model", found.request.model, args.model),
        data=restore_user_paths(found.request.data),
        data_root=args.data_root or recorded_data_root(found.request),
        download=False,  # nothing is fetched on a file's word
        init=restore_user_paths(found.request.init) if found.request.init else None,
    )
    kept = _read_options(folder, found.options)
    ranks = Distributed.join(found.config.device)
    with ranks.local_main_first():
        run = resolve_request(
            request, is_recorded=not args.data_root, statistics=found.statistics, **asdict(found.config)
        )
    run = replace(found.with_original_split(run), goes_on=True)  # the checkpoint has the weights
    if ranks.main:
        print_recorded_data_root(run)
    options = TrainOptions(out=str(folder), inexact=args.inexact, json=args.json, **kept)
    return TrainSession(run, options, resuming=True).play(run.trainer(distributed=ranks))


def _read_options(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The options that a run goes on with, checked before any data is read."""
    hints = get_type_hints(TrainOptions)
    kept: dict[str, Any] = {name: recorded[name] for name in ("test_images", "baseline") if name in recorded}
    for name, value in kept.items():
        if not matches_type(value, hints[name]):
            raise CheckpointError(
                f"{str(folder / RUN_FILE)!r} is not a run's record (options.{name} is {value!r}). {DAMAGED_RECORD_HINT}"
            )
    return kept
