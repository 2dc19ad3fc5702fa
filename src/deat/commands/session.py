"""One training from its first line to its table: played or taken up again, scored, written down and shown."""

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deat.checkpoint.lock import owned
from deat.commands.display import Display, describe_run, score_table
from deat.commands.spent import Spent
from deat.data import Source
from deat.errors import CheckpointError, Interrupted, NumericalError
from deat.evaluation.scoring import accuracies
from deat.interruption import Interruption
from deat.live import LiveLine, Screen, is_terminal, say_aside
from deat.models.weights import locate
from deat.paths import tidy
from deat.plain import plain
from deat.ranks import ALONE, Ranks
from deat.report.summary import Score, doubts, read_scores, write_summary
from deat.training.advice import command, goes_on_at, stopped_at
from deat.training.folder import (
    HISTORY,
    REPORT,
    RUN,
    SCORES,
    WATCH,
    RunFolder,
    claim,
    make_folder,
    put_aside,
    put_back,
    unwritable,
)
from deat.training.lines import EpochLines, describe
from deat.training.record import check_start, digest_of_start
from deat.training.remarks import beforehand
from deat.training.result import Result
from deat.training.run import Run, say_nothing
from deat.training.trainer import Trainer
from deat.training.validation import Interruptible
from deat.training.watch import OverfitWatch
from deat.writing import write_json

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
            record = {**self.run.record(trainer), "options": _kept(self.options)}
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
            whole = asked == _kept(self.options) and (self.out / REPORT).is_file()
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


def _kept(options: Options) -> dict[str, Any]:
    """The options that a resumed run takes up again."""
    return {"test_images": options.test_images, "baseline": options.baseline}
