"""Make a classifier of yours robust: one call, any nn.Module, any data in [0, 1]."""

from torch import nn

import deat

digits = deat.load_data("digits")  # or tensors, a Dataset or a DataLoader of your own
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

threat = deat.Linf(0.1)
result = deat.fit(model, digits.train, method="m+deat", threat=threat, epochs=8, val=0.1, batch_size=64, lr=0.1)

for epoch in result.history:
    print(f"epoch {epoch.epoch + 1}: k {epoch.k}, natural {epoch.val_natural:.1%}, robust {epoch.val_robust:.1%}")
evaluation = deat.evaluate(result.load_best(), digits, threat=threat, attacks=["natural", "pgd-20"])
print(f"epoch {result.best.epoch + 1} was the best on held-out images; on test images: {evaluation}")
