"""Opening log files: compression by content, byte order marks, bytes counted for the progress bar."""

import bz2
import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from experiments.readers.table import LogError

Tick = Callable[[int], None]  # told how many more bytes of a file have been read

COMPRESSIONS: tuple[tuple[bytes, Callable[[BinaryIO], IO[bytes]]], ...] = (
    (b"\x1f\x8b", lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw))),
    (b"BZh", lambda raw: cast(IO[bytes], bz2.BZ2File(raw))),
    (b"\xfd7zXZ\x00", lambda raw: cast(IO[bytes], lzma.LZMAFile(raw))),  # noqa: SIM115
)
# UTF-32 LE begins with UTF-16 LE's mark, so it comes first.
BYTE_ORDER_MARKS = (
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
)
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what the decompressors raise on damaged data


class _CountingFile(io.FileIO):
    """A raw file that tells how far it has been read."""

    def __init__(self, path: Path, tick: Tick) -> None:
        super().__init__(path)
        self._tick = tick

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        self._tick(count)
        return count


def check_regular(path: Path) -> None:
    """Refuse what would block or has no content.

    Raises:
        LogError: Not a regular file (a pipe, a socket, a device).
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise LogError(path, "not a regular file")


@contextmanager
def open_bytes(path: Path, tick: Tick = lambda _: None) -> Iterator[IO[bytes]]:
    """Open a log for reading bytes, decompressed where its first bytes say so.

    Raises:
        LogError: Not a regular file.
    """
    check_regular(path)
    with io.BufferedReader(_CountingFile(path, tick), 1 << 18) as raw:
        head = raw.peek(8)[:8]
        for magic, opener in COMPRESSIONS:
            if head.startswith(magic):
                with opener(cast(BinaryIO, raw)) as stream:
                    yield stream
                return
        yield cast(IO[bytes], raw)


@contextmanager
def open_text(path: Path, tick: Tick = lambda _: None, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a log for reading text: UTF-8, or what its byte order mark says; other bytes become U+FFFD.

    A replaced character in a number makes that cell unreadable (and is reported); in any other text it does no harm.

    Raises:
        LogError: Not a regular file.
    """
    with open_bytes(path, tick) as stream:
        buffered = io.BufferedReader(cast(io.RawIOBase, stream), 1 << 16)
        head = buffered.peek(4)[:4]
        encoding = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), "utf-8")
        yield io.TextIOWrapper(buffered, encoding=encoding, errors="replace", newline=newline)


def head_of(path: Path, size: int = 1 << 16) -> bytes:
    """Return the first bytes of a file, decompressed; fewer where it is short or damaged.

    Raises:
        LogError: Not a regular file.
    """
    with open_bytes(path) as stream:
        out = b""
        try:
            while len(out) < size and (more := stream.read(size - len(out))):
                out += more
        except DAMAGED:
            return out
    return out


def decode_head(head: bytes) -> str:
    """Decode a file's first bytes the way :func:`open_text` would."""
    encoding = next((name for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), "utf-8")
    return head.decode(encoding, errors="replace")
