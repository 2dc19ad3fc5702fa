"""Sets of images that would all have one size, were it not for a few."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from deat.data.decode import size_of
from deat.data.files import Files
from deat.data.stream import SIDE
from deat.errors import DataError

LOOKED_AT = 100
"""About so many images tell whether nearly all share one size."""
SHARED = 0.9
LARGEST = 512
"""Larger images are seldom meant to be trained on as they are."""
SHOWN = 5


def differing(files: Files, members: Sequence[int], most: int) -> str | None:
    """Which few images differ from all others in size, and what to do about it; None where sizes are mixed.

    Every file is looked at only of a set that would have at most so many bytes if it had one size.
    """
    looked_at = members[:: max(1, len(members) // LOOKED_AT)]
    common, count = Counter(_size(files, member) for member in looked_at).most_common(1)[0]
    if common is None or count < SHARED * len(looked_at) or max(common) > LARGEST:
        return None
    if 3 * common[0] * common[1] * len(members) > most:
        return None
    sizes = ((files.names[member], _size(files, member)) for member in members)
    odd = (f"{name!r} ({_shown(size)})" for name, size in sizes if size and size != common)
    shown = list(islice(odd, SHOWN + 1))
    return _advice(shown, common) if shown else None


def _advice(odd: list[str], common: tuple[int, int]) -> str:
    more = ", ..." if len(odd) > SHOWN else ""
    return (
        f"nearly all images are {_shown(common)}, but not {', '.join(odd[:SHOWN])}{more}, so all are resized to "
        f"{SIDE}x{SIDE}. If that is not meant, say --size {min(common)} (size={min(common)}), or remove what differs."
    )


def _size(files: Files, member: int) -> tuple[int, int] | None:
    """An image's width and height; None of one that cannot be read, which is said when it is decoded."""
    try:
        return size_of(files.read(member), files.names[member])
    except DataError:
        return None


def _shown(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
