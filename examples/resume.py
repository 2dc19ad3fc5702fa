"""Checkpoints: a training that is interrupted and resumed ends with the same bits as an uninterrupted one."""

import tempfile

import torch

import deat
from deat.errors import Interrupted


class InterruptAfterThirdEpoch(deat.Callback):
    """Interrupts training after an epoch, as Ctrl-C or SIGTERM do."""

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        """Print the epoch, and interrupt after the third one."""
        print(f"epoch {stats.epoch + 1}: k {stats.k}, loss {stats.loss:.4f}")
        if stats.epoch == 2:
            trainer.interruption.request("the machine is needed")


def train(folder: str | None, *callbacks: deat.Callback) -> deat.TrainResult:
    torch.manual_seed(0)  # the first weights; once there is a checkpoint it has them
    model = deat.build_model("small", in_channels=1, image_size=8)
    digits = deat.load_data("digits")
    return deat.fit(
        model,
        digits,
        epochs=5,
        batch_size=64,
        lr=0.05,
        val=0.1,
        val_attack="pgd-5",
        callbacks=callbacks,
        checkpoints=folder,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(folder, InterruptAfterThirdEpoch())
        except Interrupted as error:
            print(error)
        resumed = train(folder)  # the same call
    straight = train(None)
    pairs = zip(resumed.model.parameters(), straight.model.parameters(), strict=True)
    print(f"the same weights: {all(torch.equal(a, b) for a, b in pairs)}")
    print(f"the same history: {resumed.history == straight.history}")
    assert resumed.history == straight.history


if __name__ == "__main__":
    main()
