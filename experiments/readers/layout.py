"""How a delimited table is written: its delimiter, its column names, and where its data begin."""

import csv
import re
from collections.abc import Sequence

from experiments.readers.columns import FAR_RANK, ColumnRequest
from experiments.readers.table import parse_number

DELIMITERS = (",", "\t", ";", "|")
BLANKS = " "  # stands for any run of spaces
SAMPLE_LINES = 20
VALUE = re.compile(r"[\w)\"'] *[ =:] *[-+]?\d+\.\d")  # "loss 5.91", "loss=5.91": a line of prints, not a header
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
    if single := _single_column(data[0], data[1:], request, begin + 1):
        return single
    if begin and (commented := _commented_header(lines[begin - 1], data, request, begin)):
        return commented
    return _without_header(data, request, begin)


def _with_header(
    header: str, rows: Sequence[str], delimiter: str, request: ColumnRequest, lines_before: int
) -> Layout | None:
    names = split(header, delimiter)
    if any(len(name) > MAX_NAME or VALUE.search(name) for name in names) or not request.names_a_loss(names):
        return None
    widths = [len(split(row, delimiter)) for row in rows[:5]]
    if len(names) == 1 or (widths and all(width <= 1 for width in widths)):
        return None
    if delimiter == BLANKS and any(width != len(names) for width in widths):
        return None
    return Layout(delimiter, names, lines_before)


def _single_column(header: str, rows: Sequence[str], request: ColumnRequest, lines_before: int) -> Layout | None:
    """Take a table of one column, if its name says plainly that it is the loss."""
    name = header.strip().strip('"')
    rank = request.rank("loss", name)
    plain = rank is not None and (request.loss is not None or rank < FAR_RANK)
    return Layout(",", [name], lines_before) if plain and (not rows or _numeric(rows, ",")) else None


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
