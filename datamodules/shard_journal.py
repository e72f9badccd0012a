"""The journal of a shard set being written: a JSON line a fact, on disk before the call returns, one writer at a time.

Lines are only ever appended. A kill can tear the last one, which is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

JOURNAL_NAME = "journal.jsonl"
Row = dict[str, Any]


class Journal:
    """An append-only, locked list of rows.

    Args:
        root: folder of the set.

    Attributes:
        rows: the intact rows found when it was opened.

    Raises:
        ValueError: another writer holds it.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / JOURNAL_NAME
        self._file = _locked(self.path)
        self.rows = self._intact_rows()

    def record(self, row: Row) -> None:
        """Append one row; it is on disk when this returns."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Give up the lock and keep the rows."""
        self._file.close()

    def remove(self) -> None:
        """Delete the journal, then give up the lock."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _intact_rows(self) -> list[Row]:
        rows: list[Row] = []
        good = 0
        self._file.seek(0)
        for line in self._file:
            row = _parse(line)
            if row is None:
                break
            rows.append(row)
            good += len(line)
        self._file.truncate(good)
        self._file.seek(good)
        return rows


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file beside its place, fsync it and rename it: readers see the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> BinaryIO:
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(f"{path.parent}: another writer is at work in this folder; wait for it") from None
        # The writer that held it may have removed the file between our opening and our locking.
        if path.exists() and os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and line.endswith(b"\n") else None
