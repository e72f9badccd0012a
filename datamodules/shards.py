"""The shard set on disk: what `index.json` says, read and checked before anything is trained on.

A shard set is a folder: `index.json` (the truth), `shard-00000.npy` (int16, frame-major `(frames, K)`) and
`shard-00000.offsets.npy` (int64 `(tracks + 1,)`, first frame of every track). Files that the index does not list are
ignored; files it lists and that are absent are an error when the set is opened. Writing lives in `shard_writer.py`,
reading clips in `shard_reader.py`.

Legend: K codebooks, V codes a codebook; a *block* is `BLOCK_BYTES` of a shard file, the unit that is hashed on first
touch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

INDEX_NAME = "index.json"
FORMAT = "ballast-shards"
VERSION = 1
DTYPE = "int16"
LAYOUT = "frames,codebooks"
HEADER_BYTES = 128
BLOCK_BYTES = 512 * 1024
BLOCK_DIGEST_HEX = 16
BUNDLED = Path(__file__).parent / "bundled"

_Row = TypeVar("_Row", "Track", "Shard")


class ShardError(ValueError):
    """A shard file or an index that cannot be trusted; the message names the file, the place and what to do."""


@dataclass(frozen=True, slots=True)
class Track:
    """One track: `frames` codec frames and where they come from."""

    name: str
    frames: int
    licence: str
    attribution: str
    source: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard file as the index records it.

    Attributes:
        file: name of the code file, `(frames, K)` int16 `.npy`.
        offsets_file: name of the track offsets, `(tracks + 1,)` int64 `.npy`.
        split: "train", "val" or any other split; a shard holds tracks of one split only.
        frames: frames in the shard.
        bytes: size of `file`.
        sha256: SHA-256 of `file`.
        offsets_bytes: size of `offsets_file`.
        offsets_sha256: SHA-256 of `offsets_file`.
        blocks: the first 64 bits of the SHA-256 of every `BLOCK_BYTES` of `file`, as one hex string.
        code_min: smallest code of each codebook, `[K]`.
        code_max: largest code of each codebook, `[K]`.
        top_share: share of the most frequent code of each codebook, `[K]`; near 1 means a dead codebook.
        tracks: the tracks, in the order of their frames.
    """

    file: str
    offsets_file: str
    split: str
    frames: int
    bytes: int
    sha256: str
    offsets_bytes: int
    offsets_sha256: str
    blocks: str
    code_min: tuple[int, ...]
    code_max: tuple[int, ...]
    top_share: tuple[float, ...]
    tracks: tuple[Track, ...]

    def block_digest(self, number: int) -> str:
        """The digest of one block."""
        return self.blocks[number * BLOCK_DIGEST_HEX : (number + 1) * BLOCK_DIGEST_HEX]

    @property
    def block_digests(self) -> list[str]:
        """The block digests, one hex string per block."""
        return [self.blocks[i : i + BLOCK_DIGEST_HEX] for i in range(0, len(self.blocks), BLOCK_DIGEST_HEX)]


@dataclass(frozen=True, slots=True)
class Codec:
    """What made the codes. Sets whose codecs differ are never mixed.

    Attributes:
        name: "encodec_24khz", "dac_24khz", "lyra", "rvq_mel", ...
        sample_rate: of the audio given to the codec, Hz.
        frame_rate: frames a second.
        codebooks: K.
        codebook_size: V; codes are `0 <= code < V`.
        settings: bandwidth, recipe, weights: whatever tells two variants of one codec apart.
    """

    name: str
    sample_rate: int
    frame_rate: float
    codebooks: int
    codebook_size: int
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key, low, high in (("codebooks", 1, 256), ("codebook_size", 2, 32768), ("sample_rate", 1, 10**7)):
            value = getattr(self, key)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"codec {key}={value!r}: must be a whole number in {low}..{high}")
        if not isinstance(self.frame_rate, (int, float)) or not 0 < self.frame_rate < 1e5:
            raise ValueError(f"codec frame_rate={self.frame_rate!r}: must be a number of frames a second above 0")
        if not isinstance(self.name, str) or not self.name or not isinstance(self.settings, Mapping):
            raise ValueError(f"codec name={self.name!r}: must be a non-empty string, and settings a mapping")
        try:  # as they come back from the index, so that a codec equals its own record
            object.__setattr__(self, "settings", json.loads(json.dumps(dict(self.settings), allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"codec settings: must be plain JSON data: {error}") from None

    def differences(self, other: Codec) -> list[str]:
        """`key: mine against theirs` for every field in which the two codecs differ."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} against {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """A whole `index.json`: the codec, the shards, and the checksum that stands for the set's content."""

    codec: Codec
    shards: tuple[Shard, ...]
    checksum: str

    def of_split(self, split: str) -> tuple[Shard, ...]:
        """The shards of one split, in order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that have shards."""
        return tuple(sorted({shard.split for shard in self.shards}))

    @property
    def hours(self) -> float:
        """Length of all tracks in hours."""
        return sum(shard.frames for shard in self.shards) / self.codec.frame_rate / 3600


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def block_digest(data: bytes | memoryview) -> str:
    """The digest kept for one block: the first 64 bits of its SHA-256, as hex."""
    return hashlib.sha256(data).hexdigest()[:BLOCK_DIGEST_HEX]


def index_to_json(codec: Codec, shards: tuple[Shard, ...]) -> dict[str, Any]:
    """The index as plain data, with its checksum."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": DTYPE,
        "layout": LAYOUT,
        "codec": asdict(codec),
        "shards": [asdict(shard) for shard in shards],
    }
    return {**body, "checksum": _checksum(body)}


def load_index(root: str | Path) -> ShardIndex:
    """Read `root/index.json` and check it against itself.

    Args:
        root: folder of the shard set, or "bundled" for the set inside the package.

    Returns:
        The index.

    Raises:
        FileNotFoundError: no such folder, or no finished set in it.
        ShardError: the index is damaged, of another format, or contradicts itself.
    """
    folder = resolve_root(root)
    path = folder / INDEX_NAME
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such data folder")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no {INDEX_NAME}: not a shard set, or its writer has not finished (run it again)"
        )
    return parse_index(path.read_bytes(), str(path))


def resolve_root(root: str | Path) -> Path:
    """The folder meant by `root`; the word "bundled" means the package's own set."""
    return BUNDLED if str(root) == "bundled" else Path(root)


def parse_index(text: bytes, path: str) -> ShardIndex:
    """Parse and check the bytes of an index; `path` is only named in messages.

    Raises:
        ShardError: what is wrong, in one line.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{path}: damaged: not valid JSON ({error}); restore it or write the set again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ShardError(f"{path}: not a {FORMAT} index")
    for key, wanted in (("version", VERSION), ("dtype", DTYPE), ("layout", LAYOUT)):
        if data.get(key) != wanted:
            raise ShardError(f"{path}: {key} is {data.get(key)!r}; this version reads only {wanted!r}")
    try:
        codec = Codec(**data["codec"])
        shards = tuple(shard_from_json(row) for row in data["shards"])
        _check_shards(codec, shards)
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(f"{path}: damaged: {_reason(error)}; restore it or write the set again") from None
    body = {key: value for key, value in data.items() if key != "checksum"}
    if _checksum(body) != data.get("checksum"):
        raise ShardError(f"{path}: changed after it was written (its checksum does not fit); restore it")
    return ShardIndex(codec, shards, str(data["checksum"]))


def check_files(root: Path, index: ShardIndex) -> None:
    """Check that every listed file exists and has the listed size (no content is read).

    Raises:
        FileNotFoundError: a listed file is absent.
        ShardError: a listed file has another size.
    """
    for shard in index.shards:
        check_shard_files(root, shard)


def check_shard_files(root: Path, shard: Shard) -> None:
    """As `check_files`, for one shard."""
    for name, size in ((shard.file, shard.bytes), (shard.offsets_file, shard.offsets_bytes)):
        check_size(root / name, size)


def check_size(path: Path, size: int) -> None:
    """Check that a file exists with the size that the index gives.

    Raises:
        FileNotFoundError: it is absent.
        ShardError: it has another size.
    """
    try:
        found = os.stat(path).st_size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: listed in {INDEX_NAME} but missing; restore it or write the set again"
        ) from None
    if found != size:
        what = "truncated" if found < size else "too long"
        raise ShardError(f"{path}: {what}: {found} bytes, {INDEX_NAME} says {size}; restore it or write the set again")


def npy_header(frames: int, codebooks: int) -> bytes:
    """The `.npy` header of a `(frames, codebooks)` little-endian int16 array: exactly `HEADER_BYTES`."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i2", "fortran_order": False, "shape": (frames, codebooks)})
    header = buffer.getvalue()
    assert len(header) == HEADER_BYTES, len(header)
    return header


def header_fault(header: bytes, frames: int, codebooks: int) -> str:
    """Say in which way the first bytes of a shard are not `npy_header(frames, codebooks)`."""
    wanted = f"int16 ({frames}, {codebooks})"
    try:
        file = io.BytesIO(header)
        np.lib.format.read_magic(file)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy's parser raises whatever the bytes lead it to
        return f"its .npy header is damaged (expected {wanted})"
    if shape == (codebooks, frames) or fortran:
        return f"transposed: the file holds {dtype} {shape}{' in Fortran order' * fortran}, the index says {wanted}"
    if dtype != np.dtype("<i2"):
        return f"wrong dtype: the file holds {dtype} {shape}, the index says {wanted}"
    if shape != (frames, codebooks):
        return f"wrong shape: the file holds {dtype} {shape}, the index says {wanted}"
    return f"its .npy header is not the one that was written (expected {wanted})"


def expected_bytes(frames: int, codebooks: int) -> int:
    """Size of a shard file of so many frames."""
    return HEADER_BYTES + 2 * frames * codebooks


def _reason(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def shard_from_json(row: dict[str, Any]) -> Shard:
    """A shard from its row in an index.

    Raises:
        KeyError, TypeError, ValueError: the row is not one.
    """
    tracks = tuple(typed(Track(**track)) for track in row["tracks"])
    lists = {key: tuple(row[key]) for key in ("code_min", "code_max", "top_share")}
    return typed(Shard(**{**row, **lists, "tracks": tracks}))


def typed(row: _Row) -> _Row:
    """Check the plain fields of a row by type: JSON that parses may still hold anything."""
    for name, wanted in _PLAIN_FIELDS[type(row)]:
        if type(getattr(row, name)) is not wanted:
            raise ValueError(f"{name} is {getattr(row, name)!r}, not {wanted.__name__}")
    return row


_PLAIN_TYPES: dict[str, type] = {"str": str, "int": int}
_PLAIN_FIELDS = {
    kind: [(field.name, _PLAIN_TYPES[str(field.type)]) for field in fields(kind) if str(field.type) in _PLAIN_TYPES]
    for kind in (Track, Shard)
}


def _check_shards(codec: Codec, shards: tuple[Shard, ...]) -> None:
    seen: set[str] = set()
    for shard in shards:
        for name in (shard.file, shard.offsets_file):
            if Path(name).name != name or name in seen:
                raise ValueError(f"file {name!r} is listed twice or lies outside the folder")
            seen.add(name)
        _check_shard(codec, shard)


def _check_shard(codec: Codec, shard: Shard) -> None:
    lengths = sum(track.frames for track in shard.tracks)
    if lengths != shard.frames or any(track.frames < 1 for track in shard.tracks):
        raise ValueError(f"{shard.file}: the tracks' frames sum to {lengths}, the shard's frames are {shard.frames}")
    if shard.bytes != expected_bytes(shard.frames, codec.codebooks):
        wanted = expected_bytes(shard.frames, codec.codebooks)
        raise ValueError(
            f"{shard.file}: {shard.frames} frames of {codec.codebooks} need {wanted} bytes, not {shard.bytes}"
        )
    if len(shard.blocks) != BLOCK_DIGEST_HEX * math.ceil(shard.bytes / BLOCK_BYTES):
        raise ValueError(f"{shard.file}: the number of block digests does not fit {shard.bytes} bytes")
    for low, high in zip(shard.code_min, shard.code_max, strict=True):
        if not 0 <= low <= high < codec.codebook_size:
            raise ValueError(f"{shard.file}: code range {low}..{high} lies outside 0..{codec.codebook_size - 1}")
    if len(shard.code_min) != codec.codebooks:
        raise ValueError(
            f"{shard.file}: code ranges of {len(shard.code_min)} codebooks, the codec has {codec.codebooks}"
        )
