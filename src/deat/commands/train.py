"""`deat train`: resolve, check, and hand over to a session."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from deat.commands.display import describe_run, show_plan
from deat.commands.session import Options, Session
from deat.errors import UsageError
from deat.ranks import Ranks
from deat.training.folder import check_free, check_links, is_run, is_unborn
from deat.training.plan import plan
from deat.training.run import Request, resolve
from deat.training.settings import Settings


def run_training(flags: dict[str, Any]) -> int:
    """`deat train`: resolve, check, train, score, report."""
    request, options = (_pick(kind, flags) for kind in (Request, Options))
    ranks = Ranks.join(flags["device"])
    going_on = ranks.by_main(lambda: _check_options(options))
    settings: dict[str, Any] = {f.name: flags.get(f.name) for f in fields(Settings)}
    request = replace(request, persistent=request.persistent or None, compact=request.compact or None)
    with ranks.leader_first():
        run = resolve(request, **settings)
    trainer = run.trainer(ranks=ranks)
    if options.dry_run:
        if ranks.main and not options.json:
            print(describe_run(run, trainer), flush=True)  # before it is tried out, which takes a while
        return show_plan(plan(trainer), options.json, ranks)
    return Session(run, options, resuming=going_on).play(trainer)


def _check_options(options: Options) -> bool:
    """Refuse what cannot be, before any data is read; whether the run that is in --out goes on."""
    if options.test_images < 0:
        raise UsageError(f"test_images must be a whole number >= 0, not {options.test_images}.")
    if options.out == "":
        raise UsageError("--out '' names no folder; leave it away for one under runs/.")
    place = options.place
    if place is not None:
        _check_path(place)
    if options.resume == "auto":
        if place is None or options.overwrite:
            raise UsageError("--resume auto needs the run's folder, --out, and goes without --overwrite.")
        check_links(place)
        if place.exists() and (is_run(place) or is_unborn(place)):
            return True
    if place is not None:
        check_free(place, options.overwrite)
    return False


def _check_path(path: Path) -> None:
    """Refuse what no file system takes as a folder's name."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--out {shortened(str(path))!r} cannot be a folder: {reason}. Choose another.") from None


def shortened(text: str, most: int = 80) -> str:
    """A long text for a message."""
    return text if len(text) <= most else f"{text[:most]}..."


def _pick(kind: type[Any], flags: dict[str, Any]) -> Any:
    return kind(**{f.name: flags[f.name] for f in fields(kind) if f.name in flags})
