"""Writing a shard set: an interruption leaves nothing that reads as whole, and the next start goes on from there.

Tracks are appended to `*.npy.tmp` files and recorded in a journal, one line a track, after their bytes are on disk.
A full shard is finished, fsynced and renamed; `index.json` is written last, by rename. Opened again after a kill,
the writer reads the journal, cuts the temporary files back to the last recorded track and continues.

Legend: K codebooks, T frames, V codes a codebook.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from datamodules.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INDEX_NAME,
    Codec,
    Shard,
    Track,
    block_digest,
    index_to_json,
    load_index,
    sha256_file,
)

JOURNAL_NAME = "journal.jsonl"
SHARD_BYTES = 64 * 1024 * 1024


@dataclass
class _OpenShard:
    """A shard being written: its temporary file and the statistics of what is in it."""

    number: int
    split: str
    file: BinaryIO
    tracks: list[Track]
    counts_KV: npt.NDArray[np.int64]
    frames: int = 0


@dataclass
class ShardWriter:
    """Write tracks of codes into a shard set.

    Use it as a context manager. Leaving the block normally writes the index; leaving it by an exception keeps the
    journal, so that the same call goes on later. Adding to a finished set leaves its index valid until the new one
    replaces it.

    Attributes:
        root: folder of the set, made if absent.
        codec: what made the codes; an existing set or journal must agree.
        shard_bytes: a shard is closed once it holds this many bytes of codes.
    """

    root: Path
    codec: Codec
    shard_bytes: int = SHARD_BYTES
    _finished: list[Shard] = field(default_factory=list, init=False)
    _open: dict[str, _OpenShard] = field(default_factory=dict, init=False)
    _names: set[str] = field(default_factory=set, init=False)
    _dirty: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._journal = (self.root / JOURNAL_NAME).open("a+b")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._journal.close()
            raise ValueError(
                f"{self.root}: another writer is at work in this folder; wait for it or choose another"
            ) from None
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
        """
        if name in self._names:
            raise ValueError(f"track {name!r}: already in {self.root}; track names must differ")
        frames_TK = _checked(codes_KT, self.codec, name)
        track = Track(name, len(frames_TK), licence, attribution, source)
        shard = self._open.get(split) or self._start(split)
        data = frames_TK.tobytes()
        shard.file.write(data)
        shard.file.flush()
        os.fsync(shard.file.fileno())
        row = {"shard": shard.number, "split": split, "digest": block_digest(data), "track": asdict(track)}
        self._record(row)
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
        shards = tuple(sorted(self._finished, key=lambda shard: shard.file))
        if not shards:
            self.abandon()
            (self.root / JOURNAL_NAME).unlink(missing_ok=True)
            raise ValueError(f"{self.root}: no track was added: nothing to index")
        if self._dirty or not (self.root / INDEX_NAME).exists():
            text = json.dumps(index_to_json(self.codec, shards), indent=1, ensure_ascii=True)
            write_atomically(self.root / INDEX_NAME, text.encode())
        self.abandon()
        (self.root / JOURNAL_NAME).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close all files and leave the folder as it is, to be continued."""
        for shard in self._open.values():
            shard.file.close()
        self._open.clear()
        self._journal.close()

    def _record(self, row: dict[str, Any]) -> None:
        self._journal.write(json.dumps(row).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _account(self, shard: _OpenShard, track: Track, frames_TK: npt.NDArray[np.int16]) -> None:
        for book in range(self.codec.codebooks):
            shard.counts_KV[book] += np.bincount(frames_TK[:, book], minlength=self.codec.codebook_size)
        shard.tracks.append(track)
        shard.frames += track.frames
        self._names.add(track.name)
        self._dirty = True

    def _start(self, split: str, number: int | None = None) -> _OpenShard:
        taken = [_number(shard.file) for shard in self._finished] + [shard.number for shard in self._open.values()]
        number = max(taken, default=-1) + 1 if number is None else number
        path = self.root / f"{_stem(number)}.npy.tmp"
        file = path.open("w+b" if not path.exists() else "r+b")
        file.truncate(HEADER_BYTES)
        file.seek(HEADER_BYTES)
        counts = np.zeros((self.codec.codebooks, self.codec.codebook_size), np.int64)
        self._open[split] = _OpenShard(number, split, file, [], counts)
        return self._open[split]

    def _finish(self, split: str) -> None:
        shard = self._open.pop(split)
        path = self.root / f"{_stem(shard.number)}.npy"
        shard.file.seek(0)
        shard.file.write(npy_header(shard.frames, self.codec.codebooks))
        shard.file.flush()
        os.fsync(shard.file.fileno())
        shard.file.close()
        offsets = np.cumsum([0, *(track.frames for track in shard.tracks)], dtype=np.int64)
        offsets_path = self.root / f"{_stem(shard.number)}.offsets.npy"
        buffer = io.BytesIO()
        np.save(buffer, offsets)
        write_atomically(offsets_path, buffer.getvalue())
        os.replace(f"{path}.tmp", path)
        _fsync_folder(self.root)
        self._finished.append(_describe(path, offsets_path, shard))
        self._record({"finished": asdict(self._finished[-1])})

    def _restore(self) -> None:
        if (self.root / INDEX_NAME).exists():
            index = load_index(self.root)
            self._refuse_other_codec(index.codec)
            self._finished = list(index.shards)
            self._names = {track.name for shard in index.shards for track in shard.tracks}
        rows = list(_journal_rows(self._journal))
        if rows:
            self._refuse_other_codec(Codec(**rows[0]["codec"]))
        else:
            self._journal.truncate(0)
            self._record({"codec": asdict(self.codec) | {"settings": dict(self.codec.settings)}})
        self._replay(rows[1:])

    def _refuse_other_codec(self, found: Codec) -> None:
        if differences := found.differences(self.codec):
            raise ValueError(
                f"{self.root}: holds codes of another codec ({'; '.join(differences)}); choose another folder"
            )

    def _replay(self, rows: list[dict[str, Any]]) -> None:
        """Take finished shards and recorded tracks from the journal; what was not recorded is cut off."""
        indexed = {shard.file for shard in self._finished}
        pending: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            if "finished" in row:
                shard = _shard_row(row["finished"])
                pending.pop(_number(shard.file), None)
                if shard.file not in indexed:
                    self._finished.append(shard)
                    self._names |= {track.name for track in shard.tracks}
                    self._dirty = True
            else:
                pending.setdefault(row["shard"], []).append(row)
        for number, tracks in pending.items():
            self._resume_shard(number, tracks)
        self._rewrite_journal()

    def _resume_shard(self, number: int, rows: list[dict[str, Any]]) -> None:
        path = self.root / f"{_stem(number)}.npy"
        if path.exists() and not (self.root / f"{path.name}.tmp").exists():
            os.replace(path, f"{path}.tmp")  # renamed, but its "finished" line was never written
        kept = _intact_tracks(self.root / f"{path.name}.tmp", rows, self.codec.codebooks)
        if not kept:
            Path(f"{path}.tmp").unlink(missing_ok=True)
            return
        size = HEADER_BYTES + sum(len(data) for _, data in kept)
        split = rows[0]["split"]
        os.truncate(f"{path}.tmp", size)
        counts = np.zeros((self.codec.codebooks, self.codec.codebook_size), np.int64)
        file = Path(f"{path}.tmp").open("r+b")  # noqa: SIM115 - stays open until the shard is full
        file.seek(size)
        shard = self._open[split] = _OpenShard(number, split, file, [], counts)
        for track, data in kept:
            self._account(shard, track, np.frombuffer(data, "<i2").reshape(-1, self.codec.codebooks))

    def _rewrite_journal(self) -> None:
        """Drop torn and superseded lines, keeping the lock (the file is rewritten in place, shorter)."""
        indexed = (self.root / INDEX_NAME).exists()
        known = {shard.file for shard in load_index(self.root).shards} if indexed else set()
        rows: list[dict[str, Any]] = [{"codec": asdict(self.codec) | {"settings": dict(self.codec.settings)}}]
        rows += [{"finished": asdict(shard)} for shard in self._finished if shard.file not in known]
        for shard in self._open.values():
            shard.file.seek(HEADER_BYTES)
            for track in shard.tracks:
                digest = block_digest(shard.file.read(2 * track.frames * self.codec.codebooks))
                rows.append({"shard": shard.number, "split": shard.split, "digest": digest, "track": asdict(track)})
        text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        self._journal.seek(0)
        if self._journal.read() != text:
            self._journal.truncate(0)
            self._journal.write(text)
            self._journal.flush()
            os.fsync(self._journal.fileno())


def npy_header(frames: int, codebooks: int) -> bytes:
    """The `.npy` header of a `(frames, codebooks)` little-endian int16 array: exactly `HEADER_BYTES`."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i2", "fortran_order": False, "shape": (frames, codebooks)})
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES, len(header)
    return header


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place, fsync it and rename it: readers see the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _fsync_folder(path.parent)


def _stem(number: int) -> str:
    return f"shard-{number:05d}"


def _number(file: str) -> int:
    return int(file.removeprefix("shard-").split(".")[0])


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(codes_KT: npt.NDArray[np.integer[Any]], codec: Codec, name: str) -> npt.NDArray[np.int16]:
    codes = np.asarray(codes_KT)
    if codes.ndim != 2 or not np.issubdtype(codes.dtype, np.integer) or codes.shape[1] == 0:
        raise ValueError(
            f"track {name!r}: codes must be integers [K, T] with T > 0, not {codes.dtype} {list(codes.shape)}"
        )
    if codes.shape[0] != codec.codebooks:
        hint = " (transposed? codes are [K, T])" if codes.shape[1] == codec.codebooks else ""
        raise ValueError(
            f"track {name!r}: {codes.shape[0]} codebooks, codec {codec.name!r} has {codec.codebooks}{hint}"
        )
    bad = np.argwhere((codes < 0) | (codes >= codec.codebook_size))
    if len(bad):
        book, frame = (int(i) for i in bad[0])
        value = int(codes[book, frame])
        raise ValueError(
            f"track {name!r}: code {value} outside 0..{codec.codebook_size - 1} at codebook {book}, frame {frame}"
            f" ({len(bad)} such codes)"
        )
    return np.ascontiguousarray(codes.T, dtype="<i2")


def _describe(path: Path, offsets_path: Path, shard: _OpenShard) -> Shard:
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
        split=shard.split,
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


def _shard_row(row: dict[str, Any]) -> Shard:
    lists = {key: tuple(row[key]) for key in ("code_min", "code_max", "top_share")}
    return Shard(**{**row, **lists, "tracks": tuple(Track(**track) for track in row["tracks"])})


def _journal_rows(journal: BinaryIO) -> Iterator[dict[str, Any]]:
    """Rows up to the first torn line (a kill can tear only the last one)."""
    journal.seek(0)
    for line in journal:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not line.endswith(b"\n") or not isinstance(row, dict):
            return
        yield row


def _intact_tracks(path: Path, rows: list[dict[str, Any]], codebooks: int) -> list[tuple[Track, bytes]]:
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
