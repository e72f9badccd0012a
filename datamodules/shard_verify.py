"""Reading a whole shard set against its index and naming every fault, with file, row and what to do.

Legend: K codebooks, V codes a codebook; a row is a frame of the shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datamodules.shard_journal import JOURNAL_NAME
from datamodules.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INDEX_NAME,
    Codec,
    Shard,
    ShardError,
    block_digest,
    check_size,
    header_fault,
    load_index,
    npy_header,
    resolve_root,
    sha256_file,
)

RESTORE = "restore the file from a copy, or write the set again"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: path of the file.
        row: first frame concerned, counted from the shard's start; None where the whole file is.
        problem: what is wrong.
        remedy: what to do.
        fatal: False for what does not touch the data, such as a file the index does not list.
    """

    file: str
    row: int | None
    problem: str
    remedy: str = RESTORE
    fatal: bool = True

    def __str__(self) -> str:
        place = "" if self.row is None else f", row {self.row}"
        return f"{self.file}{place}: {self.problem}; {self.remedy}"


def verify_set(root: str | Path, progress: Callable[[str], None] | None = None) -> list[Fault]:
    """Read every byte of a shard set.

    Args:
        root: folder of the set, or "bundled".
        progress: called with the name of each shard before it is read.

    Returns:
        Every fault found; empty for a sound set. Nothing is raised for damage.

    Raises:
        FileNotFoundError: no such folder, or no index in it.
    """
    folder = resolve_root(root)
    try:
        index = load_index(folder)
    except ShardError as error:
        return [Fault(str(folder / INDEX_NAME), None, str(error).split(": ", 1)[-1], "restore it from a copy")]
    faults: list[Fault] = []
    for shard in index.shards:
        if progress is not None:
            progress(shard.file)
        faults += _file_faults(folder, shard, index.codec)
        faults += _offsets_faults(folder / shard.offsets_file, shard)
    return faults + list(_strangers(folder, index.shards))


def _file_faults(folder: Path, shard: Shard, codec: Codec) -> Iterator[Fault]:
    path = folder / shard.file
    try:
        check_size(path, shard.bytes)
    except (FileNotFoundError, ShardError) as error:
        yield Fault(str(path), None, str(error).removeprefix(f"{path}: ").split(";")[0])
        return
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        if header != npy_header(shard.frames, codec.codebooks):
            yield Fault(str(path), None, header_fault(header, shard.frames, codec.codebooks))
        file.seek(0)
        whole = hashlib.sha256()
        for number, wanted in enumerate(shard.block_digests):
            data = file.read(BLOCK_BYTES)
            whole.update(data)
            if block_digest(data) != wanted:
                yield from _block_faults(path, shard, codec, number, data)
    if whole.hexdigest() != shard.sha256:
        yield Fault(str(path), None, "its sha256 is not the one in the index")


def _block_faults(path: Path, shard: Shard, codec: Codec, number: int, data: bytes) -> Iterator[Fault]:
    width = 2 * codec.codebooks
    low = max(0, number * BLOCK_BYTES - HEADER_BYTES) // width
    high = min(shard.frames - 1, (number * BLOCK_BYTES - HEADER_BYTES + len(data) - 1) // width)
    ends = np.cumsum([track.frames for track in shard.tracks])
    first, last = np.searchsorted(ends, [low, high], side="right").tolist()
    names = [track.name for track in shard.tracks[first : last + 1]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    yield Fault(
        str(path), low, f"rows {low}..{high} do not have the recorded sha256 (tracks {', '.join(names[:3])}{more})"
    )
    skip = HEADER_BYTES if number == 0 else (HEADER_BYTES - number * BLOCK_BYTES) % width
    codes = np.frombuffer(data[skip : skip + (len(data) - skip) // width * width], "<u2").reshape(-1, codec.codebooks)
    bad = np.argwhere(codes >= codec.codebook_size)
    if len(bad):
        row, book = (int(i) for i in bad[0])
        first = (number * BLOCK_BYTES + skip - HEADER_BYTES) // width
        value = int(codes[row, book].astype(np.int16))
        what = f"code {value} outside 0..{codec.codebook_size - 1} in codebook {book} ({len(bad)} such codes)"
        yield Fault(str(path), first + row, what)


def _offsets_faults(path: Path, shard: Shard) -> Iterator[Fault]:
    try:
        check_size(path, shard.offsets_bytes)
    except (FileNotFoundError, ShardError) as error:
        yield Fault(str(path), None, str(error).removeprefix(f"{path}: ").split(";")[0])
        return
    if sha256_file(path) != shard.offsets_sha256:
        yield Fault(str(path), None, "its sha256 is not the one in the index")


def _strangers(folder: Path, shards: tuple[Shard, ...]) -> Iterator[Fault]:
    listed = {name for shard in shards for name in (shard.file, shard.offsets_file)}
    for path in sorted(folder.iterdir()):
        if path.name == JOURNAL_NAME or path.name.endswith(".tmp"):
            what = "left by a writer that has not finished"
            yield Fault(str(path), None, what, "start it again, or delete the file", fatal=False)
        elif path.suffix == ".npy" and path.name not in listed:
            yield Fault(str(path), None, "not in the index, ignored", "delete it if it is not wanted", fatal=False)
