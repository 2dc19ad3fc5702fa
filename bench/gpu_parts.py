"""What each part of the compiled engine saves on a GPU: both moves with all parts, and with one part left out.

PreAct-ResNet-18, batches of 128, bf16. A recorded move is replayed alone, without data and augmentation. The engine with
all parts is measured first and again at the end, because a device's clock varies. A saving is significant only if it is
larger than the difference of these two. The command

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
from gpu_source import describe_source, made_by
from shared import Record, command_block, gpu_machine, paragraph, write_result

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
"""The parts, and how each is switched off."""
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
        *command_block("python bench/gpu_parts.py --out docs/results/parts.json"),
        "",
        *paragraph(
            f"Machine: {machine['device']}, torch {machine['torch']}. deat: {describe_source(result.get('made'))}. The "
            'docstring of `bench/gpu_parts.py` describes the measurement. Times are milliseconds per move. "Beside the '
            'rest" means on a second CUDA stream. "A network\'s end" is our kernel for pooling and the last layer. '
            '"Halved weights" are the half-precision copies of the weights. The last row repeats the first one, because '
            "a device's clock varies."
        ),
        "",
        "| part left out | ascend | joint | slower than with all parts: ascend, joint |",
        "|---|---|---|---|",
    ]
    for part, move in moves.items():
        more = [f"{move[name] - moves[ALL][name]:+.3f}" for name in ("ascend", "joint")]
        times = " | ".join(f"{move[name]:.3f}" for name in ("ascend", "joint"))
        lines.append(f"| {part} | {times} | {', '.join(more)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
