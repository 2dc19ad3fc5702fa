"""Threat models: the Linf, L2 and L1 balls of perturbations, intersected with the pixel box [0, 1].

Images and perturbations are float tensors (B, ...), batch first. Every function is batched, keeps the dtype of its
input and never reads a tensor on the host, so it can be compiled and recorded as a CUDA graph.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad

from deat.errors import UsageError, unknown_name_error
from deat.utils.numbers import parse_number
from deat.utils.torch_utils import broadcast_mask

START_KINDS = ("zero", "uniform", "normal", "bernoulli", "jitter")
"""How an attack may start."""
_BOUND_TOLERANCE = 1e-6  # rounding leaves a pixel that far from a bound that it reached


@dataclass(frozen=True)
class ThreatModel(ABC):
    """How an adversary may change an image: by a vector in a norm ball that keeps pixels in [0, 1].

    Args:
        eps: The radius of the ball, as a number or as text such as "8/255".

    Attributes:
        name: The name of the norm: "linf", "l2" or "l1".
        pointwise: Whether a step changes every pixel independently of the others.

    Raises:
        UsageError: If the radius is negative, or not a number, or larger than any image.
    """

    eps: float
    name: ClassVar[str]
    pointwise: ClassVar[bool] = False
    # The deviation of a normal vector's coordinates over the size of a sign vector's, if the two have equal norms.
    _normal_to_sign_ratio: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        eps = parse_number(self.eps)
        if eps < 0:
            raise UsageError(f"eps {eps} is negative. A radius is 0 or more: give it without a sign.")
        if eps > 1e9:
            raise UsageError(f"eps {eps:g} is larger than any image: pixel values are in [0, 1].")
        object.__setattr__(self, "eps", eps)

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """Return the norm of each perturbation, (B,)."""

    @abstractmethod
    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the dual norm of each gradient, (B,): the largest slope along a step of norm 1."""

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
            x: The images.
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
        """Return the size of each coordinate of a vector of n signs that has norm eps."""

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
        scale = self.sign_scale(like.shape[1])
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
        return self.project(x, delta[rows].view(x.shape))

    def grey_radius(self, n: int) -> float:
        """Return the radius at which all n pixels of any image can become grey, so that all images look the same."""
        return 0.5 * self.eps / self.sign_scale(n) if self.eps else 0.5

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

    def contains(self, x: Tensor, x_adv: Tensor, atol: float = 1e-6) -> Tensor:
        """Return whether each adversarial image is allowed, computed in float64.

        Args:
            x: The images.
            x_adv: The adversarial images.
            atol: How far they may be outside ball and box.

        Returns:
            Booleans, (B,). An image with a NaN is not allowed.
        """
        adv = x_adv.double()
        in_box = ((adv >= -atol) & (adv <= 1 + atol)).flatten(1).all(1)
        return in_box & (self.norm(adv - x.double()) <= self.eps + atol * max(1.0, self.eps))


@dataclass(frozen=True)
class Linf(ThreatModel):
    """Every pixel may change by at most eps. This is the threat model of the paper.

    Args:
        eps: The radius, at most 1.

    Example:
        >>> deat.Linf(8 / 255)
        Linf(eps=0.03137254901960784)
    """

    eps: float = 8 / 255
    name: ClassVar[str] = "linf"
    pointwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps > 1:
            raise UsageError(
                f"Linf eps is {self.eps:g}, but pixel values are in [0, 1]: did you mean {self.eps:g}/255?"
            )

    def norm(self, delta: Tensor) -> Tensor:
        """Return the largest change of any pixel, (B,)."""
        return delta.flatten(1).abs().amax(1)

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the sum of absolute slopes, (B,)."""
        return grad.flatten(1).abs().sum(1)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Move every pixel by alpha along the sign of its slope; see `ThreatModel.step`."""
        return delta + alpha * grad.sign()

    def project_to_ball(self, delta: Tensor) -> Tensor:
        """Clamp each pixel's change to eps; see `ThreatModel.project_to_ball`."""
        return delta.clamp(-self.eps, self.eps)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Clamp each pixel's change to [max(-eps, -x), min(eps, 1 - x)]; see `ThreatModel.project`."""
        # Both intervals contain 0, so clamping to one after the other clamps to their intersection.
        return delta.clamp(-self.eps, self.eps).clamp(-x, 1 - x)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw every coordinate from [-eps, eps]; see `ThreatModel.sample_uniform`."""
        return self.eps * (2 * _rand_like(like, generator) - 1)

    def sign_scale(self, n: int) -> float:
        """Return eps."""
        return self.eps


@dataclass(frozen=True)
class L2(ThreatModel):
    """The Euclidean length of the change is at most eps.

    Args:
        eps: The radius.
    """

    name: ClassVar[str] = "l2"

    def norm(self, delta: Tensor) -> Tensor:
        """Return the Euclidean length, (B,)."""
        length: Tensor = torch.linalg.vector_norm(delta.flatten(1), dim=1)
        return length

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the Euclidean length, (B,): the L2 norm is its own dual."""
        return self.norm(grad)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Move by alpha along the gradient, and not at all if it is zero; see `ThreatModel.step`."""
        return delta + alpha * _normalize_rows(grad.flatten(1)).view_as(delta)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Clip s * delta to the box, with the largest s <= 1 that fits the ball; see `ThreatModel.project`."""
        size, bound = _size_and_box_limit(x, delta)
        shrunk = torch.minimum(size * _l2_shrink_factor(size, bound, self.eps), bound)
        return _finish_projection(x, delta, shrunk, self.norm(shrunk), self.eps)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw a direction and a radius; see `ThreatModel.sample_uniform`."""
        direction = _normalize_rows(_randn_like(like, generator))
        return self.eps * direction * _rand_like(like[:, :1], generator) ** (1 / like.shape[1])

    def sign_scale(self, n: int) -> float:
        """Return eps / sqrt(n)."""
        return self.eps / math.sqrt(n)


@dataclass(frozen=True)
class L1(ThreatModel):
    """The absolute changes of all pixels sum to at most eps, so that a few pixels may change a lot.

    Args:
        eps: The radius.
    """

    name: ClassVar[str] = "l1"
    _normal_to_sign_ratio: ClassVar[float] = math.sqrt(math.pi / 2)

    def norm(self, delta: Tensor) -> Tensor:
        """Return the sum of absolute changes, (B,)."""
        return delta.flatten(1).abs().sum(1)

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Return the largest absolute slope, (B,)."""
        return grad.flatten(1).abs().amax(1)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Move the q = max(1, round(eps)) steepest coordinates with room by alpha / q; see `ThreatModel.step`."""
        slope, adv = grad.flatten(1), (x + delta).flatten(1)
        room = torch.where(slope > 0, 1 - adv, adv)
        slope = slope.masked_fill(room <= _BOUND_TOLERANCE, 0.0)
        q = min(max(1, round(self.eps)), slope.shape[1])
        steepest = slope.abs().topk(q, dim=1).indices
        direction = torch.zeros_like(slope).scatter(1, steepest, slope.sign().gather(1, steepest))
        return delta + (alpha / q) * direction.view_as(delta)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Shrink all coordinates by the least lam that fits the ball, clip to the box; see `ThreatModel.project`."""
        size, bound = _size_and_box_limit(x, delta)
        shrunk = torch.minimum((size - _l1_soft_threshold(size, bound, self.eps)).clamp(min=0), bound)
        return _finish_projection(x, delta, shrunk, self.norm(shrunk), self.eps)

    def sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw from the simplex, with random signs; see `ThreatModel.sample_uniform`."""
        # n of n + 1 exponentials over their sum are uniform in the simplex below the face sum = 1.
        spacing = -torch.log1p(-_rand_like(pad(like, (0, 1)), generator))
        inside = spacing[:, :-1] / spacing.sum(1, keepdim=True)
        return self.eps * inside * _random_signs_like(like, generator)

    def sign_scale(self, n: int) -> float:
        """Return eps / n."""
        return self.eps / n


_THREAT_MODELS: dict[str, type[ThreatModel]] = {cls.name: cls for cls in (Linf, L2, L1)}


def parse_threat(spec: ThreatModel | str) -> ThreatModel:
    """Parse a threat model.

    Args:
        spec: NORM:EPS, such as "linf:8/255", "l2:0.5" or "l1:12". A threat model is returned unchanged.

    Returns:
        The threat model.

    Raises:
        UsageError: If the norm is unknown, or the radius is missing or not accepted.

    Example:
        >>> parse_threat("l2:0.5")
        L2(eps=0.5)
    """
    if isinstance(spec, ThreatModel):
        return spec
    name, _, radius = str(spec).strip().partition(":")
    if name.lower() not in _THREAT_MODELS:
        raise unknown_name_error("threat model", name, _THREAT_MODELS, "Write NORM:EPS, such as linf:8/255.")
    if not radius:
        raise UsageError(f"threat model {spec!r} has no radius. Write NORM:EPS, such as linf:8/255.")
    return _THREAT_MODELS[name.lower()](parse_number(radius))


def _size_and_box_limit(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return |delta| and its part inside the box, both (B, n). A projection keeps signs, so sizes suffice."""
    size = delta.abs()
    bound = torch.minimum(size, torch.where(delta > 0, 1 - x, x).clamp(min=0))
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


def _finish_projection(x: Tensor, delta: Tensor, size: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Give sizes (B, n) the signs and the shape of delta, and remove what rounding leaves outside the ball."""
    scale = (eps / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
    inside = (size * scale.unsqueeze(1)).view(delta.shape).copysign(delta)
    # Rounding x + delta adds up over pixels, so one that rounds away from x goes one float back.
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
