"""Our kernels on a GPU, against torch's own functions."""

import os

import pytest
import torch

from helpers import crop_cases, stem_cases
from helpers.crop_cases import Crop, is_same
from helpers.kernels_cases import Case, cases, compare, distance
from helpers.stem_cases import Stem

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
]
FAR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}
CASES = [
    *cases(torch.float64, torch.bfloat16, channels=(24,)),
    *(case for case in cases(torch.float16, torch.float32, torch.bfloat16, channels=(64,)) if case.batch and case.relu),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_batch_norm_agrees_with_torch(case: Case) -> None:
    torchs, ours = compare(case, "cuda", 300)
    assert len(torchs) == len(ours)
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < FAR[case.dtype]


def recorded_norms(early: bool, replays: int) -> list[torch.Tensor]:
    """Two batch norms in a row and back, recorded alone, and replayed on images that change every time."""
    from deat.engine.kernels import batch_norm

    torch.manual_seed(0)
    x = torch.empty(64, 64, 32, 32, device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last)
    dy, columns = torch.randn_like(x), [torch.rand(64, device="cuda") + 0.5 for _ in range(2)]
    leaf = x.requires_grad_()

    def both() -> tuple[torch.Tensor, ...]:
        y, _ = batch_norm.fused_batch_norm(leaf, None, None, None, *columns, True, relu=True)
        z, _ = batch_norm.fused_batch_norm(y, None, None, None, *columns, True)
        return z, *torch.autograd.grad(z, leaf, dy)

    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(torch.cuda.Stream()):
        patch.setattr(batch_norm, "_has_dependent_launch", lambda device: early)
        both()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = both()
        seen = []
        for _ in range(replays):
            leaf.data.normal_(mean=float(len(seen)), std=1.0 + len(seen))
            graph.replay()
            seen.append(torch.stack([t.detach().float() for t in found]))
        torch.cuda.synchronize()
    return seen


def test_launches_that_begin_early_read_nothing_too_soon() -> None:
    for one, other in zip(recorded_norms(True, 50), recorded_norms(False, 50), strict=True):
        assert distance(other, one) < 1e-2


def test_a_small_spread_far_from_zero_keeps_its_variance() -> None:
    from deat.engine.kernels.batch_norm import fused_batch_norm

    x = (1000 + 0.01 * torch.randn(64, 32, 16, 16, device="cuda", dtype=torch.float64)).float()
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(32, device="cuda"), torch.zeros(32, device="cuda")
    y, _ = fused_batch_norm(x, None, None, None, weight, bias, True, 0.1, 0.0)
    assert y.std().item() == pytest.approx(1.0, abs=1e-3)


def test_one_pass_of_sgd_is_sgd() -> None:
    from deat.training.optimizers import DeviceSGD

    def run(quick: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(64, 128, 3), torch.nn.Linear(1000, 300), torch.nn.BatchNorm2d(64)]
        net = torch.nn.Sequential(*layers).cuda()
        layers[0].weight.data = layers[0].weight.data.contiguous(memory_format=torch.channels_last)
        optimizer = DeviceSGD(net.parameters(), 0.1, 0.9, 5e-4)
        optimizer.use_compiled(quick)
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    for one, other in zip(run(False), run(True), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_step_takes_the_gradients_of_halves_and_halves_the_weights_as_a_cast_would() -> None:
    from deat.training.optimizers import DeviceSGD

    torch.manual_seed(0)
    wholes = [torch.randn(n, 64, 3, 3, device="cuda") for n in (1, 128)]  # a small weight, and one for the kernel
    wholes = [w.contiguous(memory_format=torch.channels_last).requires_grad_() for w in wholes]
    halves = {w: w.detach().bfloat16().requires_grad_() for w in wholes}
    others = [w.detach().clone(memory_format=torch.preserve_format).requires_grad_() for w in wholes]
    quick, plain = (DeviceSGD(weights, 0.1, 0.9, 5e-4) for weights in (wholes, others))
    quick.use_compiled(True)
    quick.follow(halves)
    for _ in range(3):
        for whole, other in zip(wholes, others, strict=True):
            halves[whole].grad = torch.randn_like(halves[whole])
            other.grad = halves[whole].grad.float()
        quick.step()
        plain.step()
    for whole, other in zip(wholes, others, strict=True):
        assert torch.allclose(whole, other, rtol=1e-6, atol=1e-7)
        assert torch.equal(halves[whole], whole.bfloat16())
        assert halves[whole].grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_pass_of_a_linf_step_is_the_step() -> None:
    from deat.engine.kernels.linf_step_triton import linf_projected_step
    from deat.threat import Linf

    x, grad = torch.rand(7, 3, 9, 9, device="cuda"), torch.randn(7, 3, 9, 9, device="cuda")
    grad[0] = 0
    delta, alpha = 0.1 * torch.rand_like(x) - 0.05, torch.tensor(4 / 255, device="cuda")
    moved = Linf(8 / 255).pgd_step(x, delta, grad, alpha)
    assert torch.equal(linf_projected_step(x, delta, grad, alpha, out=torch.empty_like(x), eps=8 / 255), moved)
    assert torch.equal(linf_projected_step(x, delta, grad, alpha, out=delta, eps=8 / 255), delta)
    assert torch.equal(delta, moved), "in its place"
    grad[1] = float("nan")
    assert linf_projected_step(x, delta, grad, alpha, out=torch.empty_like(x), eps=8 / 255)[1].isnan().all()


def test_weight_gradients_taken_beside_are_the_weights_gradients() -> None:
    from deat.engine.kernels.conv_streams import conv2d, mark_for_side_stream, wait_for_gradients

    x = torch.randn(16, 32, 8, 8, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    w = torch.randn(64, 32, 3, 3, device="cuda", dtype=torch.bfloat16)
    w = w.contiguous(memory_format=torch.channels_last).requires_grad_()
    mark_for_side_stream(w)
    x.requires_grad_()
    for _ in range(2):  # the second adds to the first
        conv2d(x, w, None, 1, 1).float().square().sum().backward()
    wait_for_gradients()
    ours, by_x = w.grad, x.grad
    w.grad = x.grad = None
    for _ in range(2):
        torch.conv2d(x, w, None, 1, 1).float().square().sum().backward()
    assert ours is not None
    assert torch.allclose(ours.float(), w.grad.float(), rtol=2e-2, atol=0.5)  # type: ignore[union-attr]
    assert torch.equal(by_x, x.grad)  # type: ignore[arg-type]


STEMS = [
    Stem(shape=(128, 32, 32)),
    Stem(shape=(128, 32, 32), last=True, bias=False),
    Stem(shape=(128, 32, 32), standardised=False, dtype=torch.bfloat16),
    Stem(channels=1, kernel=(1, 1), padding=0, out=24, shape=(5, 28, 28)),
    Stem(channels=4, kernel=(5, 5), padding=2, out=96, shape=(5, 19, 33)),
    Stem(kernel=(3, 5), padding=(0, 3), out=17, shape=(5, 19, 33)),
]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", STEMS, ids=str)
def test_the_first_convolution_agrees_with_torch(case: Stem, half: torch.dtype) -> None:
    with torch.autocast("cuda", dtype=half):
        torchs, ours = stem_cases.compare(case, half, "cuda")
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 1e-2


@pytest.mark.parametrize("rest", [(2, 1), (1, 1, 2), (1, "same")], ids=str)
def test_first_convolutions_that_our_kernels_do_not_take_agree_with_torch(rest: tuple[object, ...]) -> None:
    from deat.engine.kernels.first_conv import conv2d_few_channels

    x, weight = torch.randn(16, 3, 32, 32, device="cuda"), torch.randn(64, 3, 3, 3, device="cuda")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    answers = []
    for conv2d in (torch.conv2d, conv2d_few_channels):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = conv2d(*leaves, None, *rest)  # type: ignore[call-overload]
        answers.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert max(distance(one, other) for one, other in zip(*answers, strict=True)) < 1e-2


def test_the_first_convolution_repeats_every_bit() -> None:
    from deat.engine.kernels.first_conv import conv2d_few_channels

    x, weight = torch.randn(16, 3, 32, 32, device="cuda").requires_grad_(), torch.randn(64, 3, 3, 3, device="cuda")
    answers = []
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = conv2d_few_channels(x, weight, None, 1, 1)
        answers.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), x)])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


CROPS = [
    Crop(shape=(3, 32, 32), num=300, taken=slice(0, 128)),
    Crop(shape=(3, 32, 32), num=300, taken=slice(1, 97, 2), flip=False),
    Crop(shape=(3, 32, 32), num=300, dtype=torch.float32),
    Crop(shape=(3, 32, 32), num=300, last=True, pad=0),
    Crop(shape=(1, 28, 28), num=65, pad=2),
    Crop(shape=(3, 75, 41), num=7, pad=5),
    Crop(shape=(1, 5, 7), num=1),
    Crop(shape=(3, 224, 224), num=5, taken=slice(3, None)),
]


@pytest.mark.parametrize("case", CROPS, ids=str)
def test_crops_have_the_bits_of_tensor_operations(case: Crop) -> None:
    assert is_same(*crop_cases.compare(case, "cuda"))


def test_every_byte_is_scaled_as_elsewhere() -> None:
    from deat.data.image_set import to_unit_range
    from deat.engine.kernels.crop import crop

    x = torch.arange(256, dtype=torch.uint8, device="cuda").view(1, 1, 16, 16)
    first = torch.zeros(1, dtype=torch.int64, device="cuda")
    found = crop(x, first, first, first, first.bool(), 0)
    assert torch.equal(found, to_unit_range(x))
    assert torch.equal(found.cpu(), to_unit_range(x.cpu()))


def test_a_set_of_more_bytes_than_32_bits_count_is_cut_at_its_far_end() -> None:
    from deat.engine.kernels.crop import crop, is_supported

    num = 2**31 // (3 * 32 * 32) + 9
    x = torch.zeros(num, 3, 32, 32, dtype=torch.uint8, device="cuda")
    x[-1] = 255
    corner, flip = torch.full((num,), 4, device="cuda"), torch.zeros(num, dtype=torch.bool, device="cuda")
    assert is_supported(x)
    found = crop(x, torch.tensor([num - 1, 0], device="cuda"), corner, corner, flip, 4)
    assert found[0].min() == 1
    assert found[1].max() == 0


def test_a_resident_set_has_the_same_batches_with_our_kernel_and_launches_once_a_batch() -> None:
    from deat.data import Augment, InMemorySource
    from deat.engine.kernels import crop, crop_triton
    from helpers.data_sets import random_set

    images = random_set(300, shape=(3, 32, 32))
    here = list(InMemorySource(images, 128, seed=1, augment=Augment(4)).epoch(0))
    source, launched, launch = (
        InMemorySource(images, 128, seed=1, augment=Augment(4), device="cuda"),
        [],
        crop_triton.launch_crop,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crop_triton, "launch_crop", lambda *args: (launched.append(len(args[1])), launch(*args))[1])
        there = list(source.epoch(0))
        assert launched == [1, 128, 128, 44], "one image is tried first"
        patch.setattr(crop, "on_gpu", lambda x: False)
        plain = list(InMemorySource(images, 128, seed=1, augment=Augment(4), device="cuda").epoch(0))
    assert len(launched) == 4
    for (x, y), (u, v), (a, _) in zip(here, there, plain, strict=True):
        assert is_same(x, u)
        assert is_same(x, a)
        assert torch.equal(y, v.cpu())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_batch_is_cut_without_waiting_for_the_device() -> None:
    from deat.data import Augment, InMemorySource
    from helpers.data_sets import random_set

    source = InMemorySource(random_set(300, shape=(3, 32, 32)), 128, augment=Augment(4), device="cuda")
    batches = source.epoch(0)
    next(batches)  # the epoch's order and draws are copied to the device
    torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(rest) == 2
