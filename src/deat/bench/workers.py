"""Who plays the cells: this process, several processes on this machine, or a Ray cluster."""

import gc
import os
import shutil
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

from deat.bench.grid import Cell, Grid, code_of, drop_damaged, is_by
from deat.checkpoint.store import listed, remove
from deat.cli.console import say_aside
from deat.data.streaming import Part
from deat.errors import CheckpointError, DeatError, Interrupted, UsageError
from deat.evaluation.evaluator import evaluate
from deat.recipes.recipe import Round
from deat.report.load import EVALUATIONS, collect_run
from deat.runs.request import Run
from deat.runs.run_dir import (
    WATCH,
    WEIGHTS,
    RunFolder,
    alone,
    check_links,
    is_run,
    is_unborn,
    ledger_of,
    load_model,
    make_folder,
    test_part,
)
from deat.training.trainer import Trainer
from deat.utils.files import refuse_links
from deat.utils.locks import Claim, owned


def work(grid: Grid, cell: Cell, claim: Claim) -> bool:
    """Play a claimed cell and write down how it ended; whether it was finished."""
    path = grid.root / cell.folder
    try:
        refuse_links((path.parent, path))
        play(cell, path)
    except (KeyboardInterrupt, Interrupted):
        grid.finish(cell, "waiting")
        raise
    except Exception as error:  # a row that fails must not take the others with it
        grid.finish(cell, "failed", _reason(error))
        return False
    else:
        grid.finish(cell, "done")
        return True
    finally:
        claim.drop()
        gc.collect()  # a trainer and its recordings hold each other, and with them the device's memory


def play(cell: Cell, path: Path) -> None:
    """Train and judge one cell; what an earlier attempt finished is kept."""
    run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
    test = test_part(run)
    check_links(path)
    drop_damaged(path)
    if not (_is_trained(path, run.settings.epochs) and is_by(code_of(cell.row), path)):
        train(run, path)
    for name, asked in cell.row.judging.rounds(cell.seed).items():
        judge(run, test, path / EVALUATIONS[name], asked, cell.row.judging.block)
    for checkpoint in listed(path):  # best/ and last/ keep their weights
        remove(checkpoint)


def train(run: Run, path: Path) -> None:
    """Train into a folder of its own, from an earlier attempt's last checkpoint where that goes on exactly."""
    trainer, folder = _prepared(run, path)
    try:
        going_on = is_run(path) and folder.resume(trainer)
    except (UsageError, CheckpointError) as error:
        folder.say(f"begun again: {error}")
        going_on = False
    if not going_on:
        _clear(path)
        make_folder(path)
        trainer, folder = _prepared(run, path)
        folder.write_record(run.record(trainer))
    with owned(path), trainer.interruption.listening():  # asked to stop, it keeps the batch that it is at
        trainer.fit()


def _prepared(run: Run, path: Path) -> tuple[Trainer, RunFolder]:
    """A trainer that is watched and written down."""

    def say(text: str) -> None:
        """Tell a person, with the run's name before it."""
        say_aside(f"{path.parent.name}, {path.name}: {text}")

    trainer = run.trainer()
    watch = run.watch(trainer, log=path / WATCH, say=say)
    trainer.callbacks += [watch] if watch else []
    folder = RunFolder(path, extra=run.identity(trainer), files=run.code, say=say)
    folder.attach(trainer)
    return trainer, folder


def _clear(path: Path) -> None:
    """Remove a run that cannot be gone on with, or came to nothing before it was written down."""
    if is_run(path) or is_unborn(path):
        shutil.rmtree(path)


def judge(run: Run, test: Part, out: Path, asked: Round, block: int) -> None:
    """Judge one epoch's weights into an evaluation's file, unless it is there; alone, as `deat evaluate` is."""
    with alone(out):
        if not out.is_file():
            _judge(run, test, out, asked, block)


def _judge(run: Run, test: Part, out: Path, asked: Round, block: int) -> None:
    weights = out.parent / asked.epoch / WEIGHTS
    model = load_model(run, weights)
    evaluate(
        model,
        test,
        threat=run.threat,
        attacks=asked.attacks,
        n=asked.n,
        seed=run.settings.seed,
        block=block,
        threads=run.settings.threads,
        ledger=ledger_of(out),
        save=out,
        about=run.about(weights, asked.epoch),
        progress=False,
    )


def _is_trained(path: Path, epochs: int) -> bool:
    """Whether an earlier attempt reached the last epoch, and its records can be read."""
    try:
        found = collect_run(path)
    except DeatError as error:
        say_aside(f"{path.parent.name}, {path.name}: begun again: {error}")
        return False
    return found.record is not None and len(found.history) == epochs and (path / "last").is_dir()


def _reason(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, DeatError) else f"{type(error).__name__}: {text}"


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
