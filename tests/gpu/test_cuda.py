"""What only a GPU can show; skipped where there is none."""

import copy
import gc
import math
import threading
from pathlib import Path

import pytest
import torch

import deat
from deat.core.batch_buffers import Buffers
from deat.data import ImageSet
from deat.errors import Interrupted
from deat.methods import list_methods
from deat.training.checkpoints import Checkpoints
from deat.training.optimizers import DeviceSGD, OptimizerFactory
from deat.training.resume_checks import list_inexactness_reasons
from deat.training.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, inside its compiler
]


def make_trainer(
    method: str,
    precision: str,
    epochs: int = 2,
    optimizer: OptimizerFactory | None = None,
    threat: deat.ThreatModel | None = None,
    **settings: object,
) -> Trainer:
    images = torch.randint(0, 256, (130, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(130) % 10
    model = deat.build_model("preact_resnet18", normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    return deat.make_trainer(
        model,
        ImageSet(images, labels, tuple("0123456789")),
        method=method,
        threat=threat,
        optimizer=optimizer,
        config=deat.TrainConfig(epochs=epochs, batch_size=64, lr=0.01, precision=precision, device="cuda", **settings),
    )


@pytest.mark.parametrize("method", [*list_methods(), "m+free", "m+yopo-5-3", "m+f+trades"])
def test_no_host_synchronisation_inside_an_epoch(method: str) -> None:
    trainer = make_trainer(method, "bf16", epochs=5)
    for _ in range(3):
        trainer.run_epoch()  # the first epochs allocate, record, and find YOPO's first layer
    budget = trainer.schedule.budget(trainer.schedule_state, trainer.epoch)
    read, record = trainer.game.meter.read, None
    trainer.game.meter.read = lambda epoch: None  # type: ignore[assignment, return-value]
    batches = list(trainer.train.epoch(3))
    trainer.train.epoch = lambda epoch: iter(batches)  # type: ignore[method-assign]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_epoch(budget)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    record = read(3)
    assert record.examples == 130
    assert math.isfinite(record.loss)


@pytest.mark.parametrize("method", ["m+deat", "trades", "mart", "yopo-5-3", "fat-5"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains_and_agrees_on_the_first_magnitude(method: str, precision: str) -> None:
    torch.manual_seed(0)
    exact = make_trainer(method, "fp32").run_epoch()
    torch.manual_seed(0)
    stats = make_trainer(method, precision, epochs=2).run_epoch()
    assert math.isfinite(stats.loss)
    if stats.skipped == 0:
        assert stats.magnitude == pytest.approx(exact.magnitude, rel=0.3)
        assert stats.examples == 130


def deterministic_run(engine: str, method: str, **settings: object) -> tuple[dict[str, torch.Tensor], list[object]]:
    torch.manual_seed(0)
    own = None if engine == "graph" else (lambda p: DeviceSGD(p, 0.01, 0.9, 5e-4))
    trainer = make_trainer(method, "bf16", epochs=7, optimizer=own, engine=engine, **settings)
    with trainer.session():
        torch.backends.cudnn.benchmark = False
        history = [trainer.run_epoch() for _ in range(7)]  # of three steps each, a short one among them
    assert trainer.engine.use_cuda_graphs == (engine == "graph")
    assert engine == "eager" or trainer.game.executor.recorder is not None, "the recording fell back"
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if trainer.average is not None:
        weights |= {f"average of {name}": value for name, value in trainer.average.weights().items()}
    return weights, history


RECORDED = ["m+deat", "pgd-7", "trades", "mart", "fat-5", "free-4", "dat", "natural", "yopo-5-3", "m+yopo-5-3"]
RECORDED += ["n-fgsm", "fgsm-pgi", "awp+deat-3", "awp+pgd-2", "g+deat-3", "gradalign", "auto+deat"]


@pytest.mark.parametrize("method", RECORDED)
def test_recorded_moves_equal_eager_ones_bit_for_bit(method: str) -> None:
    check_recorded_equals_eager(method)


@pytest.mark.parametrize("method", ["m+deat", "pgd-2", "fgsm-pgi"])
def test_recorded_moves_with_averaged_weights_and_options_equal_eager_ones_bit_for_bit(method: str) -> None:
    check_recorded_equals_eager(method, ema=0.9, label_smoothing=0.1, clip_grad_norm=1.0)


@pytest.mark.parametrize("rule", ["worst", "random", "error", "magnitude"])
def test_recorded_moves_under_a_union_equal_eager_ones_bit_for_bit(rule: str) -> None:
    balls = (deat.Linf(8 / 255), deat.L2(0.5), deat.L1(12))
    check_recorded_equals_eager("pgd-2", threat=deat.Union(*balls, rule=rule))


def check_recorded_equals_eager(method: str, **settings: object) -> None:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (eager, one), (graph, other) = (deterministic_run(engine, method, **settings) for engine in ("eager", "graph"))
    finally:
        torch.backends.cudnn.deterministic = before
        torch.use_deterministic_algorithms(False)
    assert one == other
    assert eager.keys() == graph.keys()
    assert all(torch.equal(eager[name], graph[name]) for name in eager)


def test_a_trainer_gives_back_the_memory_of_its_recordings() -> None:
    held = []
    gc.collect()
    gc.disable()  # which asks how many objects there are, not how much memory they hold
    try:
        for _ in range(3):
            trainer = make_trainer("pgd-3", "bf16", engine="graph")
            with trainer.session():
                trainer.run_epoch()
            assert len(trainer.game.executor.recorder or ()) > 3
            del trainer
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
    finally:
        gc.enable()
    assert held[2] < held[1] + 2**26  # what torch's libraries keep is theirs


def test_moves_are_recorded_while_another_thread_pins_memory() -> None:
    kept, done = [], threading.Event()

    def pin() -> None:
        while not done.is_set():
            kept.append(torch.empty(4096).pin_memory())  # kept, so that none can be had again

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        trainer = make_trainer("m+deat", "bf16", engine="graph")
        with trainer.session():
            trainer.run_epoch()
    finally:
        done.set()
        thread.join()
    assert trainer.game.executor.recorder, "it runs eagerly"
    assert len(kept) > 10


def test_an_fp16_step_that_overflows_is_skipped_and_counted() -> None:
    trainer = make_trainer("pgd-7", "fp16", engine="eager")
    assert trainer.engine.scaler is not None
    trainer.engine.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    stats = trainer.run_epoch()
    assert stats.skipped == 3
    assert stats.examples == 0
    assert stats.magnitude == 0
    assert all(torch.equal(b, p) for b, p in zip(before, trainer.model.parameters(), strict=True))


def test_delta_and_images_stay_float32_and_inside_the_ball_in_half_precision() -> None:
    trainer = make_trainer("m+deat", "bf16", epochs=3)
    trainer.run_epoch()
    trainer.run_epoch()
    r = next(iter(trainer.game._buffers_by_shape.values()))
    assert r.x.dtype == r.delta.dtype == torch.float32
    assert bool(trainer.threat.contains(r.x, r.x + r.delta).all())


EXACT = [(name, "auto") for name in list_methods()]  # which records, and never compiles, where it is deterministic
EXACT += [(name, engine) for name in ("m+deat", "pgd-3") for engine in ("eager", "graph")]


@pytest.mark.parametrize(("method", "engine"), EXACT)
def test_resumed_training_is_exact_where_it_is_deterministic(method: str, engine: str, tmp_path: Path) -> None:
    def fresh() -> Trainer:
        torch.manual_seed(0)
        return make_trainer(method, "bf16", epochs=4, engine=engine, deterministic=True)

    whole, first, second = fresh(), fresh(), fresh()
    assert list_inexactness_reasons(whole) == []
    whole.fit()
    close, played = first.game.end_batch, []

    def count(r: Buffers) -> None:
        close(r)
        played.append(1)
        if len(played) == 7:  # in the third epoch of three batches each
            first.interruption.request()

    first.game.end_batch = count  # type: ignore[method-assign]
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(tmp_path).resume_or_start(second)
    assert (second.epoch, second.batches_done) == (2, 1)
    second.fit()
    assert second.history == whole.history
    for one, other in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["pgd-3", "free-4", "yopo-5-3"])
def test_recorded_fp16_trains_like_eager_fp16(method: str) -> None:
    histories = []
    for engine in ("eager", "graph"):
        torch.manual_seed(0)
        trainer = make_trainer(method, "fp16", epochs=3, engine=engine)
        with trainer.session():
            histories.append([trainer.run_epoch() for _ in range(3)])
        assert engine == "eager" or trainer.game.executor.recorder is not None, "the recording fell back"
    for one, other in zip(*histories, strict=True):
        assert other.skipped == one.skipped
        assert other.loss == pytest.approx(one.loss, rel=0.1)
        assert other.magnitude == pytest.approx(one.magnitude, rel=0.2)


def test_a_recorded_fp16_step_that_overflows_is_skipped_counted_and_halves_the_scale() -> None:
    trainer = make_trainer("pgd-7", "fp16", engine="graph")
    trainer.engine.scaler.factor.fill_(2.0**60)  # type: ignore[union-attr]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    stats = trainer.run_epoch()
    assert stats.skipped == 3
    assert stats.examples == 0
    assert float(trainer.engine.scaler.factor) == 2.0**57  # type: ignore[union-attr]
    assert all(torch.equal(b, p) for b, p in zip(before, trainer.model.parameters(), strict=True))


def played(method: str, precision: str, engine: str, double: bool = False) -> list[Buffers]:
    """A batch after each of two epochs of one batch, its weights the same in either engine; m+'s k is 0, then 1."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    model = deat.build_model("preact_resnet18", normalize=((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    trainer = deat.make_trainer(
        model.double() if double else model,
        ImageSet(images, torch.arange(64) % 10, tuple("0123456789")),
        method=method,
        config=deat.TrainConfig(
            epochs=3, batch_size=64, lr=1e-6, precision=precision, device="cuda", engine=engine, lr_schedule="flat"
        ),
    )
    seen = []
    with trainer.session():
        for _ in range(2):
            trainer.run_epoch()
            r = next(iter(trainer.game._buffers_by_shape.values()))
            seen.append(copy.deepcopy(r))
    assert engine != "compile" or trainer.game.executor.compiled is not None, "compiling fell back"
    return seen


@pytest.mark.parametrize(
    "method", ["pgd-2", "m+trades", "mart-2", "free-4", "fat-5", "yopo-5-3", "fgsm-pgi", "awp+pgd-2", "g+pgd-2"]
)
def test_compiled_moves_agree_with_eager_ones(method: str) -> None:
    for one, other in zip(played(method, "fp32", "eager", True), played(method, "fp32", "compile", True), strict=True):
        assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-9)
        assert torch.allclose(other.magnitude, one.magnitude, rtol=1e-9, atol=1e-12)
    for one, other in zip(played(method, "bf16", "eager"), played(method, "bf16", "compile"), strict=True):
        assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-2, abs=1e-2)
        assert (one.delta.abs().amax() > 0) == (other.delta.abs().amax() > 0)
    assert one.delta.any(), "no ascend was among them"


def test_a_compiled_ascent_in_half_precision_keeps_the_signs_of_delta() -> None:
    one, other = played("pgd-1", "bf16", "eager")[0], played("pgd-1", "bf16", "compile")[0]
    # Gradients of a network that has learnt nothing are mostly rounding: bench/gpu_fast.py asks one that has.
    assert float((one.delta.sign() != other.delta.sign()).float().mean()) < 0.05
