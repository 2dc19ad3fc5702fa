"""What a device did over some batches, by when each of its kernels ran and which launch asked for it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shared import Record

DEAREST = 20
"""How many kernels are listed."""


@dataclass(frozen=True)
class Span:
    """A kernel, copy or fill on the device: from when to when, in microseconds, and the launch that asked for it."""

    start: float
    end: float
    launch: int
    name: str


def spans_of(events: Iterable[Any]) -> tuple[list[Span], set[int]]:
    """A profile's events as spans in order of time, and the launches that are known to be a graph's."""
    events = list(events)
    device = (e for e in events if e.device_type.name == "CUDA" and not getattr(e, "is_user_annotation", False))
    spans = [Span(e.time_range.start, e.time_range.end, e.id, e.name) for e in device]
    return sorted(spans, key=lambda span: span.start), {e.id for e in events if "GraphLaunch" in e.name}


def replays_of(spans: list[Span], graphs: set[int]) -> set[int]:
    """The launches that replayed a graph; where the profile names none, those that ran more than one kernel."""
    counts = Counter(span.launch for span in spans if span.launch)
    return graphs & set(counts) or {launch for launch, count in counts.items() if count > 1}


def busy_and_gaps(spans: list[Span], replays: set[int]) -> tuple[float, float, float]:
    """Microseconds in which anything ran, and in which nothing did, inside a replay and between launches."""
    busy = inside = between = 0.0
    last, until = spans[0].launch, spans[0].start
    for span in spans:
        gap = max(0.0, span.start - until)
        if span.launch == last and span.launch in replays:
            inside += gap
        else:
            between += gap
        busy += max(0.0, span.end - max(span.start, until))
        if span.end > until:
            last, until = span.launch, span.end
    return busy, inside, between


def replayed(spans: list[Span], replays: set[int], batches: int) -> list[Record]:
    """Replays of as many kernels together: how often a batch has them, and a mean one's milliseconds."""
    held: dict[int, list[Span]] = {}
    for span in spans:
        if span.launch in replays:
            held.setdefault(span.launch, []).append(span)
    lengths = sorted((len(some), max(s.end for s in some) - min(s.start for s in some)) for some in held.values())
    found = []
    for kernels, group in groupby(lengths, key=lambda pair: pair[0]):
        micros = [length for _, length in group]
        mean = sum(micros) / len(micros)
        found.append({"kernels": kernels, "times": round(len(micros) / batches, 2), "ms": round(mean / 1000, 4)})
    return found


def summed(spans: list[Span], batches: int) -> Record:
    """Launches and their milliseconds, a batch's, and the dearest by name."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append(span.end - span.start)
    found = [
        {"us": round(sum(micros) / batches, 1), "times": round(len(micros) / batches, 2), "name": name[:120]}
        for name, micros in sorted(times.items(), key=lambda item: -sum(item[1]))
    ]
    micros = sum(span.end - span.start for span in spans)
    return {
        "ms": round(micros / batches / 1000, 4),
        "launches": round(len(spans) / batches, 1),
        "kernels": found[:DEAREST],
    }


def timeline(spans: list[Span], graphs: set[int], batches: int) -> Record:
    """A batch's time on the device, and what of it lies inside replays."""
    if not spans:
        raise ValueError("the profiler saw nothing on the device")
    replays = replays_of(spans, graphs)
    busy, inside, between = (round(micros / batches / 1000, 4) for micros in busy_and_gaps(spans, replays))
    kernels = [[span for span in spans if (span.launch in replays) == wanted] for wanted in (True, False)]
    return {
        "busy_ms": busy,
        "idle_inside_ms": inside,
        "idle_between_ms": between,
        "replays": replayed(spans, replays, batches),
        "inside": summed(kernels[0], batches),
        "outside": summed(kernels[1], batches),
    }
