"""Verdicts and labels of many images as short texts, for files that people keep and share."""

from itertools import groupby
from typing import Any

import numpy as np


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


def unpack_labels(held: Any, images: int) -> list[int]:
    """The labels of so many images; also from files that list them."""
    if isinstance(held, list):
        return held
    runs = [(int(label), int(count or 1)) for label, _, count in (run.partition("*") for run in held.split())]
    if sum(count for _, count in runs) != images or any(count < 1 for _, count in runs):
        raise ValueError(f"the labels are not those of {images} images")
    return [label for label, count in runs for _ in range(count)]
