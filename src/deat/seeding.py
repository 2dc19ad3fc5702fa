"""Every random draw as a pure function of where it happens."""

from hashlib import blake2b


def derive(seed: int, stream: str, *counters: int) -> int:
    """A 63-bit seed for one draw, from the run's seed, the stream's name and its counters (epoch, step)."""
    text = ":".join((str(seed), stream, *map(str, counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
