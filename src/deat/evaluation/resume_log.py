"""The resume log: results by block and attack, written as they are made, so that a killed evaluation can resume.

Each line is a JSON object with the result of an attack, or of one stage of it, on one block, flushed to disk. An
incomplete last line is ignored. A line is used only by an evaluation of the same model with the same threat model,
attack, seed and block size on the same images. A model's code cannot be compared completely, so a model is identified
by its weights, by the files that define its layers, and by its logits on a few images.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError
from deat.evaluation.attack_verifier import AttackLike, BlockResult, get_stages
from deat.utils.distributed import Distributed
from deat.utils.file_locks import lock_with_holder
from deat.utils.fingerprints import are_close, fingerprint
from deat.utils.safe_read import read_plain_text
from deat.utils.safe_write import append_text, check_no_symlinks

ResultKey = tuple[int, str]
"""A block's number, and the name of an attack or stage with a hash of its settings."""


def resume_log_path(out: Path) -> Path:
    """Return the path of the resume log, for an evaluation that will be written to `out`."""
    return out.with_name(f".{out.stem}-rulings.jsonl")


@contextmanager
def lock_evaluation(out: Path) -> Iterator[None]:
    """Be the only process that writes an evaluation and its resume log.

    Args:
        out: The file of the evaluation.

    Raises:
        BusyError: Another process is writing it.
        CheckpointError: Its folder cannot be written to.
    """
    lock = out.with_name(f".{out.stem}-lock")
    check_no_symlinks([lock])
    with lock_with_holder(lock, out):
        yield


class ResumeLog:
    """Results by block and attack, in memory and in a file if there is one.

    Args:
        request_fingerprint: A hash of the evaluation; results of other evaluations in the file are ignored.
        path: The file to read and append to, or None.
        logits: The model's logits on the first images, from `fingerprint_logits`.

    Raises:
        CheckpointError: The file exists and cannot be read.
    """

    def __init__(self, request_fingerprint: str, path: Path | None, logits: list[float] | None = None) -> None:
        self.request_fingerprint, self.path, self.logits = request_fingerprint, path, logits or []
        self._results: dict[ResultKey, tuple[str, BlockResult]] = {}
        if path is not None and path.exists():
            self._load(path)

    def find(self, block: int, attack: str, images_fingerprint: str) -> BlockResult | None:
        """Return a saved result on these images, or None.

        Args:
            block: The block's number.
            attack: The name of an attack or stage with a hash of its settings.
            images_fingerprint: A hash of the block's images and labels.
        """
        fingerprint_then, result = self._results.get((block, attack), ("", None))
        return result if fingerprint_then == images_fingerprint else None

    def add(self, block: int, attack: str, images: str, result: BlockResult) -> bool:
        """Save a result, unless it is saved already.

        Args:
            block: The block's number.
            attack: The name of an attack or stage with a hash of its settings.
            images: A hash of the block's images and labels.
            result: The result on that block.

        Returns:
            Whether the result was new.

        Raises:
            CheckpointError: The file cannot be written.
        """
        if self.find(block, attack, images) is not None:
            return False
        self._results[block, attack] = images, result
        if self.path is not None:
            line = {"question": self.request_fingerprint, "logits": self.logits, "block": block, "attack": attack}
            entry = {**line, "images": images, **result.as_json()}
            _append_line(self.path, json.dumps({**entry, "checksum": _compute_checksum(entry)}))
        return True

    def sync(self, distributed: Distributed) -> None:
        """Give every process the results that the main process has read."""
        entries = [(*key, images, result.as_json()) for key, (images, result) in self._results.items()]
        self._results = {
            (block, attack): (images, BlockResult.from_json(result))
            for block, attack, images, result in distributed.broadcast_json(entries)
        }

    def delete(self) -> None:
        """Remove the file, once the evaluation is saved."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _load(self, path: Path) -> None:
        try:
            *lines, incomplete = read_plain_text(path, "replace").split("\n")
        except OSError as error:
            raise CheckpointError(f"cannot read the resume log {str(path)!r}: {error.strerror}.") from None
        if incomplete:
            _append_line(path, "")  # so that the next result begins on a new line
        for entry in map(_parse_line, lines):
            if entry.pop("question", None) == self.request_fingerprint and are_close(
                entry.pop("logits", None), self.logits
            ):
                result = _parse_result(entry)
                if result is not None:
                    self._results[entry["block"], entry["attack"]] = entry["images"], result


def stage_result_name(attack: AttackLike, stage: AttackLike) -> str:
    """Return the name of a stage's results: `attack:stage`, or the attack's name if it has one stage only."""
    return f"{attack.name}:{stage.name}" if len(get_stages(attack)) > 1 else attack.name


def read_logged_stages(path: Path) -> list[tuple[str, str]]:
    """List the results in a resume log, of whatever evaluation.

    Args:
        path: The log, which need not exist.

    Returns:
        The names of attack and stage of each result; they are equal for an attack without stages.
    """
    text = read_plain_text(path, "replace") if path.is_file() else ""
    names = [
        str(entry["attack"]).rpartition(" ")[0] for entry in map(_parse_line, text.split("\n")) if "attack" in entry
    ]
    return [(name.partition(":")[0], name.rpartition(":")[2]) for name in names]


def _append_line(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, line + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write the resume log {str(path)!r}: {error.strerror}.") from None


def _parse_line(line: str) -> dict[str, Any]:
    """The entry of a line; nothing for a damaged one, whose block is then attacked again."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(entry, dict) or entry.get("checksum", checksum := _compute_checksum(entry)) != checksum:
        return {}
    return {name: value for name, value in entry.items() if name != "checksum"}


def _compute_checksum(entry: dict[str, Any]) -> str:
    return fingerprint({name: value for name, value in entry.items() if name != "checksum"})[:16]


def _parse_result(entry: dict[str, Any]) -> BlockResult | None:
    """The result in an entry without its question and logits; None if it is not one that deat wrote."""
    values = {name: value for name, value in entry.items() if name not in ("block", "attack", "images")}
    kinds = {"correct": list, "invalid": int, "seconds": float, "forwards": int, "backwards": int}
    optional = {"felled": dict, "scores": list, "statistics": list}
    is_known = kinds.keys() <= values.keys() <= {*kinds, *optional}
    has_types = (
        all(isinstance(value, {**kinds, **optional}[name]) for name, value in values.items()) if is_known else False
    )
    has_key = isinstance(entry.get("block"), int) and all(isinstance(entry.get(n), str) for n in ("attack", "images"))
    if not has_types or not has_key or not all(isinstance(hit, bool) for hit in values["correct"]):
        return None
    return BlockResult.from_json(values)
