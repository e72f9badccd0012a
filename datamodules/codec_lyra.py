"""`lyra`: the SoundStream encoder of Lyra V2 (google/lyra, Apache-2.0) and residual k-means on its latents.

The user gives the folder with `soundstream_encoder.tflite`. The encoder takes 320 samples to 64 numbers; it was made
for 16 kHz (50 frames a second), and fed 24 kHz audio sample for sample it gives 75. Its own quantizer (46 books of
16 codes) is replaced by K books of 1024, fitted with --fit.

Legend: N samples, T frames, D = 64 latents, K codebooks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.codec_rvq_mel import ResidualCodec
from datamodules.codecs import Audio, AudioCodec, CodecOptions, check_audio
from datamodules.residual_kmeans import load_books

SAMPLE_RATE = 24_000
HOP = 320
ENCODER = "soundstream_encoder.tflite"


class LyraLatents:
    """Latents of the streaming encoder; every track starts from the encoder's initial state.

    Args:
        folder: holds `soundstream_encoder.tflite`.

    Raises:
        ValueError: no such file, or a model of other shapes.
        ImportError: ai-edge-litert is not installed.
    """

    sample_rate = SAMPLE_RATE
    frame_rate = SAMPLE_RATE / HOP

    def __init__(self, folder: str | Path) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._kind = Interpreter
        path = Path(folder).expanduser() / ENCODER
        if not path.is_file():
            raise ValueError(f"weights={str(folder)!r}: no {ENCODER} in it (google/lyra, lyra/model_coeffs)")
        self._model = path.read_bytes()
        try:
            interpreter = self._fresh()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: not a model that can be run ({str(error).splitlines()[0]})") from None
        taken, given = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
        if int(np.prod(taken["shape"])) != HOP:
            raise ValueError(f"{path}: takes {list(taken['shape'])}, not {HOP} samples")
        self.dim = int(np.prod(given["shape"]))
        digest = hashlib.sha256(self._model).hexdigest()
        self.settings = {"recipe": "Lyra V2 SoundStream latents, residual k-means", "weights_sha256": digest}

    def _fresh(self) -> Any:
        """An interpreter in its initial state (3 ms); `reset_all_variables` leaves another state than that."""
        interpreter = self._kind(model_content=self._model, num_threads=1)
        interpreter.allocate_tensors()
        return interpreter

    def __call__(self, audio_1N: Audio) -> npt.NDArray[np.float32]:
        """Latents `[T, D]`, T = N // 320; samples that do not fill a frame are left away."""
        check_audio(audio_1N, HOP)
        interpreter = self._fresh()
        taken, given = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
        frames_TN = audio_1N[0, : audio_1N.shape[1] // HOP * HOP].reshape(-1, *taken["shape"])
        out_TD = np.empty((len(frames_TN), self.dim), np.float32)
        for t, frame in enumerate(frames_TN):
            interpreter.set_tensor(taken["index"], frame)
            interpreter.invoke()
            out_TD[t] = interpreter.get_tensor(given["index"]).ravel()
        return out_TD


def build_features(options: CodecOptions) -> LyraLatents:
    """The latents of the encoder in `options.weights`."""
    if options.weights is None:
        raise ValueError(f"lyra needs --weights: a folder with {ENCODER} (google/lyra, lyra/model_coeffs)")
    if options.device != "cpu":
        raise ValueError(f"device={options.device!r}: lyra runs on the CPU only")
    return LyraLatents(options.weights)


def build(options: CodecOptions) -> AudioCodec:
    """The codec with the books of `options.books`.

    Raises:
        ValueError: no weights, no books, or damaged ones.
    """
    features = build_features(options)
    if options.books is None:
        raise ValueError("lyra has no books yet: give --fit to make them from your audio, or --books FILE")
    return ResidualCodec("lyra", features, load_books(options.books).first(options.num_codebooks))
