"""deat.export: a run or a network as ONNX, torch.export, TorchScript or weights, for use without deat."""

import os

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.models.export_network import (
    PROGRAM_FORMATS,
    ExportedFile,
    check_export_path,
    export_program,
    export_weights,
)
from deat.models.saved_normalization import split_normalization
from deat.models.weights import SavedWeights, get_state_dict
from deat.runs.record_files import EpochChoice
from deat.runs.saved_run import SavedRun, load_run, read_run_weights
from deat.utils.user_paths import expand_path


def export(
    model_or_run: nn.Module | SavedRun | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    example: Tensor | None = None,
    epoch: EpochChoice = "best",
    model: nn.Module | str | None = None,
) -> ExportedFile:
    """Write a network for use without deat, in the format that the file's suffix says, and check what was written.

    The file is read back. A program must answer as the network does, within 1e-4 of the largest logit, on batches of
    1, 2 and 5 images and on the example; ONNX is run by ONNX Runtime where it is installed. Weights must have the same
    bits. A file that differs is removed.

    Args:
        model_or_run: A network, a run's folder or one of fit(checkpoints=), or what load_run returns.
        path: The file, which must not exist. `.onnx`, `.pt2` (torch.export), `.ts` and `.torchscript` (TorchScript)
            have the computation with the normalisation inside, and take images in [0, 1] in batches of any size.
            `.safetensors` and `.pt` (a state dict that torch.load reads with weights_only) have the weights under the
            network's own names, and record the normalisation.
        example: Images in [0, 1] of shape (N, C, H, W); needed for a program where a run does not say their shape.
        epoch: Which weights of a folder: "best", "last" or "averaged".
        model: The network of a folder, where it is code.

    Returns:
        The file, its format, and the largest difference of its answers.

    Raises:
        UsageError: If the suffix is not accepted, the file exists, or the network cannot be written in this format.
        CheckpointError: If the weights cannot be read, the file cannot be written, or it answers differently.

    Example:
        >>> deat.export("runs/photos", "photos.onnx", model=Net()).max_difference
        7.2e-07
        >>> deat.export(result.model, "net.pt2", example=torch.rand(1, 3, 32, 32))
    """
    target = expand_path(path)
    check_export_path(target)
    is_program = target.suffix.lower() in PROGRAM_FORMATS
    if isinstance(model_or_run, str | os.PathLike):
        folder = expand_path(model_or_run)
        if not is_program:
            return export_weights(_split(read_run_weights(folder, epoch)), target)
        model_or_run = load_run(folder, model=model, epoch=epoch, device="cpu")
    network = model_or_run.model if isinstance(model_or_run, SavedRun) else model_or_run
    if not is_program:
        return export_weights(_split(SavedWeights(target, get_state_dict(network), {})), target)
    if example is None and isinstance(model_or_run, SavedRun) and model_or_run.image_shape:
        example = torch.rand(1, *model_or_run.image_shape, generator=torch.Generator().manual_seed(0))
    if example is None:
        raise UsageError(
            f"{target.suffix} needs the shape of an image: example=torch.rand(1, 3, 32, 32), for instance."
        )
    return export_program(network, target, example)


def _split(weights: SavedWeights) -> SavedWeights:
    """The weights of the network alone, and their normalisation."""
    tensors, normalization = split_normalization(weights.tensors)
    return SavedWeights(weights.file, tensors, normalization or weights.normalization)
