"""A recipe: a function from method and model to the rows of a table, each a run and how it is evaluated."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deat.data import list_datasets
from deat.data.datasets import split_data_root
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attack_registry import get_attack
from deat.evaluation.evaluation_request import check_evaluation_arguments
from deat.evaluation.evaluator import DEFAULT_ATTACKS, DEFAULT_BLOCK_SIZE
from deat.evaluation.progress import FORWARD_ONLY_COST, estimate_attack_cost
from deat.methods import get_method
from deat.methods.change_settings import configure_method
from deat.runs.resolve_request import Request, Run, read_requested_threat, resolve_request
from deat.threat import parse_threat
from deat.training.config import TrainConfig
from deat.training.training_cost import backprop_bounds
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.user_code import is_file_spec, split_prefixes, split_spec
from deat.utils.user_paths import expand_path

HELD_OUT_FRACTION, TEST_FRACTION = 0.1, 0.25
"""Guesses for the time left: numbers of held-out and of test images, as fractions of the training set."""
ASSUMED_TEST_IMAGES = 10_000

EVALUATED_WEIGHTS = ("best", "last", "averaged")
"""Which weights of a run a recipe may evaluate."""

RowBuilder = Callable[[str, str], "list[RecipeRow]"]
"""A function from a method's and a model's name to rows."""


@dataclass(frozen=True)
class AttackRound:
    """One evaluation of a run.

    Args:
        epoch: "best", "last" or "averaged".
        attacks: Names of the attacks.
        n: Number of test images; None for all.
    """

    epoch: str
    attacks: tuple[str, ...]
    n: int | None

    @property
    def relative_cost(self) -> float:
        """A rough cost in backprops a batch of training."""
        return (
            TEST_FRACTION
            * min(1.0, (self.n or ASSUMED_TEST_IMAGES) / ASSUMED_TEST_IMAGES)
            * sum(_estimate_attack_cost(name) for name in self.attacks)
        )


@dataclass(frozen=True)
class EvaluationPlan:
    """How a run's weights are evaluated.

    Args:
        attacks: Names of the attacks.
        epoch: "best" evaluates the epoch chosen on held-out training images, "averaged" the averaged weights of
            training with `ema`; both evaluate the last epoch too, without AutoAttack. "last" evaluates the last epoch
            alone.
        n: Number of test images; None for all.
        aa_n: Number of test images for AutoAttack, where it is smaller. There is then no worst case over all attacks.
        aa_whole: Seeds for which AutoAttack runs on n images all the same.
        block: Number of images that are attacked at once.

    Raises:
        UsageError: If a value is not accepted.
    """

    attacks: tuple[str, ...] = DEFAULT_ATTACKS
    epoch: str = "best"
    n: int | None = None
    aa_n: int | None = None
    aa_whole: tuple[int, ...] = ()
    block: int = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        if self.epoch not in EVALUATED_WEIGHTS:
            raise unknown_name_error("epoch", self.epoch, EVALUATED_WEIGHTS)
        check_evaluation_arguments([get_attack(name) for name in self.attacks], self.n, self.block)
        if self.aa_n is not None and self.aa_n < 1:
            raise UsageError(f"aa_n must be a number of images >= 1, not {self.aa_n}.")
        if self.aa_whole and self.aa_n is None:
            raise UsageError("aa_whole names the seeds that aa_n does not apply to. Give aa_n too, such as aa_n=1000.")

    def rounds(self, seed: int) -> dict[str, AttackRound]:
        """List the evaluations of one seed.

        Args:
            seed: Seed of the run.

        Returns:
            By name: "" is the main round, "last" the last epoch's, "aa" AutoAttack's where it has its own images.
        """
        has_own_aa_round = self.aa_n is not None and "aa" in self.attacks
        without_aa = tuple(name for name in self.attacks if name != "aa")
        rounds = {"": AttackRound(self.epoch, without_aa if has_own_aa_round else self.attacks, self.n)}
        if self.epoch != "last":
            rounds["last"] = AttackRound("last", without_aa, self.n)
        if has_own_aa_round:
            rounds["aa"] = AttackRound(self.epoch, ("natural", "aa"), self.n if seed in self.aa_whole else self.aa_n)
        return rounds


@dataclass(frozen=True)
class RecipeRow:
    """One row of a table: a run without its seed, how it is evaluated, and its row in the paper.

    Args:
        label: Name of the row.
        request: The run that is trained.
        settings: Fields of TrainConfig that differ from the defaults.
        evaluation: How the run's weights are evaluated.
        paper_row: The paper's table and row; None where the paper has none.
        varied_settings: Settings that distinguish this row from the others. Where one of them is set for all rows,
            the row is dropped if another one is then the same.
        seeds: Seeds of the recipe to run by default; None for all of them.
    """

    label: str
    request: Request
    settings: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationPlan = field(default_factory=EvaluationPlan)
    paper_row: tuple[str, str] | None = None
    varied_settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None

    def check(self) -> "RecipeRow":
        """Check the row as far as possible without data.

        Returns:
            The row itself.

        Raises:
            UsageError: If a setting, method or threat model is not accepted.
        """
        config = TrainConfig(**self.settings)
        if self.evaluation.epoch == "averaged" and not config.ema:
            raise UsageError("epoch=averaged evaluates the averaged weights, and ema is not set: add --set ema=0.995.")
        method = get_method(self.request.method, rules=self.request.rules)
        threat = read_requested_threat(self.request) or parse_threat(f"{self.request.norm or 'linf'}:1.0")
        configure_method(method, threat, **self.request.method_options).bind(threat, config.epochs)
        return self

    def resolve(self, seed: int, budget: int | None = None, threads: int | None = None) -> Run:
        """Load the data and resolve the run of one seed.

        Args:
            seed: Seed of the run.
            budget: Most backprops that training may spend; it shortens the training.
            threads: CPU threads; None for the default.

        Returns:
            The run.
        """
        settings = {**self.settings, "seed": seed}
        run = resolve_request(self.request, **settings if threads is None else {**settings, "threads": threads})
        return run if budget is None else _limit_epochs_to_budget(run, budget)

    @property
    def training_cost(self) -> float:
        """A rough cost of training and validation in backprops a batch, to estimate the time left."""
        method = get_method(self.request.method, rules=self.request.rules)
        config = TrainConfig(**self.settings)
        fewest, most = backprop_bounds(method, method.bind(parse_threat("linf:1.0"), config.epochs), config.epochs)
        validation = 0.0 if config.val_attack == "none" else config.epochs * _estimate_attack_cost(config.val_attack)
        return (fewest + most) / 2 + HELD_OUT_FRACTION * validation


@dataclass(frozen=True)
class Recipe:
    """A setup of the paper.

    Args:
        name: Name of the recipe.
        row_builder: Function from a method's and a model's name to rows. Its module's docstring describes the setup.
        paper: The paper's table or figure.
        rules: Rule set, "default", "literal" or "released".
        methods: Names of the methods.
        models: Names of the models.
        data: Name of the data set; None where it has to be given.
        seeds: Seeds of the runs.
    """

    name: str
    row_builder: RowBuilder = field(repr=False)
    paper: str
    rules: str
    methods: tuple[str, ...]
    models: tuple[str, ...]
    data: str | None
    seeds: tuple[int, ...] = (0,)

    @property
    def summary(self) -> str:
        """The recipe in one line."""
        return str(self.row_builder.__doc__).split("\n")[0].rstrip(".")

    @property
    def description(self) -> str:
        """The settings in words: the docstring of the recipe's file."""
        return inspect.cleandoc(str(sys.modules[self.row_builder.__module__].__doc__))

    def make_rows(
        self, methods: Sequence[str] = (), models: Sequence[str] = (), data: str | None = None, **request: Any
    ) -> list[RecipeRow]:
        """Build the rows of a table.

        Args:
            methods: Names of methods; by default the recipe's.
            models: Names of models; by default the recipe's.
            data: Name of a data set; by default the recipe's.
            **request: Other fields of Request for all rows.

        Returns:
            The rows.

        Raises:
            UsageError: If the recipe has no data set and none is given, or a method is unknown.
        """
        data_name = data or self.data
        if data_name is None:
            raise UsageError(f"recipe {self.name} has no data set of its own: add --data folder:PATH.")
        data_name, request["data_root"] = split_data_root(data_name, request.get("data_root"))
        pairs = [(_normalize_method_name(m), model) for model in models or self.models for m in methods or self.methods]
        rows = [row for method, model in pairs for row in self.row_builder(method, model)]
        rows = [replace(row, label=self._label_with_model(row)) for row in rows]
        if data_name != self.data and data_name in list_datasets():  # a folder may hold the paper's images
            rows = [replace(row, paper_row=None) for row in rows]
        return [replace(r, request=replace(r.request, data=data_name, rules=self.rules, **request)) for r in rows]

    def _label_with_model(self, row: RecipeRow) -> str:
        model = row.request.model
        return row.label if model == self.models[0] else f"{row.label} {anonymize_paths(model)}"


_RECIPES: dict[str, Recipe] = {}


def register_recipe(name: str, **fields: Any) -> Callable[[RowBuilder], RowBuilder]:
    """Register a recipe: a decorator for a function (method, model) -> rows.

    Args:
        name: Name of the recipe.
        **fields: The other fields of Recipe.

    Returns:
        The decorator, which returns the function unchanged.
    """

    def register(row_builder: RowBuilder) -> RowBuilder:
        """Register the function and return it."""
        _RECIPES[name] = Recipe(name, row_builder, **fields)
        return row_builder

    return register


def list_recipes() -> list[str]:
    """List the name of every recipe.

    Returns:
        The names.
    """
    return list(_RECIPES)


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Args:
        name: A name from list_recipes().

    Returns:
        The recipe.

    Raises:
        UsageError: If no recipe has this name.
    """
    if name not in _RECIPES:
        raise unknown_name_error("recipe", name, _RECIPES)
    return _RECIPES[name]


def rescale_milestones(milestones: tuple[int, ...] | None, epochs: int, new_epochs: int) -> tuple[int, ...] | None:
    """Move milestones to the same fractions of a training of another length.

    Args:
        milestones: Epochs at which the learning rate decays, or None.
        epochs: Number of epochs that they are for.
        new_epochs: Number of epochs of the other training.

    Returns:
        The moved milestones, or None.
    """
    return milestones and tuple(max(1, round(m * new_epochs / epochs)) for m in milestones)


def _estimate_attack_cost(attack: str) -> float:
    """An attack's cost in backprops a batch, its final classification included."""
    return estimate_attack_cost(get_attack(attack)) + FORWARD_ONLY_COST


def _normalize_method_name(method: str) -> str:
    """A method's registered name; the path of a file becomes absolute, since workers may run in another folder."""
    if not is_file_spec(method):
        return get_method(method).name
    get_method(method)
    file, name = split_spec(method.strip())
    prefixes, path = split_prefixes(file)
    return f"{prefixes}{expand_path(path).resolve()}:{name}"


def _limit_epochs_to_budget(run: Run, budget: int) -> Run:
    """The run with as many epochs as cannot spend more backprops than the budget."""
    batches = math.ceil((len(run.splits.train) - run.held_out) / run.config.batch_size)

    def most_backprops(epochs: int) -> int:
        """The most backprops that a number of epochs may spend."""
        return batches * backprop_bounds(run.method, run.method.bind(run.threat, epochs), epochs)[1]

    if most_backprops(1) > budget:
        raise UsageError(
            f"one epoch of {run.method.name} takes {most_backprops(1):,} backprops, more than the budget of "
            f"{budget:,}. Give a larger one."
        )
    epochs = 1
    while most_backprops(epochs + 1) <= budget:
        epochs += 1
    milestones = rescale_milestones(run.config.milestones, run.config.epochs, epochs)
    return replace(run, config=replace(run.config, epochs=epochs, milestones=milestones))
