"""What an evaluation found, and evaluation.json."""

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from deat.errors import CheckpointError, DataError, NewerVersionError
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.judge import BlockResult
from deat.evaluation.sanity import Flag
from deat.utils.files import write_json
from deat.utils.text import summarize_error


def pack_bits(hits: list[bool]) -> str:
    """How many there are, and eight of them to each byte, in hexadecimal digits, the first one highest: 10:ff80."""
    return f"{len(hits)}:{np.packbits(np.array(hits, dtype=bool)).tobytes().hex()}"


def unpack_bits(text: str) -> list[bool]:
    """What was packed; also from files that hold a 0 or a 1 for each."""
    if ":" not in text:
        return [digit == "1" for digit in text]
    count, _, digits = text.partition(":")
    held = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)
    if len(held) != -(-int(count) // 8):
        raise ValueError(f"{len(held)} bytes do not hold {count} verdicts")
    return [bool(bit) for bit in np.unpackbits(held, count=int(count))]


def pack_labels(labels: list[int]) -> str:
    """Labels one after the other, those that repeat with how often: 0*3 1 0."""
    runs = [(label, sum(1 for _ in same)) for label, same in groupby(labels)]
    return " ".join(str(label) if count == 1 else f"{label}*{count}" for label, count in runs)


def unpack_labels(packed: Any, num_images: int) -> list[int]:
    """The labels of so many images; also from files that list them."""
    if isinstance(packed, list):
        return packed
    runs = [(int(label), int(count or 1)) for label, _, count in (run.partition("*") for run in packed.split())]
    if sum(count for _, count in runs) != num_images or any(count < 1 for _, count in runs):
        raise ValueError(f"the labels are not those of {num_images} images")
    return [label for label, count in runs for _ in range(count)]


SCHEMA_VERSION = 2


@dataclass(frozen=True)
class AttackResult:
    """One attack's rulings over all images: who stands, what it cost, and, of several stages, whom each felled."""

    name: str
    correct: list[bool] = field(repr=False)
    invalid: int
    seconds: float
    forwards: int
    backwards: int
    felled: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, block_results: list[BlockResult]) -> "AttackResult":
        """The sum of an attack's rulings, block after block."""
        return cls(
            name,
            [hit for r in block_results for hit in r.correct],
            sum(r.invalid for r in block_results),
            sum(r.seconds for r in block_results),
            sum(r.forwards for r in block_results),
            sum(r.backwards for r in block_results),
            {
                stage: sum(r.felled[stage] for r in block_results)
                for stage in (block_results[0].felled if block_results else ())
            },
        )


@dataclass(frozen=True)
class Evaluation:
    """Accuracies under attack with everything a reader needs to believe them or not.

    verdicts[name][i] is True where image i is still classified correctly under that attack. `worst` is the headline:
    the share of images that stand against every attack. In a cascade attacks saw survivors only, so single attacks
    have no accuracy of their own. check_seconds went into the sanity checks; older files do not tell.
    """

    results: list[AttackResult]
    labels: list[int]
    classes: list[str]
    settings: dict[str, Any]
    flags: list[Flag] = field(default_factory=list)
    check_seconds: float = 0.0

    def __repr__(self) -> str:
        shares = ", ".join(f"{name} {share:.2%}" for name, share in self.accuracy.items())
        raised = ", ".join(flag.name for flag in self.flags) or ("none" if self.sanity_checked else "not checked")
        return f"Evaluation({len(self.labels):,} images: {shares}; flags: {raised})"

    @cached_property
    def verdicts(self) -> dict[str, list[bool]]:
        """By attack, and "worst" over all: for each image, True where it is still classified correctly."""
        found = {r.name: r.correct for r in self.results}
        return {**found, "worst": [all(column) for column in zip(*found.values(), strict=True)]}

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Accuracy by attack, and "worst": per image the worst of all attacks."""
        shown = self.verdicts
        if self.settings["cascade"]:
            shown = {name: shown[name] for name in ("natural", "worst") if name in shown}
        return {name: sum(hits) / len(hits) for name, hits in shown.items()}

    @property
    def sanity_checked(self) -> bool:
        """Whether the sanity checks were made, without which no flags say nothing; older files do not tell."""
        return bool(self.settings.get("sanity", True))

    @property
    def worst(self) -> float:
        """The headline: accuracy against the worst of all attacks, image by image."""
        return self.accuracy["worst"]

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """Wilson's 95 % interval of each accuracy."""
        n = len(self.labels)
        return {name: wilson_interval(round(share * n), n) for name, share in self.accuracy.items()}

    @property
    def newly_fooled(self) -> dict[str, int]:
        """How many images each attack was the first to fool, in the order given."""
        standing, found = [True] * len(self.labels), {}
        for r in self.results:
            still = [a and b for a, b in zip(standing, r.correct, strict=True)]
            found[r.name] = sum(standing) - sum(still)
            standing = still
        return found

    def per_class(self, name: str = "worst") -> dict[str, tuple[int, int, tuple[float, float]]]:
        """By class: images that stand, images there are, and the interval of their share."""
        hits, found = self.verdicts[name], {}
        for index, label in enumerate(self.classes):
            mine = [hit for hit, y in zip(hits, self.labels, strict=True) if y == index]
            found[label] = sum(mine), len(mine), wilson_interval(sum(mine), len(mine))
        return found

    def as_json(self) -> dict[str, Any]:
        """evaluation.json."""
        return {
            "schema": SCHEMA_VERSION,
            "images": len(self.labels),
            "accuracy": self.accuracy,
            "intervals": {name: list(pair) for name, pair in self.intervals.items()},
            "added": self.newly_fooled,
            "per_class": {name: self._per_class_json(name) for name in self.accuracy},
            "flags": [{**asdict(flag), "link": flag.link} for flag in self.flags],
            "settings": self.settings,
            "check_seconds": self.check_seconds,
            "attacks": [{**asdict(r), "correct": pack_bits(r.correct)} for r in self.results],
            "labels": pack_labels(self.labels),
            "classes": self.classes,
        }

    def _per_class_json(self, name: str) -> dict[str, dict[str, Any]]:
        rows = self.per_class(name)
        return {label: {"correct": a, "images": b, "interval": list(pair)} for label, (a, b, pair) in rows.items()}

    def save(self, path: Path) -> None:
        """Write evaluation.json, whole or not at all."""
        try:
            write_json(path, self.as_json())
        except OSError as error:
            raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror}.") from None


def load_evaluation(path: str | Path) -> Evaluation:
    """An Evaluation read back from its evaluation.json."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if is_newer_schema(found["schema"]):
            raise NewerVersionError(
                f"{str(path)!r} has schema {found['schema']!r}; this deat reads up to {SCHEMA_VERSION}. Upgrade deat."
            )
        return _parse_evaluation(found)
    except NewerVersionError:
        raise
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DataError(f"there is no file {str(path)!r}: name an evaluation.json.") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(path)!r} is not an evaluation.json that deat wrote ({summarize_error(error)}). Leave it out."
        ) from None


def read_evaluation_json(path: Path) -> dict[str, Any] | None:
    """What a file holds that has an evaluation.json's form, which alone another one may replace; None of any other."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return held if isinstance(held, dict) and {"schema", "accuracy", "attacks"} <= held.keys() else None


def is_newer_schema(schema: Any) -> bool:
    """Whether a later deat wrote a file of this schema; a ValueError for what no deat has written."""
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError(f"schema {schema!r}")
    return schema > SCHEMA_VERSION


def _parse_evaluation(data: Any) -> Evaluation:
    results = [AttackResult(**{**r, "correct": unpack_bits(r["correct"])}) for r in data["attacks"]]
    flags = [Flag(flag["name"], flag["seen"], flag["advice"]) for flag in data["flags"]]
    labels = unpack_labels(data["labels"], len(results[0].correct) if results else 0)
    return Evaluation(results, labels, data["classes"], data["settings"], flags, float(data.get("check_seconds", 0.0)))
