"""`encodec_24khz` and `dac_24khz` through transformers, from a local folder or a hub id.

A track is encoded in overlapping windows whose outer parts are thrown away, so that memory does not grow with its
length. EnCodec: Défossez et al. 2022, arXiv:2210.13438. DAC: Kumar et al. 2023, arXiv:2306.06546.

Legend: N samples, K codebooks, T frames, W windows.
"""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError  # raised by torch's own reader; nothing is unpickled here
from typing import Any

import numpy as np
import torch

from datamodules.codecs import Audio, AudioCodec, CodecOptions, Codes, check_audio
from datamodules.shards import Codec

HUB_IDS = {"encodec_24khz": "facebook/encodec_24khz", "dac_24khz": "descript/dac_24khz"}
SAMPLE_RATE = 24_000
WINDOW_SECONDS = 20
CONTEXT_SECONDS = 2
PROBE_SECONDS = 5.0


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


def load_model(name: str, weights: str) -> Any:
    """Load `EncodecModel` or `DacModel` from a folder, the local hub cache, or the hub.

    Raises:
        ValueError: see `build`.
    """
    from transformers import DacModel, EncodecModel

    kind: Any = EncodecModel if name == "encodec_24khz" else DacModel
    folder = Path(weights).expanduser()
    if folder.is_dir():
        return _from_pretrained(kind, str(folder), local=True)
    if os.sep in weights and (weights.startswith((".", os.sep, "~")) or weights.count("/") != 1):
        raise ValueError(f"weights={weights!r}: no such folder")
    try:
        return _from_pretrained(kind, weights, local=True)
    except ValueError:
        check_hub(weights)
    return _from_pretrained(kind, weights, local=False)


def check_hub(hub_id: str) -> None:
    """Fail at once where the hub is out of reach; transformers would retry for 23 s.

    Raises:
        ValueError: no network, or offline mode.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    hint = f"fetch {hub_id} where there is a network and give its folder as --weights"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise ValueError(f"weights={hub_id!r}: not in the local cache, and HF_HUB_OFFLINE is set; {hint}")
    request = urllib.request.Request(f"{endpoint}/{hub_id}/resolve/main/config.json", method="HEAD")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()  # noqa: S310 - the user's own endpoint
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            reason = f"{endpoint} answers {error.code}: no such model, or not public"
            raise ValueError(f"weights={hub_id!r}: {reason}") from None
    except OSError as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        where = f"not in the local cache, and {endpoint} cannot be reached ({why})"
        raise ValueError(f"weights={hub_id!r}: {where}; {hint}") from None


def _from_pretrained(kind: Any, source: str, *, local: bool) -> Any:
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, info = kind.from_pretrained(source, local_files_only=local, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, PickleError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"weights={source!r}: no {kind.__name__} can be read there ({reason})") from None
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys", ()))
    if lacking:  # transformers would fill them with random numbers and only warn
        raise ValueError(
            f"weights={source!r}: {len(lacking)} of {kind.__name__}'s weights are missing or of another shape, first"
            f" {lacking[0]!r}"
        )
    return model


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all weights, as hex."""
    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode())
        whole.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


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
