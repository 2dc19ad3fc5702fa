"""The whole quick path, as a GPU takes it, interpreted: fused, halved, stepped by our own kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deat
from deat.core.training_losses import LossOutput
from deat.data import ImageSet
from deat.engine.engine import Engine
from deat.engine.half_weights import HalfWeights, castable_weights
from deat.engine.kernels import batch_norm, classifier_head, conv_streams, cross_entropy, graph_pass
from deat.methods.change_settings import configure_method
from deat.training import optimizers
from deat.training.trainer import Trainer


def small_net(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=bias)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def trainer_of(method: str | deat.Method, engine: str, bias: bool = True, size: int = 4) -> Trainer:
    """A trainer on two batches, small ones: interpreted kernels take their time image by image."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2 * size, 1, 8, 8), dtype=torch.uint8, generator=generator)
    settings = deat.TrainConfig(epochs=2, batch_size=size, lr=0.01, precision="bf16", device="cpu", engine=engine)
    data = ImageSet(images, torch.arange(2 * size) % 4, tuple("0123"))
    own = lambda parameters: optimizers.DeviceSGD(parameters, 0.01, 0.9, 5e-4)  # noqa: E731
    return deat.make_trainer(small_net(bias), data, method=method, config=settings, optimizer=own)


def noted(work: Any, name: str, ran: list[str]) -> Any:
    return lambda *args: (ran.append(name), work(*args))[1]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The quick path is taken, and says which kernels ran."""
    pytest.importorskip("triton", reason="needs Triton, which is for Linux")
    if torch.cuda.device_count():
        pytest.skip("tests/gpu runs it for real")
    ran: list[str] = []
    launch = batch_norm._launch
    monkeypatch.setattr(Engine, "uses_own_kernels", property(lambda self: True))
    monkeypatch.setattr(optimizers, "has_triton", lambda: True)
    monkeypatch.setattr(
        batch_norm, "_is_supported_tensor", lambda x: x.is_contiguous(memory_format=torch.channels_last)
    )
    monkeypatch.setattr(classifier_head, "on_gpu", lambda x: True)
    monkeypatch.setattr(classifier_head, "_matches_compute_dtype", lambda dtype, weight: True)
    monkeypatch.setattr(cross_entropy, "on_gpu", lambda x: True)
    for kind, name in ((classifier_head.PooledLinearFunction, "head"), (cross_entropy.CrossEntropyFunction, "entropy")):
        monkeypatch.setattr(kind, "apply", noted(kind.apply, name, ran))
    monkeypatch.setattr(
        batch_norm, "_launch", lambda name, *rest, **named: (ran.append(name), launch(name, *rest, **named))
    )
    return ran


def rounded_answer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A network's end as a GPU rounds it: TRADES' two forwards differ by as little as the interpreter cuts off bf16."""
    means = x.float().mean((2, 3)).to(x.dtype)
    wide = means.float() @ weight.to(x.dtype).float().T + bias.to(x.dtype).float()
    return wide.to(x.dtype), means


@pytest.mark.parametrize("method", ["pgd-2", "free-4", "m+trades", "fat-5", "yopo-5-3"])
def test_the_quick_path_trains_like_the_plain_one(
    method: str, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("deat.engine.kernels.classifier_head_triton.head_forward", rounded_answer)
    plain, quick = (trainer_of(method, engine, size=8) for engine in ("eager", "compile"))
    for _ in range(2 if method == "m+trades" else 1):  # whose k rises then
        one, other = plain.run_epoch(), quick.run_epoch()
        assert other.loss == pytest.approx(one.loss, abs=1e-2)
        assert other.magnitude == pytest.approx(one.magnitude, rel=0.1, abs=2e-6)
    assert quick.game.executor.compiled is not None, "compiling fell back"
    assert {"batch_norm_forward_kernel", "batch_norm_backward_kernel", "head", "entropy"} <= set(as_on_a_gpu)
    for p, q in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-3)
    for p, q in zip(plain.model.buffers(), quick.model.buffers(), strict=True):
        assert torch.allclose(p.double(), q.double(), atol=1e-2)


@pytest.mark.parametrize("method", ["pgd-2", "free-4", "yopo-5-3"])
def test_weights_that_are_stepped_with_their_halves_end_as_those_that_are_halved_again(
    method: str, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    casts: list[bool] = []
    cast = HalfWeights.cast
    monkeypatch.setattr(HalfWeights, "cast", lambda self: (casts.append(self.is_current), cast(self))[1])
    monkeypatch.setattr(
        "deat.engine.kernels.sgd_triton.MIN_LARGE_WEIGHT_NUMBERS", 100
    )  # the second convolution's 576 go by the kernel, the rest beside it
    ends = []
    for follows in (True, False):
        torch._dynamo.reset()
        casts.clear()
        if not follows:
            monkeypatch.setattr(optimizers.DeviceSGD, "follow", None)
        trainer = trainer_of(method, "compile")
        trainer.run_epoch()
        assert trainer.game.executor.compiled is not None, "compiling fell back"
        ends.append([p.detach().clone() for p in trainer.model.parameters()])
        assert not follows or casts.count(False) == 2, "weights are halved anew when a batch begins, and then only"
    # Triton's interpreter cuts bf16 off where a GPU rounds, so halves that were stepped are not quite those of a cast.
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize("large", [100, 10**9])
def test_halves_are_the_weights_after_every_step_and_keep_no_gradient(
    large: int, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        "deat.engine.kernels.sgd_triton.MIN_LARGE_WEIGHT_NUMBERS", large
    )  # by the kernel, or all by what steps small weights
    trainer = trainer_of("free-4", "compile")
    trainer.optimizer.param_groups[0]["weight_decay"] = 5.0  # so that weights move a lot
    step, seen = trainer.game.engine.step, []

    def check(optimizer: torch.optim.Optimizer) -> Tensor | None:
        taken = step(optimizer)
        assert trainer.game.executor.half_weight_tensors()
        copies = trainer.game.executor.compiled.half_weights.copies  # type: ignore[union-attr]
        seen.append(all(torch.allclose(half.float(), p, rtol=2**-7) for p, half in copies.items()))
        assert all(half.grad is None for half in copies.values())
        return taken

    trainer.game.engine.step = check  # type: ignore[method-assign]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.run_epoch()
    assert len(seen) == 8
    assert all(seen)
    put_back = {tensor.data_ptr() for tensor in trainer.game.mutable_tensors()}  # after a recording's warm-up
    assert put_back >= {half.data_ptr() for half in trainer.game.executor.compiled.half_weights.copies.values()}  # type: ignore[union-attr]
    assert any((p - q).abs().max() > 0.02 for p, q in zip(before, trainer.model.parameters(), strict=True))


def test_gradients_that_are_forgotten_are_those_of_halves_too(as_on_a_gpu: list[str]) -> None:
    torch._dynamo.reset()
    trainer = trainer_of("pgd-2", "compile")
    trainer.run_epoch()
    game = trainer.game
    r = next(iter(game._buffers_by_shape.values()))
    game.executor.prepare_forward(r.x)
    game.compute_both_gradients(r)
    copies = game.executor.compiled.half_weights.copies.values()  # type: ignore[union-attr]
    assert all(half.grad is not None for half in copies)
    game.clear_gradients()
    assert all(half.grad is None for half in copies)


@pytest.mark.parametrize("when", ["before", "later"])
def test_whoever_watches_the_optimisers_steps_sees_every_gradient(when: str, as_on_a_gpu: list[str]) -> None:
    torch._dynamo.reset()
    trainer, seen = trainer_of("pgd-2", "compile"), []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(all(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    if when == "before":
        trainer.optimizer.register_step_pre_hook(look)
    trainer.run_epoch()
    if when == "later":
        assert trainer.game.executor.half_weight_tensors()
        trainer.optimizer.register_step_pre_hook(look)
    trainer.run_epoch()
    assert seen
    assert all(seen)
    assert trainer.game.executor.compiled is not None
    assert not trainer.game.executor.half_weight_tensors()


@pytest.mark.parametrize("method", ["pgd-2", "free-4"])
def test_weight_gradients_that_are_taken_apart_train_the_same_weights(
    method: str, as_on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    taken: list[Tensor] = []
    monkeypatch.setattr(conv_streams, "on_gpu", lambda x: True)
    monkeypatch.setattr(
        conv_streams, "_start_weight_gradient", lambda *args: (taken.append(args[3].leaf), _begin_here(*args))
    )
    monkeypatch.setattr(conv_streams, "wait_for_gradients", lambda: None)
    plain, quick = (trainer_of(method, engine, bias=False) for engine in ("eager", "compile"))
    for _ in range(2):
        one, other = plain.run_epoch(), quick.run_epoch()
        assert other.loss == pytest.approx(one.loss, abs=1e-2)
        assert other.magnitude == pytest.approx(one.magnitude, rel=0.1)
    assert quick.game.executor.compiled is not None, "compiling fell back"
    assert taken
    assert all(leaf.requires_grad for leaf in taken), "ascents ask weights that do not learn"
    for p, q in zip(plain.model.parameters(), quick.model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-3)


def _begin_here(dy: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> None:
    """A weight's gradient, taken at once."""
    grad = conv_streams._conv_gradient(dy, x, weight, ctx.sizes, needs_grad_x=False)
    ctx.leaf.grad = grad if ctx.leaf.grad is None else ctx.leaf.grad + grad


def test_a_compact_batch_that_is_still_whole_is_attacked_with_the_weights_as_they_are(as_on_a_gpu: list[str]) -> None:
    torch._dynamo.reset()
    trainer = trainer_of(configure_method(deat.get_method("fat-5"), deat.Linf(), compact=True), "compile")
    runner, whole = trainer.game.executor, []
    calls, attack = trainer.game.functions, trainer.game.functions.attack_loss

    def attacked(x: Tensor, *rest: Tensor) -> LossOutput:
        assert runner.compiled is not None
        if runner.compiled.half_weights and x.shape == runner.compiled.shape:
            whole.append(runner.compiled.half_weights.is_current)
        return attack(x, *rest)

    calls.attack_loss = attacked  # type: ignore[method-assign]
    trainer.run_epoch()
    assert len(whole) > 1
    assert all(whole)


def autocast_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(x).float().square().mean()
    return list(torch.autograd.grad(loss, list(net.parameters())))


def test_gradients_by_halved_weights_are_those_of_autocast() -> None:
    net, x = small_net(), torch.rand(4, 1, 8, 8)
    expected = autocast_gradients(net, x)
    halves = HalfWeights(net, torch.bfloat16)
    for times in (1, 2):  # a second pass adds to the first
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.func.functional_call(net, halves.trainable_copies(net), (x,)).float().square().mean().backward()
        halves.merge_gradients()
        for p, grad in zip(net.parameters(), expected, strict=True):
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
            assert torch.allclose(p.grad, times * grad, rtol=2e-2, atol=1e-5)


def test_halved_weights_follow_the_weights_when_they_are_asked_next() -> None:
    net = small_net()
    halves = HalfWeights(net, torch.bfloat16)
    before = halves.frozen()["0.weight"].clone()
    with torch.no_grad():
        net[0].weight.mul_(2)  # type: ignore[index, operator]
    halves.cast()
    assert torch.equal(halves.frozen()["0.weight"], before), "nobody said that they moved"
    halves.is_current = False
    halves.cast()
    assert torch.equal(halves.frozen()["0.weight"], 2 * before)


def test_weights_that_two_layers_share_are_not_halved() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    net[1].weight = net[0].weight
    assert [name for name, _ in castable_weights(net)] == ["0.bias", "1.bias"]


def test_weights_that_are_made_of_others_and_those_with_hooks_are_not_halved() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 4))
    nn.utils.spectral_norm(net[0])  # a plain convolution, whose weight a hook makes anew in every call
    net[1].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    net[1].bias.register_post_accumulate_grad_hook(lambda p: None)
    assert type(net[0]) is nn.Conv2d
    assert [name for name, _ in castable_weights(net)] == ["0.bias"]


def test_only_halved_weights_have_their_gradients_taken_beside_and_compiled_networks_know_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def conv2d(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        seen.append(hasattr(weight, conv_streams.SIDE_STREAM_FLAG))
        return torch.conv2d(x, weight, *rest)

    monkeypatch.setattr(conv_streams, "conv2d", conv2d)
    torch._dynamo.reset()
    net, x = small_net(), torch.rand(4, 1, 8, 8)
    weights = HalfWeights(net, torch.float64).trainable_copies(net)
    double = {name: p.detach().double() for name, p in net.named_parameters()} | weights
    torch.compile(lambda v: torch.func.functional_call(net.double(), double, (v,)), backend=graph_pass.fused_backend)(
        x.double()
    )
    assert seen == [True]
    torch.compile(small_net(), backend=graph_pass.fused_backend)(x)
    assert seen == [True, False]


def test_layers_that_are_frozen_while_training_stop_learning(as_on_a_gpu: list[str]) -> None:
    torch._dynamo.reset()
    trainer = trainer_of("pgd-2", "compile")
    trainer.run_epoch()
    first = trainer.game.executor.compiled
    layer = next(m for m in trainer.model.modules() if isinstance(m, nn.Conv2d))
    layer.weight.requires_grad_(False)
    before = layer.weight.detach().clone()
    trainer.run_epoch()
    assert trainer.game.executor.compiled is not first
    assert torch.equal(layer.weight, before)
