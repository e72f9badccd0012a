"""Span masks, drawn on the CPU from each clip's own seed.

A clip's mask depends on its seed and its number of frames alone: not on the rest of the batch, the padding, the rank
or the worker. Replays and resumes therefore see the same masks, and ranks with other seeds see others.

Legend: B clips, T frames, M masked frames.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["clip_mask", "expected_coverage", "mask_count", "masked_indices", "span_mask", "unmasked_indices"]

# Share of the drawn coverage kept. fairseq cuts each clip to the least covered one of its batch; at 8 clips of 374
# frames that leaves 54.7 of 58.2 per cent. A count that is a function of the length keeps the level and drops the
# dependence on the batch.
KEPT_SHARE = 0.94

Mask = npt.NDArray[np.bool_]


def _mean_spans(num_frames: int, prob: float, length: int, min_masks: int) -> float:
    return max(float(min_masks), prob * num_frames / length)


@lru_cache(maxsize=4096)
def expected_coverage(num_frames: int, prob: float = 0.8, length: int = 5, min_masks: int = 2) -> float:
    """Expected share of masked frames of an unequalized draw: span starts are a draw without replacement.

    A frame stays unmasked when none of the (up to ``length``) starts that would cover it is drawn, which for n starts
    out of S has probability C(S - c, n) / C(S, n) for c covering starts.
    """
    starts = num_frames - length
    if starts < 1:
        return 1.0
    spans = min(starts, round(_mean_spans(num_frames, prob, length, min_masks)))
    frame = np.arange(num_frames)
    covering = np.minimum(frame, starts - 1) - np.maximum(frame - length + 1, 0) + 1
    unmasked = np.array([_log_choose(starts - int(c), spans) - _log_choose(starts, spans) for c in covering])
    return float(1.0 - np.exp(unmasked).mean())


def _log_choose(n: int, k: int) -> float:
    if k > n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def mask_count(num_frames: int, prob: float = 0.8, length: int = 5, min_masks: int = 2) -> int:
    """Masked frames of a clip: a function of its length alone, 0.547 of 374 frames at 0.8 / 5.

    Equal lengths give equal counts, so batches of full clips have static shapes and all ranks agree on the count
    without communication. At least one frame is masked, and from two frames on at least one is not.
    """
    if num_frames < 1:
        return 0
    wanted = round(KEPT_SHARE * expected_coverage(num_frames, prob, length, min_masks) * num_frames)
    return max(1, min(wanted, num_frames - 1))


def clip_mask(
    seed: int,
    num_frames: int,
    *,
    prob: float = 0.8,
    length: int = 5,
    min_masks: int = 2,
    equalize: bool = True,
) -> Mask:
    """Mask one clip: static spans that may overlap (fairseq ``compute_mask_indices``, wav2vec 2.0 and HuBERT).

    ``prob * num_frames / length`` spans (rounded at random to a neighbour, at least ``min_masks``) start at frames
    drawn without replacement; ``prob`` is therefore not the share of masked frames. With ``equalize`` the mask is
    then brought to :func:`mask_count` frames: spans are added if it has fewer, single frames un-masked at random if
    it has more (as fairseq un-masks them to equalize a batch).

    Args:
        seed: The clip's seed.
        num_frames: Valid frames of the clip.
        prob: Span starts times length over frames.
        length: Frames of a span.
        min_masks: Fewest spans.
        equalize: Fix the count to a function of the length.

    Returns:
        bool ``[num_frames]`` with at least one frame masked (none if there are no frames).
    """
    rng = np.random.default_rng(seed % 2**64)
    mask = np.zeros(num_frames, dtype=np.bool_)
    if num_frames < 1:
        return mask
    starts = max(1, num_frames - length)
    spans = math.floor(prob * num_frames / length + rng.random())
    _set_spans(mask, rng.choice(starts, size=min(starts, max(min_masks, spans, 1)), replace=False), length)
    if not equalize:
        return mask
    count = mask_count(num_frames, prob, length, min_masks)
    while mask.sum() < count:
        _set_spans(mask, rng.choice(np.flatnonzero(~mask), size=1), length)
    surplus = int(mask.sum()) - count
    mask[rng.choice(np.flatnonzero(mask), size=surplus, replace=False)] = False
    return mask


def _set_spans(mask: Mask, starts: npt.NDArray[np.int64], length: int) -> None:
    frames = starts[:, None] + np.arange(length)
    mask[frames[frames < mask.shape[0]]] = True


def span_mask(
    mask_seed_B: Tensor | Sequence[int],
    num_frames_B: Tensor | Sequence[int],
    num_frames_max: int,
    *,
    prob: float = 0.8,
    length: int = 5,
    min_masks: int = 2,
    equalize: bool = True,
) -> Tensor:
    """Mask a batch, clip by clip (see :func:`clip_mask`). Call it on the CPU.

    Args:
        mask_seed_B: Seed of each clip's mask.
        num_frames_B: Valid frames of each clip.
        num_frames_max: T, frames of the padded batch.
        prob: Span starts times length over frames.
        length: Frames of a span.
        min_masks: Fewest spans.
        equalize: Fix each clip's count to a function of its length.

    Returns:
        bool ``mask_BT``, false on padding.

    Raises:
        ValueError: prob, length or min_masks out of range, or a clip longer than the batch.
    """
    _check_options(prob, length, min_masks)
    seeds, frames = [int(s) for s in mask_seed_B], [int(n) for n in num_frames_B]
    if max(frames, default=0) > num_frames_max:
        raise ValueError(f"num_frames={max(frames)} is out of range; the batch has {num_frames_max} frames")
    mask_BT = np.zeros((len(frames), num_frames_max), dtype=np.bool_)
    for row, seed, count in zip(mask_BT, seeds, frames, strict=True):
        row[:count] = clip_mask(seed, count, prob=prob, length=length, min_masks=min_masks, equalize=equalize)
    return torch.from_numpy(mask_BT)


def _check_options(prob: float, length: int, min_masks: int) -> None:
    if not 0.0 < prob <= 1.0:
        raise ValueError(f"mask_prob={prob} is out of range; it must be in (0, 1]")
    if length < 1:
        raise ValueError(f"mask_length={length} is out of range; it must be at least 1")
    if min_masks < 0:
        raise ValueError(f"min_masks={min_masks} is out of range; it must be 0 or more")


def masked_indices(mask_BT: Tensor) -> Tensor:
    """Indices of the masked frames in the flattened ``[B * T]`` axis, int64 ``[M]``.

    Computed on the CPU before the transfer, so that picking masked frames on the device needs no sync.
    """
    return torch.from_numpy(np.flatnonzero(mask_BT.numpy()))


def unmasked_indices(mask_BT: Tensor, num_frames_B: Tensor, limit: int | None = None) -> Tensor:
    """Indices of valid frames that are not masked, int64, the first ``limit`` of them; computed on the CPU.

    For the health signal that compares accuracy on unmasked and masked frames.
    """
    valid_BT = torch.arange(mask_BT.shape[1]) < num_frames_B.unsqueeze(1)
    return torch.from_numpy(np.flatnonzero((valid_BT & ~mask_BT).numpy())[:limit])
