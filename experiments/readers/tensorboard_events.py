"""TensorBoard event files, decoded with the tensorboard package (the ``scan`` extra).

A row is a run of consecutive scalar events of one step in which no tag repeats: what one logging call wrote. Several
files in one folder are one run (the writer opens a new file at every restart), read in the order of their names.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.readers.columns import ColumnRequest
from experiments.readers.opening import Tick, open_bytes
from experiments.readers.table import LogError, RecordTable
from experiments.readers.tfrecord import LONGEST_CHECKED, CutRecord, records


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
    try:
        event_type = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    except ImportError:
        raise LogError(paths[0], "reading TensorBoard files needs tensorboard: pip install 'ballast[scan]'") from None
    for path in paths:
        _read_file(path, event_type, table, tick)
    return table


def _read_file(path: Path, event_type: Any, table: RecordTable, tick: Tick) -> None:
    row: dict[str, float] = {}
    count = 0
    with open_bytes(path, tick) as stream:
        try:
            for record in records(stream, path):
                if len(record) <= LONGEST_CHECKED:
                    event = _parse(event_type, record, path, count)
                    if event.HasField("summary"):
                        row = _add_event(event, row, table)
                count += 1
        except CutRecord:
            if not count:
                raise LogError(path, "not a TensorBoard event file, or cut in its first record") from None
            table.notes.append(f"the last record ({count}) of {path.name} is cut and was left out")
    if row:
        table.append(row)


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
