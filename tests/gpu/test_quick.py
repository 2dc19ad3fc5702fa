"""The quick twin that attacks ask on a GPU; skipped where there is none."""

import pytest
import torch
from torch import nn

import deat
from deat.evaluation import fast_model as graphed_module
from deat.evaluation.fast_model import EAGER_CALLS_BEFORE_RECORDING, FastModel, GraphedNetwork
from deat.utils.float32_precision import full_precision
from helpers.eval_nets import THREAT, convolutional, digits
from helpers.recorded import count_recordings

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, inside its compiler
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return deat.build_model("preact_resnet18", normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))).cuda().eval()


def slope(net: nn.Module | GraphedNetwork, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(net(x).square().sum(), x)
    return grad


@pytest.mark.parametrize("length", [1, 33, 64])
def test_a_recorded_network_answers_and_differentiates_like_an_eager_one(length: int) -> None:
    net = network().requires_grad_(False)
    graphed = GraphedNetwork(net)
    for _ in range(EAGER_CALLS_BEFORE_RECORDING + 2):
        x = torch.rand(length, 3, 32, 32, device="cuda")
        assert torch.allclose(graphed(x), net(x), atol=1e-4)
        assert torch.allclose(slope(graphed, x), slope(net, x), rtol=1e-2, atol=1e-4)
    assert count_recordings(graphed) == 1


def test_a_backward_survives_forwards_of_other_batches_in_between() -> None:
    net = network().requires_grad_(False)
    graphed = GraphedNetwork(net)
    first, second = (torch.rand(n, 3, 32, 32, device="cuda") for n in (40, 64))
    for _ in range(EAGER_CALLS_BEFORE_RECORDING + 1):
        graphed(first), graphed(second)
    x = first.clone().requires_grad_()
    answer = graphed(x).square().sum()
    graphed(second)
    graphed(1 - first)
    (grad,) = torch.autograd.grad(answer, x)
    assert torch.allclose(grad, slope(net, first), rtol=1e-2, atol=1e-4)


def test_a_batch_of_several_parts_answers_and_differentiates_like_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_module, "MAX_RECORDED_BATCH", 64)
    net = network().requires_grad_(False)
    graphed = GraphedNetwork(net)
    with full_precision():
        for length in (150, 150, 150, 130, 64):
            x = torch.rand(length, 3, 32, 32, device="cuda")
            assert torch.allclose(slope(graphed, x), slope(net, x), rtol=1e-2, atol=1e-4)
            with torch.no_grad():
                assert torch.allclose(graphed(x), net(x), atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "graph", "compile"])
def test_half_precision_keeps_the_signs_of_the_gradient(engine: str) -> None:
    net = network()
    x, y = torch.rand(64, 3, 32, 32, device="cuda"), torch.arange(64, device="cuda") % 10
    quick = FastModel(net, net, "fp16", engine)

    def signs(model: nn.Module) -> torch.Tensor:
        images = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(images), y, reduction="sum"), images)
        return grad.sign()

    assert quick.matches_exact(x)
    for _ in range(EAGER_CALLS_BEFORE_RECORDING + 1):
        quick(x)
    assert float((signs(quick) != signs(net)).float().mean()) < 0.05


def test_whole_parts_and_what_is_left_over_are_recorded_by_a_compiled_twin() -> None:
    quick = FastModel(network(), network(), "fp16", "compile")
    for _ in range(EAGER_CALLS_BEFORE_RECORDING + 1):
        slope(
            quick, torch.rand(2 * 1024 + 784, 3, 32, 32, device="cuda")
        )  # what is left over is padded to a whole part
    assert quick.low_precision_model.compiled
    assert quick.forward_fn.can_record
    assert count_recordings(quick.forward_fn) == 3


ASKED = ["natural", "fgsm", "pgd-20", "cw-20", "apgd-ce"]
"""Attacks in each precision; bench/evaluation.py asks all of AutoAttack, on 10,000 images."""


def judged(precision: str) -> deat.Evaluation:
    x, y = digits(400)
    data, threat = (x.cuda(), y.cuda()), deat.Linf(THREAT.eps / 4)
    return deat.evaluate(convolutional().cuda(), data, threat=threat, attacks=ASKED, precision=precision, sanity=False)


@pytest.fixture(scope="module")
def exact() -> deat.Evaluation:
    return judged("fp32")


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_quick_attacks_have_the_verdicts_of_exact_ones_but_for_a_few(precision: str, exact: deat.Evaluation) -> None:
    found = judged(precision)
    assert found.settings["precision"] == precision
    for name in ASKED:
        differ = sum(a != b for a, b in zip(exact.verdicts[name], found.verdicts[name], strict=True))
        assert differ <= 8, name
    assert found.verdicts["natural"] == exact.verdicts["natural"]


def test_a_model_that_half_precision_cannot_follow_is_attacked_in_full() -> None:
    class Steep(nn.Module):
        """Logits that half precision cannot hold."""

        def __init__(self) -> None:
            super().__init__()
            self.net = convolutional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1e6 * self.net(x)

    net, (x, y) = Steep().cuda(), digits(100)
    with pytest.warns(UserWarning, match="float32"):
        found = deat.evaluate(net, (x.cuda(), y.cuda()), threat=THREAT, attacks=["pgd-20"], sanity=False)
    exact = deat.evaluate(net, (x.cuda(), y.cuda()), threat=THREAT, attacks=["pgd-20"], precision="fp32", sanity=False)
    assert found.accuracy["pgd-20"] == pytest.approx(exact.accuracy["pgd-20"], abs=0.03)


def test_a_compiled_twin_gives_the_verdicts_of_an_exact_model_but_for_a_few() -> None:
    net, (x, y) = convolutional().cuda(), digits(400)
    options = {"threat": deat.Linf(THREAT.eps / 4), "attacks": ["pgd-20", "square"], "sanity": False, "block": 100}
    exact = deat.evaluate(net, (x.cuda(), y.cuda()), precision="fp32", **options)  # type: ignore[arg-type]
    found = deat.evaluate(net, (x.cuda(), y.cuda()), engine="compile", **options)  # type: ignore[arg-type]
    assert found.settings["compiled"]
    for name in ("pgd-20", "square"):
        differ = sum(a != b for a, b in zip(exact.verdicts[name], found.verdicts[name], strict=True))
        assert differ <= 8, name
