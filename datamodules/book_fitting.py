"""Fit a codec's residual k-means books on the user's own audio: excerpts spread over the tracks.

Legend: T frames, D feature dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from datamodules.audio import AudioError, AudioFile, read_audio
from datamodules.codecs import FrameFeatures
from datamodules.track_facts import hash_share

MIN_EXCERPT_FRAMES = 375
FIT_FRAMES = 80_000


def sample_features(
    files: Sequence[AudioFile],
    features: FrameFeatures,
    *,
    num_frames: int = FIT_FRAMES,
    progress: Callable[[int], None] = lambda frames: None,
) -> npt.NDArray[np.float32]:
    """Features of one excerpt per file, files in the order of their ids' hash, until there are enough.

    Both the order and each excerpt's place depend on the track ids only, so the same folder gives the same frames.
    Files that cannot be read are passed over; encoding reports them.

    Args:
        files: the audio.
        features: what to compute.
        num_frames: T wanted.
        progress: called with the frames there are so far.

    Returns:
        `[T, D]`, T at most `num_frames`.

    Raises:
        ValueError: no file can be read.
    """
    excerpt_frames = max(-(-num_frames // max(len(files), 1)), MIN_EXCERPT_FRAMES)
    seconds = excerpt_frames / features.frame_rate
    parts: list[npt.NDArray[np.float32]] = []
    total = 0
    for file in sorted(files, key=lambda file: hash_share(file.track)):
        place = hash_share("excerpt of " + file.track)
        try:
            part_TD = features(read_audio(file.path, features.sample_rate, start=place, seconds=seconds))
        except (AudioError, ValueError):
            continue
        parts.append(part_TD)
        total += len(part_TD)
        progress(min(total, num_frames))
        if total >= num_frames:
            break
    if not parts:
        raise ValueError("none of the files can be read as audio: nothing to fit books on")
    return np.concatenate(parts)[:num_frames]
