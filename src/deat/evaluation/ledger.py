"""Rulings written down as they are made, so that an evaluation killed at any moment goes on where it was.

One JSON line a ruling, flushed to disk. A torn last line is dropped; a ruling counts only for the very question
(model, threat, attacks, seed, block size) and the very images it was made for.
"""

import json
import re
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import CheckpointError
from deat.evaluation.judge import Ruling
from deat.ranks import Ranks
from deat.writing import append_text

Key = tuple[int, str]


class Ledger:
    """Rulings by (block, attack), in memory and, where a path is given, on disk."""

    def __init__(self, question: str, path: Path | None = None) -> None:
        self.question, self.path = question, path
        self._known: dict[Key, tuple[str, Ruling]] = {}
        if path is not None and path.exists():
            self._read(path)

    def find(self, block: int, attack: str, images: str) -> Ruling | None:
        """The ruling on these images, if it was made before."""
        held = self._known.get((block, attack))
        return held[1] if held and held[0] == images else None

    def add(self, block: int, attack: str, images: str, ruling: Ruling) -> bool:
        """Keep a ruling; whether it was not known yet."""
        if self.find(block, attack, images) is not None:
            return False
        self._known[block, attack] = images, ruling
        if self.path is not None:
            line = {"question": self.question, "block": block, "attack": attack, "images": images, **asdict(ruling)}
            _append(self.path, json.dumps(line))
        return True

    def share(self, ranks: Ranks) -> None:
        """Let every process know what the first one read."""
        known = ranks.broadcast([(*key, images, asdict(ruling)) for key, (images, ruling) in self._known.items()])
        self._known = {(block, attack): (images, Ruling(**ruling)) for block, attack, images, ruling in known}

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
            _append(path, "")  # the next ruling begins a line of its own
        for entry in map(_parse, lines):
            if entry.pop("question", None) == self.question:
                key = entry.pop("block"), entry.pop("attack")
                self._known[key] = entry.pop("images"), Ruling(**entry)


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


def _append(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_text(path, line + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write rulings to {str(path)!r}: {error.strerror}.") from None


def _parse(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}
