"""The result of an evaluation, and its file evaluation.json."""

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deat.data.image_label_checks import noun_of_shape
from deat.errors import CheckpointError, DataError, NewerVersionError, UsageError
from deat.evaluation.attack_verifier import (
    RECORDED_FIELDS,
    BlockResult,
    combine_worst,
    rename_recorded_fields,
    sum_counts,
)
from deat.evaluation.intervals import bootstrap_intervals, wilson_interval
from deat.evaluation.sanity import Flag
from deat.tasks import Task, build_task
from deat.threat import format_threat
from deat.utils.json_checksum import add_checksum, is_unchanged
from deat.utils.notebook_html import make_data_frame, render_html
from deat.utils.safe_read import read_plain_text
from deat.utils.safe_write import write_atomic, write_json
from deat.utils.text import summarize_error

SCHEMA_VERSION = 2
WORST_ONLY = "worst_only"
"""The setting of a combined evaluation with the attacks that count in its worst case alone."""

RecordedMetrics = tuple[dict[str, dict[str, float]], dict[str, dict[str, tuple[float, float]]]]
"""Metrics and their intervals, by attack and metric."""


@dataclass(frozen=True)
class AttackResult:
    """The result of one attack on all images.

    Attributes:
        name: The attack's name.
        correct: For each image, whether it is still classified correctly, or right by the task.
        invalid: How many adversarial examples were outside the ball or the box or not finite. They count as no attack.
        seconds: How long the attack took.
        forwards: Images passed forward through the model.
        backwards: Images passed backward through it.
        num_fooled_by_stage: How many images each stage of the attack fooled, by its name; empty without stages.
        scores: For each image, the lowest score, for a task whose answers are more or less wrong; else empty.
        statistics: For each image, the numbers of that answer that the task's metrics are computed from; else empty.
    """

    name: str
    correct: list[bool] = field(repr=False)
    invalid: int
    seconds: float
    forwards: int
    backwards: int
    num_fooled_by_stage: dict[str, int] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list, repr=False)
    statistics: list[list[float]] = field(default_factory=list, repr=False)

    @classmethod
    def from_blocks(cls, name: str, block_results: list[BlockResult]) -> "AttackResult":
        """Combine an attack's results on all blocks, in the order of the data."""
        return cls(
            name=name,
            correct=[hit for result in block_results for hit in result.correct],
            scores=[score for result in block_results for score in result.scores],
            statistics=[row for result in block_results for row in result.statistics],
            **sum_counts(block_results),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the result as evaluation.json has it."""
        values = {**asdict(self), "correct": pack_bits(self.correct)}
        json_values = {RECORDED_FIELDS.get(name, name): value for name, value in values.items()}
        return {name: value for name, value in json_values.items() if value or name not in ("scores", "statistics")}


@dataclass(frozen=True)
class Evaluation:
    """The result of `deat.evaluate`: accuracies, each image's verdicts, and flags that say why not to trust them.

    Attributes:
        results: One `AttackResult` for each attack, in the order given.
        labels: The label of each image; empty for tasks other than classification.
        classes: The name of each class, or of each label or target of another task.
        settings: The threat model, the attacks and every other setting, as evaluation.json has them.
        flags: What speaks against the accuracies; empty for a trustworthy evaluation.
        check_seconds: How long the sanity checks took; 0 in files written before it was recorded.
        balls: The evaluation in each ball, by its norm, if the threat model is a union; then an image counts as correct
            here if it is correct in every ball.
        own_task: The task, if it is a user's own, which a file cannot name.
        recorded_metrics: The metrics and their intervals, as evaluation.json has them; None to compute them.

    Example:
        >>> evaluation = deat.evaluate(model, test, threat="linf:8/255")
        >>> evaluation.worst
        0.4711
        >>> evaluation.intervals["pgd-20"]
        (0.4712, 0.4908)
        >>> [flag.line for flag in evaluation.flags]
        []
    """

    results: list[AttackResult]
    labels: list[int]
    classes: list[str]
    settings: dict[str, Any]
    flags: list[Flag] = field(default_factory=list)
    check_seconds: float = 0.0
    balls: dict[str, "Evaluation"] = field(default_factory=dict)
    own_task: Task | None = field(default=None, repr=False, compare=False)
    recorded_metrics: RecordedMetrics | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        accuracies = ", ".join(f"{name} {share:.2%}" for name, share in self.accuracy.items())
        flags = ", ".join(flag.name for flag in self.flags) or ("none" if self.sanity_checked else "not checked")
        if self.task.is_graded:
            accuracies = ", ".join(f"{name} {value:.4g}" for name, value in self.accuracy.items())
            return f"Evaluation({self.num_images:,} examples, {self.metric}: {accuracies}; flags: {flags})"
        return f"Evaluation({self.num_images:,} {self.inputs_noun}: {accuracies}; flags: {flags})"

    @property
    def num_images(self) -> int:
        """The number of images, or other examples."""
        return len(self.results[0].correct) if self.results else len(self.labels)

    @cached_property
    def task(self) -> Task:
        """What was evaluated. The task of a user's own class is known by its name alone after loading."""
        return self.own_task or build_task(self.settings.get("task"))

    @property
    def metric(self) -> str:
        """The task's first metric, which `accuracy`, `worst` and `intervals` have: accuracy, mIoU, R2, ..."""
        return self.task.metric_names[0]

    @cached_property
    def verdicts(self) -> dict[str, list[bool]]:
        """For each attack, and "worst" for all together: whether each image is still classified correctly."""
        by_attack = {result.name: result.correct for result in self.results}
        return {**by_attack, "worst": [all(column) for column in zip(*by_attack.values(), strict=True)]}

    @cached_property
    def scores(self) -> dict[str, list[float]]:
        """For each attack, and "worst" for all together: each image's score. It is 0 or 1 for a task without grades."""
        if not self.task.is_graded:
            return {name: list(map(float, hits)) for name, hits in self.verdicts.items()}
        by_attack = {result.name: result.scores for result in self.results}
        return {**by_attack, "worst": [min(column) for column in zip(*by_attack.values(), strict=True)]}

    @cached_property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Every metric of the task, such as mIoU and pixel accuracy, under each attack and under "worst"."""
        if self.recorded_metrics:
            return self.recorded_metrics[0]
        return {name: self.task.summarize(rows) for name, rows in self._statistics.items()}

    @cached_property
    def _statistics(self) -> dict[str, torch.Tensor]:
        """By attack and for "worst": the numbers of each image that the metrics are computed from."""
        if not self.task.is_graded:
            return {name: torch.tensor(hits, dtype=torch.float64)[:, None] for name, hits in self.verdicts.items()}
        by_attack = {result.name: result.statistics for result in self.results}
        all_rows = {**by_attack, "worst": combine_worst(self.results)["statistics"]}
        return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in all_rows.items()}

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """The accuracy under each attack, and under "worst"; the first metric of another task, such as mIoU.

        A cascade has only "natural" and "worst". There is no "worst" where no attack takes more than one step.
        """
        if self.task.is_graded:
            return {name: values[self.metric] for name, values in self.metrics.items() if self._is_shown(name)}
        return {name: sum(hits) / len(hits) for name, hits in self.verdicts.items() if self._is_shown(name)}

    def _is_shown(self, name: str) -> bool:
        """Whether the accuracy under an attack, or "worst", means what its name says."""
        if name == "worst":
            return self.has_worst_case
        is_partial = self.settings["cascade"] and name != "natural"
        return not is_partial and name not in self.settings.get(WORST_ONLY, ())

    @property
    def has_worst_case(self) -> bool:
        """Whether an attack of more than one step, or one of your own, was tried, so that there is a worst case."""
        described = self.settings.get("attacks", {})
        return any(is_real_attack(result.name, described.get(result.name, {})) for result in self.results)

    @property
    def sanity_checked(self) -> bool:
        """Whether the sanity checks ran; without them an evaluation can have no flags and still be wrong."""
        return bool(self.settings.get("sanity", True))  # older files do not record it, and were checked

    @property
    def worst(self) -> float:
        """The share of images that are classified correctly under every attack: the number to report.

        For a task with grades, it is the first metric of each image's worst answer.

        Raises:
            UsageError: No attack of more than one step was tried, so that there is no worst case.
        """
        if not self.has_worst_case:
            names = ", ".join(result.name for result in self.results)
            raise UsageError(
                f"there is no worst case: {names} {'is' if len(self.results) == 1 else 'are'} no attack of more than one "
                "step. Evaluate with pgd-20 or aa; accuracy has the values that there are."
            )
        return self.accuracy["worst"]

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Wilson's 95 % interval of each accuracy; for a metric of a whole set, a bootstrap over images."""
        n = self.num_images
        if self.task.is_graded:
            return {name: pairs[self.metric] for name, pairs in self.metric_intervals.items() if self._is_shown(name)}
        return {name: wilson_interval(round(share * n), n) for name, share in self.accuracy.items()}

    @cached_property
    def metric_intervals(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The 95 % bootstrap interval of every metric, under each attack and under "worst"."""
        if self.recorded_metrics:
            return self.recorded_metrics[1]
        return {name: bootstrap_intervals(self.task.summarize, rows) for name, rows in self._statistics.items()}

    @property
    def newly_fooled(self) -> dict[str, int]:
        """How many images each attack was the first to fool, in the order of the attacks."""
        standing, counts = [True] * self.num_images, {}
        for result in self.results:
            still = [a and b for a, b in zip(standing, result.correct, strict=True)]
            counts[result.name] = sum(standing) - sum(still)
            standing = still
        return counts

    def per_class(self, name: str = "worst") -> dict[str, tuple[int, int, tuple[float, float]]]:
        """Count the correct images of each class.

        Args:
            name: An attack's name, or "worst" for all together.

        Returns:
            By class: the images classified correctly, all images of the class, and Wilson's 95 % interval of their
            ratio. Empty for tasks other than classification.
        """
        rows: dict[str, tuple[int, int, tuple[float, float]]] = {}
        if not self.labels:
            return rows
        verdicts = self.verdicts[name]
        for index, label in enumerate(self.classes):
            hits = [hit for hit, y in zip(verdicts, self.labels, strict=True) if y == index]
            rows[label] = sum(hits), len(hits), wilson_interval(sum(hits), len(hits))
        return rows

    def to_pandas(self, *, per_image: bool = False) -> Any:
        """Return the accuracies as a pandas.DataFrame, one row for each attack, or the verdicts.

        Args:
            per_image: Return one row for each image: its label, its class, and its score under each attack, 1 for right
                and 0 for wrong.

        Raises:
            UsageError: pandas is not installed.

        Example:
            >>> evaluation.to_pandas(per_image=True).groupby("class")["worst"].mean()
        """
        if per_image:
            labelled: dict[str, list[Any]] = {}
            if self.labels:
                labelled = {"label": self.labels, "class": [self.classes[label] for label in self.labels]}
            return make_data_frame({**labelled, **self.scores})
        by_name = {result.name: result for result in self.results}
        rows = [(name, value, *self.intervals[name], by_name.get(name)) for name, value in self.accuracy.items()]
        return make_data_frame(
            {
                "attack": [row[0] for row in rows],
                self.metric: [row[1] for row in rows],
                "low": [row[2] for row in rows],
                "high": [row[3] for row in rows],
                "newly_fooled": [self.newly_fooled.get(row[0]) for row in rows],
                "seconds": [row[4].seconds if row[4] else None for row in rows],
                "backwards": [row[4].backwards if row[4] else None for row in rows],
            }
        )

    def _repr_html_(self) -> str:
        rows = [self._format_row(name, name) for name in self.accuracy]
        balls = [ball for ball in self.balls.values() if ball.has_worst_case]
        rows += [ball._format_row("worst", f"worst, {ball._threat_text}") for ball in balls]
        checked = (
            [] if self.sanity_checked else ["The sanity checks did not run, so nothing is known against the numbers."]
        )
        flags = [flag.line for flag in self.flags]
        examples = f"{self.num_images:,} {self.inputs_noun}"
        lines = [f"threat model: {self._threat_text}", *checked, *flags]
        return render_html(
            f"Evaluation on {examples}", lines, header=("attack", self.metric, "95 % interval"), rows=rows
        )

    @property
    def inputs_noun(self) -> str:
        """What texts call the inputs: "images" or "examples"."""
        return noun_of_shape(self.settings.get("image"))

    @property
    def _threat_text(self) -> str:
        threat = self.settings.get("threat")
        return format_threat(threat) if threat else "unknown"

    def _format_row(self, name: str, title: str) -> tuple[str, str, str]:
        bounds = " to ".join(map(self.task.format_metric, self.intervals[name]))
        return title, self.task.format_metric(self.accuracy[name]), bounds

    def as_json(self) -> dict[str, Any]:
        """Return the content of evaluation.json, with a checksum of all of it."""
        return add_checksum(self._content_json())

    def _content_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA_VERSION,
            "images": self.num_images,
            "accuracy": self.accuracy,
            **self._metrics_json(),
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "added": self.newly_fooled,
            "per_class": {name: self._per_class_json(name) for name in self.accuracy},
            "flags": [{**asdict(flag), "link": flag.link} for flag in self.flags],
            "settings": self.settings,
            "check_seconds": self.check_seconds,
            "attacks": [result.as_json() for result in self.results],
            "labels": pack_labels(self.labels),
            "classes": self.classes,
            **({"balls": {name: ball.as_json() for name, ball in self.balls.items()}} if self.balls else {}),
        }

    def _metrics_json(self) -> dict[str, Any]:
        if not self.task.is_graded:
            return {}
        intervals = {
            name: {metric: list(pair) for metric, pair in pairs.items()}
            for name, pairs in self.metric_intervals.items()
        }
        return {"metrics": self.metrics, "metric_intervals": intervals}

    def _per_class_json(self, name: str) -> dict[str, dict[str, Any]]:
        rows = self.per_class(name)
        return {label: {"correct": a, "images": b, "interval": list(pair)} for label, (a, b, pair) in rows.items()}

    def save(self, path: str | Path) -> None:
        """Write evaluation.json, completely or not at all.

        Args:
            path: The file to write. An existing evaluation is replaced if this one contains it: the same weights,
                images and settings, and all of its attacks. Any other is kept beside it, as evaluation-1.json.

        Raises:
            CheckpointError: The file cannot be written.
        """
        keep_other_evaluation(Path(path), self)
        try:
            write_json(Path(path), self.as_json())
        except OSError as error:
            raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None


def is_real_attack(name: str, settings: dict[str, Any]) -> bool:
    """Whether an attack tries to find the worst case, by its name and its settings in evaluation.json.

    One gradient step, such as FGSM, does not, and no attack at all does not. A user's own attack is believed.
    """
    if "kind" in settings or "steps" not in settings:
        return name not in ("natural", "fgsm")
    return bool(settings["steps"] * (settings.get("restarts") or 1) > 1)


def keep_other_evaluation(path: Path, evaluation: Evaluation) -> str:
    """Copy an earlier evaluation that a new one does not contain, under the next free number.

    Args:
        path: The file that is to be written.
        evaluation: The new evaluation.

    Returns:
        What was copied and why, as a sentence; empty if nothing had to be.

    Raises:
        CheckpointError: The copy cannot be written.
    """
    existing = read_evaluation_json(path) if path.is_file() else None
    if existing is None:
        return ""
    old, new = (
        _evaluation_request(values)
        for values in (existing, {"settings": evaluation.settings, "images": evaluation.num_images})
    )
    if _is_contained(old, new):
        return ""
    reason = "has other settings" if old["model"] == new["model"] else "is of other weights"
    try:
        data = path.read_bytes()
        for number in count(1):
            copy = path.with_name(f"{path.stem}-{number}{path.suffix}")
            if not copy.exists():
                write_atomic(copy, data)
                return f"{path.name} {reason}; it was copied to {copy.name}."
            if copy.read_bytes() == data:
                break
    except OSError as error:
        raise CheckpointError(f"cannot back up the existing {path.name}: {error.strerror}.") from None
    return ""


def _evaluation_request(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What identifies an evaluation: its weights by their hash, images, attacks and options."""
    settings = evaluation.get("settings", {})
    options = {name: settings.get(name) for name in ("model", "threat", "task", "seed", "block", "cascade")}
    about = {name: settings.get("about", {}).get(name) for name in ("epoch", "data", "size", "normalize")}
    n = evaluation.get("images") if settings.get("sample") else None
    return {"attacks": settings.get("attacks", {}), "n": n, **options, **about}


def _is_contained(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a new evaluation has all attacks of an old one, with the same other settings."""
    others = [{name: value for name, value in request.items() if name != "attacks"} for request in (old, new)]
    return bool(others[0] == others[1] and old["attacks"].items() <= new["attacks"].items())


def load_evaluation(path: str | Path) -> Evaluation:
    """Read an evaluation.json.

    Args:
        path: A file that `deat evaluate`, `deat.evaluate(save=...)` or `Evaluation.save` wrote.

    Returns:
        The evaluation, equal to the one that was saved.

    Raises:
        DataError: There is no such file, or it is no evaluation.json, or it was changed after it was written.
        NewerVersionError: A later version of deat wrote it.

    Example:
        >>> deat.load_evaluation("runs/demo/evaluation.json").accuracy
        {'natural': 0.98, 'pgd-20': 0.85, 'worst': 0.84}
    """
    try:
        data = json.loads(read_plain_text(Path(path)))
        if is_newer_schema(data["schema"]):
            raise NewerVersionError(
                f"{str(path)!r} has schema {data['schema']!r}; this deat reads up to {SCHEMA_VERSION}. Upgrade deat."
            )
        evaluation = _parse_evaluation(data) if is_unchanged(data) else None
        contradiction = _find_contradiction(evaluation, data) if evaluation else "its checksum does not match"
    except NewerVersionError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"there is no file {str(path)!r}: name an evaluation.json.") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} is not an evaluation.json that deat wrote ({summarize_error(error)}). Leave it out."
        ) from None
    if evaluation is None or contradiction:
        raise DataError(
            f"{str(path)!r} was damaged, or edited after deat wrote it: {contradiction}. Leave it out, and evaluate again."
        )
    return evaluation


def _find_contradiction(evaluation: Evaluation, data: dict[str, Any]) -> str:
    """Compare the stored accuracies and numbers of images with the verdicts; empty if they are the same."""
    lengths = {len(result.correct) for result in evaluation.results}
    if len(lengths) > 1 or lengths - {data.get("images", evaluation.num_images)}:
        return f"it holds verdicts of {sorted(lengths)} images, and says {data.get('images')}"
    counted = {name: sum(hits) / max(1, len(hits)) for name, hits in evaluation.verdicts.items()}
    stored = data.get("metrics") and {name: values[evaluation.metric] for name, values in data["metrics"].items()}
    for name, share in data.get("accuracy", {}).items():
        expected = (stored or counted).get(name)
        if expected is None or not math.isclose(float(share), expected, rel_tol=0, abs_tol=1e-9):
            is_nan = expected is not None and math.isnan(float(share)) and math.isnan(expected)
            if not is_nan:
                return f"its accuracy under {name} is {share!r}, and its verdicts say {expected!r}"
    return ""


def _parse_evaluation(data: Any) -> Evaluation:
    results = [
        AttackResult(**{**rename_recorded_fields(entry), "correct": unpack_bits(entry["correct"])})
        for entry in data["attacks"]
    ]
    flags = [Flag(flag["name"], flag["seen"], flag["advice"]) for flag in data["flags"]]
    has_labels = data["labels"] or not results or not results[0].scores
    labels = unpack_labels(data["labels"], len(results[0].correct) if results else 0) if has_labels else []
    check_seconds = float(data.get("check_seconds", 0.0))
    recorded = _parse_metrics(data)
    balls = {name: _parse_evaluation(ball) for name, ball in data.get("balls", {}).items()}
    return Evaluation(
        results, labels, data["classes"], data["settings"], flags, check_seconds, balls, recorded_metrics=recorded
    )


def _parse_metrics(data: Any) -> RecordedMetrics | None:
    if "metrics" not in data:
        return None
    metrics = {name: {m: float(v) for m, v in values.items()} for name, values in data["metrics"].items()}
    intervals = {
        name: {metric: (float(low), float(high)) for metric, (low, high) in pairs.items()}
        for name, pairs in data["metric_intervals"].items()
    }
    return metrics, intervals


def read_evaluation_json(path: Path) -> dict[str, Any] | None:
    """Read a file that looks like an evaluation.json, without checking its values.

    Args:
        path: Any file.

    Returns:
        Its content, or None if it is something else, which an evaluation must not replace.
    """
    try:
        data = json.loads(read_plain_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and {"schema", "accuracy", "attacks"} <= data.keys() else None


def is_newer_schema(schema: Any) -> bool:
    """Return whether a later version of deat wrote a file of this schema.

    Raises:
        ValueError: No version of deat writes such a schema.
    """
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError(f"schema {schema!r}")
    return schema > SCHEMA_VERSION


def pack_bits(bits: list[bool]) -> str:
    """Pack verdicts into a short text.

    Args:
        bits: One verdict for each image.

    Returns:
        Their number, a colon, and eight verdicts to a byte in hexadecimal digits, the first one highest.

    Example:
        >>> pack_bits([True] * 9 + [False])
        '10:ff80'
    """
    return f"{len(bits)}:{np.packbits(np.array(bits, dtype=bool)).tobytes().hex()}"


def unpack_bits(text: str) -> list[bool]:
    """Read verdicts that `pack_bits` packed, or that a file of schema 1 holds as one digit each.

    Raises:
        ValueError: There are more or fewer bytes than the number says.
    """
    if ":" not in text:
        return [digit == "1" for digit in text]
    count, _, digits = text.partition(":")
    packed = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
    if len(packed) != -(-int(count) // 8):
        raise ValueError(f"{len(packed)} bytes do not hold {count} verdicts")
    return [bool(bit) for bit in np.unpackbits(packed, count=int(count))]


def pack_labels(labels: list[int]) -> str:
    """Pack labels into a text in which runs of one label are counted.

    Example:
        >>> pack_labels([0, 0, 0, 1, 0])
        '0*3 1 0'
    """
    runs = [(label, sum(1 for _ in same)) for label, same in groupby(labels)]
    return " ".join(str(label) if count == 1 else f"{label}*{count}" for label, count in runs)


def unpack_labels(packed: Any, num_images: int) -> list[int]:
    """Read labels that `pack_labels` packed, or that a file of schema 1 holds as a list.

    Args:
        packed: The packed labels.
        num_images: How many labels there must be.

    Raises:
        ValueError: There are more or fewer labels.
    """
    if isinstance(packed, list):
        return packed
    runs = [(int(label), int(count or 1)) for label, _, count in (run.partition("*") for run in packed.split())]
    if sum(count for _, count in runs) != num_images or any(count < 1 for _, count in runs):
        raise ValueError(f"the labels are not those of {num_images} images")
    return [label for label, count in runs for _ in range(count)]
