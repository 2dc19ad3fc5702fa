"""Who plays the cells: this process, several processes on this machine, or a Ray cluster."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from deat.bench.cell import work
from deat.bench.grid import Cell, Grid
from deat.errors import CheckpointError, DeatError, Interrupted, UsageError
from deat.live import say_aside

Tick = Callable[[], None]
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def in_turn(grid: Grid, cells: Sequence[Cell], tick: Tick) -> None:
    """Play every cell that is free, one after the other, here."""
    while found := grid.claim(cells):
        tick()
        work(grid, *found)
        tick()


def side_by_side(grid: Grid, cells: Sequence[Cell], jobs: int, tick: Tick) -> None:
    """Play the cells in several processes of one thread each; one that dies is replaced while there is work."""
    context = get_context("spawn")
    with _one_thread():
        workers = [_start(context, grid, cells) for _ in range(min(jobs, len(cells)))]
        try:
            while workers:
                time.sleep(0.2)
                tick()
                died = [w for w in workers if w.exitcode not in (None, 0)]
                workers = [w for w in workers if w.exitcode is None]
                _check_living(died, grid)
                workers += [_start(context, grid, cells) for _ in died if _is_open(grid, cells)]
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGTERM is a KeyboardInterrupt, as SIGINT is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def on_ray(grid: Grid, cells: Sequence[Cell], tick: Tick) -> None:
    """Play the cells as tasks of a Ray cluster, one a GPU, or one a core where it has none."""
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    share = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    play = ray.remote(max_retries=1, **share)(_play_free)
    waiting = [play.remote(str(grid.root.resolve()), [cell]) for cell in cells]
    try:
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=1.0)
            for task in ended:
                _settle(ray, task)
            tick()
        grid.bury(cells)
        tick()
    finally:
        for task in waiting:
            ray.cancel(task, force=True)
        if started:
            ray.shutdown()


def _settle(ray: Any, task: Any) -> None:
    """A task whose process died leaves its cell unfinished; what else went wrong is the cluster's and must be said."""
    with suppress(ray.exceptions.WorkerCrashedError):
        ray.get(task)


def _play_free(root: str, cells: Sequence[Cell], tick: Tick = lambda: None) -> None:
    """What a worker does: claim and play cells until none is free."""
    folder = Path(root)
    if not folder.is_dir():
        raise UsageError(f"{root!r} is not there on this machine; a bench over several needs a folder they share.")
    in_turn(Grid(folder), cells, tick)


def _start(context: Any, grid: Grid, cells: Sequence[Cell]) -> Any:
    worker = context.Process(target=_play_quietly, args=(str(grid.root), list(cells)))
    worker.start()
    return worker


def _play_quietly(root: str, cells: Sequence[Cell]) -> None:
    """A worker's whole life; only its parent stops it, and talks about it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent too
    torch.set_num_threads(1)
    parent = os.getppid()

    def leave_if_orphaned() -> None:
        """End where the bench itself is gone."""
        if os.getppid() != parent:
            sys.exit(0)

    with stoppable():
        try:
            _play_free(root, cells, leave_if_orphaned)
        except (KeyboardInterrupt, Interrupted):
            sys.exit(Interrupted.exit_code)
        except DeatError as error:
            say_aside(str(error))
            sys.exit(error.exit_code)


def _check_living(died: Sequence[Any], grid: Grid) -> None:
    """Raise where a worker ended for a reason that would end the next one too."""
    if any(worker.exitcode == CheckpointError.exit_code for worker in died):
        raise CheckpointError(f"no run in {str(grid.root)!r} can be written down, as said above; the bench ends.")


def _is_open(grid: Grid, cells: Sequence[Cell]) -> bool:
    runs = grid.runs()
    return any(runs[cell.folder]["status"] in ("waiting", "running") for cell in cells)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Children started inside have one thread each, in torch and below it."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("--parallel ray needs the package ray: pip install ray.") from None
    return ray
