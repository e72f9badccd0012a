"""Fetching one object from any fsspec URL: in ranges, resumed, retried with back-off, bounded in time, hash checked.

The part fetched so far lies in a file of its own; a later call, of this process or another, goes on from its end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.shards import ShardError

LOG = logging.getLogger(__name__)
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
PERMANENT_STATUS = (401, 403, 404, 410)


class FetchError(ShardError):
    """An object that could not be fetched; the message names its URL, the last reason and what was tried."""


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """How hard to try.

    Attributes:
        attempts: tries in a row without a new byte before giving up.
        timeout: seconds that one range may take.
        backoff: seconds before the second try; doubles with each further one, up to `longest_backoff`.
        longest_backoff: seconds.
        range_bytes: bytes asked for at once.
        storage_options: passed to the fsspec filesystem (keys, endpoint, ...).
    """

    attempts: int = 6
    timeout: float = 60.0
    backoff: float = 1.0
    longest_backoff: float = 30.0
    range_bytes: int = 8 * 1024 * 1024
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.timeout <= 0 or self.range_bytes < 1 or self.backoff < 0:
            raise ValueError(
                f"attempts={self.attempts}, timeout={self.timeout}, range_bytes={self.range_bytes},"
                f" backoff={self.backoff}: the first three must be above 0, the last at least 0"
            )

    @property
    def patience(self) -> float:
        """Seconds without a new byte after which a fetch must have given up."""
        return self.attempts * (self.timeout + self.longest_backoff)


class ObjectStore:
    """The fsspec filesystem behind a URL, opened at first use in each process (its event loop survives no fork)."""

    def __init__(self, url: str, policy: FetchPolicy) -> None:
        self.url = url.rstrip("/")
        self.policy = policy

    def read_range(self, name: str, low: int, high: int) -> bytes:
        """Bytes `low..high` of an object below the URL; fewer where it ends before `high`.

        Raises:
            Exception: whatever the filesystem raises; TimeoutError past the policy's timeout.
        """
        fs, root = self._filesystem()
        data = _call(fs, "cat_file", self.policy.timeout, f"{root}/{name}", start=low, end=high)
        if len(data) > high - low:  # the server ignored the range and sent the whole object
            data = data[low:high]
        return bytes(data)

    def read_whole(self, name: str) -> bytes:
        """All bytes of a small object; errors as `read_range`."""
        fs, root = self._filesystem()
        return bytes(_call(fs, "cat_file", self.policy.timeout, f"{root}/{name}"))

    def _filesystem(self) -> tuple[Any, str]:
        key = (os.getpid(), self.url, repr(self.policy))
        if key not in _FILESYSTEMS:
            _FILESYSTEMS[key] = _open_filesystem(self.url, self.policy)
        return _FILESYSTEMS[key]


# Never emptied: a forked child that lets go of its parent's filesystem would wait for that one's dead event loop.
_FILESYSTEMS: dict[tuple[int, str, str], tuple[Any, str]] = {}


def _open_filesystem(url: str, policy: FetchPolicy) -> tuple[Any, str]:
    import fsspec

    protocol = url.split("://", 1)[0]
    try:
        options = {**_timeouts(protocol, policy.timeout), **policy.storage_options}
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        needed = f"{error.name or error}: pip install 'ballast[remote]'"
        raise ValueError(f"{url}: {protocol}:// needs {needed} (gs:// also gcsfs)") from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None
    return fs, root


def _call(fs: Any, method: str, timeout: float, *args: Any, **kwargs: Any) -> Any:
    """Call a filesystem's method; an asynchronous one cannot outlast `timeout` whatever its server does."""
    from fsspec.asyn import AsyncFileSystem, sync

    if isinstance(fs, AsyncFileSystem):
        return sync(fs.loop, getattr(fs, f"_{method}"), *args, timeout=timeout, **kwargs)
    return getattr(fs, method)(*args, **kwargs)


def _timeouts(protocol: str, seconds: float) -> dict[str, Any]:
    """Each backend's own spelling of a time-out, so that its connections are closed too."""
    if protocol in ("http", "https"):
        import aiohttp

        return {
            "client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)}
        }
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 1}}
        return {"config_kwargs": limits}
    return {}


def retrying(what: str, policy: FetchPolicy, act: Callable[[], int]) -> None:
    """Call `act` until it returns 0; it returns the new bytes it got, and any of them starts the count anew.

    Raises:
        FetchError: `policy.attempts` failures in a row, or one that trying again cannot cure.
    """
    failures = 0
    while True:
        try:
            got = act()
        except Exception as error:  # filesystems raise their libraries' own kinds
            if isinstance(error, (FetchError, ValueError)) and not isinstance(error, UnicodeError):
                raise
            failures += 1
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
            if isinstance(error, PERMANENT) or getattr(error, "status", None) in PERMANENT_STATUS:
                raise FetchError(f"{what}: cannot be fetched ({reason}); check the URL and its permissions") from None
            if failures >= policy.attempts:
                raise FetchError(
                    f"{what}: cannot be fetched: {failures} tries in a row failed, last: {reason}"
                ) from None
            delay = min(policy.backoff * 2 ** (failures - 1), policy.longest_backoff) * random.uniform(0.5, 1.5)
            LOG.warning("%s: try %d of %d failed (%s); next in %.1f s", what, failures, policy.attempts, reason, delay)
            time.sleep(delay)
            continue
        if got == 0:
            return
        failures = 0


def fetch_object(store: ObjectStore, name: str, size: int, sha256: str, part: Path) -> None:
    """Fetch an object of known size and hash into `part`, going on from what `part` already holds.

    Args:
        store: where it is.
        name: its name below the store's URL.
        size: its bytes.
        sha256: its SHA-256, as hex; fetched once more from the start where it differs.
        part: local file; holds the whole object, fsynced, on return.

    Raises:
        FetchError: out of reach, too short, or of another hash twice.
    """
    what = f"{store.url}/{name}"
    for last in (False, True):
        _fill(store, name, size, part, what)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found == sha256:
            return
        part.write_bytes(b"")
        if not last:
            LOG.warning("%s: arrived with another sha256 than in the index; fetching it once more", what)
    raise FetchError(f"{what}: its sha256 is not the one in the index (fetched twice); upload the set again")


def _fill(store: ObjectStore, name: str, size: int, part: Path, what: str) -> None:
    with part.open("ab", buffering=0) as file:  # what a killed process has got is kept, and its waiters see it grow
        if file.tell() > size:
            file.truncate(0)
            file.seek(0)

        def more() -> int:
            low = file.tell()
            if low == size:
                return 0
            data = store.read_range(name, low, min(low + store.policy.range_bytes, size))
            if not data:
                raise EOFError(f"ends after {low} bytes, the index says {size}")
            file.write(data)
            return len(data)

        retrying(what, store.policy, more)
        file.flush()
        os.fsync(file.fileno())
