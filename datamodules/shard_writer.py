"""Writing a shard set: an interruption leaves nothing that reads as whole, and the next start goes on from there.

Tracks are appended to `*.npy.tmp` files and recorded in a journal, one line a track, after their bytes are on disk.
A full shard is finished, fsynced and renamed; `index.json` is written last, by rename. Opened again after a kill, the
writer reads the journal, cuts the temporary files back to the last recorded track and continues.

Legend: K codebooks, T frames, V codes a codebook.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from datamodules.shard_journal import Journal, Row, fsync_folder, write_atomically
from datamodules.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INDEX_NAME,
    Codec,
    Shard,
    Track,
    block_digest,
    check_shard_files,
    index_to_json,
    load_index,
    npy_header,
    sha256_file,
    shard_from_json,
    typed,
)

SHARD_BYTES = 64 * 1024 * 1024


@dataclass
class _OpenShard:
    """A shard being written: its temporary file and the statistics of what is in it."""

    number: int
    file: BinaryIO
    tracks: list[Track]
    counts_KV: npt.NDArray[np.int64]
    frames: int = 0


class ShardWriter:
    """Write tracks of codes into a shard set.

    Use it as a context manager. Leaving the block normally writes the index; leaving it by an exception keeps the
    journal, so that the same call goes on later. Adding to a finished set leaves its index valid until the new one
    replaces it.

    Args:
        root: folder of the set, made if absent.
        codec: what made the codes; an existing set or journal must agree.
        shard_bytes: a shard is closed once it holds this many bytes of codes.

    Raises:
        ValueError: another writer is at work there, or the folder holds codes of another codec.
    """

    def __init__(self, root: str | Path, codec: Codec, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes}: must be at least 1")
        self.root, self.codec, self.shard_bytes = Path(root), codec, shard_bytes
        self._finished: list[Shard] = []
        self._open: dict[str, _OpenShard] = {}
        self._names: set[str] = set()
        self._changed = False
        self.root.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self.root)
        try:
            self._restore()
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def done(self) -> frozenset[str]:
        """Names of the tracks already in the set or recorded in the journal."""
        return frozenset(self._names)

    def add(
        self,
        codes_KT: npt.NDArray[np.integer[Any]],
        name: str,
        *,
        licence: str = "unknown",
        attribution: str = "unknown",
        source: str = "unknown",
        split: str = "train",
    ) -> None:
        """Append one track; it is on disk and recorded when this returns.

        Args:
            codes_KT: the codes, `[K, T]`, any integer type.
            name: unique name of the track.
            licence: licence of the track, SPDX where there is one.
            attribution: whom to name.
            source: where the audio comes from.
            split: split that the whole track belongs to.

        Raises:
            ValueError: the name is taken, or the codes have another shape, type or range.
            OSError: the disk is full or gone; what was recorded before stays.
        """
        if name in self._names:
            raise ValueError(f"track {name!r}: already in {self.root}; track names must differ")
        frames_TK = _checked(codes_KT, self.codec, name)
        track = typed(Track(name, len(frames_TK), licence, attribution, source))
        shard = self._open.get(split) or self._start(split)
        digest = _append(shard.file, frames_TK.tobytes())
        self._journal.record({"shard": shard.number, "split": split, "digest": digest, "track": asdict(track)})
        self._account(shard, track, frames_TK)
        if shard.frames * 2 * self.codec.codebooks >= self.shard_bytes:
            self._finish(split)

    def close(self) -> None:
        """Finish the open shards, write the index, and remove the journal.

        Raises:
            ValueError: nothing was ever added.
        """
        for split in sorted(self._open):
            self._finish(split)
        shards = tuple(sorted(self._finished, key=lambda shard: _number(shard.file)))
        if not shards:
            self._journal.remove()
            raise ValueError(f"{self.root}: no track was added: nothing to index")
        if self._changed:
            text = json.dumps(index_to_json(self.codec, shards), indent=1, ensure_ascii=True)
            write_atomically(self.root / INDEX_NAME, text.encode())
        for leftover in self.root.glob("shard-*.tmp"):  # begun, never recorded
            leftover.unlink()
        self._journal.remove()

    def abandon(self) -> None:
        """Close all files and leave the folder as it is, to be continued."""
        for shard in self._open.values():
            shard.file.close()
        self._open.clear()
        self._journal.close()

    def _account(self, shard: _OpenShard, track: Track, frames_TK: npt.NDArray[np.int16]) -> None:
        for book in range(self.codec.codebooks):
            shard.counts_KV[book] += np.bincount(frames_TK[:, book], minlength=self.codec.codebook_size)
        shard.tracks.append(track)
        shard.frames += track.frames
        self._names.add(track.name)

    def _start(self, split: str) -> _OpenShard:
        taken = [_number(shard.file) for shard in self._finished] + [shard.number for shard in self._open.values()]
        return self._open_at(split, max(taken, default=-1) + 1, HEADER_BYTES)

    def _open_at(self, split: str, number: int, size: int) -> _OpenShard:
        path = self.root / f"{_stem(number)}.npy.tmp"
        path.touch()
        file = path.open("r+b")  # stays open until the shard is full
        file.truncate(size)
        file.seek(size)
        counts = np.zeros((self.codec.codebooks, self.codec.codebook_size), np.int64)
        self._open[split] = _OpenShard(number, file, [], counts)
        return self._open[split]

    def _finish(self, split: str) -> None:
        shard = self._open.pop(split)
        path = self.root / f"{_stem(shard.number)}.npy"
        with shard.file as file:
            file.seek(0)
            file.write(npy_header(shard.frames, self.codec.codebooks))
            file.flush()
            os.fsync(file.fileno())
        offsets_path = self.root / f"{_stem(shard.number)}.offsets.npy"
        write_atomically(offsets_path, npy_bytes(track_offsets(shard.tracks)))
        os.replace(f"{path}.tmp", path)
        fsync_folder(self.root)
        described = _describe(path, offsets_path, split, shard)
        self._journal.record({"finished": asdict(described)})
        self._finished.append(described)
        self._changed = True

    def _restore(self) -> None:
        """Take up a finished set, and what the journal of an interrupted writer holds beyond it."""
        if (self.root / INDEX_NAME).exists():
            index = load_index(self.root)
            self._refuse_other_codec(index.codec)
            self._finished = list(index.shards)
        if self._journal.rows:
            self._refuse_other_codec(Codec(**self._journal.rows[0]["codec"]))
        else:
            self._journal.record({"codec": asdict(self.codec)})
        for number, rows in self._replay(self._journal.rows[1:]).items():
            self._resume_shard(number, rows)
        self._names |= {track.name for shard in self._finished for track in shard.tracks}

    def _refuse_other_codec(self, found: Codec) -> None:
        if differences := found.differences(self.codec):
            raise ValueError(f"{self.root}: holds codes of another codec ({'; '.join(differences)})")

    def _replay(self, rows: list[Row]) -> dict[int, list[Row]]:
        """Take finished shards from the journal; what is left are the track rows of unfinished ones, by shard."""
        indexed = {shard.file for shard in self._finished}
        pending: dict[int, list[Row]] = {}
        for row in rows:
            if "finished" in row:
                shard = shard_from_json(row["finished"])
                pending.pop(_number(shard.file), None)
                if shard.file not in indexed:
                    check_shard_files(self.root, shard)
                    self._finished.append(shard)
                    self._changed = True
            elif "keep" in row:
                del pending[row["shard"]][row["keep"] :]
            else:
                pending.setdefault(row["shard"], []).append(row)
        return {number: rows for number, rows in pending.items() if rows}

    def _resume_shard(self, number: int, rows: list[Row]) -> None:
        path = self.root / f"{_stem(number)}.npy"
        temporary = Path(f"{path}.tmp")
        if path.exists() and not temporary.exists():
            os.replace(path, temporary)  # renamed, but its "finished" line was never written
        kept = _intact_tracks(temporary, rows, self.codec.codebooks)
        if len(kept) < len(rows):  # lost by the disk after it had been recorded: to be added again
            self._journal.record({"shard": number, "keep": len(kept)})
        if kept:
            size = HEADER_BYTES + sum(len(data) for _, data in kept)
            shard = self._open_at(rows[0]["split"], number, size)
            for track, data in kept:
                self._account(shard, track, np.frombuffer(data, "<i2").reshape(-1, self.codec.codebooks))
            if shard.frames * 2 * self.codec.codebooks >= self.shard_bytes:  # killed before it was closed
                self._finish(rows[0]["split"])


def track_offsets(tracks: list[Track] | tuple[Track, ...]) -> npt.NDArray[np.int64]:
    """First frame of every track inside its shard, and the end, `[tracks + 1]`."""
    return np.cumsum([0, *(track.frames for track in tracks)], dtype=np.int64)


def npy_bytes(array: npt.NDArray[Any]) -> bytes:
    """An array as the bytes of an `.npy` file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _append(file: BinaryIO, data: bytes) -> str:
    """Append durably and return the digest; a failed write leaves the file as it was."""
    before = file.tell()
    try:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    except OSError:
        os.truncate(file.fileno(), before)
        file.seek(before)
        raise
    return block_digest(data)


def _stem(number: int) -> str:
    return f"shard-{number:05d}"


def _number(file: str) -> int:
    digits = file.removeprefix("shard-").split(".")[0]
    return int(digits) if digits.isdigit() else -1


def _checked(codes_KT: npt.NDArray[np.integer[Any]], codec: Codec, name: str) -> npt.NDArray[np.int16]:
    codes = np.asarray(codes_KT)
    if codes.ndim != 2 or not np.issubdtype(codes.dtype, np.integer) or codes.shape[1] == 0:
        shape = list(codes.shape)
        raise ValueError(f"track {name!r}: codes must be integers [K, T] with T > 0, not {codes.dtype} {shape}")
    if codes.shape[0] != codec.codebooks:
        hint = " (transposed? codes are [K, T])" if codes.shape[1] == codec.codebooks else ""
        raise ValueError(
            f"track {name!r}: {codes.shape[0]} codebooks, codec {codec.name!r} has {codec.codebooks}{hint}"
        )
    bad = np.argwhere((codes < 0) | (codes >= codec.codebook_size))
    if len(bad):
        book, frame = (int(i) for i in bad[0])
        place = f"at codebook {book}, frame {frame} ({len(bad)} such codes)"
        raise ValueError(f"track {name!r}: code {codes[book, frame]} outside 0..{codec.codebook_size - 1} {place}")
    return np.ascontiguousarray(codes.T, dtype="<i2")


def _describe(path: Path, offsets_path: Path, split: str, shard: _OpenShard) -> Shard:
    digests: list[str] = []
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES):
            digests.append(block_digest(data))
            whole.update(data)
    used = shard.counts_KV > 0
    return Shard(
        file=path.name,
        offsets_file=offsets_path.name,
        split=split,
        frames=shard.frames,
        bytes=path.stat().st_size,
        sha256=whole.hexdigest(),
        offsets_bytes=offsets_path.stat().st_size,
        offsets_sha256=sha256_file(offsets_path),
        blocks="".join(digests),
        code_min=tuple(int(i) for i in used.argmax(axis=1)),
        code_max=tuple(int(i) for i in used.shape[1] - 1 - used[:, ::-1].argmax(axis=1)),
        top_share=tuple(round(float(c), 6) for c in shard.counts_KV.max(axis=1) / shard.frames),
        tracks=tuple(shard.tracks),
    )


def _intact_tracks(path: Path, rows: list[Row], codebooks: int) -> list[tuple[Track, bytes]]:
    """The recorded tracks whose bytes are really in the temporary file, up to the first that is not."""
    kept: list[tuple[Track, bytes]] = []
    if not path.exists():
        return kept
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        for row in rows:
            track = Track(**row["track"])
            data = file.read(2 * track.frames * codebooks)
            if block_digest(data) != row["digest"]:
                break
            kept.append((track, data))
    return kept
