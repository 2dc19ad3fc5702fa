# %% [markdown]
# # Read an evaluation
#
# A robust accuracy is the share of images that no attack of a list could fool. It is an upper
# bound: a stronger attack may find more. This page shows what deat reports besides the number,
# and how it flags a number that should not be trusted.

# %%
import torch
from torch import nn

import deat

digits = deat.load_data("digits")
threat = deat.Linf(0.15)
model = deat.build_model("small", in_channels=1, image_size=8)
settings = {"epochs": 6, "val": 0.1, "batch_size": 64, "lr": 0.05, "progress": False}
model = deat.fit(model, digits, method="m+deat", threat=threat, **settings).load_best()

# %% [markdown]
# ## Attacks, intervals and the worst of all
#
# Each row is one attack. The interval says how far the number may be from that on infinitely many
# images (95 %). `worst` counts an image only if it withstood every attack: this is the number to
# report.

# %%
attacks = ["natural", "fgsm", "pgd-20", "cw-20"]
evaluation = deat.evaluate(model, digits, threat=threat, attacks=attacks, n=200, progress=False)
evaluation

# %% [markdown]
# Which attack was the first to fool an image shows which attacks matter:

# %%
evaluation.newly_fooled

# %% [markdown]
# ## Single images
#
# The verdicts are kept image by image, so that two models can be compared on the same images and
# weak classes can be found.

# %%
evaluation.to_pandas(per_image=True).groupby("class")["worst"].mean()

# %% [markdown]
# ## Compare two models on the same images
#
# Intervals of two models may overlap although one is better: both were attacked on the same
# images, so compare pairs.

# %%
other = deat.build_model("small", in_channels=1, image_size=8)
other = deat.fit(other, digits, method="fgsm", threat=threat, **settings).load_best()
rival = deat.evaluate(other, digits, threat=threat, attacks=attacks, n=200, progress=False)
pairs = list(zip(evaluation.verdicts["worst"], rival.verdicts["worst"], strict=True))
print("only M+DEAT stands:", pairs.count((True, False)), "  only FGSM stands:", pairs.count((False, True)))

# %% [markdown]
# ## When not to believe a number
#
# A network can hide its gradient instead of being robust. Here naturally trained weights answer
# through a rounding of the pixels, which has no gradient: attacks by gradient fail, and the accuracy
# looks high.


# %%
class Rounded(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * 8).round() / 8)


weak = deat.fit(
    deat.build_model("small", in_channels=1, image_size=8), digits, method="natural", **settings
).load_best()
masked = deat.evaluate(Rounded(weak), digits, threat=threat, attacks=["natural", "pgd-20"], n=200, progress=False)
masked

# %% [markdown]
# The lines above the table are flags: what was seen, and what to do. An evaluation without flags
# and with strong attacks can be trusted; one with flags cannot, however good its numbers look.
# [Evaluate](../evaluation.md) lists every check.

# %%
for flag in masked.flags:
    print(flag.name, "-", flag.advice)
