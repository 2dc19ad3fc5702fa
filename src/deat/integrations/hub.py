"""Share a run as a folder or a repository of the Hugging Face Hub, and load it again.

A shared run is a run's folder without its checkpoints: weights as safetensors, records as JSON, and a model card. Pulling
one runs no code: other files are not fetched.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from deat.errors import CheckpointError, DeatError, UsageError
from deat.models.weights import read_weights
from deat.report.model_card import CARD_FILE, render_model_card
from deat.runs.record_files import (
    HISTORY_FILE,
    RUN_FILE,
    SCORES_FILE,
    SHARED_CONFIG_FILE,
    SUMMARY_FILE,
    TIMING_FILE,
    WATCH_FILE,
    WEIGHTS_FILE,
    EpochChoice,
    read_record,
)
from deat.runs.saved_run import SavedRun, load_run
from deat.runs.trained_run import find_run_weights, shared_epoch
from deat.utils.safe_write import check_no_symlinks, write_atomic
from deat.utils.text import summarize_error
from deat.version import VERSION

_RECORDS = (RUN_FILE, HISTORY_FILE, TIMING_FILE, WATCH_FILE, SCORES_FILE, SUMMARY_FILE)
SHARED_FILES = (WEIGHTS_FILE, SHARED_CONFIG_FILE, CARD_FILE, *_RECORDS, "evaluation*.json")
"""The files of a shared run; nothing else is written or fetched."""
REPO_PATTERN = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_INSTALL_HINT = "the Hub needs huggingface_hub: pip install 'deat[hub]'. A path, such as ./model, needs nothing."
_LOGIN_HINT = "Log in with `hf auth login`, or set HF_TOKEN to a token that may do this."
_PARTIAL_SUFFIX = ".part"

RunLike = SavedRun | str | os.PathLike[str]


def save_pretrained(
    run: RunLike, folder: str | os.PathLike[str], *, epoch: EpochChoice = "best", license: str | None = None
) -> Path:
    """Write a run as a folder that can be shared: weights, records, evaluations and a model card.

    Args:
        run: A run's folder, or what `load_run` returns, whose epoch is then used.
        folder: The new folder. It appears at once, with all of its files.
        epoch: Which weights of a folder: "best" or "last".
        license: The licence of the model for the card, such as "mit".

    Returns:
        The folder.

    Raises:
        CheckpointError: If the run cannot be read, or the folder cannot be written.
        UsageError: If the folder exists and is not empty.

    Example:
        >>> deat.save_pretrained("runs/photos", "photos-model", license="mit")
        PosixPath('photos-model')
        >>> deat.from_pretrained("./photos-model").model(images)
    """
    target = Path(folder).expanduser()
    _write_shared_folder(run, target, epoch, license, None)
    return target


def from_pretrained(
    source: str | os.PathLike[str],
    *,
    model: nn.Module | str | None = None,
    revision: str | None = None,
    device: str = "auto",
) -> SavedRun:
    """Load a shared run from a folder or from the Hub, whose files are kept in its usual cache.

    Args:
        source: A repository, such as "you/photos", or a folder, such as "./photos-model". A folder that exists is
            taken before a repository of the same name.
        model: The network, where it is code.
        revision: A branch, tag or commit of the repository.
        device: Where the network is put.

    Returns:
        The run, with its network in eval mode.

    Raises:
        CheckpointError: If it cannot be fetched, or is no shared run.
        UsageError: If the network is code and is not given, or huggingface_hub is missing.

    Example:
        >>> deat.from_pretrained("you/photos").model(images).argmax(1)
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _fetch(_check_repo(os.fspath(source)), revision)
    return load_run(folder, model=model, epoch=shared_epoch(folder) or "best", device=device)


def push_to_hub(
    run: RunLike,
    repo: str,
    *,
    epoch: EpochChoice = "best",
    private: bool = True,
    license: str | None = None,
    message: str | None = None,
    revision: str | None = None,
    replace_card: bool = False,
) -> str:
    """Upload a run to a repository of the Hugging Face Hub, which is created if it does not exist.

    Args:
        run: A run's folder, or what `load_run` returns, whose epoch is then used.
        repo: The repository, such as "you/photos".
        epoch: Which weights of a folder: "best" or "last".
        private: Whether a new repository is private.
        license: The licence of the model for the card, such as "mit".
        message: The commit's message.
        revision: The branch to upload to.
        replace_card: Also replace a README.md that the repository has, which may have been written by hand.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: If the run cannot be read, or the upload fails.
        UsageError: If the repository's name is not accepted, or huggingface_hub is missing.

    Example:
        >>> deat.push_to_hub("runs/photos", "you/photos")
        'https://huggingface.co/you/photos/commit/...'
    """
    _check_repo(repo)
    hub = _import_hub()
    with tempfile.TemporaryDirectory(prefix="deat-push-") as temporary:
        folder = Path(temporary, "run")
        _write_shared_folder(run, folder, epoch, license, repo)
        with _hub_errors(f"upload to {repo!r}"):
            api = hub.HfApi(library_name="deat", library_version=VERSION)
            api.create_repo(repo, private=private, exist_ok=True)
            if not replace_card and api.file_exists(repo, CARD_FILE, revision=revision):
                (folder / CARD_FILE).unlink()
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=message or "Upload a run of deat",
                revision=revision,
            )
    return str(getattr(commit, "commit_url", commit))


def pull_from_hub(repo: str, folder: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Download a shared run into a folder, which every command takes as a run.

    Args:
        repo: A repository, such as "you/photos", or the path of a shared folder, such as "./photos-model".
        folder: The new folder. It appears at once, with all of its files.
        revision: A branch, tag or commit of the repository.

    Returns:
        The folder.

    Raises:
        CheckpointError: If it cannot be fetched or written, or is no shared run.
        UsageError: If the folder exists and is not empty, or huggingface_hub is missing.
    """
    target = Path(folder).expanduser()
    local = Path(repo).expanduser()
    with _new_folder(target) as temporary:
        source = local if is_path(repo) else _fetch(_check_repo(repo), revision)
        _check_shared_run(source, repo)
        for file in _list_shared_files(source):
            shutil.copyfile(file, temporary / file.name)
    return target


def is_path(repo: str) -> bool:
    """Return whether a text names a folder rather than a repository: it begins with ".", "/" or "~".

    Args:
        repo: The text.
    """
    return repo.startswith((".", "/", "~"))


def _write_shared_folder(run: RunLike, target: Path, epoch: EpochChoice, license: str | None, repo: str | None) -> None:
    source = run.path if isinstance(run, SavedRun) else Path(run).expanduser()
    epoch = run.epoch if isinstance(run, SavedRun) else epoch
    card = render_model_card(source, repo=repo or f"./{target.name}", license=license, epoch=epoch)
    record = read_record(source)
    weights = find_run_weights(source, epoch)
    read_weights(weights)  # damaged weights are not shared
    config = {
        "library": "deat",
        "deat": VERSION,
        "epoch": epoch,
        "model": record.model,
        "method": record.request.method,
        "threat": record.threat.describe(),
        "classes": list(record.classes),
        "input": list(record.image_shape),
    }
    with _new_folder(target) as temporary:
        for file in _list_shared_files(source, (*_RECORDS, "evaluation*.json")):
            shutil.copyfile(file, temporary / file.name)
        shutil.copyfile(weights, temporary / WEIGHTS_FILE)
        write_atomic(temporary / SHARED_CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        write_atomic(temporary / CARD_FILE, card.encode())


def _list_shared_files(folder: Path, patterns: tuple[str, ...] = SHARED_FILES) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(file for file in folder.glob(pattern) if file.is_file())


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `target` at the end, and is removed after an error."""
    check_no_symlinks([target])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{str(target)!r} exists already. Name a new folder.")
    temporary = target.with_name(f".{target.name}{_PARTIAL_SUFFIX}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        if target.is_dir():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(target)!r}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(repo: str, revision: str | None) -> Path:
    """The folder in the Hub's cache with a repository's files of a shared run."""
    hub = _import_hub()
    with _hub_errors(f"download {repo!r}"):
        return Path(
            hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(SHARED_FILES),
                library_name="deat",
                library_version=VERSION,
            )
        )


def _check_shared_run(folder: Path, name: str) -> None:
    missing = [file for file in (RUN_FILE, WEIGHTS_FILE) if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"{name!r} is no run that deat shared: it has no {' and no '.join(missing)}.")
    read_record(folder)
    read_weights(folder / WEIGHTS_FILE)


def _check_repo(repo: str) -> str:
    if is_path(repo) or not re.fullmatch(REPO_PATTERN, repo):
        raise UsageError(f"{repo!r} is neither a folder nor a repository: write you/model, or a path such as ./model.")
    return repo


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"{_INSTALL_HINT} ({error})") from None
    return huggingface_hub


@contextmanager
def _hub_errors(action: str) -> Iterator[None]:
    """Convert what the Hub's client raises into errors that say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except DeatError:
        raise
    except errors.LocalTokenNotFoundError:
        raise CheckpointError(f"cannot {action}: you are not logged in. {_LOGIN_HINT}") from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"cannot {action}: there is no such revision.") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"cannot {action}: there is no such repository, or it is private or not yours. {_LOGIN_HINT}"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        hint = f" {_LOGIN_HINT}" if status in (401, 403) else ""
        raise CheckpointError(f"cannot {action}: {summarize_error(error)}.{hint}") from None
    except Exception as error:  # of many kinds, from the network and the Hub's client
        raise CheckpointError(f"cannot {action}: {summarize_error(error)}. Is the network reachable?") from None
