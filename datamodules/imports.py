"""Codes that others made: fairseq text files as MERT uses them, one `.npy` per track, and parquet.

Every reader yields tracks in a fixed order, each with the place it came from, so that a fault names file and row. A
track whose codes cannot be read has a reason instead; range and shape are checked where it is written.

Legend: K codebooks, T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.shards import INDEX_NAME, Codec

SPLIT_NAMES = {"valid": "val", "validation": "val", "dev": "val", "eval": "test"}
CODE_COLUMNS = ("codes", "codec", "audio_codes", "tokens", "audio_tokens")
NAME_COLUMNS = ("track", "id", "name", "key", "__key__", "path", "file", "file_name", "audio_path")
LICENCE_COLUMNS = ("licence", "license")
AXES = ("auto", "kt", "tk")
PARQUET_ROWS = 256

Codes = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """One track.

    Attributes:
        name: its id.
        place: file and row it came from.
        codes_KT: its codes, `[K, T]`; None where they cannot be read.
        reason: why not, or "".
        split: the split its file says.
        licence: its licence, or "".
    """

    name: str
    place: str
    codes_KT: Codes | None
    reason: str = ""
    split: str = "train"
    licence: str = ""


def read_fairseq(folder: Path, codec: Codec, axes: str = "auto") -> Iterator[Imported]:
    """Read `SPLIT.codec_0` .. `SPLIT.codec_{K-1}`: one line a track, codes separated by blanks (MERT, fairseq).

    With `SPLIT.tsv` beside them (first line the audio's root, then `path<TAB>samples`), tracks get its names, and
    their lengths must agree with it to within two frames.

    Raises:
        ValueError: no such files, a codebook's file is missing, or files of different numbers of lines.
    """
    firsts = sorted(folder.glob("*.codec_0"))
    if not firsts:
        raise ValueError(f"{folder}: no SPLIT.codec_0 file in it")
    for first in firsts:
        yield from _fairseq_split(folder, first.name.removesuffix(".codec_0"), codec)


def _fairseq_split(folder: Path, split: str, codec: Codec) -> Iterator[Imported]:
    paths = [folder / f"{split}.codec_{k}" for k in range(codec.codebooks)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(
            f"{folder}: {', '.join(missing)} missing: codec {codec.name!r} has {codec.codebooks} codebooks"
        )
    extra = folder / f"{split}.codec_{codec.codebooks}"
    if extra.exists():
        raise ValueError(f"{extra}: a codebook more than the {codec.codebooks} of codec {codec.name!r}")
    manifest = _manifest(folder / f"{split}.tsv")
    files = [path.open(encoding="utf-8") for path in paths]
    try:
        row = -1
        for row, lines in enumerate(zip_longest(*files)):
            yield _fairseq_row(paths, split, row, lines, manifest, codec)
        if manifest is not None and row + 1 != len(manifest):
            raise ValueError(f"{folder / split}.tsv: names {len(manifest)} tracks, {paths[0].name} has {row + 1} lines")
    finally:
        for file in files:
            file.close()


def _fairseq_row(
    paths: list[Path],
    split: str,
    row: int,
    lines: Sequence[str | None],
    manifest: list[tuple[str, int]] | None,
    codec: Codec,
) -> Imported:
    for path, line in zip(paths, lines, strict=True):
        if line is None:
            raise ValueError(f"{path}: ends after {row} lines, {paths[0].name} and others have more")
    entry = manifest[row] if manifest is not None and row < len(manifest) else None
    name = entry[0] if entry else f"{split}/{row:08d}"
    place = f"{paths[0]}: line {row + 1}"
    kept = SPLIT_NAMES.get(split, split)
    columns: list[list[int]] = []
    for path, line in zip(paths, lines, strict=True):
        try:
            columns.append([int(word) for word in (line or "").split()])
        except ValueError as error:
            return Imported(name, f"{path}: line {row + 1}", None, f"not whole numbers ({error})", kept)
    if len({len(column) for column in columns}) > 1:
        lengths = [len(column) for column in columns]
        return Imported(name, place, None, f"the codebooks have different lengths: {lengths}", kept)
    codes_KT = np.array(columns, np.int64)
    if entry and abs(codes_KT.shape[1] - entry[1] * codec.frame_rate / codec.sample_rate) > 2:
        expected = entry[1] * codec.frame_rate / codec.sample_rate
        reason = f"{codes_KT.shape[1]} frames, the manifest's {entry[1]} samples make {expected:.1f}"
        return Imported(name, place, None, reason, kept)
    return Imported(name, place, codes_KT, split=kept)


def _manifest(path: Path) -> list[tuple[str, int]] | None:
    if not path.exists():
        return None
    rows: list[tuple[str, int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
        name, tab, samples = line.rstrip().partition("\t")
        if not tab or not samples.isdigit():
            raise ValueError(f"{path}: line {number}: must be a path, a tab and a number of samples")
        rows.append((name, int(samples)))
    return rows


def read_npy(folder: Path, codec: Codec, axes: str = "auto") -> Iterator[Imported]:
    """Read one `.npy` per track, any folder depth: integers `[K, T]` or `[T, K]`, a leading axis of 1 is dropped.

    Raises:
        ValueError: no such files, or the folder is a shard set already.
    """
    if (folder / INDEX_NAME).exists():
        raise ValueError(f"{folder}: is a shard set already; `shards merge` takes it as it is")
    paths = sorted(folder.rglob("*.npy"))
    if not paths:
        raise ValueError(f"{folder}: no .npy file in it")
    for path in paths:
        name = path.relative_to(folder).with_suffix("").as_posix()
        try:
            array = np.load(path, allow_pickle=False)
            if not isinstance(array, np.ndarray):
                raise ValueError("not an array")
            yield Imported(name, str(path), orient(array, codec.codebooks, axes))
        except (ValueError, EOFError, OSError) as error:
            reason = "not an array of numbers" if "pickle" in str(error) else str(error).splitlines()[0]
            yield Imported(name, str(path), None, reason)


def orient(array: npt.NDArray[Any], codebooks: int, axes: str) -> Codes:
    """Bring codes to `[K, T]`.

    Args:
        array: `[K, T]`, `[T, K]`, either with leading axes of 1, or flat, frame-major (`axes` "kt": codebook-major).
        codebooks: K.
        axes: "kt", "tk", or "auto": by which axis has K entries.

    Raises:
        ValueError: not integers, no axis of K entries, or both.
    """
    codes = np.asarray(array)
    if not np.issubdtype(codes.dtype, np.integer):
        raise ValueError(f"not integers but {codes.dtype}")
    while codes.ndim > 2 and codes.shape[0] == 1:
        codes = codes[0]
    if codes.ndim == 1 and codes.size % codebooks == 0:
        return codes.reshape(codebooks, -1) if axes == "kt" else codes.reshape(-1, codebooks).T
    if codes.ndim != 2 or codebooks not in codes.shape:
        raise ValueError(f"shape {list(array.shape)} has no axis of {codebooks} codebooks")
    if axes == "auto" and codes.shape == (codebooks, codebooks):
        raise ValueError(f"shape {list(array.shape)} may be [K, T] or [T, K]: say --axes kt or tk")
    first = axes == "kt" or (axes == "auto" and codes.shape[0] == codebooks)
    if codes.shape[0 if first else 1] != codebooks:
        raise ValueError(f"shape {list(array.shape)} is not {'[K, T]' if first else '[T, K]'} with K = {codebooks}")
    return codes if first else codes.T


def read_parquet(source: Path, codec: Codec, axes: str = "auto") -> Iterator[Imported]:
    """Read parquet as HF datasets writes it: a column of codes, nested `[K][T]` or `[T][K]`, or one flat list.

    The codes' column is the first of `codes`, `codec`, `audio_codes`, `tokens`, `audio_tokens`; names come from
    `track`, `id`, `path`, ...; a file whose name begins with `validation`, `valid`, `dev` or `test` gives that split.

    Raises:
        ValueError: no such files, damaged ones, or no column of codes.
        ImportError: pyarrow is not installed.
    """
    import pyarrow
    import pyarrow.parquet

    paths = sorted(source.rglob("*.parquet")) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source}: no .parquet file in it")
    for path in paths:
        stem = path.relative_to(source).as_posix() if source.is_dir() else path.name
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from _parquet_rows(file, path, stem.removesuffix(".parquet"), codec, axes)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _parquet_rows(file: Any, path: Path, stem: str, codec: Codec, axes: str) -> Iterator[Imported]:
    columns = list(file.schema_arrow.names)
    code_column = next((name for name in CODE_COLUMNS if name in columns), None)
    if code_column is None:
        raise ValueError(f"{path}: no column {' or '.join(CODE_COLUMNS)}; it has {', '.join(columns)}")
    name_column = next((name for name in NAME_COLUMNS if name in columns), None)
    licence_column = next((name for name in LICENCE_COLUMNS if name in columns), None)
    word = path.name.split("-")[0].split(".")[0]
    split = word if word in ("train", "val", "test") else SPLIT_NAMES.get(word, "train")
    wanted = [name for name in (code_column, name_column, licence_column) if name]
    row = 0
    for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=wanted):
        for record in batch.to_pylist():
            name = str(record[name_column]) if name_column and record[name_column] else f"{stem}/{row:08d}"
            licence = str(record[licence_column] or "") if licence_column else ""
            place = f"{path}: row {row}"
            try:
                codes_KT = orient(_rectangle(record[code_column]), codec.codebooks, axes)
                yield Imported(name, place, codes_KT, split=split, licence=licence)
            except ValueError as error:
                yield Imported(name, place, None, str(error), split, licence)
            row += 1


def _rectangle(value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("no codes")
    try:
        return np.array(value)
    except ValueError:
        raise ValueError(f"the codebooks have different lengths: {[len(row) for row in value][:16]}") from None


READERS: dict[str, Callable[[Path, Codec, str], Iterator[Imported]]] = {
    "fairseq": read_fairseq,
    "npy": read_npy,
    "parquet": read_parquet,
}
