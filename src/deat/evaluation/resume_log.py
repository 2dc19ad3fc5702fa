"""Rulings written down as they are made, so that an evaluation killed at any moment goes on where it was.

One JSON line a ruling, of an attack or of a stage of it, flushed to disk. A torn last line is dropped; a ruling counts
only for the very question (model, threat, attacks, seed, block size) and the very images it was made for. Code cannot
be compared whole, so a model is known again by its weights, by the files its layers are written in, and by what it
answers.
"""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import CheckpointError
from deat.evaluation.fast_model import exact_float32
from deat.evaluation.judge import AttackLike, BlockResult, get_stages
from deat.utils.distributed import Distributed
from deat.utils.files import append_text, check_no_symlinks
from deat.utils.locks import lock_with_holder
from deat.utils.torch_utils import eval_mode

ResultKey = tuple[int, str]
FINGERPRINT_IMAGES = 8
"""The first images whose logits a model is known by."""
MAX_FINGERPRINT_LOGITS = 64
"""The most of these logits that a line keeps."""
LOGITS_TOLERANCE = 1e-3
"""How far they may be from those of another day, by the largest of them: float32 moves by far less."""


def resume_log_path(out: Path) -> Path:
    """Where the resume log of an unfinished evaluation is that will be written to `out`."""
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
    """Rulings by (block, attack or stage of one), in memory and, where a path is given, on disk."""

    def __init__(self, request_fingerprint: str, path: Path | None, logits: list[float] | None = None) -> None:
        self.request_fingerprint, self.path, self.logits = request_fingerprint, path, logits or []
        self._known: dict[ResultKey, tuple[str, BlockResult]] = {}
        if path is not None and path.exists():
            self._read(path)

    def find(self, block: int, attack: str, images_fingerprint: str) -> BlockResult | None:
        """The ruling on these images, if it was made before."""
        held = self._known.get((block, attack))
        return held[1] if held and held[0] == images_fingerprint else None

    def add(self, block: int, attack: str, images: str, ruling: BlockResult) -> bool:
        """Keep a ruling; whether it was not known yet."""
        if self.find(block, attack, images) is not None:
            return False
        self._known[block, attack] = images, ruling
        if self.path is not None:
            line = {"question": self.request_fingerprint, "logits": self.logits, "block": block, "attack": attack}
            _append_line(self.path, json.dumps({**line, "images": images, **asdict(ruling)}))
        return True

    def share(self, distributed: Distributed) -> None:
        """Let every process know what the first one read."""
        known = distributed.broadcast([(*key, images, asdict(ruling)) for key, (images, ruling) in self._known.items()])
        self._known = {(block, attack): (images, BlockResult(**ruling)) for block, attack, images, ruling in known}

    def close(self) -> None:
        """Remove the file: what it held is in the evaluation now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        try:
            *lines, torn = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise CheckpointError(f"cannot read rulings from {str(path)!r}: {error.strerror}.") from None
        if torn:
            _append_line(path, "")  # the next ruling begins a line of its own
        for entry in map(_parse_line, lines):
            if entry.pop("question", None) == self.request_fingerprint and are_close(
                entry.pop("logits", None), self.logits
            ):
                key = entry.pop("block"), entry.pop("attack")
                self._known[key] = entry.pop("images"), BlockResult(**entry)


def stage_result_name(attack: AttackLike, stage: AttackLike) -> str:
    """What a ruling is called: by its attack, and by its stage where there are several."""
    return f"{attack.name}:{stage.name}" if len(get_stages(attack)) > 1 else attack.name


def read_logged_stages(path: Path) -> list[tuple[str, str]]:
    """(attack, stage or attack) of each ruling that a file holds, whatever it was asked."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    names = [
        str(entry["attack"]).rpartition(" ")[0] for entry in map(_parse_line, text.split("\n")) if "attack" in entry
    ]
    return [(name.partition(":")[0], name.rpartition(":")[2]) for name in names]


def fingerprint(*parts: Any) -> str:
    """A hash of JSON values and tensors."""
    digest = sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(str((part.dtype, tuple(part.shape))).encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(json.dumps(part, sort_keys=True).encode())
    return digest.hexdigest()


def fingerprint_model(model: nn.Module) -> str:
    """A hash of a model's layers, weights and buffers."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layers = re.sub(r"0x[0-9a-f]+", "", repr(model))  # without addresses in memory
    return fingerprint(layers, sorted(held), *(held[name] for name in sorted(held)))


def fingerprint_code(model: nn.Module) -> str:
    """A hash of the files in which a model's layers, and functions that they hold, are written."""
    held = [part for m in model.modules() for part in (type(m), *filter(callable, vars(m).values()))]
    files = {getattr(sys.modules.get(getattr(part, "__module__", None) or ""), "__file__", None) for part in held}
    return fingerprint(sorted(sha256(data).hexdigest() for data in map(_read_source, files) if data))


def _read_source(file: str | None) -> bytes:
    try:
        return Path(file).read_bytes() if file and file.endswith(".py") else b""
    except OSError:
        return b""


def fingerprint_logits(model: nn.Module, x: Tensor) -> list[float]:
    """Some of a model's logits on the first images, the same for the same model whatever else is judged."""
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), exact_float32(x.device), torch.no_grad(), eval_mode(model):
        torch.manual_seed(0)  # so that a model that draws can be known again as well
        flat = model(x[:FINGERPRINT_IMAGES]).flatten().double()
    found: list[float] = flat[:: -(-len(flat) // MAX_FINGERPRINT_LOGITS)].tolist()
    return [float(f"{value:.6g}") for value in found]


def are_close(saved: Any, logits: list[float]) -> bool:
    """Whether logits that a ledger holds are a model's own, but for rounding."""
    try:
        one, other = torch.tensor(saved, dtype=torch.float64), torch.tensor(logits, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return False
    largest = float(other.nan_to_num(0, 0, 0).abs().max()) if len(other) else 0.0
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0, atol=LOGITS_TOLERANCE * largest, equal_nan=True
    )


def _append_line(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, line + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write rulings to {str(path)!r}: {error.strerror}.") from None


def _parse_line(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}
