"""Entropies of codes: the lines a training curve is read against.

Uniform is log2(V) bits; a run above the unigram line has learned nothing, one above the bigram line no more than the
frame before tells.

Legend: K codebooks, T frames, V codes a codebook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.shard_reader import ShardReader
from datamodules.shards import load_index, resolve_root

Codes = npt.NDArray[np.integer[Any]]


def entropy_bits(counts: npt.NDArray[np.integer[Any]]) -> float:
    """Plug-in entropy of a histogram of any shape, in bits (Shannon 1948, section 6)."""
    total = counts.sum()
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def unigram_bits(tracks_KT: Iterable[Codes], codebook_size: int) -> list[float]:
    """Entropy of each codebook, bits a code: what a model scores that knows the frequencies only.

    Args:
        tracks_KT: tracks of codes, each `[K, T]`.
        codebook_size: V.

    Returns:
        `[K]`.
    """
    total: npt.NDArray[np.int64] | None = None
    for codes_KT in tracks_KT:
        counts_KV = np.stack([np.bincount(row, minlength=codebook_size) for row in codes_KT])
        total = counts_KV if total is None else total + counts_KV
    return [] if total is None else [entropy_bits(row) for row in total]


def bigram_bits(tracks_KT: Iterable[Codes], codebook_size: int) -> list[float]:
    """Entropy of each codebook given its own code one frame earlier, H(x_t | x_{t-1}), in bits.

    Plug-in estimate: it lies below the truth where frames are few against V^2, so it is an optimistic line.

    Args:
        tracks_KT: tracks of codes, each `[K, T]`; pairs never cross a track border.
        codebook_size: V.

    Returns:
        `[K]`.
    """
    pairs: list[list[npt.NDArray[np.int64]]] = []
    for codes_KT in tracks_KT:
        wide = codes_KT.astype(np.int64)
        joint_KT = wide[:, :-1] * codebook_size + wide[:, 1:]
        pairs = pairs or [[] for _ in wide]
        for book, row in enumerate(joint_KT):
            pairs[book].append(row)
    return [_conditional(np.concatenate(rows), codebook_size) for rows in pairs]


def _conditional(joint: npt.NDArray[np.int64], codebook_size: int) -> float:
    values, counts = np.unique(joint, return_counts=True)
    before = np.bincount(values // codebook_size, weights=counts, minlength=codebook_size).astype(np.int64)
    return entropy_bits(counts) - entropy_bits(before)


def reference_lines(data_dir: str = "bundled", split: str = "train") -> dict[str, list[float]]:
    """Uniform, unigram and bigram lines of a shard set, bits a code: `{"uniform": [K], "unigram": [K], "bigram": [K]}`.

    Raises:
        FileNotFoundError: no such set.
        ValueError: damage, or no track of that split.
    """
    index = load_index(data_dir)
    reader = ShardReader(resolve_root(data_dir), index)
    tracks = [
        reader.read_track(number, track)
        for number, shard in enumerate(index.shards)
        if shard.split == split
        for track in range(len(shard.tracks))
    ]
    if not tracks:
        raise ValueError(f"{data_dir}: no track of split {split!r}; its splits are {list(index.splits)}")
    size = index.codec.codebook_size
    uniform = [float(np.log2(size))] * index.codec.codebooks
    return {"uniform": uniform, "unigram": unigram_bits(tracks, size), "bigram": bigram_bits(tracks, size)}
