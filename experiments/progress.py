"""Progress of long work on stderr: a rich bar on a terminal, a line now and then elsewhere (logs, batch jobs)."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 30.0


class WorkProgress:
    """A bar with time left, as a context manager.

    Args:
        title: what is being done.
        total: amount of work.
        unit: of `total`; "bytes" is not shown, only used for the time left.
        done: work done before.
    """

    def __init__(self, title: str, total: float, unit: str, done: float = 0) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done = self._before = done
        self._began = self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                *(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TaskProgressColumn(),
                    TextColumn("{task.fields[note]}"),
                ),
                *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
                console=console,
            )
            self._task = self._bar.add_task(title, total=total, note="")
            self._bar.update(self._task, completed=done)

    def __enter__(self) -> WorkProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def reach(self, done: float, note: str = "") -> None:
        """Set the work done so far."""
        self.advance(done - self._done, note)

    def advance(self, amount: float, note: str = "") -> None:
        """Add to the work done so far."""
        self._done += amount
        if self._bar:
            self._bar.update(self._task, completed=self._done, note=note)
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(self.line(note), file=sys.stderr, flush=True)

    def line(self, note: str = "") -> str:
        """One line of text: share done, time left, note."""
        spent, now = time.monotonic() - self._began, self._done - self._before
        left = f"{spent * (self._total - self._done) / now:.0f} s left" if now > 0 else "time left unknown"
        amount = "" if self._unit == "bytes" else f" ({self._done:.0f} of {self._total:.0f} {self._unit})"
        share = 100 * self._done / max(self._total, 1)
        return f"{self._title}: {share:.0f}%{amount}, {left}{', ' + note if note else ''}"

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)
