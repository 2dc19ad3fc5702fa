"""Run the cells of a bench: in this process, in several processes on this machine, or on a Ray cluster."""

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deat.bench.run_claims import BenchFolder, GridCell, hash_row_code, remove_damaged_evaluations
from deat.checkpoint.store import list_checkpoints, try_remove
from deat.data.streaming import AnyImageSet
from deat.errors import CheckpointError, DeatError, Interrupted, NumericalError, UsageError
from deat.evaluation.evaluator import evaluate
from deat.evaluation.results import load_evaluation
from deat.evaluation.resume_log import lock_evaluation, resume_log_path
from deat.models.logits_wrapper import LogitsModel
from deat.recipes.recipe import AttackRound
from deat.report.run_results import load_run_results
from deat.runs.folder_training import FolderOptions, FolderTraining, ResumePolicy
from deat.runs.record_files import EVALUATION_FILES, FAILURE_FILE, WEIGHTS_FILE, is_trained_with_code
from deat.runs.resolve_request import Run
from deat.runs.run_dir import check_no_links, ensure_run_folder, is_last_epoch_saved
from deat.runs.trained_run import get_test_split, load_run_model
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.console import print_stderr
from deat.utils.fingerprints import fingerprint_model
from deat.utils.safe_write import check_no_symlinks, write_json
from deat.utils.user_code import describe_error_with_line


def run_claimed_cell(bench_folder: BenchFolder, cell: GridCell, lock: ExitStack) -> bool:
    """Run a claimed cell and record how it ended; returns whether it was finished."""
    path = bench_folder.root / cell.folder
    try:
        check_no_symlinks((path.parent, path))
        run_cell(cell, path)
    except (KeyboardInterrupt, Interrupted):
        bench_folder.finish(cell, "waiting")
        raise
    except (Exception, SystemExit) as error:  # a row that fails must not take the others with it
        _write_failure(path, error)
        bench_folder.finish(cell, "failed", _summarize_error(error))
        return False
    else:
        bench_folder.finish(cell, "done")
        return True
    finally:
        lock.close()
        gc.collect()  # a trainer and its recordings hold each other, and with them the device's memory


def run_cell(cell: GridCell, path: Path) -> None:
    """Train and evaluate one cell; what an earlier attempt finished is kept."""
    run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
    test = get_test_split(run)
    check_no_links(path)
    remove_damaged_evaluations(path)
    if not (_is_trained(path, run.config.epochs) and is_trained_with_code(path, hash_row_code(cell.row))):
        train_cell(run, path)
    for name, attack_round in cell.row.evaluation.rounds(cell.seed).items():
        evaluate_round(run, test, path / EVALUATION_FILES[name], attack_round, cell.row.evaluation.block)
    for checkpoint in list_checkpoints(path):  # best/ and last/ keep their weights
        try_remove(checkpoint)


def train_cell(run: Run, path: Path) -> None:
    """Train into a cell's folder: an earlier attempt is resumed if that is exact, otherwise removed."""
    options = FolderOptions(
        create_folder=lambda: ensure_run_folder(path),
        resume=ResumePolicy.OR_RESTART,
        notify=lambda text: print_stderr(f"{path.parent.name}, {path.name}: {text}"),
    )
    training = FolderTraining(run.trainer, options, run)
    with training.session():
        training.trainer.fit()
        training.trainer.interruption.check()  # a signal during the last save ends the whole bench, not only this training
    if not is_last_epoch_saved(path, run.config.epochs):
        raise CheckpointError(f"best/ or last/ in {str(path)!r} could not be written. Give the same command again.")


def evaluate_round(run: Run, test: AnyImageSet, out: Path, attack_round: AttackRound, block: int) -> None:
    """Evaluate one epoch's weights under the evaluation's lock, unless its file has the result.

    An evaluation made by hand, of other weights or with other settings, is not the result. It is kept beside it.
    """
    weights = out.parent / attack_round.epoch / WEIGHTS_FILE
    with lock_evaluation(out):
        model = load_run_model(run, weights)
        if _has_result(out, run, test, model, attack_round, block):
            return
        evaluate(
            model,
            test,
            threat=run.threat,
            attacks=attack_round.attacks,
            n=attack_round.n,
            seed=run.config.seed,
            block=block,
            threads=run.config.threads,
            resume_log=resume_log_path(out),
            save=out,
            about=run.about(weights, attack_round.epoch),
            progress=False,
        )


def _has_result(
    out: Path, run: Run, test: AnyImageSet, model: nn.Module, attack_round: AttackRound, block: int
) -> bool:
    """Whether an evaluation.json is of these weights and images, with these settings and at least these attacks."""
    if not out.is_file():
        return False
    evaluation = load_evaluation(out)
    settings = {"threat": run.threat.describe(), "seed": run.config.seed, "block": block, "cascade": False}
    num_images = len(test) if attack_round.n is None else min(attack_round.n, len(test))
    return (
        all(evaluation.settings.get(name) == value for name, value in settings.items())
        and evaluation.settings.get("model") in (fingerprint_model(model), fingerprint_model(LogitsModel(model)))
        and evaluation.num_images == num_images
        and set(attack_round.attacks) <= {result.name for result in evaluation.results}
    )


def _is_trained(path: Path, epochs: int) -> bool:
    """Whether an earlier attempt saved its last epoch, and its records can be read."""
    try:
        results = load_run_results(path)
    except DeatError as error:
        print_stderr(f"{path.parent.name}, {path.name}: started again: {error}")
        return False
    return results.record is not None and len(results.history) == epochs and is_last_epoch_saved(path, epochs)


def _summarize_error(error: BaseException) -> str:
    """One line: what deat says of the error, or its class, message and line."""
    if isinstance(error, DeatError):
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return describe_error_with_line(error)


def _write_failure(path: Path, error: BaseException) -> None:
    """Write the whole traceback of an unexpected error into the cell's folder, if it was created."""
    if isinstance(error, DeatError) or not path.is_dir():
        return
    lines = anonymize_paths("".join(traceback.format_exception(error))).splitlines()
    facts = {"error": anonymize_paths(_summarize_error(error)), "traceback": lines}
    with suppress(OSError):
        write_json(path / FAILURE_FILE, facts, make_folder=False)


TickCallback = Callable[[], None]
THREAD_ENV_VARS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


MAX_IDLE_DEATHS = 4
"""How many processes may die in a row without starting a run."""


def run_sequentially(bench_folder: BenchFolder, cells: Sequence[GridCell], tick: TickCallback) -> None:
    """Run every cell that is free, one after the other, in this process."""
    while claimed := bench_folder.claim(cells):
        tick()
        run_claimed_cell(bench_folder, *claimed)
        tick()


def run_in_processes(bench_folder: BenchFolder, cells: Sequence[GridCell], jobs: int, tick: TickCallback) -> None:
    """Run the cells in several processes of one thread each; one that dies is replaced while there is work.

    Raises:
        CheckpointError: Nothing can be written into the bench's folder.
        DeatError: Processes die before they begin a run, so that replacing them would have no end.
    """
    context = get_context("spawn")
    idle_deaths, num_begun = 0, _num_begun_runs(bench_folder)
    with _single_threaded_children():
        workers = [_start_worker(context, bench_folder, cells) for _ in range(min(jobs, len(cells)))]
        try:
            while workers:
                time.sleep(0.2)
                tick()
                died = [w for w in workers if w.exitcode not in (None, 0)]
                workers = [w for w in workers if w.exitcode is None]
                _check_dead_workers(died, bench_folder)
                if died and _has_unfinished_cells(bench_folder, cells):
                    begun_before, num_begun = num_begun, _num_begun_runs(bench_folder)
                    idle_deaths = len(died) + (idle_deaths if num_begun == begun_before else 0)
                    if idle_deaths <= MAX_IDLE_DEATHS:
                        workers += [_start_worker(context, bench_folder, cells) for _ in died]
                    elif not workers:
                        raise _idle_death_error(died[-1].exitcode)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join()


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Inside, SIGTERM is a KeyboardInterrupt, as SIGINT is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_on_ray(bench_folder: BenchFolder, cells: Sequence[GridCell], tick: TickCallback) -> None:
    """Run the cells as tasks of a Ray cluster, one a GPU, or one a core where it has none."""
    ray = _import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    share = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
    remote_worker = ray.remote(max_retries=1, **share)(_run_free_cells)
    waiting = [remote_worker.remote(str(bench_folder.root.resolve()), [cell]) for cell in cells]
    try:
        while waiting:
            ended, waiting = ray.wait(waiting, num_returns=1, timeout=1.0)
            for task in ended:
                _collect_ray_task(ray, task)
            tick()
        bench_folder.fail_dead_cells(cells)
        tick()
    finally:
        for task in waiting:
            ray.cancel(task, force=True)
        if started:
            ray.shutdown()


def _collect_ray_task(ray: Any, task: Any) -> None:
    """A task whose process died leaves its cell unfinished; other errors are those of the cluster, and are raised."""
    with suppress(ray.exceptions.WorkerCrashedError):
        ray.get(task)


def _run_free_cells(root: str, cells: Sequence[GridCell]) -> None:
    """What a worker does: claim and run cells until none is free."""
    folder = Path(root)
    if not folder.is_dir():
        raise UsageError(f"{root!r} is not there on this machine; a bench over several needs a folder they share.")
    run_sequentially(BenchFolder(folder), cells, lambda: None)


def _start_worker(context: Any, bench_folder: BenchFolder, cells: Sequence[GridCell]) -> Any:
    worker = context.Process(target=_worker_main, args=(str(bench_folder.root), list(cells)))
    worker.start()
    return worker


def _worker_main(root: str, cells: Sequence[GridCell]) -> None:
    """Run a worker; only its parent stops it and reports on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent too
    torch.set_num_threads(1)
    with sigterm_as_keyboard_interrupt():
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        try:
            _run_free_cells(root, cells)
        except (KeyboardInterrupt, Interrupted):
            sys.exit(Interrupted.exit_code)
        except DeatError as error:
            print_stderr(str(error))
            sys.exit(error.exit_code)


def _stop_with_parent() -> None:
    """Stop this worker as a signal does, which saves its run, when the bench itself was killed."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def _num_begun_runs(bench_folder: BenchFolder) -> int:
    return sum(run["attempts"] for run in bench_folder.runs().values())


def _idle_death_error(exit_code: int) -> DeatError:
    if exit_code < 0:
        return NumericalError(
            f"{MAX_IDLE_DEATHS + 1} processes of the bench were killed before they began a run, the last by signal "
            f"{-exit_code}, perhaps because memory ran out. Give a smaller --jobs; --jobs 1 needs no other process."
        )
    return UsageError(
        f"{MAX_IDLE_DEATHS + 1} processes of the bench ended before they began a run, the last with status {exit_code}. "
        "What they said is above; --jobs 1 runs in this process and shows the error."
    )


def _check_dead_workers(died: Sequence[Any], bench_folder: BenchFolder) -> None:
    """Raise where a worker ended for a reason that would end the next one too."""
    if any(worker.exitcode == CheckpointError.exit_code for worker in died):
        raise CheckpointError(
            f"no run in {str(bench_folder.root)!r} can be written down, as said above; the bench ends."
        )


def _has_unfinished_cells(bench_folder: BenchFolder, cells: Sequence[GridCell]) -> bool:
    runs = bench_folder.runs()
    return any(runs[cell.folder]["status"] in ("waiting", "running") for cell in cells)


@contextmanager
def _single_threaded_children() -> Iterator[None]:
    """Children started inside have one thread each, in torch and below it."""
    before = {name: os.environ.get(name) for name in THREAD_ENV_VARS}
    os.environ.update(dict.fromkeys(THREAD_ENV_VARS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UsageError("--parallel ray needs the package ray: pip install ray.") from None
    return ray
