"""The geometry of the threat models: what every perturbation, step and projection promises."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deat
from deat.errors import UsageError
from deat.threat import L1, L2, START_KINDS, Linf, ThreatModel, build_threat, parse_threat
from deat.utils.numbers import parse_number
from deat.utils.text import format_eps

SHAPES = [(1, 1, 8, 8), (3, 3, 5, 7), (2, 1, 1, 1), (4, 17)]
RADII = [0.0, 1e-4, 8 / 255, 1.0]
THREATS = [cls(eps) for cls in (Linf, L2, L1) for eps in RADII] + [L1(12.0)]
DTYPES = [torch.float32, torch.float64]
NORMS = ["linf", "l2", "l1"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random pixels, a fifth of them exactly 0 and a fifth exactly 1."""
    g = seeded(seed)
    x, pick = torch.rand(shape, generator=g, dtype=dtype), torch.rand(shape, generator=g)
    return torch.where(pick < 0.2, 0.0, torch.where(pick > 0.8, 1.0, x)).to(dtype)


def noise(x: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(x.shape, generator=seeded(seed), dtype=x.dtype)


def feasible(t: ThreatModel, x: Tensor, seed: int) -> Tensor:
    """Points inside ball and box, found without project: clip to the box, then scale into the ball."""
    delta = torch.minimum(torch.maximum(noise(x, seed), -x), 1 - x)
    size = t.norm(delta).clamp(min=1e-300)
    scale = (t.eps / size).clamp(max=1) * torch.rand(len(x), generator=seeded(seed + 1), dtype=x.dtype) ** 0.2
    return delta * scale.view(-1, *[1] * (x.dim() - 1))


def slow_scale(size: Tensor, bound: Tensor, eps: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(200):
        s = (low + high) / 2
        low, high = (low, s) if torch.minimum(size * s, bound).square().sum() > eps**2 else (s, high)
    return low if torch.minimum(size, bound).square().sum() > eps**2 else 1.0


def slow_shift(size: Tensor, bound: Tensor, eps: float) -> float:
    low, high = 0.0, float(size.max())
    for _ in range(200):
        lam = (low + high) / 2
        low, high = (lam, high) if torch.minimum((size - lam).clamp(min=0), bound).sum() > eps else (low, lam)
    return high if torch.minimum(size, bound).sum() > eps else 0.0


def slow_projection(t: ThreatModel, x: Tensor, delta: Tensor) -> Tensor:
    """One example at a time, by bisection on the multiplier."""
    rows = []
    for xi, di in zip(x, delta, strict=True):
        size, bound = di.abs(), torch.where(di > 0, 1 - xi, xi)
        if t.name == "l2":
            kept = torch.minimum(size * slow_scale(size, bound, t.eps), bound)
        else:
            kept = torch.minimum((size - slow_shift(size, bound, t.eps)).clamp(min=0), bound)
        rows.append(kept * di.sign())
    return torch.stack(rows)


class NoHostReads(TorchDispatchMode):
    """Refuses every operation that would make a device wait for the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "equal.default")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert not any(name in str(func) for name in self.FORBIDDEN), f"host read: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", THREATS, ids=repr)
def test_every_start_and_every_move_stays_inside_ball_and_box(t, shape, dtype):
    x = images(shape, 1, dtype)
    for kind in START_KINDS:
        for alpha in (0.25 * t.eps, 1.25 * t.eps, 4 * t.eps):
            delta = t.initial_delta(x, kind, seeded(2))
            assert t.contains(x, x + delta).all(), (kind, "start")
            for move in range(3):
                delta = t.pgd_step(x, delta, noise(x, move), alpha)
                assert delta.dtype == dtype
                assert delta.shape == x.shape
                assert t.contains(x, x + delta).all(), (kind, alpha, move)


@pytest.mark.promise("P35")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(NORMS),
    eps=st.sampled_from(RADII) | st.floats(0, 1),
    steps=st.floats(0, 4),
    kind=st.sampled_from(START_KINDS),
    shape=st.sampled_from(SHAPES) | st.tuples(st.integers(1, 4), st.integers(1, 40)),
    scale=st.sampled_from([1e-30, 1e-6, 1.0, 1e6]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_no_radius_step_or_gradient_scale_leaves_ball_or_box(name, eps, steps, kind, shape, scale, dtype, seed):
    t, x = parse_threat(f"{name}:{eps}"), images(shape, seed, dtype)
    delta = t.initial_delta(x, kind, seeded(seed))
    for move in range(3):
        delta = t.pgd_step(x, delta, noise(x, seed + move, scale), torch.tensor(steps * t.eps, dtype=dtype))
    assert delta.dtype == dtype
    assert t.contains(x, x + delta).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", THREATS, ids=repr)
def test_projection_is_idempotent_and_leaves_feasible_points_alone(t, shape):
    x = images(shape, 3)
    once = t.project(x, noise(x, 4))
    torch.testing.assert_close(t.project(x, once), once, rtol=0, atol=1e-9)
    inside = feasible(t, x, 5)
    torch.testing.assert_close(t.project(x, inside), inside, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("t", THREATS, ids=repr)
def test_no_feasible_point_is_closer_than_the_projection(t, shape):
    x = images(shape, 6)
    for scale in (0.01, 0.3, 3.0):
        v = noise(x, 7, scale)
        p = t.project(x, v)
        for seed in range(20):
            z = feasible(t, x, 10 * seed)
            assert t.contains(x, x + z).all()
            # The variational inequality of a projection onto a convex set.
            assert (((v - p) * (z - p)).flatten(1).sum(1) <= 1e-8).all()


@pytest.mark.parametrize("scale", [1e-3, 0.3, 10.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", RADII)
def test_l2_projection_equals_slow_bisection(eps, shape, scale):
    x = images(shape, 8)
    v = noise(x, 9, scale)
    torch.testing.assert_close(L2(eps).project(x, v), slow_projection(L2(eps), x, v), rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 10.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [*RADII, 12.0])
def test_l1_projection_equals_slow_bisection(eps, shape, scale):
    x = images(shape, 10)
    v = noise(x, 11, scale)
    torch.testing.assert_close(L1(eps).project(x, v), slow_projection(L1(eps), x, v), rtol=0, atol=1e-9)


@pytest.mark.parametrize("t", [t for t in THREATS if t.name != "linf"], ids=repr)
def test_float32_projection_of_a_whole_image_equals_float64(t):
    x = images((4, 3, 32, 32), 12)
    v = noise(x, 13, 0.2)
    exact, rounded = t.project(x, v), t.project(x.float(), v.float())
    torch.testing.assert_close(rounded.double(), exact, rtol=0, atol=2e-6 * max(1.0, t.eps))


@pytest.mark.parametrize("kind", START_KINDS)
@pytest.mark.parametrize("t", [L2(0.5), L2(1e-3), L1(12.0), L1(0.1)], ids=repr)
def test_rounding_a_large_float32_image_never_leaves_the_ball(t, kind):
    x = (images((2, 3, 96, 96), 46) * 255).round().div(255).float()
    delta = t.initial_delta(x, kind, seeded(47))
    for _ in range(2):
        assert (t.norm((x + delta).double() - x.double()) <= t.eps * (1 + 1e-6)).all()
        delta = t.pgd_step(x, delta, noise(x, 48), t.eps)


def test_l2_projection_onto_a_small_ball_does_not_drown_in_large_bounds():
    x = torch.full((1, 6), 0.5)
    x[:, :4] = 4e-5
    v = -torch.ones_like(x)
    exact = slow_projection(L2(1e-4), x.double(), v.double())
    torch.testing.assert_close(L2(1e-4).project(x, v).double(), exact, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", RADII)
def test_linf_projection_equals_clamp(eps, dtype):
    x = images((3, 3, 5, 7), 14, dtype)
    v = noise(x, 15)
    expected = torch.clamp(v, torch.clamp(-x, min=-eps), torch.clamp(1 - x, max=eps))
    assert torch.equal(Linf(eps).project(x, v), expected)


@pytest.mark.parametrize("t", [L2(0.5), L1(12.0), L1(0.5)], ids=repr)
def test_projection_survives_equal_zero_and_blocked_coordinates(t):
    x = torch.cat([torch.zeros(1, 20), torch.ones(1, 20), torch.full((1, 20), 0.5), images((1, 20), 16)]).double()
    for v in (torch.zeros_like(x), torch.ones_like(x), -torch.ones_like(x), 100 * torch.ones_like(x)):
        v[:, ::4] = 0
        torch.testing.assert_close(t.project(x, v), slow_projection(t, x, v), rtol=0, atol=1e-9)


@pytest.mark.parametrize("t", [t for t in THREATS if t.name != "l1"], ids=repr)
@pytest.mark.parametrize("alpha", [0.01, torch.tensor(0.3)], ids=str)
def test_step_has_length_alpha_and_climbs_as_steeply_as_the_dual_norm_allows(t, alpha):
    x = images((3, 3, 5, 7), 17)
    delta, grad = noise(x, 18), noise(x, 19, 1e-3)
    moved = t.step(x, delta, grad, alpha) - delta
    alphas = torch.full((3,), float(alpha), dtype=x.dtype)
    torch.testing.assert_close(t.norm(moved), alphas)
    torch.testing.assert_close((grad * moved).flatten(1).sum(1), alphas * t.dual_norm(grad))


@pytest.mark.parametrize(("eps", "q"), [(0.0, 1), (0.4, 1), (1.0, 1), (3.4, 3), (12.0, 12), (1e6, 105)])
def test_l1_step_moves_exactly_q_coordinates_the_steepest_ones(eps, q):
    x = 0.25 + 0.5 * torch.rand(3, 3, 5, 7, generator=seeded(20), dtype=torch.float64)
    grad = noise(x, 21)
    moved = L1(eps).step(x, torch.zeros_like(x), grad, 0.6).flatten(1)
    slope = grad.flatten(1)
    steepest = torch.zeros_like(moved).scatter(1, slope.abs().topk(q).indices, 1.0)
    torch.testing.assert_close(moved, steepest * slope.sign() * 0.6 / q)
    torch.testing.assert_close(moved.abs().sum(1), torch.full((3,), 0.6, dtype=torch.float64))


def test_l1_step_of_one_coordinate_climbs_as_steeply_as_the_dual_norm_allows():
    x = torch.full((3, 17), 0.5)
    grad = noise(x, 22)
    moved = L1(1.0).step(x, torch.zeros_like(x), grad, 0.1)
    torch.testing.assert_close((grad * moved).sum(1), 0.1 * L1(1.0).dual_norm(grad))


def test_l1_step_skips_coordinates_stuck_at_the_box():
    x = torch.tensor([[0.0, 1.0, 0.2, 0.5, 0.5, 0.5]])
    delta = torch.tensor([[0.0, 0.0, 0.8, 0.0, 0.0, 0.0]])
    grad = torch.tensor([[-9.0, 8.0, 7.0, 3.0, -2.0, 1.0]])
    moved = L1(2.0).step(x, delta, grad, 0.2) - delta
    torch.testing.assert_close(moved, torch.tensor([[0.0, 0.0, 0.0, 0.1, -0.1, 0.0]]))


def test_l1_step_moves_only_what_can_move_when_fewer_than_q_can():
    x = torch.tensor([[0.0, 1.0, 0.5]])
    moved = L1(3.0).step(x, torch.zeros_like(x), torch.tensor([[-1.0, 1.0, 1.0]]), 0.3)
    torch.testing.assert_close(moved, torch.tensor([[0.0, 0.0, 0.1]]))


@pytest.mark.promise("P37")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", THREATS, ids=repr)
def test_zero_gradient_does_not_move(t, dtype):
    x = images((3, 3, 5, 7), 23, dtype)
    delta = t.initial_delta(x, "uniform", seeded(24))
    grad = noise(x, 25)
    grad[1] = 0
    assert torch.equal(t.step(x, delta, grad, 0.1)[1], delta[1])
    assert torch.isfinite(t.pgd_step(x, delta, grad, 0.1)).all()


def test_l2_step_keeps_its_length_for_vanishing_gradients():
    x = images((2, 40), 26, torch.float32)
    moved = L2(1.0).step(x, torch.zeros_like(x), noise(x, 27, 1e-30), 0.5)
    torch.testing.assert_close(L2(1.0).norm(moved), torch.full((2,), 0.5))


def test_dual_norms_are_l1_for_linf_l2_for_l2_and_linf_for_l1():
    grad = torch.tensor([[3.0, -4.0], [0.0, 0.0]])
    assert Linf(1.0).dual_norm(grad).tolist() == [7.0, 0.0]
    assert L2(1.0).dual_norm(grad).tolist() == [5.0, 0.0]
    assert L1(1.0).dual_norm(grad).tolist() == [4.0, 0.0]


GRAY = torch.full((20_000, 6), 0.5, dtype=torch.float64)
N = GRAY.shape[1]


@pytest.mark.parametrize("t", [L2(0.4), L1(0.4)], ids=repr)
def test_uniform_start_fills_the_ball_like_a_radius_to_the_power_of_its_dimension(t):
    # Uniform in a ball of dimension n: (norm / eps)^n is uniform in [0, 1].
    share = (t.norm(t.initial_delta(GRAY, "uniform", seeded(28))) / t.eps) ** N
    assert share.mean().item() == pytest.approx(1 / 2, abs=0.01)
    assert share.square().mean().item() == pytest.approx(1 / 3, abs=0.01)


def test_linf_uniform_start_is_uniform_between_minus_eps_and_eps():
    delta = Linf(0.3).initial_delta(GRAY, "uniform", seeded(29))
    assert delta.std().item() == pytest.approx(0.3 / math.sqrt(3), rel=0.01)
    assert delta.abs().max().item() == pytest.approx(0.3, rel=0.001)


@pytest.mark.parametrize("kind", START_KINDS)
@pytest.mark.parametrize("t", [Linf(0.3), L2(0.4), L1(0.4)], ids=repr)
def test_starts_are_centred(t, kind):
    assert t.initial_delta(GRAY, kind, seeded(30)).mean(0).abs().max().item() < 0.01


@pytest.mark.parametrize("t", [Linf(0.3), L2(0.4), L1(0.4)], ids=repr)
def test_bernoulli_start_has_norm_eps_and_equal_sizes(t):
    delta = t.initial_delta(GRAY, "bernoulli", seeded(31))
    torch.testing.assert_close(t.norm(delta), torch.full((len(GRAY),), t.eps, dtype=torch.float64))
    assert delta.abs().unique().std(correction=0).item() < 1e-9


@pytest.mark.parametrize("t", [L2(0.1), L1(0.1)], ids=repr)
def test_normal_start_has_norm_about_eps_before_projection(t):
    scale = t.sign_scale(N) * t._normal_to_sign_ratio
    sizes = t.norm(scale * noise(GRAY, 32))
    assert sizes.mean().item() == pytest.approx(t.eps, rel=0.06)


def test_jitter_start_is_a_thousandth_of_a_normal():
    assert Linf(0.3).initial_delta(GRAY, "jitter", seeded(33)).std().item() == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize("kind", START_KINDS)
@pytest.mark.parametrize("name", NORMS)
def test_start_is_reproducible_by_its_generator(name, kind):
    t, x = parse_threat(f"{name}:0.5"), images((3, 3, 5, 7), 34)
    first, again = t.initial_delta(x, kind, seeded(35)), t.initial_delta(x, kind, seeded(35))
    assert torch.equal(first, again)
    assert kind == "zero" or not torch.equal(first, t.initial_delta(x, kind, seeded(36)))


def test_unknown_start_names_the_known_ones():
    with pytest.raises(UsageError, match=r"unknown start 'unifrom'.*uniform"):
        Linf().initial_delta(images((1, 4)), "unifrom")


@pytest.mark.parametrize("t", [Linf(0.1), L2(0.5), L1(3.0)], ids=repr)
def test_contains_refuses_what_is_outside_each_example_for_itself(t):
    x = torch.full((6, 50), 0.5)
    x[4] = 0.0
    bad = x.clone()
    bad[1] += 0.11
    bad[2, 0] = math.nan
    bad[3, 0] = math.inf
    bad[4, 0] = -1e-3
    assert t.contains(x, bad).tolist() == [True, False, False, False, False, True]
    assert t.contains(x, bad, atol=0.2)[4]


@pytest.mark.parametrize("kind", START_KINDS)
@pytest.mark.parametrize("t", [Linf(), L2(0.5), L1(12.0)], ids=repr)
def test_geometry_never_reads_the_host(t, kind):
    x, g, alpha = images((3, 3, 5, 7), 37), seeded(38), torch.tensor(0.1)
    grad = noise(x, 39)
    with NoHostReads():
        delta = t.initial_delta(x, kind, g)
        delta = t.pgd_step(x, delta, grad, alpha)
        t.project(x, t.step(x, delta, grad, 0.1))
        inside = t.contains(x, x + delta)
        t.dual_norm(grad), t.norm(delta)
    assert inside.all()


def test_the_host_read_guard_bites():
    guard: list[Callable[[Tensor], object]] = [Tensor.item, Tensor.nonzero, Tensor.unique, bool]
    for read in guard:
        with pytest.raises(AssertionError, match="host read"), NoHostReads():
            read(torch.ones(()))


@pytest.mark.parametrize("t", [Linf(), L2(0.5), L1(12.0)], ids=repr)
def test_move_is_one_graph_that_computes_the_same(t):
    x = images((3, 3, 5, 7), 40)
    delta, grad = t.initial_delta(x, "uniform", seeded(41)), noise(x, 42)
    compiled = torch.compile(t.pgd_step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, delta, grad, 0.1), t.pgd_step(x, delta, grad, 0.1))


@pytest.mark.parametrize("t", [Linf(), L2(0.5), L1(12.0)], ids=repr)
def test_memory_layout_does_not_change_values(t):
    x, grad = images((3, 3, 5, 7), 43), noise(images((3, 3, 5, 7)), 44)
    last = {"memory_format": torch.channels_last}
    start = t.initial_delta(x, "uniform", seeded(45))
    assert torch.equal(t.initial_delta(x.contiguous(**last), "uniform", seeded(45)), start)
    moved = t.pgd_step(x.contiguous(**last), start.contiguous(**last), grad.contiguous(**last), 0.1)
    torch.testing.assert_close(moved, t.pgd_step(x, start, grad, 0.1))


def test_linf_radius_in_bytes_is_refused_with_the_fraction_meant():
    with pytest.raises(UsageError, match=r"\[0, 1\].*did you mean 8/255\?"):
        Linf(8)
    with pytest.raises(UsageError, match=r"did you mean 4/255\?"):
        parse_threat("linf:4")


@pytest.mark.parametrize("cls", [Linf, L2, L1])
@pytest.mark.parametrize("eps", [math.nan, math.inf, -math.inf, -1e-9, "nan"])
def test_radius_that_is_no_size_is_refused(cls, eps):
    with pytest.raises(UsageError, match=r"not a number|negative"):
        cls(eps)


def test_threat_models_are_frozen_values():
    assert Linf() == Linf(8 / 255) != L2(8 / 255)
    assert len({Linf(0.1), Linf(0.1), L1(0.1)}) == 2
    with pytest.raises(AttributeError):
        Linf().eps = 0.5


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("linf:8/255", Linf(8 / 255)),
        ("Linf:0.1", Linf(0.1)),
        ("l2:0.5", L2(0.5)),
        ("l1:12", L1(12.0)),
        (L2(3.0), L2(3.0)),
    ],
)
def test_threat_reads_a_norm_and_a_radius(spec, expected):
    assert parse_threat(spec) == expected


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("l3:1", "unknown threat model 'l3'.*l1, l2, linf"),
        ("l2", "no radius"),
        ("l2:x", "'x' is not a number"),
    ],
)
def test_threat_explains_a_text_it_cannot_read(spec, complaint):
    with pytest.raises(UsageError, match=complaint):
        parse_threat(spec)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        ("0.03", 0.03),
        ("1e-3", 1e-3),
        ("-2", -2.0),
        (3, 3.0),
        (0.5, 0.5),
    ],
)
def test_number_reads_fractions_and_decimals(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    ["8/255", "2/255", "2.5/255", "128/255", "32/255", "0.15", "0.0375", "0.2", "0.031", "0.03137", "0", "1", "12"],
)
def test_radii_and_steps_are_shown_as_people_write_them(text):
    assert format_eps(parse_number(text)) == text
    assert format_eps(4 * (parse_number(text) / 4)) == text


def test_radii_that_are_neither_levels_nor_short_are_rounded():
    assert format_eps(0.123456) == "0.1235"
    assert format_eps(math.pi) == "3.142"


NOT_NUMBERS = ["", "/", "8/", "/255", "1/0", "1/2/3", "nan", "inf", "1e999", "1/nan", "8 255", "2**3"]
NOT_NUMBERS += ["__import__('os')", math.nan, math.inf, None, [1.0], 10**400]


@pytest.mark.parametrize("text", NOT_NUMBERS, ids=lambda text: repr(text)[:20])
def test_number_refuses_anything_else_by_name(text):
    with pytest.raises(UsageError, match="not a number") as caught:
        parse_number(text)
    assert repr(text) in str(caught.value)


class HalfBox(Linf):
    """A threat of one's own, from the public protocol: pixels may only become brighter."""

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        return super().project(x, delta).clamp(min=0)

    def sample_uniform(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        return super().sample_uniform(like, generator).abs()


def test_a_threat_of_your_own_draws_its_start_by_a_public_method():
    x = images((3, 1, 4, 4))
    delta = HalfBox(0.1).initial_delta(x, "uniform", seeded(0))
    assert delta.min() >= 0
    assert torch.equal(delta, Linf(0.1).project(x, HalfBox(0.1).sample_uniform(x.flatten(1), seeded(0)).view_as(x)))


class HalfL1(L1):
    """As HalfBox, in L1."""

    def project(self, x: Tensor, delta: Tensor) -> Tensor:
        return super().project(x, delta).clamp(min=0)


@pytest.mark.parametrize("t", [HalfBox(0.1), HalfL1(2.0)], ids=str)
def test_what_a_projection_of_your_own_would_move_is_not_in_the_threat_model(t):
    x = images((3, 3, 16, 16)).float()
    inside = t.project(x, noise(x, 1).float())
    assert inside.abs().max() > 0
    assert t.contains(x, x + inside).all()
    darker = inside.clone()
    darker[1] -= 1e-3 * (x[1] > 0.01)
    assert t.contains(x, x + darker).tolist() == [True, False, True]


@pytest.mark.parametrize("t", THREATS, ids=str)
@pytest.mark.parametrize("outside", [2.0, -1.0])
def test_the_ball_holds_also_for_images_outside_the_box(t, outside):
    x = outside + images((3, 1, 4, 4))
    for delta in (torch.zeros_like(x), noise(x, 4)):
        assert (t.norm(t.project(x, delta)) <= t.eps * (1 + 1e-9)).all()


@pytest.mark.parametrize("t", THREATS, ids=str)
def test_projecting_to_the_ball_alone_keeps_vectors_inside_and_shrinks_the_others(t):
    x = images((3, 1, 4, 4))
    inside = t.initial_delta(x, "uniform", seeded(0))
    torch.testing.assert_close(t.project_to_ball(inside), inside)
    outside = t.project_to_ball(noise(x, 1, 100.0))
    assert (t.norm(outside) <= t.eps * (1 + 1e-9)).all()
    assert (t.norm(outside) >= t.eps * (1 - 1e-9)).all()


# Boxes, scales and fixed features

FEATURES = {"box": None, "scale": [0.5, 2.0, 10.0, 1.0], "mutable": [True, True, True, False]}


@pytest.mark.parametrize("cls", [deat.Linf, deat.L2, deat.L1])
@pytest.mark.parametrize("box", [(-1.0, 1.0), (0.0, 5.0), None])
def test_starts_and_steps_stay_in_ball_and_box_of_any_range(cls, box):
    low, high = box or (-3.0, 3.0)
    x = torch.rand(20, 1, 30, generator=torch.Generator().manual_seed(0)) * (high - low) + low
    x[0], x[1] = low, high
    threat = cls(0.4, box=box)
    for start in ("uniform", "bernoulli", "normal", "jitter"):
        delta = threat.initial_delta(x, start, torch.Generator().manual_seed(1))
        for _ in range(3):
            delta = threat.pgd_step(x, delta, torch.randn(x.shape, generator=torch.Generator().manual_seed(2)), 0.3)
            assert bool(threat.contains(x, x + delta).all())
        assert bool((threat.norm(delta) > 0.1).any())


@pytest.mark.parametrize("cls", [deat.Linf, deat.L2, deat.L1])
def test_a_scaled_ball_is_the_unscaled_one_of_the_divided_input(cls):
    scale, g = torch.tensor([0.5, 2.0, 10.0]), torch.Generator().manual_seed(0)
    x, delta, grad = (torch.randn(6, 3, generator=g, dtype=torch.float64) for _ in range(3))
    scaled, plain = cls(0.7, box=None, scale=scale), cls(0.7, box=None)
    units = delta / scale
    torch.testing.assert_close(scaled.norm(delta), plain.norm(units))
    torch.testing.assert_close(scaled.dual_norm(grad), plain.dual_norm(grad * scale))
    torch.testing.assert_close(scaled.project(x, delta) / scale, plain.project(x / scale, units))
    moved, expected = scaled.step(x, delta, grad, 0.2), plain.step(x / scale, units, grad * scale, 0.2)
    torch.testing.assert_close(moved / scale, expected)
    # The dual norm is the largest slope of a step of norm 1.
    unit_step = scaled.step(x, torch.zeros_like(delta), grad, 1.0)
    torch.testing.assert_close((unit_step * grad).sum(1), scaled.dual_norm(grad))


@pytest.mark.parametrize("cls", [deat.Linf, deat.L2, deat.L1])
def test_fixed_features_never_change(cls):
    threat, g = cls(0.5, **FEATURES), torch.Generator().manual_seed(0)
    x, grad = torch.randn(10, 4, generator=g), torch.randn(10, 4, generator=g)
    grad[:, 3] = 1e6
    delta = threat.initial_delta(x, "uniform", g)
    for _ in range(3):
        delta = threat.pgd_step(x, delta, grad, 0.6)
    assert not delta[:, 3].any()
    torch.testing.assert_close(threat.norm(delta), torch.full((10,), 0.5))
    assert bool(threat.contains(x, x + delta).all())
    assert float(threat.dual_norm(grad).max()) < 1e4
    wrong = x + delta
    wrong[0, 3] += 1e-3
    assert threat.contains(x, wrong).tolist() == [False, *[True] * 9]


def test_a_threat_model_as_usual_is_described_and_shown_as_ever():
    assert repr(deat.Linf(8 / 255)) == "Linf(eps=0.03137254901960784)"
    assert deat.L2(0.5).describe() == {"norm": "l2", "eps": 0.5}
    assert deat.Linf(0.1) == deat.Linf(0.1, box=[0, 1])


@pytest.mark.parametrize("cls", [deat.Linf, deat.L2, deat.L1])
def test_a_record_gives_the_threat_model_back(cls):
    for threat in (cls(0.25), cls(0.25, box=(-1, 1)), cls(0.25, **FEATURES)):
        again = build_threat(json.loads(json.dumps(threat.describe())))
        assert again == threat
        assert hash(again) == hash(threat)
        assert repr(again) == repr(threat)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"box": (1, 0)}, "empty"),
        ({"box": 3}, "low, high"),
        ({"scale": [1.0, 0.0]}, "above 0"),
        ({"scale": "wide"}, "number for each feature"),
        ({"mutable": [False, False]}, "at least one"),
        ({"mutable": [0.5, 1]}, "True or False"),
        ({"box": (-0.1, 0.1)}, "width of the box"),
    ],
)
def test_a_box_a_scale_or_fixed_features_that_mean_nothing_are_refused(options, remedy):
    with pytest.raises(UsageError, match=remedy):
        deat.Linf(0.3, **options)


def test_features_of_another_shape_are_refused_before_any_work():
    with pytest.raises(UsageError, match="scale has shape"):
        deat.fit(
            nn.Linear(3, 2),
            (torch.rand(40, 3), torch.arange(40) % 2),
            threat=deat.Linf(0.1, scale=[1.0, 2.0]),
            epochs=1,
            batch_size=20,
        )
