"""A reason not to believe a robust accuracy, with what to do about it and where to read on."""

from dataclasses import dataclass

DOCS_PAGE = "docs/evaluation.md"
FLAG_ADVICE = {
    "not_finite": (
        "The weights are broken, or the model overflows: no accuracy means anything. Load others, or train again."
    ),
    "training_mode": (
        "Make model.eval() reach every layer; in training mode answers depend on the batch or on chance."
    ),
    "probabilities": "Return logits; a softmax in front of the loss starves every gradient attack.",
    "randomised": (
        "Switch dropout and noise off, or average over them inside the model; single draws mislead every attack."
    ),
    "batch_dependent": (
        "Make an image's answer its own, such as by batch norms with running statistics: "
        "otherwise the number depends on --block."
    ),
    "at_chance": (
        "The model does not know these images. Trained here, it learned nothing: train longer, or with another --lr or "
        "a smaller --eps. From elsewhere: look at the range it expects, which is [0, 1] here, at its normalisation and "
        "at the order of the classes."
    ),
    "zero_gradients": (
        "Something rounds, saturates or scales the gradient away. Attack the model without it, or a smooth stand-in."
    ),
    "autograd_inside": "It adapts to each input; evaluate it with attacks that are built for such a defence.",
    "invalid_examples": ("They counted as no attack. Repair the attack: what it claims to break, it did not break."),
    "one_sided_sample": "The set is sorted by class. Shuffle it, or judge all of it.",
    "one_step_wins": (
        "Gradients mislead the longer attack. Use restarts, another loss or AutoAttack before you believe the number."
    ),
    "one_start_wins": "More starts cannot make an attack weaker. Repair the one with restarts, or leave it out.",
    "ensemble_loses": (
        "An ensemble should find what attacks like its own parts find. It did not work on this model: do not quote it."
    ),
    "black_box_wins": "Gradients are masked. Find what hides them; the white-box numbers are too high.",
    "noise_wins": "Gradients point nowhere. Find what masks them.",
    "not_converged": (
        "The attack stops too early, or its step is too small. Give it more steps until the number stays."
    ),
    "not_monotone": (
        "More room cannot make an attack weaker. The attack fails where it should win; do not trust it anywhere."
    ),
    "robust_to_anything": "No classifier can do that. The attack is not working against this model.",
}
"""What to do, by the name of the flag."""


@dataclass(frozen=True)
class Flag:
    """A reason not to believe the number: what was seen, what it means and what to do."""

    name: str
    seen: str
    advice: str

    @property
    def link(self) -> str:
        """Where the documentation tells of it."""
        return docs_link(self.name)

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"FLAG {self.name}: {self.seen}. {self.advice} ({self.link})"


def docs_link(name: str) -> str:
    """Where the documentation tells of the flag of that name."""
    return f"{DOCS_PAGE}#{name}"


def make_flag(name: str, seen: str) -> Flag:
    """The flag of that name, on what was seen."""
    return Flag(name, seen, FLAG_ADVICE[name])


def accuracy_tolerance(n: int) -> float:
    """How far two accuracies on n images may differ without meaning anything."""
    return max(0.005, 2 / n) + 1e-9
