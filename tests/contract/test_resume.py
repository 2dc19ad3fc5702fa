"""A training that goes on from the disk gives the bytes of one that was never interrupted, for every method."""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import deat
from deat.core.measurements import FIRST_LOSS, LARGEST_RISE
from deat.errors import Interrupted, UsageError
from deat.methods import list_methods
from deat.training.checkpoints import Checkpoints
from helpers.games import EXTRAS, trainer_of
from helpers.nets import conv_net, learnable

OPTIONS = {"epochs": 4, "lr_schedule": "cyclic", "val": 0.25, "val_attack": "pgd-2"}
PER_EPOCH = 2
"""Batches in an epoch of trainer_of's images, a quarter of them held out."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Measuring(deat.attack_schedules.Fixed):
    """A schedule that needs what the method measures."""

    def observe(self, state: dict[str, float], record: deat.EpochRecord) -> dict[str, float]:
        return {**super().observe(state, record), "first": record.measured["first_loss"]}

    def bounding_record(self, epoch: int, epochs: int, grows: bool) -> deat.EpochRecord:
        return replace(super().bounding_record(epoch, epochs, grows), measured={"first_loss": 1.0})


def persistent(name: str) -> deat.Method:
    method = deat.get_method(name)
    return replace(method, attack=replace(method.attack, persistent=True))


METHODS = {
    **{name: deat.get_method(name) for name in list_methods() + EXTRAS},
    "persistent m+deat": persistent("m+deat"),
    "measured": deat.Method(
        "measured", deat.Replay(), Measuring(k=2, alpha_eps=1.0), measurements=(FIRST_LOSS, LARGEST_RISE)
    ),
}


def fresh(method: deat.Method, seed: int = 0, **options: object) -> deat.Trainer:
    net = conv_net(batch_norm=True, dropout=0.2, seed=seed)
    return trainer_of(method, net, **{**OPTIONS, **options})


def everything(trainer: deat.Trainer) -> list[object]:
    """All that two trainings must agree in, to the last bit."""
    tensors = {**trainer.model.state_dict()}
    for index, state in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"best.{name}": value for name, value in trainer.best.snapshot.weights.items()}
    if trainer.game.carried_delta is not None:
        tensors["carry"] = trainer.game.carried_delta
    if trainer.game.start_memory is not None:
        tensors |= trainer.game.start_memory.state_dict()
    bits = {name: value.numpy().tobytes() for name, value in tensors.items()}
    return [
        bits,
        trainer.schedule_state,
        [json.dumps(asdict(stats)) for stats in trainer.history],
        vars(trainer.game.cost),
    ]


def interrupt_at(trainer: deat.Trainer, batches: int) -> None:
    """Ask for a stop once so many batches have been played."""
    plays = []

    def count(*_: object) -> None:
        plays.append(1)
        if len(plays) == batches:
            trainer.interruption.request()

    real = trainer.game.end_batch
    trainer.game.end_batch = lambda r: (real(r), count())


def hand_over(first: deat.Trainer, second: deat.Trainer, batches: int, folder: Path) -> None:
    """Play so many batches with the first trainer and stop it; the second takes up what it left."""
    interrupt_at(first, batches)
    Checkpoints(folder).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    assert Checkpoints(folder).resume_or_start(second)


@pytest.fixture(scope="module")
def wholes() -> dict[str, list[object]]:
    return {}


@pytest.mark.promise("P13", "P16")
@pytest.mark.parametrize("stop", [PER_EPOCH * 2, PER_EPOCH * 2 + 1], ids=["after an epoch", "in mid-epoch"])
@pytest.mark.parametrize("name", METHODS)
def test_resumed_training_equals_an_uninterrupted_one(name, stop, tmp_path, wholes):
    method = METHODS[name]
    if name not in wholes:
        whole = fresh(method)
        whole.fit()
        wholes[name] = everything(whole)
    first, second = fresh(method), fresh(method, seed=7)
    hand_over(first, second, stop, tmp_path)
    assert (second.epoch * PER_EPOCH + second.batches_done, second.game.cost) == (stop, first.game.cost)
    second.fit()
    assert everything(second) == wholes[name]


@pytest.mark.promise("P13", "P17")
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"val": None}, {"seed": 5}], ids=str)
def test_resumed_training_is_exact_in_any_setting(options, tmp_path):
    method = METHODS["persistent m+deat"]
    whole, first, second = (fresh(method, **options) for _ in range(3))
    whole.fit()
    hand_over(first, second, PER_EPOCH * 2 + 1, tmp_path)
    second.fit()
    assert everything(second) == everything(whole)


@pytest.mark.promise("P13")
@pytest.mark.parametrize("recorded", ["fp32", "bf16"])
def test_precision_auto_resumes_in_that_of_the_checkpoint(recorded, tmp_path, monkeypatch):
    """Versions of deat choose differently what "auto" is."""
    monkeypatch.setattr("deat.training.trainer.has_native_cpu_bf16", lambda: True)
    method, other = deat.get_method("trades-5"), {"fp32": "bf16", "bf16": "fp32"}[recorded]

    def choosing(precision: str) -> deat.Trainer:
        monkeypatch.setattr("deat.training.engine_choice.choose_precision", lambda *_: precision)
        return fresh(method, precision="auto")

    whole, first, second = choosing(recorded), choosing(recorded), choosing(other)
    whole.fit()
    hand_over(first, second, PER_EPOCH + 1, tmp_path)
    assert second.engine.precision == recorded
    second.fit()
    assert everything(second) == everything(whole)


@pytest.mark.promise("P13")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for the CPU needs a C++ compiler")
def test_compiled_training_on_a_cpu_resumes_exactly_at_a_short_last_batch(tmp_path):
    def build() -> deat.Trainer:
        torch._dynamo.reset()
        return trainer_of("pgd-1", conv_net(), epochs=2, engine="compile")  # batches of 10, 10 and 4

    whole = build()
    interrupt_at(whole, 2)
    Checkpoints(tmp_path).resume_or_start(whole)
    with pytest.raises(Interrupted):
        whole.fit()
    whole.checkpointer = None
    whole.fit()  # it goes on with what it has compiled
    second = build()
    assert Checkpoints(tmp_path).resume_or_start(second)
    assert second.batches_done == 2
    second.fit()
    assert second.game.executor.compiled.shape == whole.game.executor.compiled.shape
    assert everything(second) == everything(whole)


def in_groups(parameters, lr: float = 0.05) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": lr / 5}, {"params": others}], lr=lr, momentum=0.9)


OWN = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "tensor as its rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "groups": in_groups,
}


@pytest.mark.promise("P13")
@pytest.mark.parametrize("name", OWN)
def test_optimiser_of_your_own_resumes_exactly_with_a_short_last_batch(name, tmp_path):
    whole, first, second = (fresh(METHODS["m+deat"], optimizer=OWN[name], batch_size=7) for _ in range(3))
    whole.fit()
    hand_over(first, second, 5, tmp_path)
    second.fit()
    assert everything(second) == everything(whole)


def test_other_settings_of_your_own_optimiser_are_refused_with_the_difference(tmp_path):
    first, second = (fresh(METHODS["fgsm"], optimizer=partial(in_groups, lr=lr), epochs=1) for lr in (0.05, 0.5))
    Checkpoints(tmp_path).resume_or_start(first)
    first.fit()
    with pytest.raises(UsageError, match=r"own_optimizer\.1\.lr: \"0\.05\", now \"0\.5\""):
        Checkpoints(tmp_path).resume_or_start(second)


def test_loader_of_your_own_resumes_at_its_batch(tmp_path):
    x, y = learnable()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True)

    def build() -> deat.Trainer:
        return trainer_of("m+deat", conv_net(dropout=0.2), data=loader, epochs=3)

    whole, first, second = build(), build(), build()
    whole.fit()
    hand_over(first, second, 4, tmp_path)
    second.fit()
    assert everything(second) == everything(whole)


class Counted(torch.utils.data.Dataset):
    """A data set that counts what is read of it, and draws as a transform does."""

    classes = ("0", "1", "2")

    def __init__(self) -> None:
        self.x, self.y = learnable()
        self.read = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read += 1
        return (self.x[index] + 0.01 * torch.rand(self.x[index].shape)).clamp(0, 1), int(self.y[index])


def in_mid_epoch(data: object, folder: Path) -> deat.Trainer:
    """A trainer that goes on before the last of three batches."""
    first, second = (trainer_of("pgd-1", conv_net(), data=data, epochs=2) for _ in range(2))
    hand_over(first, second, 2, folder)
    assert second.batches_done == 2
    return second


@pytest.mark.promise("P16")
def test_data_set_resumes_at_its_batch_and_reads_nothing_before_it(tmp_path):
    whole, data = trainer_of("pgd-1", conv_net(), data=Counted(), epochs=2), Counted()
    whole.fit()
    second = in_mid_epoch(data, tmp_path)
    data.read = 0
    second.fit()
    assert data.read == 4 + 24
    assert everything(second) == everything(whole)


@pytest.mark.promise("P16")
def test_stop_is_obeyed_while_batches_are_drawn_again(tmp_path):
    x, y = learnable()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    second = in_mid_epoch(loader, tmp_path)
    drawn, real = [], second.train.epoch

    def epoch(number: int):
        for batch in real(number):
            drawn.append(1)
            second.interruption.request()
            yield batch

    second.train.epoch = epoch
    with pytest.raises(Interrupted):
        second.fit()
    assert len(drawn) == 1
    assert second.batches_done == 2


@pytest.mark.promise("P15")
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_decisions_of_m_plus_are_the_same_wherever_it_was_stopped(stop, tmp_path):
    def build() -> deat.Trainer:
        return trainer_of("m+deat", conv_net(), epochs=6, lr=0.5, callbacks=[Ask(stop)])

    whole, first, second = (build() for _ in range(3))
    whole.callbacks.clear()
    whole.fit()
    assert len({stats.k for stats in whole.history}) >= 3  # it does decide
    Checkpoints(tmp_path).resume_or_start(first)
    with pytest.raises(Interrupted):
        first.fit()
    second.callbacks.clear()
    Checkpoints(tmp_path).resume_or_start(second)
    assert (second.schedule_state, second.schedule) == (first.schedule_state, first.schedule)
    second.fit()
    assert everything(second) == everything(whole)


class Ask:
    """Asks training to stop after an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, trainer: deat.Trainer, stats: object, timing: object) -> None:
        if trainer.epoch == self.epoch:
            trainer.interruption.request()


def test_nothing_to_resume_is_reported_by_returning_false(tmp_path: Path):
    trainer = trainer_of("natural")
    assert not Checkpoints(tmp_path).resume(trainer)
    assert not Checkpoints(tmp_path / "nowhere").resume(trainer)
