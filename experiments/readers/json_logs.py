"""JSON logs: one object a line, an array of objects, an object of columns, Hugging Face's ``trainer_state.json``."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.readers.columns import HELD_OUT, ColumnRequest, normalise, says_held_out
from experiments.readers.opening import Tick, open_text
from experiments.readers.table import BLANK, NOT_LOGGED, LogError, NotALogError, RecordTable, parse_number

MAX_DEPTH = 4  # nesting beyond this is configuration, not metrics


def as_number(value: Any) -> float | None:
    """Read a JSON value as a number; None where it is none (text, a list, true or false)."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return math.copysign(math.inf, value)
    if isinstance(value, str):
        try:
            return parse_number(value)
        except ValueError:
            return None
    return None


def flatten(record: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield ``("train/loss", 5.9)`` for ``{"train": {"loss": 5.9}}``."""
    for key, value in record.items():
        if isinstance(value, dict):
            if depth < MAX_DEPTH:
                yield from flatten(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value


def to_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Keep a record's numbers.

    A null is a NaN (strict writers have no other word for it), except in rows of held-out metrics, where it says that
    no training metric was logged. A record that says it is none of training (``"mode": "val"``) holds nothing.
    """
    return split_record(record)[0]


def split_record(record: Mapping[str, Any]) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return a record's numbers as :func:`to_numbers` does, and its texts that are no numbers."""
    numbers: dict[str, float] = {}
    nulls: list[str] = []
    texts: list[tuple[str, str]] = []
    for name, value in flatten(record):
        if type(value) is float:
            numbers[name] = value
        elif value is None:
            nulls.append(name)
        elif (number := as_number(value)) is not None:
            numbers[name] = number
        elif isinstance(value, str):
            texts.append((name, value))
    if any(says_held_out(name, text) for name, text in texts):
        return {}, []
    if nulls and not any(HELD_OUT & set(normalise(name).split("_")) for name in numbers):
        numbers.update(dict.fromkeys(nulls, math.nan))
    return numbers, texts


def read_lines(path: Path, request: ColumnRequest, tick: Tick) -> RecordTable:
    """Read JSON lines; row i is the i-th non-blank line.

    Raises:
        LogError: A line other than a cut last one is no JSON object.
    """
    table = RecordTable("jsonl", request.wants)
    with open_text(path, tick) as stream:
        for number, line in enumerate(stream, 1):
            line = line.strip("\0") if line[:1] == "\0" else line
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith("\n"):
                    table.notes.append(f"the last row ({table.num_rows}) is cut and was left out")
                    break
                what = getattr(error, "msg", type(error).__name__)
                raise LogError(path, f"not JSON ({what}): {line[:40]!r}", table.num_rows, number) from None
            if not isinstance(record, dict):
                raise LogError(path, f"not a JSON object: {line[:40]!r}", table.num_rows, number)
            _append(table, record, path, number)
    return table


def read_document(path: Path, request: ColumnRequest, tick: Tick) -> RecordTable:
    """Read one JSON document.

    Args:
        path: ``trainer_state.json`` (row i is entry i of ``log_history``), an array of objects (row i is element i),
            or an object of equally long lists (row i is place i).
        request: Columns to keep.
        tick: Progress, in bytes.

    Raises:
        LogError: Not JSON.
        NotALogError: JSON of another shape.
    """
    with open_text(path, tick) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = str(getattr(error, "msg", type(error).__name__))
        if message == "Extra data":  # records one after the other, the first of them very long
            return read_lines(path, request, lambda _: None)
        raise LogError(path, f"not JSON ({message}, line {getattr(error, 'lineno', '?')})") from None
    if isinstance(document, dict) and isinstance(document.get("log_history"), list):
        return _from_records("huggingface", _without_summary(document["log_history"]), path, request)
    if isinstance(document, list) and document:
        return _from_records("json", document, path, request)
    if isinstance(document, dict) and (lists := _columns(document)):
        keys = list(lists)
        rows = [dict(zip(keys, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        return _from_records("json", rows, path, request)
    raise NotALogError(path, "JSON, but neither a list of records nor a trainer_state.json")


def _without_summary(history: list[Any]) -> list[Any]:
    """Blank the Trainer's closing entry: its ``train_loss`` is the mean of the whole run."""
    return [{} if isinstance(entry, dict) and "train_runtime" in entry else entry for entry in history]


def _columns(document: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the longest lists of one length; runs logged as ``{"step": [...], "loss": [...]}``."""
    lists = {name: value for name, value in flatten(document) if isinstance(value, list) and value}
    longest = max((len(value) for value in lists.values()), default=0)
    return {name: value for name, value in lists.items() if len(value) == longest}


def _append(table: RecordTable, record: dict[str, Any], path: Path, line: int | None = None) -> None:
    """Add a record; a text where a wanted number belongs spoils its column."""
    numbers, texts = split_record(record)
    for name, text in texts:
        if table.keeps(name) and not _is_blank(text):
            table.spoil(name, path, text, table.num_rows, line)
    table.append(numbers)


def _is_blank(text: str) -> bool:
    return text.strip(BLANK).lower() in NOT_LOGGED


def _from_records(format: str, records: list[Any], path: Path, request: ColumnRequest) -> RecordTable:
    table = RecordTable(format, request.wants)
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise NotALogError(path, f"entry {row} is no JSON object")
        _append(table, record, path)
    return table
