"""Random crops and mirror images of a set that lives on a GPU, each batch by one launch."""

import warnings

import torch
from torch import Tensor

from deat.engine.kernels import has_triton
from deat.engine.kernels.kernel_utils import on_gpu

SUPPORTED_DTYPES = (torch.uint8, torch.float32)


def is_supported(x: Tensor) -> bool:
    """Whether our kernel can take a set: bytes or float32 (N, C, H, W) on a GPU, where it can be built."""
    known = on_gpu(x) and has_triton() and x.dtype in SUPPORTED_DTYPES and x.dim() == 4 and x.numel() > 0
    return known and _max_element_offset(x) < 2**31 and _can_build_kernel(x)


def crop(x: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """x's images at index with a border of pad zeros, cut at their corners and flipped, as float32 in [0, 1].

    top, left and flip are of all images of x.
    """
    from deat.engine.kernels.crop_triton import launch_crop

    out = torch.empty((len(index), *x.shape[1:]), dtype=torch.float32, device=x.device)
    # Triton launches on the current GPU, wherever tensors are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        launch_crop(x, index, top, left, flip, out, pad)
    return out


def _max_element_offset(x: Tensor) -> int:
    """How far an image's numbers lie apart, at most; the kernel counts that in 32 bits."""
    return sum((size - 1) * step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True))


def _can_build_kernel(x: Tensor) -> bool:
    """Whether the kernel runs, tried on one image: building it takes a C compiler, which not every machine has."""
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    try:
        crop(x, first, first, first, first.bool(), pad=0)
    except Exception as error:  # whatever a compiler, or the lack of one, raises
        reason = str(error).split("\n")[0]
        warnings.warn(f"crops run as torch's operations, since our kernel cannot be built: {reason}", stacklevel=3)
        return False
    return True
