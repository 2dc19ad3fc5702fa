"""Adversarial training in a loop of your own: one call plays a batch of any method over your model and optimiser."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deat.core.batch_buffers import Buffers
from deat.core.epoch_sums import EpochRecord
from deat.core.game import Game
from deat.core.training_losses import Objective
from deat.engine.engine import Engine
from deat.engine.precision import Precision
from deat.errors import UsageError
from deat.methods import Method, get_method
from deat.methods.method import check_method_on_task, check_method_on_threat
from deat.models import add_normalization, get_input_std
from deat.models.interface_checks import check_model
from deat.models.logits_wrapper import LogitsModel
from deat.models.normalize import parse_mean_std
from deat.radius_checks import check_radius
from deat.tasks import CLASSIFICATION, Task, get_task
from deat.threat import ThreatModel, parse_threat
from deat.training.messages import explain_missing_growth
from deat.utils.distributed import Distributed
from deat.utils.numbers import check_int
from deat.utils.seeding import derive_seed
from deat.utils.torch_contexts import device_of


class StepResult(NamedTuple):
    """The results of one batch, on the device.

    Attributes:
        loss: The mean training loss of the batch's last update.
        accuracy: The share of the batch that the network was right about in its last update, under attack where k > 0.
        adversarial: The examples that the last update was made on. The next batch overwrites them.
        k: The number of attack steps.
    """

    loss: Tensor
    accuracy: Tensor
    adversarial: Tensor
    k: int


@dataclass
class LoopEngine(Engine):
    """An engine whose backward pass, precision and loss scaling are those of another library.

    Args:
        autocast_with: Returns the context of forward passes.
        backward_with: Runs the backward pass of a loss of the weights, and scales it; the optimiser then unscales.
        scaler_in_use: The loss scaler, by which the gradients of attack steps are scaled as well.
    """

    autocast_with: Callable[[], AbstractContextManager[Any]] | None = None
    backward_with: Callable[[Tensor], object] | None = None
    scaler_in_use: Any = None

    def __post_init__(self) -> None:
        self.scaler = self.scaler_in_use

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for forward passes."""
        return self.autocast_with() if self.autocast_with else super().autocast()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the weights and of delta."""
        if self.backward_with:
            self.backward_with(loss)
        else:
            super().backward(loss)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Step the weights, by an optimiser that unscales gradients itself where there is a `backward_with`."""
        if self.scaler is None or self.backward_with is None:
            return super().step(optimizer)
        is_taken = self.has_finite_gradients(optimizer)
        optimizer.step()
        return is_taken


class _LoopGame(Game):
    """A game that can leave the last update of a batch to the caller's optimiser step."""

    last_backprop: int | None = None
    """The number of the backprop whose gradients are left, not stepped."""

    def _step_weights(self, buffers: Buffers) -> None:
        if self.cost.backprops != self.last_backprop:
            super()._step_weights(buffers)


@dataclass(frozen=True)
class _Processes(Distributed):
    """The processes of a loop whose process group another library has set up; they exchange lists of numbers."""

    device: str = "cpu"

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        if not self.is_multiprocess:
            return [value]
        own = torch.tensor(value, dtype=torch.float64, device=self.device)
        values = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(values, own)
        return [each.tolist() for each in values]


class AdversarialStep:
    """One batch of any method, for a training loop of your own.

    Calling it replaces zero_grad, forward, loss, backward and the optimiser's step. `end_epoch` reads the epoch's sums,
    by which methods such as m+deat choose the next epoch's number of attack steps. The learning rate, the batches and
    the modes of the network are the loop's.

    Args:
        model: The network; it may be wrapped by DDP. It takes images in [0, 1], or what is in the box of the threat
            model, and returns logits or an object with `logits`.
        optimizer: The optimiser of its weights. Methods that replay a batch, such as m+deat, step it several times.
        method: The method, or its name.
        threat: The threat model, or its text such as "l2:0.5".
        epochs: How many epochs the loop has, which some methods' schedules depend on.
        task: What outputs and labels mean.
        normalize: (mean, std) by which images are normalised on their way into the network. A loader must not do so:
            the radius is in pixels of [0, 1].
        engine: Device and precision; by default the model's device and fp32, inside whatever autocast the loop has.
        seed: The seed of the perturbations' starts.
        leaves_last_update: Whether the gradients of a batch's last update are left in `.grad` for the loop, which clips
            them and steps the optimiser itself.

    Attributes:
        epoch: The number of finished epochs.
        k: The number of attack steps in this epoch.
        history: The record of each finished epoch.

    Example:
        >>> step = deat.AdversarialStep(model, optimizer, method="m+deat", threat="linf:8/255", epochs=30)
        >>> for epoch in range(30):
        ...     for x, y in loader:
        ...         result = step(x, y)
        ...     record = step.end_epoch()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        epochs: int,
        method: str | Method = "m+deat",
        threat: str | ThreatModel = "linf:8/255",
        task: str | Task = CLASSIFICATION,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        engine: Engine | None = None,
        seed: int = 0,
        leaves_last_update: bool = False,
    ) -> None:
        check_model(model)
        check_int("epochs", epochs, 1)
        self.method, self.threat, self.task = get_method(method), parse_threat(threat), get_task(task)
        check_method_on_task(self.method, self.task)
        check_method_on_threat(self.method, self.threat)
        self.seed, self.leaves_last_update = seed, leaves_last_update
        mean_std = parse_mean_std(normalize)
        inner = _without_ddp(model)
        net, trained = (
            LogitsModel(add_normalization(m, *mean_std) if mean_std else m).to(device_of(inner)) for m in (inner, model)
        )
        std = get_input_std(net)
        self.game = _LoopGame(
            net,
            Objective(trained, self.method.objective, self.task),
            self.threat,
            self.method.attack,
            optimizer,
            probe=self.method.probe,
            engine=engine or Engine(device_of(inner)),
            pixel_scale=std,
            distributed=SINGLE,
            measurements=self.method.measurements,
        )
        self.game.meter.distributed = _find_processes(device_of(inner))
        self.schedule, self.epochs = self.method.bind(self.threat, epochs), epochs
        self.epoch, self.history = 0, list[EpochRecord]()
        self._seed_starts()
        self._is_checked, self._has_begun = False, False
        self.schedule_state = self.schedule.init()
        self._budget = self.schedule.budget(self.schedule_state, 0)

    @property
    def k(self) -> int:
        """The number of attack steps in this epoch."""
        return self._budget.k

    def __call__(self, x: Tensor, y: Tensor) -> StepResult:
        """Train on one batch.

        Args:
            x: The images, on the model's device and in the box of the threat model.
            y: The labels.

        Returns:
            Loss, accuracy and adversarial examples of the batch's last update, on the device.

        Raises:
            UsageError: The first batch is outside the box, or the loss does not depend on the images.
        """
        game = self.game
        if not self._is_checked:
            self._check_first_batch(x)
        if not self._has_begun:
            game.refresh()
            game.clear_gradients()
            self._has_begun = True
        declared = self.method.play.backprops(self._budget)
        game.last_backprop = game.cost.backprops + declared if self.leaves_last_update else None
        with torch.enable_grad():
            self.method.play_batch(game, x.detach(), self.task.prepare_labels(y), self._budget)
        buffers = game.last_batch
        assert buffers is not None
        adversarial = buffers.x + game.attack.visible_delta(game.threat, buffers.x, buffers.delta)
        return StepResult(buffers.loss.clone(), buffers.num_correct / len(buffers), adversarial, self.k)

    def end_epoch(self) -> EpochRecord:
        """End an epoch: read its sums, and choose the next epoch's number of attack steps.

        Several processes must all call it; the record is over all of them.

        A RuntimeWarning says, once and while it can be changed, that a k which should grow does not.

        Returns:
            The epoch's loss, accuracy and l_X.

        Raises:
            NumericalError: A loss or a gradient was not finite.
        """
        record = self.game.meter.read(self.epoch)
        self.schedule_state = self.schedule.observe(self.schedule_state, record)
        self.game.meter.reset()
        self.epoch, self._has_begun = self.epoch + 1, False
        self.history.append(record)
        self._budget = self.schedule.budget(self.schedule_state, self.epoch)
        if message := explain_missing_growth(self.schedule, self.schedule_state, self.history, self.epochs):
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimiser, also in the middle of an epoch."""
        carry, union, memory = self.game.carried_delta, self.game.union_rule, self.game.start_memory
        starts = {name: part.clone() for name, part in memory.state_dict().items()} if memory is not None else None
        return {
            "epoch": self.epoch,
            "schedule": dict(self.schedule_state),
            "meter": self.game.meter.state_dict(),
            "cost": vars(self.game.cost).copy(),
            "generator": self.game.generator.get_state(),
            "carried_delta": None if carry is None else carry.clone(),
            "union": union.state_dict() if union is not None else {},
            **({"starts": starts} if starts else {}),
            "history": [vars(record).copy() for record in self.history],
            "rank": self.game.meter.distributed.rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state.

        A process that gets the state of another one, as from a checkpoint that the first process wrote, draws starts of
        its own.

        Args:
            state: What `state_dict` returned.
        """
        game = self.game
        self.epoch, self.schedule_state = int(state["epoch"]), dict(state["schedule"])
        self.history = [EpochRecord(**record) for record in state["history"]]
        self._budget = self.schedule.budget(self.schedule_state, self.epoch)
        vars(game.cost).update(state["cost"])
        if game.union_rule is not None and state["union"]:
            game.union_rule.load_state_dict(state["union"])
        if state["rank"] != game.meter.distributed.rank:
            self._seed_starts()
            game.meter.reset()
            return
        game.meter.load_state_dict(state["meter"])
        game.generator.set_state(state["generator"].cpu())
        carry = state["carried_delta"]
        game.carried_delta = None if carry is None else carry.to(game.engine.device, copy=True)
        if "starts" in state:
            if game.start_memory is None:
                raise UsageError("the state has remembered starts: call step.game.remember_starts before loading it.")
            game.start_memory.load_state_dict(state["starts"])

    def _seed_starts(self) -> None:
        rank = self.game.meter.distributed.rank
        self.game.generator.manual_seed(derive_seed(self.seed, "starts", self.epoch, rank))

    def _check_first_batch(self, x: Tensor) -> None:
        low, high, box = float(x.min()), float(x.max()), self.threat.box
        if not x.is_floating_point() or (box is not None and (low < box[0] or high > box[1])):
            raise UsageError(
                f"the first batch is of {x.dtype} with values from {low:g} to {high:g}; the box of the threat model is {box}."
                " Give float images in [0, 1], and leave their normalisation to the step: "
                "AdversarialStep(..., normalize=(mean, std))."
            )
        check_radius(self.threat, tuple(x.shape[1:]))
        self._is_checked = True


SINGLE = Distributed()


def _without_ddp(model: nn.Module) -> nn.Module:
    """The network whose forward pass does not wait for other processes, as an attack step needs it."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(model, "_forward_module"):
        model = cast(nn.Module, model.module)  # Fabric's wrapper has the other attribute
    return model


def _find_processes(device: torch.device) -> Distributed:
    if not dist.is_available() or not dist.is_initialized():
        return SINGLE
    return _Processes(dist.get_rank(), dist.get_world_size(), device=str(device))


def precision_of(name: str) -> Precision:
    """Return the precision of an engine that another library's name of a precision means."""
    return "bf16" if "bf16" in name else "fp16" if "16" in name else "fp32"
