"""What a batch reads: clip ids, crops and mask seeds as arrays, from position alone. No file is touched here.

Legend: B clips of one rank's batch, M clips planned at once, G clips of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from datamodules.clips import ClipTable
from datamodules.order import Order
from datamodules.permutation import VALIDATION, Int64, UInt64, hash_words
from datamodules.shards import HEADER_BYTES

PLAN_CLIPS = 8192
COLUMNS = ("num_frames", "sample_id", "track_id", "start", "position", "mask_seed")


class Plan(NamedTuple):
    """Clips to read.

    Attributes:
        columns: the batch's int64 entries, one row per name of `COLUMNS`, `[6, M]`.
        epoch_M: the epoch in which each clip comes.
        shards: its shard, as numbered in the clip table.
        starts: its first byte in the shard's file.
        sizes: its bytes.
    """

    columns: Int64
    epoch_M: Int64
    shards: list[int]
    starts: list[int]
    sizes: list[int]

    def part(self, low: int, high: int) -> Plan:
        """Clips `low..high`, with columns of their own (a batch may be written to)."""
        here = slice(low, high)
        columns = self.columns[:, here].copy()
        return Plan(columns, self.epoch_M[here], self.shards[here], self.starts[here], self.sizes[here])


class Planner:
    """Plans the batches of an order over a clip table.

    Args:
        table: the clips.
        order: their order.
        frame_bytes: bytes of one frame of all codebooks.
        on_plan: told the shards of each planned run and of the next one, in the order of their first use.
    """

    def __init__(
        self, table: ClipTable, order: Order, frame_bytes: int, on_plan: Callable[[list[int]], None] | None = None
    ) -> None:
        self._on_plan = on_plan
        self.table, self.order, self.frame_bytes = table, order, frame_bytes
        self._ragged = bool((table.track_frames < table.num_frames).any())
        self._key = (-1, 0, 0)
        self._run: Plan | None = None

    def batch(self, batch_number: int, rank: int, world: int) -> Plan:
        """One rank's share of a global batch, `[B]`.

        Many consecutive batches are planned at once, since each array operation has a price of its own.
        """
        share = self.order.global_batch // world
        span = max(1, PLAN_CLIPS // max(share, 1))
        key = (batch_number // span, rank, world)
        if self._run is None or self._key != key:
            self._run, self._key = self._planned_run(key[0], span, rank, world), key
            if self._on_plan is not None:
                coming = self._planned_run(key[0] + 1, span, rank, world)
                self._on_plan(list(dict.fromkeys(self._run.shards + coming.shards)))
        low = batch_number % span * share
        return self._run.part(low, low + share)

    def fixed(self, sample_M: Int64) -> Plan:
        """Clips by id, with fixed crops and masks; their position is the clip id."""
        seeds_M = (hash_words(VALIDATION, self.order.seed, sample_M) >> np.uint64(1)).astype(np.int64)
        return self._planned(sample_M, sample_M, np.zeros_like(sample_M), seeds_M, None)

    def substituted(self, plan: Plan, banned: Iterable[int], bad_shards: Iterable[int]) -> tuple[Plan, int]:
        """Replace banned clips and clips of bad shards in place, by a function of (seed, position) and of nothing else.

        Returns:
            the plan, and how many clips were replaced.

        Raises:
            ValueError: no usable clip is left.
        """
        refused, bad = np.array(sorted(banned), np.int64), np.array(sorted(bad_shards), np.int64)
        _, sample_M, _, _, position_M, seeds_M = plan.columns
        sample_M = sample_M.copy()
        here = np.arange(len(sample_M))
        changed = attempt = 0
        while True:
            wrong = np.isin(sample_M[here], refused) | np.isin(self.table.shard_of(sample_M[here]), bad)
            here = here[wrong]
            if not len(here):
                break
            changed = changed or len(here)
            sample_M[here] = self.order.substitute(position_M[here], sample_M[here], refused, attempt)
            attempt += 1
        if not changed:
            return plan, 0
        bits_M = self.order.crop_bits(sample_M, plan.epoch_M)
        return self._planned(position_M, sample_M, plan.epoch_M, seeds_M, bits_M), changed

    def _planned_run(self, run: int, span: int, rank: int, world: int) -> Plan:
        numbers = range(run * span, (run + 1) * span)
        position_M = np.concatenate([self.order.positions(number, rank, world) for number in numbers])
        sample_M, epoch_M = self.order.samples(position_M)
        seeds_M, bits_M = self.order.mask_seeds(position_M), self.order.crop_bits(sample_M, epoch_M)
        return self._planned(position_M, sample_M, epoch_M, seeds_M, bits_M)

    def _planned(
        self, position_M: Int64, sample_M: Int64, epoch_M: Int64, seeds_M: Int64, bits_M: UInt64 | None
    ) -> Plan:
        table = self.table
        row_M, start_M, length_M = table.locate(sample_M, bits_M)
        columns = np.stack([length_M, sample_M, table.track_id[row_M], start_M, position_M, seeds_M])
        shards = table.track_shard[row_M].tolist()
        starts = (HEADER_BYTES + (table.track_first[row_M] + start_M) * self.frame_bytes).tolist()
        if self._ragged:
            return Plan(columns, epoch_M, shards, starts, (length_M * self.frame_bytes).tolist())
        return Plan(columns, epoch_M, shards, starts, [table.num_frames * self.frame_bytes] * len(shards))
