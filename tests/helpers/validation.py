"""Validations with given results, in the place of `deat.training.validation.compute_scores`."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from deat.evaluation.quick_scores import QuickScore

PLACE = "deat.training.validation.compute_scores"


def scores_of(natural: float, robust: float, attack: str = "pgd-2", n: int = 100) -> dict[str, QuickScore]:
    """Scores on n images, the first of which are right."""
    shares = {"natural": natural, attack: robust}
    return {name: QuickScore(share, 1.0, [i < round(share * n) for i in range(n)]) for name, share in shares.items()}


def one_after_the_other(pairs: Iterable[tuple[float, float]], n: int = 100) -> Callable[..., dict[str, QuickScore]]:
    """Validations with these natural and robust accuracies."""
    found: Iterator[tuple[float, float]] = iter(pairs)
    return lambda *_: scores_of(*next(found), n=n)


def with_verdicts(natural: float, right: Sequence[int], n: int, attack: str = "pgd-2") -> dict[str, QuickScore]:
    """Scores on n images, of which those at `right` are right under attack."""
    verdicts = [i in right for i in range(n)]
    return {**scores_of(natural, 0.0, attack, n), attack: QuickScore(len(right) / n, 1.0, verdicts)}
