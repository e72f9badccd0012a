"""Offline Weights & Biases runs: ``run-ID.wandb``, a log of 32 KiB blocks that hold protobuf records.

The block format is LevelDB's log (https://github.com/google/leveldb/blob/main/doc/log_format.md): chunks of
checksum (4 bytes), length (2), type (1) and data; a record is one whole chunk or first, middle ... and last chunks.
Weights & Biases puts 7 bytes before the first block's chunks and uses zlib's CRC-32 of type and data. A row is one
history record. A run that was killed ends inside a block.
"""

import importlib
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from experiments.readers.columns import ColumnRequest
from experiments.readers.json_logs import to_numbers
from experiments.readers.opening import Tick, open_bytes
from experiments.readers.table import LogError, RecordTable

MAGIC = b":W&B"
FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
CHUNK_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class _Cut(Exception):
    """The file ends inside a record."""


def records(stream: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the records of a ``.wandb`` file.

    Raises:
        LogError: Not such a file, or a chunk's checksum is wrong before the end of the file.
    """
    block = stream.read(BLOCK_BYTES)
    if not block.startswith(MAGIC) or len(block) < FILE_HEADER_BYTES:
        raise LogError(path, "not an offline W&B run (it does not begin with ':W&B')")
    begin, number = FILE_HEADER_BYTES, 0
    parts: list[bytes] = []
    while block:
        following = stream.read(BLOCK_BYTES)
        for kind, data in _chunks(block, begin, path, number, not following):
            if (kind in (FULL, FIRST)) == bool(parts):
                raise LogError(path, f"chunks out of order in block {number}")
            parts.append(data)
            if kind in (FULL, LAST):
                yield b"".join(parts)
                parts = []
        block, begin, number = following, 0, number + 1
    if parts:
        raise _Cut


def _chunks(block: bytes, at: int, path: Path, number: int, is_last: bool) -> Iterator[tuple[int, bytes]]:
    while at + CHUNK_HEADER.size <= len(block):
        checksum, length, kind = CHUNK_HEADER.unpack_from(block, at)
        end = at + CHUNK_HEADER.size + length
        data = block[at + CHUNK_HEADER.size : end]
        if is_last and (end > len(block) or not any(block[at:])):
            raise _Cut
        if kind not in (FULL, FIRST, MIDDLE, LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            raise LogError(path, f"damaged record in block {number} (byte {number * BLOCK_BYTES + at})")
        yield kind, data
        at = end
    if is_last and at < len(block):
        raise _Cut


def read(path: Path, request: ColumnRequest, tick: Tick) -> RecordTable:
    """Read the history of an offline run.

    Args:
        path: The ``.wandb`` file.
        request: Columns to keep, named as they were logged; nested names are joined with ``/``.
        tick: Progress, in bytes.

    Raises:
        LogError: The file is damaged elsewhere than at its end, or the wandb package is missing.
    """
    try:
        decode_error = importlib.import_module("google.protobuf.message").DecodeError
        record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    except ImportError:
        raise LogError(path, "reading offline W&B runs needs wandb: pip install wandb") from None
    table = RecordTable("wandb", request.wants)
    with open_bytes(path, tick) as stream:
        try:
            for data in records(stream, path):
                message = record_type.FromString(data)
                if message.WhichOneof("record_type") == "history":
                    table.append(history_row(message.history, table))
        except _Cut:
            table.notes.append(f"the file ends inside a record; the {table.num_rows} rows before it were read")
        except decode_error:
            raise LogError(path, "a record is no W&B record", table.num_rows) from None
    return table


def history_row(history: Any, table: RecordTable) -> dict[str, float]:
    """Return the numbers of one history record that the table keeps."""
    row: dict[str, float] = {}
    others: dict[str, Any] = {}
    for item in history.item:
        name = item.key or "/".join(item.nested_key)
        if not table.keeps(name):
            continue
        try:
            row[name] = float(item.value_json)
        except ValueError:
            others[name] = _decoded(item.value_json)
    return {**row, **to_numbers(others)} if others else row


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return ""  # no value
