"""`rvq_mel`: log-mel frames and residual k-means. No network and no weights; the books are fitted on any audio.

The codes say what is heard in each frame but cannot be turned back into audio.

Legend: N samples, T frames, F = n_fft / 2 + 1 bins, M mel bands, K codebooks.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from datamodules.codecs import Audio, AudioCodec, CodecOptions, Codes, FrameFeatures, check_audio
from datamodules.residual_kmeans import ResidualKMeans, load_books
from datamodules.shards import Codec

SAMPLE_RATE = 24_000
N_FFT = 1024
HOP = 320
BANDS = 128
LOW_HZ = 30.0
FLOOR = 1e-7
CHUNK_FRAMES = 4096
_SUBBINS = 16

Float = npt.NDArray[np.float32]


def hertz_to_mel(hertz: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """HTK mel scale, 2595 log10(1 + f / 700) (HTK Book 3.4, section 5.4)."""
    return 2595.0 * np.log10(1.0 + np.asarray(hertz, np.float64) / 700.0)


def mel_to_hertz(mel: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Inverse of `hertz_to_mel`."""
    return 700.0 * (10.0 ** (np.asarray(mel, np.float64) / 2595.0) - 1.0)


def mel_filters() -> Float:
    """Triangles, evenly spaced on the HTK mel scale from 30 Hz to 12 kHz, averaged over each bin's width, summing to 1.

    Averaging over the bin matters below 1 kHz, where triangles are narrower than the 23.4 Hz between bins: sampled at
    the bin centres they would be ragged or empty.

    Returns:
        `[F, M]`.
    """
    corners = mel_to_hertz(np.linspace(hertz_to_mel(LOW_HZ), hertz_to_mel(SAMPLE_RATE / 2), BANDS + 2))
    bin_hertz = SAMPLE_RATE / N_FFT
    places = (np.arange((N_FFT // 2 + 1) * _SUBBINS) + 0.5) / _SUBBINS - 0.5
    hertz = places[:, None] * bin_hertz
    rising = (hertz - corners[:-2]) / (corners[1:-1] - corners[:-2])
    falling = (corners[2:] - hertz) / (corners[2:] - corners[1:-1])
    fine = np.maximum(0.0, np.minimum(rising, falling))
    filters = fine.reshape(-1, _SUBBINS, BANDS).mean(axis=1)
    filters_FM: Float = (filters / filters.sum(axis=0)).astype(np.float32)
    return filters_FM


class LogMel:
    """Log-mel features: frame t is centred on sample `320 t + 160`, so N samples give `N // 320` frames."""

    sample_rate = SAMPLE_RATE
    frame_rate = SAMPLE_RATE / HOP
    dim = BANDS
    settings: ClassVar[dict[str, object]] = {
        "recipe": "log-mel, HTK triangles 30-12000 Hz, residual k-means",
        "bands": BANDS,
        "n_fft": N_FFT,
        "hop": HOP,
    }

    def __init__(self) -> None:
        self._window = np.hanning(N_FFT + 1)[:-1].astype(np.float32)
        self._filters_FM = mel_filters()

    def __call__(self, audio_1N: Audio) -> Float:
        """Features `[T, M]`, natural logarithm of the power in each band.

        Raises:
            ValueError: see `check_audio`.
        """
        check_audio(audio_1N, HOP)
        frames = audio_1N.shape[1] // HOP
        side = (N_FFT - HOP) // 2
        padded = np.pad(audio_1N[0], (side, N_FFT))
        out_TM = np.empty((frames, BANDS), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP]
        for low in range(0, frames, CHUNK_FRAMES):
            part = windows[low : min(low + CHUNK_FRAMES, frames)] * self._window
            spectrum = np.fft.rfft(part, axis=1)
            power_TF = spectrum.real**2 + spectrum.imag**2
            out_TM[low : low + len(part)] = np.log(np.maximum(power_TF @ self._filters_FM, FLOOR))
        return out_TM


class ResidualCodec:
    """A codec of frame features and residual k-means books (`rvq_mel`, `lyra`)."""

    def __init__(self, name: str, features: FrameFeatures, books: ResidualKMeans) -> None:
        if books.mean_D.shape[0] != features.dim:
            raise ValueError(f"the books have {books.mean_D.shape[0]} dimensions, {name} features have {features.dim}")
        self.features = features
        self.books = books
        count, size, _ = books.books_KVD.shape
        settings = {**features.settings, "books_sha256": books.digest}
        self.spec = Codec(name, features.sample_rate, features.frame_rate, count, size, settings)

    def encode(self, audio_1N: Audio) -> Codes:
        """Codes `[K, T]`; see `AudioCodec.encode`."""
        return self.books.encode(self.features(audio_1N))


def build_features(options: CodecOptions) -> LogMel:
    """The log-mel features."""
    if options.weights is not None:
        raise ValueError("rvq_mel has no weights: leave --weights away (books are given by --books or --fit)")
    if options.device != "cpu":
        raise ValueError(f"device={options.device!r}: {options.name} runs on the CPU only")
    return LogMel()


def build(options: CodecOptions) -> AudioCodec:
    """The codec with the books of `options.books`.

    Raises:
        ValueError: no books, or damaged ones.
    """
    features = build_features(options)
    if options.books is None:
        raise ValueError("rvq_mel has no books yet: give --fit to make them from your audio, or --books FILE")
    return ResidualCodec("rvq_mel", features, load_books(options.books).first(options.num_codebooks))
