"""The stream: position -> batch, over one or several shard sets. A batch is a pure function of (seed, batch number).

Legend: B clips of one rank's batch, K codebooks, T frames a clip, G clips of a global batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from datamodules.clips import ClipTable, clip_table
from datamodules.order import Order
from datamodules.permutation import Int64
from datamodules.plan import COLUMNS, Plan, Planner
from datamodules.shard_files import BadShardError, Codes, OpenShard, ShardFile, ShardFiles
from datamodules.shards import Shard, ShardIndex, load_index, resolve_root

Batch = dict[str, Any]
CONSTANT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class ShardSet:
    """One part of a stream: a shard set, its share of the positions, and how its files are opened.

    Attributes:
        path: folder of the set, or "bundled".
        weight: relative share in a mixture.
        index: its index; read from `path` where None.
        open_shard: gives the local path of a shard (a cache in front of an object store); None reads `path`.
        fetch_ahead: told which shards will be needed, in the order of their first use.
    """

    path: str
    weight: float = 1.0
    index: ShardIndex | None = None
    open_shard: OpenShard | None = None
    fetch_ahead: Callable[[Sequence[Shard]], None] | None = None


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
        whole = self._on_bad_shard.policy == "skip"
        self._files = ShardFiles(_shard_files(sets, indexes, self.table), self.codec, verify=verify, whole=whole)
        self._check_files()
        self._warn_of_constant_codes()
        self._fetch_ahead = [part.fetch_ahead for part in sets]
        on_plan = self._on_plan if any(self._fetch_ahead) else None
        self._planner = Planner(self.table, self.order, self._files.frame_bytes, on_plan)
        self._whole_planner = Planner(self.table, self.order, self._files.frame_bytes)  # of all ranks' clips

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of one epoch."""
        return self.order.batches_per_epoch

    def batch(self, batch_number: int, banned: Sequence[int] = (), rank: int = 0, world: int = 1) -> Batch:
        """One rank's share of a global batch.

        Args:
            batch_number: number of the global batch, from 0, endless.
            banned: clip ids that are replaced in place by other clips.
            rank: this process.
            world: number of processes.

        Returns:
            The batch: codes int16 `[B, K, T]` and, each `[B]` int64, num_frames, sample_id, track_id, start,
            position, mask_seed; global_num_frames `[G]`, the num_frames of all ranks; batch_number and
            num_substituted as plain integers.

        Raises:
            ValueError: damage, under the policy "raise" or beyond the limit; or nothing left to substitute with.
        """
        plan, changed = self._planner.batch(batch_number, rank, world), 0
        if banned or self.bad_shards:
            plan, changed = self._planner.substituted(plan, banned, self.bad_shards)
        while True:
            try:
                codes = self._read(plan)
                break
            except BadShardError as error:
                self._refuse(error)
                plan, more = self._planner.substituted(plan, banned, self.bad_shards)
                changed += more
        batch = self._as_batch(codes, plan, batch_number, changed)
        batch["global_num_frames"] = self._lengths_of_all(batch, banned, world)
        return batch

    def _lengths_of_all(self, batch: Batch, banned: Sequence[int], world: int) -> torch.Tensor:
        """Valid frames of every rank's clips, `[G]`, so that each rank knows the global count without a collective."""
        if world == 1:
            return batch["num_frames"]  # type: ignore[no-any-return]
        if not self._ragged:
            return torch.full((self.order.global_batch,), self.table.num_frames)
        plan = self._whole_planner.batch(batch["batch_number"], 0, 1)
        while True:
            if banned or self.bad_shards:
                plan, _ = self._whole_planner.substituted(plan, banned, self.bad_shards)
            try:
                if self._on_bad_shard.policy == "skip":  # every rank must know of the same bad shards
                    self._files.probe(plan.shards)
                return torch.from_numpy(plan.columns[COLUMNS.index("num_frames")])
            except BadShardError as error:
                self._refuse(error)

    def fixed_batch(self, number: int, sample_B: Int64) -> Batch:
        """Clips by id with fixed crops and fixed masks (validation); as `batch`, position being the clip id."""
        plan = self._planner.fixed(sample_B)
        return self._as_batch(self._read(plan), plan, number, 0)

    def _as_batch(self, codes_BTK: Codes, plan: Plan, batch_number: int, num_substituted: int) -> Batch:
        if self.num_codebooks < self.codec.codebooks:
            codes_BTK = codes_BTK[..., : self.num_codebooks]
        batch: Batch = dict(zip(COLUMNS, torch.from_numpy(plan.columns).unbind(), strict=True))
        # Codes lie frame-major; the view [B, K, T] costs nothing and keeps its strides on the way to the device.
        batch["codes"] = torch.from_numpy(codes_BTK.transpose(0, 2, 1))
        batch["batch_number"] = batch_number
        batch["num_substituted"] = num_substituted
        return batch

    def _on_plan(self, shards: list[int]) -> None:
        """Tell the caches which shards come next; called when a run of batches is planned."""
        window = 2 * self.order.shuffle_shards or len(shards)  # what comes later would push these out of a cache
        for part, fetch_ahead in enumerate(self._fetch_ahead):
            if fetch_ahead is not None:
                fetch_ahead([self._files.files[n].shard for n in shards[:window] if self.table.shards[n][0] == part])

    def _read(self, plan: Plan) -> Codes:
        return self._files.gather(plan.shards, plan.starts, plan.sizes, self.table.num_frames)

    def _check_files(self) -> None:
        """Presence and sizes of this split's files: an error, or under "skip" counted before the first batch."""
        for shard, error in self._files.size_faults().items():
            if self._on_bad_shard.policy == "raise":
                raise error
            self._refuse(BadShardError(shard, str(error)))

    def _refuse(self, error: BadShardError) -> None:
        if self._on_bad_shard.policy == "raise":
            raise error
        self.bad_shards[error.shard] = str(error)
        if len(self.bad_shards) > self._on_bad_shard.limit or len(self.bad_shards) == len(self.table.shards):
            raise ValueError(
                f"{len(self.bad_shards)} bad shards of {len(self.table.shards)},"
                f" max_bad_shards={self._on_bad_shard.limit}; the last: {error}"
            )
        warnings.warn(f"shard skipped ({len(self.bad_shards)} so far): {error}", stacklevel=2)

    def _warn_of_constant_codes(self) -> None:
        for file in self._files.files:
            for book, share in enumerate(file.shard.top_share):
                if share > CONSTANT_SHARE:
                    path = file.folder / file.shard.file
                    warnings.warn(f"{path}: {share:.0%} of codebook {book} is one code: a dead codebook?", stacklevel=3)


def validation_ids(num_clips: int, max_clips: int | None, world: int) -> Int64:
    """Ids of the validation clips: all, or `max_clips` spread evenly; cut to a multiple of `world`."""
    count = num_clips if max_clips is None else min(max_clips, num_clips)
    count -= count % world
    return np.arange(count, dtype=np.int64) * num_clips // max(count, 1)


def _shard_files(sets: Sequence[ShardSet], indexes: Sequence[ShardIndex], table: ClipTable) -> list[ShardFile]:
    """The table's shards, without their tracks: what training needs of them is in the table."""
    return [
        ShardFile(
            resolve_root(sets[part].path),
            dataclasses.replace(indexes[part].shards[number], tracks=()),
            sets[part].open_shard,
        )
        for part, number in table.shards
    ]


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
