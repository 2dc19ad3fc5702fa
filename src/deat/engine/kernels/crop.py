"""Random crops and flips of images on a GPU, one launch a batch."""

import warnings

import torch
from torch import Tensor

from deat.engine.kernels import has_triton
from deat.engine.kernels.kernel_utils import on_gpu

SUPPORTED_DTYPES = (torch.uint8, torch.float32)


def is_supported(x: Tensor) -> bool:
    """Whether our kernel supports a set: uint8 or float32 images (N, C, H, W) on a GPU, where it can be built."""
    has_supported_type = on_gpu(x) and has_triton() and x.dtype in SUPPORTED_DTYPES and x.dim() == 4 and x.numel() > 0
    return has_supported_type and _max_element_offset(x) < 2**31 and _can_build_kernel(x)


def crop(x: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, pad: int) -> Tensor:
    """Crop and flip some images of a set, as float32 in [0, 1].

    Args:
        x: All images of the set.
        index: The indices of the images to crop.
        top: The upper edge of the crop, for every image of the set, from 0 to 2 * pad.
        left: The left edge of the crop, likewise.
        flip: Whether to flip the crop, for every image of the set.
        pad: The width of the border of zeros that is added before cropping.

    Returns:
        The crops, of the images' own size.
    """
    from deat.engine.kernels.crop_triton import launch_crop

    out = torch.empty((len(index), *x.shape[1:]), dtype=torch.float32, device=x.device)
    # Triton launches on the current GPU, not on the GPU of the tensors.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        launch_crop(x, index, top, left, flip, out, pad)
    return out


def _max_element_offset(x: Tensor) -> int:
    """The largest offset inside an image; the kernel computes it in 32 bits."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))


def _can_build_kernel(x: Tensor) -> bool:
    """Try the kernel on one image: building it needs a C compiler, which some machines lack."""
    first = torch.zeros(1, dtype=torch.int64, device=x.device)
    try:
        crop(x, first, first, first, first.bool(), pad=0)
    except Exception as error:  # any error of a compiler or of its absence
        reason = str(error).split("\n")[0]
        warnings.warn(f"crops run as torch's operations, since our kernel cannot be built: {reason}", stacklevel=3)
        return False
    return True
