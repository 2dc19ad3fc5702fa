"""One batch of any method in other people's loops: plain PyTorch, Lightning, Fabric, Accelerate, transformers, timm."""

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import deat
from deat.errors import UsageError
from deat.training.adversarial_step import LoopEngine
from helpers.together import together
from helpers.torchvision_import import make_torchvision_importable

DIGITS = deat.load_data("digits")
SOURCE = deat.as_source(DIGITS.train.subset(torch.arange(320)), batch_size=64)
BATCHES = [(x.clone(), y.clone()) for x, y in SOURCE.epoch(0)]
IMAGES, LABELS = torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES])
EPOCHS = 3
THREAT = "linf:0.15"
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that other people keep


def installed(*packages: str) -> Any:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def make(optimizer: Callable[..., Any] = torch.optim.SGD) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = deat.build_model("small", in_channels=1, image_size=8)
    return net, optimizer(net.parameters(), lr=0.05, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))


def run(step: deat.AdversarialStep, epochs: int = EPOCHS) -> list[deat.EpochRecord]:
    for _ in range(epochs):
        for x, y in BATCHES:
            step(x, y)
        step.end_epoch()
    return step.history


def expected(method: str = "m+deat", epochs: int = EPOCHS) -> tuple[nn.Module, list[deat.EpochRecord], list[int]]:
    """What the parts of deat make of the same batches, without the step."""
    net, optimizer = make()
    about, threat = deat.get_method(method), deat.Linf(0.15)
    game = deat.Game(net, deat.Objective(net, about.objective), threat, about.attack, optimizer, probe=about.probe)
    game.generator.set_state(deat.AdversarialStep(*make(), epochs=1, threat=THREAT).game.generator.get_state())
    schedule = about.bind(threat, EPOCHS)
    state, records, ks = schedule.init(), [], []
    for epoch in range(epochs):
        budget = schedule.budget(state, epoch)
        game.meter.reset()
        for x, y in BATCHES:
            about.play(game, x, y, budget)
        records.append(game.meter.read(epoch))
        state = schedule.observe(state, records[-1])
        ks.append(budget.k)
    return net, records, ks


def assert_same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, **tolerance) if tolerance else torch.equal(p, q)


@pytest.mark.parametrize("method", ["m+deat", "trades", "yopo-3-2", "fat-3", "u-fgsm"])
def test_the_step_plays_what_the_parts_play(method: str) -> None:
    net, optimizer = make()
    step = deat.AdversarialStep(net, optimizer, method=method, threat=THREAT, epochs=EPOCHS)
    ks = []
    for _ in range(EPOCHS):
        ks.append(step.k)
        for x, y in BATCHES:
            result = step(x, y)
        step.end_epoch()
    other, records, expected_ks = expected(method)
    assert (step.history, ks) == (records, expected_ks)
    assert_same(net, other)
    assert (result.adversarial - BATCHES[-1][0]).abs().max() <= 0.15 + 1e-6
    assert result.loss.isfinite()


@pytest.mark.parametrize("batches_before", [3, 5], ids=["middle of an epoch", "end of its batches"])
def test_a_saved_step_continues_with_the_same_bits(batches_before: int, tmp_path: Path) -> None:
    method = deat.configure_method(deat.get_method("u-fgsm"), deat.Linf(0.15), persistent=True)
    whole, optimizer = make()
    run(deat.AdversarialStep(whole, optimizer, method=method, threat=THREAT, epochs=2), 2)
    net, optimizer = make()
    step = deat.AdversarialStep(net, optimizer, method=method, threat=THREAT, epochs=2)
    for x, y in BATCHES[:batches_before]:
        step(x, y)
    torch.save([net.state_dict(), optimizer.state_dict(), step.state_dict()], tmp_path / "state.pt")
    net, optimizer = make()
    step = deat.AdversarialStep(net, optimizer, method=method, threat=THREAT, epochs=2, seed=9)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip((net, optimizer, step), saved, strict=True):
        part.load_state_dict(state)
    for x, y in BATCHES[batches_before:]:
        step(x, y)
    step.end_epoch()
    run(step, 1)
    assert len(step.history) == 2
    assert_same(net, whole)


def test_the_loop_may_clip_and_step_the_last_update_itself() -> None:
    net, optimizer = make()
    step = deat.AdversarialStep(net, optimizer, threat=THREAT, epochs=EPOCHS, leaves_last_update=True)
    for _ in range(EPOCHS):
        for x, y in BATCHES:
            step(x, y)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        step.end_epoch()
    other, records, _ = expected()
    assert step.history == records
    assert_same(net, other)


def test_autocast_and_a_loss_scaler_of_the_engine_are_used() -> None:
    net, optimizer = make()
    engine = deat.Engine(torch.device("cpu"), "bf16")
    step = deat.AdversarialStep(net, optimizer, threat=THREAT, epochs=EPOCHS, engine=engine)
    records = run(step)
    assert records[-1].loss == pytest.approx(expected()[1][-1].loss, rel=0.2)
    assert records[-1].loss != expected()[1][-1].loss


def test_losses_that_another_library_scales_are_unscaled_also_for_attack_steps() -> None:
    net, sgd = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    class Unscaling:
        param_groups, state, zero_grad = sgd.param_groups, sgd.state, sgd.zero_grad

        def step(self) -> None:
            scaler.step(sgd)
            scaler.update()

    engine = LoopEngine(backward_with=lambda loss: scaler.scale(loss).backward(), scaler_in_use=scaler)
    step = deat.AdversarialStep(
        net, cast(torch.optim.Optimizer, Unscaling()), method="trades", threat=THREAT, epochs=EPOCHS, engine=engine
    )  # fmt: skip
    other, records, _ = expected("trades")
    assert run(step) == records, "a power of two scales exactly"
    assert_same(net, other)


def test_images_that_were_normalised_before_are_refused_with_what_to_do() -> None:
    step = deat.AdversarialStep(*make(), threat=THREAT, epochs=1)
    with pytest.raises(UsageError, match=r"from -2.* to .*normalize=\(mean, std\)"):
        step((BATCHES[0][0] - 0.5) / 0.25, BATCHES[0][1])
    with pytest.raises(UsageError, match="uint8"):
        step((BATCHES[0][0] * 255).to(torch.uint8), BATCHES[0][1])


def test_normalisation_is_done_inside_and_the_radius_stays_in_pixels() -> None:
    mean_std = ([0.3], [0.25])
    net, optimizer = make()
    step = deat.AdversarialStep(net, optimizer, threat=THREAT, epochs=EPOCHS, normalize=mean_std)
    records = run(step)
    torch.manual_seed(0)
    inner = deat.build_model("small", in_channels=1, image_size=8)
    outer = deat.add_normalization(inner, *mean_std)
    other = deat.AdversarialStep(
        outer, torch.optim.SGD(outer.parameters(), lr=0.05, momentum=0.9), threat=THREAT, epochs=EPOCHS
    )  # fmt: skip
    assert run(other) == records
    assert_same(net, inner)


def ddp_loop(distributed: deat.Distributed) -> Any:
    net, optimizer = make()
    model = nn.parallel.DistributedDataParallel(net)
    step = deat.AdversarialStep(model, optimizer, method="m+deat", threat=THREAT, epochs=2)
    for _ in range(2):
        for x, y in BATCHES:
            step(x[distributed.rank :: 2], y[distributed.rank :: 2])
        record = step.end_epoch()
    return [record.loss, record.magnitude, float(record.examples), *(float(p.sum()) for p in net.parameters())]


def test_two_processes_with_ddp_share_gradients_and_sums() -> None:
    first, second = together(ddp_loop)
    assert first == second
    assert first[2] == len(IMAGES)


class Loader:
    """The same batches in every epoch, as a DataLoader."""

    def __new__(cls, batch_size: int = 64) -> Any:
        return DataLoader(TensorDataset(IMAGES, LABELS), batch_size=batch_size)


def lit_module() -> Any:
    from lightning.pytorch import LightningModule

    from deat.integrations.lightning import AdversarialTraining

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("the mixin replaces it")

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class Robust(AdversarialTraining, Lit):
        pass

    return Robust


def lit_trainer(folder: Path, epochs: int, **options: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **{"devices": 1, **options},
    )  # fmt: skip


@installed("lightning")
def test_a_lightning_module_trains_with_a_method_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    validation = DataLoader(TensorDataset(IMAGES[:100], LABELS[:100]), batch_size=50)
    whole = lit_module()(method="m+deat", threat=THREAT, val_attack="pgd-5")
    trainer = lit_trainer(tmp_path / "whole", EPOCHS)
    trainer.fit(whole, Loader(), validation)
    step = whole._saved_step
    assert [record["examples"] for record in step["history"]] == [len(IMAGES)] * EPOCHS
    assert trainer.global_step == step["cost"]["backprops"], "m+deat updates the weights in every backprop"
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**EPOCHS)
    metrics = trainer.callback_metrics
    assert 0 <= metrics["val_robust"] <= metrics["val_natural"] <= 1
    assert metrics["l_X"] > 0
    first = lit_trainer(tmp_path / "parts", EPOCHS, limit_train_batches=1.0)
    part = lit_module()(method="m+deat", threat=THREAT, val_attack="none")

    class Stop(__import__("lightning.pytorch", fromlist=["Callback"]).Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    first.callbacks.append(Stop())
    first.fit(part, Loader())
    again = lit_module()(method="m+deat", threat=THREAT, val_attack="none")
    lit_trainer(tmp_path / "rest", EPOCHS).fit(again, Loader(), ckpt_path=first.checkpoint_callback.best_model_path)
    assert again._saved_step["history"] == step["history"]
    assert_same(again, whole)


@installed("lightning")
@pytest.mark.parametrize("form", ["dict", "lists", "monitor beside the scheduler"])
def test_a_plateau_scheduler_and_the_best_checkpoint_follow_accuracy_under_attack(form: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Plateau(lit_module()):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.save_hyperparameters()

    def configure(module: Any) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        best_is_high = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, mode="max", factor=0.5, patience=0, threshold=9
        )
        about = {"scheduler": best_is_high, "monitor": "val_robust", "strict": True}
        return {
            "dict": {"optimizer": optimizer, "lr_scheduler": about},
            "lists": ([optimizer], [about]),
            "monitor beside the scheduler": {
                "optimizer": optimizer, "lr_scheduler": best_is_high, "monitor": "val_robust",
            },
        }[form]  # fmt: skip

    Plateau.__mro__[3].configure_optimizers = configure
    validation = DataLoader(TensorDataset(IMAGES[:50], LABELS[:50]), batch_size=50)
    best = ModelCheckpoint(tmp_path, monitor="val_robust", mode="max", save_top_k=-1)
    trainer = lit_trainer(tmp_path, 2, callbacks=[best])
    module = Plateau(method="u-fgsm", threat=THREAT, val_attack="pgd-1")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message="The lr scheduler dict"
        )  # deat does what Lightning leaves to the module
        trainer.fit(module, Loader(), validation)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025), "no epoch is nine times as good"
    assert len(best.best_k_models) == 2
    again = Plateau(method="u-fgsm", threat=THREAT, val_attack="pgd-1")
    first = min(best.best_k_models)  # saved after validation, before the end of the first epoch
    lit_trainer(tmp_path / "again", 2).fit(again, Loader(), validation, ckpt_path=first)
    assert again._saved_step["history"] == module._saved_step["history"]
    loaded = Plateau.load_from_checkpoint(max(best.best_k_models))
    assert loaded.adversary["method"].name == deat.get_method("u-fgsm").name
    assert_same(loaded, module)


@installed("lightning")
def test_a_plateau_scheduler_without_a_metric_is_refused_with_the_metrics_there_are(tmp_path: Path) -> None:
    module = lit_module()(method="u-fgsm", threat=THREAT, val_attack="none")

    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

    type(module).__mro__[2].configure_optimizers = configure
    with pytest.raises(UsageError, match=r"monitors None.*train_loss"):
        lit_trainer(tmp_path, 1).fit(module, Loader())


@installed("lightning")
def test_lightning_in_bf16_and_a_craft_method(tmp_path: Path) -> None:
    module = lit_module()(method="u-fgsm", threat=THREAT, val_attack="none")
    trainer = lit_trainer(tmp_path, 2, precision="bf16-mixed")
    trainer.fit(module, Loader())
    assert trainer.global_step == 2 * len(BATCHES)
    losses = [record["loss"] for record in module._saved_step["history"]]
    assert losses[1] < losses[0]


@installed("lightning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fabric_loop(precision: Any) -> None:
    from lightning.fabric import Fabric

    from deat.integrations.lightning import make_fabric_step

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    net, optimizer = make()
    model, prepared = fabric.setup(net, optimizer)
    records = run(make_fabric_step(fabric, model, prepared, method="m+deat", threat=THREAT, epochs=EPOCHS))
    other, exact, _ = expected()
    if precision == "32-true":
        assert records == exact
        assert_same(net, other)
    else:
        assert records[-1].loss == pytest.approx(exact[-1].loss, rel=0.2)
        assert records != exact


def lightning_loops(distributed: deat.Distributed, folder: str) -> Any:
    warnings.simplefilter("ignore")
    make_torchvision_importable()
    from lightning.fabric import Fabric

    from deat.integrations.lightning import make_fabric_step

    shares = [(x[distributed.rank :: 2], y[distributed.rank :: 2]) for x, y in BATCHES]
    found = []
    for precision in ("32-true", "bf16-mixed"):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
        fabric.launch()
        net, optimizer = make()
        model, optimizer = fabric.setup(net, optimizer)
        step = make_fabric_step(fabric, model, optimizer, method="m+deat", threat=THREAT, epochs=2)
        for _ in range(2):
            for x, y in shares:
                step(x, y)
            record = step.end_epoch()
        sums = [float(p.sum()) for p in net.parameters()]
        found.append([record.loss, record.magnitude, float(record.examples), *sums])
    module = lit_module()(method="m+deat", threat=THREAT, val_attack="none")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    trainer = lit_trainer(Path(folder), 2, devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer.fit(module, DataLoader(shares, batch_size=None))
    last = module._saved_step["history"][-1]
    other = [last["loss"], last["magnitude"], float(last["examples"]), *(float(p.sum()) for p in module.parameters())]
    return found, other


@installed("lightning")
def test_two_processes_with_fabric_and_lightning_train_as_with_ddp(tmp_path: Path) -> None:
    expected = together(ddp_loop)[0]
    first, second = together(lightning_loops, str(tmp_path))
    assert first == second
    (exact, mixed), lit = first
    assert exact == lit == expected
    assert mixed != expected
    assert mixed[0] == pytest.approx(expected[0], rel=0.1)


@pytest.fixture
def _fresh_accelerate() -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@installed("accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerate_loop_saves_and_restores_the_step(precision: str, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from deat.integrations.accelerate import make_accelerate_step

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    net, optimizer = make()
    model, optimizer = accelerator.prepare(net, optimizer)
    step = make_accelerate_step(accelerator, model, optimizer, method="m+deat", threat=THREAT, epochs=EPOCHS)
    accelerator.register_for_checkpointing(step)
    run(step, 2)
    accelerator.save_state(tmp_path)
    run(step, 1)
    exact = expected()[1]
    assert (
        step.history == exact if precision == "no" else step.history[-1].loss == pytest.approx(exact[-1].loss, rel=0.2)
    )
    records, weights = list(step.history), [p.detach().clone() for p in net.parameters()]
    accelerator.load_state(tmp_path)
    assert step.epoch == 2
    run(step, 1)
    assert step.history == records
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), weights, strict=True))


@installed("accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
def test_accumulated_gradients_are_refused() -> None:
    from accelerate import Accelerator

    from deat.integrations.accelerate import make_accelerate_step

    with pytest.raises(UsageError, match="gradient_accumulation_steps is 4"):
        make_accelerate_step(Accelerator(cpu=True, gradient_accumulation_steps=4), *make(), epochs=1)


def accelerate_loop(distributed: deat.Distributed) -> Any:
    import os

    os.environ["ACCELERATE_USE_CPU"] = "true"
    make_torchvision_importable()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from deat.integrations.accelerate import make_accelerate_step

    warnings.simplefilter("ignore")
    found = []
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        net, optimizer = make()
        model, optimizer, loader = accelerator.prepare(net, optimizer, Loader(batch_size=32))
        step = make_accelerate_step(accelerator, model, optimizer, method="m+deat", threat=THREAT, epochs=2)
        for _ in range(2):
            for x, y in loader:
                step(x, y)
            record = step.end_epoch()
        sums = [float(p.sum()) for p in net.parameters()]
        about = (type(model).__name__, accelerator.num_processes, accelerator.mixed_precision)
        found.append([about, record.loss, record.examples, sums])
    return found


@installed("accelerate")
def test_two_processes_with_accelerate_share_gradients_and_sums() -> None:
    first, second = together(accelerate_loop)
    assert first == second
    exact, mixed = first
    assert [about for about, *_ in first] == [("DistributedDataParallel", 2, precision) for precision in ("no", "bf16")]
    assert exact[2] == mixed[2] == len(IMAGES)
    assert mixed[1] != exact[1]
    assert mixed[1] == pytest.approx(exact[1], rel=0.1)


def tiny_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))


def tiny_resnet() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **sizes))


def hf_trainer(folder: Path, method: str = "m+deat", **options: Any) -> Any:
    from transformers import TrainingArguments

    from deat.integrations.transformers import AdversarialTrainer

    rows = [{"pixel_values": x, "labels": y} for x, y in zip(IMAGES, LABELS, strict=True)]
    arguments = TrainingArguments(
        str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=64, per_device_eval_batch_size=64,
        learning_rate=3e-3, save_strategy="epoch", report_to="none", use_cpu=True, disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    return AdversarialTrainer(
        tiny_resnet(), arguments, train_dataset=rows, eval_dataset=rows[:100], method=method, threat=THREAT,
        normalize=([0.3], [0.3]),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
    )  # fmt: skip


@installed("transformers", "accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
def test_the_trainer_of_transformers_trains_resumes_and_evaluates_under_attack(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path / "whole")
    trainer.train()
    step = trainer._step
    assert [record.examples for record in step.history] == [len(IMAGES)] * EPOCHS
    assert [entry["k"] for entry in trainer.state.log_history if "k" in entry][:2] == [0, 1]
    assert step.history[2].loss < step.history[1].loss, "both under attack"
    natural = trainer.evaluate()["eval_accuracy"]
    robust = trainer.evaluate_under_attack(attack="pgd-5")["eval_robust_accuracy"]
    assert robust <= natural
    other = hf_trainer(tmp_path / "again")
    checkpoint = sorted((tmp_path / "whole").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))[0]
    other.train(resume_from_checkpoint=str(checkpoint))
    assert other._step.history == step.history
    assert_same(other.model, trainer.model)


def transformers_loop(distributed: deat.Distributed, folder: str) -> Any:
    warnings.simplefilter("ignore")
    make_torchvision_importable()
    trainer = hf_trainer(Path(folder), bf16=True)
    trainer.train()
    scores = trainer.evaluate_under_attack(attack="pgd-2")
    last, sums = trainer._step.history[-1], [float(p.detach().sum()) for p in trainer.model.parameters()]
    about = (trainer.args.world_size, trainer.accelerator.mixed_precision)
    return about, last.examples, last.loss, scores["eval_robust_accuracy"], sums


@installed("transformers", "accelerate")
def test_two_processes_with_transformers_in_mixed_precision_share_gradients_and_sums(tmp_path: Path) -> None:
    first, second = together(transformers_loop, str(tmp_path))
    assert first == second
    about, examples, *_ = first
    assert about == (2, "bf16")
    assert examples == len(IMAGES) + 64, "the Trainer fills the last batch of both processes"


@installed("transformers", "accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_loss_of_the_trainer_that_no_method_would_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"label_smoothing_factor=0\.1 would be ignored"):
        hf_trainer(tmp_path, label_smoothing_factor=0.1)


@installed("transformers", "accelerate")
@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_vit_of_transformers_is_fitted_and_evaluated_as_it_is() -> None:
    net = tiny_vit()
    result = deat.fit(net, (IMAGES, LABELS), method="u-fgsm", threat=THREAT, epochs=1, lr=0.05, progress=False)
    found = deat.evaluate(net, (IMAGES[:64], LABELS[:64]), threat=THREAT, attacks="natural,pgd-3", progress=False)
    assert found.accuracy == deat.evaluate(
        result.model, (IMAGES[:64], LABELS[:64]), threat=THREAT, attacks="natural,pgd-3", progress=False
    ).accuracy  # fmt: skip


@installed("timm", "torchvision")
def test_a_timm_loop_keeps_its_optimizer_clipping_scheduler_validation_and_averaged_weights() -> None:
    import timm
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV2, accuracy, dispatch_clip_grad

    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.02)
    model = deat.add_normalization(model, [0.3], [0.25])
    averaged = ModelEmaV2(model, decay=0.5)
    scheduler = CosineLRScheduler(optimizer, t_initial=2)
    step = deat.AdversarialStep(model, optimizer, method="u-fgsm", threat=THREAT, epochs=2, leaves_last_update=True)
    batches = [(nn.functional.interpolate(x, size=32), y) for x, y in BATCHES]
    for epoch in range(2):
        model.train()
        for x, y in batches:
            result = step(x, y)
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            averaged.update(model)
        step.end_epoch()
        scheduler.step(epoch + 1)
    assert result.loss.isfinite()
    assert [record.examples for record in step.history] == [len(IMAGES)] * 2
    x, y = batches[0]
    for network in (model.eval(), averaged.module.eval()):
        evaluated = deat.evaluate(network, (x, y), threat=THREAT, attacks="natural", sanity=False, progress=False)
        with torch.no_grad():
            validated = accuracy(network(x), y)[0]
        assert float(validated) == pytest.approx(100 * evaluated.accuracy["natural"])
