"""The stream: position -> batch, over one or several shard sets. A batch is a pure function of (seed, batch number).

Legend: B clips of one rank's batch, K codebooks, T frames a clip, G clips of a global batch.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from datamodules.clips import ClipTable, clip_table
from datamodules.order import Order
from datamodules.permutation import VALIDATION, Int64, hash_words
from datamodules.shard_reader import BadShardError, OpenShard, ShardReader
from datamodules.shards import ShardIndex, load_index

Batch = dict[str, Any]
PLAN_CLIPS = 8192
CONSTANT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class ShardSet:
    """One part of a stream: a shard set, its share of the positions, and how its files are opened.

    Attributes:
        path: folder of the set, or "bundled".
        weight: relative share in a mixture.
        index: its index; read from `path` where None.
        open_shard: gives the local path of a shard (a cache in front of an object store); None reads `path`.
    """

    path: str
    weight: float = 1.0
    index: ShardIndex | None = None
    open_shard: OpenShard | None = None


@dataclass(frozen=True, slots=True)
class BadShards:
    """What to do with a shard that cannot be trusted.

    Attributes:
        policy: "raise", or "skip": its clips are replaced in place by other clips of the same set.
        limit: with "skip", more bad shards than this end the run.
    """

    policy: str = "raise"
    limit: int = 1

    def __post_init__(self) -> None:
        if self.policy not in ("raise", "skip"):
            raise ValueError(f"on_bad_shard={self.policy!r}: must be 'raise' or 'skip'")
        if self.limit < 1:
            raise ValueError(f"max_bad_shards={self.limit}: must be at least 1")


class TokenStream:
    """Batches of crops by number, for any rank of any world.

    Args:
        sets: the shard sets; their codecs must be the same.
        num_frames: T.
        global_batch: G.
        seed: of order, crops and masks.
        split: which split to read.
        min_frames: shorter tracks are left out; those shorter than T but not than this are padded.
        shuffle_shards: see `Order`.
        on_bad_shard: see `BadShards`.
        use_codebooks: serve only the first so many codebooks, as a codec does at a lower bitrate; None for all.
        verify: hash each block on first touch.

    Raises:
        FileNotFoundError: a folder, an index or a listed file is absent.
        ValueError: sets that do not go together, damage found at opening, or a setting out of range.
    """

    def __init__(
        self,
        sets: Sequence[ShardSet],
        *,
        num_frames: int,
        global_batch: int,
        seed: int = 0,
        split: str = "train",
        min_frames: int = 1,
        shuffle_shards: int = 0,
        on_bad_shard: BadShards | None = None,
        use_codebooks: int | None = None,
        verify: bool = True,
    ) -> None:
        if not sets:
            raise ValueError("sets: at least one shard set is needed")
        indexes = [part.index or load_index(part.path) for part in sets]
        _refuse_other_codecs(sets, indexes)
        self.codec = indexes[0].codec
        self.num_codebooks = used_codebooks(use_codebooks, self.codec.codebooks)
        self.bad_shards: dict[int, str] = {}
        self._on_bad_shard = on_bad_shard or BadShards()
        self.table: ClipTable = clip_table(indexes, split, num_frames, min_frames)
        self._ragged = bool((self.table.track_frames < num_frames).any())
        self.order = Order(
            part_clips=tuple(self.table.part_clips.tolist()),
            shard_clips=tuple(self.table.shard_clips.tolist()),
            seed=seed,
            global_batch=global_batch,
            weights=tuple(part.weight for part in sets),
            shuffle_shards=shuffle_shards,
        )
        self.fingerprint = _fingerprint(indexes, split, num_frames, min_frames, self.order)
        self._readers = [
            ShardReader(
                part.path,
                index,
                verify=verify,
                open_shard=part.open_shard,
                whole=self._on_bad_shard.policy == "skip",
                check=False,
            )
            for part, index in zip(sets, indexes, strict=True)
        ]
        self._check_files()
        self._warn_of_constant_codes()
        self._plans: dict[tuple[int, int, int], tuple[Int64, ...]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plans": {}}

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of one epoch."""
        return self.order.batches_per_epoch

    def batch(self, batch_number: int, rank: int = 0, world: int = 1, banned: Sequence[int] = ()) -> Batch:
        """One rank's share of a global batch.

        Args:
            batch_number: number of the global batch, from 0, endless.
            rank: this process.
            world: number of processes.
            banned: clip ids that are replaced in place by other clips.

        Returns:
            The batch: codes int16 `[B, K, T]` and, each `[B]` int64, num_frames, sample_id, track_id, start,
            position, mask_seed; batch_number and num_substituted as plain integers.

        Raises:
            ValueError: damage, under the policy "raise" or beyond the limit; or nothing left to substitute with.
        """
        position_B, sample_B, epoch_B, mask_seed_B = self._planned(batch_number, rank, world)
        changed = 0
        if banned or self.bad_shards:
            sample_B, changed = self._substituted(position_B, sample_B, banned)
        while True:
            bits_B = self.order.crop_bits(sample_B, epoch_B)
            row_B, start_B, length_B = self.table.locate(sample_B, bits_B)
            try:
                codes = self._read(row_B, start_B, length_B)
                break
            except BadShardError as error:
                self._refuse(error)
                sample_B, more = self._substituted(position_B, sample_B, banned)
                changed += more
        codes = codes[..., : self.num_codebooks]
        batch = _as_batch(codes, length_B, sample_B, self.table.track_id[row_B], start_B, position_B, mask_seed_B)
        everyone = length_B if world == 1 else self._lengths_of_all(batch_number, banned, len(length_B) * world)
        batch["global_num_frames"] = torch.from_numpy(everyone)
        return {**batch, "batch_number": batch_number, "num_substituted": changed}

    def _lengths_of_all(self, batch_number: int, banned: Sequence[int], clips: int) -> Int64:
        """Valid frames of every rank's clips, so that each rank knows the global count without a collective."""
        if not self._ragged:
            return np.full(clips, self.table.num_frames, np.int64)
        position_B = self.order.positions(batch_number, 0, 1)
        sample_B, epoch_B = self.order.samples(position_B)
        if banned or self.bad_shards:
            sample_B, _ = self._substituted(position_B, sample_B, banned)
        return self.table.locate(sample_B, self.order.crop_bits(sample_B, epoch_B))[2]

    def fixed_batch(self, sample_B: Int64) -> Batch:
        """Clips by id with fixed crops and fixed masks (validation); as `batch`, position being the clip id."""
        row_B, start_B, length_B = self.table.locate(sample_B, None)
        codes = self._read(row_B, start_B, length_B)
        seeds_B = (hash_words(VALIDATION, self.order.seed, sample_B) >> np.uint64(1)).astype(np.int64)
        codes = codes[..., : self.num_codebooks]
        return _as_batch(codes, length_B, sample_B, self.table.track_id[row_B], start_B, sample_B, seeds_B)

    def _planned(self, batch_number: int, rank: int, world: int) -> tuple[Int64, ...]:
        """Positions, samples, epochs, mask seeds of a batch; computed for many batches at once to share the cost."""
        share = self.order.global_batch // world
        span = max(1, PLAN_CLIPS // max(share, 1))
        key = (batch_number // span, rank, world)
        if key not in self._plans:
            first = key[0] * span
            position = np.concatenate([self.order.positions(first + i, rank, world) for i in range(span)])
            sample, epoch = self.order.samples(position)
            self._plans = {key: (position, sample, epoch, self.order.mask_seeds(position))}
        low = batch_number % span * share
        return tuple(column[low : low + share] for column in self._plans[key])

    def _read(self, row_B: Int64, start_B: Int64, length_B: Int64) -> np.ndarray[Any, np.dtype[np.int16]]:
        table = self.table
        shard_B = table.track_shard[row_B]
        frame_B = table.track_first[row_B] + start_B
        if len(self._readers) == 1:
            return self._read_part(0, shard_B, frame_B, length_B)
        codes = np.empty((len(row_B), table.num_frames, self.codec.codebooks), np.int16)
        part_B = table.part_of_shard[shard_B]
        for part in np.unique(part_B).tolist():
            here = np.flatnonzero(part_B == part)
            codes[here] = self._read_part(part, shard_B[here], frame_B[here], length_B[here])
        return codes

    def _read_part(
        self, part: int, shard_B: Int64, frame_B: Int64, length_B: Int64
    ) -> np.ndarray[Any, np.dtype[np.int16]]:
        local_B = self.table.local_shard[shard_B]
        try:
            return self._readers[part].read(local_B, frame_B, length_B, self.table.num_frames)
        except BadShardError as error:
            raise BadShardError(self._global_shard(part, error.shard), str(error)) from None

    def _global_shard(self, part: int, local: int) -> int:
        found = np.flatnonzero((self.table.part_of_shard == part) & (self.table.local_shard == local))
        return int(found[0]) if len(found) else -1

    def _check_files(self) -> None:
        """Presence and sizes of this split's files: an error, or under "skip" counted before the first batch."""
        for part, reader in enumerate(self._readers):
            for local, error in reader.size_faults().items():
                shard = self._global_shard(part, local)
                if shard >= 0 and self._on_bad_shard.policy == "raise":
                    raise error
                if shard >= 0:  # not one of another split
                    self._refuse(BadShardError(shard, str(error)))

    def _refuse(self, error: BadShardError) -> None:
        if self._on_bad_shard.policy == "raise":
            raise error
        self.bad_shards[error.shard] = str(error)
        if len(self.bad_shards) > self._on_bad_shard.limit or len(self.bad_shards) == len(self.table.local_shard):
            raise ValueError(
                f"{len(self.bad_shards)} bad shards of {len(self.table.local_shard)},"
                f" max_bad_shards={self._on_bad_shard.limit}; the last: {error}"
            )
        warnings.warn(f"shard skipped ({len(self.bad_shards)} so far): {error}", stacklevel=2)

    def _substituted(self, position_B: Int64, sample_B: Int64, banned: Sequence[int]) -> tuple[Int64, int]:
        """Replace banned clips and clips of bad shards; whichever rank or worker meets them, by the same clips."""
        refused = np.array(sorted(banned), np.int64)
        bad = np.array(sorted(self.bad_shards), np.int64)
        sample_B, changed, attempt = sample_B.copy(), 0, 0
        here = np.arange(len(sample_B))
        while True:
            wrong = np.isin(sample_B[here], refused) | np.isin(self.table.shard_of(sample_B[here]), bad)
            here = here[wrong]
            if not len(here):
                return sample_B, changed
            changed = changed or len(here)
            sample_B[here] = self.order.substitute(position_B[here], sample_B[here], refused, attempt)
            attempt += 1

    def _warn_of_constant_codes(self) -> None:
        for reader in self._readers:
            for shard in reader.shards:
                for book, share in enumerate(shard.top_share):
                    if share > CONSTANT_SHARE:
                        warnings.warn(
                            f"{reader.root / shard.file}: {share:.0%} of codebook {book} is one code: a dead codebook?",
                            stacklevel=3,
                        )


def validation_ids(num_clips: int, max_clips: int | None, world: int) -> Int64:
    """Ids of the validation clips: all, or `max_clips` spread evenly; cut to a multiple of `world`."""
    count = num_clips if max_clips is None else min(max_clips, num_clips)
    count -= count % world
    return np.arange(count, dtype=np.int64) * num_clips // max(count, 1)


def _as_batch(
    codes_BTK: np.ndarray[Any, np.dtype[np.int16]],
    length_B: Int64,
    sample_B: Int64,
    track_B: Int64,
    start_B: Int64,
    position_B: Int64,
    mask_seed_B: Int64,
) -> Batch:
    columns = (length_B, sample_B, track_B, start_B, position_B, mask_seed_B)
    names = ("num_frames", "sample_id", "track_id", "start", "position", "mask_seed")
    # Codes lie frame-major; the view [B, K, T] costs nothing and keeps its strides on the way to the device.
    batch: Batch = {"codes": torch.from_numpy(codes_BTK).transpose(1, 2)}
    for name, column in zip(names, columns, strict=True):
        batch[name] = torch.from_numpy(column)
    return batch


def used_codebooks(wanted: int | None, there: int) -> int:
    """Return how many leading codebooks are served.

    Raises:
        ValueError: more are wanted than there are, or none.
    """
    if wanted is not None and not 1 <= wanted <= there:
        raise ValueError(f"use_codebooks={wanted}: the data has codebooks={there}; choose 1 to {there}")
    return wanted or there


def _refuse_other_codecs(sets: Sequence[ShardSet], indexes: Sequence[ShardIndex]) -> None:
    for part, index in zip(sets[1:], indexes[1:], strict=True):
        if differences := indexes[0].codec.differences(index.codec):
            raise ValueError(f"{part.path}: codec differs from {sets[0].path}: {'; '.join(differences)}")


def _fingerprint(indexes: Sequence[ShardIndex], split: str, num_frames: int, min_frames: int, order: Order) -> str:
    facts: Mapping[str, object] = {
        "sets": [index.checksum for index in indexes],
        "split": split,
        "num_frames": num_frames,
        "min_frames": min_frames,
        "quotas": order.quotas.tolist(),
        "shuffle_shards": order.shuffle_shards,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
