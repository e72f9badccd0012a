"""The two reports of ``scan`` that are text: a table for people, JSON for machines."""

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from callbacks.episodes import Episode
from experiments.scan_detect import ScanResult, column_name, log_interval

MAX_EPISODES = 10  # shown per run unless all are asked for
KIND_STYLES = {
    "outlier": "dim", "shift": "cyan", "jump": "yellow", "rise": "magenta", "divergence": "red",
    "non_finite": "bold red",
}  # fmt: skip


def one_line(message: str) -> str:
    """Keep an error message on one line, whatever a file's name or content put into it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def number(value: float | None) -> str:
    """Write a step or a value shortly: ``19999``, ``5.91``, ``1.2e+23``, ``nan``."""
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value.is_integer() and abs(value) < 1e9):
        return f"{int(value)}"
    return f"{value:.4g}"


def episode_table(results: Sequence[ScanResult], show_all: bool) -> Table:
    """Build the table: one line an episode, those that a guard would act on first to be kept when there are many."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("steps")
    table.add_column("kind")
    for name in ("onset", "peak", "recovered", "peak value", "baseline", "severity"):
        table.add_column(name, justify="right")
    table.add_column("acts")
    if any(episode.precursors for result in results for episode in result.episodes):
        table.add_column("seen in")
    for result in results:
        _add_run(table, result, show_all)
    return table


def _add_run(table: Table, result: ScanResult, show_all: bool) -> None:
    head = (escape(one_line(str(result.series.path))), _steps(result))
    shown, hidden = _pick(result.episodes, show_all)
    lines: list[tuple[str, ...]] = [_line(result, episode) for episode in shown]
    if hidden:
        counts = Counter(episode.kind for episode in hidden)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines.append((f"[dim]+ {len(hidden)} more ({kinds})[/dim]",))
    for i, line in enumerate(lines or [("[green]none[/green]",)]):
        table.add_row(*(head if i == 0 else ("", "")), *line)


def _pick(episodes: Sequence[Episode], show_all: bool) -> tuple[list[Episode], list[Episode]]:
    """Choose what to show: actionable ones first, then the most severe, in order of time."""
    if show_all or len(episodes) <= MAX_EPISODES:
        return list(episodes), []
    order = sorted(range(len(episodes)), key=lambda i: (not episodes[i].actionable, -_finite(episodes[i].severity)))
    keep = set(order[:MAX_EPISODES])
    return [e for i, e in enumerate(episodes) if i in keep], [e for i, e in enumerate(episodes) if i not in keep]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _steps(result: ScanResult) -> str:
    steps = result.series.steps
    if not steps:
        return "no values"
    every = log_interval(result.series)
    return f"{number(min(steps))}-{number(max(steps))}" + (f" by {number(every)}" if every not in (None, 1) else "")


def _line(result: ScanResult, episode: Episode) -> tuple[str, ...]:
    style = KIND_STYLES.get(episode.kind, "")
    kind = f"[{style}]{episode.kind}[/{style}]" if style else episode.kind
    places = [episode.onset, episode.peak_step, episode.recovered]
    steps = [number(None if row is None else result.step_at(row)) for row in places]
    values = [number(episode.peak), number(episode.baseline), number(episode.severity)]
    others = [
        f"{escape(column_name(result, name))} at {number(result.step_at(row))}" for name, row in first_seen(episode)
    ]
    return (kind, *steps, *values, "yes" if episode.actionable else "", *([", ".join(others)] if others else []))


def first_seen(episode: Episode) -> list[tuple[str, int]]:
    """Return the other series that left their range, with the row at which they did, in order of time."""
    return sorted(episode.precursors.items(), key=lambda item: item[1])


def summary(results: Sequence[ScanResult]) -> str:
    """Say in one line what was found."""
    acted = [result for result in results if result.alarms]
    episodes = sum(len(result.episodes) for result in results)
    actionable = sum(episode.actionable for result in results for episode in result.episodes)
    return (
        f"{_count(len(results), 'run')}, {_count(sum(len(r.series.rows) for r in results), 'value')}: "
        f"{_count(episodes, 'episode')}, a guard would have acted on {actionable} (in {_count(len(acted), 'run')})"
    )


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def strict(value: Any) -> Any:
    """Replace what strict JSON has no word for: NaN by null, infinities by ``"inf"`` and ``"-inf"``."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    return value


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, synced, then renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp makes private files
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(path: Path, records: list[dict[str, Any]]) -> None:
    """Write the report of all runs, as strict JSON."""
    write_atomically(path, (json.dumps(strict(records), indent=1, allow_nan=False) + "\n").encode())
