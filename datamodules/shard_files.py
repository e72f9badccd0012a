"""Bytes out of shard files: `os.preadv` into one batch array, every block hashed the first time it is touched.

No memory map: a file cut while open gives a short read that is reported, not a SIGBUS, and memory does not grow with
the set.

Legend: B clips, K codebooks, T frames of a clip.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    Codec,
    Shard,
    ShardError,
    block_digest,
    check_shard_files,
    check_size,
    header_fault,
    npy_header,
    sha256_file,
)

OpenShard = Callable[[Shard], Path]
Codes = npt.NDArray[np.int16]
MAX_OPEN_FILES = 256


class BadShardError(ShardError):
    """A shard whose content is not what the index says. `shard` is its number among the files it was read from."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard

    def __reduce__(self) -> tuple[type[BadShardError], tuple[int, str]]:
        return type(self), (self.shard, str(self))


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One shard and where it lies.

    Attributes:
        folder: folder of its set.
        shard: what the index says of it.
        open_shard: gives the local path of the code file, e.g. from a cache in front of an object store; the offsets
            file may lie beside it. None: the files lie in `folder`.
    """

    folder: Path
    shard: Shard
    open_shard: OpenShard | None = None


class ShardFiles:
    """Random access to the bytes of many shards of one codec.

    Files are opened at first use in each process, so that an object of this class may be pickled or forked. About
    `MAX_OPEN_FILES` stay open.

    Args:
        files: the shards.
        codec: their codec.
        verify: hash each block on first touch (about 0.3 ms per 512 KiB, once).
        whole: hash a whole shard when it is opened instead, so that whether it is bad does not depend on what was read.
    """

    def __init__(self, files: Sequence[ShardFile], codec: Codec, *, verify: bool = True, whole: bool = False) -> None:
        self.files = tuple(files)
        self.codebooks, self.codebook_size = codec.codebooks, codec.codebook_size
        self.frame_bytes = 2 * codec.codebooks
        self._verify, self._whole = verify, whole
        blocks = [0, *(len(file.shard.block_digests) for file in self.files)]
        self._first_block = np.cumsum(blocks, dtype=np.int64).tolist()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._descriptors: dict[int, int] = {}
        self._stamps: dict[int, tuple[int, int, int]] = {}
        self._verified = np.zeros(self._first_block[-1], np.bool_)
        self._unverified = len(self._verified)

    def __getstate__(self) -> dict[str, object]:
        mine = ("_descriptors", "_stamps", "_verified", "_unverified", "_pid")  # of one process
        return {key: value for key, value in self.__dict__.items() if key not in mine}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def size_faults(self) -> dict[int, FileNotFoundError | ShardError]:
        """Shards whose files are absent or of the wrong size, and why; those that a cache opens are not looked at."""
        faults: dict[int, FileNotFoundError | ShardError] = {}
        for number, file in enumerate(self.files):
            try:
                if file.open_shard is None:
                    check_shard_files(file.folder, file.shard)
            except (FileNotFoundError, ShardError) as error:
                faults[number] = error
        return faults

    def probe(self, shards: Sequence[int]) -> None:
        """Open and check shards without reading clips.

        Raises:
            BadShardError: one is damaged.
        """
        self._open_all(set(shards))

    def gather(self, shards: list[int], starts: list[int], sizes: list[int], num_frames: int) -> Codes:
        """Read one run of frames per clip.

        Args:
            shards: number of each clip's shard.
            starts: first byte of each clip in its file.
            sizes: bytes of each clip, whole frames, at most `num_frames` of them.
            num_frames: T.

        Returns:
            Codes `[B, T, K]` int16; frames past a clip's length hold 0.

        Raises:
            BadShardError: a shard is damaged; the message names the file, the place and what to do.
        """
        if self._pid != os.getpid():
            self._reset()  # forked: the descriptors are the parent's
        out_BTK: Codes = np.empty((len(shards), num_frames, self.codebooks), np.int16)
        view, stride = memoryview(out_BTK.data).cast("B"), num_frames * self.frame_bytes
        descriptors = self._open_all(set(shards))
        if self._verify and self._unverified:
            self._verify_blocks(shards, starts, sizes)
        places = [(view[low : low + size],) for low, size in zip(range(0, len(view), stride), sizes, strict=True)]
        got = list(map(os.preadv, map(descriptors.__getitem__, shards), places, starts))
        if got != sizes:
            row = next(row for row, size in enumerate(sizes) if got[row] != size)
            raise self._error(shards[row], f"short read at byte {starts[row]}: the file was cut while open")
        if min(sizes, default=stride) < stride:
            for row, size in enumerate(sizes):
                out_BTK[row, size // self.frame_bytes :] = 0
        # Read as unsigned, a negative code is a large one: one pass instead of two.
        if out_BTK.size and out_BTK.view(np.uint16).max() >= self.codebook_size:
            raise self._range_error(out_BTK, shards, starts)
        return out_BTK

    def _open_all(self, shards: set[int]) -> dict[int, int]:
        """Descriptors by shard, among them those of `shards`; the longest open are closed beyond `MAX_OPEN_FILES`."""
        descriptors = self._descriptors
        if missing := shards - descriptors.keys():
            for shard in missing:
                descriptors[shard] = self._open(shard)
                if self._whole and self._verify:
                    self._verify_shard(shard)
            surplus = len(descriptors) - MAX_OPEN_FILES
            for old in [shard for shard in descriptors if shard not in shards][: max(surplus, 0)]:
                os.close(descriptors.pop(old))
        return descriptors

    def _open(self, number: int) -> int:
        file = self.files[number]
        path = file.folder / file.shard.file if file.open_shard is None else file.open_shard(file.shard)
        try:
            check_size(path, file.shard.bytes)
        except (FileNotFoundError, ShardError) as error:
            raise BadShardError(number, str(error)) from None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check_opened(number, path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    def _check_opened(self, number: int, path: Path, descriptor: int) -> None:
        shard = self.files[number].shard
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if header != npy_header(shard.frames, self.codebooks):
            raise self._error(number, header_fault(header, shard.frames, self.codebooks))
        self._check_offsets(number, path.with_name(shard.offsets_file))
        stat = os.fstat(descriptor)
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if self._stamps.setdefault(number, stamp) != stamp:  # another file than the one verified before
            self._stamps[number] = stamp
            blocks = self._verified[self._first_block[number] : self._first_block[number + 1]]
            self._unverified += int(blocks.sum())
            blocks[:] = False

    def _check_offsets(self, number: int, path: Path) -> None:
        file = self.files[number]
        if file.open_shard is not None and not path.exists():
            return  # training reads track borders from the index; a cache need not fetch them
        try:
            check_size(path, file.shard.offsets_bytes)
        except (FileNotFoundError, ShardError) as error:
            raise BadShardError(number, str(error)) from None
        if self._verify and sha256_file(path) != file.shard.offsets_sha256:
            raise BadShardError(number, f"{path}: damaged: its sha256 is not the one in the index; restore it")

    def _verify_blocks(self, shards: list[int], starts: list[int], sizes: list[int]) -> None:
        for shard, start, size in zip(shards, starts, sizes, strict=True):
            for place in range(start // BLOCK_BYTES, (start + size - 1) // BLOCK_BYTES + 1):
                self._verify_block(shard, place)

    def _verify_shard(self, number: int) -> None:
        try:
            for place in range(self._first_block[number + 1] - self._first_block[number]):
                self._verify_block(number, place)
        except BadShardError:
            os.close(self._descriptors.pop(number))
            raise

    def _verify_block(self, number: int, place: int) -> None:
        block = self._first_block[number] + place
        if self._verified[block]:
            return
        data = os.pread(self._descriptors[number], BLOCK_BYTES, place * BLOCK_BYTES)
        if block_digest(data) != self.files[number].shard.block_digest(place):
            low = place * BLOCK_BYTES
            raise self._error(number, f"bytes {low}..{low + len(data)} do not have the sha256 in the index")
        self._verified[block] = True
        self._unverified -= 1

    def _range_error(self, out_BTK: Codes, shards: list[int], starts: list[int]) -> BadShardError:
        row, frame, book = (int(i) for i in np.argwhere(out_BTK.view(np.uint16) >= self.codebook_size)[0])
        shard_row = (starts[row] - HEADER_BYTES) // self.frame_bytes + frame
        what = f"code {int(out_BTK[row, frame, book])} outside 0..{self.codebook_size - 1}"
        return self._error(shards[row], f"{what} at row {shard_row}, codebook {book}, frame {frame} of the clip")

    def _error(self, number: int, what: str) -> BadShardError:
        file = self.files[number]
        message = f"{file.folder / file.shard.file}: damaged: {what}; restore it or write the set again"
        return BadShardError(number, message)
