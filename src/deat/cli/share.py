"""`deat card`, `push`, `pull` and `claim`: describe a run for others, and share it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

from deat.cli.flag_types import OptionalInt, OptionalStr, YesNoChoice
from deat.errors import CheckpointError, UsageError
from deat.integrations.hub import is_path, pull_from_hub, push_to_hub, save_pretrained
from deat.report.model_card import render_model_card
from deat.report.robustbench_claim import Publication, make_robustbench_claim
from deat.runs.record_files import EpochChoice
from deat.utils.console import print_stderr
from deat.utils.safe_write import check_no_symlinks, write_atomic


@dataclass(frozen=True)
class CardCommand:
    """Write the model card of a run: results with intervals and flags, threat model, training, use, limits."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    out: OptionalStr = None
    """The new file (standard output)."""
    title: OptionalStr = None
    """The card's title (the method, the network and the data)."""
    repo: OptionalStr = None
    """The repository that the card is for, such as you/model."""
    license: OptionalStr = None
    """The licence of the model for the header, such as mit or apache-2.0."""
    epoch: EpochChoice = "best"
    """Which of the run's weights the card is for."""

    def run(self) -> int:
        """Write the card."""
        card = render_model_card(
            Path(self.run_folder).expanduser(),
            title=self.title,
            repo=self.repo,
            license=self.license,
            epoch=self.epoch,
        )
        if self.out is None:
            print(card, end="")
            return 0
        _write_new(Path(self.out).expanduser(), card)
        print(f"wrote the model card to {self.out}")
        return 0


@dataclass(frozen=True)
class PushCommand:
    """Upload a run with its model card to the Hugging Face Hub, or write it to a folder as it would be uploaded."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    repo: Annotated[Positional[str], arg(metavar="REPO")]
    """The repository, such as you/model, or a new folder, such as ./model."""
    public: bool = False
    """Make a new repository public; it is private otherwise."""
    license: OptionalStr = None
    """The licence of the model for the card, such as mit or apache-2.0."""
    message: OptionalStr = None
    """The commit's message."""
    revision: OptionalStr = None
    """The branch to upload to."""
    replace_card: bool = False
    """Also replace a README.md that the repository has."""
    epoch: EpochChoice = "best"
    """Which of the run's weights."""

    def run(self) -> int:
        """Upload the run."""
        run = Path(self.run_folder).expanduser()
        if is_path(self.repo):
            print(f"wrote {save_pretrained(run, self.repo, epoch=self.epoch, license=self.license)}")
            return 0
        address = push_to_hub(
            run,
            self.repo,
            epoch=self.epoch,
            private=not self.public,
            license=self.license,
            message=self.message,
            revision=self.revision,
            replace_card=self.replace_card,
        )
        print(f"uploaded: {address}")
        return 0


@dataclass(frozen=True)
class PullCommand:
    """Download a run that `deat push` uploaded into a folder that every command takes. No code is fetched."""

    is_resumable: ClassVar[bool] = False

    repo: Annotated[Positional[str], arg(metavar="REPO")]
    """The repository, such as you/model, or a folder, such as ./model."""
    out: OptionalStr = None
    """The new folder (the repository's name)."""
    revision: OptionalStr = None
    """A branch, tag or commit."""

    def run(self) -> int:
        """Download the run."""
        out = self.out or self.repo.rstrip("/").rpartition("/")[2]
        print(f"wrote the run to {pull_from_hub(self.repo, out, revision=self.revision)}")
        return 0


@dataclass(frozen=True)
class ClaimCommand:
    """Write the file by which a run enters RobustBench's leaderboard. It needs AutoAttack on all test images."""

    is_resumable: ClassVar[bool] = False

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    title: OptionalStr = None
    """The paper's title; required."""
    authors: OptionalStr = None
    """The authors, the first one first; required."""
    year: OptionalInt = None
    """The year; required."""
    link: OptionalStr = None
    """Where the paper can be read; required."""
    venue: str = "Unpublished"
    """Where it was published, such as "ICML 2026"."""
    additional_data: YesNoChoice = None
    """yes or no: whether training used more than the data set's training images (no, unless the run has --init)."""
    architecture: OptionalStr = None
    """The network's name in the table (deat's name of it)."""
    footnote: OptionalStr = None
    """A remark for the table."""
    suffix: OptionalStr = None
    """An ending of the file's name, for several models of one paper."""
    out: str = "."
    """The folder of RobustBench's repository, in whose model_info/ the file is written."""

    def run(self) -> int:
        """Write the claim."""
        required = {"title": self.title, "authors": self.authors, "year": self.year, "link": self.link}
        if missing := [f"--{name}" for name, value in required.items() if value is None]:
            raise UsageError(f"{' and '.join(missing)} missing: RobustBench names the paper of a model.")
        publication = Publication(
            title=self.title or "",
            authors=self.authors or "",
            year=self.year or 0,
            link=self.link or "",
            venue=self.venue,
            additional_data=None if self.additional_data is None else self.additional_data == "yes",
            footnote=self.footnote,
            architecture=self.architecture,
            suffix=self.suffix,
        )
        claim = make_robustbench_claim(Path(self.run_folder).expanduser(), publication)
        for remark in claim.remarks:
            print_stderr(remark)
        target = Path(self.out).expanduser() / claim.path
        _write_new(target, json.dumps(claim.content, indent=2) + "\n")
        print(f"wrote {target}")
        return 0


def _write_new(path: Path, text: str) -> None:
    check_no_symlinks([path])
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already. Choose another file, or remove it.")
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror or error}.") from None
