"""The moves of one batch: attack steps on the perturbation delta and updates of the weights theta.

Each move costs one backprop. A (`Game.ascend`) computes the gradient with respect to delta and steps delta. J
(`Game.joint_update`) computes both gradients in one pass and steps theta. Nothing here reads the device, except for
compact attacks.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from deat.core.batch_buffers import Budget, Buffers, Cost
from deat.core.compiled_functions import NetworkFunctions, unwrap_ddp
from deat.core.epoch_sums import Meter
from deat.core.first_layer import FirstLayer, find_first_layer
from deat.core.gradient_penalty import AddedPenalty
from deat.core.inner_attack import DeltaScale, InnerAttack
from deat.core.magnitude_probe import MagnitudeProbe
from deat.core.measurements import Measurement
from deat.core.remembered_starts import StartMemory
from deat.core.training_losses import Objective
from deat.core.union_rules import make_union_rule
from deat.core.weight_perturbation import StoredTensors, WeightPerturbation
from deat.engine.engine import Engine
from deat.engine.executor import Executor
from deat.engine.loss_scaler import LossScaler
from deat.engine.precision import Precision
from deat.errors import DataError, UsageError
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel, parse_threat
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.torch_contexts import broadcast_mask, eval_mode

SYNCHRONISED_MOVES = ("joint", "perturb", "close", "observe")
"""Moves that communicate with other processes, or count what these share: not recorded with several processes."""

Move = Callable[[Buffers], None]


class Game:
    """Training on one batch, as a game of two players: the adversary moves delta, the learner the weights.

    A `Play` calls the moves: `begin_batch`, then `ascend`, `joint_update`, `step_delta` or `accumulate_gradients`, then
    `end_batch`.

    Args:
        net: The network.
        objective: The training loss around the network, wrapped by DDP or not.
        threat: The threat model, or its text such as "linf:8/255". It may be replaced between batches.
        attack: The attack inside training.
        optimizer: The optimiser of the network's weights.
        probe: Which gradient is measured as l_X.
        engine: Device, precision, and whether to record CUDA graphs and to compile; fp32 on the CPU by default.
        pixel_scale: The std by which the network normalises its input; used where `probe.space` is "normalised".
        distributed: The processes that share the batches.
        task: What outputs and labels mean; by default the objective's task.
        measurements: Further numbers to measure in every batch.
        check_inputs: Whether batches are checked: on a CPU every one, on a GPU the first one, since reading a GPU
            waits. A trainer checks its data before.

    Attributes:
        meter: The sums of the epoch.
        cost: The work done so far.
        generator: The random numbers of delta's starts.
        functions: The losses, the logits and the step of delta, eager or compiled.
        executor: Runs the moves.
        carried_delta: The perturbation that a persistent attack carries from batch to batch.
        union_rule: How the balls of a union are picked; None for a threat model of one ball.
        after_update: Called after every update of theta, outside recordings; None for nothing.
        global_batch_size: How many images the batch has in all processes together; set it before `begin_batch` where
            several processes share a batch.
        start_memory: The starts that the attack remembers for each image; see `remember_starts`.
        batch_index: The numbers of the batch's examples in the training data, in all processes together; set it before
            `begin_batch` where starts are remembered.
        last_batch: The buffers of the last batch that ended.
        has_static_gradients: Whether the weights' gradients stay in the same memory, so that recordings can add to
            them.
        penalty: What is added to the loss in the last update of each batch; a play of g+ or gradalign sets it.
        weight_perturbation: How the weights are perturbed in the last update of each batch; a play of awp+ sets it.
        last_updates: How many updates were the last of their batch.

    Example:
        >>> game = deat.Game(net, deat.Objective(net, method.objective), threat, method.attack, optimizer)
        >>> buffers = game.begin_batch(x, y, deat.Budget(k=1, step_size=0.01))
        >>> game.ascend(buffers)
        >>> game.joint_update(buffers)
        >>> game.end_batch(buffers)
    """

    def __init__(
        self,
        net: nn.Module,
        objective: Objective | nn.Module,
        threat: str | ThreatModel,
        attack: InnerAttack,
        optimizer: torch.optim.Optimizer,
        *,
        probe: MagnitudeProbe | None = None,
        engine: Engine | None = None,
        pixel_scale: Tensor | None = None,
        distributed: Distributed = SINGLE_PROCESS,
        task: Task | None = None,
        measurements: Sequence[Measurement] = (),
        check_inputs: bool = True,
    ) -> None:
        self.net, self.objective, self.optimizer, self._checks_inputs = net, objective, optimizer, check_inputs
        self.attack, self.distributed, self.task = attack, distributed, _get_common_task(objective, task)
        self.probe, self.engine = probe or MagnitudeProbe(), engine or Engine()
        device = self.engine.device
        self.dtype = torch.promote_types(torch.float32, next(net.parameters()).dtype)
        self.pixel_scale = pixel_scale
        self.measurements = tuple(measurements)
        names = [measurement.name for measurement in measurements]
        self.meter = Meter(device, self.probe.over, distributed, self.engine.non_finite_hint, names)
        self.generator = torch.Generator(device)
        self.step_size, self.stop_threshold = (torch.zeros((), dtype=self.dtype, device=device) for _ in range(2))
        self.delta_scale = self._make_delta_scale()
        self.cost = Cost()
        self.carried_delta: Tensor | None = None
        self.global_batch_size: int | None = None
        self.after_update: Callable[[], None] | None = None
        self.executor = Executor(net, optimizer, self.engine, single_process=not distributed.is_multiprocess)
        threat = parse_threat(threat)
        self.functions = NetworkFunctions(net, objective, attack, threat, self.task, self.executor)
        self.start_memory: StartMemory | None = None
        self.batch_index: Tensor | None = None
        self._must_remember, self._epoch = False, 0
        self.last_batch: Buffers | None = None
        self.union_rule = make_union_rule(threat, device, distributed)
        self._is_attacked = False
        self.has_static_gradients = False
        self.penalty: AddedPenalty | None = None
        self.weight_perturbation: WeightPerturbation | None = None
        self.last_updates = 0
        self._has_summed_gradients, self._has_updated = False, False
        self._first_layer: FirstLayer | None = None
        self._buffers_by_shape: OrderedDict[torch.Size, Buffers] = OrderedDict()

    @property
    def threat(self) -> ThreatModel:
        """The threat model. A new one holds from the next batch on; what was compiled and recorded is dropped."""
        return self.functions.threat

    @threat.setter
    def threat(self, threat: str | ThreatModel) -> None:
        """Replace the threat model from the next batch on."""
        self.functions.threat = threat = parse_threat(threat)
        self.union_rule = make_union_rule(threat, self.engine.device, self.distributed)
        self.executor.use_compiled(self.engine.use_compile)
        self.has_static_gradients = False

    def use_precision(self, precision: Precision) -> None:
        """Compute in another precision from the next batch on; not between fp16 and another one.

        Args:
            precision: "fp32" or "bf16".
        """
        self.engine.precision = precision
        self.engine.prepare(self.net)
        self.meter.non_finite_hint = self.engine.non_finite_hint
        self.delta_scale = self._make_delta_scale()
        self._buffers_by_shape.clear()  # laid out for the former precision
        self.executor.use_compiled(self.engine.use_compile)

    def _make_delta_scale(self) -> DeltaScale:
        return DeltaScale(self.engine.device, self.attack.has_tiny_start and self.engine.precision != "fp32")

    def refresh(self) -> None:
        """Adapt to changed layers. In a loop of your own, call it after changing modes, dropout or what learns.

        The trainer calls it at the beginning of each epoch.
        """
        if self.executor.refresh():
            self.has_static_gradients = False

    def begin_batch(self, x: Tensor, y: Tensor, budget: Budget) -> Buffers:
        """Copy a batch into its static buffers, and set delta to its start.

        Args:
            x: The images.
            y: The labels.
            budget: The number and the size of the attack's steps.

        Returns:
            The buffers, to be given to the moves. Batches of one shape share them.

        Raises:
            DataError: A value lies outside the threat model's box, or labels are not those of the task.
        """
        if self._checks_inputs:
            self._check_inputs(x, y)
            self._checks_inputs = x.device.type == "cpu"
        buffers = self._buffers_for(x, y)
        if self.executor.begin_batch(buffers.x, self.functions.compile_for):
            self.has_static_gradients = False
        buffers.x.copy_(x)
        buffers.y.copy_(y)
        buffers.magnitude.zero_()
        buffers.update_applied.fill_(True)
        self._has_updated = False
        self.step_size.fill_(budget.step_size)
        self.stop_threshold.fill_(budget.stop_threshold)
        self.delta_scale.magnify()
        self._is_attacked = budget.k > 0 or self.attack.random_start_at_k0
        if self.union_rule is not None:
            drawn = self.union_rule.draw(self.global_batch_size or len(buffers), self.generator)
            buffers.ball.copy_(drawn[self._own_rows])
        self._must_remember, self._epoch = self.attack.remember is not None and budget.k > 0, budget.epoch
        buffers.delta.copy_(self._initial_delta(buffers))
        if self.penalty is not None and self.penalty.needs_noise:
            self._draw_noise(buffers)
        if self.functions.needs_start or self._must_remember:
            buffers.initial_delta.copy_(buffers.delta)
        if self.attack.freeze is not None:
            self.attack.freeze.reset(buffers, self.stop_threshold)
            if not self._has_own_images:
                buffers.active.fill_(False)
        if self.attack.needs_reference and budget.k:
            self._compute_reference_logits(buffers)
        return buffers

    def _check_inputs(self, x: Tensor, y: Tensor) -> None:
        """Check what would be wrong silently: no ball around a value outside the box lies in the box."""
        if self.task is not None:
            self.task.prepare_labels(y)
        low, high = self.threat.box or (-math.inf, math.inf)
        if not bool(((x >= low) & (x <= high) & x.isfinite()).all()):
            least, largest = (float(value) for value in x.aminmax())
            bounds = f"[{low:g}, {high:g}]" if self.threat.box else "the finite numbers"
            raise DataError(
                f"the batch has values from {least:g} to {largest:g}, outside {bounds} of the threat model. Scale the "
                "inputs, and normalise inside the network; or give the threat model another box, such as "
                "Linf(0.1, box=None)."
            )

    def _buffers_for(self, x: Tensor, y: Tensor) -> Buffers:
        if x.shape not in self._buffers_by_shape:
            if len(self._buffers_by_shape) == 4:  # otherwise images of many sizes would fill the memory
                self.executor.drop(self._buffers_by_shape.popitem(last=False)[1])
            example = self.engine.to_memory_format(x.to(self.dtype))
            self._buffers_by_shape[x.shape] = Buffers.allocate(example, y, len(self.measurements))
        return self._buffers_by_shape[x.shape]

    def _initial_delta(self, buffers: Buffers) -> Tensor:
        if not self._is_attacked:
            return torch.zeros_like(buffers.x)
        start = self.attack.initial_delta(
            self.batch_threat(buffers),
            buffers.x,
            self.generator,
            full_batch_size=self.global_batch_size,
            rows=self._own_rows,
        )
        if self.attack.remember is not None:
            remembered = self._memory().recall(self._index()[self._own_rows], self._epoch, start, self.threat.eps)
            return self.attack.project(self._threat_of_carried(buffers, remembered), buffers.x, remembered)
        if self.carried_delta is not None and self.carried_delta.shape[1:] == buffers.x.shape[1:]:
            carried = self.carried_delta[: len(buffers)]  # the other rows of a larger batch keep their random start
            start[: len(carried)] = self.attack.project(
                self._threat_of_carried(buffers, carried), buffers.x[: len(carried)], carried
            )
        return start

    def _draw_noise(self, buffers: Buffers) -> None:
        noise = self.batch_threat(buffers).initial_delta(
            buffers.x, "uniform", self.generator, full_batch_size=self.global_batch_size, rows=self._own_rows
        )
        if buffers.noise.shape != noise.shape:  # the first batch of this shape
            buffers.noise = torch.zeros_like(buffers.x)
        buffers.noise.copy_(noise)

    def _threat_of_carried(self, buffers: Buffers, carried: Tensor) -> ThreatModel:
        """The threat model that the carried perturbations, those of the first rows, are projected to."""
        if self.union_rule is None:
            return self.threat
        ball = buffers.ball[: len(carried)]
        return self.union_rule.union.at(ball.copy_(self.union_rule.ball_of_carried(carried, ball)))

    def remember_starts(self, num_examples: int, shape: tuple[int, ...]) -> None:
        """Allocate the memory of an attack that remembers a start for each image; see `StartMemory`.

        Args:
            num_examples: The number of training examples.
            shape: The shape of one example.

        Raises:
            UsageError: If the attack remembers no starts.
            DataError: If they do not fit into memory.
        """
        if self.attack.remember is None:
            raise UsageError("the attack remembers no starts. Give it one that does, such as that of fgsm-pgi.")
        self.start_memory = StartMemory(
            self.attack.remember, num_examples, shape, self.engine.device, distributed=self.distributed
        )

    def _memory(self) -> StartMemory:
        if self.start_memory is None:
            raise UsageError(
                "this attack (fgsm-pgi) remembers a start for each training image. deat.fit and deat.Trainer number the images "
                "of data that deat reads itself. In a loop of your own, call game.remember_starts(num_images, shape) once, and "
                "set game.batch_index to the numbers of a batch's images before each batch."
            )
        return self.start_memory

    def _index(self) -> Tensor:
        """The numbers of the batch's examples in all processes together, on the device."""
        if self.batch_index is None:
            raise UsageError(
                "this attack (fgsm-pgi) remembers a start for each image: set game.batch_index to the numbers of the batch's "
                "images, int64 of shape (batch,)."
            )
        return self.batch_index.to(self.engine.device, non_blocking=True)

    def _remember_start(self, buffers: Buffers) -> None:
        """After the first step of a batch: let the gradient at the start choose the images' next start."""
        if self._must_remember:
            self._must_remember = False
            self._memory().update(
                self._index(),
                self._own_rows,
                self._epoch,
                buffers.x,
                buffers.initial_delta,
                buffers.grad,
                self.batch_threat(buffers),
                self.step_size,
                has_own_images=self._has_own_images,
            )

    def batch_threat(self, buffers: Buffers) -> ThreatModel:
        """Return the threat model of a batch: under a union, that in which each example has its ball.

        Args:
            buffers: The batch's buffers.
        """
        return self.union_rule.union.at(buffers.ball) if self.union_rule is not None else self.threat

    @property
    def _own_rows(self) -> slice:
        """The rows of the whole batch that this process computes."""
        return slice(None) if self.global_batch_size is None else self.distributed.shard.rows(self.global_batch_size)

    def _compute_reference_logits(self, buffers: Buffers) -> None:
        self.cost.passes += 1
        self.executor.prepare_forward(buffers.x)
        self._run_move("refer", self._store_reference_logits, buffers)

    def _store_reference_logits(self, buffers: Buffers) -> None:
        with torch.no_grad(), self.attack_mode(), self.engine.autocast():
            logits = self.functions.logits(buffers.x)
        if buffers.reference_logits.shape != logits.shape:  # the first batch of this shape
            buffers.reference_logits = torch.zeros_like(logits, dtype=self.dtype)
        buffers.reference_logits.copy_(logits)

    def ascend(self, buffers: Buffers) -> None:
        """Make an attack step (A): compute the gradient of the attack's loss with respect to delta alone, and step delta.

        Args:
            buffers: The batch's buffers.
        """
        if self.attack.compact:
            self._ascend_active_rows(buffers)
        else:
            self._count_backprop()
            self._count_step()
            self.executor.prepare_forward(buffers.x)
            self._run_move("ascend", self._ascend, buffers)
        self.delta_scale.restore()
        self._remember_start(buffers)
        if self.probe.move == "ascend":
            self._run_move("measure", self._measure_magnitude, buffers)

    def _ascend(self, buffers: Buffers) -> None:
        self._compute_delta_gradient(buffers)
        self.step_delta_in_move(buffers)

    def _compute_delta_gradient(self, buffers: Buffers) -> None:
        delta = self.delta_scale.scaled_delta(buffers.delta)
        with self.attack_mode(), self.engine.autocast():
            visible = self.attack.visible_delta(self.threat, buffers.x, delta)
            loss, logits = self.functions.attack_loss(buffers.x, visible, buffers.y, buffers.reference_logits)
        (grad,) = torch.autograd.grad(self.engine.scale(loss), delta)
        self.engine.unscale_into(buffers.grad, grad, len(buffers))
        self.delta_scale.unscale_gradient(buffers.grad)
        if self.attack.freeze is not None:
            is_right = self.task.is_right(logits.detach(), buffers.y)
            self.attack.freeze.update(buffers, is_right, self.stop_threshold, self.batch_threat(buffers))

    def _ascend_active_rows(self, buffers: Buffers) -> None:
        index = self.attack.active_indices(buffers)
        if len(index) == 0:
            return
        active_part = buffers.select_rows(index)
        self._count_backprop()
        self._count_step()
        self.executor.prepare_forward(active_part.x)
        self.executor.run("ascend", self._ascend, active_part, self.mutable_tensors, recorded=False)
        for name in ("delta", "grad", "steps_left", "active", "ball"):
            getattr(buffers, name).index_copy_(0, index, getattr(active_part, name))

    def joint_update(self, buffers: Buffers, *, last: bool = True) -> None:
        """Update the weights (J): compute both gradients in one pass, and step theta.

        Delta's gradient is left in `buffers.grad`, for `step_delta`.

        Args:
            buffers: The batch's buffers.
            last: Whether this is the batch's last update, the one that `penalty` and
                `weight_perturbation` change.
        """
        penalty = self.penalty if last else None
        perturbation = self.weight_perturbation if last else None
        self.last_updates += last
        if perturbation is not None:
            self._perturb_weights(buffers, perturbation)
        self._count_backprop(self._num_forwards)
        if penalty is not None:
            self.cost.backprops += penalty.backprops
            self.cost.passes += penalty.num_passes(self._num_forwards)
        self.executor.prepare_forward(buffers.x)
        added = [str(part) for part in (penalty, perturbation) if part is not None]
        move = partial(self._joint_update, penalty, perturbation is not None)
        try:
            self._run_move(" with ".join(["joint", *added]), move, buffers)
        except BaseException:
            if perturbation is not None:
                self._stored_weights.restore()
            raise
        self._has_summed_gradients = False
        self.executor.weights_changed(by_optimizer=True)
        if self.measurements:
            self._run_measurements(buffers, is_first=not self._has_updated, is_last=last)
        self._has_updated = True
        if self.after_update:
            self.after_update()

    def _joint_update(self, penalty: AddedPenalty | None, is_perturbed: bool, buffers: Buffers) -> None:
        finite = self.compute_both_gradients(buffers, penalty=penalty, is_measured=not is_perturbed)
        if is_perturbed:
            self._stored_weights.restore()
        self._step_weights(buffers)
        if finite is not None:
            buffers.update_applied.logical_and_(finite)

    def _perturb_weights(self, buffers: Buffers, perturbation: WeightPerturbation) -> None:
        """Move the weights along the gradient of the loss. Loss, accuracy and l_X of the batch come from this pass."""
        if self._has_summed_gradients:
            raise UsageError("awp+ cannot perturb the weights of an update that sums the gradients of several passes.")
        self._count_backprop(self._num_forwards)
        self.executor.prepare_forward(buffers.x)
        self._run_move(f"perturb by {perturbation}", partial(self._ascend_weights, perturbation), buffers)
        self.executor.weights_changed()

    def _ascend_weights(self, perturbation: WeightPerturbation, buffers: Buffers) -> None:
        self.compute_both_gradients(buffers)
        self.executor.merge_gradients()
        self._stored_weights.store()
        perturbation.perturb(self.net.parameters())
        self.clear_gradients()

    @cached_property
    def _stored_weights(self) -> StoredTensors:
        """The weights and the batch-norm statistics, to be put back after a pass with perturbed weights."""
        return StoredTensors([*self.net.parameters(), *self.net.buffers()])

    def compute_both_gradients(
        self,
        buffers: Buffers,
        layer: FirstLayer | None = None,
        penalty: AddedPenalty | None = None,
        is_measured: bool = True,
    ) -> Tensor | None:
        """Compute the gradients with respect to theta and by delta, as a part of a move.

        One backward pass gives both, so they are gradients of the same loss: the learner's. A regulariser in it, such
        as the divergence of TRADES in a replay, steers delta and l_X too. Gradients of two losses would need a backward
        pass each, also if they share the forward pass. What does not depend on x + delta (the clean branch of TRADES, a
        penalty on weights) has no gradient with respect to delta and is not part of it.

        Args:
            buffers: The batch's buffers; delta's gradient is written to `buffers.grad`.
            layer: The first layer, if the gradients with respect to its output offsets are needed as well (YOPO). The
                loss, accuracy and magnitude are not recorded then.
            penalty: What is added to the loss for theta's gradient. Delta's is that of the loss alone.
            is_measured: Whether delta's gradient, loss, accuracy and magnitude are written to the buffers.

        Returns:
            Under a loss scaler, whether delta's gradient is finite, as a device value; otherwise None.

        Raises:
            UsageError: If the loss does not depend on the input.
        """
        delta = buffers.delta.detach().requires_grad_()
        own_grad: Tensor | None = None
        with self.engine.autocast():
            visible = self.attack.visible_delta(self.threat, buffers.x, delta)
            if penalty is not None:
                bound = partial(penalty.add_to, threat=self.batch_threat(buffers), noise=buffers.noise)
                loss, logits, own_grad = self.functions.penalised_objective(buffers, visible, bound)
            elif layer is None:
                loss, logits = self.functions.objective(buffers, visible)
            else:
                loss, logits = self.functions.objective_with_offsets(buffers, visible, layer)
        if own_grad is not None and visible is not delta:
            (own_grad,) = torch.autograd.grad(visible, delta, own_grad, retain_graph=True)
        self.engine.backward(self._weight_by_share(loss, buffers))
        self.executor.merge_gradients(keep_for_optimizer=True)
        if delta.grad is None:
            raise UsageError("the loss does not depend on the input: the model detaches it or rounds it away.")
        finite = self.engine.is_finite(delta.grad) if layer is None else None
        if not is_measured:
            return finite
        if own_grad is None:
            self.engine.unscale_into(buffers.grad, delta.grad, self.effective_batch_size(buffers))
        else:  # of this process's own mean, and not scaled
            grad = own_grad * (len(buffers) * self._has_own_images)
            buffers.grad.copy_(grad if self.engine.scaler is None else torch.nan_to_num(grad, posinf=0.0, neginf=0.0))
        if layer is not None:
            return None  # the rest is recorded in the last pass of a batch only
        buffers.loss.copy_(loss.detach())
        buffers.num_correct.copy_(self.task.accuracy(logits.detach(), buffers.y).sum())
        if self.probe.move == "joint":
            self._measure_magnitude(buffers)
        return finite

    def _weight_by_share(self, loss: Tensor, buffers: Buffers) -> Tensor:
        """Weight a mean over this process's images by their number, so that DDP's average is the batch mean."""
        weight = len(buffers) * self._has_own_images / self.effective_batch_size(buffers)
        return loss if weight == 1 else loss * weight

    def _step_weights(self, buffers: Buffers) -> None:
        """Step theta along its accumulated gradient, and clear the gradient."""
        is_taken = self.engine.step(self.optimizer)
        self.clear_gradients()
        if is_taken is not None:
            buffers.update_applied.copy_(is_taken)
            self.meter.count_skipped(~is_taken)

    def accumulate_gradients(self, buffers: Buffers, move: Move) -> None:
        """Run a move that adds to theta's gradient without stepping theta.

        Args:
            buffers: The batch's buffers.
            move: The move; it calls `compute_both_gradients` once.
        """
        self._count_backprop(self._num_forwards)
        self._has_summed_gradients = True
        if self.engine.use_cuda_graphs and not self.has_static_gradients:
            self._allocate_gradients()
        self.executor.prepare_forward(buffers.x)
        self._run_move("accumulate", partial(self._accumulate_move, move), buffers)

    def _accumulate_move(self, move: Move, buffers: Buffers) -> None:
        move(buffers)
        self.executor.merge_gradients()

    def _allocate_gradients(self) -> None:
        """Give every weight a gradient in static memory, for recordings to add to."""
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        self.has_static_gradients = True
        self.executor.clear_recordings()  # these allocate gradients of their own

    def clear_gradients(self) -> None:
        """Clear theta's gradients: zero them if recordings add to them, else drop them."""
        self.optimizer.zero_grad(set_to_none=not self.has_static_gradients)

    def step_delta(self, buffers: Buffers) -> None:
        """Step delta along the last gradient, and project it; stopped examples do not move.

        Args:
            buffers: The batch's buffers.
        """
        if self._count_step():
            self.executor.prepare_forward(buffers.x)
        self._run_move("step", self.step_delta_in_move, buffers)
        self.delta_scale.restore()
        self._remember_start(buffers)

    def step_delta_in_move(self, buffers: Buffers) -> None:
        """Step delta as `step_delta` does, as a part of a move.

        Args:
            buffers: The batch's buffers.
        """
        if self.attack.freeze is None and self.union_rule is None:
            self.functions.projected_step(buffers.x, buffers.delta, buffers.grad, self.step_size, out=buffers.delta)
            return
        next_delta, next_ball = self._next_delta(buffers)
        if self.attack.freeze is not None:
            self.meter.count_active(buffers.active)
            next_delta = torch.where(broadcast_mask(buffers.active, buffers.x), next_delta, buffers.delta)
            next_ball = torch.where(buffers.active, next_ball, buffers.ball)
        buffers.delta.copy_(next_delta)
        buffers.ball.copy_(next_ball)

    def _next_delta(self, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Where a step takes delta, and the balls that it is then in."""
        if self.union_rule is not None:
            return self.union_rule.next_delta(self, buffers)
        out = torch.empty_like(buffers.delta)
        return self.functions.projected_step(
            buffers.x, buffers.delta, buffers.grad, self.step_size, out=out
        ), buffers.ball

    def attack_losses(self, buffers: Buffers, delta: Tensor) -> Tensor:
        """Return the attack's loss of each example at x + delta, (B,), by a forward pass without gradients.

        It is a part of a move, which counts the pass.

        Args:
            buffers: The batch's buffers.
            delta: The perturbations.
        """
        with torch.no_grad(), self.attack_mode(), self.engine.autocast():
            outputs = self.functions.logits(buffers.x + self.attack.visible_delta(self.threat, buffers.x, delta))
            return self.attack.loss_fn(self.task)(outputs, buffers.y, buffers.reference_logits)

    def _measure_magnitude(self, buffers: Buffers) -> None:
        buffers.magnitude.copy_(self.probe.measure(buffers.grad, self.batch_threat(buffers), self.pixel_scale))

    def _run_measurements(self, buffers: Buffers, *, is_first: bool, is_last: bool) -> None:
        for update, is_due in (("first", is_first), ("last", is_last)):
            if is_due and any(measurement.update == update for measurement in self.measurements):
                self._run_move(f"measure after the {update} update", partial(self._measure_after, update), buffers)

    def _measure_after(self, update: str, buffers: Buffers) -> None:
        threat = self.batch_threat(buffers)
        for column, measurement in enumerate(self.measurements):
            if measurement.update == update:
                measurement.write(buffers, threat, column)

    def end_batch(self, buffers: Buffers) -> None:
        """Add the batch to the meter, and store delta if it is carried to the next batch.

        Args:
            buffers: The batch's buffers.

        Raises:
            UsageError: The attack remembers starts, and the play made no step that it could remember.
        """
        if self._must_remember:
            raise UsageError(
                "the attack remembers a start for each image, and the play made no step of delta with game.ascend or "
                "game.step_delta (yopo makes none). Use a play such as Craft or Replay."
            )
        self._run_move("close", partial(self.meter.add, has_own_images=self._has_own_images), buffers)
        if self.union_rule is not None and self.union_rule.tensors() and self._is_attacked:
            self._run_move("observe", partial(self.union_rule.observe, has_own_images=self._has_own_images), buffers)
        if self.attack.persistent and self._has_own_images:
            self._store_carried_delta(buffers.delta)
        self.last_batch = buffers

    def _store_carried_delta(self, delta: Tensor) -> None:
        if (
            self.carried_delta is None
            or self.carried_delta.shape[1:] != delta.shape[1:]
            or len(self.carried_delta) < len(delta)
        ):
            self.carried_delta = delta.clone()
        else:
            self.carried_delta[: len(delta)].copy_(delta)

    @contextmanager
    def attack_mode(self) -> Iterator[None]:
        """Put the network into the attack's batch-norm mode inside, and restore every module's mode afterwards."""
        if self.attack.batch_norm == "train":
            yield
            return
        with eval_mode(self.net):
            yield

    def prepare_first_layer(self, buffers: Buffers) -> FirstLayer:
        """Find the network's first layer (once), and make output offsets for these buffers.

        Args:
            buffers: The batch's buffers.

        Returns:
            The first layer.

        Raises:
            UsageError: If no layer with parameters sees the input.
        """
        layer = self._first_layer = self._first_layer or find_first_layer(self.net, buffers.x[:1])
        if buffers not in layer.output_offsets:
            with self.engine.autocast():
                layer.make_offsets(self.functions.unwrapped_objective, buffers, self.engine.to_memory_format)
        return layer

    def mutable_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that a move may change, apart from the buffers'."""
        yield from (*self.net.parameters(), *self.net.buffers(), self.meter.sums, self.meter.counts)
        yield from self._stored_weights.copies if self.weight_perturbation is not None else ()
        yield from self.executor.half_weight_tensors()
        yield from self.union_rule.tensors() if self.union_rule is not None else ()
        yield from (p.grad for p in self.net.parameters() if self.has_static_gradients and p.grad is not None)
        yield from self.engine.scaler.tensors() if isinstance(self.engine.scaler, LossScaler) else ()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def effective_batch_size(self, buffers: Buffers) -> float:
        """Return the size to divide this process's sum of losses by, so that DDP's average is the batch mean.

        Args:
            buffers: The batch's buffers.
        """
        return len(buffers) if self.global_batch_size is None else self.global_batch_size / self.distributed.size

    @property
    def _has_own_images(self) -> bool:
        """Whether this process has images of the batch; otherwise it computes on placeholders that do not count."""
        return self.global_batch_size is None or self.distributed.shard.count(self.global_batch_size) > 0

    @property
    def _num_forwards(self) -> int:
        loss = getattr(self.functions.unwrapped_objective, "loss", None)
        return int(getattr(loss, "num_forwards", 1))

    def _count_backprop(self, num_forwards: int = 1) -> None:
        self.cost.backprops += 1
        self.cost.passes += 2 * num_forwards

    def _count_step(self) -> int:
        """Count and return the forward passes of a step of delta that compares losses."""
        passes = 0 if self.union_rule is None else self.union_rule.passes_per_step
        self.cost.passes += passes
        return passes

    def _run_move(self, name: str, move: Move, buffers: Buffers) -> None:
        recorded = not (self.distributed.is_multiprocess and name.startswith(SYNCHRONISED_MOVES))
        self.executor.run(name, move, buffers, self.mutable_tensors, recorded=recorded)


def _get_common_task(objective: nn.Module, task: Task | None) -> Task:
    """The task of a game, which its objective must have too."""
    own = getattr(unwrap_ddp(objective), "task", None)
    if task is not None and isinstance(own, Task) and own != task:
        raise UsageError(f"the objective is for the task {own}, and the game for {task}: give both the same task.")
    return task or (own if isinstance(own, Task) else CLASSIFICATION)
