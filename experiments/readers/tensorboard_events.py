"""TensorBoard event files, read with the tensorboard package (the ``scan`` extra).

A row is a run of consecutive scalar events of one step in which no tag repeats: what one logging call wrote. Several
files in one folder are one run (the writer opens a new file at every restart), read in the order of their names.
"""

import importlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.readers.columns import ColumnRequest
from experiments.readers.opening import COMPRESSIONS, DAMAGED, Tick, check_regular, open_bytes
from experiments.readers.table import LogError, RecordTable

FRAME_BYTES = 16  # length (8), its checksum (4), and the checksum of the data (4)
HEADER_BYTES = 12


def read(paths: Sequence[Path], request: ColumnRequest, tick: Tick) -> RecordTable:
    """Read the scalars of a run.

    Args:
        paths: Event files of one run, in order.
        request: Columns (tags) to keep; the step is the column ``"step"``.
        tick: Progress, in bytes.

    Raises:
        LogError: The tensorboard package is missing, or a file is damaged elsewhere than at its end.
    """
    table = RecordTable("tensorboard", request.wants)
    for path in paths:
        check_regular(path)
        with _plain(path) as plain:
            _read_file(path, plain, table, tick)
    return table


@contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """Unpack a compressed event file beside nothing: the package reads plain files only."""
    with path.open("rb") as stream:
        head = stream.read(8)
    if not any(head.startswith(magic) for magic, _ in COMPRESSIONS):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="events.out.tfevents.") as unpacked:
        try:
            with open_bytes(path) as packed:
                shutil.copyfileobj(packed, unpacked)
        except DAMAGED as error:
            raise LogError(path, f"damaged compression ({error})") from None
        unpacked.flush()
        yield Path(unpacked.name)


def _read_file(path: Path, plain: Path, table: RecordTable, tick: Tick) -> None:
    try:
        loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
        event_type = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    except ImportError:
        raise LogError(path, "reading TensorBoard files needs tensorboard: pip install 'ballast[scan]'") from None
    row: dict[str, float] = {}
    consumed = count = 0
    for record in loader.RawEventFileLoader(str(plain)).Load():
        consumed += len(record) + FRAME_BYTES
        tick(len(record) + FRAME_BYTES)
        event = _parse(event_type, record, path, count)
        count += 1
        if event.HasField("summary"):
            row = _add_event(event, row, table)
    if row:
        table.append(row)
    _check_end(path, plain, consumed, count, table)


def _parse(message: Any, record: bytes, path: Path, count: int) -> Any:
    decode_error = importlib.import_module("google.protobuf.message").DecodeError
    try:
        return message.FromString(record)
    except decode_error:
        raise LogError(path, f"record {count} is no TensorBoard event") from None


def _add_event(event: Any, row: dict[str, float], table: RecordTable) -> dict[str, float]:
    """Put an event's scalars into the open row, or close that row and open the next."""
    for value in event.summary.value:
        number = scalar(value)
        if number is None:
            continue
        if row and (row["step"] != event.step or value.tag in row):
            table.append(row)
            row = {}
        row.setdefault("step", float(event.step))
        row[value.tag] = number
    return row


def scalar(value: Any) -> float | None:
    """Return a summary value's number: written as ``simple_value``, or as a tensor of one element."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    try:
        array = importlib.import_module("tensorboard.util.tensor_util").make_ndarray(value.tensor)
        return float(array.item()) if array.size == 1 else None
    except (TypeError, ValueError):
        return None  # a text


def _check_end(path: Path, plain: Path, consumed: int, count: int, table: RecordTable) -> None:
    """Tell a record cut at the end of the file (a killed run) from damage in the middle, where data would be lost."""
    left = plain.stat().st_size - consumed
    if left <= 0:
        return
    with plain.open("rb") as stream:
        stream.seek(consumed)
        header = stream.read(HEADER_BYTES)
    length = int.from_bytes(header[:8], "little")
    if count and (len(header) < HEADER_BYTES or length + FRAME_BYTES > left) and length < 1 << 31:
        table.notes.append(f"the last record ({count}) of {path.name} is cut and was left out")
        return
    raise LogError(path, f"record {count} is damaged ({left} bytes left unread)")
