"""CSV, TSV and other delimited tables: Lightning's ``metrics.csv``, hand-written logs, dashboard exports.

Lightning's CSVLogger interleaves sparse rows (train rows, validation rows, epoch rows): an empty cell is a value that
was not logged in that row. Files appended to by a resumed run repeat their header; such a row holds no data.
"""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from experiments.readers.columns import SPLIT_NAMES, ColumnRequest, normalise, says_held_out
from experiments.readers.layout import BLANKS, Layout
from experiments.readers.opening import Tick, open_text
from experiments.readers.table import Column, LogError, LogTable, parse_number

LONGEST_CELL = 1 << 24  # characters; logs with whole texts in a column exceed the csv module's 128 KiB
NUMBER_BEGIN = re.compile(r"[+-]?((\d+(\.\d*)?|\.\d*)?(e[+-]?\d*)?|n|na|i|in|inf|infi|infin|infini|infinit)", re.I)


def read(path: Path, layout: Layout, request: ColumnRequest, tick: Tick) -> LogTable:
    """Read a delimited table.

    Args:
        path: The file, compressed or not.
        layout: How it is written.
        request: Columns to keep.
        tick: Progress, in bytes.

    Returns:
        The table; row i is the i-th record after the header, blank lines not counted.

    Raises:
        LogError: A record is malformed or has more cells than the header.
    """
    csv.field_size_limit(LONGEST_CELL)
    with open_text(path, tick, newline="") as stream:
        lines = _Lines(stream)
        for _ in range(layout.lines_before_data):
            lines.readline()
        return _Reading(path, layout, request, lines).run()


class _Reading:
    """One pass over the records of a table."""

    def __init__(self, path: Path, layout: Layout, request: ColumnRequest, lines: "_Lines") -> None:
        self._path, self._request, self._lines = path, request, lines
        self._blanks = layout.delimiter == BLANKS
        self._records = lines.blank_separated() if self._blanks else lines.delimited(layout.delimiter)
        self.table = LogTable(layout.format)
        self._set_names(layout.names)

    def _set_names(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self.table.see(name for name in names if name)
        self._splits = [i for i, name in enumerate(names) if normalise(name) in SPLIT_NAMES]
        self._wanted: list[tuple[int, str, Column]] = []
        for i, name in enumerate(names):
            if self._request.wants(name) and name not in names[:i]:
                self._wanted.append((i, name, self.table.columns.setdefault(name, Column())))

    def run(self) -> LogTable:
        """Read all records."""
        row = 0
        for cells in self._checked():
            if not cells:
                continue
            if len(cells) > len(self._names) or cells[0].startswith("#"):
                cells = self._trimmed(cells, row)
            if any(i < len(cells) and says_held_out(self._names[i], cells[i]) for i in self._splits):
                cells = []
            for i, name, column in self._wanted:
                text = cells[i] if i < len(cells) else ""
                if not text:
                    continue
                try:
                    column.add(row, float(text))
                except ValueError:
                    if self._is_header(cells):
                        self._set_names([cell.strip() for cell in cells])
                        break
                    self._add_unusual(row, name, text)
            row += 1
            self.table.num_rows = row
        return self.table

    def _checked(self) -> Iterator[list[str]]:
        """Pass records on; word what the csv module finds wrong."""
        while True:
            begin = self._lines.line
            try:
                record = next(self._records)
            except StopIteration:
                return
            except csv.Error as error:
                row = self.table.num_rows
                if "unexpected end of data" in str(error) and self._lines.is_cut and self._lines.line == begin + 1:
                    self.table.notes.append(f"the last row ({row}) is cut and was left out")
                    return
                raise LogError(self._path, f"malformed record ({error})", row, begin + 1) from None
            yield record

    def _trimmed(self, cells: list[str], row: int) -> list[str]:
        """Return a comment without cells (it has a row number, but nothing is logged in it), a header as it is."""
        if cells[0].startswith("#"):
            return []
        width = len(self._names)
        if any(cell.strip() for cell in cells[width:]) and not self._is_header(cells):
            raise LogError(self._path, f"{len(cells)} cells, but the header has {width}", row, self._lines.line)
        return cells

    def _is_header(self, cells: Sequence[str]) -> bool:
        """Whether a record is a header: repeated, or with other columns, by a resumed run."""
        names = [cell.strip() for cell in cells]
        if names == self._names:
            return True
        kept = {name for _, name, _ in self._wanted}
        return bool(kept & set(names)) and all(name == "" or name[0].isalpha() or name[0] == "_" for name in names)

    def _add_unusual(self, row: int, name: str, text: str) -> None:
        """Add a cell that ``float`` does not know, unless the file was cut there."""
        try:
            value = parse_number(text)
        except ValueError:
            if self._lines.at_end and self._lines.is_cut and NUMBER_BEGIN.fullmatch(text.strip()[:40]):
                self.table.notes.append(f"the last row ({row}) is cut: '{text[:40]}' was left out")
            else:
                self.table.spoil(name, self._path, text, row, self._lines.line)
            return
        if value is not None:
            self.table.add(row, name, value)


class _Lines:
    """The lines of a file one by one, with the number of the current one and whether the file ends inside it."""

    def __init__(self, stream: IO[str]) -> None:
        self._next: Callable[[], str] = stream.readline
        self.line = 0
        self._ahead = self._next()
        self.is_cut = False

    @property
    def at_end(self) -> bool:
        """Whether the current line is the last one."""
        return not self._ahead

    def readline(self) -> str:
        """Return the next line, "" at the end."""
        line, self._ahead = self._ahead, self._next() if self._ahead else ""
        if line:
            self.line += 1
            self.is_cut = not line.endswith(("\n", "\r"))
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
