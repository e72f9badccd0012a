"""CSV, TSV and other delimited tables: Lightning's ``metrics.csv``, hand-written logs, dashboard exports.

Lightning's CSVLogger interleaves sparse rows (train rows, validation rows, epoch rows): an empty cell is a value that
was not logged in that row. Files appended to by a resumed run repeat their header; such a row holds no data.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from experiments.readers.columns import ColumnRequest
from experiments.readers.opening import Tick, open_text
from experiments.readers.table import Column, LogError, LogTable, parse_number

DELIMITERS = (",", "\t", ";", "|")
BLANKS = " "  # stands for any run of spaces
SAMPLE_LINES = 20
LONGEST_CELL = 1 << 24  # characters; logs with whole texts in a column exceed the csv module's 128 KiB
MAX_NAME = 200  # a longer "column name" is prose or data
TABLE_SUFFIXES = frozenset({".csv", ".tsv"})


class Layout:
    """How a table is written: its delimiter, its column names, and the line its data begin after.

    Args:
        delimiter: One of ``DELIMITERS`` or ``BLANKS``.
        names: Column names; positions ``"0"``, ``"1"``, ... where the file has no header.
        lines_before_data: Lines up to and including the header.
    """

    def __init__(self, delimiter: str, names: Sequence[str], lines_before_data: int) -> None:
        self.delimiter, self.names, self.lines_before_data = delimiter, list(names), lines_before_data

    @property
    def format(self) -> str:
        """Name of the format for reports."""
        return {"\t": "tsv", BLANKS: "columns"}.get(self.delimiter, "csv")


def lines_of(head: str) -> list[str]:
    """Split text into lines where files end them (``str.splitlines`` knows more line ends than that)."""
    return re.split(r"\r\n|\r|\n", head)


def split(line: str, delimiter: str) -> list[str]:
    """Split one line into stripped cells."""
    if delimiter == BLANKS:
        return line.split()
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return []


def sniff(head: str, request: ColumnRequest) -> Layout | None:
    """Find out how a table is written from its first lines.

    Args:
        head: The beginning of the file; its last line may be cut.
        request: Columns the user named; they count as recognised.

    Returns:
        The layout, or None where the text is no table with a recognisable loss column.
    """
    lines = lines_of(head)
    begin = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
    if begin is None:
        return None
    data = [line for line in lines[begin:] if line.strip()][:SAMPLE_LINES]
    layouts = [_with_header(data[0], data[1:], delimiter, request, begin + 1) for delimiter in (*DELIMITERS, BLANKS)]
    if found := next((layout for layout in layouts if layout), None):
        return found
    if begin and (commented := _commented_header(lines[begin - 1], data, request, begin)):
        return commented
    return _without_header(data, request, begin)


def _with_header(
    header: str, rows: Sequence[str], delimiter: str, request: ColumnRequest, lines_before: int
) -> Layout | None:
    names = split(header, delimiter)
    if not all(len(name) <= MAX_NAME for name in names) or not request.names_a_loss(names):
        return None
    if len(names) == 1 and not _is_plain_loss(names[0], request):
        return None
    widths = [len(split(row, delimiter)) for row in rows[:5]]
    if widths and all(width <= 1 for width in widths) and len(names) > 1:
        return None
    if delimiter == BLANKS and any(width != len(names) for width in widths):
        return None
    return Layout(delimiter, names, lines_before)


def _is_plain_loss(name: str, request: ColumnRequest) -> bool:
    rank = request.rank("loss", name)
    return rank is not None and (request.loss is not None or rank < 1000) and len(name) <= 40


def _commented_header(line: str, data: Sequence[str], request: ColumnRequest, lines_before: int) -> Layout | None:
    """Read the header of ``numpy.savetxt``: a comment line with as many names as the data have cells."""
    for delimiter in (*DELIMITERS, BLANKS):
        names = split(line.lstrip("# "), delimiter)
        if request.names_a_loss(names) and len(split(data[0], delimiter)) == len(names) and _numeric(data, delimiter):
            return Layout(delimiter, names, lines_before)
    return None


def _without_header(data: Sequence[str], request: ColumnRequest, lines_before: int) -> Layout | None:
    """Take a bare table of numbers: one column is the loss, two are step and loss, more have to be named."""
    for delimiter in (*DELIMITERS, BLANKS):
        width = len(split(data[0], delimiter))
        if not _numeric(data, delimiter) or (width == 1 and delimiter != BLANKS) or len(data) < 2:
            continue
        names = {1: ["loss"], 2: ["step", "loss"]}.get(width, [])
        if names and request.loss is None:
            return Layout(delimiter, names, lines_before)
        positions = [str(i) for i in range(width)]
        return Layout(delimiter, positions, lines_before) if request.names_a_loss(positions) else None
    return None


def _numeric(rows: Sequence[str], delimiter: str) -> bool:
    """Whether every full row of the sample holds numbers only (the last line may be cut)."""
    cells = [split(row, delimiter) for row in (rows[:-1] or rows)]
    try:
        return all([parse_number(cell) for cell in row] for row in cells) and len({len(row) for row in cells}) == 1
    except ValueError:
        return False


def guess_names(head: str) -> list[str]:
    """Return the column names of a table without a known loss, for error messages; [] where it looks like none."""
    lines = [line for line in lines_of(head) if line.strip()][:SAMPLE_LINES]
    for delimiter in DELIMITERS:
        widths = {len(split(line, delimiter)) for line in lines[:-1] or lines}
        if len(widths) == 1 and max(widths) > 1:
            return split(lines[0], delimiter)
    return []


def holds_numbers(head: str, layout: Layout, request: ColumnRequest) -> bool:
    """Whether one of the first loss cells is a number: tells a table from prose that mentions a loss."""
    at = [i for i, name in enumerate(layout.names) if request.rank("loss", name) is not None]
    for line in lines_of(head)[layout.lines_before_data :][:SAMPLE_LINES]:
        cells = split(line, layout.delimiter)
        for i in at:
            try:
                if i < len(cells) and parse_number(cells[i]) is not None:
                    return True
            except ValueError:
                continue
    return False


def read(path: Path, layout: Layout, request: ColumnRequest, tick: Tick) -> LogTable:
    """Read a delimited table.

    Args:
        path: The file, compressed or not.
        layout: What :func:`sniff` found.
        request: Columns to keep.
        tick: Progress, in bytes.

    Returns:
        The table; row i is the i-th record after the header, blank lines not counted.

    Raises:
        LogError: A cell of a wanted column is no number, a record is malformed, or it has more cells than the header.
    """
    table = LogTable(layout.format)
    table.see(layout.names)
    wanted = [(i, name) for i, name in enumerate(layout.names) if request.wants(name) and name not in layout.names[:i]]
    csv.field_size_limit(LONGEST_CELL)
    with open_text(path, tick, newline="") as stream:
        tail = _Tail(stream)
        for _ in range(layout.lines_before_data):
            tail.readline()
        records = tail.blank_separated() if layout.delimiter == BLANKS else tail.delimited(layout.delimiter)
        _fill(table, path, layout, wanted, records, tail)
    return table


def _fill(
    table: LogTable,
    path: Path,
    layout: Layout,
    wanted: Sequence[tuple[int, str]],
    records: Iterator[list[str]],
    tail: "_Tail",
) -> None:
    width = len(layout.names)
    columns = [(i, name, table.columns.setdefault(name, Column())) for i, name in wanted]
    row = 0
    for cells in _checked(records, table, path, tail):
        if not cells:
            continue
        if cells[0].startswith("#"):
            cells = []  # a comment: it has a row number, but nothing is logged in it
        if len(cells) > width and any(cell.strip() for cell in cells[width:]):
            raise LogError(path, f"{len(cells)} cells, but the header has {width}", row, tail.line)
        for i, name, column in columns:
            text = cells[i] if i < len(cells) else ""
            if not text:
                continue
            try:
                column.add(row, float(text))
            except ValueError:
                _add_unusual(table, path, (row, name, text), cells, layout.names, tail)
        row += 1
        table.num_rows = row


def _checked(records: Iterator[list[str]], table: LogTable, path: Path, tail: "_Tail") -> Iterator[list[str]]:
    """Pass records on; word what the csv module finds wrong."""
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error) and tail.last_is_cut:
                table.notes.append(f"the last row ({table.num_rows}) is cut and was left out")
                return
            raise LogError(path, f"malformed record ({error})", table.num_rows, tail.line) from None
        yield record


def _add_unusual(
    table: LogTable, path: Path, place: tuple[int, str, str], cells: list[str], names: list[str], tail: "_Tail"
) -> None:
    """Add a cell that ``float`` does not know, unless it is a repeated header or the cut end of the file."""
    row, name, text = place
    if [cell.strip() for cell in cells] == names:
        return
    try:
        value = parse_number(text)
    except ValueError:
        if tail.at_end and tail.last_is_cut:
            table.notes.append(f"the last row ({row}) is cut: '{text[:40]}' was left out")
            return
        raise LogError(path, f"column '{name}' holds {text[:60]!r}, not a number", row, tail.line) from None
    if value is not None:
        table.add(row, name, value)


class _Tail:
    """The lines of a file one by one, with the number of the current one and whether the file ends inside it."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: Callable[[], str] = stream.readline
        self.line = 0
        self._ahead = self._lines()
        self.last_is_cut = False

    @property
    def at_end(self) -> bool:
        """Whether the current line is the last one."""
        return not self._ahead

    def readline(self) -> str:
        """Return the next line, "" at the end."""
        line, self._ahead = self._ahead, self._lines() if self._ahead else ""
        if line:
            self.line += 1
            self.last_is_cut = not line.endswith(("\n", "\r"))
        return line

    def __iter__(self) -> Iterator[str]:
        while line := self.readline():
            yield line

    def blank_separated(self) -> Iterator[list[str]]:
        """Split every line at runs of blanks."""
        return (line.split() for line in self)

    def delimited(self, delimiter: str) -> Iterator[list[str]]:
        """Parse records with the csv module, strictly: an unclosed quote must not swallow the rest in silence."""
        return csv.reader(self, delimiter=delimiter, skipinitialspace=True, strict=True)
