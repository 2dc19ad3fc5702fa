"""Classification of a block of images under one attack. Every adversarial example is verified and classified again here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deat.evaluation.attacks import is_correct, is_natural
from deat.evaluation.fast_model import CountingModel, FastModel, choose_attack_precision, exact_float32, full_precision
from deat.threat import ThreatModel
from deat.utils.seeding import derive_seed
from deat.utils.torch_utils import broadcast_mask, device_of, eval_mode

AGREEMENT_IMAGES = 128
"""Images of a block on which the logits of the fast model are compared with the exact ones."""


class AttackLike(Protocol):
    """What `deat.evaluate` accepts as an attack: a callable with a name that returns adversarial images.

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
            x: Images in [0, 1], (B, C, H, W) float32, all classified correctly. A copy, which may be overwritten.
            y: Their labels, (B,) int64.
            threat: The threat model. An image outside its ball or outside [0, 1] counts as not attacked.
            generator: Source of the attack's random numbers, seeded for this attack and block.

        Returns:
            Images with the shape and dtype of `x`.
        """


@dataclass(frozen=True)
class BlockResult:
    """The result of an attack, or of one stage of an attack, on one block of images.

    Attributes:
        correct: For each image, whether it is still classified correctly.
        invalid: How many adversarial examples were outside the ball or the box or not finite.
        seconds: How long it took.
        forwards: Images passed forward through the model.
        backwards: Images passed backward through it.
        felled: How many images each stage fooled, by its name; empty for an attack without stages.
    """

    correct: list[bool]
    invalid: int
    seconds: float
    forwards: int
    backwards: int
    felled: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_stages(cls, stages: "Sequence[BlockResult]") -> "BlockResult":
        """Combine the results of an attack's stages on one block, in their order."""
        return cls(correct=stages[-1].correct, **sum_counts(stages))


def sum_counts(results: Iterable[BlockResult]) -> dict[str, Any]:
    """Sum up every field of some results but `correct`.

    Args:
        results: Results of stages of an attack, or of blocks of images.

    Returns:
        The sums, by the name of the field.
    """
    results = list(results)
    felled: dict[str, int] = {}
    for result in results:
        for name, count in result.felled.items():
            felled[name] = felled.get(name, 0) + count
    names = ("invalid", "seconds", "forwards", "backwards")
    return {name: sum(getattr(result, name) for result in results) for name in names} | {"felled": felled}


def get_stages(attack: AttackLike) -> tuple[AttackLike, ...]:
    """Return the stages of an attack, which is its own only stage if it names none."""
    stages: tuple[AttackLike, ...] = getattr(attack, "stages", (attack,))
    return stages


class CleanBlock(NamedTuple):
    """A block without attack: which images are classified correctly, and whether attacks may use the fast model."""

    x: Tensor
    y: Tensor
    correct: Tensor
    fast_model_agrees: bool


class Judge:
    """Classifies blocks of images under attack.

    A result depends only on the model, the seed, the attack, the block and the precision of the attacks. Adversarial
    examples are verified (inside the ball, inside [0, 1], finite) and classified by the exact model in float32,
    whatever model the attack was given. Images that are misclassified without attack are not attacked.

    Args:
        model: The model to evaluate.
        threat: The threat model.
        seed: The seed of the attacks' random draws.
        precision: What attacks compute in: "auto", "fp32", "tf32", "bf16" or "fp16".
        engine: How attacks run the model on a GPU: "eager", "graph" or "compile".

    Raises:
        UsageError: The precision is unknown, or needs a CUDA device and the model is on the CPU.

    Example:
        >>> judge = Judge(model, deat.Linf(8 / 255), seed=0)
        >>> judge.judge_block(deat.Attack("pgd-20", steps=20), images, labels, block_index=0).correct
        [True, False, ...]
    """

    def __init__(
        self, model: nn.Module, threat: ThreatModel, seed: int, precision: str = "fp32", engine: str = "graph"
    ) -> None:
        self.model, self.threat, self.seed = CountingModel(model), threat, seed
        self.precision = choose_attack_precision(precision, device_of(model))
        self.fast_model = None if self.precision == "fp32" else FastModel(model, self.model, self.precision, engine)
        self._last_clean_block: CleanBlock | None = None

    def judge_block(
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
            still_correct = clean.correct.clone()
            passes_before = self.count_passes()
            if survivors is not None:
                still_correct &= torch.tensor(survivors, device=x.device)
            num_attacked = int(still_correct.sum())
            seed = derive_block_seed(self.seed, attack.name, block_index)
            invalid = self._attack_survivors(stage or attack, clean, seed, still_correct)
            correct = still_correct.tolist()
        forwards, backwards = (after - before for after, before in zip(self.count_passes(), passes_before, strict=True))
        if is_natural(attack):
            forwards += len(x)  # the clean classification, which all attacks on the block share
        felled = {stage.name: num_attacked - sum(correct)} if stage else {}
        return BlockResult(correct, invalid, perf_counter() - started, forwards, backwards, felled)

    def count_passes(self) -> tuple[int, int]:
        """Return how many images have passed forward and backward so far, through the exact and the fast model."""
        forwards, backwards = self.model.forwards, self.model.backwards
        if self.fast_model is None:
            return forwards, backwards
        return forwards + self.fast_model.forwards, backwards + self.fast_model.backwards

    def _attack_survivors(self, attack: AttackLike, clean: CleanBlock, seed: int, still_correct: Tensor) -> int:
        """Clear the entries of `still_correct` whose images the attack fools; return the number of invalid examples."""
        if is_natural(attack):
            return 0
        index = still_correct.nonzero().squeeze(1)
        if len(index) == 0:
            return 0
        x, y = clean.x[index], clean.y[index]
        generator = torch.Generator(x.device).manual_seed(seed)
        fast_model = self.fast_model if clean.fast_model_agrees else None
        with full_precision(tf32=fast_model is not None):
            # Copies, because an attack may overwrite its input, and its examples are compared with the original.
            adv = attack(fast_model or self.model, x.clone(), y.clone(), self.threat, generator).detach()
        self.model.eval()  # the attack may have changed the mode
        if adv.shape != x.shape or adv.dtype != x.dtype:
            return len(index)
        valid = self.threat.contains(x, adv)
        still_correct[index] = self._classify(torch.where(broadcast_mask(valid, x), adv, x), y)
        return int((~valid).sum())

    def _evaluate_clean(self, x: Tensor, y: Tensor) -> CleanBlock:
        """Classify a block without attack; the last block is kept, because all attacks on it need it."""
        last = self._last_clean_block
        if last is not None and last.x is x and last.y is y:
            return last
        correct = self._classify(x, y)
        agrees = self.fast_model is not None and self.fast_model.matches_exact(x[:AGREEMENT_IMAGES])
        self._last_clean_block = CleanBlock(x, y, correct, agrees)
        return self._last_clean_block

    def _classify(self, x: Tensor, y: Tensor) -> Tensor:
        if self.fast_model is not None:
            return self.fast_model.exact_correct(x, y)
        with torch.no_grad():
            return is_correct(self.model(x), y)


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
