"""Shard sets at any fsspec URL (s3://, gs://, http://): whole shards in a bounded cache on the local disk.

The cache is a folder that all processes of a machine share. A shard is fetched once, by whoever needs it first, under
a file lock that a killed process releases; it appears under its name only when it is whole and has the index's hash.
Room is made by removing the shards used longest ago.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.cache_folder import LOCK, PART, LockedError, is_whole, locked, make_room, size_of, use
from datamodules.object_fetch import FetchPolicy, ObjectStore, fetch_object, retrying
from datamodules.shards import INDEX_NAME, Shard, ShardIndex, load_index, parse_index

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Where shards are kept and how they are fetched.

    Attributes:
        folder: of the cache, on a local disk; shared by all processes of the machine and by all shard sets.
        max_bytes: the cache never holds more (files that a reader has open count until it closes them).
        ahead: shards fetched at once in the background.
        policy: of fetching.
    """

    folder: Path = Path("~/.cache/ballast/shards")
    max_bytes: int = 64 * 2**30
    ahead: int = 4
    policy: FetchPolicy = field(default_factory=FetchPolicy)


def is_remote(path: str) -> bool:
    """Whether a path is a URL of another machine."""
    return "://" in path and not path.startswith("file://")


def load_remote_index(url: str, policy: FetchPolicy | None = None) -> ShardIndex:
    """Fetch and check the index of a remote shard set.

    Raises:
        FetchError: out of reach.
        ShardError: damaged.
    """
    store = ObjectStore(url, policy or FetchPolicy())
    text: list[bytes] = []

    def once() -> int:
        text.append(store.read_whole(INDEX_NAME))
        return 0

    retrying(f"{store.url}/{INDEX_NAME}", store.policy, once)
    return parse_index(text[-1], f"{store.url}/{INDEX_NAME}")


class ShardCache:
    """The cache in front of one remote shard set; give `cache.open_shard` to `ShardReader` or `ShardSet`.

    May be pickled and forked.

    Args:
        url: of the set's folder.
        index: its index.
        settings: of the cache.

    Raises:
        ValueError: the cache cannot hold the shards in flight.
    """

    def __init__(self, url: str, index: ShardIndex, settings: CacheSettings) -> None:
        self.store = ObjectStore(url, settings.policy)
        self.settings = settings
        self.folder = Path(settings.folder).expanduser() / index.checksum[:16]
        largest = max((shard.bytes for shard in index.shards), default=0)
        self._shards = index.shards
        self._fits = sum(shard.bytes for shard in index.shards) <= settings.max_bytes
        self._ahead = min(settings.ahead, len(index.shards))
        if largest * (self._ahead + 1) > settings.max_bytes:
            need = largest * (self._ahead + 1)
            raise ValueError(
                f"cache of {settings.max_bytes} bytes: {self._ahead} shards fetched ahead and one in use, of up to"
                f" {largest} bytes, need {need}; raise max_bytes or lower ahead"
            )
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[Shard] | None = None
        self._queued: set[str] = set()
        self._begun = False
        self._guard = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_queue", "_queued", "_begun", "_guard", "_pid")
        return {key: value for key, value in self.__dict__.items() if key not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def open_shard(self, shard: Shard) -> Path:
        """The local path of a shard, fetched now if it is not there.

        Raises:
            FetchError: it cannot be fetched; the message names its URL.
        """
        path = self.folder / shard.file
        if not use(path, shard.bytes):
            if self._fits and not self._begun:  # all of it will be needed: the rest comes meanwhile
                self._begun = True
                self.fetch_ahead(self._shards)
            self._fetch(shard)
        return path

    def fetch_ahead(self, shards: Iterable[Shard]) -> None:
        """Fetch shards in the background, in this order; what fails is left to `open_shard` to try and to report."""
        if self._pid != os.getpid():  # forked: threads are the parent's
            self._reset()
        if self._ahead == 0:
            return
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            for number in range(self._ahead):
                name = f"shard-fetch-{number}"
                threading.Thread(target=self._fetch_queued, args=(self._queue,), name=name, daemon=True).start()
        for shard in shards:
            with self._guard:
                known = shard.file in self._queued or is_whole(self.folder / shard.file, shard.bytes)
                self._queued.add(shard.file)
            if not known:
                self._queue.put(shard)

    def _fetch_queued(self, waiting: queue.SimpleQueue[Shard]) -> None:
        while True:
            shard = waiting.get()
            try:
                if not is_whole(self.folder / shard.file, shard.bytes):
                    self._fetch(shard, wait=False)
            except LockedError:
                pass  # somebody is fetching it
            except Exception as error:  # open_shard reports it, in the foreground, if the shard is really needed
                LOG.warning("fetching ahead: %s", error)
            finally:
                with self._guard:
                    self._queued.discard(shard.file)

    def _fetch(self, shard: Shard, wait: bool = True) -> None:
        """Fetch a shard, unless another process has done so; without `wait`, unless one is at it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / shard.file
        part = self.folder / f"{shard.file}.{shard.bytes}{PART}"
        patience = self.settings.policy.patience
        with locked(self.folder / (shard.file + LOCK), patience if wait else 0, lambda: size_of(part)):
            if use(path, shard.bytes):  # another process fetched it meanwhile
                return
            make_room(self.folder.parent, self.settings.max_bytes, part, shard.bytes, patience)
            fetch_object(self.store, shard.file, shard.bytes, shard.sha256, part)
            now = time.time_ns()
            os.utime(part, ns=(now, now))
            os.replace(part, path)


def open_remote(url: str, settings: CacheSettings | None = None) -> tuple[ShardIndex, ShardCache]:
    """The index of a remote shard set and the cache in front of it.

    Use: `index, cache = open_remote(url)`, then `ShardSet(url, index=index, open_shard=cache.open_shard)`. Where the
    whole set fits into the cache, the first shard missed brings the others in the background.

    Args:
        url: of the set's folder, any fsspec protocol.
        settings: of the cache.

    Raises:
        FetchError: out of reach.
        ShardError: a damaged index.
        ValueError: a protocol whose library is not installed, or a cache too small.
    """
    chosen = settings or CacheSettings()
    index = load_remote_index(url, chosen.policy)
    return index, ShardCache(url, index, chosen)


def open_set(path: str, settings: CacheSettings | None = None) -> tuple[ShardIndex, Callable[[Shard], Path] | None]:
    """Index and way to open the shards of a set, wherever it is: a folder, "bundled" or a URL.

    Use: `ShardSet(path, weight, *open_set(path))`.

    Args:
        path: folder or URL.
        settings: of the cache, for URLs.

    Raises:
        FileNotFoundError: no such folder.
        ShardError, ValueError: as `open_remote` and `load_index`.
    """
    if not is_remote(path):
        return load_index(path.removeprefix("file://")), None
    index, cache = open_remote(path, settings)
    return index, cache.open_shard
