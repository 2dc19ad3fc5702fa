"""The two rule sets: the paper as written, and the code that made its tables. Nothing else forks."""

from dataclasses import dataclass
from typing import Literal

from deat.core.moves import Probe
from deat.errors import unknown


@dataclass(frozen=True)
class Rules:
    """Where the paper and the authors' released code differ.

    released sums l_X in normalised space, from the last A for methods that craft (TRADES and MART: of the
    last batch only), lets k ramp until k * alpha reaches eps instead of stretching the step, keeps the
    random start in epochs with k = 0, stops Amata short of B and caps DEAT's own two criteria.
    """

    name: str
    stretch: float
    ramp: float
    noisy: bool
    amata_reaches_last: bool
    deat_d_cap: int | None
    deat_p_cap: int | None
    craft_probe: Literal["joint", "ascend"]
    space: Literal["pixel", "normalised"]
    clean_branch_over: Literal["epoch", "last_batch"]

    def probe(self, *, crafts: bool, clean_branch: bool = False) -> Probe:
        """The gradient that is measured, for a family of methods."""
        over = self.clean_branch_over if clean_branch else "epoch"
        return Probe(self.craft_probe if crafts else "joint", over, self.space)


PAPER = Rules(
    name="paper",
    stretch=1.0,
    ramp=0.0,
    noisy=False,
    amata_reaches_last=True,
    deat_d_cap=None,
    deat_p_cap=None,
    craft_probe="joint",
    space="pixel",
    clean_branch_over="epoch",
)
RELEASED = Rules(
    name="released",
    stretch=0.0,
    ramp=1.0,
    noisy=True,
    amata_reaches_last=False,
    deat_d_cap=4,
    deat_p_cap=3,
    craft_probe="ascend",
    space="normalised",
    clean_branch_over="last_batch",
)
RULES = {rules.name: rules for rules in (PAPER, RELEASED)}


def rules_named(rules: str | Rules) -> Rules:
    """A rule set by name."""
    if isinstance(rules, Rules):
        return rules
    if rules not in RULES:
        raise unknown("rule set", rules, RULES)
    return RULES[rules]
