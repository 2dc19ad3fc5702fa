"""`deat train`: resolve, check, train, score, report."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deat.data import Source
from deat.errors import UsageError
from deat.evaluation.scoring import accuracies
from deat.live import LiveLine, PlainLines, clock, is_terminal, say_aside
from deat.report.summary import Score, write_summary
from deat.training.folder import WATCH, RunFolder, check_free, free_name
from deat.training.plan import Plan, plan
from deat.training.result import Result
from deat.training.run import Request, Run, resolve
from deat.training.settings import Settings
from deat.training.trainer import Callback, Trainer
from deat.training.watch import OverfitWatch
from deat.writing import write_json

ATTACKS = ("natural", "fgsm", "pgd-20")


@dataclass(frozen=True)
class Options:
    """What a person said beside the run itself: where it goes and how it is shown."""

    out: str | None = None
    overwrite: bool = False
    test_images: int = 1000
    baseline: str = "auto"
    dry_run: bool = False
    json: bool = False


def run_training(flags: dict[str, Any]) -> int:
    """`deat train`: resolve, check, train, score, report."""
    request, options = (_pick(kind, flags) for kind in (Request, Options))
    if options.test_images < 0:
        raise UsageError(f"test_images must be a whole number >= 0, not {options.test_images}.")
    if options.out:
        check_free(Path(options.out), options.overwrite)
    settings = {f.name: flags.get(f.name) for f in fields(Settings)}
    run = resolve(replace(request, persistent=request.persistent or None, compact=request.compact or None), **settings)
    out = Path(options.out) if options.out else free_name(Path("runs"), f"{run.corpus.name}-{run.method.name}")
    trainer = run.trainer()
    if options.dry_run:
        return _show_plan(plan(trainer), options.json)
    return Session(run, options, out).play(trainer)


class Session:
    """One `deat train` from its first line to its table."""

    def __init__(self, run: Run, options: Options, out: Path) -> None:
        self.run, self.options, self.out = run, options, out
        self.console = Console(quiet=options.json, highlight=False, markup=False, soft_wrap=not is_terminal())
        self.scores: list[Score] = []
        self.watch: OverfitWatch | None = None
        self.images: Source | None = None

    def play(self, trainer: Trainer) -> int:
        """Train, score, write everything down and show it."""
        self.images = self.run.test_images(self.options.test_images)
        if self.images is not None:
            self.images.check()  # a broken test set must not end the run after its last epoch
        record = self.run.record(trainer)
        self.watch = self.run.watch(trainer, log=self.out / WATCH, say=say_aside)
        folder = RunFolder.create(self.out, record, overwrite=self.options.overwrite)
        self._say_what(trainer)
        with self._display() as display:
            result = self._fit(trainer, folder, display)
            if self._wants_baseline():
                self._compare(display)
        write_json(self.out / "scores.json", [asdict(score) for score in self.scores])
        write_summary(self.out / "report.md", record, self.scores, result.history)
        self._report_watch()
        self._show(result)
        return 0

    def _fit(self, trainer: Trainer, folder: RunFolder, display: "Display") -> Result:
        watching = [self.watch] if self.watch else []
        trainer.callbacks += [*watching, folder, *display.following(trainer)]
        result, spent = trainer.fit(), trainer.game.cost.backprops
        name, best, last = self.run.method.name, result.best.epoch, result.history[-1].epoch
        self._score(f"{name}, last epoch" if best != last else name, result, spent)
        if best != last:
            last_weights = {key: value.detach().clone() for key, value in result.model.state_dict().items()}
            result.load_best()
            self._score(f"{name}, best epoch ({best + 1})", result, spent)
            result.model.load_state_dict(last_weights)
        return result

    def _compare(self, display: "Display") -> None:
        trainer = self.run.baseline().trainer()
        trainer.callbacks += display.following(trainer)
        self._score("natural training", trainer.fit(), trainer.game.cost.backprops)

    def _score(self, name: str, result: Result, backprops: int) -> None:
        images = self.images
        if images is not None:
            found = accuracies(result.model, images, ATTACKS, self.run.threat, self.run.settings.seed)
            self.scores.append(Score(name, found, images.num_examples, backprops, result.seconds))

    def _report_watch(self) -> None:
        """Add what the watch saw to the report, if it fired."""
        line = self.watch and self.watch.summary()
        if line:
            with (self.out / "report.md").open("a", encoding="utf-8") as file:
                file.write(f"\nThe watch saw {line}. Every epoch's reading is in {WATCH}.\n")

    def _wants_baseline(self) -> bool:
        if self.options.baseline != "auto":
            return self.options.baseline == "yes"
        return self.run.corpus.name == "digits" and self.run.method.name != "natural"

    def _say_what(self, trainer: Trainer) -> None:
        run = self.run
        self.console.print(
            f"{run.method.name} on {run.corpus.name}: {run.model_name} ({trainer.num_parameters:,} parameters), "
            f"{run.threat.name} eps {run.threat.eps:.4g}, {run.settings.epochs} epochs, "
            f"{trainer.engine.precision} on {trainer.engine.device}"
        )
        if trainer.engine_note:
            self.console.print(f"moves run eagerly: {trainer.engine_note}")

    def _show(self, result: Result) -> None:
        if self.options.json:
            fired = self.watch.fired if self.watch else []
            parts: dict[str, list[Any]] = {"scores": self.scores, "watch": fired, "history": result.history}
            print(json.dumps({"out": str(self.out), **{n: [asdict(r) for r in rows] for n, rows in parts.items()}}))
            return
        if self.scores:
            self.console.print(_table(self.scores))
        if self.watch and self.watch.fired:
            self.console.print(f"the watch saw {self.watch.summary()}")
        self.console.print(f"everything is in {self.out}; report.md tells it whole")

    @contextmanager
    def _display(self) -> Iterator["Display"]:
        if self.options.json:
            yield Display(None, [])
        elif is_terminal():
            with LiveLine(self.console) as line:
                yield Display(line, [line])
        else:
            yield Display(None, [PlainLines()])


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


def _table(scores: list[Score]) -> Table:
    table = Table(title=f"accuracy on {scores[0].images:,} test images", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (*scores[0].accuracy, "backprops", "seconds"):
        table.add_column(name, justify="right")
    for s in scores:
        table.add_row(s.name, *(f"{v:.1%}" for v in s.accuracy.values()), f"{s.backprops:,}", f"{s.seconds:.1f}")
    return table


def _show_plan(found: Plan, as_json: bool) -> int:
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


def _pick(kind: type[Any], flags: dict[str, Any]) -> Any:
    return kind(**{f.name: flags[f.name] for f in fields(kind) if f.name in flags})
