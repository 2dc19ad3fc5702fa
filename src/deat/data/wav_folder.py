"""Class folders of wav files: mono waveforms in [-1, 1], cut or padded to one length."""

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deat.data.folder_layout import infer_layout
from deat.data.image_set import ImageSet
from deat.errors import DataError
from deat.utils.safe_read import open_plain_file
from deat.utils.text import warn_caller

AUDIO_BOX = (-1.0, 1.0)
"""The range of a waveform."""
_FULL_SCALE = {1: 128.0, 2: 2.0**15, 3: 2.0**23, 4: 2.0**31}
"""Half the range of a sample, by its bytes."""


def read_wav_folder(path: Path, length: int | None = None) -> dict[str, ImageSet]:
    """Read class folders of wav files.

    Args:
        path: A directory with train/CLASS/*.wav and test/CLASS/*.wav, or CLASS/*.wav.
        length: The number of samples; longer recordings are cut to their middle, shorter ones padded with zeros at
            their end. By default the median length.

    Returns:
        The recordings of "train" and, if there are any, of "test" and "val", float32 of shape (N, 1, length).

    Raises:
        DataError: The directory is missing or has no class folders, or a file is no uncompressed wav or has another
            sampling rate.
    """
    if not path.is_dir():
        raise DataError(f"there is no directory {str(path)!r}; audio:PATH takes class folders of wav files, unpacked.")
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".wav")
    if not files:
        raise DataError(f"found no wav files in {str(path)!r}; expected train/CLASS/*.wav or CLASS/*.wav.")
    names = tuple(file.relative_to(path).as_posix() for file in files)
    layout = infer_layout(names, str(path))
    for text in layout.messages:
        warn_caller(text)
    waves, rates = zip(*map(_read_wav, files), strict=True)
    _check_rates(names, rates)
    length = length or int(np.median([len(waves[i]) for i in layout.splits["train"][0].tolist()]))
    return {
        split: ImageSet(torch.stack([_fit_length(waves[i], length) for i in index.tolist()]), labels, layout.classes)
        for split, (index, labels) in layout.splits.items()
    }


def _check_rates(names: Sequence[str], rates: Sequence[int]) -> None:
    other = next((i for i, rate in enumerate(rates) if rate != rates[0]), None)
    if other is not None:
        raise DataError(
            f"{names[other]!r} has a sampling rate of {rates[other]} Hz, and {names[0]!r} {rates[0]} Hz. Resample them to "
            "one rate."
        )


def _read_wav(file: Path) -> tuple[Tensor, int]:
    """The samples of a file in [-1, 1], the mean of its channels, and its sampling rate."""
    try:
        with open_plain_file(file) as binary, wave.open(binary) as stream:
            width, channels, rate = stream.getsampwidth(), stream.getnchannels(), stream.getframerate()
            data = np.frombuffer(stream.readframes(stream.getnframes()), dtype=np.uint8)
    except (wave.Error, EOFError, OSError) as error:
        raise DataError(f"cannot read {str(file)!r} ({error}): expected an uncompressed wav file (PCM).") from None
    if width == 1:  # the only width without a sign
        samples = data.astype(np.float64) - 128
    elif width == 3:
        padded = np.zeros((len(data) // 3, 4), dtype=np.uint8)
        padded[:, 1:] = data[: len(data) // 3 * 3].reshape(-1, 3)
        samples = (padded.view("<i4").reshape(-1) >> 8).astype(np.float64)
    else:
        samples = data[: len(data) // width * width].view(f"<i{width}").astype(np.float64)
    frames = samples[: len(samples) // channels * channels].reshape(-1, channels).mean(1) / _FULL_SCALE[width]
    return torch.from_numpy(frames.astype(np.float32)), rate


def _fit_length(samples: Tensor, length: int) -> Tensor:
    """The middle of a recording, or the recording and zeros, as one channel."""
    start = max(0, (len(samples) - length) // 2)
    cut = samples[start : start + length]
    return torch.nn.functional.pad(cut, (0, length - len(cut)))[None]
