"""What is known about a track besides its audio: licence, attribution, source, and the split it belongs to."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

COLUMNS = {name: name for name in ("licence", "attribution", "source", "split")} | {"license": "licence"}
NAME_COLUMNS = ("track", "path", "file")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class TrackFacts:
    """One track's facts.

    Attributes:
        licence: SPDX where there is one.
        attribution: whom to name.
        source: where the audio comes from.
        split: "train", "val" or "test"; "" leaves the choice to `assign_splits`.
    """

    licence: str = "unknown"
    attribution: str = "unknown"
    source: str = "unknown"
    split: str = ""


def read_facts(path: str | Path, defaults: TrackFacts) -> dict[str, TrackFacts]:
    """Read a sidecar CSV: a column `track` (or `path`, `file`) and any of licence, attribution, source, split.

    Args:
        path: the CSV, UTF-8, with a header.
        defaults: taken where a cell is empty or a column absent.

    Returns:
        track id -> facts.

    Raises:
        ValueError: no such file, no column that names tracks, a track named twice, or an unknown split.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            key = next((name for name in NAME_COLUMNS if name in header), None)
            if key is None:
                raise ValueError(f"{path}: no column {' or '.join(NAME_COLUMNS)}; its header is {list(header)}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as CSV: {error}") from None
    facts: dict[str, TrackFacts] = {}
    for line, row in enumerate(rows, start=2):
        track = (row[key] or "").strip()
        cells = {COLUMNS[name]: cell.strip() for name, cell in row.items() if name in COLUMNS and cell and cell.strip()}
        if track in facts:
            raise ValueError(f"{path}: line {line}: track {track!r} is named twice")
        if cells.get("split", "train") not in SPLITS:
            raise ValueError(f"{path}: line {line}: split={cells['split']!r}: choose from {', '.join(SPLITS)}")
        facts[track] = replace(defaults, **cells)
    return facts


def hash_share(track: str) -> float:
    """A number in 0..1 that depends on the track's id only."""
    return int.from_bytes(hashlib.sha256(track.encode()).digest()[:8], "big") / 2**64


def assign_splits(
    tracks: Sequence[str],
    val_fraction: float,
    given: Mapping[str, str],
    usable: Callable[[str], bool] = lambda track: True,
) -> dict[str, str]:
    """Give every track its split, by the hash of its id, whole tracks only.

    A track's split does not change when others come or go, with one exception: where no usable track of several falls
    into the validation split, the usable one with the smallest hash does.

    Args:
        tracks: all track ids.
        val_fraction: share of tracks for validation, 0..1; 0 gives none.
        given: splits decided elsewhere ("" leaves it to the hash).
        usable: whether a track can be in the set at all; asked until one is found.

    Raises:
        ValueError: `val_fraction` is out of range.
    """
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: must be at least 0 and below 1")
    free = [track for track in tracks if not given.get(track)]
    splits = {track: given[track] if given.get(track) else "train" for track in tracks}
    chosen = [track for track in free if hash_share(track) < val_fraction]
    empty = "val" not in splits.values() and not any(usable(track) for track in chosen)
    if empty and val_fraction > 0 and len(free) > 1:
        rest = sorted(free, key=hash_share)[len(chosen) :]
        chosen += islice(filter(usable, rest), 1)
    return splits | dict.fromkeys(chosen, "val")
