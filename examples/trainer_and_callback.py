"""The Trainer: callbacks between epochs, and a state to stop and go on from."""

import deat


class StopWhenGood:
    """Ends training once validation robustness passes a mark."""

    def __init__(self, mark: float) -> None:
        self.mark = mark

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: deat.EpochTiming) -> None:
        """Shorten the run when the mark is passed."""
        print(f"epoch {stats.epoch + 1}: k {stats.k}, robust {stats.val_robust:.1%}, {timing.train_seconds:.2f} s")
        if (stats.val_robust or 0) > self.mark:
            trainer.stop()


def main() -> None:
    digits = deat.load_data("digits")
    settings = deat.TrainConfig(epochs=12, batch_size=64, lr=0.05, peak=0.3, val_attack="pgd-20")
    model = deat.build_model("small", in_channels=1, image_size=8)
    trainer = deat.make_trainer(
        model, digits.train, val=0.1, threat="linf:0.15", config=settings, callbacks=[StopWhenGood(0.6)]
    )
    result = trainer.fit()
    print(f"stopped after {len(result.history)} of {settings.epochs} epochs")


if __name__ == "__main__":
    main()
