"""Threat models: the Linf, L2 and L1 balls of perturbations and their unions, intersected with the box of values.

Images, or other inputs, and perturbations are float tensors (B, ...), batch first. The box is [0, 1] unless a threat
model has another. Radii may be in units of each feature's deviation (`scale`), and features may be fixed (`mutable`): a
perturbation is then measured, stepped and projected as delta / scale, and is zero where a feature is fixed. Every
function is batched, keeps the dtype of its input and never reads a tensor on the host, so it can be compiled and
recorded as a CUDA graph.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad

from deat.errors import UsageError, unknown_name_error
from deat.utils.numbers import parse_number
from deat.utils.text import format_eps
from deat.utils.torch_contexts import broadcast_mask

START_KINDS = ("zero", "uniform", "normal", "bernoulli", "jitter")
"""How an attack may start."""
UNION_RULES = ("worst", "random", "error", "magnitude")
"""How a training step may pick among the balls of a union; `deat.core.union_rules` has what they do."""
Box = tuple[float, float] | None
"""The least and the largest value of an input; None for no bounds."""
UNIT_BOX: Box = (0.0, 1.0)
"""The box of images."""
_BOUND_TOLERANCE = 1e-6  # rounding leaves a pixel that far from a bound that it reached
_FAR = 1e3  # in units of eps; the projection of a point that far out has all but 0.1 % of the largest rise


@dataclass(frozen=True)
class FeatureValues:
    """A number for each feature of an example, as immutable values that compare and hash.

    Args:
        values: The numbers, in the order of a flattened tensor.
        shape: The tensor's shape, which broadcasts over one example.
    """

    values: tuple[float, ...]
    shape: tuple[int, ...]
    _tensors: dict[tuple[torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, name: str, values: Any) -> "FeatureValues":
        """Make them of a number, a list, an array, a tensor, or the part of a record.

        Args:
            name: What the numbers are, for messages.
            values: The numbers.

        Returns:
            The numbers.

        Raises:
            UsageError: The values are no numbers.
        """
        if isinstance(values, FeatureValues):
            return values
        try:
            if isinstance(values, Mapping):
                tensor = torch.tensor(values["values"], dtype=torch.float64).view(values["shape"])
            else:
                tensor = torch.as_tensor(values).detach().to("cpu", torch.float64)
        except (TypeError, ValueError, RuntimeError, KeyError):
            raise UsageError(
                f"{name} must be a list or tensor with a number for each feature, not {values!r}."
            ) from None
        return cls(tuple(tensor.flatten().tolist()), tuple(tensor.shape))

    def like(self, examples: Tensor) -> Tensor:
        """Return the numbers as a tensor of the examples' device and dtype. It is made once and cached.

        Args:
            examples: The examples, (B, ...).
        """
        key = examples.device, examples.dtype
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(self.values, dtype=key[1], device=key[0]).view(self.shape)
        return self._tensors[key]

    def describe(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return {"shape": list(self.shape), "values": list(self.values)}

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.values[:4])
        return f"[{shown}{', ...' if len(self.values) > 4 else ''}] of shape {self.shape}"


@dataclass(frozen=True, repr=False)
class ThreatModel(ABC):
    """How an adversary may change an image: by a vector in a norm ball that keeps values in a box, such as [0, 1].

    Args:
        eps: The radius of the ball, as a number or as text such as "8/255".
        box: The least and the largest value that an input may have, such as (-1, 1) for audio; None for no bounds.
        scale: A positive number for each feature, such as its deviation, in a list or tensor that broadcasts over one
            example: the radius is in units of it. By default 1.
        mutable: Whether each feature can change, in a list or tensor that broadcasts over one example. By default all
            can. Categories and identifiers should not.

    Attributes:
        name: The name of the norm: "linf", "l2" or "l1".
        pointwise: Whether a step changes every pixel independently of the others.

    Raises:
        UsageError: If the radius is negative, or not a number, or larger than any image, or the box is empty, or scale
            or mutable are not accepted.

    Example:
        >>> deat.Linf(0.002, box=(-1, 1))  # waveforms
        >>> deat.L2(0.5, box=None, scale=features.std(0), mutable=[True, True, False])  # a table
    """

    eps: float
    box: Box = UNIT_BOX
    scale: FeatureValues | Sequence[float] | Tensor | None = None
    mutable: FeatureValues | Sequence[bool] | Tensor | None = None
    name: ClassVar[str]
    pointwise: ClassVar[bool] = False
    # A normal vector and a sign vector of equal norm: the deviation of the one's coordinates over the size of the other's.
    _normal_to_sign_ratio: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        eps = parse_number(self.eps)
        if eps < 0:
            raise UsageError(f"eps {eps} is negative. A radius is 0 or more: give it without a sign.")
        if eps > 1e9:
            raise UsageError(f"eps {eps:g} is larger than any image: pixel values are in [0, 1].")
        object.__setattr__(self, "eps", eps)
        object.__setattr__(self, "box", _parse_box(self.box))
        for name, parse in (("scale", _parse_scale), ("mutable", _parse_mutable)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse(getattr(self, name)))

    def __repr__(self) -> str:
        other = [] if self.box == UNIT_BOX else [f"box={self.box}"]
        other += [f"{name}={value}" for name, value in self._feature_values().items()]
        return f"{type(self).__name__}({', '.join([f'eps={self.eps!r}', *other])})"

    @property
    def balls(self) -> "tuple[ThreatModel, ...]":
        """The balls of a union; of any other threat model, itself alone."""
        return (self,)

    @property
    def text(self) -> str:
        """Norm and radius as `parse_threat` reads them, such as "l2:0.5"."""
        return f"{self.name}:{self.eps!r}"

    @property
    def is_plain(self) -> bool:
        """Whether the box is [0, 1], and every feature can change and has the unit 1."""
        return self.box == UNIT_BOX and not self._feature_values()

    def describe(self) -> dict[str, Any]:
        """Return the threat model as JSON values, for records.

        Returns:
            Norm and radius; box, scale and mutable features only where they are not the default.
        """
        box = {} if self.box == UNIT_BOX else {"box": None if self.box is None else list(self.box)}
        features = {name: value.describe() for name, value in self._feature_values().items()}
        return {"norm": self.name, "eps": self.eps, **box, **features}

    def check_shape(self, shape: Sequence[int]) -> None:
        """Check that scale and mutable features fit the examples.

        Args:
            shape: The shape of one example.

        Raises:
            UsageError: They do not broadcast over an example.
        """
        for name, value in self._feature_values().items():
            sides = zip(reversed(value.shape), reversed(shape), strict=False)
            if len(value.shape) > len(shape) or any(own not in (1, side) for own, side in sides):
                raise UsageError(
                    f"{name} has shape {value.shape}, which does not fit examples of shape {tuple(shape)}: give one number "
                    "for each feature."
                )

    def describe_fixed(self) -> tuple[int, int]:
        """Return how many of the numbers in `mutable` are features that cannot change, and how many there are."""
        values = self.mutable.values if isinstance(self.mutable, FeatureValues) else ()
        return len(values) - round(sum(values)), len(values)

    def _feature_values(self) -> dict[str, FeatureValues]:
        values = {"scale": self.scale, "mutable": self.mutable}
        return {name: value for name, value in values.items() if isinstance(value, FeatureValues)}

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """Return the norm of each perturbation, (B,), in units of the scale.

        Args:
            delta: The perturbations, (B, ...).
        """

    @abstractmethod
    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the dual norm of each gradient, (B,): the largest slope along an allowed step of norm 1.

        Args:
            grad: The gradients, (B, ...).
        """

    @abstractmethod
    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Take the steepest-ascent step in this norm, without projection.

        Args:
            x: The images.
            delta: Their perturbations.
            grad: The gradients of the loss.
            alpha: The length of the step.

        Returns:
            The new perturbations.
        """

    @abstractmethod
    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the perturbation inside ball and box that is nearest in Euclidean distance.

        Args:
            x: The images, which must lie in the box. For an image outside it the result is in the ball only.
            delta: Their perturbations.

        Returns:
            The projected perturbations.
        """

    def project_to_ball(self, delta: Tensor) -> Tensor:
        """Shrink perturbations into the ball alone, whatever the pixels become.

        Args:
            delta: The perturbations.

        Returns:
            The perturbations, those outside the ball scaled to its surface; for Linf, every pixel clamped to eps.
        """
        delta = self._zero_fixed_features(delta)
        norm = self.norm(delta).clamp(min=torch.finfo(delta.dtype).tiny)
        return delta * broadcast_mask((self.eps / norm).clamp(max=1), delta)

    @abstractmethod
    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw from the uniform distribution in the ball.

        Args:
            like: A tensor of the shape (B, n), dtype and device of the result; its values are not used.
            generator: The generator of the draw; torch's own if None.

        Returns:
            The vectors, (B, n). They need not stay in the box.
        """

    @abstractmethod
    def sign_scale(self, n: int) -> float:
        """Return the size of each coordinate of a vector of n signs that has norm eps.

        Args:
            n: How many coordinates the vector has.
        """

    def clip_to_box(self, x: Tensor) -> Tensor:
        """Return inputs with every value clamped to the box.

        Args:
            x: The inputs, (B, ...).
        """
        return x if self.box is None else x.clamp(*self.box)

    def project_to_box(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return perturbations with x + delta clamped to the box, however far they are outside the ball.

        Args:
            x: The images.
            delta: Their perturbations; those of fixed features become zero.
        """
        delta = self._zero_fixed_features(delta)
        return delta if self.box is None else delta.clamp(self.box[0] - x, self.box[1] - x)

    def _zero_fixed_features(self, delta: Tensor) -> Tensor:
        """The perturbation without the changes of fixed features."""
        return delta * self.mutable.like(delta) if isinstance(self.mutable, FeatureValues) else delta

    def _to_units(self, values: Tensor) -> Tensor:
        return values / self.scale.like(values) if isinstance(self.scale, FeatureValues) else values

    def _from_units(self, values: Tensor) -> Tensor:
        """Values in units of the scale as they are in the input, zero where a feature is fixed."""
        return self._zero_fixed_features(
            values * self.scale.like(values) if isinstance(self.scale, FeatureValues) else values
        )

    def initial_delta(
        self,
        x: Tensor,
        kind: str,
        generator: Generator | None = None,
        *,
        full_batch_size: int | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Return perturbations for an attack to start from, inside ball and box.

        Args:
            x: The images.
            kind: One of START_KINDS: zero, uniform in the ball, a normal vector, random signs of norm eps, or the
                small normal noise of TRADES.
            generator: The generator of the draw; torch's own if None.
            full_batch_size: If `x` is a part of a batch, the length of the whole batch, for which the draw is made.
            rows: Which rows of the whole batch `x` is.

        Returns:
            The perturbations.

        Raises:
            UsageError: If the kind is unknown.
        """
        like = x.flatten(1) if full_batch_size is None else x.new_empty(full_batch_size, x[0].numel())
        scale = self.sign_scale(self._num_mutable(like.shape[1]))
        match kind:
            case "zero":
                return torch.zeros_like(x)
            case "uniform":
                delta = self.sample_uniform(like, generator)
            case "normal":
                delta = scale * self._normal_to_sign_ratio * _randn_like(like, generator)
            case "bernoulli":
                delta = scale * _random_signs_like(like, generator)
            case "jitter":
                delta = 0.001 * _randn_like(like, generator)
            case _:
                raise unknown_name_error("start", kind, START_KINDS)
        return self.project(x, self._from_units(delta[rows].view(x.shape)))

    def _num_mutable(self, n: int) -> int:
        """How many of the n features of an example can change."""
        mutable = self._feature_values().get("mutable")
        return n if mutable is None else max(1, round(n * sum(mutable.values) / len(mutable.values)))

    def grey_radius(self, n: int) -> float:
        """Return the radius at which all n pixels of any image can become grey, so that all images look the same.

        It is infinite where no radius does that: without a box, or with fixed features.

        Args:
            n: How many pixels an image has, over all channels.
        """
        if self.box is None or self.mutable is not None:
            return math.inf
        scale = self._feature_values().get("scale")
        reach = 0.5 * (self.box[1] - self.box[0]) / (min(scale.values) if scale else 1.0)
        return reach * self.eps / self.sign_scale(n) if self.eps else reach

    def pgd_step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Take one step of projected gradient ascent: `step`, then `project`.

        Args:
            x: The images.
            delta: Their perturbations.
            grad: The gradients of the loss.
            alpha: The length of the step.

        Returns:
            The new perturbations.
        """
        return self.project(x, self.step(x, delta, grad, alpha))

    def steepest_delta(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the perturbation in ball and box along which the loss rises most to first order.

        It is exact for a ball of deat's norms; for a threat model of your own it is a step of the length eps.

        Args:
            x: The images.
            grad: The gradients of the loss.

        Returns:
            The perturbations.
        """
        return self.pgd_step(x, torch.zeros_like(grad), grad, self.eps)

    def contains(self, x: Tensor, x_adv: Tensor, atol: float = 1e-6) -> Tensor:
        """Return whether each adversarial image is allowed, computed in float64.

        Args:
            x: The images.
            x_adv: The adversarial images.
            atol: How far they may be outside ball and box. Where values are not in [0, 1], the rounding of x + delta
                is allowed too.

        Returns:
            Booleans, (B,). An image with a NaN, or with a change of a fixed feature, is not allowed, nor one that a
            `project` of your own would move.
        """
        adv, clean = x_adv.double(), x.double()
        delta, limit = adv - clean, torch.as_tensor(self.eps + atol * max(1.0, self.eps), dtype=torch.float64)
        rounding = torch.zeros_like(clean) if self.is_plain else 2 * torch.finfo(x.dtype).eps * clean.abs()
        allowed = self.norm(delta) <= limit + self.norm(rounding)
        if self.box is not None:
            low, high = self.box
            allowed &= ((adv >= low - atol - rounding) & (adv <= high + atol + rounding)).flatten(1).all(1)
        if type(self).project is not _NormBall.project:
            # A set of the user's own: what its projection does not move is allowed.
            unit = 2 * torch.finfo(x.dtype).eps * clean.abs().clamp(min=1)
            moved = self.norm(self.project(clean, delta) - delta)
            allowed &= moved <= atol * max(1.0, self.eps) + self.norm(unit)
        return allowed & (self._zero_fixed_features(delta) == delta).flatten(1).all(1)


class _NormBall(ThreatModel):
    """The ball of a norm. Its formulas are for features in units of 1; scale and fixed features are applied here."""

    def norm(self, delta: Tensor) -> Tensor:
        """Return the norm in units of the scale; see `ThreatModel.norm`."""
        return self._norm(self._to_units(delta))

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the dual norm of the gradient with respect to features in units of the scale; see `ThreatModel.dual_norm`."""
        return self._dual_norm(self._from_units(grad))

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Move by alpha in the direction of steepest ascent; see `ThreatModel.step`."""
        return delta + self._from_units(self._move(x, delta, self._from_units(grad), alpha))

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Project to ball and box, with distances in units of the scale; see `ThreatModel.project`."""
        below, above = self._room(x)
        if not self._feature_values():
            return self._project(delta, below, above, x)
        below, above = (None if room is None else self._to_units(room) for room in (below, above))
        projected = self._from_units(
            self._project(self._to_units(self._zero_fixed_features(delta)), below, above, None)
        )
        # Rounding by the scale may leave the box by a float.
        return projected if self.box is None else self._zero_fixed_features(self.clip_to_box(x + projected) - x)

    def steepest_delta(self, x: Tensor, grad: Tensor) -> Tensor:
        """Project a point far out along the gradient; see `ThreatModel.steepest_delta`."""
        slope = self._from_units(grad)
        far = _FAR * self.eps * _normalize_rows(slope.flatten(1)).view_as(grad)
        return self.project(x, self._from_units(far))

    def _room(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """How far each feature can fall and rise in the box."""
        if self.box is None:
            return None, None
        low, high = self.box
        return (x - low if low else x), high - x

    @abstractmethod
    def _norm(self, delta: Tensor) -> Tensor: ...

    @abstractmethod
    def _dual_norm(self, grad: Tensor) -> Tensor: ...

    @abstractmethod
    def _move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """The steepest step of length alpha."""

    @abstractmethod
    def _project(self, delta: Tensor, below: Tensor | None, above: Tensor | None, x: Tensor | None) -> Tensor:
        """The nearest perturbation in ball and box.

        Args:
            delta: The perturbations.
            below: How far each feature can fall in the box; None for no bound.
            above: How far it can rise.
            x: The images, to correct the rounding of x + delta; None where units are others.
        """


@dataclass(frozen=True, repr=False)
class Linf(_NormBall):
    """Every pixel may change by at most eps. This is the threat model of the paper.

    Args:
        eps: The radius, at most the width of the box.
        box: The range of values; see `ThreatModel`.
        scale: The unit of each feature.
        mutable: Whether each feature can change.

    Example:
        >>> deat.Linf(8 / 255)
        Linf(eps=0.03137254901960784)
    """

    eps: float = 8 / 255
    name: ClassVar[str] = "linf"
    pointwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.box is not None
            and self.box != UNIT_BOX
            and self.scale is None
            and self.eps > self.box[1] - self.box[0]
        ):
            raise UsageError(
                f"Linf eps is {self.eps:g}, more than the width of the box {self.box}: use a smaller radius."
            )
        if self.is_plain and self.eps > 1:
            raise UsageError(
                f"Linf eps is {self.eps:g}, but pixel values are in [0, 1]: did you mean {self.eps:g}/255?"
            )

    def _norm(self, delta: Tensor) -> Tensor:
        """The largest change of any pixel, (B,)."""
        return delta.flatten(1).abs().amax(1)

    def _dual_norm(self, grad: Tensor) -> Tensor:
        """The sum of absolute slopes, (B,)."""
        return grad.flatten(1).abs().sum(1)

    def _move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Every pixel by alpha along the sign of its slope."""
        return alpha * grad.sign()

    def steepest_delta(self, x: Tensor, grad: Tensor) -> Tensor:
        """Take a step of length eps in every pixel; see `ThreatModel.steepest_delta`."""
        return self.pgd_step(x, torch.zeros_like(grad), grad, self.eps)

    def project_to_ball(self, delta: Tensor) -> Tensor:
        """Clamp each pixel's change to eps; see `ThreatModel.project_to_ball`."""
        if not self._feature_values():
            return delta.clamp(-self.eps, self.eps)
        return self._from_units(self._to_units(delta).clamp(-self.eps, self.eps))

    def _project(self, delta: Tensor, below: Tensor | None, above: Tensor | None, x: Tensor | None) -> Tensor:
        """Clamp each pixel's change to [max(-eps, -below), min(eps, above)]."""
        # Both intervals contain 0, so clamping to one after the other clamps to their intersection. The ball comes last:
        # it holds also where an image is outside the box.
        clipped = delta if below is None else delta.clamp(-below, above)
        return clipped.clamp(-self.eps, self.eps)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw every coordinate from [-eps, eps]; see `ThreatModel.sample_uniform`."""
        return self.eps * (2 * _rand_like(like, generator) - 1)

    def sign_scale(self, n: int) -> float:
        """Return eps."""
        return self.eps


@dataclass(frozen=True, repr=False)
class L2(_NormBall):
    """The Euclidean length of the change is at most eps.

    Args:
        eps: The radius.
        box: The range of values; see `ThreatModel`.
        scale: The unit of each feature.
        mutable: Whether each feature can change.
    """

    name: ClassVar[str] = "l2"

    def _norm(self, delta: Tensor) -> Tensor:
        """The Euclidean length, (B,)."""
        length: Tensor = torch.linalg.vector_norm(delta.flatten(1), dim=1)
        return length

    def _dual_norm(self, grad: Tensor) -> Tensor:
        """The Euclidean length, (B,): the L2 norm is its own dual."""
        return self._norm(grad)

    def _move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """By alpha along the gradient, and not at all if it is zero."""
        return alpha * _normalize_rows(grad.flatten(1)).view_as(delta)

    def _project(self, delta: Tensor, below: Tensor | None, above: Tensor | None, x: Tensor | None) -> Tensor:
        """Clip s * delta to the box, with the largest s <= 1 that fits the ball."""
        size, bound = _size_and_box_limit(delta, below, above)
        shrunk = torch.minimum(size * _l2_shrink_factor(size, bound, self.eps), bound)
        return _finish_projection(x, delta, shrunk, self._norm(shrunk), self.eps)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw a direction and a radius; see `ThreatModel.sample_uniform`."""
        direction = _normalize_rows(_randn_like(like, generator))
        return self.eps * direction * _rand_like(like[:, :1], generator) ** (1 / like.shape[1])

    def sign_scale(self, n: int) -> float:
        """Return eps / sqrt(n)."""
        return self.eps / math.sqrt(n)


@dataclass(frozen=True, repr=False)
class L1(_NormBall):
    """The absolute changes of all pixels sum to at most eps, so that a few pixels may change a lot.

    Args:
        eps: The radius.
        box: The range of values; see `ThreatModel`.
        scale: The unit of each feature.
        mutable: Whether each feature can change.
    """

    name: ClassVar[str] = "l1"
    _normal_to_sign_ratio: ClassVar[float] = math.sqrt(math.pi / 2)

    def _norm(self, delta: Tensor) -> Tensor:
        """The sum of absolute changes, (B,)."""
        return delta.flatten(1).abs().sum(1)

    def _dual_norm(self, grad: Tensor) -> Tensor:
        """The largest absolute slope, (B,)."""
        return grad.flatten(1).abs().amax(1)

    def _move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """The q = max(1, round(eps)) steepest coordinates with room by alpha / q."""
        slope = grad.flatten(1)
        if self.box is not None:
            below, above = (room.flatten(1) for room in self._room(x + delta) if room is not None)
            room = torch.where(slope > 0, above, below)
            slope = slope.masked_fill(room <= _BOUND_TOLERANCE, 0.0)
        q = min(max(1, round(self.eps)), slope.shape[1])
        steepest = slope.abs().topk(q, dim=1).indices
        direction = torch.zeros_like(slope).scatter(1, steepest, slope.sign().gather(1, steepest))
        return (alpha / q) * direction.view_as(delta)

    def _project(self, delta: Tensor, below: Tensor | None, above: Tensor | None, x: Tensor | None) -> Tensor:
        """Shrink all coordinates by the least lam that fits the ball, and clip them to the box."""
        size, bound = _size_and_box_limit(delta, below, above)
        shrunk = torch.minimum((size - _l1_soft_threshold(size, bound, self.eps)).clamp(min=0), bound)
        return _finish_projection(x, delta, shrunk, self._norm(shrunk), self.eps)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw from the simplex, with random signs; see `ThreatModel.sample_uniform`."""
        # n of n + 1 exponentials over their sum are uniform in the simplex below the face sum = 1.
        spacing = -torch.log1p(-_rand_like(pad(like, (0, 1)), generator))
        inside = spacing[:, :-1] / spacing.sum(1, keepdim=True)
        return self.eps * inside * _random_signs_like(like, generator)

    def sign_scale(self, n: int) -> float:
        """Return eps / n."""
        return self.eps / n


@dataclass(frozen=True, repr=False, init=False)
class Union(ThreatModel):
    """Several balls at once: the adversary may use any of them, another one for each image.

    As a threat model it is the set of all perturbations that are in at least one of the balls. Its own radius `eps` is
    1, and lengths are in units of each ball's radius: a step of 0.25 moves by a quarter of the radius in whichever
    ball.

    Args:
        *threats: The balls, as threat models or as text such as "l2:0.5". Unions among them are taken apart; their
            rules do not count.
        rule: How a training step picks a ball. "worst" (MSD, Maini et al. 2020) makes every ball's step and keeps the
            one with the highest loss, for one more forward pass a ball. "random" (SAT, Madaan et al. 2021) draws a ball
            for each batch. "error" (E-AT, Croce and Hein 2022) draws it by the balls' running robust errors.
            "magnitude" takes for each image the ball with the largest first-order rise, eps times the gradient's dual
            norm, which costs nothing. Evaluation always attacks every ball.

    Attributes:
        threats: The balls.
        rule: The rule.

    Raises:
        UsageError: If there is no ball, two are of the same norm, a radius is 0, their boxes, scales or mutable
            features differ, or the rule is unknown.

    Example:
        >>> threat = deat.Union(deat.Linf(8 / 255), deat.L2(0.5), deat.L1(12), rule="magnitude")
        >>> deat.fit(model, data, threat=threat)
    """

    threats: tuple[ThreatModel, ...] = ()
    rule: str = "worst"
    name: ClassVar[str] = "union"

    def __init__(self, *threats: ThreatModel | str, rule: str = "worst") -> None:
        balls = tuple(ball for threat in threats for ball in parse_threat(threat).balls)
        _check_balls(balls)
        if rule not in UNION_RULES:
            raise unknown_name_error("threat rule", rule, UNION_RULES)
        shared = {name: getattr(balls[0], name) for name in ("box", "scale", "mutable")}
        for name, value in {"eps": 1.0, **shared, "threats": balls, "rule": rule}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Union({', '.join(map(repr, self.threats))}, rule={self.rule!r})"

    @property
    def balls(self) -> tuple[ThreatModel, ...]:
        """The balls."""
        return self.threats

    @property
    def text(self) -> str:
        """The balls as `parse_threat` reads them; the rule is not part of it."""
        return "+".join(ball.text for ball in self.threats)

    def describe(self) -> dict[str, Any]:
        """Return the balls and the rule as JSON values, for records."""
        balls = [ball.describe() for ball in self.threats]
        return {"norm": self.name, "eps": self.eps, "threats": balls, "rule": self.rule}

    def at(self, ball: Tensor) -> "BallPerExample":
        """Return the threat model in which each example of a batch has one of the balls.

        Args:
            ball: The number of each example's ball, (B,) int64.
        """
        return BallPerExample(self, ball)

    def draw_balls(self, count: int, generator: Generator | None, device: torch.device) -> Tensor:
        """Draw the number of a ball, all equally likely, for each of `count` examples.

        Args:
            count: How many examples there are.
            generator: The source of the draws; None for torch's own.
            device: Where the result is.

        Returns:
            The numbers, (count,) int64.
        """
        return torch.randint(len(self.threats), (count,), generator=generator, device=device)

    def steepest(self, grad: Tensor) -> Tensor:
        """Return the number of the ball with the largest first-order rise, eps times the dual norm, (B,).

        Args:
            grad: The gradients, (B, ...).
        """
        return self._rises(grad).argmax(0)

    def nearest(self, delta: Tensor) -> Tensor:
        """Return the number of the ball in whose radius each perturbation's norm is least, (B,).

        Args:
            delta: The perturbations, (B, ...).
        """
        return self._depths(delta).argmin(0)

    def _rises(self, grad: Tensor) -> Tensor:
        return torch.stack([ball.eps * ball.dual_norm(grad) for ball in self.threats])

    def _depths(self, delta: Tensor) -> Tensor:
        return torch.stack([ball.norm(delta) / ball.eps for ball in self.threats])

    def norm(self, delta: Tensor) -> Tensor:
        """Return the least over the balls of norm / radius, (B,): at most 1 inside of any ball."""
        return self._depths(delta).amin(0)

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the largest first-order rise in any ball, (B,)."""
        return self._rises(grad).amax(0)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Take the step of the ball with the largest first-order rise; see `ThreatModel.step`."""
        return self.at(self.steepest(grad)).step(x, delta, grad, alpha)

    def pgd_step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Step and project in the ball with the largest first-order rise; see `ThreatModel.pgd_step`."""
        return self.at(self.steepest(grad)).pgd_step(x, delta, grad, alpha)

    def steepest_delta(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return that of the ball with the largest first-order rise; see `ThreatModel.steepest_delta`."""
        return self.at(self.steepest(grad)).steepest_delta(x, grad)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Project to the ball whose projection is nearest; see `ThreatModel.project`."""
        return _nearest_to(delta, [ball.project(x, delta) for ball in self.threats])

    def project_to_ball(self, delta: Tensor) -> Tensor:
        """Shrink into the nearest ball, whatever the pixels become; see `ThreatModel.project_to_ball`."""
        return _nearest_to(delta, [ball.project_to_ball(delta) for ball in self.threats])

    def contains(self, x: Tensor, x_adv: Tensor, atol: float = 1e-6) -> Tensor:
        """Return whether each adversarial image is allowed in any ball; see `ThreatModel.contains`."""
        return torch.stack([ball.contains(x, x_adv, atol) for ball in self.threats]).any(0)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw a ball, and then from it, for each row; see `ThreatModel.sample_uniform`."""
        return self.at(self.draw_balls(len(like), generator, like.device)).sample_uniform(like, generator)

    def sign_scale(self, n: int) -> float:
        """Return the largest of the balls' sign scales; see `ThreatModel.sign_scale`."""
        return max(ball.sign_scale(n) for ball in self.threats)

    def initial_delta(
        self,
        x: Tensor,
        kind: str,
        generator: Generator | None = None,
        *,
        full_batch_size: int | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Return a start inside of a ball drawn for each image; see `ThreatModel.initial_delta`."""
        ball = self.draw_balls(full_batch_size or len(x), generator, x.device)[rows]
        return self.at(ball).initial_delta(x, kind, generator, full_batch_size=full_batch_size, rows=rows)


class BallPerExample(ThreatModel):
    """The balls of a union that the examples of a batch are in, one each; `Union.at` makes it.

    Its functions take that batch, row by row. The radius `eps` is 1, as that of the union.

    Args:
        union: The union.
        ball: The number of each example's ball, (B,) int64. It may change later, as a static buffer does.
    """

    union: Union
    ball: Tensor
    name: ClassVar[str] = "union"

    def __init__(self, union: Union, ball: Tensor) -> None:
        for name in ("eps", "box", "scale", "mutable"):
            object.__setattr__(self, name, getattr(union, name))
        object.__setattr__(self, "union", union)
        object.__setattr__(self, "ball", ball)

    def _select(self, parts: Sequence[Tensor]) -> Tensor:
        """Each row from the part of its ball."""
        chosen = parts[0]
        for number, part in enumerate(parts[1:], 1):
            chosen = torch.where(broadcast_mask(self.ball == number, part), part, chosen)
        return chosen

    def norm(self, delta: Tensor) -> Tensor:
        """Return each norm in units of its ball's radius, (B,)."""
        return self._select([ball.norm(delta) / ball.eps for ball in self.union.threats])

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the first-order rise of each example in its ball, eps times the ball's dual norm, (B,)."""
        return self._select([ball.eps * ball.dual_norm(grad) for ball in self.union.threats])

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Take each example's step in its ball, alpha in units of the radius; see `ThreatModel.step`."""
        return self._select([ball.step(x, delta, grad, alpha * ball.eps) for ball in self.union.threats])

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Project each perturbation to its ball and the box; see `ThreatModel.project`."""
        return self._select([ball.project(x, delta) for ball in self.union.threats])

    def steepest_delta(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return each example's in its ball; see `ThreatModel.steepest_delta`."""
        return self._select([ball.steepest_delta(x, grad) for ball in self.union.threats])

    def project_to_ball(self, delta: Tensor) -> Tensor:
        """Shrink each perturbation into its ball; see `ThreatModel.project_to_ball`."""
        return self._select([ball.project_to_ball(delta) for ball in self.union.threats])

    def contains(self, x: Tensor, x_adv: Tensor, atol: float = 1e-6) -> Tensor:
        """Return whether each adversarial image is allowed in its ball; see `ThreatModel.contains`."""
        return self._select([ball.contains(x, x_adv, atol) for ball in self.union.threats])

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw each row from its ball; see `ThreatModel.sample_uniform`."""
        return self._select([ball.sample_uniform(like, generator) for ball in self.union.threats])

    def sign_scale(self, n: int) -> float:
        """Return that of the union; see `ThreatModel.sign_scale`."""
        return self.union.sign_scale(n)

    def initial_delta(
        self,
        x: Tensor,
        kind: str,
        generator: Generator | None = None,
        *,
        full_batch_size: int | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Return each example's start in its ball; see `ThreatModel.initial_delta`."""
        starts = [
            ball.initial_delta(x, kind, generator, full_batch_size=full_batch_size, rows=rows)
            for ball in self.union.threats
        ]
        return self._select(starts)


def _check_balls(balls: Sequence[ThreatModel]) -> None:
    """Check that balls can be the balls of one union."""
    if not balls:
        raise UsageError("a union needs balls, such as deat.Union(deat.Linf(8 / 255), deat.L2(0.5)).")
    for number, ball in enumerate(balls):
        if not ball.eps:
            raise UsageError(f"{ball.name} has the radius 0, which adds nothing to a union: leave it out.")
        for other in balls[:number]:
            if other.name == ball.name:
                raise UsageError(
                    f"the union has two {ball.name} balls, of radius {format_eps(other.eps)} and {format_eps(ball.eps)}. The "
                    "larger one contains the other: give it alone."
                )
            for name in ("box", "scale", "mutable"):
                if getattr(other, name) != getattr(ball, name):
                    raise UsageError(
                        f"the balls of a union have one {name}, and {other.name} has {getattr(other, name)!r} where "
                        f"{ball.name} has {getattr(ball, name)!r}. Give all of them the same."
                    )


def _nearest_to(delta: Tensor, candidates: Sequence[Tensor]) -> Tensor:
    """For each example the candidate at the least Euclidean distance from delta; the first of equal ones."""
    chosen, least = candidates[0], (candidates[0] - delta).flatten(1).square().sum(1)
    for candidate in candidates[1:]:
        distance = (candidate - delta).flatten(1).square().sum(1)
        is_nearer = distance < least
        chosen = torch.where(broadcast_mask(is_nearer, delta), candidate, chosen)
        least = torch.where(is_nearer, distance, least)
    return chosen


_THREAT_MODELS: dict[str, type[ThreatModel]] = {cls.name: cls for cls in (Linf, L2, L1)}


def parse_threat(spec: ThreatModel | str, *, rule: str | None = None, **features: Any) -> ThreatModel:
    """Parse a threat model.

    Args:
        spec: NORM:EPS, such as "linf:8/255", "l2:0.5" or "l1:12", or several of them joined by "+" for a `Union`. A
            threat model is returned unchanged, except that a union of one ball is that ball.
        rule: The rule of a union that is given as text; by default "worst".
        **features: The box, scale and mutable features of the data, which text cannot name.

    Returns:
        The threat model.

    Raises:
        UsageError: If a norm is unknown, a radius is missing or not accepted, or there is a rule and a single ball.

    Example:
        >>> parse_threat("l2:0.5")
        L2(eps=0.5)
        >>> parse_threat("linf:0.1+l2:0.5", rule="random")
        Union(Linf(eps=0.1), L2(eps=0.5), rule='random')
    """
    if isinstance(spec, ThreatModel):
        own_rule = getattr(spec, "rule", None)
        if rule not in (None, own_rule):
            raise UsageError(f"the threat model has the rule {own_rule!r}, not {rule!r}: give it to deat.Union alone.")
        return spec.balls[0] if len(spec.balls) == 1 else spec
    if not isinstance(spec, str):
        raise UsageError(
            f"{spec!r} is no threat model: give deat.Linf(8 / 255), text such as 'linf:8/255', or for several balls "
            "deat.Union('linf:8/255', 'l2:0.5')."
        )
    parts = re.split(r"\+(?=\s*[A-Za-z])", str(spec))  # the + of 1e+2 belongs to a number
    if len(parts) > 1:
        return Union(*(parse_threat(part, **features) for part in parts), rule=rule or "worst")
    if rule is not None:
        raise UsageError(
            f"the threat rule {rule!r} is for several balls, such as linf:8/255+l2:0.5, and the threat model is {spec!r} "
            "alone. Leave the rule out."
        )
    name, _, radius = str(spec).strip().partition(":")
    if name.lower() not in _THREAT_MODELS:
        raise unknown_name_error("threat model", name, _THREAT_MODELS, "Write NORM:EPS, such as linf:8/255.")
    if not radius:
        raise UsageError(f"threat model {spec!r} has no radius. Write NORM:EPS, such as linf:8/255.")
    return _THREAT_MODELS[name.lower()](parse_number(radius), **features)


def build_threat(description: Mapping[str, Any]) -> ThreatModel:
    """Build a threat model from its description in a record.

    Args:
        description: What `ThreatModel.describe` returned.

    Returns:
        The threat model.

    Raises:
        KeyError, TypeError, ValueError: The description is damaged.
    """
    if "threats" in description:
        return Union(*map(build_threat, description["threats"]), rule=description["rule"])
    features = {name: description[name] for name in ("box", "scale", "mutable") if name in description}
    return parse_threat(f"{description['norm']}:{description['eps']!r}", **features)


def format_threat(threat: ThreatModel | Mapping[str, Any], *, with_rule: bool = False) -> str:
    """Format a threat model for people, such as "linf eps 8/255".

    Args:
        threat: The threat model, or what its `describe` returned.
        with_rule: Whether to name the rule of a union, which training follows and evaluation does not.

    Returns:
        The text.
    """
    description = threat.describe() if isinstance(threat, ThreatModel) else threat
    if "threats" in description:
        rule = f" (rule {description['rule']})" if with_rule else ""
        return f"union of {', '.join(map(format_threat, description['threats']))}{rule}"
    return f"{description['norm']} eps {format_eps(description['eps'])}"


def _parse_box(box: Any) -> Box:
    if box is None:
        return None
    try:
        low, high = map(parse_number, box)
    except (TypeError, ValueError):
        raise UsageError(f"box must be (low, high), such as (-1, 1), or None for no bounds, not {box!r}.") from None
    if not low < high:
        raise UsageError(f"box {box!r} is empty: its first number must be less than the second.")
    return low, high


def _parse_scale(scale: Any) -> FeatureValues:
    values = FeatureValues.of("scale", scale)
    if not all(math.isfinite(value) and value > 0 for value in values.values) or not values.values:
        raise UsageError(
            "scale must be above 0 and finite for every feature, since radii are in units of it. For a feature that never "
            "changes use 1, or mutable=False."
        )
    return values


def _parse_mutable(mutable: Any) -> FeatureValues:
    values = FeatureValues.of("mutable", mutable)
    if not all(value in (0.0, 1.0) for value in values.values) or not any(values.values):
        raise UsageError("mutable must be True or False for every feature, and True for at least one.")
    return values


def _size_and_box_limit(delta: Tensor, below: Tensor | None, above: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return |delta| and its part inside the box, both (B, n). A projection keeps signs, so sizes suffice."""
    size = delta.abs()
    if below is None or above is None:
        return size.flatten(1), size.flatten(1)
    bound = torch.minimum(size, torch.where(delta > 0, above, below).clamp(min=0))
    return size.flatten(1), bound.flatten(1)


def _l2_shrink_factor(size: Tensor, bound: Tensor, eps: float) -> Tensor:
    """Return the largest s in [0, 1] with sum min(s size, bound)^2 <= eps^2, (B, 1).

    Coordinate i reaches its bound at s = bound_i / size_i. In the order of these break points the sum is
    (clipped coordinates so far) + s^2 (the free rest): a quadratic between neighbours, solved where it fits.
    """
    tiny = torch.finfo(size.dtype).tiny
    breaks, order = (bound / size.clamp(min=tiny)).sort(dim=1)
    clipped = bound.gather(1, order).square().cumsum(1)
    # Shifted rather than subtracted: a small radius would be lost in the rounding of large bounds.
    before = pad(clipped[:, :-1], (1, 0))
    free = _reverse_cumsum(size.gather(1, order).square())
    index = _leading_true_index(before + breaks.square() * free < eps**2)
    solved = (eps**2 - before.gather(1, index)).clamp(min=0) / free.gather(1, index).clamp(min=tiny)
    return solved.sqrt().clamp(max=1).masked_fill(clipped[:, -1:] <= eps**2, 1.0)


def _l1_soft_threshold(size: Tensor, bound: Tensor, eps: float) -> Tensor:
    """Return the smallest lam >= 0 with sum clip(size - lam, 0, bound) <= eps, (B, 1).

    Coordinate i shrinks while lam is between size_i - bound_i and size_i. Between neighbouring break points
    the sum falls by the number of shrinking coordinates, so its value at each is a cumulative sum.
    """
    breaks, order = torch.cat([size - bound, size], 1).sort(dim=1)
    shrinking = (2 * (order < size.shape[1]).to(size.dtype) - 1).cumsum(1)
    total = pad(_reverse_cumsum(shrinking[:, :-1] * breaks.diff(dim=1)), (0, 1))
    index = _leading_true_index(total[:, 1:] > eps)
    surplus = (total.gather(1, index) - eps) / shrinking.gather(1, index).clamp(min=1)
    return (breaks.gather(1, index) + surplus).masked_fill(bound.sum(1, keepdim=True) <= eps, 0.0)


def _leading_true_index(is_true: Tensor) -> Tensor:
    """Count the leading columns where a monotone condition is true, at most up to the last index, (B, 1)."""
    return is_true.sum(1, keepdim=True).clamp(max=is_true.shape[1] - 1)


def _reverse_cumsum(values: Tensor) -> Tensor:
    """Sum each column and all after it."""
    return values.flip(1).cumsum(1).flip(1)


def _finish_projection(x: Tensor | None, delta: Tensor, size: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Give sizes (B, n) the signs and the shape of delta, and remove what rounding leaves outside the ball."""
    scale = (eps / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
    inside = (size * scale.unsqueeze(1)).view(delta.shape).copysign(delta)
    if x is None:
        return inside
    # Rounding x + delta adds up over pixels, so a value that was rounded away from x moves back by one float.
    adv = x + inside
    return torch.where((adv - x).abs() > inside.abs(), adv.nextafter(x), adv) - x


def _normalize_rows(rows: Tensor) -> Tensor:
    """Scale rows to Euclidean length 1. Zero rows stay zero."""
    tiny = torch.finfo(rows.dtype).tiny
    # Dividing by the largest entry first keeps squares of tiny gradients from underflowing to zero.
    return normalize(rows / rows.abs().amax(1, keepdim=True).clamp(min=tiny), dim=1, eps=tiny)


def _rand_like(like: Tensor, generator: Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _randn_like(like: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _random_signs_like(like: Tensor, generator: Generator | None) -> Tensor:
    return 2 * (_rand_like(like, generator) < 0.5).to(like.dtype) - 1
