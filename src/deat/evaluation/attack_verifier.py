"""Classification of a block of images under one attack. Every adversarial example is verified and classified again here."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deat.evaluation.attacks import call_attack, exact_outputs, is_natural
from deat.evaluation.fast_model import CountingModel, FastModel, choose_attack_precision, count_layer_weights
from deat.evaluation.kept_examples import AdversarialExamples
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel
from deat.utils.float32_precision import exact_float32, full_precision
from deat.utils.seeding import derive_seed
from deat.utils.torch_contexts import broadcast_mask, device_of, eval_mode

AGREEMENT_IMAGES = 128
"""Images of a block on which the logits of the fast model are compared with the exact ones."""


class AttackLike(Protocol):
    """What `deat.evaluate` accepts as an attack: a callable with a name that returns adversarial images.

    A callable with a further parameter called `task` receives the task, such as `deat.tasks.Segmentation()`.

    An attack may have a property `stages`, a tuple of attacks. They are then run one after the other in its place, each
    on the images that the ones before it did not fool, and each result is saved on its own.

    Example:
        >>> class Noise:
        ...     name = "noise"
        ...
        ...     def __call__(self, model, x, y, threat, generator=None):
        ...         return x + threat.initial_delta(x, "uniform", generator)
        >>> deat.evaluate(model, test, threat="linf:0.1", attacks=["natural", Noise()])
    """

    @property
    def name(self) -> str:
        """The attack's name in tables and files."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return adversarial images.

        Args:
            model: Maps images to logits. Differentiable by its input; on a GPU it may compute in half precision.
            x: Images in [0, 1], (B, C, H, W) float32, all classified correctly; or other inputs (B, ...) in the box of
                the threat model, on a task with another score. A copy, which may be overwritten.
            y: Their labels, (B,) int64 for classification.
            threat: The threat model. An example outside its ball or its box counts as not attacked.
            generator: Source of the attack's random numbers, seeded for this attack and block.

        Returns:
            Images with the shape and dtype of `x`.
        """


RECORDED_FIELDS = {"num_fooled_by_stage": "felled"}
"""What resume logs and evaluation.json call some fields of results, so that files of every version can be read."""


@dataclass(frozen=True)
class BlockResult:
    """The result of an attack, or of one stage of an attack, on one block of images.

    Attributes:
        correct: For each image, whether it is still classified correctly, or right by the task.
        invalid: How many adversarial examples were outside the ball or the box or not finite.
        seconds: How long it took.
        forwards: Images passed forward through the model.
        backwards: Images passed backward through it.
        num_fooled_by_stage: How many images each stage fooled, by its name; empty for an attack without stages.
        scores: For each image, the lowest score seen, for a task whose answers are more or less wrong; else empty.
        statistics: For each image, the numbers of that answer that the task's metrics are computed from; else empty.
    """

    correct: list[bool]
    invalid: int
    seconds: float
    forwards: int
    backwards: int
    num_fooled_by_stage: dict[str, int] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    statistics: list[list[float]] = field(default_factory=list)

    @classmethod
    def from_stages(cls, stages: "Sequence[BlockResult]") -> "BlockResult":
        """Combine the results of an attack's stages on one block, in their order."""
        if not stages[-1].scores:  # each stage saw only what the ones before it left
            return cls(correct=stages[-1].correct, **sum_counts(stages))
        return cls(**sum_counts(stages), **combine_worst(stages))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "BlockResult":
        """Make a result of what `as_json` returned."""
        return cls(**rename_recorded_fields(values))

    def as_json(self) -> dict[str, Any]:
        """Return the result as the resume log has it."""
        return {RECORDED_FIELDS.get(name, name): value for name, value in asdict(self).items()}


def rename_recorded_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a result in a file under the names that they have here."""
    names = {recorded: name for name, recorded in RECORDED_FIELDS.items()}
    return {names.get(name, name): value for name, value in values.items()}


def sum_counts(results: Iterable[Any]) -> dict[str, Any]:
    """Sum the counts and the seconds of some results: the fields that are not lists of one entry per image.

    Args:
        results: Results of stages of an attack, of blocks of images, or of balls of a union.

    Returns:
        The sums, by the name of the field.
    """
    results = list(results)
    num_fooled_by_stage: dict[str, int] = {}
    for result in results:
        for name, count in result.num_fooled_by_stage.items():
            num_fooled_by_stage[name] = num_fooled_by_stage.get(name, 0) + count
    names = ("invalid", "seconds", "forwards", "backwards")
    sums = {name: sum(getattr(result, name) for result in results) for name in names}
    return {**sums, "num_fooled_by_stage": num_fooled_by_stage}


def combine_worst(results: Sequence[Any]) -> dict[str, Any]:
    """Take for each image the worst of several results, by its score; the first of equal ones.

    Args:
        results: Results with `correct`, `scores` and `statistics` of the same images.

    Returns:
        The same three of the worst result of each image.
    """
    worst = [
        min(range(len(results)), key=column.__getitem__) for column in zip(*(r.scores for r in results), strict=True)
    ]
    names = ("correct", "scores", "statistics")
    return {name: [getattr(results[k], name)[i] for i, k in enumerate(worst)] for name in names}


def get_stages(attack: AttackLike) -> tuple[AttackLike, ...]:
    """Return the stages of an attack; one without stages is its own only stage."""
    stages: tuple[AttackLike, ...] = getattr(attack, "stages", (attack,))
    return stages


class Answers(NamedTuple):
    """What the exact model answers for some images, by the task.

    Attributes:
        right: Whether each answer is right.
        beaten: Whether an attack has nothing left to gain.
        scores: How right each answer is; None for a task without grades.
        statistics: What the task's metrics are computed from; None for a task without grades.
    """

    right: Tensor
    beaten: Tensor
    scores: Tensor | None = None
    statistics: Tensor | None = None

    @classmethod
    def of(cls, outputs: Tensor, y: Tensor, task: Task) -> "Answers":
        """Read a model's outputs."""
        right = task.is_right(outputs, y)
        if not task.is_graded:
            return cls(right, ~right)
        scores = task.score(outputs, y).double().nan_to_num(nan=-torch.inf)
        return cls(right, task.is_beaten(outputs, y), scores, task.statistics(outputs, y))

    def is_worse(self, index: Tensor, others: "Answers") -> Tensor:
        """Return which of the others are worse than the answers at `index`; without grades, all."""
        if self.scores is None or others.scores is None:
            return torch.ones_like(index, dtype=torch.bool)
        return others.scores < self.scores[index]

    def replace_worse(self, index: Tensor, others: "Answers") -> "Answers":
        """Replace the answers at `index` where the others are worse; without grades, wherever they are."""
        if self.scores is None or others.scores is None or self.statistics is None or others.statistics is None:
            return Answers(self.right.index_put((index,), others.right), self.beaten.index_put((index,), others.beaten))
        is_worse = self.is_worse(index, others)
        index, others = index[is_worse], Answers(*(part[is_worse] for part in others if part is not None))
        pairs = zip(self, others, strict=True)
        return Answers(
            *(
                own_values.index_put((index,), theirs)
                for own_values, theirs in pairs
                if own_values is not None and theirs is not None
            )
        )


class CleanBlock(NamedTuple):
    """A block without attack: the answers, and whether attacks may use the fast model."""

    x: Tensor
    y: Tensor
    answers: Answers
    fast_model_agrees: bool
    outputs: Tensor


class AttackVerifier:
    """Attacks blocks of images, verifies the adversarial examples and classifies them.

    A result depends only on the model, the seed, the attack, the block and the precision of the attacks. Adversarial
    examples are verified (inside the ball, inside [0, 1], finite) and classified by the exact model in float32,
    whatever model the attack was given. Images that are misclassified without attack are not attacked.

    Args:
        model: The model to evaluate.
        threat: The threat model.
        seed: The seed of the attacks' random draws.
        precision: What attacks compute in: "auto", "fp32", "tf32", "bf16" or "fp16".
        engine: How attacks run the model on a GPU: "eager", "graph" or "compile".
        task: What outputs and labels mean.
        examples: Where to keep the adversarial examples; None for nowhere.

    Raises:
        UsageError: The precision is unknown, or needs a CUDA device and the model is on the CPU.

    Example:
        >>> verifier = AttackVerifier(model, deat.Linf(8 / 255), seed=0)
        >>> verifier.attack_block(deat.Attack("pgd-20", steps=20), images, labels, block_index=0).correct
        [True, False, ...]
    """

    def __init__(
        self,
        model: nn.Module,
        threat: ThreatModel,
        seed: int,
        precision: str = "fp32",
        engine: str = "graph",
        task: Task = CLASSIFICATION,
        examples: AdversarialExamples | None = None,
    ) -> None:
        self.examples = examples
        self.model, self.threat, self.seed, self.task = CountingModel(model), threat, seed, task
        # A score may change by less than half precision resolves, so that "auto" must not choose it for a task with grades.
        num_weights = 0 if task.is_graded else count_layer_weights(model)
        self.precision = choose_attack_precision(precision, device_of(model), num_weights)
        self.fast_model = self._build_fast_model(model, precision, engine)
        self._last_clean_block: CleanBlock | None = None

    def _build_fast_model(self, model: nn.Module, wanted_precision: str, engine: str) -> FastModel | None:
        """The fast model for the precision; None, and float32, for a model on a CPU that "auto" cannot copy."""
        if self.precision == "fp32":
            return None
        try:
            return FastModel(model, self.model, self.precision, engine)
        except Exception:  # whatever a model's own code raises
            if wanted_precision != "auto" or device_of(model).type == "cuda":
                raise
            self.precision = "fp32"
            return None

    def choose_attack_model(self, x: Tensor) -> nn.Module:
        """Return the fast model if there is one that agrees with the exact model on these images; else the exact one."""
        with eval_mode(self.model):
            is_usable = self.fast_model is not None and self.fast_model.matches_exact(x[:AGREEMENT_IMAGES])
        return self.fast_model if self.fast_model is not None and is_usable else self.model

    def attack_block(
        self,
        attack: AttackLike,
        x: Tensor,
        y: Tensor,
        block_index: int,
        survivors: list[bool] | None = None,
        stage: AttackLike | None = None,
    ) -> BlockResult:
        """Attack a block of images and classify the adversarial examples.

        Args:
            attack: The attack, or the one that `stage` is part of.
            x: The block's images, in [0, 1].
            y: Their labels.
            block_index: The block's number in the data, which the attack's seed is derived from.
            survivors: For each image, whether to attack it; the others count as fooled. Default: all.
            stage: The stage to run, for an attack with several.

        Returns:
            Which images are still classified correctly, and what it cost.
        """
        started = perf_counter()
        with exact_float32(x.device), eval_mode(self.model):
            clean = self._evaluate_clean(x, y)
            for model in filter(None, (self.model, self.fast_model)):
                model.block_images = len(x)
            passes_before = self.count_passes()
            answers, attacked, is_one_left = clean.answers, ~clean.answers.beaten, torch.ones_like(clean.answers.right)
            if survivors is not None:
                is_one_left = torch.tensor(survivors, device=x.device)
                attacked = attacked & is_one_left
            if self.examples is not None and not self.examples.has(attack.name, block_index):
                self.examples.add(attack.name, block_index, x, clean.outputs)
            answers, invalid = self._attack_survivors(attack, stage, clean, block_index, attacked)
            correct = (answers.right & is_one_left).tolist()
        forwards, backwards = (after - before for after, before in zip(self.count_passes(), passes_before, strict=True))
        if is_natural(attack):
            forwards += len(x)  # the clean classification, which all attacks on the block share
        num_fooled_by_stage = {stage.name: int(attacked.sum()) - sum(correct)} if stage else {}
        return BlockResult(
            correct,
            invalid,
            perf_counter() - started,
            forwards,
            backwards,
            num_fooled_by_stage,
            scores=[] if answers.scores is None else answers.scores.tolist(),
            statistics=[] if answers.statistics is None else answers.statistics.tolist(),
        )

    def count_passes(self) -> tuple[int, int]:
        """Return how many images have passed forward and backward so far, through the exact and the fast model."""
        forwards, backwards = self.model.forwards, self.model.backwards
        if self.fast_model is None:
            return forwards, backwards
        return forwards + self.fast_model.forwards, backwards + self.fast_model.backwards

    def _attack_survivors(
        self, attack: AttackLike, stage: AttackLike | None, clean: CleanBlock, block_index: int, attacked: Tensor
    ) -> tuple[Answers, int]:
        """The answers of the block with some of its images attacked, and the number of invalid examples."""
        index = attacked.nonzero().squeeze(1)
        if is_natural(attack) or len(index) == 0:
            return clean.answers, 0
        x, y = clean.x[index], clean.y[index]
        seed = derive_block_seed(self.seed, attack.name, block_index)
        generator = torch.Generator(x.device).manual_seed(seed)
        fast_model = self.fast_model if clean.fast_model_agrees else None
        with full_precision(tf32=fast_model is not None):
            # Copies, because an attack may overwrite its input, and its examples are compared with the original.
            model = fast_model or self.model
            adv = call_attack(stage or attack, model, x.clone(), y.clone(), self.threat, generator, self.task).detach()
        self.model.eval()  # the attack may have changed the mode
        if adv.shape != x.shape or adv.dtype != x.dtype:
            return clean.answers, len(index)
        valid = self.threat.contains(x, adv)
        examples = torch.where(broadcast_mask(valid, x), adv, x)
        outputs = self._compute_outputs(examples)
        answers = Answers.of(outputs, y, self.task)
        if self.examples is not None:
            is_worse = clean.answers.is_worse(index, answers)
            self.examples.add(attack.name, block_index, examples[is_worse], outputs[is_worse], index[is_worse])
        return clean.answers.replace_worse(index, answers), int((~valid).sum())

    def _evaluate_clean(self, x: Tensor, y: Tensor) -> CleanBlock:
        """Classify a block without attack; the last block is kept, because all attacks on it need it."""
        last = self._last_clean_block
        if last is not None and last.x is x and last.y is y:
            return last
        outputs = self._compute_outputs(x)
        answers = Answers.of(outputs, y, self.task)
        agrees = self.fast_model is not None and self.fast_model.matches_exact(x[:AGREEMENT_IMAGES])
        self._last_clean_block = CleanBlock(x, y, answers, agrees, outputs)
        return self._last_clean_block

    def _compute_outputs(self, x: Tensor) -> Tensor:
        return exact_outputs(self.fast_model or self.model, x)


def derive_block_seed(seed: int, attack_name: str, block_index: int) -> int:
    """Derive the seed of an attack on a block.

    Args:
        seed: The seed of the evaluation.
        attack_name: The attack's name.
        block_index: The block's number, from 0.

    Returns:
        A number below 2**31, which every attack implementation accepts as a seed.
    """
    return derive_seed(seed, f"attack {attack_name}", block_index) % 2**31
