"""Find the training logs under the paths of a command line and read each as one :class:`Series`."""

import bisect
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.readers import delimited, json_logs, tensorboard_events, text_logs, wandb_offline
from experiments.readers.columns import ColumnError, ColumnRequest, choose, listed, missing_column
from experiments.readers.opening import DAMAGED, Tick, decode_head, head_of
from experiments.readers.table import Column, LogError, LogTable, NotALogError

EVENT_FILE = "tfevents"
# What a run folder holds beside its logs. Everything else is judged by its content.
OTHER_SUFFIXES = frozenset(
    ".py .pyc .ipynb .sh .c .h .cpp .cu .rs .js .css .html .xml .svg .md .rst .tex .bib .yaml .yml .toml .cfg .ini .lock "
    ".pt .pth .ckpt .bin .safetensors .onnx .pkl .pickle .npy .npz .h5 .hdf5 .parquet .arrow .feather .db .sqlite .model "
    ".png .jpg .jpeg .gif .webp .pdf .mp4 .wav .flac .mp3 .ogg .opus .zip .tar .tgz .whl .so .o .a .sha256 .md5".split()
)
OTHER_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})


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
        return sum(file.stat().st_size for file in self.files if file.exists())


@dataclass
class Series:
    """One run: its loss, row by row, with what was logged beside it. All lists are of one length, N.

    Attributes:
        path: Name of the run.
        format: Log format.
        num_rows: Data rows in the log, N of which hold a loss.
        rows: Row of each loss value (0-based).
        steps: Training step of each, as logged; the row where no step was logged.
        loss: Loss-like series, in the log's own unit.
        grad_norm: Gradient norm of the same row or step; None where none was logged.
        column: Name of the loss column.
        grad_column: Name of the gradient norm column, None without one.
        step_column: Name of the step column, None without one.
        notes: Warnings.
    """

    path: Path
    format: str
    num_rows: int
    rows: list[int]
    steps: list[float]
    loss: list[float]
    grad_norm: list[float | None]
    column: str
    grad_column: str | None
    step_column: str | None
    notes: list[str] = field(default_factory=list)


def discover(paths: Sequence[Path], on_error: Callable[[str], None]) -> list[Source]:
    """List the logs under the given files and folders, each once, in the order given (names sorted within a folder).

    Args:
        paths: Files and folders.
        on_error: Told, in one line, of a path that does not exist or cannot be listed.
    """
    sources: list[Source] = []
    seen: set[str] = set()
    for path in paths:
        if path.is_dir():
            found = list(_walk(path, on_error))
        elif path.exists():
            found = [Source(path, (path,), named=True)]
        else:
            on_error(f"{path}: no such file or folder")
            continue
        for source in found:
            real = "|".join(os.path.realpath(file) for file in source.files)
            if real not in seen:
                seen.add(real)
                sources.append(source)
    return sources


def _walk(folder: Path, on_error: Callable[[str], None]) -> Iterator[Source]:
    def failed(error: OSError) -> None:
        on_error(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if name not in OTHER_FOLDERS and not name.startswith("."))
        here = Path(parent)
        events = tuple(here / name for name in sorted(names) if EVENT_FILE in name)
        if events:
            yield Source(events[0] if len(events) == 1 else here, events, named=False)
        for name in sorted(names):
            file = here / name
            if EVENT_FILE not in name and not name.startswith(".") and _may_be_log(file):
                yield Source(file, (file,), named=False)


def _may_be_log(file: Path) -> bool:
    if file.suffix.lower() in OTHER_SUFFIXES:
        return False
    try:
        status = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def read_series(source: Source, request: ColumnRequest, tick: Tick = lambda _: None) -> Series:
    """Read one log.

    Args:
        source: From :func:`discover`.
        request: Columns the user named.
        tick: Progress, in bytes.

    Returns:
        The run's series.

    Raises:
        NotALogError: The file is no log with a loss column (an error only where the user named the file).
        LogError: The log cannot be read, or has no column of the name asked for.
    """
    try:
        table = read_table(source, request, tick)
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LogError(source.path, f"cannot be read ({reason})") from None
    try:
        return align(table, source.path, request)
    except ColumnError as error:
        # In a folder, a file without the column is passed over, unless it is plainly a training log.
        plainly_a_log = ColumnRequest().names_a_loss(table.names)
        raise (LogError if source.named or plainly_a_log else NotALogError)(source.path, str(error)) from None


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
        raise NotALogError(path, "binary file of no known log format")
    if shape := json_shape(text):
        if not source.named and not _mentions_loss(text, request):
            raise NotALogError(path, "JSON without a loss")
        return (json_logs.read_lines if shape == "lines" else json_logs.read_document)(path, request, tick)
    return _read_text(source, text, request, tick)


def json_shape(head: str) -> str | None:
    """Tell ``"lines"`` of JSON from one ``"document"``; None where the text is no JSON."""
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
    is_columns = not rest.strip() and any(isinstance(value, list) for value in record.values())
    return "document" if is_columns else "lines"


JSON_BEGIN = re.compile(r"\{\s*[\"}]|\[\s*[{\]]")
JSON_LINE = re.compile(r"\{\s*\"[^\n]*\}\s*$")  # looks like a record of its own, broken or not
JSON_KEY = re.compile(r"\"([^\"\n]{1,200})\"\s*:")


def _mentions_loss(text: str, request: ColumnRequest) -> bool:
    keys = dict.fromkeys(JSON_KEY.findall(text))
    return "log_history" in keys or request.names_a_loss(keys) or ColumnRequest().names_a_loss(keys)


def _read_text(source: Source, text: str, request: ColumnRequest, tick: Tick) -> LogTable:
    path = source.files[0]
    kind = text_logs.sniff(text)
    if kind in ("fairseq", "megatron"):
        return text_logs.read(path, kind, request, tick)
    layout = delimited.sniff(text, request)
    if layout and (source.named or is_table(path) or delimited.holds_numbers(text, layout, request)):
        return delimited.read(path, layout, request, tick)
    automatic = delimited.sniff(text, ColumnRequest())
    if automatic and request.loss and (source.named or is_table(path)):
        raise LogError(path, missing_column(request.loss, "loss", automatic.names))
    if kind:
        return text_logs.read(path, kind, request, tick)
    names = delimited.guess_names(text)
    if names and request.loss:
        raise NotALogError(path, missing_column(request.loss, "loss", names))
    raise NotALogError(path, no_loss(names) if names else "no known log format")


def is_table(path: Path) -> bool:
    """Whether a file's name says that it is a table (``.csv``, ``.tsv.gz``)."""
    return bool(delimited.TABLE_SUFFIXES & {suffix.lower() for suffix in path.suffixes[-2:]})


def no_loss(names: Sequence[str]) -> str:
    """Word the error for a log without a known loss column."""
    return f"no loss column found; name one with --column. It has: {listed(names)}"


def align(table: LogTable, path: Path, request: ColumnRequest) -> Series:
    """Choose the columns of a log and put step and gradient norm beside each loss value.

    Raises:
        ColumnError: A column the user named is missing.
        NotALogError: No loss column.
    """
    name = choose(table, request, "loss")
    if name is None:
        raise NotALogError(path, no_loss(list(table.names)))
    loss = table.columns[name]
    step_name = choose(table, request, "step", at_least=len(loss.rows) // 2)
    grad_name = choose(table, request, "grad_norm")
    grad_name = None if grad_name == name else grad_name
    step_of = _Steps(table.columns[step_name] if step_name else Column())
    rows, values = list(loss.rows), list(loss.values)
    steps = step_of.fill(rows)
    grads = _beside(rows, steps, table.columns[grad_name], step_of) if grad_name else [None] * len(rows)
    return Series(
        path, table.format, table.num_rows, rows, steps, values, grads, name, grad_name, step_name, list(table.notes)
    )


class _Steps:
    """The step logged in each row."""

    def __init__(self, column: Column) -> None:
        self.at = {row: as_step(value) for row, value in zip(column.rows, column.values, strict=True)}

    def fill(self, rows: Sequence[int]) -> list[float]:
        """Return the step of each row; one more than the step before where none was logged, the row without any."""
        if not self.at:
            return list(rows)
        out: list[float] = []
        for row in rows:
            step = self.at.get(row, math.nan)
            out.append(step if step == step else (out[-1] + 1 if out else row))
        return out


def as_step(value: float) -> float:
    """Return an integer for an integer-like step (``100.0``), the value as it is otherwise."""
    return int(value) if value.is_integer() else value if math.isfinite(value) else math.nan


def _beside(rows: list[int], steps: list[float], grad: Column, step_of: _Steps) -> list[float | None]:
    """Return the gradient norm of each loss row: of the same row, or of a neighbouring row of the same step."""
    place = {row: i for i, row in enumerate(rows)}
    out: list[float | None] = [None] * len(rows)
    apart: list[tuple[int, float]] = []
    for row, value in zip(grad.rows, grad.values, strict=True):
        i = place.get(row)
        if i is None:
            apart.append((row, value))
        else:
            out[i] = value
    for row, value in apart:
        after = bisect.bisect(rows, row)
        for i in (after - 1, after):
            if 0 <= i < len(rows) and out[i] is None and steps[i] == step_of.at.get(row):
                out[i] = value
                break
    return out
