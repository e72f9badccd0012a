"""The 45 real training runs, their labelled events, and the score of a detector on them."""

import csv
import gzip
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "traces"
REFRACTORY = 20  # flags closer than this many rows are one alarm
NORMAL, ACTIONABLE, IGNORED, BENIGN = 0, 1, 2, 3
WARM_UP = 30  # first rows, not scored
# Sources whose runs were kept apart; the others were used to set the rule's constants.
HELD_OUT = frozenset({"muongrok", "megatron", "tyler", "hectorllmc", "siddanth", "alpaca", "bashkir"})

FloatN = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RealTrace:
    """One run: steps, loss and gradient norm [N] (NaN where not logged), and its labels."""

    name: str
    source: str
    steps: FloatN
    loss: FloatN
    grad_norm: FloatN
    labels: dict[str, Any]

    @property
    def held_out(self) -> bool:
        """Whether its source was kept apart."""
        return self.source in HELD_OUT


def load(folder: Path = FOLDER) -> Iterator[RealTrace]:
    """Yield the bundled runs in the order of their index."""
    labels = json.loads((folder / "labels.json").read_text())
    with (folder / "index.csv").open(newline="") as index:
        for entry in csv.DictReader(index):
            yield _read(folder / f"{entry['id']}.csv.gz", entry, labels[entry["id"]])


def _read(path: Path, entry: dict[str, str], labels: dict[str, Any]) -> RealTrace:
    text = gzip.decompress(path.read_bytes()).decode()
    rows = list(csv.DictReader(io.StringIO(text)))

    def column(name: str) -> FloatN:
        return np.array([float(row[name]) if row.get(name) else math.nan for row in rows])

    if entry["step_column"] == "regular":
        steps: FloatN = float(entry["first_step"]) + float(entry["log_interval"]) * np.arange(
            len(rows), dtype=np.float64
        )
    else:
        steps = column("step")
    source = entry["id"].rsplit("-", 1)[0]
    return RealTrace(entry["id"], source, steps, column("loss"), column("grad_norm"), labels)


def alarms(flagged: npt.NDArray[np.int64]) -> list[int]:
    """Return the rows at which an alarm is newly raised."""
    rows = np.sort(flagged)
    return [int(row) for row in rows[np.diff(rows, prepend=-REFRACTORY - 1) > REFRACTORY]]


def reach(event: dict[str, Any]) -> tuple[int, int]:
    """Return the first and last row at which an alarm counts for an actionable event."""
    start, end = event["start_row"], event["end_row"]
    return max(0, start - 2), max(end, start + 10)


def zones(labels: dict[str, Any], rows: int) -> npt.NDArray[np.int64]:
    """Return each row's zone: NORMAL, ACTIONABLE, IGNORED (ambiguous, excluded, warm-up) or BENIGN. Shape [rows]."""
    zone = np.zeros(rows, np.int64)
    for span in labels["ignore_rows"]:
        zone[span["start_row"] : span["end_row"] + 1] = IGNORED
    zone[:WARM_UP] = IGNORED
    for event in labels["events"]:
        if event["actionable"]:
            first, last = reach(event)
            zone[first : last + 1] = ACTIONABLE
    for event in labels["events"]:
        if not event["actionable"]:
            part = zone[max(0, event["start_row"] - 2) : event["end_row"] + 3]
            part[part == NORMAL] = IGNORED if event["ambiguous"] else BENIGN
            if event["ambiguous"]:
                part[part == BENIGN] = IGNORED
    return zone


@dataclass
class RealScore:
    """Counts over a set of real traces."""

    found: int = 0
    events: int = 0
    strict: int = 0  # false alarms in normal and benign rows
    lenient: int = 0  # in normal rows only
    steps: float = 0.0
    clean: int = 0
    clean_alarmed: int = 0
    first_rows: list[int] = field(default_factory=lambda: [0, 0])  # non-finite runs flagged at their first row
    per_trace: list[float] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)
    kinds: dict[str, list[int]] = field(default_factory=dict)

    def add(self, trace: RealTrace, flagged: npt.NDArray[np.int64]) -> None:
        """Count one trace; `flagged` holds the rows at which the detector called for action."""
        rows = len(trace.loss)
        zone = zones(trace.labels, rows)
        where = zone[alarms(flagged)] if len(flagged) else np.zeros(0, np.int64)
        false = int(np.isin(where, (NORMAL, BENIGN)).sum())
        self.strict += false
        self.lenient += int((where == NORMAL).sum())
        scored = np.isin(zone, (NORMAL, BENIGN))
        self.steps += float(np.diff(trace.steps, prepend=trace.steps[0])[scored].sum())
        if trace.labels["clean"] and not trace.labels["ambiguous"]:
            self.clean += 1
            self.clean_alarmed += false > 0
        bad = ~np.isfinite(trace.loss)
        if bad.any():
            self.first_rows[0] += int(np.argmax(bad)) in set(flagged.tolist())
            self.first_rows[1] += 1
        self._add_events(trace, flagged)

    def _add_events(self, trace: RealTrace, flagged: npt.NDArray[np.int64]) -> None:
        found = []
        for event in trace.labels["events"]:
            if not event["actionable"]:
                continue
            first, last = reach(event)
            hits = flagged[(flagged >= first) & (flagged <= last)]
            place = self.kinds.setdefault(event["kind"], [0, 0])
            place[0] += bool(hits.size)
            place[1] += 1
            found.append(bool(hits.size))
            if hits.size:
                self.delays.append(int(hits.min()) - event["start_row"])
        self.events += len(found)
        self.found += sum(found)
        if found:
            self.per_trace.append(sum(found) / len(found))

    def row(self) -> dict[str, Any]:
        """Return the table's numbers."""
        delays: list[float] = [*self.delays] or [math.nan]
        return {
            "recall": self.found / max(1, self.events),
            "macro_recall": float(np.mean(self.per_trace)) if self.per_trace else math.nan,
            "precision": self.found / max(1, self.found + self.strict),
            "precision_lenient": self.found / max(1, self.found + self.lenient),
            "false_alarms": self.strict,
            "fa_per_100k": 1e5 * self.strict / max(1.0, self.steps),
            "clean_alarmed": f"{self.clean_alarmed}/{self.clean}",
            "non_finite_first_row": f"{self.first_rows[0]}/{self.first_rows[1]}",
            "median_delay": float(np.median(delays)),
            "p90_delay": float(np.quantile(delays, 0.9)),
            "kinds": {k: f"{a}/{b}" for k, (a, b) in sorted(self.kinds.items())},
            "events": self.events,
        }
