"""Reading one shard set: crops by shard and frame, and whole tracks.

Legend: B clips, K codebooks, T frames of a clip.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.shard_files import BadShardError, Codes, OpenShard, ShardFile, ShardFiles
from datamodules.shards import HEADER_BYTES, Shard, ShardIndex, resolve_root

__all__ = ["BadShardError", "OpenShard", "ShardReader"]


class ShardReader(ShardFiles):
    """Random access to the frames of one shard set.

    Args:
        root: folder of the set, or "bundled"; only named in messages where `open_shard` is given.
        index: its index.
        verify: hash each block on first touch.
        open_shard: see `ShardFile`.
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
        check: bool = True,
    ) -> None:
        folder = resolve_root(root)
        files = [ShardFile(folder, shard, open_shard) for shard in index.shards]
        super().__init__(files, index.codec, verify=verify)
        if check and (faults := self.size_faults()):
            raise next(iter(faults.values()))

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards, as the index lists them."""
        return tuple(file.shard for file in self.files)

    def read(
        self,
        shard_B: npt.NDArray[np.int64],
        frame_B: npt.NDArray[np.int64],
        length_B: npt.NDArray[np.int64],
        num_frames: int,
    ) -> Codes:
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
        start_B = HEADER_BYTES + frame_B * self.frame_bytes
        return self.gather(shard_B.tolist(), start_B.tolist(), (length_B * self.frame_bytes).tolist(), num_frames)

    def read_track(self, shard: int, track: int) -> Codes:
        """All codes of one track, `[K, T]`; errors as in `read`."""
        tracks = self.files[shard].shard.tracks
        start = sum(row.frames for row in tracks[:track])
        frames = tracks[track].frames
        low = HEADER_BYTES + start * self.frame_bytes
        return np.ascontiguousarray(self.gather([shard], [low], [frames * self.frame_bytes], frames)[0].T)
