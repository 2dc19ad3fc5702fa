"""`deat resume`: go on with a run, from what its folder says of itself."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from deat.checkpoint.kinds import fits
from deat.commands.display import say_if_lent
from deat.commands.session import Options, Session
from deat.errors import CheckpointError
from deat.paths import at_home
from deat.ranks import Ranks
from deat.training.folder import RUN, check_links
from deat.training.record import confirmed, read_record, recorded_root
from deat.training.run import resolve


def run_resume(flags: dict[str, Any]) -> int:
    """Resolve the recorded request again, and play on from the newest checkpoint."""
    folder = Path(flags["run_folder"]).expanduser()
    if not (folder / RUN).is_file():
        raise CheckpointError(f"there is no run in {str(folder)!r}: give the folder that `deat train` made.")
    check_links(folder)
    found = read_record(folder)
    request = replace(
        found.request,
        method=confirmed("method", found.request.method, flags["method"]),
        model=confirmed("model", found.request.model, flags["model"]),
        data=at_home(found.request.data),
        data_root=flags["data_root"] or recorded_root(found.request),
        download=False,  # nothing is fetched on a file's word
        init=None,  # the checkpoint has the weights
    )
    kept = _kept(folder, found.options)
    ranks = Ranks.join(found.settings.device)
    with ranks.leader_first():
        run = resolve(request, recorded=not flags["data_root"], **asdict(found.settings))
    if ranks.main:
        say_if_lent(run)
    options = Options(out=str(folder), inexact=flags["inexact"], json=flags["json"], **kept)
    return Session(run, options, resuming=True).play(run.trainer(ranks=ranks))


def _kept(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """The options that a run goes on with, checked before any data is read."""
    hints = get_type_hints(Options)
    kept: dict[str, Any] = {name: recorded[name] for name in ("test_images", "baseline") if name in recorded}
    for name, value in kept.items():
        if not fits(value, hints[name]):
            raise CheckpointError(f"{str(folder / RUN)!r} is not a run's record (options.{name} is {value!r}).")
    return kept
