"""The Trainer, and a callback that stops it."""

import deat


class StopWhenGood:
    """Ends training once the robust accuracy on held-out images passes a threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        """Print the epoch, and stop once the threshold is passed."""
        print(f"epoch {stats.epoch + 1}: k {stats.k}, robust {stats.val_robust:.1%}, {timing.train_seconds:.2f} s")
        if (stats.val_robust or 0) > self.threshold:
            trainer.stop()


def main() -> None:
    digits = deat.load_data("digits")
    config = deat.TrainConfig(epochs=12, batch_size=64, lr=0.05, peak=0.3, val_attack="pgd-20")
    model = deat.build_model("small", in_channels=1, image_size=8)
    trainer = deat.make_trainer(
        model, digits.train, val=0.1, threat="linf:0.15", config=config, callbacks=[StopWhenGood(0.6)]
    )
    result = trainer.fit()
    print(f"stopped after {len(result.history)} of {config.epochs} epochs")


if __name__ == "__main__":
    main()
