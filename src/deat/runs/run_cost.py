"""Estimate what a run costs in all, before it is created: training, validation, watch, saving and scores."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from deat.evaluation.attack_registry import get_attacks
from deat.evaluation.attacks import parse_attack
from deat.evaluation.sanity import SANITY_IMAGES
from deat.evaluation.sanity.extra_attacks import estimate_check_passes
from deat.runs.final_scores import SCORE_ATTACKS, ScoreOptions, wants_baseline
from deat.runs.initial_scores import INITIAL_ATTACK
from deat.runs.resolve_request import Run
from deat.runs.trained_run import get_test_split
from deat.training.overfit_watch import MAX_SCORED_IMAGES, MULTI_STEP_ATTACK, SINGLE_STEP_ATTACK
from deat.training.trainer import Trainer
from deat.training.training_cost import CostEstimate, estimate_cost, measure_attack_speed


def estimate_run_cost(run: Run, trainer: Trainer, folder: Path, scoring: ScoreOptions | None = None) -> CostEstimate:
    """Estimate the cost of a run with all that it does.

    Args:
        run: The run.
        trainer: Its trainer. A few batches are trained, so it cannot be used afterwards.
        folder: The run's folder, or one on the same disk.
        scoring: What `deat train` scores after training; None for nothing, as in a bench.

    Returns:
        The estimate. Its parts are training, validation and saving, and watch, scores and baseline where there are any.
    """
    cost = estimate_cost(trainer, folder)
    parts = {**_estimate_scores(run, trainer, scoring or ScoreOptions(test_images=0, baseline="no"))}
    if scoring and wants_baseline(run, scoring):
        parts["baseline"] = estimate_cost(run.baseline().trainer(distributed=trainer.distributed)).seconds[1]
    return cost.with_parts({name: float(trainer.distributed.broadcast_json(value)) for name, value in parts.items()})


def _estimate_scores(run: Run, trainer: Trainer, scoring: ScoreOptions) -> dict[str, float]:
    """Seconds of the watch, which scores every epoch, and of the scores before and after training."""
    test, watch = run.test_images(scoring.test_images), run.watch(trainer)
    images = trainer.val or test
    if images is None:
        return {}
    with run.limit_threads(trainer.model):
        speed = measure_attack_speed(trainer, images)
    parts: dict[str, float] = {}
    if watch:
        attacks = map(parse_attack, (SINGLE_STEP_ATTACK, MULTI_STEP_ATTACK))
        num_images = min(MAX_SCORED_IMAGES, watch.images.num_examples)
        parts["watch"] = trainer.config.epochs * speed.estimate_seconds(attacks, num_images)
    if test is not None:
        attacks = map(parse_attack, SCORE_ATTACKS)
        each = speed.estimate_seconds(attacks, test.num_examples)
        parts["scores"] = _count_scored_models(run, trainer, scoring) * each
    if run.start:
        attacks = map(parse_attack, ("natural", INITIAL_ATTACK))
        parts["scores"] = parts.get("scores", 0.0) + speed.estimate_seconds(attacks, images.num_examples)
    return parts


def estimate_evaluation_seconds(
    run: Run, trainer: Trainer, rounds: Iterable[tuple[Sequence[str], int | None]]
) -> float:
    """Estimate how long `deat.evaluate` takes on a run's test images, with its sanity checks.

    Args:
        run: The run.
        trainer: Its trainer.
        rounds: The attacks and the number of images, None for all, of each evaluation.
    """
    test = get_test_split(run)
    source = run.test_images(len(test))
    assert source is not None
    with run.limit_threads(trainer.model):
        speed = measure_attack_speed(trainer, source)
    seconds = 0.0
    for names, n in rounds:
        attacks, num_images = get_attacks(names), min(n or len(test), len(test))
        check_passes, num_checked = estimate_check_passes(attacks), min(SANITY_IMAGES, num_images)
        seconds += speed.estimate_seconds(attacks, num_images) + speed.estimate_pass_seconds(check_passes, num_checked)
    return seconds


def _count_scored_models(run: Run, trainer: Trainer, scoring: ScoreOptions) -> int:
    """The last epoch, the best epoch where it may be another one, the averaged weights, and the baseline."""
    has_best = trainer.validator is not None and trainer.config.epochs > 1
    has_average = trainer.config.ema is not None
    return 1 + has_best + has_average + wants_baseline(run, scoring)
