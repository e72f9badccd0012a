"""`shards info` and `shards verify`: tables for people, JSON for machines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from datamodules.residual_kmeans import load_books
from datamodules.set_statistics import SetStatistics, set_statistics
from datamodules.shard_journal import write_atomically
from datamodules.shard_verify import Fault, verify_set
from datamodules.shards import ShardError, ShardIndex, load_index, resolve_root
from experiments.progress import WorkProgress
from experiments.tokenize_plan import BOOKS_NAME

CONSTANT_SHARE = 0.9
SHOWN_DUPLICATES = 20


def info(args: argparse.Namespace) -> int:
    """Print tables of each set; write them as JSON if asked."""
    found: dict[str, object] = {}
    for name in args.sets:
        index = load_index(name)
        total = sum(shard.frames for shard in index.shards)
        with WorkProgress(f"reading {name}", total, "frames") as bar:
            statistics = set_statistics(resolve_root(name), index, args.sample_hours, bar.advance)
        _print_info(name, index, statistics)
        found[name] = {"codec": asdict(index.codec), "hours": index.hours, **asdict(statistics)}
    if args.json:
        write_atomically(args.json, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def _print_info(name: str, index: ShardIndex, statistics: SetStatistics) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    codec = index.codec
    size = sum(shard.bytes for shard in index.shards) / 1e6
    tracks = sum(group.tracks for group in statistics.splits.values())
    console.print(
        f"{name}: {tracks} tracks, {index.hours:.3f} h, {len(index.shards)} shards, {size:.1f} MB\n"
        f"codec {codec.name}: {codec.codebooks} codebooks of {codec.codebook_size},"
        f" {codec.frame_rate:g} frames a second, {codec.sample_rate} Hz",
        markup=False,
        highlight=False,
    )
    console.print(_totals(statistics))
    console.print(_codebooks(codec.codebook_size, statistics))
    few = " (too low where frames are few against codes squared)"
    console.print(f"bigram bits from {statistics.bigram_hours:.2f} h{few}", highlight=False)
    for group in statistics.duplicates[:SHOWN_DUPLICATES]:
        console.print(f"same codes: {', '.join(group)}", markup=False, highlight=False, soft_wrap=True)
    if (more := len(statistics.duplicates) - SHOWN_DUPLICATES) > 0:
        console.print(f"... and {more} more groups of the same codes")
    if not statistics.duplicates:
        console.print("no two tracks have the same codes")


def _totals(statistics: SetStatistics) -> Table:
    table = Table("split / licence", "tracks", "hours")
    for group, totals in statistics.splits.items():
        table.add_row(group, str(totals.tracks), f"{totals.hours:.3f}")
    table.add_section()
    for group, totals in statistics.licences.items():
        table.add_row(group, str(totals.tracks), f"{totals.hours:.3f}")
    return table


def _codebooks(codebook_size: int, statistics: SetStatistics) -> Table:
    table = Table("codebook", "unigram bits", "bigram bits", "dead codes", "most frequent code")
    rows = zip(
        statistics.unigram_bits, statistics.bigram_bits, statistics.dead_codes, statistics.top_share, strict=True
    )
    for book, (unigram, bigram, dead, share) in enumerate(rows):
        table.add_row(str(book), f"{unigram:.2f}", f"{bigram:.2f}", f"{dead} of {codebook_size}", f"{share:.1%}")
    return table


def verify(args: argparse.Namespace) -> int:
    """Print every fault of each set; 1 where one of them touches the data."""
    worst = 0
    for name in args.sets:
        faults = [*verify_set(name), *_books_faults(name), *_suspicions(name)]
        for fault in faults:
            print(f"{'fault' if fault.fatal else 'note'}: {fault}")
        fatal = sum(fault.fatal for fault in faults)
        print(f"{name}: {fatal} faults" if fatal else f"{name}: sound")
        worst |= fatal > 0
    return int(worst)


def _books_faults(name: str) -> Iterator[Fault]:
    """The set's own codebooks must be those its codes were made with."""
    path = resolve_root(name) / BOOKS_NAME
    try:
        wanted = load_index(name).codec.settings.get("books_sha256")
        if wanted is None or not path.exists():
            return
        books = load_books(path)
    except ShardError:
        return  # the index itself is damaged: reported already
    except ValueError as error:
        yield Fault(str(path), None, str(error).removeprefix(f"{path}: "))
        return
    if books.digest != wanted:
        yield Fault(str(path), None, "not the books that the codes were made with, says the index")


def _suspicions(name: str) -> Iterator[Fault]:
    """Valid codes that nobody wants to train on."""
    try:
        index = load_index(name)
    except ShardError:
        return
    for shard in index.shards:
        for book, share in enumerate(shard.top_share):
            if share > CONSTANT_SHARE:
                problem = f"codebook {book}: one code is {share:.0%} of the shard"
                yield Fault(str(Path(name) / shard.file), None, problem, "listen to its tracks", fatal=False)
