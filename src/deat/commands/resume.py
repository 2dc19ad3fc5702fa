"""`deat resume`: go on with a run, from what its folder says of itself."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

from tyro.conf import Positional, arg

from deat.checkpoint.kinds import fits
from deat.commands.display import say_if_lent
from deat.commands.flags import MaybeText
from deat.commands.session import Options, Session
from deat.errors import CheckpointError
from deat.paths import at_home
from deat.ranks import Ranks
from deat.training.folder import RUN, check_links, has_checkpoint
from deat.training.record import REPAIR, confirmed, read_record, recorded_root
from deat.training.run import resolve


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was interrupted or killed, to the bytes that an uninterrupted one would have given."""

    goes_on: ClassVar[bool] = True

    run_folder: Annotated[Positional[str], arg(name="run", metavar="RUN")]
    """The run's folder."""
    method: MaybeText = None
    """The run's method again, where it came from a file: my_file.py:NAME."""
    model: MaybeText = None
    """The run's model again, where it came from a file: my_file.py:NAME."""
    inexact: bool = False
    """Go on even where the numbers will differ from an uninterrupted run's."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Go on."""
        return run_resume(self)


def run_resume(order: Resume) -> int:
    """Resolve the recorded request again, and play on from the newest checkpoint."""
    folder = Path(order.run_folder).expanduser()
    if not (folder / RUN).is_file():
        more = " Checkpoints of deat.fit are gone on with by the same call of fit." * has_checkpoint(folder)
        raise CheckpointError(f"there is no run in {str(folder)!r}: give the folder that `deat train` made.{more}")
    check_links(folder)
    found = read_record(folder)
    request = replace(
        found.request,
        method=confirmed("method", found.request.method, order.method),
        model=confirmed("model", found.request.model, order.model),
        data=at_home(found.request.data),
        data_root=order.data_root or recorded_root(found.request),
        download=False,  # nothing is fetched on a file's word
        init=at_home(found.request.init) if found.request.init else None,
    )
    kept = _kept(folder, found.options)
    ranks = Ranks.join(found.settings.device)
    with ranks.leader_first():
        run = resolve(request, recorded=not order.data_root, statistics=found.statistics, **asdict(found.settings))
    run = replace(found.as_begun(run), goes_on=True)  # the checkpoint has the weights
    if ranks.main:
        say_if_lent(run)
    options = Options(out=str(folder), inexact=order.inexact, json=order.json, **kept)
    return Session(run, options, resuming=True).play(run.trainer(ranks=ranks))


def _kept(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The options that a run goes on with, checked before any data is read."""
    hints = get_type_hints(Options)
    kept: dict[str, Any] = {name: recorded[name] for name in ("test_images", "baseline") if name in recorded}
    for name, value in kept.items():
        if not fits(value, hints[name]):
            raise CheckpointError(
                f"{str(folder / RUN)!r} is not a run's record (options.{name} is {value!r}). {REPAIR}"
            )
    return kept
