# %% [markdown]
# # Make your model robust
#
# You have a network in PyTorch and labelled images. At the end of this page you have the same
# network with weights that withstand small changes of the pixels, a number that says how well,
# and a file to deploy.
#
# The data here are the 8x8 digits that come with deat, so that everything runs in seconds on a
# CPU. Replace them by your own: a pair of tensors, a `Dataset`, a `DataLoader`, or
# `deat.load_data("folder:my-photos")`.

# %%
import torch
from torch import nn

import deat

digits = deat.load_data("digits")
digits

# %% [markdown]
# ## The network as it is
#
# Any `nn.Module` that returns logits will do. Images come in [0, 1]. First we train it as usual,
# which is the method `"natural"`, so that there is something to compare with.


# %%
def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


settings = {"epochs": 6, "val": 0.1, "batch_size": 64, "lr": 0.05, "progress": False}
natural = deat.fit(make_network(), digits, method="natural", **settings)
natural.history[-1].val_natural

# %% [markdown]
# ## What an attacker can do to it
#
# The attacker may change every pixel by at most 0.15, a radius at which a person still reads the
# digits. This is the threat model `Linf(0.15)`. PGD-20 searches for such changes with 20 gradient
# steps.

# %%
threat = deat.Linf(0.15)
before = deat.evaluate(natural.load_best(), digits, threat=threat, attacks=["natural", "pgd-20"], progress=False)
before

# %% [markdown]
# Clean accuracy is high, accuracy under attack is not. That is what training should change.
#
# ## Train robustly
#
# The same call with another method. `"m+deat"` is the default: it begins with clean images and
# lets the attack grow during training, as far as the gradient's magnitude asks for it. That costs
# a fraction of training against a full attack.

# %%
robust = deat.fit(make_network(), digits, method="m+deat", threat=threat, **settings)
robust

# %% [markdown]
# The columns: `k` is the number of steps of the attack, `l_X` the magnitude that decides about
# it, `backprops` the cost so far. Held-out images choose the best epoch; the test images have not
# been used.
#
# ## Judge it
#
# `deat.evaluate` without `attacks` uses the strong ones, with a check for the mistakes that make
# a weak model look good. Here two attacks are enough to compare.

# %%
model = robust.load_best()
after = deat.evaluate(model, digits, threat=threat, attacks=["natural", "pgd-20"], progress=False)
after

# %%
for name in ("natural", "pgd-20"):
    print(f"{name:8} before {before.accuracy[name]:.1%}   after {after.accuracy[name]:.1%}")

# %% [markdown]
# ## Fine-tune weights that you have
#
# A network that is already trained needs a smaller learning rate. The same function does it, in
# place.

# %%
tuned = deat.fit(natural.load_best(), digits, method="free-4", threat=threat, **{**settings, "lr": 0.01})
print(tuned.choice.reason)

# %% [markdown]
# ## Save and deploy
#
# `save` writes a folder with weights, history and settings, which `deat.load_run`, `deat
# evaluate` and `deat report` read. `export` writes a file that needs no deat, and checks that it
# answers as the network does.

# %%
robust.save("runs/my-robust-model")
deat.export(model, "robust.pt2", example=torch.rand(1, 1, 8, 8))

# %% [markdown]
# ## Next
#
# * [Read an evaluation](read_an_evaluation.md): what the number means, and when not to believe
#   it.
# * [Choose a method](../choose-a-method.md), [your own data](../your-data.md), [all options in
#   Python](../python.md).
