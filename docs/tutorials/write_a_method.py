# %% [markdown]
# # Write a method
#
# A training method is a declaration of a few lines: how a batch is played, how many attack steps
# an epoch takes, what the attack maximises and what training minimises. This page writes one,
# trains it, and compares it at equal cost.

# %%
from dataclasses import dataclass

import torch

import deat
from deat.attack_schedules import EpochRecord, Fixed, Schedule, ScheduleState

# %% [markdown]
# ## What a method consists of

# %%
deat.get_method("m+deat")

# %% [markdown]
# `Craft` completes the attack before the weights move, as PGD training does. `Replay` moves both
# at once, as FREE and DEAT do. An attack with `alpha_eps=0.5` takes steps of half the radius.
#
# ## A method in one line

# %%
BOLD = deat.Method("bold-2", deat.Craft(), Fixed(k=2, alpha_eps=0.75), summary="two long steps")
digits = deat.load_data("digits")
settings = {"epochs": 6, "val": 0.1, "batch_size": 64, "lr": 0.05, "progress": False}


def train(method: str | deat.Method) -> deat.TrainResult:
    torch.manual_seed(0)
    return deat.fit(deat.build_model("small", in_channels=1, image_size=8), digits, method=method, **settings)


bold = train(BOLD)
bold

# %% [markdown]
# ## A schedule of your own
#
# A schedule chooses k for every epoch. It is a frozen rule whose state is a JSON value, so that
# training can be interrupted and resumed exactly. This one adds a step whenever training accuracy
# under attack rises by less than ten points.


# %%
@dataclass(frozen=True, kw_only=True)
class WhenStalled(Schedule):
    """Add a step of the attack after each epoch in which training accuracy hardly rises."""

    least_rise: float = 0.1

    def init(self) -> ScheduleState:
        return {"k": 1, "accuracy": 0.0}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        return int(state["k"])

    def observe(self, state: ScheduleState, record: EpochRecord) -> ScheduleState:
        has_stalled = record.accuracy - state["accuracy"] < self.least_rise
        return {"k": state["k"] + has_stalled, "accuracy": record.accuracy}


STALLED = deat.Method("stalled", deat.Replay(), WhenStalled(alpha_eps=1.0), summary="replays that grow when stalled")
stalled = train(STALLED)
print([stats.k for stats in stalled.history])

# %% [markdown]
# ## Compare at equal cost
#
# Methods cost differently, so a table without cost says little. A backprop is one forward and
# backward pass of a batch.

# %%
attacks = ["natural", "pgd-20"]
results = {"free-3": train("free-3"), "m+deat": train("m+deat"), "bold-2": bold, "stalled": stalled}
print("method    backprops  natural  PGD-20")
for name, result in results.items():
    scores = deat.evaluate(result.load_best(), digits, attacks=attacks, progress=False).accuracy
    print(f"{name:9} {result.history[-1].backprops:9,}  {scores['natural']:7.1%}  {scores['pgd-20']:6.1%}")

# %% [markdown]
# One seed on a small data set shows that a method works, not which one is better. `deat bench`
# runs a grid of methods and seeds and reports intervals: [Compare
# methods](../compare-methods.md).
#
# ## Give it a name
#
# A registered method composes with the prefixes, and other people's scripts can name it. On the
# command line a file is enough: `deat train --method my_method.py:STALLED`.


# %%
@deat.register_method("bold-K", "f+")
def bold_method(k: int = 2) -> deat.Method:
    """PGD with k long steps."""
    return deat.Method("bold", deat.Craft(), Fixed(k=k, alpha_eps=0.75))


deat.get_method("f+bold-3")

# %% [markdown]
# Plays of your own, and more about schedules: [Own plays and
# schedules](../own-plays-and-schedules.md). Losses, attacks, tasks and models:
# [Extend](../extend.md).
