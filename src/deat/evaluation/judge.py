"""The judge distrusts everyone: every adversarial example is verified and classified again, apart from its attack."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deat.evaluation.attacks import is_correct, is_natural
from deat.evaluation.fast_model import FastModel, choose_attack_precision, exact_float32, full_precision
from deat.threat import ThreatModel
from deat.utils.seeding import derive_seed
from deat.utils.torch_utils import broadcast_mask, device_of, eval_mode

AGREEMENT_IMAGES = 128
"""Images of a block on which a quick twin shows whether it may be asked."""


class AttackLike(Protocol):
    """Anything that is called with (model, x, y, threat, generator) and answers with images.

    One that has `stages`, attackers that follow each other, is judged stage by stage, survivors going on.
    """

    @property
    def name(self) -> str:
        """What it is called in a table."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator | None = None
    ) -> Tensor:
        """The adversarial images."""


@dataclass(frozen=True)
class BlockResult:
    """What an attack, or a stage of one, left of a block: which images are still correct, and what it took to find out.

    felled counts whom each stage fooled, for an attack of several.
    """

    correct: list[bool]
    invalid: int
    seconds: float
    forwards: int
    backwards: int
    felled: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: "Sequence[BlockResult]") -> "BlockResult":
        """An attack's ruling, from those of its stages one after the other."""
        felled = {name: count for stage in stages for name, count in stage.felled.items()}
        sums = [sum(getattr(stage, name) for stage in stages) for name in ("invalid", "forwards", "backwards")]
        invalid, forwards, backwards = sums
        return cls(stages[-1].correct, invalid, sum(s.seconds for s in stages), forwards, backwards, felled)


def get_stages(attack: AttackLike) -> tuple[AttackLike, ...]:
    """What an attack consists of: itself, if it names no stages."""
    stages: tuple[AttackLike, ...] = getattr(attack, "stages", (attack,))
    return stages


class CleanBlock(NamedTuple):
    """A block without an attack: who is correct, and whether the quick twin may be asked about it."""

    x: Tensor
    y: Tensor
    correct: Tensor
    fast_model_agrees: bool


class Judge:
    """Rules on blocks of images. A ruling depends on model, seed, attack, block and the attacks' precision alone."""

    def __init__(
        self, model: nn.Module, threat: ThreatModel, seed: int, precision: str = "fp32", engine: str = "graph"
    ) -> None:
        self.model, self.threat, self.seed = CountingModel(model), threat, seed
        self.precision = choose_attack_precision(precision, device_of(model))
        self._last: CleanBlock | None = None
        self.quick = None if self.precision == "fp32" else FastModel(model, self.model, self.precision, engine)

    def rule(
        self,
        attack: AttackLike,
        x: Tensor,
        y: Tensor,
        block_index: int,
        survivors: list[bool] | None = None,
        stage: AttackLike | None = None,
    ) -> BlockResult:
        """The ruling on a block by an attack, or one stage of it; who is wrong already, or not alive, is left alone."""
        started = perf_counter()
        with exact_float32(x.device), eval_mode(self.model):
            clean = self._evaluate_clean(x, y)
            stands = clean.correct.clone()
            before = self.count_passes()
            if survivors is not None:
                stands &= torch.tensor(survivors, device=x.device)
            had = int(stands.sum())
            seed = derive_block_seed(self.seed, attack.name, block_index)
            invalid = self._attack(stage or attack, clean, seed, stands)
            correct = stands.tolist()
        forwards, backwards = (now - then for now, then in zip(self.count_passes(), before, strict=True))
        asked = len(x) if is_natural(attack) else 0  # which the other attacks share
        felled = {stage.name: had - sum(correct)} if stage else {}
        return BlockResult(correct, invalid, perf_counter() - started, asked + forwards, backwards, felled)

    def count_passes(self) -> tuple[int, int]:
        """Images passed so far, forward and backward, through the model and its twin."""
        forwards, backwards = self.model.forwards, self.model.backwards
        if self.quick is None:
            return forwards, backwards
        return forwards + self.quick.forwards, backwards + self.quick.backwards

    def _attack(self, attack: AttackLike, clean: CleanBlock, seed: int, still_correct: Tensor) -> int:
        """Strike out of `stands` whom an attack fools; how many examples were not allowed."""
        if is_natural(attack):
            return 0
        index = still_correct.nonzero().squeeze(1)
        if len(index) == 0:
            return 0
        x, y = clean.x[index], clean.y[index]
        generator = torch.Generator(x.device).manual_seed(seed)
        quick = self.quick if clean.fast_model_agrees else None
        with full_precision(tf32=quick is not None):
            # Copies: an attack may write into what it is given, and is judged by the images as they were.
            found = attack(quick or self.model, x.clone(), y.clone(), self.threat, generator).detach()
        self.model.eval()  # whatever mode the attack left it in
        if found.shape != x.shape or found.dtype != x.dtype:
            return len(index)
        valid = self.threat.contains(x, found)
        still_correct[index] = self._classify(torch.where(broadcast_mask(valid, x), found, x), y)
        return int((~valid).sum())

    def _evaluate_clean(self, x: Tensor, y: Tensor) -> CleanBlock:
        """The block without an attack; every attack on it asks, so the last answer is kept."""
        if self._last is None or self._last.x is not x or self._last.y is not y:
            correct = self._classify(x, y)
            self._last = CleanBlock(
                x, y, correct, self.quick is not None and self.quick.matches_exact(x[:AGREEMENT_IMAGES])
            )
        return self._last

    def _classify(self, x: Tensor, y: Tensor) -> Tensor:
        if self.quick is not None:
            return self.quick.surely_correct(x, y)
        with torch.no_grad():
            return is_correct(self.model(x), y)


class CountingModel(nn.Module):
    """A model that counts the images which pass through it, forward and backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.forwards = self.backwards = 0
        self.training = net.training  # not train(), which would reach into the net

    def forward(self, x: Tensor) -> Tensor:
        """The model's logits."""
        self.forwards += len(x)
        logits: Tensor = self.net(x)
        if logits.requires_grad:
            logits.register_hook(self._count_backward)  # type: ignore[no-untyped-call]
        return logits

    def _count_backward(self, grad: Tensor) -> None:
        self.backwards += len(grad)


def derive_block_seed(seed: int, attack_name: str, block_index: int) -> int:
    """The seed of an attack on a block: below 2**31, which every implementation accepts."""
    return derive_seed(seed, f"attack {attack_name}", block_index) % 2**31
