"""A run as the detector sees it: one loss value after the other, with the step and the gradient norm beside it."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.readers.columns import ColumnRequest, choose, listed
from experiments.readers.table import Column, LogTable, NotALogError

LARGEST_STEP = 1e15


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


def no_loss(names: Sequence[str]) -> str:
    """Word the error for a log without a known loss column."""
    return f"no loss column found; name one with --column. It has: {listed(names)}"


def align(table: LogTable, path: Path, request: ColumnRequest) -> Series:
    """Choose the columns of a log and put step and gradient norm beside each loss value.

    Raises:
        ColumnError: A column the user named is missing.
        NotALogError: No loss column.
        LogError: A column holds something that is no number.
    """
    name = choose(table, request, "loss")
    if name is None:
        raise NotALogError(path, no_loss(list(table.names)))
    loss = table.columns[name]
    step_name = choose(table, request, "step", at_least=len(loss.rows) // 2)
    grad_name = choose(table, request, "grad_norm")
    grad_name = None if grad_name == name else grad_name
    for used in (name, step_name, grad_name):
        if used in table.spoiled:
            raise table.spoiled[used]
    step_of = _Steps(table.columns[step_name] if step_name else Column())
    rows, values = list(loss.rows), list(loss.values)
    steps = step_of.fill(rows)
    grads = _beside(rows, steps, table.columns[grad_name] if grad_name else Column(), step_of)
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
    """Return an integer for an integer-like step (``100.0``), NaN for what is no step, the value as it is otherwise."""
    if not abs(value) < LARGEST_STEP:
        return math.nan
    return int(value) if value.is_integer() else value


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
