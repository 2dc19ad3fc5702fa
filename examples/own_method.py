"""Methods of your own: FREE from a Bernoulli start whose replays grow every two epochs, and PGD with larger steps.

A registered method has a name, composes with m+ and f+, and is listed. The command line needs no registration:
`deat train --method examples/own_method.py:GROWING`.
"""

import deat
from deat.attack_schedules import EveryEpochs, Fixed

GROWING = deat.Method(
    "growing-free", deat.Replay(), EveryEpochs(period=2, alpha_eps=1.0), deat.InnerAttack(start="bernoulli")
)


@deat.register_method("bold-K")
def bold(k: int = 3) -> deat.Method:
    """PGD with k steps of half the radius."""
    return deat.Method("bold", deat.Craft(), Fixed(k=k, alpha_eps=0.5))


if __name__ == "__main__":
    digits = deat.load_data("digits")
    for method in (GROWING, "bold-2", "m+bold", "f+bold-4"):
        model = deat.build_model("small", in_channels=1, image_size=8)
        result = deat.fit(model, digits.train, method=method, threat=deat.Linf(0.15), epochs=4, batch_size=64, lr=0.05)
        name = method if isinstance(method, str) else method.name
        print(f"{name}: k {[e.k for e in result.history]}, loss {result.history[-1].loss:.3f}")
