"""Tell a log's format by its content, not by its name, and hand it to its reader."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from experiments.readers import delimited, json_logs, tensorboard_events, text_logs, wandb_offline
from experiments.readers import layout as layouts
from experiments.readers.columns import ColumnRequest, missing_column
from experiments.readers.opening import Tick, decode_head, head_of
from experiments.readers.series import no_loss
from experiments.readers.table import LogError, LogTable, NotALogError

LARGE_HEAD = 1 << 20  # of a JSON file is searched for a loss
LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
EVENT_FILE = "tfevents"  # part of the name of every TensorBoard event file
JSON_BEGIN = re.compile(r"\{\s*[\"}]|\[\s*[{\]]")
JSON_LINE = re.compile(r"\{\s*\"[^\n]*\}\s*$")  # looks like a record of its own, broken or not
JSON_KEY = re.compile(r"\"([^\"\n]{1,200})\"\s*:")


@dataclass(frozen=True)
class Source:
    """One run's log.

    Attributes:
        path: What to call it: the file, or the folder of several event files.
        files: The files to read, in order.
        named: Whether the user named it (then it must be a log), rather than the folder it lies in.
    """

    path: Path
    files: tuple[Path, ...]
    named: bool

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(os.path.getsize(file) for file in self.files if os.path.exists(file))


def read_table(source: Source, request: ColumnRequest, tick: Tick) -> LogTable:
    """Tell a log's format by its content and read it.

    Raises:
        NotALogError: No known format.
        LogError: A known format, but unreadable.
    """
    path = source.files[0]
    if EVENT_FILE in path.name:
        return tensorboard_events.read(source.files, request, tick)
    head = head_of(path)
    if not head:
        raise NotALogError(path, "is empty")
    if head.startswith(wandb_offline.MAGIC) or path.suffix == ".wandb":
        return wandb_offline.read(path, request, tick)
    text = decode_head(head)
    if "\0" in text[:4096]:
        claims = is_table(path) or path.suffix in LINES_SUFFIXES
        raise (LogError if claims else NotALogError)(path, "binary file of no known log format")
    if shape := json_shape(text, source.named or path.suffix in LINES_SUFFIXES):
        if not source.named and not _mentions_loss(decode_head(head_of(path, LARGE_HEAD)), request):
            raise NotALogError(path, "JSON without a loss")
        return (json_logs.read_lines if shape == "lines" else json_logs.read_document)(path, request, tick)
    return _read_text(source, text, request, tick)


def json_shape(head: str, one_record_is_a_log: bool = True) -> str | None:
    """Tell ``"lines"`` of JSON from one ``"document"``; None where the text is no JSON.

    Args:
        head: The beginning of the file.
        one_record_is_a_log: Whether a single object is a log of one row, rather than a summary or a configuration.
    """
    text = head.lstrip()
    first, _, rest = text.partition("\n")
    if JSON_BEGIN.match(text) is None:
        return None
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return "document" if JSON_LINE.match(first) is None or not rest.strip() else "lines"
    if not isinstance(record, dict) or "log_history" in record:
        return "document"
    if rest.strip():
        return "lines"
    is_columns = any(isinstance(value, list) for value in record.values())
    return "document" if is_columns or not one_record_is_a_log else "lines"


def _mentions_loss(text: str, request: ColumnRequest) -> bool:
    keys = dict.fromkeys(JSON_KEY.findall(text))
    return "log_history" in keys or request.names_a_loss(keys) or ColumnRequest().names_a_loss(keys)


def _read_text(source: Source, text: str, request: ColumnRequest, tick: Tick) -> LogTable:
    path = source.files[0]
    kind = text_logs.sniff(text)
    if kind in ("fairseq", "megatron"):
        return text_logs.read(path, kind, request, tick)
    layout = layouts.sniff(text, request)
    sure = source.named and kind is None
    if layout and (sure or is_table(path) or layouts.holds_numbers(text, layout, request)):
        return delimited.read(path, layout, request, tick)
    automatic = layouts.sniff(text, ColumnRequest())
    if automatic and request.loss and (source.named or is_table(path)):
        raise LogError(path, missing_column(request.loss, "loss", automatic.names))
    if kind:
        return text_logs.read(path, kind, request, tick)
    names = layouts.guess_names(text)
    if names and request.loss:
        raise NotALogError(path, missing_column(request.loss, "loss", names))
    raise NotALogError(path, no_loss(names) if names else "no known log format")


def is_table(path: Path) -> bool:
    """Whether a file's name says that it is a table (``.csv``, ``.tsv.gz``)."""
    return bool(layouts.TABLE_SUFFIXES & {suffix.lower() for suffix in path.suffixes[-2:]})
