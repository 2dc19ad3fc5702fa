"""A network's branches, end, loss and small steps on a GPU, against torch's own functions."""

import os

import pytest
import torch
from torch import Tensor

import deat
from deat.data import ImageSet
from deat.engine.cuda_graphs import capture_graph
from deat.engine.kernels import conv_streams, graph_pass
from helpers.end_cases import End, compare_ends, compare_entropies
from helpers.kernels_cases import distance

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, inside its compiler
]
ENDS = [
    End(images=128, channels=512),
    End(images=128, channels=640, sides=(8, 8), wide=True),
    End(images=33, channels=130, sides=(7, 7), classes=33, bias=False),
    End(images=1, channels=2048, sides=(1, 1), classes=2),
]
HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("case", ENDS, ids=str)
def test_the_end_of_a_network_agrees_with_torch(case: End, half: torch.dtype) -> None:
    with torch.autocast("cuda", dtype=half):
        torchs, ours = compare_ends(case, half, "cuda")
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 2e-2


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("images", "classes"), [(128, 10), (1000, 2), (300, 1000)])
def test_cross_entropy_agrees_with_torch(images: int, classes: int, mean: bool, half: torch.dtype) -> None:
    torchs, ours = compare_entropies(images, classes, half, "cuda", mean)
    assert max(distance(one, other) for one, other in zip(torchs, ours, strict=True)) < 1e-2


def test_steps_of_many_weights_are_sgds() -> None:
    from helpers.step_cases import compare_steps, odd_steps

    torchs, ours, odd = compare_steps("cuda", torch.bfloat16)
    assert not odd
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(torchs, ours, strict=True))
    assert odd_steps("cuda")


def gradients(branches: bool, replays: int, train: bool) -> list[list[Tensor]]:
    """The gradients of a recorded network by its images and its shortcuts, on images that change every time."""
    from deat.engine.kernels.graph_pass import fused_backend

    torch._dynamo.reset()
    torch.manual_seed(0)
    net = deat.build_model("preact_resnet18").cuda().train(train)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled, x = torch.compile(net, backend=fused_backend), torch.rand(64, 3, 32, 32, device="cuda").requires_grad_()
    by = [x, *(p for p in net.parameters() if p.dim() == 4 and p.shape[-1] == 1)]

    def slope() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            logits = compiled(x)
        return torch.autograd.grad(logits.float().square().sum(), by)

    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(torch.cuda.Stream()):
        patch.setattr(graph_pass, "MIN_OVERLAPPING_CONVOLUTIONS", 2 if branches else 10**9)
        begun, side = [], conv_streams.get_side_stream
        patch.setattr(conv_streams, "get_side_stream", lambda device, use: (begun.append(device), side(device, use))[1])
        slope()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capture_graph(graph, x.device):
            found = slope()
        seen = []
        for _ in range(replays):
            x.data.uniform_()
            graph.replay()
            seen.append([grad.clone() for grad in found])
        torch.cuda.synchronize()
    assert bool(begun) == branches
    return seen


def furthest(ones: list[list[Tensor]], others: list[list[Tensor]]) -> float:
    return max(distance(a, b) for pair in zip(ones, others, strict=True) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("train", [False, True])
def test_branches_that_run_beside_are_waited_for(train: bool) -> None:
    """Batch norm's sums come in any order, which a network in training amplifies: as far as this, twice, is nothing."""
    once, again = gradients(False, 30, train), gradients(False, 30, train)
    assert furthest(gradients(True, 30, train), once) < max(2e-2, 2 * furthest(again, once))


def test_recordings_of_two_batch_sizes_step_as_before_when_memory_was_given_back() -> None:
    images = torch.randint(0, 256, (130, 3, 32, 32), dtype=torch.uint8)
    data = ImageSet(images, torch.arange(130) % 10, tuple("0123456789"))
    settings = deat.TrainConfig(epochs=4, batch_size=64, lr=0.01, precision="bf16", device="cuda", engine="compile")
    ends = []
    for disturbed in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        trainer = deat.make_trainer(deat.build_model("preact_resnet18"), data, method="m+deat", config=settings)
        with trainer.session():
            for _ in range(4):
                trainer.run_epoch()
                if disturbed:
                    streams = [torch.cuda.Stream() for _ in range(40)]
                    torch.cuda.empty_cache()
                    for stream in streams:
                        with torch.cuda.stream(stream):
                            torch.full((1 << 16,), 7, device="cuda")
                    torch.cuda.synchronize()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert distance(*ends) < 0.1
