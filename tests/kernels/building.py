"""Builds every kernel for a GPU, which Triton can do without one; what its interpreter forgives, this does not.

Run by itself: in a process that interprets kernels they cannot be built.
"""

from itertools import product
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deat.engine.kernels import (
    batch_norm_triton,
    classifier_head_triton,
    crop_triton,
    cross_entropy_triton,
    first_conv_triton,
    linf_step_triton,
    sgd_triton,
)

TARGET = GPUTarget("cuda", 90, 32)
IMAGES = ("x", "other", "total", "beside", "y", "dy", "gate", "more", "dx", "by_beside", "pooled", "logits", "grad")
SIZES = ("M", "N", "C", "HW", "rows", "n", "xn", "xc", "xh", "xw", "wo", "wc", "wh", "ww", "pad", "index_stride")
TILE = {"BM": 128, "BC": 64, "ACC": tl.float32, "EPS": 1e-5, "EARLY": True}


def build(kernel: Any, images: str = "*fp32", others: dict[str, str] | None = None, **constants: Any) -> str:
    """One kernel's code for these constants; images are tensors of the network's own precision, but for others."""
    kinds = {name: "constexpr" if name in constants else _kind(name, images) for name in kernel.arg_names}
    kinds |= {name: kind for name, kind in (others or {}).items() if name in kinds}
    given = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    return str(triton.compile(ASTSource(kernel, signature=kinds, constexprs=given), target=TARGET).asm["ptx"])


def check_order(code: str, gather: bool) -> None:
    """A launch that begins early waits for the one before it: to read anything, or, where it writes, to write."""
    wait = code.index("griddepcontrol.wait")
    first = ("ld.global", "griddepcontrol.launch_dependents") if gather else ("st.global",)
    assert all(wait < code.index(word) for word in first), f"{first} before the wait"


def _kind(name: str, images: str) -> str:
    return images if name in IMAGES else "i32" if name in SIZES else "*fp32"


def build_first(half: str, weight: str, channels: int, side: int, out: int, **flags: bool) -> None:
    """The first convolution of float32 images, with a square kernel, forth and back."""
    pad, taps = side // 2, 1 << (side - 1).bit_length()
    sizes = {"CI": channels, "CO": out, "KH": side, "KW": side, "PH": pad, "PW": pad}
    sizes |= dict.fromkeys(("H", "W", "OH", "OW"), 32)
    kinds = {"x": "*fp32", "dx": "*fp32", "weight": weight}
    build(
        first_conv_triton.first_conv_forward_kernel,
        half,
        kinds,
        BM=first_conv_triton.FORWARD_TILE_PIXELS,
        BN=64,
        BK=32,
        **flags,
        **sizes,
    )
    columns = max(16, taps * (1 << (channels - 1).bit_length()))
    sizes |= {"SPAN": 32, "TAPS": taps, "BM": first_conv_triton.BACKWARD_TILE_PIXELS, "BN": columns, "BK": 64}
    build(first_conv_triton.first_conv_input_gradient_kernel, half, kinds, SCALE=flags["SCALE"], **sizes)


def build_end(half: str, weight: str, classes: int) -> None:
    """A network's end and its cross-entropy."""
    kinds = dict.fromkeys(("weight", "bias", "grad_weight", "grad_bias"), weight) | {"label": "*i64"}
    sizes = {"CO": classes, "BO": max(16, 1 << (classes - 1).bit_length())}
    build(
        classifier_head_triton.head_forward_kernel,
        half,
        kinds,
        BIAS=True,
        BH=classifier_head_triton.TILE_PIXELS,
        BC=classifier_head_triton.FORWARD_TILE_CHANNELS,
        **sizes,
    )
    build(
        classifier_head_triton.head_input_gradient_kernel,
        half,
        kinds,
        BH=classifier_head_triton.TILE_PIXELS,
        BC=classifier_head_triton.BACKWARD_TILE_CHANNELS,
        **sizes,
    )
    build(
        classifier_head_triton.head_weight_gradient_kernel,
        half,
        kinds,
        BIAS=True,
        BN=classifier_head_triton.TILE_IMAGES,
        BC=64,
        **sizes,
    )
    for mean in (True, False):
        build(cross_entropy_triton.cross_entropy_forward_kernel, half, kinds, MEAN=mean, BN=128, **sizes)
        build(cross_entropy_triton.cross_entropy_backward_kernel, half, kinds, MEAN=mean, BN=128, **sizes)


def main() -> None:
    """Every kernel, with what PreAct-ResNets and ResNets ask of it."""
    for gather, add in product((True, False), (True, False)):
        forth = {"GATHER": gather, "ADD": add, "RESIDUAL": not add, "RELU": True, "TRACK": True, "MOMENTUM": 0.1}
        check_order(build(batch_norm_triton.batch_norm_forward_kernel, "*bf16", BATCH=True, **forth, **TILE), gather)
        back = {"GATHER": gather, "ADD": add, "RELU": True, "GATED": not add}
        check_order(build(batch_norm_triton.batch_norm_backward_kernel, "*bf16", BATCH=True, **back, **TILE), gather)
    eval_forth = {"BATCH": False, "ADD": True, "RESIDUAL": False, "RELU": True, "TRACK": False, "MOMENTUM": 0.1}
    build(batch_norm_triton.batch_norm_forward_kernel, "*fp16", GATHER=False, **eval_forth, **TILE)
    build(
        batch_norm_triton.batch_norm_backward_kernel,
        "*fp16",
        GATHER=False,
        BATCH=False,
        ADD=True,
        RELU=True,
        GATED=False,
        **TILE,
    )
    build(first_conv_triton._copy_channels_kernel, CX=3, CO=8, SHIFT=True, SCALE=True, BC=8, ROWS=512)
    build_first("*bf16", "*bf16", 3, 3, 64, BIAS=False, SHIFT=True, SCALE=True)
    build_first("*fp16", "*fp32", 3, 3, 64, BIAS=True, SHIFT=True, SCALE=True)
    build_first("*bf16", "*fp32", 1, 1, 24, BIAS=True, SHIFT=False, SCALE=False)
    build_first("*fp16", "*fp16", 7, 5, 96, BIAS=False, SHIFT=True, SCALE=True)
    for kinds in ({}, {"g": "*bf16", "copy": "*bf16"}):
        build(sgd_triton.sgd_kernel, others=kinds, DECAY=5e-4, COPY=bool(kinds), BLOCK=4096)
        kinds = {"table": "*i64", **kinds}
        how = {"COPY": tl.bfloat16, "COLUMNS": sgd_triton.TABLE_COLUMNS, "BLOCK": sgd_triton.SMALL_BLOCK_NUMBERS}
        build(sgd_triton.sgd_small_weights_kernel, others=kinds, DECAY=5e-4, **how)
    kinds = {"index": "*i64", "top": "*i64", "left": "*i64", "flip": "*i1", "out": "*fp32"}
    for images in ("*u8", "*fp32"):
        build(crop_triton.crop_kernel, images, kinds, C=3, H=32, W=32, BLOCK=crop_triton.BLOCK_NUMBERS)
    build(linf_step_triton.linf_step_kernel, others={"grad": "*fp32"}, EPS=8 / 255, BLOCK=2048)
    for half, weight in (("*bf16", "*bf16"), ("*fp16", "*fp32")):
        build_end(half, weight, classes=10 if half == "*bf16" else 33)


if __name__ == "__main__":
    main()
