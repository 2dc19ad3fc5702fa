"""Flags: reasons not to trust an accuracy under attack, each with advice and a link into the documentation."""

from dataclasses import dataclass

DOCS_PAGE = "docs/evaluation.md"
FLAG_ADVICE = {
    "not_finite": (
        "The weights are damaged or the model overflows, so no accuracy means anything. Load other weights or train "
        "again."
    ),
    "training_mode": (
        "Make model.eval() reach every layer: in training mode outputs depend on the batch or on random numbers."
    ),
    "probabilities": "Return logits: with a softmax or a sigmoid before the loss, gradient attacks get almost no gradient.",
    "randomised": (
        "Switch dropout and noise off, or average over them inside the model: single random outputs mislead attacks."
    ),
    "batch_dependent": (
        "Make the output for an example independent of the batch, for example with running statistics in batch norms. "
        "Otherwise the accuracy depends on --block."
    ),
    "remembers": (
        "The model keeps what it was asked, or changes with the number of questions, so that attacks on it and its "
        "accuracy mean little. Make each answer depend on its example alone."
    ),
    "at_chance": (
        "The model is no better than a constant answer. If deat trained it, train longer, with another --lr or with a "
        "smaller --eps. Otherwise check the input range that it expects (deat gives inputs in the threat "
        "model's box, which is [0, 1] for images), its normalisation and the order of classes, or the unit of targets."
    ),
    "zero_gradients": (
        "Rounding, saturation or scaling removes the gradient. Attack the model without that part, or with a smooth "
        "replacement."
    ),
    "autograd_inside": "The model adapts to each input. Evaluate it with attacks made for such defences.",
    "invalid_examples": "These examples counted as no attack. Repair the attack.",
    "one_sided_sample": "The data is sorted by class. Shuffle it, or evaluate all of it.",
    "one_step_wins": (
        "Gradients mislead the attack with more steps. Use restarts, another loss or AutoAttack before you trust the "
        "accuracy."
    ),
    "one_start_wins": "More restarts cannot weaken an attack. Repair the attack with restarts, or leave it out.",
    "ensemble_loses": (
        "AutoAttack should find whatever attacks like its parts find. It did not work on this model: do not report its "
        "accuracy."
    ),
    "black_box_wins": "Gradients are masked, so that gradient attacks report too high an accuracy. Find what masks them.",
    "noise_wins": "Gradients are masked and point in no useful direction. Find what masks them.",
    "not_converged": (
        "The attack has too few or too short steps. Increase its steps until the accuracy no longer changes."
    ),
    "not_monotone": (
        "A larger radius cannot weaken an attack, so the attack fails at some radii. Do not trust it at any radius."
    ),
    "robust_to_anything": "No classifier can resist such a radius. The attack does not work on this model.",
}
"""What to do about each flag, by its name."""


@dataclass(frozen=True)
class Flag:
    """A reason not to trust an evaluation.

    Attributes:
        name: The flag's name, such as "noise_wins".
        seen: What was observed, with numbers.
        advice: What it means and what to do.
    """

    name: str
    seen: str
    advice: str

    @property
    def link(self) -> str:
        """The place in the documentation that describes the flag."""
        return docs_link(self.name)

    @property
    def line(self) -> str:
        """The flag as one line of text."""
        return f"FLAG {self.name}: {self.seen}. {self.advice} ({self.link})"


def docs_link(name: str) -> str:
    """Return the place in the documentation that describes a flag.

    Example:
        >>> docs_link("noise_wins")
        'docs/evaluation.md#noise_wins'
    """
    return f"{DOCS_PAGE}#{name}"


def make_flag(name: str, seen: str) -> Flag:
    """Make a flag with the advice of its name.

    Args:
        name: A key of `FLAG_ADVICE`.
        seen: What was observed, with numbers, without a full stop.
    """
    return Flag(name, seen, FLAG_ADVICE[name])


def accuracy_tolerance(n: int) -> float:
    """Return by how much two accuracies on n images may differ without a flag: 0.5 points or 2 images."""
    return max(0.005, 2 / n) + 1e-9
