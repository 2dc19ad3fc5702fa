"""The adversarial examples of an evaluation and the model's answers to them, kept on request."""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from deat.errors import UsageError


class AdversarialExamples:
    """Keeps what `deat.evaluate` attacks a model with, and what the model answers.

    Pass an empty one as `examples=`. For each attack it then has one example for each image, in the order of the data,
    on the CPU: the image that the verdict is about. An image that the model gets wrong without attack is not attacked,
    and an example outside the threat model does not count; there the example is the clean image. All examples stay in
    memory: as many float32 images as the data has, for each attack.

    Attributes:
        images: The examples by attack, "natural" for the clean images if that is among the attacks.
        outputs: The model's outputs for them, such as logits, by attack.

    Example:
        >>> examples = deat.AdversarialExamples()
        >>> evaluation = deat.evaluate(model, test, threat="linf:8/255", attacks=["natural", "pgd-20"], examples=examples)
        >>> examples.images["pgd-20"].shape, examples.predictions["pgd-20"][:3]
        (torch.Size([10000, 3, 32, 32]), tensor([3, 8, 0]))
    """

    def __init__(self) -> None:
        self._blocks: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been kept yet."""
        return not self._blocks

    @cached_property
    def images(self) -> Mapping[str, Tensor]:
        """The examples by attack."""
        return {name: torch.cat([blocks[i][0] for i in sorted(blocks)]) for name, blocks in self._blocks.items()}

    @cached_property
    def outputs(self) -> Mapping[str, Tensor]:
        """The model's outputs by attack."""
        return {name: torch.cat([blocks[i][1] for i in sorted(blocks)]) for name, blocks in self._blocks.items()}

    @property
    def predictions(self) -> Mapping[str, Tensor]:
        """The class with the largest output for each example, by attack."""
        one_logit = {name: o.dim() == 1 or o.shape[1] == 1 for name, o in self.outputs.items()}
        return {name: (o.flatten() > 0).long() if one_logit[name] else o.argmax(1) for name, o in self.outputs.items()}

    def add(self, attack: str, block: int, images: Tensor, outputs: Tensor, rows: Tensor | None = None) -> None:
        """Keep the examples of a block.

        Args:
            attack: The attack's name.
            block: The block's number.
            images: The examples.
            outputs: The model's outputs for them.
            rows: Which of the block's examples to replace, for a later stage of an attack; None for the whole block.
        """
        blocks = self._blocks.setdefault(attack, {})
        if rows is None:
            blocks[block] = images.cpu().clone(), outputs.cpu().clone()
            return
        for stored, new in zip(blocks[block], (images, outputs), strict=True):
            stored[rows.cpu()] = new.cpu().to(stored.dtype)

    def has(self, attack: str, block: int) -> bool:
        """Return whether a block of an attack was kept.

        Args:
            attack: The attack's name.
            block: The number of the block, from 0.
        """
        return block in self._blocks.get(attack, {})


def check_examples(examples: object, *, has_resume_log: bool, num_processes: int, num_balls: int) -> None:
    """Check that examples can be kept in an evaluation.

    Raises:
        UsageError: It is no empty AdversarialExamples, or results may come from elsewhere.
    """
    if examples is None:
        return
    if not isinstance(examples, AdversarialExamples):
        raise UsageError(f"examples is {examples!r}; pass an empty deat.AdversarialExamples(), which is filled.")
    if not examples.is_empty:
        raise UsageError("examples has those of another evaluation already: pass a new deat.AdversarialExamples().")
    if has_resume_log:
        raise UsageError(
            "examples cannot be kept with resume_log: results in the log have none. Leave one of them out."
        )
    if num_processes > 1:
        raise UsageError(
            "examples are kept by a single process; each of several would have a part. Leave distributed out."
        )
    if num_balls > 1:
        raise UsageError(
            "examples are those of one ball, and this threat model is a union: evaluate each ball on its own, as in "
            "for ball in threat.balls."
        )
