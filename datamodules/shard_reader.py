"""Reading crops out of shards: `os.preadv` into one batch tensor, every block hashed the first time it is touched.

No memory map: a file cut while open gives a short read that is reported, not a SIGBUS, and memory does not grow with
the set.

Legend: B clips, K codebooks, T frames of a clip.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    Shard,
    ShardError,
    ShardIndex,
    block_digest,
    check_files,
    check_shard_files,
    check_size,
    header_fault,
    npy_header,
    resolve_root,
    sha256_file,
)

OpenShard = Callable[[Shard], Path]
Int64 = npt.NDArray[np.int64]
MAX_OPEN_FILES = 256


class BadShardError(ShardError):
    """A shard whose content is not what the index says. `shard` is its number in the reader."""

    def __init__(self, shard: int, message: str) -> None:
        super().__init__(message)
        self.shard = shard

    def __reduce__(self) -> tuple[type[BadShardError], tuple[int, str]]:
        return type(self), (self.shard, str(self))


class ShardReader:
    """Random access to the frames of a shard set.

    Files are opened at first use in each process, so a reader may be pickled or forked. At most `MAX_OPEN_FILES`
    stay open.

    Args:
        root: folder of the set; only named in messages where `open_shard` is given.
        index: its index.
        verify: hash each block on first touch (about 0.3 ms per 512 KiB, once).
        open_shard: gives the local path of a shard's code file, e.g. from a cache in front of an object store; its
            caller must have the offsets file beside it or leave it away. None: the files lie in `root`.
        whole: hash a whole shard when it is opened instead, so that whether it is bad does not depend on what was read.
        check: look now whether all listed files are there with the right size (only where `open_shard` is None).

    Raises:
        FileNotFoundError: a listed file is absent.
        ShardError: a listed file has the wrong size.
    """

    def __init__(
        self,
        root: str | Path,
        index: ShardIndex,
        *,
        verify: bool = True,
        open_shard: OpenShard | None = None,
        whole: bool = False,
        check: bool = True,
    ) -> None:
        self.root = resolve_root(root)
        self.index = index
        self.shards: tuple[Shard, ...] = index.shards
        self.codebooks = index.codec.codebooks
        self.codebook_size = index.codec.codebook_size
        self.verify = verify
        self._whole = whole and verify
        self._open_shard = open_shard
        if check and open_shard is None:
            check_files(self.root, index)
        blocks = [0, *(len(shard.block_digests) for shard in self.shards)]
        self._first_block: Int64 = np.cumsum(blocks, dtype=np.int64)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._files: OrderedDict[int, int] = OrderedDict()
        self._stamps: dict[int, tuple[int, int, int]] = {}
        self._verified = np.zeros(int(self._first_block[-1]), np.bool_)

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_files", "_stamps", "_verified", "_pid")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def size_faults(self) -> dict[int, FileNotFoundError | ShardError]:
        """Shards whose files are absent or of the wrong size, and why; none where `open_shard` is given."""
        faults: dict[int, FileNotFoundError | ShardError] = {}
        for number, shard in enumerate(self.shards if self._open_shard is None else ()):
            try:
                check_shard_files(self.root, shard)
            except (FileNotFoundError, ShardError) as error:
                faults[number] = error
        return faults

    def read(self, shard_B: Int64, frame_B: Int64, length_B: Int64, num_frames: int) -> npt.NDArray[np.int16]:
        """Read one crop per clip.

        Args:
            shard_B: shard number of each clip, `[B]`.
            frame_B: first frame inside the shard, `[B]`.
            length_B: frames to read, `[B]`, at most `num_frames`.
            num_frames: T.

        Returns:
            Codes `[B, T, K]` int16; frames past a clip's length hold 0.

        Raises:
            BadShardError: a shard is damaged; the message names the file, the place and what to do.
        """
        if self._pid != os.getpid():
            self._reset()  # forked: file descriptors and their offsets are the parent's
        row_bytes = 2 * self.codebooks
        clips = len(shard_B)
        out_BTK = np.empty((clips, num_frames, self.codebooks), np.int16)
        sizes = (length_B * row_bytes).tolist()
        starts_B = HEADER_BYTES + frame_B * row_bytes
        shards, starts = shard_B.tolist(), starts_B.tolist()
        files = self._descriptors(shards)
        if self.verify:
            self._verify_blocks(shard_B, starts_B, starts_B + length_B * row_bytes)
        view = memoryview(out_BTK.data).cast("B")
        stride, preadv = num_frames * row_bytes, os.preadv
        for row in range(clips):
            low = row * stride
            size = sizes[row]
            if preadv(files[shards[row]], [view[low : low + size]], starts[row]) != size:
                raise self._error(shards[row], f"short read at byte {starts[row]}: the file was cut while open")
        if (length_B < num_frames).any():
            for row, length in enumerate(length_B.tolist()):
                out_BTK[row, length:] = 0
        self._check_range(out_BTK, shards, frame_B)
        return out_BTK

    def read_track(self, shard: int, track: int) -> npt.NDArray[np.int16]:
        """All codes of one track, `[K, T]`; errors as in `read`."""
        lengths = [row.frames for row in self.shards[shard].tracks]
        frames = lengths[track]
        start = np.array([sum(lengths[:track])], np.int64)
        out = self.read(np.array([shard], np.int64), start, np.array([frames], np.int64), frames)
        return np.ascontiguousarray(out[0].T)

    def _descriptors(self, shards: list[int]) -> dict[int, int]:
        files: dict[int, int] = {}
        wanted = set(shards)
        for shard in wanted:
            if shard not in self._files:
                self._files[shard] = self._open(shard)
                if self._whole:
                    self._verify_shard(shard)
            self._files.move_to_end(shard)
            files[shard] = self._files[shard]
        while len(self._files) > max(MAX_OPEN_FILES, len(wanted)):
            _, old = self._files.popitem(last=False)
            os.close(old)
        return files

    def _open(self, number: int) -> int:
        shard = self.shards[number]
        path = self._open_shard(shard) if self._open_shard is not None else self.root / shard.file
        try:
            check_size(path, shard.bytes)
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
        shard = self.shards[number]
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if header != npy_header(shard.frames, self.codebooks):
            raise self._error(number, header_fault(header, shard.frames, self.codebooks))
        self._check_offsets(number, path.with_name(shard.offsets_file))
        stat = os.fstat(descriptor)
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if self._stamps.setdefault(number, stamp) != stamp:  # another file than the one verified before
            self._verified[self._first_block[number] : self._first_block[number + 1]] = False
            self._stamps[number] = stamp

    def _check_offsets(self, number: int, path: Path) -> None:
        shard = self.shards[number]
        if not path.exists() and self._open_shard is not None:
            return  # training reads track borders from the index; a cache need not fetch them
        try:
            check_size(path, shard.offsets_bytes)
        except (FileNotFoundError, ShardError) as error:
            raise BadShardError(number, str(error)) from None
        if self.verify and sha256_file(path) != shard.offsets_sha256:
            raise BadShardError(number, f"{path}: damaged: its sha256 is not the one in the index; restore it")

    def _verify_blocks(self, shard_B: Int64, start_B: Int64, stop_B: Int64) -> None:
        base = self._first_block[shard_B]
        first, last = base + start_B // BLOCK_BYTES, base + (stop_B - 1) // BLOCK_BYTES
        if self._verified[first].all() and self._verified[last].all() and (last - first).max() <= 1:
            return
        for shard, low, high in zip(shard_B.tolist(), first.tolist(), last.tolist(), strict=True):
            for block in range(low, high + 1):
                if not self._verified[block]:
                    self._verify_block(shard, block)

    def _verify_shard(self, number: int) -> None:
        try:
            for block in range(int(self._first_block[number]), int(self._first_block[number + 1])):
                if not self._verified[block]:
                    self._verify_block(number, block)
        except BadShardError:
            os.close(self._files.pop(number))
            raise

    def _verify_block(self, number: int, block: int) -> None:
        place = block - int(self._first_block[number])
        data = os.pread(self._files[number], BLOCK_BYTES, place * BLOCK_BYTES)
        if block_digest(data) != self.shards[number].block_digests[place]:
            low = place * BLOCK_BYTES
            raise self._error(number, f"bytes {low}..{low + len(data)} do not have the sha256 in the index")
        self._verified[block] = True

    def _check_range(self, out_BTK: npt.NDArray[np.int16], shards: Sequence[int], frame_B: Int64) -> None:
        # Read as unsigned, a negative code is a large one: one pass instead of two.
        if out_BTK.size == 0 or int(out_BTK.view(np.uint16).max()) < self.codebook_size:
            return
        row, frame, book = (int(i) for i in np.argwhere(out_BTK.view(np.uint16) >= self.codebook_size)[0])
        place = f"row {int(frame_B[row]) + frame}, codebook {book}, frame {frame} of the clip"
        raise self._error(
            shards[row], f"code {int(out_BTK[row, frame, book])} outside 0..{self.codebook_size - 1} at {place}"
        )

    def _error(self, number: int, what: str) -> BadShardError:
        path = self.root / self.shards[number].file
        return BadShardError(number, f"{path}: damaged: {what}; restore it or write the set again")
