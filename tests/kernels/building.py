"""Builds every kernel for a GPU, which Triton can do without one; what its interpreter forgives, this does not.

Run by itself: in a process that interprets kernels they cannot be built.
"""

from itertools import product
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deat.kernels import copy, descent, norm, step

TARGET = GPUTarget("cuda", 90, 32)
IMAGES = ("x", "other", "total", "beside", "y", "dy", "gate", "more", "dx", "by_beside")
SIZES = ("M", "C", "rows", "n")
TILE = {"BM": 128, "BC": 64, "ACC": tl.float32, "EPS": 1e-5, "EARLY": 1}


def build(kernel: Any, images: str = "*fp32", **constants: Any) -> None:
    """One kernel for these constants; images are the tensors of the network's own precision."""
    kinds = {name: "constexpr" if name in constants else _kind(name, images) for name in kernel.arg_names}
    given = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    triton.compile(ASTSource(kernel, signature=kinds, constexprs=given), target=TARGET)


def _kind(name: str, images: str) -> str:
    return images if name in IMAGES else "i32" if name in SIZES else "*fp32"


def main() -> None:
    """Every kernel, with what PreAct-ResNets and ResNets ask of it."""
    for gather, add in product((True, False), (True, False)):
        forth = {"GATHER": gather, "ADD": add, "BESIDE": not add, "RELU": True, "TRACK": True, "MOMENTUM": 0.1}
        build(norm.forth, "*bf16", BATCH=True, **forth, **TILE)
        back = {"GATHER": gather, "ADD": add, "RELU": True, "GATED": not add}
        build(norm.back, "*bf16", BATCH=True, **back, **TILE)
    eval_forth = {"BATCH": False, "ADD": True, "BESIDE": False, "RELU": True, "TRACK": False, "MOMENTUM": 0.1}
    build(norm.forth, "*fp16", GATHER=False, **eval_forth, **TILE)
    build(norm.back, "*fp16", GATHER=False, BATCH=False, ADD=True, RELU=True, GATED=False, **TILE)
    build(copy._fit, CX=3, CO=8, SHIFT=True, SCALE=True, BC=8, ROWS=512)
    build(descent._descend, DECAY=5e-4, BLOCK=4096)
    build(step._move, EPS=8 / 255, BLOCK=2048)


if __name__ == "__main__":
    main()
