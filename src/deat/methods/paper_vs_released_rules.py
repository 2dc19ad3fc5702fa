"""The rule sets: deat's own, the paper's text to the letter, and the code that made the paper's tables.

A rule set is data. Methods are built from it, and nothing else depends on it.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from deat.core.inner_attack import InnerAttack
from deat.core.magnitude_probe import MagnitudeProbe
from deat.errors import unknown_name_error


@dataclass(frozen=True)
class RuleSet:
    """How methods are built where the paper's text and the authors' released code differ.

    `literal` is the text: M+ has a fixed step size and no largest k (Algorithm 1). `default` adds two safeguards to it:
    for methods that craft, the k steps of M+ are long enough to cross the ball, and k has a largest value. `released` is
    the code that made the paper's tables: it sums l_X in normalised space, from the last A for methods that craft
    (TRADES and MART: of the last batch only), lets k ramp until k * alpha reaches eps, keeps the random start in epochs
    with k = 0, limits a carried delta by eps alone, stops Amata short of B and caps k in DEAT-d and DEAT-p%.

    Args:
        name: "default", "literal" or "released".
        caps_mplus: M+ raises k to the method's own number of steps at most.
        stretch_eps: Length that the k steps of M+ must be able to cover, in units of eps.
        ramp_eps: M+ raises k until k * alpha reaches this length, in units of eps.
        random_start_at_k0: Keep the random start in epochs with k = 0.
        carries_outside_box: A carried delta is limited by eps alone, and the image is clamped to [0, 1] instead.
        amata_reaches_last: Amata reaches B in its last epoch.
        deat_d_max_steps: Largest k of DEAT-d; None for no limit.
        deat_p_max_steps: Largest k of DEAT-p%; None for no limit.
        crafting_probe_move: Move that l_X is measured in, for methods that craft before they update.
        probe_space: Space that l_X is measured in.
        clean_branch_probe_over: What l_X is summed over, for methods with a clean branch (TRADES and MART).
    """

    name: str
    caps_mplus: bool
    stretch_eps: float
    ramp_eps: float
    random_start_at_k0: bool
    carries_outside_box: bool
    amata_reaches_last: bool
    deat_d_max_steps: int | None
    deat_p_max_steps: int | None
    crafting_probe_move: Literal["joint", "ascend"]
    probe_space: Literal["pixel", "normalised"]
    clean_branch_probe_over: Literal["epoch", "last_batch"]

    def make_attack(self, **settings: Any) -> InnerAttack:
        """Build the attack of a method.

        Args:
            **settings: Settings of `InnerAttack`.

        Returns:
            The attack, with the differences of this rule set.
        """
        own = {name: getattr(self, name) for name in ("random_start_at_k0", "carries_outside_box")}
        return InnerAttack(**{**own, **settings})

    def make_probe(self, *, crafts: bool, clean_branch: bool = False) -> MagnitudeProbe:
        """Build the probe of a family of methods.

        Args:
            crafts: The method finishes delta before it updates the weights.
            clean_branch: Its loss also has a term on the clean images, as TRADES and MART.

        Returns:
            The probe: which gradient is the magnitude l_X.
        """
        over = self.clean_branch_probe_over if clean_branch else "epoch"
        return MagnitudeProbe(self.crafting_probe_move if crafts else "joint", over, self.probe_space)


DEFAULT_RULES = RuleSet(
    name="default",
    caps_mplus=True,
    stretch_eps=1.0,
    ramp_eps=0.0,
    random_start_at_k0=False,
    carries_outside_box=False,
    amata_reaches_last=True,
    deat_d_max_steps=None,
    deat_p_max_steps=None,
    crafting_probe_move="joint",
    probe_space="pixel",
    clean_branch_probe_over="epoch",
)
LITERAL_RULES = replace(DEFAULT_RULES, name="literal", caps_mplus=False, stretch_eps=0.0)
RELEASED_RULES = RuleSet(
    name="released",
    caps_mplus=True,
    stretch_eps=0.0,
    ramp_eps=1.0,
    random_start_at_k0=True,
    carries_outside_box=True,
    amata_reaches_last=False,
    deat_d_max_steps=4,
    deat_p_max_steps=3,
    crafting_probe_move="ascend",
    probe_space="normalised",
    clean_branch_probe_over="last_batch",
)
RULE_SETS = {rules.name: rules for rules in (DEFAULT_RULES, LITERAL_RULES, RELEASED_RULES)}
CURRENT_RULE_SET_NAMES = {"paper": "default"}
"""Rule sets by the names that older records have for them."""


def get_rule_set(rules: str | RuleSet) -> RuleSet:
    """Return the rule set of a name.

    Args:
        rules: "default", "literal", "released" or a rule set, which is returned as it is.

    Returns:
        The rule set.

    Raises:
        UsageError: If no rule set has this name.
    """
    if isinstance(rules, RuleSet):
        return rules
    if rules not in RULE_SETS:
        raise unknown_name_error("rule set", rules, RULE_SETS)
    return RULE_SETS[rules]
