"""Two processes that share every batch train as one does, and agree on everything."""

import hashlib
import math
import shutil
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deat
from deat.core.measurements import FIRST_ACCURACY, FIRST_LOSS, LARGEST_RISE, REACHED_RISE
from deat.data import as_source
from deat.data.batch_order import num_images_in_batch
from deat.errors import DataError, NumericalError, UsageError
from deat.methods import list_methods
from deat.utils.distributed import BatchShard, Distributed
from helpers.games import EXTRAS, UNIONS, trainer_of
from helpers.nets import conv_net, images, learnable, weights
from helpers.together import together

METHODS = [*list_methods(), *EXTRAS]
EPOCHS = 4


def histories(ranks: Distributed, methods: list[str], count: int, batch_size: int, **options: Any) -> dict[str, Any]:
    """Each method's history and a fingerprint of its weights, in float64."""
    found = {}
    for name in methods:
        net = conv_net().double()
        trainer = trainer_of(
            name, net, data=learnable(count), epochs=EPOCHS, batch_size=batch_size, distributed=ranks, **options
        )
        result = trainer.fit()
        found[name] = [asdict(stats) for stats in result.history], fingerprint(net), len(trainer.train)
    return found


def fingerprint(net: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values())).hexdigest()


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Every method by one process and by two, on 25 images in batches of 9: shares of 5 and 4, and 4 and 3."""
    return histories(Distributed(), METHODS, 25, 9), together(histories, METHODS, 25, 9)


@pytest.mark.promise("P30")
@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_as_one_does(name: str, both: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, (first, _) = both[0][name][0], both[1]
    for one, two in zip(alone, first[name][0], strict=True):
        assert one["k"] == two["k"]
        for value in ("magnitude", "loss", "log10_lipschitz"):
            assert math.isclose(one[value], two[value], rel_tol=1e-9, abs_tol=1e-12), value
        whole = ("train_accuracy", "examples", "active", "backprops", "passes", "skipped", "alpha", "level", "lr")
        assert {key: one[key] for key in whole} == {key: two[key] for key in whole}


@pytest.mark.parametrize("name", METHODS)
def test_all_processes_end_with_the_same_weights_and_history(
    name: str, both: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    first, second = both[1]
    assert first[name] == second[name]


def test_a_share_may_be_empty_and_then_counts_nothing() -> None:
    methods = ["m+deat", "fat-5", "free-4"]
    alone = histories(Distributed(), methods, 25, 8)  # a last batch of one image
    first, *others = together(histories, methods, 25, 8, size=3)
    assert others == [first, first]
    for name in methods:
        for one, two in zip(alone[name][0], first[name][0], strict=True):
            assert math.isclose(one["magnitude"], two["magnitude"], rel_tol=1e-9)
            assert (one["k"], one["examples"], one["active"]) == (two["k"], 25, two["active"])


def measured(ranks: Distributed) -> list[dict[str, float]]:
    """What a method measured in each epoch; the last batch has a single image, so that some processes have none."""
    method = replace(deat.get_method("deat-1"), measurements=(FIRST_LOSS, FIRST_ACCURACY, REACHED_RISE, LARGEST_RISE))
    trainer = trainer_of(method, conv_net().double(), data=learnable(25), batch_size=8, distributed=ranks)
    return [stats.measured or {} for stats in trainer.fit().history]


def test_measurements_are_over_the_images_of_all_processes() -> None:
    alone = measured(Distributed())
    first, *others = together(measured, size=3)
    assert others == [first, first]
    for one, two in zip(alone, first, strict=True):
        assert {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in one.items()} == two


def against_unions(ranks: Distributed, methods: list[str]) -> list[Any]:
    """Each method against a union by each rule; the last batch has a single image."""
    return [[histories(ranks, methods, 25, 8, threat=union, val=None) for union in UNIONS]]


def test_processes_play_the_same_balls_of_a_union_as_one_does() -> None:
    methods = ["deat-1", "f+trades"]
    (alone,) = against_unions(Distributed(), methods)
    (first,), *others = together(against_unions, methods, size=3)
    assert others == [[first], [first]]
    for one_rule, other_rule in zip(alone, first, strict=True):
        for name in methods:
            for one, two in zip(one_rule[name][0], other_rule[name][0], strict=True):
                assert math.isclose(one["magnitude"], two["magnitude"], rel_tol=1e-9)
                assert (one["train_accuracy"], one["passes"]) == (two["train_accuracy"], two["passes"])


def compiled(ranks: Distributed) -> dict[str, list[tuple[float, float]]]:
    """YOPO, which has both kinds of J: one that meets others and one that does not; by the engine that ran it."""
    found = {}
    for engine in ("eager", "compile"):
        trainer = trainer_of("yopo-3-3", conv_net().double(), epochs=2, batch_size=12, engine=engine, distributed=ranks)
        history = trainer.fit().history
        found[trainer.engine.name] = [(stats.magnitude, stats.loss) for stats in history]
    return found


@pytest.mark.skipif(not shutil.which("g++"), reason="compiling for the CPU needs a C++ compiler")
def test_moves_that_meet_others_can_be_compiled() -> None:
    first, second = together(compiled)
    assert first == second
    assert torch.allclose(
        torch.tensor(first["eager"], dtype=torch.float64),
        torch.tensor(first["compile"], dtype=torch.float64),
        rtol=1e-9,
    )


def carried(ranks: Distributed) -> list[list[float]]:
    method = deat.get_method("free-4")
    method = type(method)(**{**vars(method), "attack": type(method.attack)(start="zero", persistent=True)})
    net = conv_net().double()
    trainer = trainer_of(method, net, data=learnable(26), epochs=2, batch_size=8, distributed=ranks)
    return [trainer.fit().history[-1].magnitude]


def test_a_carried_perturbation_stays_with_its_row() -> None:
    (alone,), found = carried(Distributed()), together(carried)
    assert found[0] == found[1]
    assert math.isclose(found[0][0], alone, rel_tol=1e-9)


def counted(ranks: Distributed, name: str) -> dict[str, int]:
    """Collectives by move, in one epoch."""
    seen = {"ascend": 0, "joint": 0, "other": 0}
    where = ["other"]
    trainer = trainer_of(name, data=learnable(24), epochs=1, batch_size=12, distributed=ranks)
    trainer.schedule_state = {**trainer.schedule_state, **({"k": 2} if "k" in trainer.schedule_state else {})}

    class Watched(type(trainer.game)):  # type: ignore[misc]
        def _run_move(self, move: str, *rest: Any) -> None:
            where[0] = move
            super()._run_move(move, *rest)
            where[0] = "other"

    trainer.game.__class__ = Watched

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen[where[0]] = seen.get(where[0], 0) + 1
        future = dist.all_reduce(bucket.buffer() / ranks.size, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    trainer.game.objective.register_comm_hook(None, hook)
    real = {call: getattr(dist, call) for call in ("all_reduce", "all_gather", "broadcast")}

    def spied(call: str) -> Any:
        def spy(*args: Any, **options: Any) -> Any:
            if not options.get("async_op"):
                seen[where[0]] = seen.get(where[0], 0) + 1
            return real[call](*args, **options)

        return spy

    for call in real:
        setattr(dist, call, spied(call))
    trainer.fit()
    for call, function in real.items():
        setattr(dist, call, function)
    return seen


@pytest.mark.parametrize(("name", "joints"), [("pgd-3", 2), ("deat-40%", 6)])
def test_ascents_cost_no_collective_and_every_joint_move_one(name: str, joints: int) -> None:
    first, second = together(counted, name)
    assert first == second
    assert first["ascend"] == 0
    assert first["joint"] == joints
    assert first.get("step", 0) == 0
    asked_to_stop, record = 1 + 2, 2  # before the epoch and each batch; the record's length and its numbers
    assert first["other"] == asked_to_stop + record


def accumulated(ranks: Distributed) -> int:
    """How often YOPO's gradients meet in one batch."""
    trainer = trainer_of("yopo-3-2", data=learnable(12), epochs=1, batch_size=12, distributed=ranks)
    met = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        met.append(1)
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    trainer.game.objective.register_comm_hook(None, hook)
    trainer.fit()
    return len(met)


def test_gradients_that_accumulate_meet_once_a_batch() -> None:
    assert together(accumulated) == [1, 1]


def with_batch_norm(ranks: Distributed) -> tuple[str, list[float], bool]:
    net = conv_net(batch_norm=True)
    trainer = trainer_of("m+trades-2", net, data=learnable(24), val=learnable(9, seed=5), epochs=2, distributed=ranks)
    result = trainer.fit()
    own = ranks.all_gather_json([float(v) for v in net[1].running_mean])
    return fingerprint(net), [s.val_robust for s in result.history], own[0] == own[1]  # type: ignore[misc]


def test_batch_norm_statistics_are_equal_when_an_epoch_ends() -> None:
    first, second = together(with_batch_norm)
    assert first == second
    assert first[2]


def disagreeing(ranks: Distributed) -> list[Any]:
    """Data that differ by process, as when somebody's files do; every decision must still be common."""
    data = images(24, seed=ranks.rank)
    watched: list[int] = []

    class Stopper:
        def on_epoch(self, trainer: deat.Trainer, stats: Any, timing: Any) -> None:
            watched.append(stats.k)
            if stats.magnitude > 0 and stats.epoch == 4:
                trainer.stop()

    trainer = trainer_of("m+deat", data=data, val=images(8, seed=9 + ranks.rank), epochs=6, distributed=ranks)
    trainer.callbacks.append(Stopper())
    history = trainer.fit().history
    return [[s.k, s.alpha, s.magnitude, s.threshold, s.loss, s.val_robust] for s in history]


@pytest.mark.promise("P28")
def test_processes_with_different_data_decide_alike() -> None:
    first, second = together(disagreeing)
    assert first == second
    assert len(first) == 5


def poisoned(ranks: Distributed) -> tuple[str, int, int]:
    """A NaN in one process's loss, in its third batch."""
    trainer = trainer_of("pgd-2", data=learnable(24), epochs=3, batch_size=6, distributed=ranks)
    real, calls = trainer.game.objective.forward, [0]

    def forward(x: Tensor, delta: Tensor, y: Tensor) -> Any:
        calls[0] += 1
        loss, logits = real(x, delta, y)
        return loss * (math.nan if ranks.rank == 1 and calls[0] == 3 else 1), logits

    trainer.game.objective.forward = forward
    try:
        trainer.fit()
    except NumericalError as error:
        return str(error), trainer.epoch, trainer.batches_done
    return "no error", -1, -1


@pytest.mark.promise("P29")
def test_a_nan_in_one_process_stops_all_at_the_same_step() -> None:
    first, second = together(poisoned)
    assert first == second
    assert "epoch 1, batch 3 of 4" in first[0]


def drawn(ranks: Distributed) -> list[list[list[float]]]:
    """Every process's start noise, as rows of the whole batch, and its images."""
    trainer = trainer_of("pgd-2", data=learnable(20), epochs=1, batch_size=20, distributed=ranks)
    for x, y in trainer.train.epoch(0):
        trainer.prepare_step(0, 0)
        r = trainer.game.begin_batch(x, y, deat.attack_schedules.Budget(1, 0.1))
    return [r.delta.flatten(1).tolist(), r.x.flatten(1).tolist()]


def test_draws_are_made_for_the_whole_batch() -> None:
    whole, parts = drawn(Distributed()), together(drawn)
    for kind in (0, 1):
        for rank, part in enumerate(parts):
            assert part[kind] == whole[kind][rank::2]
    assert whole[0][0] != whole[0][1]


def dropped(ranks: Distributed) -> list[int]:
    trainer = trainer_of("natural", conv_net(dropout=0.5), epochs=1, distributed=ranks)
    trainer.prepare_step(0, 0)
    return torch.randint(0, 1000, (8,)).tolist()


def test_processes_drop_out_differently() -> None:
    first, second = together(dropped)
    assert first != second


class Numbered(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images that know their index."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((1, 2, 2), index / 255), index % 2


KINDS = ["tensors", "dataset", "loader"]


def rows_of(kind: str, share: BatchShard) -> list[list[int]]:
    data: Any = Numbered()
    if kind == "tensors":
        data = (torch.arange(23, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2), torch.arange(23) % 2)
    if kind == "loader":
        data = DataLoader(data, batch_size=5, shuffle=True)
    source = as_source(data, batch_size=5, seed=3)
    source.shard = share
    return [[round(float(v) * 255) for v in x[:, 0, 0, 0]] for x, _ in source.epoch(1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shares_are_disjoint_and_cover_every_batch(kind: str, size: int) -> None:
    whole = rows_of(kind, BatchShard())
    parts = [rows_of(kind, BatchShard(rank, size)) for rank in range(size)]
    assert sorted(i for batch in whole for i in batch) == list(range(23))
    for step, batch in enumerate(whole):
        assert len(batch) == num_images_in_batch(23, 5, step)
        own = [p[step] if BatchShard(r, size).count(len(batch)) else [] for r, p in enumerate(parts)]
        assert sorted(i for part in own for i in part) == sorted(batch)
        assert all(part == batch[r::size] for r, part in enumerate(own))


def test_a_loader_that_divides_the_data_itself_is_refused() -> None:
    data = TensorDataset(torch.rand(8, 1, 2, 2), torch.arange(8) % 2)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    source = as_source(loader, batch_size=2, num_classes=2)
    source.shard = BatchShard(0, 2)
    with pytest.raises(DataError, match="DistributedSampler divides the data already"):
        next(source.epoch(0))


def test_batches_of_uneven_length_are_refused() -> None:
    x, y = torch.rand(9, 1, 2, 2), torch.arange(9) % 2
    source = as_source([(x[:4], y[:4]), (x[4:6], y[4:6]), (x[6:], y[6:])], batch_size=4)
    source.shard = BatchShard(1, 2)
    with pytest.raises(DataError, match="batch 2 holds 2 images, not 4"):
        list(source.epoch(0))


def refused(ranks: Distributed) -> list[str]:
    said = []
    idle = conv_net()
    idle.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    lone = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    for options in (
        {"method": "m+deat", "batch_size": 1},
        {
            "method": deat.methods.change_settings.configure_method(
                deat.get_method("fat-5"), deat.Linf(0.1), compact=True
            )
        },
        {"method": "m+deat", "net": lone, "batch_size": 10, "data": learnable(23)},
        {"method": "m+deat", "sync_bn": True},
        {"method": "m+deat", "net": idle},
    ):
        try:
            trainer_of(options.pop("method"), options.pop("net", None), distributed=ranks, **options)
        except (UsageError, DataError) as error:
            said.append(str(error))
    return said


def test_what_cannot_be_shared_is_refused() -> None:
    first, second = together(refused)
    assert first == second
    assert [line.split(";")[0].split(":")[0] for line in first] == [
        "a batch of 1 cannot be shared by 2 processes",
        "compact needs a single process",
        "23 images in batches of 10 leave a process with a batch of one, on which BatchNorm1d cannot train here. "
        "Use another batch size, or one image less.",
        "sync_bn needs GPUs",
        "unused get no gradient",
    ]


def agreed(ranks: Distributed) -> list[Any]:
    text = "é" * (5 * ranks.rank)
    mine = {"rank": ranks.rank, "text": text, "tiny": 1e-300 * (ranks.rank + 1)}
    return [
        ranks.all_gather_json(mine),
        ranks.broadcast_json(mine),
        ranks.all_reduce_sum([0.1, float(ranks.rank)]),
        ranks.all_reduce_any(ranks.rank == 1),
        ranks.all_reduce_any(False),
    ]


def test_processes_tell_each_other_any_json_exactly() -> None:
    first, second = together(agreed)
    assert first == second
    assert [row["text"] for row in first[0]] == ["", "é" * 5]
    assert first[0][1]["tiny"] == 2e-300
    assert first[1]["rank"] == 0
    assert first[2:] == [[0.2, 1.0], True, False]


def test_alone_every_part_is_the_whole() -> None:
    alone = Distributed.initialize("cpu")
    assert alone == Distributed(0, 1)
    assert alone.is_main
    assert not alone.is_multiprocess
    assert alone.all_gather_json({"a": 1}) == [{"a": 1}]
    assert alone.all_reduce_sum([1.5]) == [1.5]
    net = conv_net()
    before = weights(net)
    assert alone.wrap_ddp(net) is net
    alone.broadcast_model_buffers(net)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert list(range(7))[alone.shard.rows(7)] == list(range(7))
