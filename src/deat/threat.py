"""Threat models: the Linf, L2 and L1 balls of perturbations, cut to the pixel box [0, 1].

Images and perturbations are float tensors (B, ...), batch first. Every function is batched, keeps the dtype
it is given and never reads a tensor on the host, so it may be compiled and captured.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize, pad

from deat.errors import UsageError, unknown_name_error
from deat.utils.numbers import parse_number

START_KINDS = ("zero", "uniform", "normal", "bernoulli", "jitter")
_BOUND_TOLERANCE = 1e-6  # rounding leaves a pixel that far from a bound it has reached


@dataclass(frozen=True)
class ThreatModel(ABC):
    """What an adversary may do to an image: a norm ball of radius eps, cut to the pixel box [0, 1]."""

    eps: float
    name: ClassVar[str]
    pointwise: ClassVar[bool] = False  # whether a step treats every pixel by itself
    _normal_to_sign_ratio: ClassVar[float] = 1.0  # a normal vector's deviation over a sign vector's size, norms equal

    def __post_init__(self) -> None:
        eps = parse_number(self.eps)
        if eps < 0:
            raise UsageError(f"eps {eps} is negative. A radius is 0 or more; give its size without a sign.")
        if eps > 1e9:
            raise UsageError(f"eps {eps:g} is larger than any image is; pixel values are in [0, 1].")
        object.__setattr__(self, "eps", eps)

    @abstractmethod
    def norm(self, delta: Tensor) -> Tensor:
        """Size of each perturbation in this threat's norm, (B,)."""

    @abstractmethod
    def dual_norm(self, grad: Tensor) -> Tensor:
        """Steepest slope each gradient offers to a unit step of this norm, (B,)."""

    @abstractmethod
    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Steepest-ascent step of length alpha in this norm; not projected."""

    @abstractmethod
    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Nearest perturbation, in Euclidean distance, inside both ball and box."""

    @abstractmethod
    def _sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        """Draw of the uniform distribution in the ball; like is (B, n)."""

    @abstractmethod
    def _sign_scale(self, n: int) -> float:
        """Size of each coordinate of a vector of n signs that has norm eps."""

    def initial_delta(
        self,
        x: Tensor,
        kind: str,
        generator: Generator | None = None,
        *,
        full_batch_size: int | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Perturbation to begin from, inside ball and box; kind is one of STARTS.

        Where x is some rows of a batch of `among` images, the draw is made for the whole batch.
        """
        like = x.flatten(1) if full_batch_size is None else x.new_empty(full_batch_size, x[0].numel())
        scale = self._sign_scale(like.shape[1])
        match kind:
            case "zero":
                return torch.zeros_like(x)
            case "uniform":
                delta = self._sample_uniform(like, generator)
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
        """Radius at which every one of n pixels may become grey, so that nothing can be told apart."""
        return 0.5 * self.eps / self._sign_scale(n) if self.eps else 0.5

    def pgd_step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Steepest-ascent step, then projection: one step of projected gradient ascent."""
        return self.project(x, self.step(x, delta, grad, alpha))

    def contains(self, x: Tensor, x_adv: Tensor, atol: float = 1e-6) -> Tensor:
        """Whether each x_adv is an allowed perturbation of its x, (B,) bool, in float64; NaN never is."""
        adv = x_adv.double()
        in_box = ((adv >= -atol) & (adv <= 1 + atol)).flatten(1).all(1)
        return in_box & (self.norm(adv - x.double()) <= self.eps + atol * max(1.0, self.eps))


@dataclass(frozen=True)
class Linf(ThreatModel):
    """Every pixel may change by at most eps; the paper's threat model."""

    eps: float = 8 / 255
    name: ClassVar[str] = "linf"
    pointwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps > 1:
            raise UsageError(f"Linf {self.eps:g}: pixel values are in [0, 1], did you mean {self.eps:g}/255?")

    def norm(self, delta: Tensor) -> Tensor:
        """Largest change of any pixel, (B,)."""
        return delta.flatten(1).abs().amax(1)

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Sum of absolute slopes, (B,)."""
        return grad.flatten(1).abs().sum(1)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Every pixel moves by alpha along the sign of its slope."""
        return delta + alpha * grad.sign()

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Clamp of each pixel's change to [max(-eps, -x), min(eps, 1 - x)]."""
        # Both intervals hold 0, so clamping to one after the other clamps to their intersection.
        return delta.clamp(-self.eps, self.eps).clamp(-x, 1 - x)

    def _sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        return self.eps * (2 * _rand_like(like, generator) - 1)

    def _sign_scale(self, n: int) -> float:
        return self.eps


@dataclass(frozen=True)
class L2(ThreatModel):
    """The Euclidean length of the change is at most eps."""

    name: ClassVar[str] = "l2"

    def norm(self, delta: Tensor) -> Tensor:
        """Euclidean length, (B,)."""
        length: Tensor = torch.linalg.vector_norm(delta.flatten(1), dim=1)
        return length

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Euclidean length, (B,): the L2 norm is its own dual."""
        return self.norm(grad)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """Step of length alpha along the gradient; none where the gradient is zero."""
        return delta + alpha * _normalize_rows(grad.flatten(1)).view_as(delta)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Clip of s * delta to the box, with the largest s in [0, 1] that keeps it in the ball."""
        size, bound = _size_and_box_limit(x, delta)
        shrunk = torch.minimum(size * _l2_shrink_factor(size, bound, self.eps), bound)
        return _finish_projection(x, delta, shrunk, self.norm(shrunk), self.eps)

    def _sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        direction = _normalize_rows(_randn_like(like, generator))
        return self.eps * direction * _rand_like(like[:, :1], generator) ** (1 / like.shape[1])

    def _sign_scale(self, n: int) -> float:
        return self.eps / math.sqrt(n)


@dataclass(frozen=True)
class L1(ThreatModel):
    """The absolute changes sum to at most eps: a few pixels, changed a lot."""

    name: ClassVar[str] = "l1"
    _normal_to_sign_ratio: ClassVar[float] = math.sqrt(math.pi / 2)

    def norm(self, delta: Tensor) -> Tensor:
        """Sum of absolute changes, (B,)."""
        return delta.flatten(1).abs().sum(1)

    def dual_norm(self, grad: Tensor) -> Tensor:
        """Largest absolute slope, (B,)."""
        return grad.flatten(1).abs().amax(1)

    def step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: float | Tensor) -> Tensor:
        """The q = max(1, round(eps)) steepest coordinates that can still move go alpha / q each."""
        slope, at = grad.flatten(1), (x + delta).flatten(1)
        room = torch.where(slope > 0, 1 - at, at)
        slope = slope.masked_fill(room <= _BOUND_TOLERANCE, 0.0)
        q = min(max(1, round(self.eps)), slope.shape[1])
        steepest = slope.abs().topk(q, dim=1).indices
        direction = torch.zeros_like(slope).scatter(1, steepest, slope.sign().gather(1, steepest))
        return delta + (alpha / q) * direction.view_as(delta)

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        """Every coordinate moves towards 0 by the least lam >= 0 that fits the ball, clipped to the box."""
        size, bound = _size_and_box_limit(x, delta)
        shrunk = torch.minimum((size - _l1_soft_threshold(size, bound, self.eps)).clamp(min=0), bound)
        return _finish_projection(x, delta, shrunk, self.norm(shrunk), self.eps)

    def _sample_uniform(self, like: Tensor, generator: Generator | None) -> Tensor:
        # n of n + 1 exponentials over their sum are uniform in the simplex below the face sum = 1.
        spacing = -torch.log1p(-_rand_like(pad(like, (0, 1)), generator))
        inside = spacing[:, :-1] / spacing.sum(1, keepdim=True)
        return self.eps * inside * _random_signs_like(like, generator)

    def _sign_scale(self, n: int) -> float:
        return self.eps / n


_THREAT_MODELS: dict[str, type[ThreatModel]] = {cls.name: cls for cls in (Linf, L2, L1)}


def parse_threat(spec: ThreatModel | str) -> ThreatModel:
    """The threat model a text names: "linf:8/255", "l2:0.5", "l1:12"; a threat model is itself."""
    if isinstance(spec, ThreatModel):
        return spec
    name, _, radius = str(spec).strip().partition(":")
    if name.lower() not in _THREAT_MODELS:
        raise unknown_name_error("threat model", name, _THREAT_MODELS, "Write NORM:EPS, such as linf:8/255.")
    if not radius:
        raise UsageError(f"threat model {spec!r} has no radius. Write NORM:EPS, such as linf:8/255.")
    return _THREAT_MODELS[name.lower()](parse_number(radius))


def _size_and_box_limit(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """|delta| and its part inside the box, both (B, n): a projection keeps signs, so sizes suffice."""
    size = delta.abs()
    bound = torch.minimum(size, torch.where(delta > 0, 1 - x, x).clamp(min=0))
    return size.flatten(1), bound.flatten(1)


def _l2_shrink_factor(size: Tensor, bound: Tensor, eps: float) -> Tensor:
    """Largest s in [0, 1] with sum min(s size, bound)^2 <= eps^2, (B, 1).

    Coordinate i meets its bound at s = bound_i / size_i. In the order of these break points the sum is
    (clipped coordinates so far) + s^2 (the free rest): a quadratic between neighbours, solved where it fits.
    """
    tiny = torch.finfo(size.dtype).tiny
    breaks, order = (bound / size.clamp(min=tiny)).sort(dim=1)
    clipped = bound.gather(1, order).square().cumsum(1)
    # Shifted rather than subtracted: a small radius would drown in the rounding of large bounds.
    before = pad(clipped[:, :-1], (1, 0))
    free = _reverse_cumsum(size.gather(1, order).square())
    index = _leading_true_index(before + breaks.square() * free < eps**2)
    solved = (eps**2 - before.gather(1, index)).clamp(min=0) / free.gather(1, index).clamp(min=tiny)
    return solved.sqrt().clamp(max=1).masked_fill(clipped[:, -1:] <= eps**2, 1.0)


def _l1_soft_threshold(size: Tensor, bound: Tensor, eps: float) -> Tensor:
    """Smallest lam >= 0 with sum clip(size - lam, 0, bound) <= eps, (B, 1).

    Coordinate i shrinks while lam is between size_i - bound_i and size_i. Between neighbouring break points
    the sum falls by the number of shrinking coordinates, so its value at each is a cumulative sum.
    """
    breaks, order = torch.cat([size - bound, size], 1).sort(dim=1)
    shrinking = (2 * (order < size.shape[1]).to(size.dtype) - 1).cumsum(1)
    total = pad(_reverse_cumsum(shrinking[:, :-1] * breaks.diff(dim=1)), (0, 1))
    index = _leading_true_index(total[:, 1:] > eps)
    surplus = (total.gather(1, index) - eps) / shrinking.gather(1, index).clamp(min=1)
    return (breaks.gather(1, index) + surplus).masked_fill(bound.sum(1, keepdim=True) <= eps, 0.0)


def _leading_true_index(holds: Tensor) -> Tensor:
    """Number of leading columns where a monotone condition holds, at most the last index, (B, 1)."""
    return holds.sum(1, keepdim=True).clamp(max=holds.shape[1] - 1)


def _reverse_cumsum(values: Tensor) -> Tensor:
    """Sum of each column and all after it."""
    return values.flip(1).cumsum(1).flip(1)


def _finish_projection(x: Tensor, delta: Tensor, size: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Sizes (B, n) with delta's signs and shape, less what rounding would leave outside the ball."""
    scale = (eps / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
    inside = (size * scale.unsqueeze(1)).view(delta.shape).copysign(delta)
    # Rounding x + delta adds up over pixels, so one that rounds away from x goes one float back.
    adv = x + inside
    return torch.where((adv - x).abs() > inside.abs(), adv.nextafter(x), adv) - x


def _normalize_rows(rows: Tensor) -> Tensor:
    """Rows scaled to Euclidean length 1; zero rows stay zero."""
    tiny = torch.finfo(rows.dtype).tiny
    # Dividing by the peak first keeps squares of vanishing gradients from underflowing to zero.
    return normalize(rows / rows.abs().amax(1, keepdim=True).clamp(min=tiny), dim=1, eps=tiny)


def _rand_like(like: Tensor, generator: Generator | None) -> Tensor:
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _randn_like(like: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _random_signs_like(like: Tensor, generator: Generator | None) -> Tensor:
    return 2 * (_rand_like(like, generator) < 0.5).to(like.dtype) - 1


USUAL_RADII = {"linf": "4/255 to 8/255, or 0.1 to 0.3 for digits", "l2": "0.5 to 3", "l1": "12 and more"}
"""Radii that are commonly defended against, by norm."""
MIN_USUAL_RADII = {"linf": 0.25 / 255, "l2": 0.1, "l1": 1.0}
"""Radii below which nothing is defended against, by norm."""


def max_image_distance(threat: ThreatModel, shape: Sequence[int]) -> float:
    """How far apart images of this shape are at most, in a threat model's norm."""
    return 2 * threat.grey_radius(math.prod(shape))


def check_radius(threat: ThreatModel, shape: Sequence[int]) -> None:
    """Refuse a radius that reaches from any image of this shape to any other."""
    widest = max_image_distance(threat, shape)
    if threat.eps and threat.eps >= widest * (1 - 1e-9):
        size = "x".join(map(str, shape))
        raise UsageError(
            f"{threat.name} eps {threat.eps:g} reaches every image of {size} from every other, which are at most "
            f"{widest:.4g} apart: nothing could be told apart. Use a smaller one; usual is {_usual_radii_text(threat)}."
        )


def get_radius_warnings(threat: ThreatModel, has_adversary: bool) -> list[str]:
    """What is strange about a radius: that it leaves an adversary no room, or looks like another norm's."""
    if threat.eps == 0:
        line = "eps is 0, so that the adversary can change nothing: this is natural training at a higher price"
        return [
            f"{line}. Use method natural, or a radius; usual for {threat.name} is {_usual_radii_text(threat)}."
        ] * has_adversary
    return get_tiny_radius_warnings(threat)


def get_tiny_radius_warnings(threat: ThreatModel) -> list[str]:
    """That a radius is too small to say anything of robustness, as one of linf is in another norm."""
    if threat.eps == 0 or threat.eps >= MIN_USUAL_RADII.get(threat.name, 0.0):
        return []
    other = ", and looks like one for linf" if threat.name != "linf" else ""
    return [
        f"{threat.name} eps {threat.eps:.3g} is less than anybody defends against{other}: usual is {_usual_radii_text(threat)}. "
        "It is taken all the same."
    ]


def _usual_radii_text(threat: ThreatModel) -> str:
    return USUAL_RADII.get(threat.name, "far from either end")
