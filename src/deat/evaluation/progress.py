"""The progress of an evaluation, and how long the rest will take, estimated from the passes that attacks make."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType

from deat.evaluation.attack_registry import estimate_passes
from deat.evaluation.attack_verifier import AttackLike, get_stages
from deat.evaluation.attacks import is_natural
from deat.utils.live_line import is_notebook, is_stderr_redrawable, make_live_display, print_to_stderr
from deat.utils.text import format_duration, format_progress_bar

FORWARD_ONLY_COST = 0.3
"""The cost of a forward pass alone, as a share of a forward and a backward pass."""
UNKNOWN_ATTACK_PASSES = 20
"""The passes that a user's own attack is assumed to make."""
MAX_RUNNING_SHARE = 0.95
"""How much of an unfinished piece of work counts as done at most, because it may take longer than estimated."""
MIN_SHARE_FOR_ESTIMATE = 0.005
"""The share of the work after which the time left is estimated."""
LINE_INTERVAL_SECONDS = 10.0
"""How often a line of progress is printed; a shorter evaluation prints none."""
CHECKS_LABEL = "sanity checks"
"""What `EvaluationProgress.name` is during the checks at the end."""

ProgressCallback = Callable[["EvaluationProgress"], None]
"""Called when an evaluation begins, after each result, and after each attack of the sanity checks."""


class EvaluationProgress:
    """How far an evaluation is. `deat.evaluate` passes it to the function given as `progress`.

    Work is measured in forward and backward passes times images. Results from the resume log count as finished but are
    not used to estimate the time left.

    Args:
        attacks: The attacks.
        num_images: The number of images.
        total: The number of results to make: one for each block and each stage of an attack.
        count_passes: Returns how many images have passed through the model so far, to follow a long attack.
        clock: Returns the time in seconds.
        check_passes: The image passes of the sanity checks after the attacks.
        ball: Which ball of a union this is, such as "l2, ball 2 of 3". Each has a progress of its own.

    Attributes:
        done: Results made or read so far.
        total: Results to make in all.
        name: The attack that is running or was the last to run, or "sanity checks"; empty at the start.
        work_done: The work finished in this call.
        work_left: The work not finished yet.

    Example:
        >>> def show(progress: EvaluationProgress) -> None:
        ...     print(f"{progress.done} of {progress.total}, {progress.seconds_left} s left")
        >>> deat.evaluate(model, test, threat="linf:8/255", progress=show)
    """

    def __init__(
        self,
        attacks: Sequence[AttackLike],
        num_images: int,
        total: int,
        count_passes: Callable[[], int],
        clock: Callable[[], float] = perf_counter,
        check_passes: float = 0.0,
        ball: str = "",
    ) -> None:
        self.ball = ball
        self.done, self.total, self.name = 0, total, ""
        self.work_done, self.work_left = 0.0, num_images * sum(map(estimate_attack_cost, attacks)) + check_passes
        self._total_work = self.work_left
        self._check_passes, self._count_passes, self._clock, self._started = check_passes, count_passes, clock, clock()
        self._running_work, self._passes_before = 0.0, 0

    def start_attack(self, attack: AttackLike, num_images: int) -> None:
        """Note that an attack, or a stage of one, begins on so many images."""
        self._start(attack.name, estimate_attack_cost(attack) * num_images)

    def start_checks(self) -> None:
        """Note that all attacks are finished and the sanity checks of their results begin."""
        self._start(CHECKS_LABEL, self._check_passes)

    def _start(self, name: str, work: float) -> None:
        self.name, self._running_work, self._passes_before = name, work, self._count_passes()

    def finish_attack(self, attack: AttackLike, num_images: int, is_new: bool) -> None:
        """Note a result of an attack, or of a stage of one.

        Args:
            attack: The attack or stage.
            num_images: The number of images.
            is_new: Whether it was made now, rather than read from the resume log.
        """
        work = estimate_attack_cost(attack) * num_images
        self.done, self.name, self._running_work = self.done + 1, attack.name, 0.0
        self.work_done += work if is_new else 0.0
        self.work_left -= work

    @property
    def is_checking(self) -> bool:
        """Whether the attacks are finished and the sanity checks of their results are running."""
        return self.name == CHECKS_LABEL

    @property
    def share(self) -> float:
        """The share of the work that is done, from 0 to 1; what was read from the resume log counts as done."""
        left = max(0.0, self.work_left - self._running_done)
        return 1.0 - left / self._total_work if self._total_work else 1.0

    @property
    def _running_done(self) -> float:
        """How much of the running attack is done."""
        if not self._running_work:
            return 0.0
        return min(self._count_passes() - self._passes_before, MAX_RUNNING_SHARE * self._running_work)

    @property
    def seconds_left(self) -> float | None:
        """The seconds left, at least one until everything is done; None while too little work is done to estimate it."""
        running = self._running_done
        done, left = self.work_done + running, self.work_left - running
        if done <= MIN_SHARE_FOR_ESTIMATE * (done + left):
            return None
        return max(1.0, (self._clock() - self._started) * left / done)


def estimate_attack_cost(attack: AttackLike) -> float:
    """Return about how many forward and backward passes an attack makes for each image, over all its stages."""
    return sum(
        FORWARD_ONLY_COST if is_natural(stage) else estimate_passes(stage) or UNKNOWN_ATTACK_PASSES
        for stage in get_stages(attack)
    )


class ProgressPrinter:
    """A `ProgressCallback` that prints a line to standard error every ten seconds, and before long sanity checks.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._last_printed, self._announced_checks = clock, clock(), False

    def __call__(self, progress: EvaluationProgress) -> None:
        """Print a line if it is time to."""
        announces_checks = (
            progress.is_checking
            and not self._announced_checks
            and (progress.seconds_left or 0.0) >= LINE_INTERVAL_SECONDS
        )
        self._announced_checks |= progress.is_checking
        if announces_checks or self._clock() - self._last_printed >= LINE_INTERVAL_SECONDS:
            self._last_printed = self._clock()
            print_to_stderr(f"deat: {format_progress(progress)}")


class LiveProgress:
    """A `ProgressCallback` that shows a bar with the time left, which moves while an attack runs.

    Use it as a context manager, on a terminal or in a notebook.
    """

    def __init__(self) -> None:
        self._progress: EvaluationProgress | None = None
        self._display = make_live_display(self._format)

    def __enter__(self) -> "LiveProgress":
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.__exit__(kind, error, trace)

    def __call__(self, progress: EvaluationProgress) -> None:
        """Show this progress from now on."""
        self._progress = progress

    def _format(self) -> str:
        return "" if self._progress is None else format_progress(self._progress, with_bar=True)


@contextmanager
def showing_progress(is_wanted: bool) -> Iterator[ProgressCallback]:
    """Give a callback that shows progress inside a with block: a bar, or lines where nothing can be redrawn.

    Args:
        is_wanted: Whether to show anything.
    """
    if not is_wanted:
        yield lambda progress: None
    elif is_notebook() or is_stderr_redrawable():
        with LiveProgress() as live:
            yield live
    else:
        yield ProgressPrinter()


def format_progress(progress: EvaluationProgress, *, with_bar: bool = False) -> str:
    """Return the progress as one line, such as "evaluating  2/6  1:41 left  pgd-20"."""
    left, bar = format_duration(progress.seconds_left), f"  {format_progress_bar(progress.share)}" if with_bar else ""
    ball = f"  {progress.ball}" if progress.ball else ""
    return f"evaluating{ball}{bar}  {progress.done}/{progress.total}  {left} left  {progress.name}".rstrip()
