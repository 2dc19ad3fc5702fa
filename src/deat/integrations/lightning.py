"""PyTorch Lightning: train any LightningModule with any method, and Fabric loops."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deat.engine.precision import Precision
from deat.errors import UsageError
from deat.evaluation.attacks import Attack, parse_attack
from deat.methods import Method, get_method
from deat.models import add_normalization
from deat.models.logits_wrapper import LogitsModel
from deat.tasks import Task, get_task
from deat.threat import ThreatModel, parse_threat
from deat.training.adversarial_step import AdversarialStep, LoopEngine, StepResult, precision_of
from deat.utils.torch_contexts import eval_mode

try:
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
except ImportError:
    try:
        import pytorch_lightning as pl  # type: ignore[no-redef]
        from lightning_fabric import Fabric  # type: ignore[assignment]
    except ImportError:
        raise UsageError("lightning is not installed: pip install 'deat[lightning]'") from None

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as Base
else:
    Base = object  # so that it also goes before modules of pytorch_lightning

STATE_KEY = "deat"
UNUSED_SCHEDULER_KEYS = ("monitor", "reduce_on_plateau", "strict")
"""What Lightning ignores in manual optimisation, with a warning, and the mixin does itself."""


class AdversarialTraining(Base):
    """A mixin that makes a LightningModule train with any method. Put it before the module in a class's bases.

    It replaces `training_step`, and validates under attack. The module's `forward` returns the logits of images in
    [0, 1]; its `configure_optimizers`, callbacks, loggers and checkpoints work as before. `global_step` counts updates
    of the weights, of which methods that replay a batch make several. Learning-rate schedulers step as configured.
    Gradients are clipped by a hook, `optimizer.register_step_pre_hook`, since Lightning clips none in this mode.

    Args:
        method: The method, or its name.
        threat: The threat model, or its text.
        task: What outputs and labels mean.
        normalize: (mean, std) by which images are normalised on their way into the network.
        val_attack: The attack of validation, such as "pgd-10"; "none" leaves validation to the module.
        seed: The seed of the perturbations' starts.
        *args: The module's own arguments.
        **kwargs: The module's own arguments.

    Example:
        >>> class RobustNet(AdversarialTraining, LitNet):
        ...     pass
        >>> trainer = lightning.Trainer(max_epochs=30)
        >>> trainer.fit(RobustNet(method="m+deat", threat="linf:8/255"), train_loader, val_loader)
    """

    def __init__(
        self,
        *args: Any,
        method: str | Method = "m+deat",
        threat: str | ThreatModel = "linf:8/255",
        task: str | Task = "classification",
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        val_attack: str | Attack = "pgd-10",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.adversary: dict[str, Any] = {
            "method": get_method(method),
            "threat": parse_threat(threat),
            "task": get_task(task),
        }
        self.input_normalization, self.adversary_seed = normalize, seed
        self.val_attack = None if val_attack == "none" else parse_attack(val_attack)
        self._step: AdversarialStep | None = None
        self._saved_step: dict[str, Any] | None = None
        self._monitors: dict[int, str] = {}

    @property
    def adversarial_step(self) -> AdversarialStep:
        """What trains on a batch; there is one while the trainer fits."""
        if self._step is None:
            optimizer = self.optimizers()
            if isinstance(optimizer, list):
                raise UsageError("adversarial training has one optimizer: let configure_optimizers return one.")
            precision = self.trainer.precision_plugin
            engine = LoopEngine(
                self.device,
                precision_of(str(precision.precision)),
                autocast_with=precision.forward_context,
                backward_with=self.manual_backward,
                scaler_in_use=getattr(precision, "scaler", None),
            )
            if not self.trainer.max_epochs or self.trainer.max_epochs < 0:
                raise UsageError("the schedule of a method needs the number of epochs: Trainer(max_epochs=30).")
            self._step = AdversarialStep(
                self,
                optimizer,  # type: ignore[arg-type]
                epochs=self.trainer.max_epochs,
                **self.adversary,
                normalize=self.input_normalization,
                engine=engine,
                seed=self.adversary_seed,
            )
            if self._saved_step is not None:
                self._step.load_state_dict(self._saved_step)
        return self._step

    def configure_optimizers(self) -> Any:
        """Return what the module configures, and remember which metric each learning-rate scheduler monitors.

        Lightning forgets it in manual optimisation, where it leaves schedulers to the module.
        """
        configured, self._monitors = _take_monitors(super().configure_optimizers())
        return configured

    def images_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the images and the labels of a batch. Override it where a batch is not a pair of them.

        Args:
            batch: What the DataLoader gave.
        """
        x, y = batch
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train on one batch, and log its loss and accuracy.

        Args:
            batch: What the DataLoader gave.
            batch_idx: The batch's number.

        Returns:
            The loss and the adversarial examples, by name.
        """
        result: StepResult = self.adversarial_step(*self.images_and_labels(batch))
        self.log_dict(
            {"train_loss": result.loss, "train_accuracy": result.accuracy}, batch_size=len(result.adversarial)
        )
        self._step_lr_schedulers("step", batch_idx + 1)
        return {"loss": result.loss, "adversarial": result.adversarial}

    def on_train_epoch_end(self) -> None:
        """Choose the next epoch's number of attack steps, and log this one's."""
        k = self.adversarial_step.k
        record = self.adversarial_step.end_epoch()
        self.log_dict({"k": float(k), "l_X": record.magnitude})
        self._step_lr_schedulers("epoch", self.current_epoch + 1)
        super().on_train_epoch_end()

    def on_fit_end(self) -> None:
        """Release the optimiser."""
        self._saved_step, self._step = None if self._step is None else self._step.state_dict(), None
        super().on_fit_end()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's own validation step, and log accuracy without and under attack.

        Args:
            batch: What the DataLoader gave.
            batch_idx: The batch's number.

        Returns:
            What the module's own step returned.
        """
        own = super().validation_step
        is_own = getattr(own, "__func__", own) is not pl.LightningModule.validation_step
        output = own(batch, batch_idx) if is_own else None
        if self.val_attack is not None:
            x, y = self.images_and_labels(batch)
            natural, robust = self.score_under_attack(x, y, seed=batch_idx)
            self.log_dict({"val_natural": natural, "val_robust": robust}, batch_size=len(x), sync_dist=True)
        return output

    def score_under_attack(self, x: Tensor, y: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return the accuracy of images, and under the attack of validation.

        Args:
            x: The images.
            y: The labels.
            seed: The seed of the attack's random start.
        """
        assert self.val_attack is not None
        task, threat = self.adversary["task"], self.adversary["threat"]
        net = add_normalization(self, *self.input_normalization) if self.input_normalization else self
        model, y = LogitsModel(net).to(x.device), task.prepare_labels(y)
        generator = torch.Generator(x.device).manual_seed(self.adversary_seed + seed)
        adversarial = self.val_attack(model, x, y, threat, generator, task)
        with torch.no_grad(), eval_mode(model):
            natural, robust = (task.accuracy(model(images), y).float() for images in (x, adversarial))
        return natural.mean(), torch.minimum(natural, robust).mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the state of the method.

        Args:
            checkpoint: The checkpoint, to which it is added.
        """
        super().on_save_checkpoint(checkpoint)
        state = self._saved_step if self._step is None else self._step.state_dict()
        if state is not None:
            checkpoint[STATE_KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the method.

        Args:
            checkpoint: The checkpoint.
        """
        super().on_load_checkpoint(checkpoint)
        self._saved_step = checkpoint.get(STATE_KEY)

    def _step_lr_schedulers(self, interval: str, count: int) -> None:
        for config in self.trainer.lr_scheduler_configs:
            if config.interval != interval or count % config.frequency:
                continue
            scheduler: Any = config.scheduler
            is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.lr_scheduler_step(scheduler, self._read_monitored_metric(scheduler) if is_plateau else None)

    def _read_monitored_metric(self, scheduler: Any) -> Any:
        name, metrics = self._monitors.get(id(scheduler)), self.trainer.callback_metrics
        if name in metrics:
            return metrics[name]
        raise UsageError(
            f"{type(scheduler).__name__} monitors {name!r}, and there are {', '.join(metrics)}: return "
            '{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_robust"}} from configure_optimizers.'
        )


def _take_monitors(configured: Any) -> tuple[Any, dict[int, str]]:
    """What `configure_optimizers` returned, without what Lightning warns of, and the monitored metric by scheduler."""
    monitors: dict[int, str] = {}

    def take(scheduler: Any, monitor: str | None = None) -> Any:
        """Remember the metric that a scheduler monitors, and return the scheduler without Lightning's other keys."""
        kept = scheduler
        if isinstance(scheduler, dict):
            kept = {name: value for name, value in scheduler.items() if name not in UNUSED_SCHEDULER_KEYS}
            scheduler, monitor = scheduler.get("scheduler"), scheduler.get("monitor", monitor)
        if monitor is not None:
            monitors[id(scheduler)] = monitor
        return kept

    def take_entry(entry: Any) -> Any:
        """Do the same for an entry that holds an optimizer and its scheduler."""
        if not isinstance(entry, dict) or "lr_scheduler" not in entry:
            return entry
        rest = {name: value for name, value in entry.items() if name != "monitor"}
        return {**rest, "lr_scheduler": take(entry["lr_scheduler"], entry.get("monitor"))}

    if isinstance(configured, list | tuple) and len(configured) == 2 and isinstance(configured[0], list):
        optimizers, schedulers = configured
        schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
        return (optimizers, [take(scheduler) for scheduler in schedulers]), monitors
    if isinstance(configured, list | tuple):
        return type(configured)(map(take_entry, configured)), monitors
    return take_entry(configured), monitors


def make_fabric_step(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> AdversarialStep:
    """Make an `AdversarialStep` for a Fabric loop: its precision, its devices, its processes.

    Args:
        fabric: The Fabric.
        model: What `fabric.setup` returned.
        optimizer: What it returned, too.
        **options: The other arguments of `AdversarialStep`.

    Returns:
        The step.

    Example:
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> step = make_fabric_step(fabric, model, optimizer, method="m+deat", threat="linf:8/255", epochs=30)
        >>> result = step(x, y)
    """
    plugin = fabric.strategy.precision
    precision: Precision = precision_of(str(plugin.precision))
    context: partial[AbstractContextManager[Any]] = partial(fabric.autocast)
    engine = LoopEngine(
        fabric.device,
        precision,
        autocast_with=context,
        backward_with=fabric.backward,
        scaler_in_use=getattr(plugin, "scaler", None),
    )
    return AdversarialStep(model, optimizer, engine=engine, seed=options.pop("seed", 0), **options)
