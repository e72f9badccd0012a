"""Run the project's detector over one finished run and collect what it noticed."""

import bisect
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from callbacks.detector import Detector, DetectorConfig
from callbacks.episodes import Episode, EpisodeTracker
from experiments.readers.series import Series
from experiments.readers.table import LogError

LOSS, GRAD = "loss", "grad_norm"  # the detector's names of the two series
TICK_EVERY = 2000


@dataclass
class ScanResult:
    """What the detector said about one run.

    Attributes:
        series: The run.
        alarms: Rows at which a guard would have acted, ascending.
        episodes: Everything noticed, harmless kinds included; their "steps" are rows of the log.
        baseline: Expected loss at each loss value, NaN where there was none yet. Length N.
        scale: Noise at each, in the loss's unit. Length N.
    """

    series: Series
    alarms: list[int] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    baseline: "array[float]" = field(default_factory=lambda: array("d"))
    scale: "array[float]" = field(default_factory=lambda: array("d"))

    def step_at(self, row: int) -> float:
        """Return the training step logged in a row (of the nearest loss row before it)."""
        place = bisect.bisect_right(self.series.rows, row) - 1
        return self.series.steps[max(place, 0)]


def detect(series: Series, config: DetectorConfig, tick: Callable[[int], None] = lambda _: None) -> ScanResult:
    """Feed every loss value, non-finite ones included, to a fresh detector, once and in order.

    The detector is given rows, not steps: steps of a resumed or rolled-back run go backwards and repeat.

    Args:
        series: A run.
        config: The detector's parameters.
        tick: Progress, in values judged.

    Raises:
        LogError: The detector cannot compute with a value.
    """
    detector, tracker, result = Detector(config), EpisodeTracker(), ScanResult(series)
    baseline = scale = math.nan
    for i, (row, loss, grad) in enumerate(zip(series.rows, series.loss, series.grad_norm, strict=True)):
        values = {LOSS: loss} if grad is None else {LOSS: loss, GRAD: grad}
        try:
            verdict = detector.update(row, values)
        except ArithmeticError as error:  # one odd run must not take the others' results with it
            raise LogError(series.path, f"the detector fails on {values} ({error})", row) from error
        if verdict.act:
            result.alarms.append(row)
        closed = tracker.update(row, verdict, values)
        if closed is not None:
            result.episodes.append(closed)
        if verdict.series == LOSS:
            baseline, scale = verdict.baseline, verdict.scale
        result.baseline.append(baseline)
        result.scale.append(scale)
        if (i + 1) % TICK_EVERY == 0:
            tick(TICK_EVERY)
    tick(len(series.rows) % TICK_EVERY)
    if (last := tracker.close()) is not None:
        result.episodes.append(last)
    return result


def log_interval(series: Series) -> float | None:
    """Return the usual distance of two logged steps (median of the forward ones), None with fewer than two values."""
    gaps = sorted(b - a for a, b in zip(series.steps, series.steps[1:], strict=False) if b > a)
    return gaps[len(gaps) // 2] if gaps else None


def episode_record(result: ScanResult, episode: Episode) -> dict[str, Any]:
    """Describe an episode by rows of the log and by the steps logged there."""
    record: dict[str, Any] = {"kind": episode.kind, "actionable": episode.actionable}
    places = {
        "onset": episode.onset, "detected": episode.detected, "acted": episode.acted, "peak": episode.peak_step,
        "end": episode.end, "recovered": episode.recovered,
    }  # fmt: skip
    for name, row in places.items():
        record[f"{name}_row"] = row
        record[f"{name}_step"] = None if row is None else result.step_at(row)
    record.update(
        severity=episode.severity,
        excess=episode.excess,
        peak=episode.peak,
        baseline=episode.baseline,
        series=column_name(result, episode.series),
        precursors={
            column_name(result, name): {"row": row, "step": result.step_at(row)}
            for name, row in episode.precursors.items()
        },
    )
    return record


def column_name(result: ScanResult, name: str) -> str:
    """Return the log's name for one of the detector's series."""
    return (result.series.grad_column or name) if name == GRAD else result.series.column


def run_record(result: ScanResult) -> dict[str, Any]:
    """Describe a run for the JSON report."""
    series = result.series
    return {
        "path": str(series.path),
        "format": series.format,
        "rows": series.num_rows,
        "values": len(series.rows),
        "column": series.column,
        "grad_column": series.grad_column,
        "step_column": series.step_column,
        "steps": max(series.steps) - min(series.steps) if series.steps else 0,
        "first_step": min(series.steps, default=None),
        "last_step": max(series.steps, default=None),
        "log_interval": log_interval(series),
        "alarms": result.alarms,
        "episodes": [episode_record(result, episode) for episode in result.episodes],
        "notes": series.notes,
    }
