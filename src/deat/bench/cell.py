"""One cell played: trained, unless it is already, and judged, block by block, so that an interruption costs little."""

import gc
import shutil
from pathlib import Path

from deat.bench.code import code_of, is_by
from deat.bench.grid import Cell, Grid
from deat.bench.locks import Claim
from deat.bench.mending import drop_damaged
from deat.checkpoint.lock import owned
from deat.checkpoint.store import listed, remove
from deat.data.stream import Part
from deat.errors import CheckpointError, DeatError, Interrupted, UsageError
from deat.evaluation.evaluator import evaluate
from deat.live import say_aside
from deat.recipes.recipe import Round
from deat.report.collect import EVALUATIONS, collect_run
from deat.training.folder import WATCH, WEIGHTS, RunFolder, check_links, is_run, is_unborn, make_folder
from deat.training.judging import alone, ledger_of, load_model, test_part
from deat.training.run import Run
from deat.training.trainer import Trainer
from deat.writing import refuse_links


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
