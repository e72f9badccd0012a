"""What every log reader returns: the wanted columns of a log, sparse, with the row each value was logged in.

A *row* is a 0-based data row of the file as logged (for CSV the n-th record after the header). An empty cell means
"not logged in this row"; a NaN or an infinity is data.
"""

import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Wanted = Callable[[str], bool]

BLANK = " \t\r\n\0"  # file systems leave zero bytes where a crash came between a file's growth and its data
# Spellings float() does not know. Empty-like words mean "not logged"; the others are non-finite values.
NOT_LOGGED = frozenset({"", "none", "na", "n/a", "-", "--", "<na>"})
NON_FINITE = {"null": math.nan, "1.#qnan": math.nan, "-1.#ind": math.nan, "1.#inf": math.inf, "-1.#inf": -math.inf}
TENSOR = re.compile(r"^tensor\(\s*([^,)\s]+)")
DECIMAL_COMMA = re.compile(r"^[+-]?\d+,\d+(e[+-]?\d+)?$")


class LogError(ValueError):
    """A log that cannot be read, with the place where reading stopped.

    Args:
        path: File that was being read.
        message: What is wrong, without the place.
        row: 0-based data row, where there is one.
        line: 1-based line of the text file, where there is one.
    """

    def __init__(self, path: Path, message: str, row: int | None = None, line: int | None = None) -> None:
        self.path, self.row, self.line = path, row, line
        place = "" if row is None else f"row {row}" + (f" (line {line})" if line is not None else "") + ": "
        super().__init__(f"{path}: {place}{message}")


class NotALogError(LogError):
    """The file is not a training log that ``scan`` knows; a folder scan passes over it in silence."""


def parse_number(text: str) -> float | None:
    """Read a number as training scripts write it.

    Args:
        text: A cell: ``"5.9"``, ``"nan"``, ``"-Infinity"``, ``"null"``, ``"tensor(5.9)"``, ``"5,9"``, ``""``.

    Returns:
        The value, or None where the cell says that nothing was logged.

    Raises:
        ValueError: The text is no number.
    """
    try:
        return float(text)
    except ValueError:
        word = text.strip(BLANK).strip("\"'").lower()
    if word in NOT_LOGGED:
        return None
    if word in NON_FINITE:
        return NON_FINITE[word]
    if found := TENSOR.match(word):
        return float(found.group(1))
    return float(word.replace(",", ".") if DECIMAL_COMMA.match(word) else word)


@dataclass
class Column:
    """One logged series: ``values[i]`` was logged in data row ``rows[i]``; rows ascend."""

    rows: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, row: int, value: float) -> None:
        """Append one value."""
        self.rows.append(row)
        self.values.append(value)


@dataclass
class LogTable:
    """The columns of one log that were asked for.

    Attributes:
        format: Name of the format, e.g. ``"csv"``.
        num_rows: Data rows in the file, those without a loss included.
        columns: Wanted columns by name.
        names: Every column seen, wanted or not, in order of appearance.
        spoiled: The first value of a column that is no number.
        notes: Things worth a warning, e.g. that the last record was cut.
    """

    format: str
    num_rows: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    spoiled: dict[str, LogError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, row: int, name: str, value: float) -> None:
        """Log ``value`` under ``name`` in data row ``row``."""
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = Column()
        column.add(row, value)

    def spoil(self, name: str, path: Path, text: str, row: int, line: int | None = None) -> None:
        """Remember the first value of a column that is no number: an error only if that column is used."""
        if name not in self.spoiled:
            message = f"column '{name}' holds {text[:60]!r}, not a number"
            self.spoiled[name] = LogError(path, message, row, line)

    def see(self, names: Iterable[str]) -> None:
        """Remember that these columns exist."""
        for name in names:
            self.names.setdefault(name)


class RecordTable(LogTable):
    """A table filled record by record, for the formats whose rows are mappings (JSON lines, events, text logs)."""

    def __init__(self, format: str, wanted: Wanted) -> None:
        super().__init__(format)
        self._wanted = wanted
        self._is_wanted: dict[str, bool] = {}

    def keeps(self, name: str) -> bool:
        """Whether a column is wanted; its name is remembered either way."""
        use = self._is_wanted.get(name)
        if use is None:
            use = self._is_wanted[name] = self._wanted(name)
            self.names.setdefault(name)
        return use

    def append(self, record: Mapping[str, float]) -> None:
        """Add the next data row."""
        known = self._is_wanted
        for name, value in record.items():
            if known[name] if name in known else self.keeps(name):
                self.add(self.num_rows, name, value)
        self.num_rows += 1
