"""What is wrong with a report's runs and rows: unfinished runs, sanity flags, collapses that the overfit watch logged."""

from collections.abc import Sequence
from dataclasses import replace

from deat.evaluation.sanity import Flag
from deat.report.row_statistics import format_seeds, summarize_cost
from deat.report.run_results import ReportRow, RunResults
from deat.training.epoch_records import EpochWatch
from deat.training.overfit_watch import NOTE_ACTION, classify_collapse

UNEVALUATED = "unevaluated"
"""The status of a run that was trained to its end and lacks only its evaluation."""
FLAGGED_MARK = "⚑"
"""Marks a row or a value that a sanity flag was raised for."""
WATCH_ACTION_TEXTS = {"warn": "warning only", "stop": "training stopped", "rollback": "rolled back and continued"}


def add_status(run: RunResults) -> RunResults:
    """Return a run with the reason why it is not complete, and with the status incomplete or unevaluated if it is so."""
    if run.status in ("failed", "waiting", "running"):
        return replace(run, why=run.why or _describe_unfinished(run))
    if run.record is None or not run.history:
        return replace(run, status="incomplete", why=run.why or "no epoch finished")
    epochs, total_epochs = run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    is_stopped = epochs < total_epochs and _is_stopped_by_watch(run)
    if epochs < total_epochs and not is_stopped:
        return replace(run, status="incomplete", why=f"{epochs} of {total_epochs} epochs")
    if run.evaluation is None:
        return replace(run, status=UNEVALUATED, why="not evaluated")
    if is_stopped:
        return replace(run, why=f"stopped by the overfit watch; the weights are of epoch {epochs} of {total_epochs}")
    return run


def list_run_problems(row: ReportRow, excluded_status: str = "") -> list[str]:
    """List why runs of a row are missing or incomplete, each reason with its seeds.

    Args:
        row: A row of the report.
        excluded_status: Runs of this status are left out.

    Returns:
        One line for each reason, such as "seeds 1, 2: out of memory".
    """
    seeds_by_reason: dict[str, list[int]] = {}
    for run in row.runs:
        reason = run.why or ("" if run.metrics else run.status)
        if run.status != excluded_status and reason:
            seeds_by_reason.setdefault(reason, []).append(run.seed)
    return [f"{format_seeds(seeds)}: {reason}" for reason, seeds in seeds_by_reason.items()]


def list_row_problems(row: ReportRow) -> list[str]:
    """List why runs of a row are missing or incomplete, and how much of a budget was not spent."""
    cost = summarize_cost(row)
    unspent = row.budget - cost.backprops if row.budget and cost else 0
    return [
        *list_run_problems(row),
        *([f"{unspent:,.0f} of {row.budget:,} backprops not spent"] if unspent >= 1 else []),
    ]


def collect_flags(row: ReportRow) -> list[tuple[int, Flag]]:
    """Collect the sanity flags of a row's evaluations.

    Args:
        row: A row of the report.

    Returns:
        (seed, flag) pairs. A flag that only the last epoch's evaluation raised says so in its `seen`.
    """
    return [(run.seed, flag) for run in row.runs for flag in _collect_run_flags(run)]


def exclude_flagged_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the rows without a sanity flag, which alone may be called the best; all rows if each has a flag."""
    return [row for row in rows if not collect_flags(row)] or list(rows)


def list_unchecked_seeds(row: ReportRow) -> list[int]:
    """List the seeds of a row with an evaluation that was made without sanity checks."""
    return [
        run.seed
        for run in row.runs
        if any(e and not e.sanity_checked for e in (run.evaluation, *run.extra_evaluations.values()))
    ]


def list_watch_alarms(row: ReportRow, short: bool = False) -> list[str]:
    """List the collapses that the overfit watch logged for a row.

    Args:
        row: A row of the report.
        short: Leave out the measurements.

    Returns:
        One line for each collapse: its seed, its kind, its epoch, the watch's action and the measurements.
    """
    return [
        f"seed {run.seed}: {_format_alarm(event)}{'' if short else f': {event.reason}'}"
        for run in row.runs
        for event in run.watch
        if event.reason and event.action != NOTE_ACTION
    ]


def describe_noted_jumps(rows: Sequence[ReportRow]) -> list[str]:
    """Describe in one line the jumps of l_X that the watch only logged; empty if there are none."""
    jumps = [
        f"{row.name} seed {run.seed} in epoch{'' if len(epochs) == 1 else 's'} {', '.join(map(str, epochs))}"
        for row in rows
        for run in row.runs
        if (epochs := [event.epoch + 1 for event in run.watch if event.action == NOTE_ACTION])
    ]
    if not jumps:
        return []
    return [
        "The overfit watch logged a jump of l_X that the accuracies do not confirm, and took no action: "
        f"{'; '.join(jumps)}."
    ]


def collect_remarks(row: ReportRow) -> list[str]:
    """Collect a row's remarks for a table: flags, missing sanity checks, collapses, incomplete runs."""
    flags = sorted({f"{FLAGGED_MARK} {flag.name}" for _, flag in collect_flags(row)})
    unchecked = ["sanity not checked"] if list_unchecked_seeds(row) else []
    return [*flags, *unchecked, *list_watch_alarms(row), *list_row_problems(row)]


def _collect_run_flags(run: RunResults) -> list[Flag]:
    evaluations = {"": run.evaluation, **run.extra_evaluations}
    raised = [(key, flag) for key, evaluation in evaluations.items() if evaluation for flag in evaluation.flags]
    flags = dict.fromkeys(flag for key, flag in raised if key != "last")
    last_only = dict.fromkeys(flag for key, flag in raised if key == "last" and flag not in flags)
    return [*flags, *(replace(flag, seen=f"in the last epoch {flag.seen}") for flag in last_only)]


def _describe_unfinished(run: RunResults) -> str:
    """How far an unfinished run of a bench got."""
    progress = _describe_progress(run)
    if run.status == "failed":
        return run.status
    if run.status == "running":
        return ", ".join(filter(None, ("running, or killed while running", progress)))
    return f"{progress}; run the same command to continue" if progress else "not run yet"


def _describe_progress(run: RunResults) -> str:
    """How many of its epochs a run has finished; empty if it was never started."""
    if run.record is None:
        return ""
    epochs, total_epochs = len(run.history) and run.history[-1].epoch + 1, run.record["settings"]["epochs"]
    return f"{epochs} of {total_epochs} epochs" + (", not evaluated" if epochs == total_epochs else "")


def _is_stopped_by_watch(run: RunResults) -> bool:
    """Whether the overfit watch's last action was to stop the training."""
    return bool(run.watch) and run.watch[-1].action == "stop"


def _format_alarm(event: EpochWatch) -> str:
    action = WATCH_ACTION_TEXTS.get(str(event.action), event.action)
    return f"{classify_collapse(event)} in epoch {event.epoch + 1} ({action})"
