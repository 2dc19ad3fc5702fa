"""A training loop of your own: a threat model, a method's play and schedule, and the game that plays a batch."""

import torch

import deat

EPOCHS = 6
digits, threat = deat.load_data("digits"), deat.Linf(0.15)
batches = deat.as_source(digits.train, batch_size=64)
model = deat.build_model("small", in_channels=1, image_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def clip(*_: object) -> None:
    """Clip gradients. A play steps the weights by itself, so what is done before a step is a hook of the optimizer."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)


optimizer.register_step_pre_hook(clip)

method = deat.get_method("m+deat")
game = deat.Game(model, deat.Objective(model, method.objective), threat, method.attack, optimizer, probe=method.probe)
schedule = method.bind(threat, EPOCHS)
state = schedule.init()

for epoch in range(EPOCHS):
    budget = schedule.budget(state, epoch)
    game.meter.reset()
    for x, y in batches.epoch(epoch):
        method.play(game, x, y, budget)  # your logging or EMA goes around this line
    record = game.meter.read(epoch)  # the one host read
    state = schedule.observe(state, record)
    print(f"epoch {epoch + 1}: k {budget.k}, l_X {record.magnitude:.0f}, loss {record.loss:.3f}")
