"""What `deat train` shows: a run while it goes on, its scores, and what it would cost."""

import json
from dataclasses import asdict, dataclass

from rich.table import Table

from deat.data import LazyImages
from deat.data.statistics import Statistics
from deat.live import LiveLine, say_aside
from deat.numbers import clock, level
from deat.plain import plain
from deat.ranks import Ranks
from deat.report.summary import Score
from deat.training.following import Callback
from deat.training.plan import Plan
from deat.training.run import Run
from deat.training.trainer import Trainer


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
