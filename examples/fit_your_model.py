"""Make a classifier of yours robust: one call, any nn.Module, any data in [0, 1]."""

import torch
from torch import nn

import deat

digits = deat.load_data("digits")  # or tensors, a Dataset, a DataLoader of your own
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

result = deat.fit(model, digits.train, method="m+deat", threat=deat.Linf(0.1), epochs=8, val=0.1, batch_size=64, lr=0.1)

for epoch in result.history:
    print(f"epoch {epoch.epoch + 1}: k {epoch.k}, natural {epoch.val_natural:.1%}, robust {epoch.val_robust:.1%}")
with torch.no_grad():
    hits = result.load_best()(digits.test.images / 255).argmax(1) == digits.test.labels
print(f"best epoch {result.best.epoch + 1}, natural accuracy on test images {hits.float().mean():.1%}")
