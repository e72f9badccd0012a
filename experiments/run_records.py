"""Read back what a run left: its curve, its fault, its episodes and rollbacks. Plain files only; no trainer."""

from __future__ import annotations

import bisect
import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

BITS = "train/bits_codebook_0"


@dataclass
class RunRecord:
    """One run.

    Attributes:
        name: the run's name.
        folder: its folder.
        steps: attempted optimizer steps of the logged rows; they never go back.
        accepted: accepted steps of the same rows; they go back at a rollback.
        bits: bits on codebook 0 at these rows, one optimizer step each.
        fault: attempted steps ``(first, last)`` of a fault that the run's config declares, or None.
        rollbacks: ``(attempted step, accepted step left, accepted step returned to, seconds)`` of each.
        episodes: reports of all episodes, as written.
        config: the run's configuration.
    """

    name: str
    folder: Path
    steps: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    fault: tuple[int, int] | None = None
    rollbacks: list[tuple[int, int, int, float]] = field(default_factory=list)
    episodes: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)

    def final_bits(self, rows: int = 50) -> float:
        """Mean of the last ``rows`` logged steps; NaN for an empty run."""
        tail = self.bits[-rows:]
        return sum(tail) / len(tail) if tail else math.nan

    def steps_lost(self) -> int:
        """Optimizer steps done in vain: accepted once, then rolled back."""
        return sum(left - to for _, left, to, _ in self.rollbacks)

    def seconds_lost(self) -> float:
        """Seconds of the rollbacks and of the steps done in vain."""
        per_step = [e.get("step_seconds", 0.0) for e in self.episodes if e.get("rollback")]
        return sum(r[3] for r in self.rollbacks) + self.steps_lost() * (max(per_step) if per_step else 0.0)


def metric_files(folder: Path) -> list[Path]:
    """Return the CSV logs of a run, oldest first: every resume adds one.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = list(folder.glob("**/metrics.csv")) if folder.is_dir() else []
    if not found:
        raise FileNotFoundError(f"{folder}: no metrics.csv below it; name the folder of a run, such as runs/NAME")

    def version(path: Path) -> tuple[int, str]:
        tail = path.parent.name.rpartition("_")[2]
        return (int(tail) if tail.isdigit() else 0, str(path))

    return sorted(found, key=version)


def read_run(path: str | Path) -> RunRecord:
    """Read one run's folder.

    Raises:
        FileNotFoundError: if it holds no log.
        ValueError: if the log has no row with bits on codebook 0.
    """
    folder = Path(path)
    files = metric_files(folder)
    root = next((p for p in (folder, *folder.parents) if (p / "config.yaml").is_file()), folder)
    run = RunRecord(root.name, root)
    for file in files:
        _read_rows(run, file)
    if not run.steps:
        raise ValueError(f"{files[0]}: no row has a value of {BITS}")
    if (root / "config.yaml").is_file():
        try:
            run.config = yaml.safe_load((root / "config.yaml").read_text()) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{root / 'config.yaml'}: not YAML: {' '.join(str(error).split())}") from error
    _read_episodes(run, Path((run.config.get("spike_guard") or {}).get("dirpath") or root / "episodes"))
    fault = run.config.get("fault_injection") or {}
    if int(fault.get("at_batch", -1)) >= 0:
        per_step = int((run.config.get("trainer") or {}).get("accumulate_grad_batches", 1))
        first = int(fault["at_batch"]) // per_step
        run.fault = (first, (int(fault["at_batch"]) + int(fault["num_batches"]) - 1) // per_step)
    return run


def _read_rows(run: RunRecord, file: Path) -> None:
    with open(file, newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), 2):
            if not row.get(BITS):
                continue
            try:
                step, bits = int(float(row["step"])), float(row[BITS])
                accepted = int(float(row.get("guard/accepted_step") or step))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{file}:{number}: not a number: {error}") from error
            if run.steps and step <= run.steps[-1]:
                _forget_from(run, step)  # a killed run was resumed from an earlier step: what it did after is void
            run.steps.append(step)
            run.bits.append(bits)
            run.accepted.append(accepted)


def _forget_from(run: RunRecord, step: int) -> None:
    keep = bisect.bisect_left(run.steps, step)
    del run.steps[keep:], run.bits[keep:], run.accepted[keep:]


def read_report(path: Path) -> dict[str, Any]:
    """Return an episode's report.

    Raises:
        ValueError: naming the file, if it is not one.
    """
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(report, dict) or not {"verdict", "detected_at", "batches"} <= report.keys():
        raise ValueError(f"{path}: not an episode's report: verdict, detected_at or batches are missing")
    return report


def _read_episodes(run: RunRecord, folder: Path) -> None:
    for report in sorted(folder.glob("*/report.json")):
        episode = read_report(report)
        run.episodes.append(episode)
        back = episode.get("rollback")
        if back:
            row = (int(episode["detected_at"]), int(back["from_step"]), int(back["to_step"]), float(back["seconds"]))
            run.rollbacks.append(row)
