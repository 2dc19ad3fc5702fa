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

from deat.checkpoint.state import fits
from deat.cli.console import LiveLine, Screen, Spent, is_terminal, say_aside
from deat.cli.flags import MaybeNumber, MaybeText, MaybeWhole, Norm, Shape, Start, Watch, Whole
from deat.data import LazyImages, Source
from deat.data.statistics import Statistics
from deat.errors import CheckpointError, Interrupted, NumericalError, UsageError
from deat.evaluation.scoring import accuracies
from deat.models.weights import locate
from deat.report.run_summary import Score, doubts, read_scores, write_summary
from deat.runs.request import Request, Run, resolve, say_nothing
from deat.runs.run_dir import (
    HISTORY,
    REPORT,
    RUN,
    SCORES,
    WATCH,
    RunFolder,
    check_free,
    check_links,
    claim,
    has_checkpoint,
    is_run,
    is_unborn,
    make_folder,
    put_aside,
    put_back,
    unwritable,
)
from deat.runs.schema import REPAIR, Record, check_start, confirmed, digest_of_start, read_record, recorded_root
from deat.training.best_epoch import Result
from deat.training.callbacks import Callback
from deat.training.config import Settings
from deat.training.epoch_lines import EpochLines, describe
from deat.training.messages import beforehand, command, goes_on_at, stopped_at
from deat.training.overfit_watch import OverfitWatch
from deat.training.planning import Plan, plan
from deat.training.trainer import Trainer
from deat.training.validation import Interruptible
from deat.utils.distributed import ALONE, Ranks
from deat.utils.files import write_json
from deat.utils.locks import owned
from deat.utils.numbers import check_whole, clock, level
from deat.utils.paths import at_home, tidy
from deat.utils.signals import Interruption
from deat.utils.text import plain


@dataclass(frozen=True)
class Display:
    """Whoever shows the training, if anyone."""

    line: LiveLine | None
    callbacks: list[Callback]

    def following(self, trainer: Trainer) -> list[Callback]:
        """The callbacks, turned to this trainer."""
        if self.line:
            self.line.follow(trainer)
        return self.callbacks


def say_if_lent(run: Run) -> None:
    """Name the folder that a data set was found in on the record's word."""
    if run.corpus.lent:
        say_aside(f"{run.corpus.name} is read from {str(run.corpus.lent)!r}, which the run's record names.")


def describe_run(run: Run, trainer: Trainer) -> str:
    """A run in two lines: what is trained how, and on which images; in a third, which weights it starts from."""
    method, data, model = map(plain, (run.method.name, run.corpus.name, run.model_name))
    engine = trainer.engine
    return (
        f"{method} on {data}: {model} ({trainer.num_parameters:,} parameters), {run.threat.name} eps "
        f"{level(run.threat.eps)}, {run.settings.epochs} epochs, {engine.precision} on {engine.device}\n{_images(run)}"
        f"{_beginning(run)}"
    )


def _beginning(run: Run) -> str:
    """The weights that are fine-tuned, where there are any, and the learning rate that this takes."""
    if not run.start:
        return ""
    lr = run.settings.lr or run.usual_lr
    return (
        f"\nstarting from {plain(run.start)} with a learning rate of {lr:g}, where training from nothing takes "
        f"{run.usual_lr:g}; --lr sets another"
    )


def _images(run: Run) -> str:
    """What the images are, and what is done to them on their way into the network."""
    shape = "x".join(map(str, run.corpus.train.shape))
    normalised = f"normalised by {in_words(run.statistics)}" if run.statistics else "not normalised"
    done = [normalised, *_changes(run)]
    held = f", {run.held_out:,} of them held out" if run.held_out else ""
    held += f", {len(run.own_val):,} others to choose the best epoch" if run.own_val else ""
    train = run.corpus.train
    return f"{len(train):,} images of {shape} in {train.num_classes} classes{held}; {', '.join(done)}"


def in_words(found: Statistics) -> str:
    """What images are normalised by, and on how many that was measured."""
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (found.mean, found.std))
    measured = f", measured on {found.images:,} training images" if found.images else ""
    return f"mean {mean} and std {std}{measured}"


def _changes(run: Run) -> list[str]:
    """What training changes in images at random."""
    augment = run.augment
    if augment and isinstance(run.corpus.train, LazyImages):
        return ["randomly cropped", "mirrored half of the time"]
    shifted = [f"shifted by up to {augment.pad} pixels"] if augment and augment.pad else []
    return shifted + (["mirrored half of the time"] if augment and augment.flip else [])


def score_table(scores: list[Score]) -> Table:
    """Accuracies, backprops and seconds, a row for each network."""
    table = Table(title=f"accuracy on {scores[0].images:,} test images", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (*scores[0].accuracy, "backprops", "seconds"):
        table.add_column(name, justify="right")
    for s in scores:
        table.add_row(s.name, *(f"{v:.1%}" for v in s.accuracy.values()), f"{s.backprops:,}", f"{s.seconds:.1f}")
    return table


def show_plan(found: Plan, as_json: bool, ranks: Ranks) -> int:
    """Print a plan, as the first of several processes."""
    if not ranks.main:
        return 0
    if as_json:
        print(json.dumps(asdict(found)))
        return 0
    (few, many), (quick, slow) = found.backprops, found.seconds
    print(f"backprops  {few:,}" + ("" if few == many else f" to {many:,}, depending on what training shows"))
    print(f"time       {clock(quick)}" + ("" if few == many else f" to {clock(slow)}"), end="")
    print(f", at {found.seconds_per_backprop * 1000:.1f} ms a backprop, validation aside")
    print(f"memory     {found.memory / 2**30:.2f} GiB at the peak")
    print("a dry run: no run was created")
    return 0


ATTACKS = ("natural", "fgsm", "pgd-20")
BASELESS = "put it back, or go on without that: the run's own `deat train` with --resume auto --baseline no"
"""What is said to those who go on with a run whose baseline lacks its weights."""


@dataclass(frozen=True)
class Options:
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


class Session:
    """One `deat train` or `deat resume` from its first line to its table.

    Of several processes that share a run, the first one speaks and writes.
    """

    def __init__(self, run: Run, options: Options, *, resuming: bool = False) -> None:
        self.run, self.options, self.resuming = run, options, resuming
        self.console = Screen(quiet=options.json, soft_wrap=not is_terminal())
        self.ranks, self.say = ALONE, say_aside
        self.interruption = Interruption()
        self.scores: list[Score] = []
        self.spent = Spent()
        self.watch: OverfitWatch | None = None
        self.images: Source | None = None
        self.out = options.place or Path()

    def play(self, trainer: Trainer) -> int:
        """Train, score, write everything down and show it; a signal ends it where it can go on."""
        self._join(trainer.ranks)
        images = self.run.test_images(self.options.test_images)
        if images is not None:
            images.check()  # a broken test set must not end the run after its last epoch
            self.images = Interruptible(images, self.interruption)
        self.watch = self.run.watch(trainer, say=self.say)
        trainer.obey(self.interruption)
        with self.interruption.listening():
            record = {**self.run.record(trainer), "options": _kept_options(self.options)}
            with ExitStack() as stack:
                self.out = Path(self.ranks.by_main(lambda: str(self._place(stack))))
                return self._guarded(trainer, record)

    def _join(self, ranks: Ranks) -> None:
        """Share the work with other processes, silently unless this is the first one."""
        self.ranks, self.interruption.ranks = ranks, ranks
        if not ranks.main:
            self.console.quiet, self.say = True, say_nothing
            warnings.simplefilter("ignore")

    def _place(self, stack: ExitStack) -> Path:
        """Make the run's folder, which is never another run's, and own it."""
        if not self.resuming and self.options.place is None:
            self.out = claim(Path("runs"), f"{self.run.corpus.name}-{self.run.method.name}")
        elif not self.resuming:
            if self.options.overwrite:
                put_aside(self.out)
            make_folder(self.out)
        stack.enter_context(owned(self.out, self.say))
        return self.out

    def _guarded(self, trainer: Trainer, record: dict[str, Any]) -> int:
        folder = RunFolder(self.out, extra=self.run.identity(trainer), files=self.run.code, say=self.say)
        try:
            return self._play(trainer, folder, record)
        except Interrupted as error:
            at = stopped_at(trainer)
            raise Interrupted(f"{error}{at}; saved in {self.out}. Go on with: {self._command('resume')}") from None
        except NumericalError as error:
            if self.ranks.main:
                folder.failed({"error": str(error), **error.facts})
            self._undo(trainer)
            raise
        except Exception:
            self._undo(trainer)
            raise

    def _undo(self, trainer: Trainer) -> None:
        """Put the run back that was to be replaced by one that came to nothing."""
        if self.ranks.main and not trainer.history:
            put_back(self.out)

    def _play(self, trainer: Trainer, folder: RunFolder, record: dict[str, Any]) -> int:
        if self.watch:
            self.watch.log = self.out / WATCH if self.ranks.main else None
            trainer.callbacks.append(self.watch)
        folder.attach(trainer)
        if not (self.resuming and self._resume(trainer, folder, record)):
            self.ranks.by_main(lambda: folder.write_record(record))
        if trainer.ended:
            held = self.ranks.by_main(self._held_scores)
            if held is not None:
                return self._tell(trainer, held)
            self.console.print(f"the training in {self.out} is finished; its scores are not, and are made now")
        self._check_baseline()
        self._say_what(trainer)
        self.spent = Spent()
        with self._display() as display:
            result = self._fit(trainer, folder, display)
            if self._wants_baseline():
                self._compare(display)
        if self.ranks.main:
            self._finish(record, result)
        return 0

    def _check_baseline(self) -> None:
        """Miss weights that the baseline is to start from, or find others there, before the training, not after it."""
        start = self.run.request.init
        try:
            if start and self.run.goes_on and self._wants_baseline():
                locate(Path(start))
                check_start(self.out, start)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the baseline starts from it too: {BASELESS}") from None

    def _held_scores(self) -> list[dict[str, Any]] | None:
        """The scores of a run that came to its end, unless others are asked for now."""
        try:
            asked = json.loads((self.out / RUN).read_text(encoding="utf-8"))["options"]
            found = [asdict(score) for score in read_scores(self.out / SCORES)]
            whole = asked == _kept_options(self.options) and (self.out / REPORT).is_file()
            return found if whole and bool(found) == (self.images is not None) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # scores that cannot be read are made again

    def _tell(self, trainer: Trainer, scores: list[dict[str, Any]]) -> int:
        """Show what a finished run found."""
        result, self.scores = trainer.fit(), [Score(**score) for score in scores]
        if self.ranks.main:
            last = describe(result.history[-1], trainer.settings.epochs)
            self.console.print(f"{self.out} is finished, with nothing left to train. Its last epoch:\n{last}")
            self._show(result)
        return 0

    def _finish(self, record: dict[str, Any], result: Result) -> None:
        """Write the scores and the report, and show them."""
        try:
            write_json(self.out / SCORES, [asdict(score) for score in self.scores], make_folder=False)
            seen = self.watch.summary() if self.watch else None
            judging = tidy(self._command("evaluate"))
            write_summary(self.out / REPORT, record, self.scores, result.history, judging, seen, result.notes)
        except OSError as error:
            raise unwritable(self.out, error) from None
        self.console.print(self.spent.line())
        self._show(result)

    def _resume(self, trainer: Trainer, folder: RunFolder, record: dict[str, Any]) -> bool:
        """Go on from the run's newest checkpoint; False for a run that was killed before its first one."""
        if not folder.resume(trainer, inexact=self.options.inexact):
            if self.options.resume == "auto" and not (self.out / HISTORY).exists():
                return False
            raise CheckpointError(f"there is no checkpoint in {str(self.out)!r} to go on from; nothing was changed.")
        if trainer.ended:
            return True
        if self.options.inexact:
            begun = {**record, "digest_of_init": digest_of_start(self.out)}
            inexact = {**begun, "exact": False, "not_exact_because": ["resumed with --inexact"]}
            self.ranks.by_main(lambda: folder.write_record(inexact))
        self.console.print(f"going on with {self.out} at {goes_on_at(trainer)}")
        return True

    def _fit(self, trainer: Trainer, folder: RunFolder, display: Display) -> Result:
        trainer.callbacks += display.following(trainer)
        before, watched = len(folder.timings), self._watched()
        result, spent = trainer.fit(), trainer.game.cost.backprops
        mine = folder.timings[before:]
        seconds = {"training": sum(t.train_seconds for t in mine), "validation": sum(t.val_seconds for t in mine)}
        self.spent.on("saving", **seconds, **({"watch": self._watched() - watched} if self.watch else {}))
        name, best, last = plain(self.run.method.name), result.best.epoch, result.history[-1].epoch
        self._score(f"{name}, last epoch" if best != last else name, result, spent)
        if best != last:
            last_weights = {key: value.detach().clone() for key, value in result.model.state_dict().items()}
            result.load_best()
            self._score(f"{name}, best epoch ({best + 1})", result, spent)
            result.model.load_state_dict(last_weights)
        return result

    def _watched(self) -> float:
        return self.watch.seconds if self.watch else 0.0

    def _compare(self, display: Display) -> None:
        trainer = self.run.baseline().trainer(ranks=self.ranks)
        trainer.obey(self.interruption)
        trainer.callbacks += display.following(trainer)
        result = trainer.fit()
        self.spent.on("baseline")
        self._score("natural training", result, trainer.game.cost.backprops)

    def _score(self, name: str, result: Result, backprops: int) -> None:
        images = self.images
        if images is not None:
            asked = images, ATTACKS, self.run.threat, self.run.settings.seed
            with self.run.threads_for(result.model):
                found = accuracies(result.model, *asked, ranks=self.ranks)
            self.scores.append(Score(name, found, images.num_examples, backprops, result.seconds))
            self.spent.on("scores")

    def _wants_baseline(self) -> bool:
        if self.options.baseline != "auto":
            return self.options.baseline == "yes"
        return self.run.corpus.name == "digits" and self.run.method.name != "natural"

    def _say_what(self, trainer: Trainer) -> None:
        self.console.print(describe_run(self.run, trainer) + self._company())
        if trainer.engine_news:
            self.console.print(trainer.engine_news)
        for line in beforehand(trainer):
            self.say(line)

    def _command(self, verb: str) -> str:
        return command(verb, self.out, vars(self.run.request), self.ranks)

    def _company(self) -> str:
        size = self.ranks.size
        return f"; in {size} processes that share batches of {self.run.settings.batch_size}" if size > 1 else ""

    def _show(self, result: Result) -> None:
        if self.options.json:
            fired = self.watch.fired if self.watch else []
            parts: dict[str, list[Any]] = {"scores": self.scores, "watch": fired, "history": result.history}
            found = {name: [asdict(row) for row in rows] for name, rows in parts.items()}
            print(json.dumps({"out": str(self.out), **found, "notes": list(result.notes)}))
            return
        if self.scores:
            self.console.print(score_table(self.scores))
            for line in doubts(self.scores, self._command("evaluate")):
                self.console.print(line, soft_wrap=True)  # what is to be copied is on one line
        elif self.run.corpus.test is None:
            self.console.print(plain(_unscored(self.run.corpus.name, self._command("evaluate"))), soft_wrap=True)
        if self.watch and self.watch.collapses:
            self.console.print(plain(f"the watch saw {self.watch.summary()}"))
        for line in result.notes:
            self.console.print(line)
        self.console.print(f"everything is in {self.out}; report.md tells it whole")

    @contextmanager
    def _display(self) -> Iterator[Display]:
        if self.options.json or not self.ranks.main:
            yield Display(None, [])
        elif is_terminal():
            with LiveLine(self.console) as line:
                yield Display(line, [line])
        else:
            yield Display(None, [EpochLines()])


def _unscored(data: str, judging: str) -> str:
    return (
        f"nothing was scored: {data} has no test images. Put class folders into train/ and test/ (or val/) there, or "
        f"score this run on such a folder: {judging} --data folder:PATH"
    )


def _kept_options(options: Options) -> dict[str, Any]:
    """The options that a resumed run takes up again."""
    return {"test_images": options.test_images, "baseline": options.baseline}


Kind = TypeVar("Kind", Request, Options)


@dataclass(frozen=True)
class TrainCommand:
    """Train a classifier robustly. Without flags: m+deat on digits, and a table beside natural training."""

    data: str = "digits"
    """digits, cifar10, cifar100, or folder:PATH (a folder or archive with one folder of images a class)."""
    model: str = "auto"
    """A name from `deat list models`, timm:NAME, torchvision:NAME or my_file.py:NAME; auto fits the images."""
    method: str = "m+deat"
    """A name from `deat list methods` (numbers may change, m+ and f+ compose) or my_file.py:NAME, also m+NAME."""
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
    """The (peak) learning rate (0.1; digits 0.05; with --init a tenth of that)."""
    rate: Shape = None
    """The learning rate's shape (cyclic)."""
    weight_decay: MaybeNumber = None
    """Weight decay (5e-4)."""
    momentum: MaybeNumber = None
    """SGD's momentum (0.9)."""
    init: MaybeText = None
    """Weights to fine-tune: a safetensors file, a run's folder, or one that `deat export --shard-size` made."""
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
    """Training images held out to choose the best epoch (a tenth, at most 1000; 0 where val/ is beside test/)."""
    val_attack: MaybeText = None
    """The attack on them: cw-20 (default), pgd-20, ..., or none."""
    watch: Watch = None
    """On catastrophic overfitting: warn (default where images are held out), stop, roll back and step less, or none."""
    normalize: Literal["auto", "data", "none"] = "auto"
    """What goes before the network: the data's mean and deviation (a folder's own are measured); auto takes a network
    of your own as it is."""
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
        return run_training(self)


def run_training(order: TrainCommand) -> int:
    """Resolve, check, train, score, report."""
    request, options = _pick(Request, order), _pick(Options, order)
    ranks = Ranks.join(order.device)
    going_on = ranks.by_main(lambda: _check_options(options))
    settings: dict[str, Any] = {f.name: vars(order).get(f.name) for f in fields(Settings)}
    request = replace(request, persistent=request.persistent or None, compact=request.compact or None)
    found = _recorded(options) if going_on else None
    with ranks.leader_first():
        run = resolve(request, statistics=found.statistics if found else None, **settings)
    run = found.as_begun(run) if found else run
    goes_on = going_on and ranks.by_main(lambda: _has_begun(options.place or Path(), request))
    trainer = (run := replace(run, goes_on=goes_on)).trainer(ranks=ranks, say=say_aside)
    if options.dry_run:
        if ranks.main and not options.json:
            print(describe_run(run, trainer), flush=True)  # before it is tried out, which takes a while
        return show_plan(plan(trainer), options.json, ranks)
    return Session(run, options, resuming=going_on).play(trainer)


def _recorded(options: Options) -> Record | None:
    """The record of the run that goes on, where it can be read; its checkpoint holds what matters of it too."""
    with suppress(CheckpointError):
        return read_record(options.place or Path())
    return None


def _has_begun(place: Path, request: Request) -> bool:
    """Whether the run in a folder has weights to go on with; other weights to start from are refused."""
    begun = has_checkpoint(place)
    if begun:
        check_start(place, request.init)
    return begun


def _check_options(options: Options) -> bool:
    """Refuse what cannot be, before any data is read; whether the run that is in --out goes on."""
    check_whole("test_images", options.test_images, 0)
    place = options.place
    if place is not None:
        _check_path(place)
    if options.resume == "auto":
        if place is None or options.overwrite:
            raise UsageError("--resume auto needs the run's folder, --out, and goes without --overwrite.")
        check_links(place)
        if place.exists() and (is_run(place) or is_unborn(place)):
            return True
    if place is not None:
        check_free(place, options.overwrite)
    return False


def _check_path(path: Path) -> None:
    """Refuse what no file system takes as a folder's name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = f"{str(path)[:80]!r}" + ("..." if len(str(path)) > 80 else "")
        raise UsageError(f"--out {shown} cannot be a folder: {reason}. Choose another.") from None


def _pick(kind: type[Kind], order: TrainCommand) -> Kind:
    """The part of a command line that is of one kind."""
    given = vars(order)
    return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})


@dataclass(frozen=True)
class ResumeCommand:
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
        return run_resume(self)


def run_resume(order: ResumeCommand) -> int:
    """Resolve the recorded request again, and play on from the newest checkpoint."""
    folder = Path(order.run_folder).expanduser()
    if not (folder / RUN).is_file():
        more = " Checkpoints of deat.fit are gone on with by the same call of fit." * has_checkpoint(folder)
        raise CheckpointError(f"there is no run in {str(folder)!r}: give the folder that `deat train` made.{more}")
    check_links(folder)
    found = read_record(folder)
    request = replace(
        found.request,
        method=confirmed("method", found.request.method, order.method),
        model=confirmed("model", found.request.model, order.model),
        data=at_home(found.request.data),
        data_root=order.data_root or recorded_root(found.request),
        download=False,  # nothing is fetched on a file's word
        init=at_home(found.request.init) if found.request.init else None,
    )
    kept = _recorded_options(folder, found.options)
    ranks = Ranks.join(found.settings.device)
    with ranks.leader_first():
        run = resolve(request, recorded=not order.data_root, statistics=found.statistics, **asdict(found.settings))
    run = replace(found.as_begun(run), goes_on=True)  # the checkpoint has the weights
    if ranks.main:
        say_if_lent(run)
    options = Options(out=str(folder), inexact=order.inexact, json=order.json, **kept)
    return Session(run, options, resuming=True).play(run.trainer(ranks=ranks))


def _recorded_options(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The options that a run goes on with, checked before any data is read."""
    hints = get_type_hints(Options)
    kept: dict[str, Any] = {name: recorded[name] for name in ("test_images", "baseline") if name in recorded}
    for name, value in kept.items():
        if not fits(value, hints[name]):
            raise CheckpointError(
                f"{str(folder / RUN)!r} is not a run's record (options.{name} is {value!r}). {REPAIR}"
            )
    return kept
