"""Codecs: audio `[1, N]` -> codes `[K, T]`, behind one small interface.

A codec is named, described by `datamodules.shards.Codec` (what the shard set records) and has `encode`. Each lives in
a file of its own that is imported only when it is asked for: their libraries are optional.

Legend: N samples at the codec's sample rate, K codebooks, T frames.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from datamodules.shards import Codec

Audio = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int16]

# name -> (module with ``build(options: CodecOptions) -> AudioCodec``, pip extra with what it imports, what it is)
CODECS: dict[str, tuple[str, str, str]] = {
    "rvq_mel": ("datamodules.codec_rvq_mel", "audio", "log-mel and residual k-means, needs no weights"),
    "encodec_24khz": ("datamodules.codec_encodec", "codecs", "EnCodec 24 kHz through transformers"),
    "dac_24khz": ("datamodules.codec_encodec", "codecs", "Descript Audio Codec 24 kHz through transformers"),
    "lyra": ("datamodules.codec_lyra", "lyra", "Lyra V2's SoundStream encoder and residual k-means"),
}


@dataclass(frozen=True, slots=True)
class CodecOptions:
    """What a codec can be told.

    Attributes:
        name: which codec.
        weights: folder of weights, or a hub id where the codec knows one (`encodec_24khz`, `dac_24khz`).
        books: file of residual k-means books (`rvq_mel`, `lyra`); None only while they are being fitted.
        num_codebooks: K, the first K codebooks of the codec.
        device: "cpu", "cuda", "cuda:1", ...
        batch_windows: windows of one file encoded at once (`encodec_24khz`, `dac_24khz`).
    """

    name: str
    weights: str | None = None
    books: str | None = None
    num_codebooks: int = 8
    device: str = "cpu"
    batch_windows: int = 1


class AudioCodec(Protocol):
    """Turns audio into codes.

    Attributes:
        spec: name, sample rate, frame rate, codebooks, codebook size and settings, as the shard set records them.
    """

    spec: Codec

    def encode(self, audio_1N: Audio) -> Codes:
        """Encode one whole track.

        Args:
            audio_1N: mono audio at `spec.sample_rate`, `[1, N]`, about -1..1.

        Returns:
            Codes `[K, T]` int16.

        Raises:
            ValueError: the audio has another shape or is shorter than one frame.
        """
        ...


class FrameFeatures(Protocol):
    """The continuous half of a codec whose books are residual k-means: features per frame."""

    @property
    def sample_rate(self) -> int:
        """Of the audio it takes, Hz."""
        ...

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        ...

    @property
    def dim(self) -> int:
        """D, numbers a frame."""
        ...

    @property
    def settings(self) -> Mapping[str, object]:
        """What tells variants apart."""
        ...

    def __call__(self, audio_1N: Audio) -> npt.NDArray[np.float32]:
        """Features `[T, D]` of mono audio `[1, N]`."""
        ...


def build_codec(options: CodecOptions) -> AudioCodec:
    """Make a codec by name.

    Raises:
        ValueError: unknown name, an option the codec cannot use, or a library that is not installed (the message
            names the pip extra).
    """
    module = _module(options.name)
    try:
        codec: AudioCodec = module.build(options)
    except ImportError as error:
        raise ValueError(missing_extra(options.name, error)) from None
    return codec


def build_features(options: CodecOptions) -> FrameFeatures | None:
    """The features of a codec whose books can be fitted (`rvq_mel`, `lyra`); None for the others.

    Raises:
        ValueError: as `build_codec`.
    """
    module = _module(options.name)
    if not hasattr(module, "build_features"):
        return None
    try:
        features: FrameFeatures = module.build_features(options)
    except ImportError as error:
        raise ValueError(missing_extra(options.name, error)) from None
    return features


def missing_extra(name: str, error: ImportError) -> str:
    """The one line for a codec whose library is absent."""
    return f"codec {name!r} needs {error.name or error}: pip install 'ballast[{CODECS[name][1]}]'"


def check_audio(audio_1N: Audio, min_samples: int) -> None:
    """Refuse what no codec can encode.

    Raises:
        ValueError: not `[1, N]` float32, or fewer than `min_samples` samples.
    """
    if audio_1N.ndim != 2 or audio_1N.shape[0] != 1 or audio_1N.dtype != np.float32:
        raise ValueError(f"audio must be float32 [1, N], not {audio_1N.dtype} {list(audio_1N.shape)}")
    if audio_1N.shape[1] < min_samples:
        raise ValueError(f"{audio_1N.shape[1]} samples are less than one frame of {min_samples}")


def _module(name: str) -> ModuleType:
    if name not in CODECS:
        choices = ", ".join(f"{key} ({what})" for key, (_, _, what) in CODECS.items())
        raise ValueError(f"codec={name!r}: unknown; choose from {choices}")
    try:
        return importlib.import_module(CODECS[name][0])
    except ImportError as error:
        raise ValueError(missing_extra(name, error)) from None
