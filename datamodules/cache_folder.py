"""A bounded folder of files shared by the processes of one machine: locks, reservations, removal of the oldest.

In each subfolder: `NAME` is a whole file, `NAME.BYTES.part` one being fetched that will have so many bytes (reserved
from the start), `NAME.lock` its lock. `.lock` in the folder itself guards the bookkeeping. Locks are `flock`s: a killed
process releases them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from datamodules.shards import ShardError

PART = ".part"
LOCK = ".lock"
GRACE_SECONDS = 2.0
POLL_SECONDS = 0.02


class CacheError(ShardError):
    """The cache cannot serve: another process holds it without progress, or there is no room."""


class LockedError(CacheError):
    """Another process holds a lock."""


def is_whole(path: Path, size: int) -> bool:
    """Whether a file is there with its full size (it gets its name only after its hash was checked)."""
    return size_of(path) == size


def size_of(path: Path) -> int:
    """Size of a file, -1 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def use(path: Path, size: int) -> bool:
    """Whether a whole file is there; marks it as used now, its access time being the order of removal."""
    if not is_whole(path, size):
        return False
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, patience: float, progress: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold a lock file; waiting ends after `patience` seconds in which `progress()` did not change.

    Raises:
        LockedError: waited in vain.
    """
    with path.open("a") as file:
        deadline, seen = time.monotonic() + patience, progress()
        while not _try_lock(file.fileno()):
            now = progress()
            if now != seen:
                deadline, seen = time.monotonic() + patience, now
            if time.monotonic() > deadline:
                raise LockedError(f"{path}: held by another process for {patience:.0f} s without progress; look for it")
            time.sleep(POLL_SECONDS)
        try:
            yield
        finally:  # closing alone would not do: a process forked meanwhile has the file open, too
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def make_room(folder: Path, max_bytes: int, part: Path, size: int, patience: float) -> None:
    """Reserve `size` bytes for `part` by creating it, removing files used longest ago as needed.

    A file used within `GRACE_SECONDS` stays: its reader may be about to open it.

    Raises:
        CacheError: everything is in use or being fetched for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        with locked(folder / LOCK, patience):
            short = used_bytes(folder, besides=part) + size - max_bytes
            for remove, freed in _removable(folder, part) if short > 0 else ():
                short -= freed if remove() else 0
                if short <= 0:
                    break
            if short <= 0:
                part.touch()
                return
        if time.monotonic() > deadline:
            raise CacheError(
                f"{folder}: no room for {size} bytes: {max_bytes} are taken by files in use; raise max_bytes"
            )
        time.sleep(POLL_SECONDS)


def used_bytes(folder: Path, besides: Path | None = None) -> int:
    """Bytes of whole files and of reservations below the folder."""
    total = 0
    for path in folder.glob("*/*"):
        if path.name.endswith(PART):
            total += _reserved(path) if path != besides else 0
        elif not path.name.endswith(LOCK):
            total += max(size_of(path), 0)
    return total


def _removable(folder: Path, besides: Path) -> Iterator[tuple[Callable[[], bool], int]]:
    """What may go, first what nobody is fetching any more, then whole files, the longest unused first."""
    paths = [path for path in folder.glob("*/*") if not path.name.endswith(LOCK) and path != besides]
    for path in paths:
        if path.name.endswith(PART):
            yield partial(_remove_abandoned, path), _reserved(path)
    ages: list[tuple[int, Path]] = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if not path.name.endswith(PART):
                ages.append((path.stat().st_atime_ns, path))
    for used, path in sorted(ages):
        if time.time_ns() - used > GRACE_SECONDS * 1e9:
            size = size_of(path)
            yield partial(_remove, path), size


def _remove(path: Path) -> bool:
    path.unlink(missing_ok=True)
    return True


def _remove_abandoned(part: Path) -> bool:
    """Remove a part unless its lock is held: somebody is fetching it."""
    lock = part.with_name(part.name.removesuffix(PART).rsplit(".", 1)[0] + LOCK)
    with lock.open("a") as file:
        return _try_lock(file.fileno()) and _remove(part)


def _reserved(part: Path) -> int:
    digits = part.name.removesuffix(PART).rsplit(".", 1)[-1]
    return int(digits) if digits.isdigit() else 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
