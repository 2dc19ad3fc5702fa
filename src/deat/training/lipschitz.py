"""The Lipschitz upper bound of the paper's training-process figure."""

import math

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def log10_lipschitz(net: nn.Module) -> float:
    """log10 of the product of the convolution and linear layers' Frobenius norms, in one host read.

    Batch norm and shortcuts are left out, and a kernel's norm is not its convolution's: only the trend of
    this number means something.
    """
    weights: list[Tensor] = [m.weight.detach() for m in net.modules() if isinstance(m, LAYERS)]
    if not weights:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(w.float()) for w in weights]).double()
    return float(norms.clamp_min(1e-300).log().sum()) / math.log(10)
