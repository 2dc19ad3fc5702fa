"""Hugging Face transformers: a Trainer that trains image models with any method."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, parse_attack
from deat.methods import Method, get_method
from deat.models import LogitsModel, Normalize, add_normalization
from deat.threat import ThreatModel, parse_threat
from deat.training.adversarial_step import AdversarialStep

try:
    from transformers import Trainer, TrainerCallback

    from deat.integrations.accelerate import make_accelerate_engine
except ImportError:
    raise UsageError("transformers is not installed: pip install 'deat[transformers]'") from None

STATE_FILE = "adversarial_step.pt"


class AdversarialTrainer(Trainer):
    """A `transformers.Trainer` for image classifiers that trains with any method.

    Everything else is the Trainer's: arguments, schedulers, gradient clipping, mixed precision, several processes,
    logging, checkpoints and resuming. It steps the optimiser for the last update of each batch; earlier ones, in methods
    that replay a batch, are made inside.

    Args:
        method: The method, or its name.
        threat: The threat model, or its text.
        normalize: (mean, std) of the image processor. The processor must then leave its own normalisation out
            (`do_normalize=False`): the radius is in pixels of [0, 1].
        image_key: The name of the images in a batch.
        label_key: The name of the labels in a batch.
        *args: Arguments of `transformers.Trainer`.
        **kwargs: Arguments of `transformers.Trainer`.

    Raises:
        UsageError: A loss of the Trainer is asked for, such as label smoothing, or accumulated gradients.

    Example:
        >>> trainer = AdversarialTrainer(model, args, train_dataset=images, method="m+deat", threat="linf:4/255")
        >>> trainer.train()
        >>> trainer.evaluate_under_attack(test_images, attack="pgd-20")
    """

    def __init__(
        self,
        *args: Any,
        method: str | Method = "m+deat",
        threat: str | ThreatModel = "linf:4/255",
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        image_key: str = "pixel_values",
        label_key: str = "labels",
        **kwargs: Any,
    ) -> None:
        self.method, self.threat = get_method(method), parse_threat(threat)
        self.input_normalization = normalize
        self.image_key, self.label_key = image_key, label_key
        self._step: AdversarialStep | None = None
        self._step_state: dict[str, Any] | None = None
        self._attack: Attack | None = None
        super().__init__(*args, **kwargs)
        self._refuse_other_losses()
        self.add_callback(_EndOfEpoch(self))

    def _refuse_other_losses(self) -> None:
        """Refuse what would change the Trainer's own loss, which no method computes."""
        given = [f"label_smoothing_factor={self.args.label_smoothing_factor:g}"] if self.label_smoother else []
        given += ["compute_loss_func"] if getattr(self, "compute_loss_func", None) else []
        if given:
            raise UsageError(
                f"{' and '.join(given)} would be ignored: the method computes the loss. Leave it out, or give a method with "
                "a loss of its own."
            )

    def adversarial_step(self, model: nn.Module) -> AdversarialStep:
        """Return what trains on a batch, for the prepared model.

        Args:
            model: The network, as the Trainer prepared it.
        """
        if self._step is None:
            assert self.optimizer is not None, "the Trainer makes it before the first batch"
            self._step = AdversarialStep(
                model,
                self.optimizer,
                epochs=max(1, math.ceil(self.state.num_train_epochs or self.args.num_train_epochs)),
                method=self.method,
                threat=self.threat,
                normalize=self.input_normalization,
                engine=make_accelerate_engine(self.accelerator),
                seed=self.args.seed,
                leaves_last_update=True,
            )
            if self._step_state is not None:
                self._step.load_state_dict(self._step_state)
        return self._step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, as `transformers.Trainer.train` does."""
        self._step = self._step_state = None
        return super().train(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Play a batch, and leave the gradients of its last update to the Trainer."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        return self.adversarial_step(model)(inputs[self.image_key], inputs[self.label_key]).loss

    def evaluate_under_attack(
        self, eval_dataset: Any = None, *, attack: str | Attack = "pgd-10", metric_key_prefix: str = "eval_robust"
    ) -> dict[str, float]:
        """Evaluate on adversarial examples; `compute_metrics` and the loss are the Trainer's.

        Args:
            eval_dataset: The data; by default the Trainer's.
            attack: The attack.
            metric_key_prefix: How the names of the metrics begin.

        Returns:
            The metrics by name.
        """
        self._attack = parse_attack(attack)
        try:
            metrics: dict[str, float] = self.evaluate(eval_dataset, metric_key_prefix=metric_key_prefix)
        finally:
            self._attack = None
        return metrics

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Predict, on normalised images, and on adversarial ones inside `evaluate_under_attack`."""
        inputs = self._prepare_inputs(inputs)
        x = inputs[self.image_key]
        net = add_normalization(model, *self.input_normalization) if self.input_normalization else model
        if self._attack is not None:
            generator = torch.Generator(x.device).manual_seed(self.args.seed)
            wrapped = LogitsModel(net).to(x.device)
            x = self._attack(wrapped, x, inputs[self.label_key], self.threat, generator)
        if self.input_normalization:
            x = Normalize(*self.input_normalization).to(x.device)(x)
        return super().prediction_step(model, {**inputs, self.image_key: x}, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._step is not None and self.args.should_save:
            torch.save(self._step.state_dict(), Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (file := Path(checkpoint) / STATE_FILE).is_file():
            self._step_state = torch.load(file, map_location="cpu", weights_only=True)


class _EndOfEpoch(TrainerCallback):
    """Chooses the next epoch's number of attack steps, before the Trainer saves and evaluates."""

    def __init__(self, trainer: AdversarialTrainer) -> None:
        self.trainer = trainer

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the epoch, and log it."""
        step = self.trainer._step
        if step is not None:
            k = step.k
            record = step.end_epoch()
            self.trainer.log({"k": float(k), "l_X": record.magnitude, "train_accuracy": record.accuracy})
