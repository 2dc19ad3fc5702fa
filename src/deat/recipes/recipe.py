"""A recipe: a function from method and model to the rows of a table, each a run and how it is judged."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deat.data import names as data_names
from deat.errors import UsageError, unknown
from deat.evaluation.arguments import check_question
from deat.evaluation.attack_registry import attacker
from deat.evaluation.evaluator import BLOCK
from deat.evaluation.progress import LITTLE, weight
from deat.methods import method as find_method
from deat.methods.tune import tune
from deat.runs.request import Request, Run, resolve
from deat.threat import threat
from deat.training.config import Settings
from deat.training.planning import backprops_per_batch
from deat.utils.paths import tidy
from deat.utils.user_code import is_file_spec, split, unprefixed

HELD_OUT, TEST, MANY = 0.1, 0.25, 10_000
"""Guesses of what takes how long: held-out and test images as parts of the training set, and how many test images."""


@dataclass(frozen=True)
class Round:
    """One judging of a run: of which epoch, by which attacks, on how many test images (None: all)."""

    epoch: str
    attacks: tuple[str, ...]
    n: int | None

    @property
    def weight(self) -> float:
        """What it costs, in backprops a batch of training, very roughly."""
        return TEST * min(1.0, (self.n or MANY) / MANY) * sum(_passes(name) for name in self.attacks)


@dataclass(frozen=True)
class Judging:
    """How a run's weights are judged: by which attacks, on how many test images, and of which epoch.

    epoch "best" judges the epoch chosen on held-out training images, and the last one beside it, without AutoAttack.
    aa_n judges by AutoAttack on fewer images than by the rest, but for the seeds of aa_whole; there is then no "worst"
    of all.
    """

    attacks: tuple[str, ...] = ("natural", "fgsm", "pgd-20", "cw-20")
    epoch: str = "best"
    n: int | None = None
    aa_n: int | None = None
    aa_whole: tuple[int, ...] = ()
    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.epoch not in ("best", "last"):
            raise unknown("epoch", self.epoch, ("best", "last"))
        check_question([attacker(name) for name in self.attacks], self.n, self.block)
        if self.aa_n is not None and self.aa_n < 1:
            raise UsageError(f"aa_n must be a number of images >= 1, not {self.aa_n}.")
        if self.aa_whole and self.aa_n is None:
            raise UsageError("aa_whole names seeds that aa_n does not hold for; give aa_n too, such as aa_n=1000.")

    def rounds(self, seed: int) -> dict[str, Round]:
        """How a seed is judged: "" is the main round, "last" the last epoch's, "aa" AutoAttack's where it is apart."""
        apart = self.aa_n is not None and "aa" in self.attacks
        cheap = tuple(name for name in self.attacks if name != "aa")
        found = {"": Round(self.epoch, cheap if apart else self.attacks, self.n)}
        if self.epoch == "best":
            found["last"] = Round("last", cheap, self.n)
        if apart:
            found["aa"] = Round(self.epoch, ("natural", "aa"), self.n if seed in self.aa_whole else self.aa_n)
        return found


@dataclass(frozen=True)
class Row:
    """One row of a table: a run without its seed, how it is judged, and where in the paper it is.

    about names the settings that this row is there for; where one is set for all rows, it goes if another row is then
    the same. seeds are those of the recipe's that it is run with where none are asked for, None for all of them.
    """

    label: str
    request: Request
    settings: dict[str, Any] = field(default_factory=dict)
    judging: Judging = field(default_factory=Judging)
    paper: tuple[str, str] | None = None
    about: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None

    def check(self) -> "Row":
        """Refuse what can be refused without any data."""
        settings = Settings(**self.settings)
        method = find_method(self.request.method, rules=self.request.rules)
        radius = threat(f"{self.request.norm or 'linf'}:{self.request.eps or 1.0!r}")
        tune(method, radius, **self.request.tuned).bind(radius, settings.epochs)
        return self

    def resolve(self, seed: int, budget: int | None = None, threads: int | None = None) -> Run:
        """The run of one seed on its data; with a budget, of as many epochs as never spend more backprops."""
        given = {**self.settings, "seed": seed}
        run = resolve(self.request, **given if threads is None else {**given, "threads": threads})
        return run if budget is None else _within(run, budget)

    @property
    def training(self) -> float:
        """What training and validating cost, in backprops a batch, very roughly: to tell the time left."""
        method = find_method(self.request.method, rules=self.request.rules)
        settings = Settings(**self.settings)
        few, many = backprops_per_batch(method, method.bind(threat("linf:1.0"), settings.epochs), settings.epochs)
        validating = 0.0 if settings.val_attack == "none" else settings.epochs * _passes(settings.val_attack)
        return (few + many) / 2 + HELD_OUT * validating


@dataclass(frozen=True)
class Recipe:
    """A setup of the paper: which table or figure it is, under which rules, with which methods, models and seeds."""

    name: str
    rows: Callable[[str, str], list[Row]] = field(repr=False)
    paper: str
    rules: str
    methods: tuple[str, ...]
    models: tuple[str, ...]
    data: str | None
    seeds: tuple[int, ...] = (0,)

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return str(self.rows.__doc__).split("\n")[0].rstrip(".")

    @property
    def card(self) -> str:
        """Its settings in words: its file's docstring."""
        return inspect.cleandoc(str(sys.modules[self.rows.__module__].__doc__))

    def table(
        self, methods: Sequence[str] = (), models: Sequence[str] = (), data: str | None = None, **request: Any
    ) -> list[Row]:
        """The rows of these methods and models, or of the recipe's own, on its data or these."""
        held = data or self.data
        if held is None:
            raise UsageError(f"recipe {self.name} brings no data: add --data folder:PATH.")
        pairs = [(_known(m), model) for model in models or self.models for m in methods or self.methods]
        rows = [replace(row, label=self._label(row)) for m, model in pairs for row in self.rows(m, model)]
        if held != self.data and held in data_names():  # a folder may hold the paper's images in another form
            rows = [replace(row, paper=None) for row in rows]
        return [replace(r, request=replace(r.request, data=held, rules=self.rules, **request)) for r in rows]

    def _label(self, row: Row) -> str:
        """The row's label, with its model unless that is the recipe's first."""
        model = row.request.model
        return row.label if model == self.models[0] else f"{row.label} {tidy(model)}"


_RECIPES: dict[str, Recipe] = {}


def register(name: str, **about: Any) -> Callable[[Callable[[str, str], list[Row]]], Callable[[str, str], list[Row]]]:
    """Adds a recipe: decorates a function (method, model) -> rows."""

    def add(rows: Callable[[str, str], list[Row]]) -> Callable[[str, str], list[Row]]:
        """Register the function as a recipe's rows."""
        _RECIPES[name] = Recipe(name, rows, **about)
        return rows

    return add


def names() -> list[str]:
    """Every recipe's name."""
    return list(_RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in _RECIPES:
        raise unknown("recipe", name, _RECIPES)
    return _RECIPES[name]


def title(method: str) -> str:
    """A method's name as rows are called, also for one from a file."""
    return find_method(method).name


def rescaled(milestones: tuple[int, ...] | None, epochs: int, new: int) -> tuple[int, ...] | None:
    """Milestones of a run of so many epochs, moved to the same parts of a run of another length."""
    return milestones and tuple(max(1, round(m * new / epochs)) for m in milestones)


def _passes(attack: str) -> float:
    """An attack's passes through the network, there and back, its last look included."""
    return weight(attacker(attack)) + LITTLE


def _known(method: str) -> str:
    """A method's name in our spelling; a file's path made absolute, since workers may run elsewhere."""
    if not is_file_spec(method):
        return find_method(method).name
    find_method(method)
    file, name = split(method.strip())
    prefixes, path = unprefixed(file)
    return f"{prefixes}{Path(path).expanduser().resolve()}:{name}"


def _within(run: Run, budget: int) -> Run:
    """The run with as many epochs as a budget of backprops allows, whatever its schedule comes to see."""
    batches = math.ceil((len(run.corpus.train) - run.held_out) / run.settings.batch_size)

    def most(epochs: int) -> int:
        """The most backprops that so many epochs may spend."""
        return batches * backprops_per_batch(run.method, run.method.bind(run.threat, epochs), epochs)[1]

    if most(1) > budget:
        raise UsageError(f"one epoch of {run.method.name} takes {most(1):,} backprops, more than the {budget:,} given.")
    epochs = 1
    while most(epochs + 1) <= budget:
        epochs += 1
    milestones = rescaled(run.settings.milestones, run.settings.epochs, epochs)
    return replace(run, settings=replace(run.settings, epochs=epochs, milestones=milestones))
