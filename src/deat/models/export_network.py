"""Write a network for use without deat, as ONNX, torch.export, TorchScript or weights, and compare what was written."""

import copy
import io
import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import CheckpointError, UsageError
from deat.models.logits_wrapper import return_logits
from deat.models.normalize import Normalized
from deat.models.pt_files import NOTE_KEY, read_pt_file
from deat.models.saved_normalization import format_normalization_note
from deat.models.weights import SavedWeights, unwrap_model
from deat.utils.safe_write import write_atomic
from deat.utils.safetensors_files import Tensors, encode_tensors, read_tensors
from deat.utils.text import summarize_error

TOLERANCE = 1e-4
"""The largest difference of an exported network's answers, in units of the largest one, or of 1 if that is larger."""
BATCH_SIZES = (1, 2, 5)
"""Numbers of images in a batch that an exported network must accept."""
ONNX_HINT = "needs onnx and onnxscript: pip install 'deat[export]', which brings ONNX Runtime too"

Network = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ExportedFile:
    """A file that a network was exported to.

    Attributes:
        path: The file.
        format: Its format, in words.
        max_difference: The largest difference of its answers from the network's; None where they were not compared,
            and 0 for weights, which are compared bit by bit.
        note: What the user should know.
    """

    path: Path
    format: str
    max_difference: float | None
    note: str


@dataclass(frozen=True)
class ProgramFormat:
    """A format that has the network's computation, not its weights alone.

    Attributes:
        name: The format, in words.
        write: Writes a network, traced with example images, to a file.
        read: Reads the file, to be called with images; None where nothing here can run it, and it was only checked.
    """

    name: str
    write: Callable[[nn.Module, Tensor, Path], None]
    read: Callable[[Path], Network | None]


def export_weights(weights: SavedWeights, path: Path) -> ExportedFile:
    """Write weights under the network's own names, with a note of their normalisation, and compare them.

    Args:
        weights: The weights, whose tensors are those of the network alone.
        path: A file that does not exist, with a suffix of `WEIGHTS_FORMATS`.

    Returns:
        The file.

    Raises:
        CheckpointError: If it cannot be written, or has other weights than it should.
    """
    name, encode, read = WEIGHTS_FORMATS[path.suffix.lower()]
    with _written_file(path) as temporary:
        write_atomic(temporary, encode(weights.tensors, format_normalization_note(weights.normalization)))
        result = read(temporary)
        if result.keys() != weights.tensors.keys() or any(
            not torch.equal(result[key], tensor.cpu()) for key, tensor in weights.tensors.items()
        ):
            raise CheckpointError(f"the weights in {str(path)!r} are not those that were written. It was removed.")
    return ExportedFile(path, name, 0.0, _describe_weights_normalization(weights.normalization))


def export_program(model: nn.Module, path: Path, example: Tensor) -> ExportedFile:
    """Write a network, with its normalisation inside, and compare its answers with the network's.

    Args:
        model: The network; it is not changed.
        path: A file that does not exist, with a suffix of `PROGRAM_FORMATS`.
        example: Images in [0, 1] that the network takes, of shape (N, C, H, W).

    Returns:
        The file.

    Raises:
        UsageError: If the network cannot be written in this format, or a package is missing.
        CheckpointError: If the file cannot be written, or answers differently.
    """
    kind = PROGRAM_FORMATS[path.suffix.lower()]
    network = copy.deepcopy(unwrap_model(model)).cpu().eval().requires_grad_(False)
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    example = _check_example(example).to("cpu", dtype)
    with _written_file(path) as temporary, torch.no_grad():
        try:
            network = return_logits(network, network(_make_batch(example, 2)))
            with _quiet():
                kind.write(network, _make_batch(example, 2), temporary)
        except UsageError:
            raise
        except Exception as error:  # of many kinds, from the tracer and the user's own forward
            raise UsageError(
                f"the network cannot be written as {kind.name}: {summarize_error(error)}. Another format may take it: "
                f"{', '.join(sorted(ACCEPTED_SUFFIXES - {path.suffix.lower()}))}."
            ) from error
        difference = _compare_answers(network, kind, temporary, example, path)
    shape = "x".join(map(str, example.shape[1:]))
    inside = ", which it normalises itself" if isinstance(unwrap_model(network), Normalized) else ""
    compared = (
        "ONNX Runtime is not installed, so its answers were not compared; the file was checked by onnx alone"
        if difference is None
        else f"its answers differ from the network's by at most {difference:.1g}"
    )
    return ExportedFile(
        path, kind.name, difference, f"it takes batches of images in [0, 1] of {shape}{inside}; {compared}"
    )


def check_export_path(path: Path) -> None:
    """Refuse a file that exists, or whose name says no format.

    Args:
        path: The file to write.

    Raises:
        UsageError: If it is not accepted.
    """
    if path.suffix.lower() not in ACCEPTED_SUFFIXES:
        raise UsageError(
            f"{str(path)!r} does not say in which format to export: end it in .safetensors or .pt (weights), .onnx, .pt2 "
            "(torch.export), or .ts or .torchscript (TorchScript)."
        )
    if os.path.lexists(path):
        raise UsageError(f"{str(path)!r} exists already. Choose another file.")


def encode_pt_weights(tensors: Tensors, note: str | None = None) -> bytes:
    """Encode weights as a state dict that torch.load reads with weights_only.

    Args:
        tensors: The weights by name.
        note: A note, which is part of the state dict's metadata.

    Returns:
        The bytes of the file.
    """
    state = OrderedDict((name, tensor.detach().cpu()) for name, tensor in tensors.items())
    state._metadata = OrderedDict({} if note is None else {NOTE_KEY: note})  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _describe_weights_normalization(normalization: dict[str, Any]) -> str:
    if not normalization:
        return "the network takes images in [0, 1] as it was trained, without a normalisation of deat's"
    mean, std = (" ".join(f"{value:.4g}" for value in normalization[name]) for name in ("mean", "std"))
    return f"the network expects images normalised by mean {mean} and std {std}"


@contextmanager
def _written_file(path: Path) -> Iterator[Path]:
    """A temporary file that takes the name `path` at the end, and is removed after an error."""
    temporary = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(path)!r}: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and the log of torch's exporters, which are about their own code."""
    former = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(former)


def _check_example(example: Any) -> Tensor:
    if not isinstance(example, Tensor) or example.dim() != 4 or not len(example):
        actual = f"shape {tuple(example.shape)}" if isinstance(example, Tensor) else f"a {type(example).__name__}"
        raise UsageError(
            f"example must be a batch of images, a tensor of shape (N, C, H, W), not {actual}: such as "
            "torch.rand(1, 3, 32, 32)."
        )
    if example.dtype == torch.uint8 or not example.is_floating_point():
        raise UsageError(f"example has images of {example.dtype}; the network takes floats in [0, 1]: example / 255.")
    return example.detach()


def _make_batch(example: Tensor, size: int) -> Tensor:
    """So many images: random ones, and the example's in the first half."""
    generator = torch.Generator().manual_seed(size)
    noise = torch.rand(size, *example.shape[1:], generator=generator).to(example.dtype)
    count = min(len(example), (size + 1) // 2)
    return torch.cat([example[:count], noise[count:]])


def _compare_answers(network: nn.Module, kind: ProgramFormat, file: Path, example: Tensor, path: Path) -> float | None:
    """The largest difference between the network's answers and the file's; refused above the tolerance."""
    batches = [example, *(_make_batch(example, size) for size in BATCH_SIZES)]
    differences = [0.0]
    try:
        with _quiet():
            exported = kind.read(file)
            if exported is None:
                return None
            for x in batches:
                expected = network(x)
                answer = exported(x)
                if answer.shape != expected.shape:
                    raise ValueError(f"answers of shape {tuple(answer.shape)}, not {tuple(expected.shape)}")
                scale = max(1.0, float(expected.abs().max()))
                difference = float((answer.to(expected.dtype) - expected).abs().max())
                if not difference <= TOLERANCE * scale:
                    raise ValueError(f"answers that differ by {difference:.2g}, more than {TOLERANCE * scale:.2g}")
                differences.append(difference)
    except Exception as error:  # of many kinds, from whatever runs the file
        raise CheckpointError(
            f"the network was written as {kind.name}, but what is in the file does not answer as the network does "
            f"({summarize_error(error)}), so {path.name} was removed. Usual causes: a forward that depends on the number "
            "of images (len(x), a fixed view), on the values of its input, or on chance."
        ) from None
    return max(differences)


def _write_torchscript(network: nn.Module, x: Tensor, file: Path) -> None:
    torch.jit.trace(network, x, check_trace=False).save(str(file))  # type: ignore[no-untyped-call]


def _read_torchscript(file: Path) -> Network:
    loaded: Network = torch.jit.load(str(file))  # type: ignore[no-untyped-call]
    return loaded


def _write_exported_program(network: nn.Module, x: Tensor, file: Path) -> None:
    program = torch.export.export(network, (x,), dynamic_shapes=_dynamic_batch())
    torch.export.save(program, file)


def _read_exported_program(file: Path) -> Network:
    return torch.export.load(file).module()


def _write_onnx(network: nn.Module, x: Tensor, file: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f".onnx {ONNX_HINT} ({error}).") from None
    program = torch.onnx.export(
        network,
        (x,),
        dynamo=True,
        dynamic_shapes=_dynamic_batch(),
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    program.save(str(file), external_data=False)


def _read_onnx(file: Path) -> Network | None:
    try:
        import onnxruntime
    except ImportError:
        import onnx

        onnx.checker.check_model(str(file), full_check=True)
        return None
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (name,) = [entry.name for entry in session.get_inputs()]
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _dynamic_batch() -> Any:
    return ({0: torch.export.Dim("batch")},)


WEIGHTS_FORMATS: dict[str, tuple[str, Callable[[Tensors, str | None], bytes], Callable[[Path], Tensors]]] = {
    ".safetensors": ("safetensors weights", encode_tensors, read_tensors),
    ".pt": ("a state dict", encode_pt_weights, lambda file: read_pt_file(file).tensors),
    ".pth": ("a state dict", encode_pt_weights, lambda file: read_pt_file(file).tensors),
}
"""Formats of weights alone by the suffix of the file: in words, how they are encoded, and read."""
PROGRAM_FORMATS = {
    ".onnx": ProgramFormat("ONNX", _write_onnx, _read_onnx),
    ".pt2": ProgramFormat("a program of torch.export", _write_exported_program, _read_exported_program),
    ".ts": ProgramFormat("TorchScript", _write_torchscript, _read_torchscript),
    ".torchscript": ProgramFormat("TorchScript", _write_torchscript, _read_torchscript),
}
"""Formats with the network's computation by the suffix of the file."""
ACCEPTED_SUFFIXES = frozenset({*WEIGHTS_FORMATS, *PROGRAM_FORMATS})
