"""`encodec_24khz` and `dac_24khz` through transformers, from a local folder or a hub id.

A track is encoded in overlapping windows whose outer parts are thrown away, so that memory does not grow with its
length. EnCodec: Défossez et al. 2022, arXiv:2210.13438. DAC: Kumar et al. 2023, arXiv:2306.06546.

Legend: N samples, K codebooks, T frames, W windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from datamodules.codecs import Audio, AudioCodec, CodecOptions, Codes, check_audio
from datamodules.hub_weights import load_model, weights_digest
from datamodules.shards import Codec

HUB_IDS = {"encodec_24khz": "facebook/encodec_24khz", "dac_24khz": "descript/dac_24khz"}
SAMPLE_RATE = 24_000
WINDOW_SECONDS = 20
CONTEXT_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Window:
    """One window: read samples `start..stop`, keep frames `low..high` of the track."""

    start: int
    stop: int
    low: int
    high: int


def windows(samples: int, hop: int, window_frames: int, context_frames: int) -> Iterator[Window]:
    """Cut a track into windows with `context_frames` on both sides of what is kept (less at the track's ends).

    Args:
        samples: N.
        hop: samples a frame.
        window_frames: frames kept of each window.
        context_frames: frames read and thrown away on each side.
    """
    frames = -(-samples // hop)
    for low in range(0, frames, window_frames):
        high = min(low + window_frames, frames)
        start = max(low - context_frames, 0) * hop
        yield Window(start, min((high + context_frames) * hop, samples), low, high)


class WindowedCodec:
    """A transformers codec model, encoded window by window.

    Args:
        spec: its description.
        encode_batch: `[W, 1, N]` float tensor on the device -> codes `[W, K, T]`.
        device: where the model is.
        batch_windows: windows of equal length encoded at once.
    """

    def __init__(
        self,
        spec: Codec,
        encode_batch: Callable[[torch.Tensor], torch.Tensor],
        device: str,
        batch_windows: int = 1,
        window_seconds: float = WINDOW_SECONDS,
        context_seconds: float = CONTEXT_SECONDS,
    ) -> None:
        self.spec = spec
        self._encode = encode_batch
        self._device = device
        self._batch = max(batch_windows, 1)
        self._hop = round(spec.sample_rate / spec.frame_rate)
        self._window = max(round(window_seconds * spec.frame_rate), 1)
        self._context = round(context_seconds * spec.frame_rate)

    def encode(self, audio_1N: Audio) -> Codes:
        """Codes `[K, T]`, T = ceil(N / hop); see `AudioCodec.encode`."""
        check_audio(audio_1N, self._hop)
        samples = audio_1N.shape[1]
        out_KT = np.empty((self.spec.codebooks, -(-samples // self._hop)), np.int16)
        for group in self._groups(samples):
            audio = torch.from_numpy(np.stack([audio_1N[:, w.start : w.stop] for w in group])).to(self._device)
            with torch.inference_mode():
                codes_WKT = self._encode(audio).to("cpu").numpy()
            for window, codes_KT in zip(group, codes_WKT, strict=True):
                skip = window.low - window.start // self._hop
                kept = codes_KT[:, skip : skip + window.high - window.low]
                missing = window.high - window.low - kept.shape[1]
                if missing > 0:  # a model that drops an unfinished last frame
                    kept = np.pad(kept, ((0, 0), (0, missing)), mode="edge")
                out_KT[:, window.low : window.high] = kept
        return out_KT

    def _groups(self, samples: int) -> Iterator[list[Window]]:
        group: list[Window] = []
        for window in windows(samples, self._hop, self._window, self._context):
            same = group and window.stop - window.start == group[0].stop - group[0].start
            if group and (len(group) == self._batch or not same):
                yield group
                group = []
            group.append(window)
        yield group


def build(options: CodecOptions) -> AudioCodec:
    """Load the model and wrap it.

    Raises:
        ValueError: weights that are absent, incomplete, of another sample rate or out of reach; an absent device.
        ImportError: transformers is not installed.
    """
    if options.books is not None:
        raise ValueError(f"{options.name} has its own quantizer: leave --books and --fit away")
    device = check_device(options.device)
    model = load_model(options.name, options.weights or HUB_IDS[options.name]).eval().to(device)
    make = _encodec if options.name == "encodec_24khz" else _dac
    spec, encode = make(model, options.num_codebooks)
    return WindowedCodec(spec, encode, device, options.batch_windows)


def check_device(device: str) -> str:
    """Return `device` if this torch can use it.

    Raises:
        ValueError: it cannot.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={device!r}: not usable here ({reason}); use cpu") from None
    return device


def _encodec(model: Any, num_codebooks: int) -> tuple[Codec, Callable[[torch.Tensor], torch.Tensor]]:
    config = model.config
    _check_rate("encodec_24khz", config.sampling_rate)
    if config.audio_channels != 1 or config.normalize or config.chunk_length is not None:
        raise ValueError("weights: an EnCodec of stereo, normalized chunks (48 kHz); encodec_24khz is mono and whole")
    hop = int(np.prod(config.upsampling_ratios))
    books = {kbps: model.quantizer.get_num_quantizers_for_bandwidth(kbps) for kbps in config.target_bandwidths}
    fitting = [kbps for kbps, count in books.items() if count >= num_codebooks]
    if not fitting:
        raise ValueError(f"num_codebooks={num_codebooks}: this EnCodec has at most {max(books.values())}")
    bandwidth = min(fitting)
    settings = {"bandwidth_kbps": bandwidth, "weights_sha256": weights_digest(model)}
    spec = Codec("encodec_24khz", SAMPLE_RATE, SAMPLE_RATE / hop, num_codebooks, config.codebook_size, settings)

    def encode(audio_W1N: torch.Tensor) -> torch.Tensor:
        out = model.encode(audio_W1N, bandwidth=bandwidth)
        codes: torch.Tensor = out.audio_codes[0]  # one chunk: (chunks, W, K, T)
        return codes[:, :num_codebooks]

    return spec, encode


def _dac(model: Any, num_codebooks: int) -> tuple[Codec, Callable[[torch.Tensor], torch.Tensor]]:
    config = model.config
    _check_rate("dac_24khz", config.sampling_rate)
    if num_codebooks > config.n_codebooks:
        raise ValueError(f"num_codebooks={num_codebooks}: this DAC has {config.n_codebooks}")
    hop = int(np.prod(config.downsampling_ratios))
    settings = {"weights_sha256": weights_digest(model)}
    spec = Codec("dac_24khz", SAMPLE_RATE, SAMPLE_RATE / hop, num_codebooks, config.codebook_size, settings)

    def encode(audio_W1N: torch.Tensor) -> torch.Tensor:
        padding = -audio_W1N.shape[-1] % hop
        padded = torch.nn.functional.pad(audio_W1N, (0, padding))
        codes: torch.Tensor = model.encode(padded, n_quantizers=num_codebooks).audio_codes
        return codes

    return spec, encode


def _check_rate(name: str, rate: int) -> None:
    if rate != SAMPLE_RATE:
        raise ValueError(f"weights: a model for {rate} Hz; {name} needs one for {SAMPLE_RATE} Hz")
