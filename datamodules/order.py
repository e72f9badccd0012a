"""Position -> sample: the order of the endless stream, for any rank of any world, without a trainer or a file.

Position p is global batch `p // global_batch`, slot `p % global_batch`. One set: every epoch is another permutation
of all its clips, cut to whole global batches, so that no clip comes twice in an epoch and all ranks get equally
many. A mixture: of every `PERIOD` positions each set gets its exact share, in pseudo-random order, and goes through
its own clips in its own epochs.

Legend: N clips, G global batch, M positions asked for at once, C parts of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from datamodules.permutation import (
    BLEND,
    CROP,
    MASK,
    SHUFFLE,
    SUBSTITUTE,
    Int64,
    UInt64,
    below,
    hash_words,
    permute,
)

PERIOD = 10_000
MAX_TRIES = 1000


@dataclass(frozen=True)
class Order:
    """The order of samples as a pure function of (seed, position).

    Attributes:
        part_clips: first clip id of each part, `[C + 1]`.
        shard_clips: first clip id of each shard, `[S + 1]`; used by the block shuffle only.
        seed: any integer.
        global_batch: G, clips of one batch over all ranks.
        weights: relative share of each part.
        shuffle_shards: 0 shuffles globally; n > 0 shuffles the shards and, inside every n consecutive ones, the clips.
    """

    part_clips: tuple[int, ...]
    shard_clips: tuple[int, ...]
    seed: int
    global_batch: int
    weights: tuple[float, ...] = (1.0,)
    shuffle_shards: int = 0
    quotas: Int64 = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch={self.global_batch}: must be at least 1")
        if self.shuffle_shards < 0:
            raise ValueError(f"shuffle_shards={self.shuffle_shards}: must be 0 (global shuffle) or a number of shards")
        if self.num_clips > 2**32:
            raise ValueError(f"{self.num_clips} clips: the order holds at most 2^32")
        if self.num_clips < self.global_batch:
            raise ValueError(f"global_batch={self.global_batch}: larger than the set, which has {self.num_clips} clips")
        object.__setattr__(self, "quotas", mixture_quotas(self.weights, len(self.part_clips) - 1))

    @property
    def num_clips(self) -> int:
        """N, the clips of all parts."""
        return self.part_clips[-1]

    @property
    def batches_per_epoch(self) -> int:
        """Whole global batches in N clips; the rest of an epoch, less than one global batch, is left out."""
        return self.num_clips // self.global_batch

    def positions(self, batch_number: int, rank: int = 0, world: int = 1) -> Int64:
        """Positions of one rank's share of a global batch, `[G / world]`."""
        if self.global_batch % world:
            raise ValueError(f"global_batch={self.global_batch}: not divisible by {world} ranks")
        share = self.global_batch // world
        low = batch_number * self.global_batch + rank * share
        return np.arange(low, low + share, dtype=np.int64)

    def samples(self, position_M: Int64) -> tuple[Int64, Int64]:
        """Clip ids and the epochs (of their part) in which they come, both `[M]`."""
        if len(self.quotas) == 1:
            length = self.batches_per_epoch * self.global_batch
            epoch_M = position_M // length
            return self._shuffled(0, position_M % length, epoch_M), epoch_M
        return self._blended(position_M)

    def crop_bits(self, sample_M: Int64, epoch_M: Int64) -> UInt64:
        """Random words that place the crops, `[M]`."""
        return hash_words(CROP, self.seed, epoch_M, sample_M)

    def mask_seeds(self, position_M: Int64) -> Int64:
        """Seeds of the clips' masks, `[M]`, in `0 <= seed < 2^63`."""
        return (hash_words(MASK, self.seed, position_M) >> np.uint64(1)).astype(np.int64)

    def substitute(self, position_M: Int64, sample_M: Int64, refused_M: Int64 | None, attempt: int) -> Int64:
        """Other clips of the same parts for `sample_M`: pure in (seed, position, attempt).

        Args:
            position_M: where the clips stand.
            sample_M: the clips to replace, `[M]`.
            refused_M: banned clip ids, or None.
            attempt: 0 for the first candidate, 1 for the next, ...

        Raises:
            ValueError: after `MAX_TRIES` candidates.
        """
        if attempt >= MAX_TRIES:
            banned = 0 if refused_M is None else len(refused_M)
            what = f"{banned} of {self.num_clips} clips are banned, or all shards of a set are bad"
            raise ValueError(f"no usable clip after {MAX_TRIES} candidates: {what}")
        bounds = np.array(self.part_clips, np.int64)
        part = np.searchsorted(bounds, sample_M, side="right") - 1
        bits = hash_words(SUBSTITUTE, self.seed, position_M, attempt)
        chosen: Int64 = bounds[part] + below(bits, bounds[part + 1] - bounds[part])
        return chosen

    def _blended(self, position_M: Int64) -> tuple[Int64, Int64]:
        period_M = position_M // PERIOD
        place_M = permute(position_M % PERIOD, PERIOD, hash_words(BLEND, self.seed, period_M))
        bounds = np.concatenate([[0], np.cumsum(self.quotas)])
        part_M = np.searchsorted(bounds, place_M, side="right") - 1
        sample_M, epoch_M = np.empty_like(position_M), np.empty_like(position_M)
        for part, quota in enumerate(self.quotas.tolist()):
            here = np.flatnonzero(part_M == part)
            index = period_M[here] * quota + place_M[here] - bounds[part]
            size = self.part_clips[part + 1] - self.part_clips[part]
            epoch_M[here] = index // size
            sample_M[here] = self._shuffled(part, index % size, epoch_M[here])
        return sample_M, epoch_M

    def _shuffled(self, part: int, index_M: Int64, epoch_M: Int64) -> Int64:
        low, high = self.part_clips[part], self.part_clips[part + 1]
        if self.shuffle_shards == 0:
            if len(epoch_M) and epoch_M.min() == epoch_M.max():
                epoch_M = epoch_M[:1]  # one key for all is quicker
            return low + permute(index_M, high - low, hash_words(SHUFFLE, self.seed, part, epoch_M))
        sample_M = np.empty_like(index_M)
        for epoch in np.unique(epoch_M).tolist():
            here = np.flatnonzero(epoch_M == epoch)
            sample_M[here] = self._block_shuffled(part, index_M[here], epoch)
        return sample_M

    def _block_shuffled(self, part: int, index_M: Int64, epoch: int) -> Int64:
        shards, ends = _shard_order(
            self.shard_clips, self.part_clips[part], self.part_clips[part + 1], self.seed, epoch
        )
        bounds = np.concatenate([[0], ends])
        window_M = (np.searchsorted(ends, index_M, side="right")) // self.shuffle_shards
        low_M = bounds[window_M * self.shuffle_shards]
        high_M = bounds[np.minimum((window_M + 1) * self.shuffle_shards, len(ends))]
        key_M = hash_words(SHUFFLE, self.seed, part, epoch, window_M)
        place_M = low_M + permute(index_M - low_M, high_M - low_M, key_M)
        slot_M = np.searchsorted(ends, place_M, side="right")
        sample_M: Int64 = np.array(self.shard_clips, np.int64)[shards[slot_M]] + place_M - bounds[slot_M]
        return sample_M


@lru_cache(maxsize=16)
def _shard_order(clips: tuple[int, ...], low: int, high: int, seed: int, epoch: int) -> tuple[Int64, Int64]:
    """The shards of a part in the order of an epoch, and the clips before the end of each."""
    first = np.array(clips, np.int64)
    mine = np.flatnonzero((first[:-1] >= low) & (first[:-1] < high) & (np.diff(first) > 0))
    shards = mine[permute(np.arange(len(mine)), len(mine), hash_words(SHUFFLE, seed, low, epoch))]
    return shards, np.cumsum(np.diff(first)[shards])


def mixture_quotas(weights: Sequence[float], parts: int) -> Int64:
    """How many of every `PERIOD` positions each part gets (largest remainder), `[C]`.

    Raises:
        ValueError: a weight is not positive and finite, their number is wrong, or one is too small to get a position.
    """
    if len(weights) != parts:
        raise ValueError(f"weights: {len(weights)} of them for {parts} shard sets")
    shares = np.array(weights, np.float64)
    if not np.isfinite(shares).all() or (shares <= 0).any():
        raise ValueError(f"weights={list(weights)}: each must be a finite number above 0")
    exact = shares / shares.sum() * PERIOD
    quotas: Int64 = np.floor(exact + 1e-9).astype(np.int64)
    rest = PERIOD - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:rest]] += 1
    if (quotas == 0).any():
        raise ValueError(f"weights={list(weights)}: the smallest share must be at least 1/{PERIOD}")
    return quotas


def next_unskipped(batch_number: int, skip: Sequence[tuple[int, int]]) -> int:
    """The first batch number at or after `batch_number` outside all ranges `[a, b)` of `skip`."""
    for low, high in sorted(skip):
        if low <= batch_number < high:
            batch_number = high
    return batch_number
