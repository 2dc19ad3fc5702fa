"""The two rule sets: the paper as written, and the code that made its tables. Nothing else forks."""

from dataclasses import dataclass
from typing import Literal

from deat.core.moves import MagnitudeProbe
from deat.errors import unknown_name_error


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
    deat_d_max_steps: int | None
    deat_p_max_steps: int | None
    crafting_probe_move: Literal["joint", "ascend"]
    space: Literal["pixel", "normalised"]
    clean_branch_probe_over: Literal["epoch", "last_batch"]

    def probe(self, *, crafts: bool, clean_branch: bool = False) -> MagnitudeProbe:
        """The gradient that is measured, for a family of methods."""
        over = self.clean_branch_probe_over if clean_branch else "epoch"
        return MagnitudeProbe(self.crafting_probe_move if crafts else "joint", over, self.space)


PAPER_RULES = Rules(
    name="paper",
    stretch=1.0,
    ramp=0.0,
    noisy=False,
    amata_reaches_last=True,
    deat_d_max_steps=None,
    deat_p_max_steps=None,
    crafting_probe_move="joint",
    space="pixel",
    clean_branch_probe_over="epoch",
)
RELEASED_RULES = Rules(
    name="released",
    stretch=0.0,
    ramp=1.0,
    noisy=True,
    amata_reaches_last=False,
    deat_d_max_steps=4,
    deat_p_max_steps=3,
    crafting_probe_move="ascend",
    space="normalised",
    clean_branch_probe_over="last_batch",
)
RULE_SETS = {rules.name: rules for rules in (PAPER_RULES, RELEASED_RULES)}


def get_rules(rules: str | Rules) -> Rules:
    """A rule set by name."""
    if isinstance(rules, Rules):
        return rules
    if rules not in RULE_SETS:
        raise unknown_name_error("rule set", rules, RULE_SETS)
    return RULE_SETS[rules]
