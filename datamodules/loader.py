"""Loaders over a stream: re-iterable, sized, endless for training, and positioned by one integer.

The position lives in the main process, in the loader, not in an iterator or a worker: `state_dict` tells the next
batch to be trained however far workers read ahead, and `load_state_dict`, also in the middle of an iteration, makes
the next `next()` restart there.

Legend: G clips of a global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from datamodules.order import next_unskipped
from datamodules.stream import Batch, TokenStream, validation_ids

Task = tuple[int, tuple[int, ...]]
STATE_KEYS = ("batch_number", "skip", "banned", "seed", "global_batch", "fingerprint")


class TokenLoader:
    """The training loader of one rank. Iterating never ends by itself; an epoch is `len(loader)` batches.

    Args:
        stream: position -> batch.
        rank: this process.
        world: number of processes; must divide the global batch.
        num_workers: 0 reads in the main process (the measured fast setting), n > 0 reads ahead in n processes.
        persistent_workers: keep the workers over restarts.
        start_method: "fork", "spawn" or "forkserver" for the workers; None for the platform's own.
        prefetch: batches each worker reads ahead.
        in_flight: tells whether the batch handed out last is still being trained; the position is then that batch, so
            that a checkpoint written by an exception or a signal loses none. None: it counts as trained.

    Raises:
        ValueError: the global batch is not divisible by `world`.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
        persistent_workers: bool = False,
        start_method: str | None = None,
        prefetch: int = 2,
        in_flight: Callable[[], bool] | None = None,
    ) -> None:
        if stream.order.global_batch % world:
            raise ValueError(f"global_batch={stream.order.global_batch}: not divisible by {world} ranks")
        if num_workers < 0 or not 0 <= rank < world:
            raise ValueError(f"num_workers={num_workers}, rank={rank} of world={world}: out of range")
        self.stream, self.rank, self.world = stream, rank, world
        self._at = _Position()
        self._last: int | None = None
        self._in_flight = in_flight
        self._dataset = _Batches(stream, rank, world)
        self._reader: Iterator[Batch | Exception] | None = None
        self._workers: DataLoader[Batch | Exception] | None = None
        self._settings: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent_workers and num_workers > 0,
            "multiprocessing_context": start_method if num_workers > 0 else None,
            "prefetch_factor": prefetch if num_workers > 0 else None,
            # A generator of its own: a new iterator must not draw from the run's random states.
            "generator": torch.Generator(),
        }

    def __len__(self) -> int:
        """Batches of a full epoch, wherever the position is."""
        return self.stream.batches_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._next()

    def state_dict(self) -> dict[str, Any]:
        """The position and what it is a position in: a fresh dict of plain values, equal on all ranks."""
        number = self._at.batch_number
        if self._last is not None and self._in_flight is not None and self._in_flight():
            number = self._last
        return {
            "batch_number": self._at.task(number)[0],
            "skip": [list(pair) for pair in self._at.skip],
            "banned": list(self._at.banned),
            "seed": self.stream.order.seed,
            "global_batch": self.stream.order.global_batch,
            "fingerprint": self.stream.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. May be called while iterating: the next batch is the one at that position.

        Raises:
            ValueError: the state is malformed, or is of another data set, seed or global batch; nothing is changed
                then.
        """
        self._at.batch_number, self._at.skip, self._at.banned = checked_state(state, self.stream)
        self._reader = self._last = None

    def close(self) -> None:
        """End the workers; iterating again starts new ones at the same position."""
        self._reader = self._workers = None

    def _next(self) -> Batch:
        batch = self._read()
        self._last = batch["batch_number"]
        self._at.batch_number = batch["batch_number"] + 1
        return batch

    def _read(self) -> Batch:
        if not self._settings["num_workers"]:
            return self.stream.batch(*self._at.task(self._at.batch_number), self.rank, self.world)
        if self._workers is None:
            self._workers = DataLoader(self._dataset, batch_size=None, sampler=_Tasks(self._at), **self._settings)
        if self._reader is None:
            self._reader = iter(self._workers)
        batch = next(self._reader)
        if isinstance(batch, Exception):
            self._reader = None
            raise batch
        return batch


@dataclass
class _Position:
    """Where the stream stands.

    The loader and its workers' task list share it and neither holds the other, so that dropping a loader ends its
    workers at once, not whenever garbage is collected.
    """

    batch_number: int = 0
    skip: list[tuple[int, int]] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)

    def task(self, batch_number: int) -> Task:
        """The first batch at or after `batch_number` that is not skipped, and the banned clips."""
        return next_unskipped(batch_number, self.skip) if self.skip else batch_number, tuple(self.banned)


class _Tasks(Sampler[Task]):
    """Endless tasks from the position on; runs in the main process, ahead of what was trained."""

    def __init__(self, at: _Position) -> None:
        self._at = at

    def __iter__(self) -> Iterator[Task]:
        number = self._at.batch_number
        while True:
            task = self._at.task(number)
            number = task[0] + 1
            yield task


class _Batches(Dataset[Batch | Exception]):
    """`(batch number, banned) -> batch`; what a worker holds. It has no position of its own."""

    def __init__(self, stream: TokenStream, rank: int, world: int) -> None:
        self.stream, self.rank, self.world = stream, rank, world

    def __getitem__(self, task: Task) -> Batch | Exception:
        try:
            return self.stream.batch(*task, self.rank, self.world)
        except (ValueError, OSError) as error:  # handed over whole: torch would wrap it in the worker's traceback
            return error


class FixedLoader:
    """The validation loader of one rank: the same clips, crops and masks every time, each once over all ranks.

    Args:
        stream: over the validation split.
        batch_size: clips of one rank's batch; the last one may be smaller.
        rank: this process.
        world: number of processes; up to `world - 1` clips are left out so that all ranks get equally many.
        max_clips: validate on this many clips, spread evenly; None for all.
    """

    def __init__(
        self, stream: TokenStream, batch_size: int, *, rank: int = 0, world: int = 1, max_clips: int | None = None
    ) -> None:
        ids = validation_ids(stream.table.num_clips, max_clips, world)
        if batch_size < 1 or not len(ids):
            raise ValueError(
                f"batch_size={batch_size}, {len(ids)} validation clips for {world} ranks: nothing to validate on"
            )
        self.stream = stream
        self._batches = [ids[rank::world][low : low + batch_size] for low in range(0, len(ids) // world, batch_size)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for number, sample_B in enumerate(self._batches):
            yield self.stream.fixed_batch(number, np.ascontiguousarray(sample_B))


def checked_state(state: Mapping[str, Any], stream: TokenStream) -> tuple[int, list[tuple[int, int]], list[int]]:
    """Check a loader state against a stream; see `TokenLoader.load_state_dict`.

    Returns:
        batch number, skip ranges, banned clip ids.
    """
    if missing := [key for key in STATE_KEYS if key not in state]:
        raise ValueError(f"stream state: {', '.join(missing)} missing; it holds {sorted(state)}")
    have = {"seed": stream.order.seed, "global_batch": stream.order.global_batch, "fingerprint": stream.fingerprint}
    why = {
        "seed": "the order of samples would be another",
        "global_batch": "batch numbers would mean other samples",
        "fingerprint": "the data set, its split, num_frames, min_frames, weights or shuffle_shards differ",
    }
    for key in ("fingerprint", "seed", "global_batch"):
        if state[key] != have[key]:
            raise ValueError(
                f"cannot resume the stream: {key} is {have[key]!r}, the checkpoint's is {state[key]!r}: {why[key]};"
                " set it as it was, or start a new run from the weights alone"
            )
    number = state["batch_number"]
    if type(number) is not int or number < 0:
        raise ValueError(f"stream state: batch_number={number!r}: must be a whole number from 0")
    skip = [(int(low), int(high)) for low, high in state["skip"]]
    if bad := [pair for pair in skip if not 0 <= pair[0] < pair[1]]:
        raise ValueError(f"stream state: skip={bad}: must be ranges [a, b) of batch numbers with 0 <= a < b")
    banned = sorted({int(sample) for sample in state["banned"]})
    if banned and not 0 <= banned[0] <= banned[-1] < stream.order.num_clips:
        raise ValueError(f"stream state: banned={banned}: clip ids run from 0 to {stream.order.num_clips - 1}")
    return number, skip, banned
