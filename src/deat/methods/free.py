"""FREE-m: replay each batch m times, updating delta and theta in every pass.

Idea: the pass that updates the weights yields delta's gradient for free. The word is `J^m`.
Citation: Shafahi et al., "Adversarial training for free!", NeurIPS 2019.
Settings: alpha eps (8/255), zero start, new for every batch as in the paper's benchmark; `persistent` carries
delta over batches, as the original does. Cost: m backprops a batch.
"""

from deat.core.inner_attack import InnerAttack
from deat.core.plays import Replay
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.registry import register_method
from deat.methods.rules import Rules
from deat.schedules import Fixed


@register_method("free-M")
def free(rules: Rules, m: int = 8) -> Method:
    """FREE with m replays."""
    if m < 1:
        raise UsageError(f"free-{m}: a batch is played at least once; use free-1 or more.")
    ascent = InnerAttack(start="zero", noisy=rules.noisy)
    probe = rules.probe(crafts=False)
    return Method("free", Replay(), Fixed(k=m - 1, alpha=1.0), ascent, probe=probe, summary="m replays of a batch")
