"""Processes that share a run on GPUs: a single one over NCCL, and two on one GPU over gloo; skipped without a GPU."""

import math
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deat
from deat.cli.exit_handling import exit_if_distributed
from deat.data import ImageSet
from deat.utils import distributed as ranks_room
from deat.utils.distributed import Distributed
from helpers.nets import conv_net
from helpers.together import meeting_place

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = ("pgd-2", "m+deat", "trades")


class Pretending(Distributed):
    """One process that does everything several would do."""

    @property
    def is_multiprocess(self) -> bool:
        return True


def trained(ranks: Distributed, engine: str = "auto") -> dict[str, list[tuple[int, float, float]]]:
    """(k, l_X, loss) of each epoch, by method."""
    found = {}
    for method in METHODS:
        torch.manual_seed(0)
        images = torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8)
        data = ImageSet(images, torch.arange(50) % 3, tuple("012"))
        settings = deat.TrainConfig(epochs=3, batch_size=16, lr=0.05, precision="fp32", device="cuda", engine=engine)
        trainer = deat.make_trainer(conv_net().double(), data, method=method, config=settings, distributed=ranks)
        history = trainer.fit().history
        found[method] = [(stats.k, stats.magnitude, stats.loss) for stats in history]
    return found


def in_child(rank: int, size: int, port: int, backend: str, pipe: Connection) -> None:
    where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        torch.cuda.set_device(0)
        if size == 1:
            store = dist.TCPStore("127.0.0.1", port)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            ranks: Distributed = Pretending()
        else:
            ranks_room._choose_backend = lambda device, local_rank: backend
            ranks = Distributed.initialize("cuda")
        pipe.send(trained(ranks))
        exit_if_distributed()
    except BaseException:
        pipe.send(traceback.format_exc())


def by(size: int, backend: str) -> list[Any]:
    context, store, pipes = multiprocessing.get_context("spawn"), meeting_place(), []
    for rank in range(size):
        ours, theirs = context.Pipe()
        context.Process(target=in_child, args=(rank, size, store.port, backend, theirs), daemon=True).start()
        pipes.append(ours)
    return [pipe.recv() if pipe.poll(180) else "no answer" for pipe in pipes]


@pytest.mark.parametrize(("size", "backend"), [(1, "cpu:gloo,cuda:nccl"), (2, "cpu:gloo,cuda:gloo")])
def test_processes_on_a_gpu_train_as_one_does(size: int, backend: str) -> None:
    alone = trained(Distributed())
    for found in by(size, backend):
        assert isinstance(found, dict), found
        for method in METHODS:
            for one, other in zip(alone[method], found[method], strict=True):
                assert one[0] == other[0]
                assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one[1:], other[1:], strict=True)), method
