"""How the time of a move on a GPU is spent, kernel by kernel, and that of a whole batch.

PreAct-ResNet-18, batches of 128, bf16. A recorded ascend move and a recorded joint move of each engine are replayed
alone, without data and augmentation. Kernel times are added up by purpose. Whole batches are compiled, and include data
and augmentation (gpu_batches.py). The command

    python bench/gpu_profile.py --out docs/results/profile.json

writes the JSON file, a table and a picture beside it.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu_batches import batches
from gpu_profile_page import batch_lines, draw, render
from gpu_source import made_by
from shared import Record, fixed_budget, gpu_machine, images, net_of, trainer_of, write_result
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("convolutions, weight gradients", ("wgrad", "init_device_workspace", "ReduceSplitK")),
    ("convolutions, input gradients", ("dgrad", "first_conv_input_gradient")),
    (
        "convolutions, forward",
        ("fprop", "first_conv_forward", "convolve", "cudnn", "AddPadding", "nhwcTo", "nchwTo", "ImplicitGemm"),
    ),
    ("optimiser and casts of weights", ("sgd_", "multi_tensor_apply")),
    ("batch norm, ReLU and sums", ("batch_norm", "bn_", "threshold", "clamp_min")),
)
"""What a kernel is for, by a part of its name; the first that fits."""
OURS = {"batch_norm_forward_kernel": KINDS[-1][0], "batch_norm_backward_kernel": KINDS[-1][0]}
"""What our own kernels are for, whose names are parts of others'."""


def main() -> None:
    """Profile both moves in each engine, and whole batches."""
    parser = argparse.ArgumentParser(description="Every kernel of an ascent and of a joint move.")
    parser.add_argument("--engines", nargs="*", default=["graph", "compile"], help="what to record them with")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    result: Record = {"machine": gpu_machine(), "made": made_by(), "moves": {}}
    for engine in args.engines:
        result["moves"] |= {f"{name}, {engine}": found for name, found in moves(engine).items()}
    write(result, args.out)
    for name, move in result["moves"].items():
        print(f"{name}: {move['ms']:.3f} ms, {move['launches']} kernels {move['kinds']}", flush=True)
    result["batches"] = batches()
    write(result, args.out)
    for line in batch_lines(result["batches"]):
        print(line)


def write(result: Record, out: Path) -> None:
    """The file, the page and the picture."""
    write_result(result, out, render)
    draw(result, out.with_suffix(".svg"))


def moves(engine: str) -> Record:
    """PGD's two moves, kernel by kernel."""
    with recorded(engine) as graphs:
        return {name: measure(graph) for name, graph in graphs.items()}


@contextmanager
def recorded(engine: str) -> Iterator[dict[str, torch.cuda.CUDAGraph]]:
    """PGD's two moves, as a trainer records them, and what they are played on."""
    trainer = trainer_of(net_of("preact_resnet18"), images(32, 128 * 8), "pgd-7", 128, engine, "cuda")
    with trainer.session():
        trainer.train_epoch(fixed_budget(trainer, 7))
        recorder = trainer.game.executor.recorder
        assert recorder is not None, "nothing was recorded"
        assert trainer.engine.name == engine, f"it ran {trainer.engine.name}"
        yield {name: recorder.graph(name) for name in ("ascend", "joint")}


def measure(graph: torch.cuda.CUDAGraph, replays: int = 10) -> Record:
    """Milliseconds of a replay, and its kernels."""
    milliseconds = min(timed(graph) for _ in range(5))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in found.events():
        if event.device_type.name == "CUDA":
            times[event.name] += event.device_time / replays
            launches[event.name] += 1
    kinds: Counter[str] = Counter()
    for name, micros in times.items():
        kinds[kind_of(name)] += micros
    kernels = [{"us": round(us, 1), "times": launches[n] / replays, "name": n[:120]} for n, us in times.most_common(40)]
    return {
        "ms": round(milliseconds, 4),
        "launches": round(sum(launches.values()) / replays),
        "kinds": {kind: round(micros, 1) for kind, micros in kinds.most_common()},
        "kernels": kernels,
    }


def timed(graph: torch.cuda.CUDAGraph, replays: int = 50) -> float:
    """Milliseconds of one replay among many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / replays


def kind_of(name: str) -> str:
    """What a kernel is for."""
    kinds = (kind for kind, parts in KINDS if any(part in name for part in parts))
    return OURS.get(name) or next(kinds, "everything else")


if __name__ == "__main__":
    main()
