"""A recipe: a function from method and model to the rows of a table, each a run and how it is judged."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deat.data import list_datasets as data_names
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.arguments import check_evaluation_arguments
from deat.evaluation.attack_registry import get_attack
from deat.evaluation.evaluator import DEFAULT_ATTACKS, DEFAULT_BLOCK_SIZE
from deat.evaluation.progress import FORWARD_ONLY_COST, estimate_attack_cost
from deat.methods import get_method
from deat.methods.configure import configure_method
from deat.runs.request import Request, Run, resolve_request
from deat.threat import parse_threat
from deat.training.config import TrainConfig
from deat.training.cost_estimate import backprop_bounds
from deat.utils.paths import anonymize_paths
from deat.utils.user_code import is_file_spec, split_prefixes, split_spec

HELD_OUT_FRACTION, TEST_FRACTION, ASSUMED_TEST_IMAGES = 0.1, 0.25, 10_000
"""Guesses of what takes how long: held-out and test images as parts of the training set, and how many test images."""


@dataclass(frozen=True)
class AttackRound:
    """One judging of a run: of which epoch, by which attacks, on how many test images (None: all)."""

    epoch: str
    attacks: tuple[str, ...]
    n: int | None

    @property
    def weight(self) -> float:
        """What it costs, in backprops a batch of training, very roughly."""
        return (
            TEST_FRACTION
            * min(1.0, (self.n or ASSUMED_TEST_IMAGES) / ASSUMED_TEST_IMAGES)
            * sum(_estimate_attack_cost(name) for name in self.attacks)
        )


@dataclass(frozen=True)
class EvaluationPlan:
    """How a run's weights are judged: by which attacks, on how many test images, and of which epoch.

    epoch "best" judges the epoch chosen on held-out training images, and the last one beside it, without AutoAttack.
    aa_n judges by AutoAttack on fewer images than by the rest, but for the seeds of aa_whole; there is then no "worst"
    of all.
    """

    attacks: tuple[str, ...] = DEFAULT_ATTACKS
    epoch: str = "best"
    n: int | None = None
    aa_n: int | None = None
    aa_whole: tuple[int, ...] = ()
    block: int = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        if self.epoch not in ("best", "last"):
            raise unknown_name_error("epoch", self.epoch, ("best", "last"))
        check_evaluation_arguments([get_attack(name) for name in self.attacks], self.n, self.block)
        if self.aa_n is not None and self.aa_n < 1:
            raise UsageError(f"aa_n must be a number of images >= 1, not {self.aa_n}.")
        if self.aa_whole and self.aa_n is None:
            raise UsageError("aa_whole names seeds that aa_n does not hold for; give aa_n too, such as aa_n=1000.")

    def rounds(self, seed: int) -> dict[str, AttackRound]:
        """How a seed is judged: "" is the main round, "last" the last epoch's, "aa" AutoAttack's where it is apart."""
        apart = self.aa_n is not None and "aa" in self.attacks
        cheap = tuple(name for name in self.attacks if name != "aa")
        found = {"": AttackRound(self.epoch, cheap if apart else self.attacks, self.n)}
        if self.epoch == "best":
            found["last"] = AttackRound("last", cheap, self.n)
        if apart:
            found["aa"] = AttackRound(self.epoch, ("natural", "aa"), self.n if seed in self.aa_whole else self.aa_n)
        return found


@dataclass(frozen=True)
class RecipeRow:
    """One row of a table: a run without its seed, how it is judged, and where in the paper it is.

    about names the settings that this row is there for; where one is set for all rows, it goes if another row is then
    the same. seeds are those of the recipe's that it is run with where none are asked for, None for all of them.
    """

    label: str
    request: Request
    settings: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    paper: tuple[str, str] | None = None
    about: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None

    def check(self) -> "RecipeRow":
        """Refuse what can be refused without any data."""
        settings = TrainConfig(**self.settings)
        method = get_method(self.request.method, rules=self.request.rules)
        radius = parse_threat(f"{self.request.norm or 'linf'}:{self.request.eps or 1.0!r}")
        configure_method(method, radius, **self.request.method_options).bind(radius, settings.epochs)
        return self

    def resolve(self, seed: int, budget: int | None = None, threads: int | None = None) -> Run:
        """The run of one seed on its data; with a budget, of as many epochs as never spend more backprops."""
        given = {**self.settings, "seed": seed}
        run = resolve_request(self.request, **given if threads is None else {**given, "threads": threads})
        return run if budget is None else _limit_epochs_to_budget(run, budget)

    @property
    def training(self) -> float:
        """What training and validating cost, in backprops a batch, very roughly: to tell the time left."""
        method = get_method(self.request.method, rules=self.request.rules)
        settings = TrainConfig(**self.settings)
        few, many = backprop_bounds(method, method.bind(parse_threat("linf:1.0"), settings.epochs), settings.epochs)
        validating = (
            0.0 if settings.val_attack == "none" else settings.epochs * _estimate_attack_cost(settings.val_attack)
        )
        return (few + many) / 2 + HELD_OUT_FRACTION * validating


@dataclass(frozen=True)
class Recipe:
    """A setup of the paper: which table or figure it is, under which rules, with which methods, models and seeds."""

    name: str
    rows: Callable[[str, str], list[RecipeRow]] = field(repr=False)
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
    def description(self) -> str:
        """Its settings in words: its file's docstring."""
        return inspect.cleandoc(str(sys.modules[self.rows.__module__].__doc__))

    def table(
        self, methods: Sequence[str] = (), models: Sequence[str] = (), data: str | None = None, **request: Any
    ) -> list[RecipeRow]:
        """The rows of these methods and models, or of the recipe's own, on its data or these."""
        held = data or self.data
        if held is None:
            raise UsageError(f"recipe {self.name} brings no data: add --data folder:PATH.")
        pairs = [(_normalize_method_name(m), model) for model in models or self.models for m in methods or self.methods]
        rows = [replace(row, label=self._label_with_model(row)) for m, model in pairs for row in self.rows(m, model)]
        if held != self.data and held in data_names():  # a folder may hold the paper's images in another form
            rows = [replace(row, paper=None) for row in rows]
        return [replace(r, request=replace(r.request, data=held, rules=self.rules, **request)) for r in rows]

    def _label_with_model(self, row: RecipeRow) -> str:
        """The row's label, with its model unless that is the recipe's first."""
        model = row.request.model
        return row.label if model == self.models[0] else f"{row.label} {anonymize_paths(model)}"


_RECIPES: dict[str, Recipe] = {}


def register_recipe(
    name: str, **about: Any
) -> Callable[[Callable[[str, str], list[RecipeRow]]], Callable[[str, str], list[RecipeRow]]]:
    """Adds a recipe: decorates a function (method, model) -> rows."""

    def add(rows: Callable[[str, str], list[RecipeRow]]) -> Callable[[str, str], list[RecipeRow]]:
        """Register the function as a recipe's rows."""
        _RECIPES[name] = Recipe(name, rows, **about)
        return rows

    return add


def list_recipes() -> list[str]:
    """Every recipe's name."""
    return list(_RECIPES)


def get_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in _RECIPES:
        raise unknown_name_error("recipe", name, _RECIPES)
    return _RECIPES[name]


def get_method_name(method: str) -> str:
    """A method's name as rows are called, also for one from a file."""
    return get_method(method).name


def rescale_milestones(milestones: tuple[int, ...] | None, epochs: int, new_epochs: int) -> tuple[int, ...] | None:
    """Milestones of a run of so many epochs, moved to the same parts of a run of another length."""
    return milestones and tuple(max(1, round(m * new_epochs / epochs)) for m in milestones)


def _estimate_attack_cost(attack: str) -> float:
    """An attack's passes through the network, there and back, its last look included."""
    return estimate_attack_cost(get_attack(attack)) + FORWARD_ONLY_COST


def _normalize_method_name(method: str) -> str:
    """A method's name in our spelling; a file's path made absolute, since workers may run elsewhere."""
    if not is_file_spec(method):
        return get_method(method).name
    get_method(method)
    file, name = split_spec(method.strip())
    prefixes, path = split_prefixes(file)
    return f"{prefixes}{Path(path).expanduser().resolve()}:{name}"


def _limit_epochs_to_budget(run: Run, budget: int) -> Run:
    """The run with as many epochs as a budget of backprops allows, whatever its schedule comes to see."""
    batches = math.ceil((len(run.splits.train) - run.held_out) / run.config.batch_size)

    def most(epochs: int) -> int:
        """The most backprops that so many epochs may spend."""
        return batches * backprop_bounds(run.method, run.method.bind(run.threat, epochs), epochs)[1]

    if most(1) > budget:
        raise UsageError(f"one epoch of {run.method.name} takes {most(1):,} backprops, more than the {budget:,} given.")
    epochs = 1
    while most(epochs + 1) <= budget:
        epochs += 1
    milestones = rescale_milestones(run.config.milestones, run.config.epochs, epochs)
    return replace(run, config=replace(run.config, epochs=epochs, milestones=milestones))
