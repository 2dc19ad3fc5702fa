"""The work of a network's layers, in multiply-adds, from which the precision on a CPU is chosen."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from deat.utils.torch_contexts import device_of, eval_mode

COUNTED_LAYERS = (_ConvNd, nn.Linear, nn.MultiheadAttention)


def count_multiply_adds(net: nn.Module, shape: tuple[int, ...]) -> float:
    """Count the multiply-adds of a forward pass in the layers that half precision makes faster.

    These are linear and attention layers, and convolutions without groups. The network is called once, in eval mode, on
    two images of noise; random numbers that it draws do not advance the global generator.

    Args:
        net: The network.
        shape: The shape of one example.

    Returns:
        The multiply-adds of one example. They depend on the layers and the shape alone, so every run of the same network
        gets the same number.
    """
    work: list[float] = []

    def count(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Add a layer's multiply-adds."""
        work.append(_layer_multiply_adds(layer, inputs, output[0] if isinstance(output, tuple) else output))

    dtype = torch.promote_types(torch.float32, next(net.parameters()).dtype)
    noise = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(device_of(net), dtype)
    hooks = [layer.register_forward_hook(count) for layer in net.modules() if isinstance(layer, COUNTED_LAYERS)]
    try:
        # Without gradients torch's transformer layers take a path that does not call their parts.
        with torch.random.fork_rng(devices=[]), eval_mode(net), torch.enable_grad():
            net(noise)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(work) / len(noise)


def _layer_multiply_adds(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> float:
    if isinstance(layer, _ConvTransposeNd):
        return float(inputs[0].numel() * layer.weight[0].numel()) if layer.groups == 1 else 0.0
    if isinstance(layer, _ConvNd):
        return float(output.numel() * layer.weight[0].numel()) if layer.groups == 1 else 0.0
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    return output.numel() / output.shape[-1] * matrices
