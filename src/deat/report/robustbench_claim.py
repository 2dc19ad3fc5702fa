"""A claim for RobustBench's leaderboard: the JSON file that it keeps of each model."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deat.errors import DataError, UsageError
from deat.evaluation.results import Evaluation
from deat.runs.record_files import read_record
from deat.runs.saved_run import load_evaluations
from deat.utils.text import format_eps, quote_for_shell
from deat.utils.user_code import is_file_spec

THREATS = {
    ("cifar10", "linf"): 8 / 255,
    ("cifar10", "l2"): 0.5,
    ("cifar100", "linf"): 8 / 255,
}
"""The radii of the leaderboards that deat's own data sets can enter."""
NUM_TEST_IMAGES = 10_000
_THREAT_FOLDERS = {"linf": "Linf", "l2": "L2"}
_ARCHITECTURES = {"preact_resnet": "PreActResNet-", "wide_resnet": "WideResNet-", "densenet": "DenseNet-"}


@dataclass(frozen=True)
class Publication:
    """What the leaderboard says of a model's paper.

    Attributes:
        title: The paper's title.
        authors: Its authors, the first one first: "Fu Wang, Yanghao Zhang and Wenjie Ruan".
        year: The year.
        link: Where it can be read.
        venue: Where it was published, such as "ICML 2026" or "arXiv, Nov 2026".
        additional_data: Whether training used more data than the data set's own training images.
        footnote: A remark, such as "Uses 1M synthetic images."
        architecture: The network's name in the table; by default deat's name of the network.
        suffix: An ending of the file's name, for several models of one paper, such as "WRN34".
    """

    title: str
    authors: str
    year: int
    link: str
    venue: str = "Unpublished"
    additional_data: bool | None = None
    footnote: str | None = None
    architecture: str | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        for name in ("title", "authors", "link"):
            if not getattr(self, name).strip():
                raise UsageError(f"{name} is empty: RobustBench shows it in the table.")
        if not 2013 <= self.year <= 2100:
            raise UsageError(f"year {self.year!r} is not accepted: give the year of the paper, such as 2026.")
        if self.suffix is not None and not re.fullmatch(r"[\w-]+", self.suffix):
            raise UsageError(f"suffix {self.suffix!r} is not accepted: use letters, digits, - and _.")

    @property
    def model_name(self) -> str:
        """The leaderboard's name of the model: last name of the first author, year, first word of the title."""
        first_author = re.split(r",| and ", self.authors.strip())[0].split()
        word = re.match(r"\W*(\w+)", self.title)
        if not first_author or word is None:
            raise UsageError("the title and the authors need at least one word each.")
        last_name = re.sub(r"[^\w-]", "", first_author[-1])
        name = f"{last_name}{self.year}{word[1]}"
        return f"{name}_{self.suffix}" if self.suffix else name


@dataclass(frozen=True)
class RobustBenchClaim:
    """A claim: its place in RobustBench's repository, and the content of the file.

    Attributes:
        path: The file, relative to the repository.
        content: What the file says.
        remarks: What a reader should know, such as flags of the evaluation.
    """

    path: Path
    content: dict[str, Any]
    remarks: tuple[str, ...] = ()


def make_robustbench_claim(folder: Path, publication: Publication) -> RobustBenchClaim:
    """Make the claim of a run, from its evaluation by AutoAttack on all test images.

    Args:
        folder: The run's folder.
        publication: What the leaderboard says of the paper.

    Returns:
        The claim.

    Raises:
        DataError: If the run has no such evaluation, or its data, norm or radius have no leaderboard.
        UsageError: If it is not said whether a run that began with given weights used additional data.
    """
    record = read_record(folder)
    evaluations = load_evaluations(folder)
    reasons = {name: _why_not(evaluation) for name, evaluation in evaluations.items()}
    usable = [evaluation for name, evaluation in evaluations.items() if reasons[name] is None]
    if not usable:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it has none"
        raise DataError(
            f"{str(folder)!r} has no evaluation that RobustBench accepts ({listed}). Needed is standard AutoAttack on all "
            f"{NUM_TEST_IMAGES:,} test images: deat evaluate {quote_for_shell(str(folder))} --attacks natural,aa"
        )
    evaluation = max(usable, key=lambda e: len(e.results))
    if record.request.init and publication.additional_data is None:
        raise UsageError(
            f"the run began with the weights {record.request.init!r}: say whether they saw additional data "
            "(--additional-data yes or no)."
        )
    data, norm, eps = _leaderboard(evaluation)
    robust = evaluation.accuracy["aa" if "aa" in evaluation.accuracy else "worst"]
    content: dict[str, Any] = {
        "link": publication.link,
        "name": publication.title,
        "authors": publication.authors,
        "additional_data": bool(publication.additional_data),
        "number_forward_passes": 1,
        "dataset": data,
        "venue": publication.venue,
        "architecture": publication.architecture or _architecture(record.model),
        "eps": format_eps(eps),
        "clean_acc": f"{100 * evaluation.accuracy['natural']:.2f}",
        "reported": f"{100 * robust:.2f}",
        "autoattack_acc": f"{100 * robust:.2f}",
    }
    if publication.footnote:
        content["footnote"] = publication.footnote
    path = Path("model_info", data, _THREAT_FOLDERS[norm], f"{publication.model_name}.json")
    return RobustBenchClaim(path, content, tuple(f"FLAG {flag.name}: {flag.seen}" for flag in evaluation.flags))


def _leaderboard(evaluation: Evaluation) -> tuple[str, str, float]:
    """The data set, the norm and the radius of an evaluation, by the leaderboard's names."""
    threat = evaluation.settings["threat"]
    data = str(evaluation.settings.get("about", {}).get("data") or "").partition(":")[0]
    return data, str(threat["norm"]), float(threat["eps"])


def _why_not(evaluation: Evaluation) -> str | None:
    """Why RobustBench does not accept an evaluation; None if it does."""
    data, norm, eps = _leaderboard(evaluation)
    if (data, norm) not in THREATS:
        known = ", ".join(sorted({f"{name} {ball}" for name, ball in THREATS}))
        return f"{data or 'unnamed data'} with {norm} has no leaderboard here ({known})"
    if not math.isclose(eps, THREATS[data, norm], rel_tol=1e-6):
        return f"eps is {format_eps(eps)}, and the leaderboard's {format_eps(THREATS[data, norm])}"
    if evaluation.settings.get("sample") or evaluation.num_images != NUM_TEST_IMAGES:
        return f"it is of {evaluation.num_images:,} images"
    if "natural" not in evaluation.accuracy:
        return "the attack natural is missing"
    autoattack = evaluation.settings["attacks"].get("aa")
    if autoattack is None:
        return "AutoAttack (aa) is missing"
    if not autoattack.get("standard"):
        return "its AutoAttack is not the standard one"
    return None


def _architecture(model: str) -> str:
    if is_file_spec(model):
        return model.rpartition(":")[2]
    for beginning, name in _ARCHITECTURES.items():
        if model.startswith(beginning):
            return name + model.removeprefix(beginning).strip("_").replace("_", "-")
    return model
