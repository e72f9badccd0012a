"""The arithmetic of the stream at 160,000 hours and 1,024 ranks, run, not estimated: `bench stream --scale`.

The index is synthetic (track lengths drawn, no codes), the order is the real one: every rank's samples over a whole
epoch, each clip marked off, so that "exactly once" and "equal counts" are counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from datamodules.clips import ClipTable, clip_table
from datamodules.order import Order
from datamodules.plan import Planner
from datamodules.shards import Codec, Shard, ShardIndex, Track, index_to_json, parse_index
from datamodules.shuffle_quality import shuffle_quality

FRAMES = 375
FRAME_RATE = 75.0
CODEC = Codec("encodec_24khz", 24000, FRAME_RATE, 8, 1024, {"bandwidth": 6.0})
SHARD_FRAMES = 64 * 1024 * 1024 // 16
MEAN_TRACK = 18_000  # four minutes


def run(args: argparse.Namespace) -> int:
    """Simulate, print, and return the exit status: 1 where an epoch is not exact."""
    console = Console()
    table, seconds = _timed(lambda: _synthetic_table(args.hours))
    console.print(
        f"{args.hours:,} hours: {len(table.track_frames):,} tracks, {len(table.shards):,} shards,"
        f" {table.num_clips:,} clips of {FRAMES} frames, {args.hours * 3600 * FRAME_RATE * 16 / 1e12:.2f} TB"
    )
    console.print(f"clip table: {seconds:.1f} s, {_bytes_of(table) / 1e6:.0f} MB in each rank")
    order = _order(table, args.global_batch, 0)
    exact = _epoch(order, args.ranks, console)
    _one_rank(table, order, args.ranks, console)
    for window in (0, 16, 64, 256, 1024):
        quality, seconds = _timed(lambda w=window: shuffle_quality(_order(table, args.global_batch, w), 40))
        name = "global shuffle" if window == 0 else f"blocks of {window} shards ({window * 64 / 1024:.0f} GB)"
        console.print(f"{name}: {quality} ({seconds:.1f} s to measure)")
    _index_cost(min(args.hours, 4000), console)
    return 0 if exact else 1


def _order(table: ClipTable, global_batch: int, window: int) -> Order:
    parts, shards = tuple(table.part_clips.tolist()), tuple(table.shard_clips.tolist())
    return Order(parts, shards, seed=0, global_batch=global_batch, shuffle_shards=window)


def _synthetic_table(hours: int) -> ClipTable:
    """The clip table of a set whose tracks last one to seven minutes; built from lengths, as `clip_table` builds it."""
    rng = np.random.default_rng(0)
    total = int(hours * 3600 * FRAME_RATE)
    frames = rng.integers(MEAN_TRACK // 4, MEAN_TRACK * 7 // 4, int(total / MEAN_TRACK))
    ends = np.cumsum(frames)
    shard = (ends - 1) // SHARD_FRAMES
    first = ends - frames
    new = np.concatenate([[True], shard[1:] != shard[:-1]])
    shard = np.cumsum(new) - 1
    clips = np.concatenate([[0], np.cumsum(np.maximum(frames // FRAMES, 1))])
    count = int(shard[-1]) + 1
    return ClipTable(
        num_frames=FRAMES,
        shards=tuple((0, number) for number in range(count)),
        shard_clips=clips[np.searchsorted(shard, np.arange(count + 1))],
        part_clips=clips[[0, -1]],
        track_clips=clips,
        track_frames=frames,
        track_shard=shard,
        track_first=first - first[new][shard],
        track_id=np.arange(len(frames)),
        dropped=0,
    )


def _epoch(order: Order, ranks: int, console: Console) -> bool:
    """Every rank's samples of a whole epoch, marked off one by one."""
    share, batches = order.global_batch // ranks, order.batches_per_epoch
    seen = np.zeros(order.num_clips, np.uint8)
    counts = set()
    start = time.process_time()
    with Progress(transient=True) as progress:
        for rank in progress.track(range(ranks), description="ranks"):
            position = (
                np.arange(batches, dtype=np.int64)[:, None] * order.global_batch + np.arange(share) + rank * share
            )
            served = 0
            for part in np.array_split(position.reshape(-1), max(1, position.size // 16384)):
                sample, _ = order.samples(part)
                np.add.at(seen, sample, 1)
                served += len(sample)
            counts.add(served)
    seconds = time.process_time() - start
    left_out = int((seen == 0).sum())
    exact = int(seen.max()) == 1 and left_out == order.num_clips - batches * order.global_batch and len(counts) == 1
    each = 1e9 * seconds / batches / order.global_batch
    console.print(
        f"an epoch of {batches:,} global batches of {order.global_batch:,} on {ranks:,} ranks: every rank served"
        f" {counts.pop():,} clips; no clip twice: {int(seen.max()) == 1}; left out: {left_out:,} (less than a batch);"
        f" order and count of all ranks: {seconds:.0f} CPU s, {each:.0f} ns a clip"
    )
    return exact


def _one_rank(table: ClipTable, order: Order, ranks: int, console: Console) -> None:
    """What one rank pays for planning, and for going anywhere."""
    planner = Planner(table, order, 16)
    batches = 4000
    start = time.process_time()
    for number in range(batches):
        planner.batch(number, ranks - 1, ranks)
    each = (time.process_time() - start) / batches
    jumps = []
    for number in np.random.default_rng(1).integers(0, 10**7, 20).tolist():
        start = time.perf_counter()
        planner.batch(number, 0, ranks)
        jumps.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(
        f"one rank: {1e6 * each:.0f} CPU us a batch of {order.global_batch // ranks} clips to plan;"
        f" a jump to anywhere: {1e3 * float(np.median(jumps)):.1f} ms;"
        f" peak resident memory of this whole simulation: {peak:.2f} GB"
    )


def _index_cost(hours: int, console: Console) -> None:
    """Size and reading time of a real index of so many hours; it grows with the number of tracks."""
    per_shard = SHARD_FRAMES // MEAN_TRACK
    tracks = tuple(
        Track(f"collection/artist/album/track {i:06d}", MEAN_TRACK, "CC-BY-4.0", "Some Artist", f"a/b/c/{i:06d}.flac")
        for i in range(per_shard)
    )
    frames = per_shard * MEAN_TRACK
    size, digests = 128 + 16 * frames, "0" * 16 * -(-(128 + 16 * frames) // (512 * 1024))
    row = (frames, size, "0" * 64, 128, "0" * 64, digests, (0,) * 8, (1023,) * 8, (0.1,) * 8, tracks)
    count = max(1, int(hours * 3600 * FRAME_RATE / frames))
    shards = tuple(Shard(f"shard-{i:05d}.npy", f"shard-{i:05d}.offsets.npy", "train", *row) for i in range(count))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.json"
        path.write_text(json.dumps(index_to_json(CODEC, shards), indent=1))
        index, seconds = _timed(lambda: parse_index(path.read_bytes(), str(path)))
        assert isinstance(index, ShardIndex)
        _, laying_out = _timed(lambda: clip_table([index], "train", FRAMES))
        size = path.stat().st_size
    console.print(
        f"index.json of {hours:,} hours ({count * per_shard:,} tracks): {size / 1e6:.0f} MB, read and checked in"
        f" {seconds:.1f} s, laid out in {laying_out:.2f} s; {1e6 * seconds / (count * per_shard):.0f} us a track"
    )


def _bytes_of(table: ClipTable) -> int:
    names = ("shard_clips", "track_clips", "track_frames", "track_shard", "track_first", "track_id")
    return sum(getattr(table, name).nbytes for name in names)


def _timed(function: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start
