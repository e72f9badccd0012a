"""Which clips a split of a shard set holds, as arithmetic on track lengths: nothing is stored per clip.

A track of L frames gives `max(1, L // T)` clips. In training, clip j of n starts anywhere in the j-th of n equal
strata of the track's `L - T + 1` possible starts, so every start is equally likely over the epochs and no epoch
leaves a part of the track out. In validation clip j starts at `j * T`, always. A track shorter than T is one clip
padded with zeros; one shorter than `min_frames` is left out and counted.

Legend: T frames a clip, M clips asked for at once, R tracks, C parts (shard sets) of a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datamodules.permutation import UInt64, below
from datamodules.shards import ShardIndex

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClipTable:
    """The clips of one split over one or several shard sets; ids run through the sets in order.

    Attributes:
        num_frames: T.
        shards: set and shard number within it of each shard that has tracks of the split, `[S]`.
        shard_clips: first clip id of each shard, `[S + 1]`.
        part_clips: first clip id of each part, `[C + 1]`.
        track_clips: first clip id of each track, `[R + 1]`.
        track_frames: length of each track, `[R]`.
        track_shard: shard of each track (in this table), `[R]`.
        track_first: first frame of each track inside its shard, `[R]`.
        track_id: number of the track within all tracks of the sets, `[R]`; tracks of other splits keep their numbers.
        dropped: tracks left out because they are shorter than `min_frames`.
    """

    num_frames: int
    shards: tuple[tuple[int, int], ...]
    shard_clips: Int64
    part_clips: Int64
    track_clips: Int64
    track_frames: Int64
    track_shard: Int64
    track_first: Int64
    track_id: Int64
    dropped: int

    @property
    def num_clips(self) -> int:
        """Number of clips of all parts."""
        return int(self.part_clips[-1])

    def shard_of(self, sample_M: Int64) -> Int64:
        """Shard (number in this table) of each clip, `[M]`."""
        return self.track_shard[np.searchsorted(self.track_clips, sample_M, side="right") - 1]

    def locate(self, sample_M: Int64, bits_M: UInt64 | None) -> tuple[Int64, Int64, Int64]:
        """Row of the track, first frame inside it, and length of each clip.

        Args:
            sample_M: clip ids, `[M]`.
            bits_M: random words that place the crops, `[M]`; None places them at `j * T` (validation).

        Returns:
            track rows `[M]`, starts `[M]`, lengths `[M]` in frames.
        """
        row = np.searchsorted(self.track_clips, sample_M, side="right") - 1
        frames = self.track_frames[row]
        place = sample_M - self.track_clips[row]
        if bits_M is None:
            start = place * self.num_frames
        else:
            clips = self.track_clips[row + 1] - self.track_clips[row]
            starts = np.maximum(frames - self.num_frames + 1, 1)
            low = place * starts // clips
            start = low + below(bits_M, (place + 1) * starts // clips - low)
        return row, start, np.minimum(frames, self.num_frames)


def clip_table(indexes: list[ShardIndex], split: str, num_frames: int, min_frames: int = 1) -> ClipTable:
    """Lay out the clips of one split.

    Args:
        indexes: the shard sets, one per part.
        split: name of the split.
        num_frames: T.
        min_frames: shorter tracks are left out.

    Raises:
        ValueError: a set has no clip of this split, or a number is out of range.
    """
    if num_frames < 1 or min_frames < 1:
        raise ValueError(f"num_frames={num_frames}, min_frames={min_frames}: both must be at least 1")
    shards: list[tuple[int, int]] = []
    columns: list[Int64] = []  # of each shard: track frames, shard, first frame, track id
    part_tracks, dropped, base = [0], 0, 0
    for part, index in enumerate(indexes):
        for number, shard in enumerate(index.shards):
            if shard.split == split:
                lengths = np.array([track.frames for track in shard.tracks], np.int64)
                keep = np.flatnonzero(lengths >= min_frames)
                dropped += len(lengths) - len(keep)
                first = np.cumsum(lengths) - lengths
                columns.append(np.stack([lengths[keep], np.full_like(keep, len(shards)), first[keep], base + keep]))
                shards.append((part, number))
            base += len(shard.tracks)
        part_tracks.append(sum(column.shape[1] for column in columns))
        if part_tracks[-1] == part_tracks[-2]:
            known = f"its splits are {list(index.splits)}, min_frames={min_frames}"
            raise ValueError(f"split={split!r}: shard set {part} has no clip of it; {known}")
    frames, shard_of, first, ids = np.concatenate(columns, axis=1)
    track_clips = np.concatenate([[0], np.cumsum(np.maximum(frames // num_frames, 1))])
    return ClipTable(
        num_frames=num_frames,
        shards=tuple(shards),
        shard_clips=track_clips[np.searchsorted(shard_of, np.arange(len(shards) + 1))],
        part_clips=track_clips[np.array(part_tracks)],
        track_clips=track_clips,
        track_frames=frames,
        track_shard=shard_of,
        track_first=first,
        track_id=ids,
        dropped=dropped,
    )
