"""What each part of the compiled engine brings on a GPU: both moves with all parts, and with one of them left out.

PreAct-ResNet-18, batches of 128, bf16. A recorded move is replayed alone, so its milliseconds hold no data and no
augmentation. All parts are measured first and again at the end, since a device's clock is not always the same: what a
part brings is believed where it is more than those two are apart. The command

    python bench/gpu_parts.py --out docs/results/parts.json

writes the JSON file and a table beside it.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_profile import recorded, timed
from gpu_source import made_by, told
from shared import Record, gpu_machine, write_result

from deat.engine.kernels import (
    batch_norm,
    classifier_head,
    conv_streams,
    cross_entropy,
    first_conv,
    graph_pass,
    sgd_triton,
)
from deat.training.optimizers import DeviceSGD

NEVER = 10**9
PARTS: dict[str, tuple[Any, str, Any]] = {
    "batch norm's second launch begun early": (batch_norm, "_has_dependent_launch", lambda device: False),
    "shortcuts beside the rest": (graph_pass, "MIN_OVERLAPPING_CONVOLUTIONS", NEVER),
    "weight gradients beside the rest": (conv_streams, "on_gpu", lambda x: False),
    "the first convolution": (first_conv, "is_supported", lambda *held: False),
    "a network's end": (classifier_head, "on_gpu", lambda x: False),
    "cross-entropy": (cross_entropy, "on_gpu", lambda x: False),
    "small weights stepped together": (sgd_triton, "can_step_together", lambda step: False),
    "halved weights stepped with the others": (DeviceSGD, "follow", None),
}
"""What is left out, and how."""
ALL, AGAIN = "nothing", "nothing, again"


def main() -> None:
    """Measure both moves with each part left out."""
    parser = argparse.ArgumentParser(description="Both moves with all parts of the compiled engine, and less one.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args()
    result: Record = {"machine": gpu_machine(), "made": made_by(), "moves": {}}
    for part, how in ((ALL, None), *PARTS.items(), (AGAIN, None)):
        with patch.object(*how) if how else nullcontext():
            result["moves"][part] = measure()
        print(part, result["moves"][part], flush=True)
        write_result(result, args.out, render)


def measure() -> dict[str, float]:
    """Milliseconds of each move."""
    torch._dynamo.reset()
    with recorded("compile") as graphs:
        return {name: round(min(timed(graph) for _ in range(10)), 4) for name, graph in graphs.items()}


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine, moves = result["machine"], result["moves"]
    lines = [
        "# What each part of the compiled engine brings",
        "",
        "`python bench/gpu_parts.py --out docs/results/parts.json` on",
        f"{machine['device']}, torch {machine['torch']}, deat {told(result.get('made'))}; its head says what is",
        "measured. Milliseconds.",
        "",
        "| left out | ascend | joint | more than with all, each |",
        "|---|---|---|---|",
    ]
    for part, found in moves.items():
        more = [f"{found[name] - moves[ALL][name]:+.3f}" for name in ("ascend", "joint")]
        times = " | ".join(f"{found[name]:.3f}" for name in ("ascend", "joint"))
        lines.append(f"| {part} | {times} | {', '.join(more)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
