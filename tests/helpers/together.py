"""Two processes that work together over gloo, started in milliseconds from a server that has imported torch."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deat
from deat.cli.exit_handling import exit_if_distributed
from deat.cli.main import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "deat.cli.train", "deat.cli.main"])  # DDP imports dynamo

_KEPT: list[dist.TCPStore] = []


def meeting_place() -> dist.TCPStore:
    """The store through which processes meet, kept by whoever starts them, as torchrun does."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def together(work: Callable[..., Any], *arguments: Any, size: int = 2, within: float = 120) -> list[Any]:
    """What work(ranks, *arguments) gives in each of several processes; an error in one is an error here."""
    store, pipes, processes = meeting_place(), [], []
    for rank in range(size):
        ours, theirs = CONTEXT.Pipe()
        processes.append(_start(_answer, rank, size, store.port, theirs, work, arguments))
        pipes.append(ours)
    found = [pipe.recv() if pipe.poll(within) else ("error", "no answer") for pipe in pipes]
    _end(processes)
    for kind, value in found:
        if kind == "error":
            raise AssertionError(value)
    return [value for _, value in found]


def commands(folder: Path, *arguments: str, size: int = 2, prepare: Callable[[int], None] | None = None) -> list[Any]:
    """`deat` with these arguments in each of several processes, started but not awaited; they write to out-N, err-N."""
    store = meeting_place()
    _KEPT.append(store)
    return [_start(_command, rank, size, store.port, folder, arguments, prepare) for rank in range(size)]


def statuses(processes: list[Any], within: float = 60) -> list[int | None]:
    """The exit status of each process; None for one that had to be ended."""
    for process in processes:
        process.join(within)
    found = [process.exitcode for process in processes]
    _end(processes)
    _KEPT.clear()
    return found


def _start(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    process = CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(1)
        if process.is_alive():
            process.kill()
            process.join()


def _enter(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})


def _answer(
    rank: int, size: int, port: int, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _enter(rank, size, port)
    try:
        ranks = deat.Distributed.initialize("cpu")
        pipe.send(("value", work(ranks, *arguments)))
        exit_if_distributed()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))


def _command(
    rank: int, size: int, port: int, folder: Path, arguments: tuple[str, ...], prepare: Callable[[int], None] | None
) -> None:
    _enter(rank, size, port)
    os.chdir(folder)
    for number, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if prepare:
        prepare(rank)
    sys.exit(main(arguments))
