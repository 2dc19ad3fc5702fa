"""The scores of a run: accuracies of its networks on test images, which `deat train` measures after the last epoch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from deat.checkpoint.encoding import matches_type
from deat.data.batch_source import InterruptibleSource
from deat.errors import CheckpointError
from deat.evaluation.quick_scores import compute_accuracies
from deat.models.weights import find_weights_file
from deat.runs.record_files import DAMAGED_RECORD_HINT, RUN_FILE, SCORES_FILE, SUMMARY_FILE, read_run_json
from deat.runs.resolve_request import Run
from deat.runs.trained_run import check_init_weights
from deat.training.train_result import TrainResult
from deat.training.trainer import Trainer
from deat.utils.safe_read import read_plain_text
from deat.utils.safe_write import write_json
from deat.utils.text import make_printable

SCORE_ATTACKS = ("natural", "fgsm", "pgd-20")
MISSING_BASELINE_WEIGHTS_HINT = (
    "put it back, or continue without it: the run's own `deat train` with --resume auto --baseline no"
)
"""What to do where a run's baseline cannot start from the weights that the run began with."""


@dataclass(frozen=True)
class ModelScore:
    """One row of a run's table: a model's accuracies by attack, and what training it cost."""

    name: str
    accuracy: dict[str, float]
    images: int
    backprops: int
    seconds: float


@dataclass(frozen=True)
class ScoreOptions:
    """What `deat train` scores: on how many test images, and whether natural training is there to compare.

    run.json has it under "options", and a resumed run keeps it.
    """

    test_images: int = 1000
    baseline: str = "auto"


def wants_baseline(run: Run, options: ScoreOptions) -> bool:
    """Whether natural training is scored too, to compare with a run."""
    if options.baseline != "auto":
        return options.baseline == "yes"
    return run.splits.name == "digits" and run.method.name != "natural"


class RunScorer:
    """Scores the networks of a run on its first test images.

    Args:
        run: The run.
        trainer: The run's trainer, whose interruption ends scoring too.
        options: On how many images.

    Attributes:
        scores: One score for each network so far; none where there are no test images.
    """

    def __init__(self, run: Run, trainer: Trainer, options: ScoreOptions) -> None:
        self.run, self.options, self.distributed = run, options, trainer.distributed
        self.scores: list[ModelScore] = []
        source = run.test_images(options.test_images)
        if source is not None:
            source.check()  # a broken test set must not end the run after its last epoch
        self.images = None if source is None else InterruptibleSource(source, trainer.interruption)

    def score(self, name: str, result: TrainResult, backprops: int) -> None:
        """Score the network of a training as it is now."""
        images = self.images
        if images is None:
            return
        threat, seed = self.run.threat, self.run.config.seed
        with self.run.limit_threads(result.model):
            accuracy = compute_accuracies(
                result.model, images, SCORE_ATTACKS, threat, seed, distributed=self.distributed, task=self.run.task
            )
        self.scores.append(ModelScore(name, accuracy, images.num_examples, backprops, result.seconds))

    def score_epochs(self, result: TrainResult, backprops: int) -> None:
        """Score the last epoch of the run's training, its averaged weights, and the best epoch where that is another."""
        name, best, last = make_printable(self.run.method.name), result.best, result.history[-1].epoch
        is_other = best.epoch != last and not best.averaged
        last_weights = {key: value.detach().clone() for key, value in result.model.state_dict().items()}
        self.score(f"{name}, last epoch" if is_other or result.averaged else name, result, backprops)
        if result.averaged:
            result.load_averaged()
            self.score(f"{name}, averaged weights", result, backprops)
        if best.epoch != last:
            result.load_best()
            averaged = ", averaged" if best.averaged else ""
            self.score(f"{name}, best epoch ({best.epoch + 1}{averaged})", result, backprops)
        result.model.load_state_dict(last_weights)

    @property
    def wants_baseline(self) -> bool:
        """Whether natural training is scored too."""
        return wants_baseline(self.run, self.options)

    def check_baseline_weights(self, folder: Path) -> None:
        """Before a training is resumed, check that its baseline can start from the weights that the run began with."""
        start = self.run.request.init
        try:
            if start and self.run.goes_on and self.wants_baseline:
                find_weights_file(Path(start))
                check_init_weights(folder, start)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; the baseline starts from it too: {MISSING_BASELINE_WEIGHTS_HINT}"
            ) from None

    def read_finished_scores(self, folder: Path) -> list[ModelScore] | None:
        """The scores of a run that was scored with the same options; None where they are missing or damaged."""
        scores: list[dict[str, Any]] | None = self.distributed.run_on_main(lambda: self._read_finished_scores(folder))
        return None if scores is None else [ModelScore(**score) for score in scores]

    def _read_finished_scores(self, folder: Path) -> list[dict[str, Any]] | None:
        try:
            options, scores = read_run_json(folder)["options"], read_scores(folder / SCORES_FILE)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        is_whole = options == asdict(self.options) and (folder / SUMMARY_FILE).is_file()
        return list(map(asdict, scores)) if is_whole and bool(scores) == (self.images is not None) else None


def write_scores(folder: Path, scores: Sequence[ModelScore]) -> None:
    """Write scores.json."""
    write_json(folder / SCORES_FILE, [asdict(score) for score in scores], make_folder=False)


def read_scores(path: Path) -> list[ModelScore]:
    """scores.json; a ValueError, TypeError or AttributeError for what is not one."""
    scores = [ModelScore(**score) for score in json.loads(read_plain_text(path))]
    for s in scores:
        numbers = [s.images, s.backprops, s.seconds, *s.accuracy.values()]
        if s.accuracy.keys() != scores[0].accuracy.keys() or not all(isinstance(n, int | float) for n in numbers):
            raise ValueError(f"{path.name} holds something else")
    return [
        replace(s, name=make_printable(s.name), accuracy={make_printable(a): v for a, v in s.accuracy.items()})
        for s in scores
    ]


def read_score_options(folder: Path, recorded_options: dict[str, Any]) -> ScoreOptions:
    """The options that a run's record has, checked before any data is read."""
    options = {name: recorded_options[name] for name in ("test_images", "baseline") if name in recorded_options}
    hints = get_type_hints(ScoreOptions)
    for name, value in options.items():
        if not matches_type(value, hints[name]):
            raise CheckpointError(
                f"{str(folder / RUN_FILE)!r} is not a run's record (options.{name} is {value!r}). {DAMAGED_RECORD_HINT}"
            )
    return ScoreOptions(**options)
