"""Where the seconds of a session went."""

from time import perf_counter

from deat.numbers import short_seconds


class Spent:
    """Seconds by what they went into; together they are all that went by since the first was counted."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since = perf_counter()

    def on(self, what: str, **known: float) -> None:
        """Put down what went by since the last call: parts of it that are known, and the rest to what it was for."""
        now = perf_counter()
        for name, seconds in {**known, what: now - self._since - sum(known.values())}.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds
        self._since = now

    def line(self) -> str:
        """All of it, and its parts."""
        parts = ", ".join(f"{name} {short_seconds(seconds)}" for name, seconds in self.parts.items())
        return f"{short_seconds(sum(self.parts.values()))} s in all: {parts}"
