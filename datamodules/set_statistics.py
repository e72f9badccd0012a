"""What is in a shard set: hours by split and licence, entropies and dead codes per codebook, tracks that are twice in.

Legend: K codebooks, V codes a codebook, T frames.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.entropy import bigram_bits, entropy_bits
from datamodules.shard_reader import ShardReader
from datamodules.shards import ShardIndex, Track

SAMPLE_HOURS = 20.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Tracks and hours of one group."""

    tracks: int
    hours: float


@dataclass(frozen=True, slots=True)
class SetStatistics:
    """One shard set's statistics.

    Attributes:
        splits: split -> totals.
        licences: licence -> totals.
        unigram_bits: entropy of each codebook, `[K]`.
        bigram_bits: entropy of each codebook given its code one frame earlier, `[K]`, from `bigram_hours`.
        dead_codes: codes of each codebook that never occur, `[K]`.
        top_share: share of the most frequent code of each codebook, `[K]`.
        duplicates: groups of names of tracks whose codes are the same.
        bigram_hours: hours that the bigram entropy was taken from.
    """

    splits: dict[str, Totals]
    licences: dict[str, Totals]
    unigram_bits: list[float]
    bigram_bits: list[float]
    dead_codes: list[int]
    top_share: list[float]
    duplicates: list[list[str]]
    bigram_hours: float


def read_tracks(reader: ShardReader) -> Iterator[tuple[Track, str, npt.NDArray[np.int16]]]:
    """Every track of a set in order: its row, its split, its codes `[K, T]`.

    Raises:
        BadShardError: a shard is damaged.
    """
    for number, shard in enumerate(reader.shards):
        first = 0
        for track in shard.tracks:
            shard_B, frame_B, length_B = (np.array([value], np.int64) for value in (number, first, track.frames))
            yield track, shard.split, reader.read(shard_B, frame_B, length_B, track.frames)[0].T
            first += track.frames


def track_digest(codes_KT: npt.NDArray[np.integer[Any]]) -> str:
    """SHA-256 of a track's codes and shape, as hex."""
    shape = f"{codes_KT.shape[0]} {codes_KT.shape[1]} ".encode()
    return hashlib.sha256(shape + np.ascontiguousarray(codes_KT, "<i2").tobytes()).hexdigest()


def set_statistics(
    root: Path,
    index: ShardIndex,
    sample_hours: float = SAMPLE_HOURS,
    progress: Callable[[int], None] = lambda frames: None,
) -> SetStatistics:
    """Read a whole set once and count.

    Args:
        root: its folder.
        index: its index.
        sample_hours: the bigram entropy is taken from about so many hours, tracks spread evenly over the set (all
            pairs of a large set would not fit in memory).
        progress: called with the frames of each track.

    Raises:
        BadShardError: a shard is damaged.
    """
    codec = index.codec
    every = max(1.0, index.hours / sample_hours) if sample_hours > 0 else float("inf")
    counts_KV = np.zeros((codec.codebooks, codec.codebook_size), np.int64)
    names: dict[str, list[str]] = defaultdict(list)
    sample: list[npt.NDArray[np.int16]] = []
    groups: tuple[dict[str, list[int]], dict[str, list[int]]] = (defaultdict(list), defaultdict(list))
    for number, (track, split, codes_KT) in enumerate(read_tracks(ShardReader(root, index))):
        for book, row in enumerate(codes_KT):
            counts_KV[book] += np.bincount(row, minlength=codec.codebook_size)
        names[track_digest(codes_KT)].append(track.name)
        groups[0][split].append(track.frames)
        groups[1][track.licence].append(track.frames)
        if len(sample) * every <= number:
            sample.append(codes_KT)
        progress(track.frames)
    per_hour = codec.frame_rate * 3600
    splits, licences = ({k: Totals(len(v), sum(v) / per_hour) for k, v in sorted(g.items())} for g in groups)
    return SetStatistics(
        splits=splits,
        licences=licences,
        unigram_bits=[entropy_bits(row) for row in counts_KV],
        bigram_bits=bigram_bits(sample, codec.codebook_size),
        dead_codes=[int((row == 0).sum()) for row in counts_KV],
        top_share=[float(row.max() / max(row.sum(), 1)) for row in counts_KV],
        duplicates=[group for group in names.values() if len(group) > 1],
        bigram_hours=sum(codes_KT.shape[1] for codes_KT in sample) / per_hour,
    )
