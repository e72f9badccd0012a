"""The record framing of TensorBoard event files (TFRecord), read and verified in batches.

A record is its length (8 bytes, little endian), the masked CRC-32C of the length, the data, and the masked CRC-32C of
the data (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). The tensorboard package
checks the sums byte by byte in Python, 10 us a scalar; here numpy checks many records of one length at once.

Legend of shapes: N records of one length, L bytes each.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from experiments.readers.table import LogError

HEADER_BYTES = 12
SUM_BYTES = 4
BATCH = 4096
LONGEST_CHECKED = 1024  # a scalar takes about 60 bytes; longer records (images, histograms) are skipped by the caller
LONGEST_RECORD = 1 << 31
POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


class CutRecord(Exception):
    """The file ends inside a record, as a killed run leaves it."""


def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


TABLE = _crc_table()


def masked_crc32c(data_NL: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the masked CRC-32C of N byte strings of one length.

    Args:
        data_NL: The bytes, [N, L].

    Returns:
        The sums, [N].
    """
    crc_N = np.full(len(data_NL), 0xFFFFFFFF, np.uint32)
    for byte_N in data_NL.T:
        crc_N = TABLE[(crc_N ^ byte_N) & 0xFF] ^ (crc_N >> 8)
    crc_N = np.invert(crc_N)
    masked_N: NDArray[np.uint32] = ((crc_N >> 15) | (crc_N << 17)).astype(np.uint32)
    masked_N += np.uint32(0xA282EAD8)  # modulo 2 ** 32
    return masked_N


def records(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the records of an event file.

    Raises:
        CutRecord: After the last whole record, where the file ends inside another one.
        LogError: A record's checksum is wrong.
    """
    number, end = 0, b"not yet"
    while end == b"not yet":
        frames, end = _read_batch(stream)
        _verify(frames, path, number)
        for _, body in frames:
            yield body[:-SUM_BYTES]
        number += len(frames)
    if len(end) >= HEADER_BYTES and not _sums_match([end[:8]], [end[8:HEADER_BYTES]])[0]:
        raise LogError(path, f"record {number} is damaged")
    if end:
        raise CutRecord


def _read_batch(stream: IO[bytes]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return up to ``BATCH`` pairs of header and body, and what is left of the file once it has ended."""
    frames: list[tuple[bytes, bytes]] = []
    while len(frames) < BATCH:
        header = stream.read(HEADER_BYTES)
        length = int.from_bytes(header[:8], "little")
        if len(header) < HEADER_BYTES or length > LONGEST_RECORD:
            return frames, header
        body = stream.read(length + SUM_BYTES)
        if len(body) < length + SUM_BYTES:
            return frames, header
        frames.append((header, body))
    return frames, b"not yet"


def _verify(frames: Sequence[tuple[bytes, bytes]], path: Path, number: int) -> None:
    """Check every length, and the data of every record that may be a scalar."""
    good = _sums_match([header[:8] for header, _ in frames], [header[8:] for header, _ in frames])
    by_length: dict[int, list[int]] = {}
    for i, (_, body) in enumerate(frames):
        by_length.setdefault(len(body) - SUM_BYTES, []).append(i)
    for length, places in by_length.items():
        if 0 < length <= LONGEST_CHECKED:
            bodies = [frames[i][1] for i in places]
            good[places] &= _sums_match([body[:length] for body in bodies], [body[length:] for body in bodies])
    if not good.all():
        raise LogError(path, f"record {number + int(np.argmin(good))} is damaged")


def _sums_match(data: Sequence[bytes], sums: Sequence[bytes]) -> NDArray[np.bool_]:
    """Compare the sums of byte strings of one length with those written, [N]."""
    if not data:
        return np.ones(0, np.bool_)
    data_NL = np.frombuffer(b"".join(data), np.uint8).reshape(len(data), -1)
    written_N = np.frombuffer(b"".join(sums), np.dtype("<u4"))
    return np.equal(masked_crc32c(data_NL), written_N)
