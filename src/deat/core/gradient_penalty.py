"""Penalties on the gradient with respect to the input: its change along its own direction (g+), and under noise (GradAlign)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from deat.core.training_losses import LossOutput, PenalisedOutput
from deat.errors import UsageError, unknown_name_error
from deat.tasks import Task
from deat.threat import ThreatModel
from deat.utils.numbers import check_number
from deat.utils.torch_contexts import broadcast_mask

PENALTY_FORMS = ("gradient", "curvature")
SCALE_PER_EXAMPLE = 256.0
"""Keeps the gradient with respect to the input of a mean loss out of the underflow of float16; a power of two scales exactly."""


class AddedPenalty(Protocol):
    """What is added to the training loss in the last update of a batch.

    Attributes:
        needs_noise: Whether it needs uniform noise of the threat model, drawn anew for each batch.
    """

    needs_noise: ClassVar[bool]

    @property
    def backprops(self) -> int:
        """The backward calls that it adds to an update."""

    def num_passes(self, num_forwards: int) -> int:
        """The forward and backward passes that it adds to an update whose loss makes so many forward passes."""

    def add_to(
        self,
        loss_function: Callable[..., LossOutput],
        net: nn.Module,
        x: Tensor,
        delta: Tensor,
        y: Tensor,
        task: Task,
        threat: ThreatModel,
        noise: Tensor,
    ) -> PenalisedOutput:
        """Compute the training loss with the penalty.

        Args:
            loss_function: The training loss, as a function of (net, x, delta, y).
            net: The network.
            x: The images.
            delta: The perturbation; its gradient is needed.
            y: The labels.
            task: What outputs and labels mean.
            threat: The threat model.
            noise: Noise in ball and box; empty unless it is needed.

        Returns:
            Loss and penalty, the outputs at x + delta, and the gradient of the loss alone with respect to delta, None
            if the penalty does not depend on delta.
        """


@dataclass(frozen=True)
class GradientPenalty:
    """A penalty on the gradient of the training loss with respect to the input, at the point x + delta that is trained on.

    Let g be that gradient, v the steepest step of length eps in the norm of the threat model along g (for Linf eps
    times its sign, so that the dual norm is measured), and h the step. Both forms are in units of the loss, whatever
    the norm, the radius and the size of the input:

    * "gradient" (Finlay and Oberman 2021): the mean of ((l(x + delta + h v) - l(x + delta)) / h)^2 over examples, with
      l the loss of the task. It is the finite difference for (eps times the dual norm of g)^2, without a second
      derivative. One more forward pass, and the gradient g.
    * "curvature" (Moosavi-Dezfooli et al. 2019): the mean of (|v| |g(x + delta + h v) - g(x + delta)| / h)^2 with
      Euclidean norms and the method's own loss. It is differentiated twice, and costs about twice as much.

    In both, g comes from the training loss and v is a constant for the update of the weights.

    Args:
        form: "gradient" or "curvature".
        weight: The weight of the penalty beside the loss.
        step: h, in units of eps. In half precision a step of less than an eighth of 8/255 drowns in rounding.

    Raises:
        UsageError: If a setting is not accepted.
    """

    form: Literal["gradient", "curvature"]
    weight: float
    step: float
    needs_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.form not in PENALTY_FORMS:
            raise unknown_name_error("form of the gradient penalty", self.form, PENALTY_FORMS)
        advice = " (at 0 it is the method without g+: leave g+ out)" if self.weight == 0 else ""
        check_number("the weight of g+", self.weight, lambda v: v > 0, f"> 0, such as 0.1{advice}")
        check_number("the step of g+", self.step, lambda v: 0 < v <= 1e3, "> 0 in units of eps, such as 0.25")

    @property
    def backprops(self) -> int:
        """The backward calls that it adds to an update."""
        return 1 if self.form == "gradient" else 2

    def num_passes(self, num_forwards: int) -> int:
        """The forward and backward passes that it adds to an update whose loss makes so many forward passes.

        Forward and backward at the second point, and the backward pass to g; for the curvature a backward pass to the
        second gradient, and the two of differentiating both gradients.

        Args:
            num_forwards: How many forward passes the update's loss makes.

        Returns:
            How many passes are added.
        """
        return 3 if self.form == "gradient" else 4 + 2 * num_forwards

    def add_to(
        self,
        loss_function: Callable[..., LossOutput],
        net: nn.Module,
        x: Tensor,
        delta: Tensor,
        y: Tensor,
        task: Task,
        threat: ThreatModel,
        noise: Tensor | None = None,
    ) -> PenalisedOutput:
        """Compute the training loss with the penalty; see `AddedPenalty.add_to`."""
        with _RandomNumbers(net) as random_numbers:
            output = loss_function(net, x, delta, y)
        grad = _input_gradient(output.loss, delta, create_graph=self.form == "curvature")
        if threat.eps == 0:
            return PenalisedOutput(*output, grad.detach())
        moved = threat.step(x, delta.detach(), grad.detach(), self.step * threat.eps).detach()
        if self.form == "gradient":
            with random_numbers.replayed():
                other = task.loss(net(x + moved), y)
            squared = ((other - task.loss(output.logits_adv, y)) / self.step).square()
        else:
            moved.requires_grad_()
            with random_numbers.replayed(first=True):
                other_grad = _input_gradient(loss_function(net, x, moved, y).loss, moved, create_graph=True)
            length = torch.linalg.vector_norm((moved - delta).detach().flatten(1), dim=1)
            # A norm has no derivative where the gradients agree, its square has.
            change = (other_grad - grad) * broadcast_mask(length, x) * (len(x) / self.step**2)
            squared = change.flatten(1).square().sum(1)
        return PenalisedOutput(output.loss + self.weight * squared.mean(), output.logits_adv, grad.detach())


@dataclass(frozen=True)
class GradientAlignment:
    """The penalty of GradAlign (Andriushchenko and Flammarion 2020): weight * (1 - cos(g(x), g(x + noise))).

    g is the gradient of the task's loss with respect to the input, the noise is uniform in the threat model, and the
    mean is taken over examples; one whose gradient is zero counts 0. The gradient at x + noise is differentiated with
    respect to the weights, that at x is a constant, as in the authors' code.

    Args:
        weight: The weight beside the loss; the authors take 0.2 for Linf 8/255 on CIFAR-10.

    Raises:
        UsageError: If the weight is not accepted.
    """

    weight: float = 0.2
    needs_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        advice = " (at 0 it is fgsm)" if self.weight == 0 else ""
        check_number("the weight of gradalign", self.weight, lambda v: v > 0, f"> 0, such as 0.2{advice}")

    @property
    def backprops(self) -> int:
        """Two: the gradients at x and at x + noise."""
        return 2

    def num_passes(self, num_forwards: int) -> int:
        """Forward and backward at x and at x + noise, and the two passes of differentiating the latter."""
        return 6

    def add_to(
        self,
        loss_function: Callable[..., LossOutput],
        net: nn.Module,
        x: Tensor,
        delta: Tensor,
        y: Tensor,
        task: Task,
        threat: ThreatModel,
        noise: Tensor,
    ) -> PenalisedOutput:
        """Compute the training loss with the penalty; see `AddedPenalty.add_to`."""
        output = loss_function(net, x, delta, y)
        clean, noisy = (start.detach().requires_grad_() for start in (torch.zeros_like(x), noise))
        with _RandomNumbers(net) as random_numbers:
            loss = task.loss(net(x + clean), y).mean()
        grad = _input_gradient(loss, clean, create_graph=False)
        with random_numbers.replayed():
            loss = task.loss(net(x + noisy), y).mean()
        noisy_grad = _input_gradient(loss, noisy, create_graph=True)
        penalty = self.weight * _mean_angle(grad, noisy_grad)
        return PenalisedOutput(output.loss + penalty, output.logits_adv, None)


def _mean_angle(grad: Tensor, other: Tensor) -> Tensor:
    """The mean over examples of 1 - cosine, or 0 where a gradient is zero."""
    rows = grad.flatten(1), other.flatten(1)
    # Scaled by their largest value, since the squares of small gradients underflow.
    largest = [row.detach().abs().amax(1, keepdim=True) for row in rows]
    tiny = torch.finfo(grad.dtype).tiny
    first, second = (row / size.clamp(min=tiny) for row, size in zip(rows, largest, strict=True))
    is_defined = ((largest[0] > 0) & (largest[1] > 0)).squeeze(1)
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=1)
    return torch.where(is_defined, 1 - cosine, 0.0).mean()


def _input_gradient(loss: Tensor, delta: Tensor, *, create_graph: bool) -> Tensor:
    """The gradient of a mean loss with respect to delta; the loss's graph is kept."""
    scale = SCALE_PER_EXAMPLE * 2.0 ** (len(delta).bit_length() - 1)
    (grad,) = torch.autograd.grad(loss * scale, delta, retain_graph=True, create_graph=create_graph, allow_unused=True)
    if grad is None:
        raise UsageError("the loss does not depend on the input: the model detaches it or rounds it away.")
    return grad / scale


class _RandomNumbers:
    """The random numbers of a network's forward passes, such as dropout masks, to be drawn again.

    Two passes with different masks would differ by more than the change of the input makes them.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._states: list[list[tuple[torch.device, Tensor]]] = []

    def __enter__(self) -> "_RandomNumbers":
        self._hook = self._net.register_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _note(self, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        device = inputs[0].device
        states = [(torch.device("cpu"), torch.get_rng_state())]
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            states.append((device, torch.cuda.get_rng_state(device)))
        elif device.type == "cuda" and any(isinstance(m, _DROPOUTS) and m.training and m.p for m in net.modules()):
            raise RuntimeError("g+ draws the same dropout masks twice, which a recording cannot")
        self._states.append(states)

    @contextmanager
    def replayed(self, *, first: bool = False) -> Iterator[None]:
        """Inside, draw the numbers of the last forward pass again, or those from the first one on."""
        for device, state in self._states[0 if first else -1]:
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
        yield


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
