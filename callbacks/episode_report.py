"""One folder per episode: what happened, where, on which data and on which rank, and what was done about it.

All ranks hand in what they know of the offending batches; rank 0 writes ``report.json`` once, beside and then renamed.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.detector import Verdict
from callbacks.episode_plot import draw_episode
from callbacks.forensics import blame, first_to_rise, in_words
from callbacks.step_sums import StepReport

HeatMap = tuple[list[str], list[int], list[list[float]]]


def finite_or_text(value: Any) -> Any:
    """Return ``value`` with every non-finite float as text, since JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(k): finite_or_text(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_text(v) for v in value]
    return value


def write_json(path: Path, content: Any) -> None:
    """Write JSON beside ``path`` and rename it: the file is whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(finite_or_text(content), file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def describe_batches(history: Sequence[StepReport], first_attempt: int) -> list[dict[str, Any]]:
    """Return this rank's batches from attempted step ``first_attempt`` on, read from the device."""
    rows = []
    for report in history:
        if report.attempt < first_attempt:
            continue
        for record in report.batches:
            row: dict[str, Any] = {"attempt": report.attempt, "batch_number": record.batch_number}
            row |= {k: v.tolist() for k, v in {**record.identity, **record.details}.items()}
            rows.append(row)
    return rows


def gather(mine: Any) -> list[Any]:
    """Return every rank's object, in rank order, on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class EpisodeFolder:
    """Writes episodes below one folder, numbered by the attempted step at which they were acted on.

    Args:
        dirpath: the folder, or None for ``episodes`` below the trainer's root.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath
        self.root = Path(dirpath) if dirpath else Path("episodes")

    def open(self, trainer: Trainer) -> None:
        """Choose the folder; it is created with the first episode."""
        self.root = Path(self.dirpath) if self.dirpath else Path(trainer.default_root_dir) / "episodes"

    def write(
        self,
        trainer: Trainer,
        verdict: Verdict,
        decision: str,
        rollback: dict[str, Any] | None,
        history: list[StepReport],
        heat_map: HeatMap,
        monitor: str,
    ) -> None:
        """Gather every rank's batches and write the episode. Collective: call it on all ranks."""
        everyone = gather(describe_batches(history, verdict.onset - 4))
        if not trainer.is_global_zero:
            return
        attempt = history[-1].attempt if history else verdict.onset
        # Two episodes may be acted on at one step, a run resumed after a kill among them: nothing is overwritten.
        folder, copies = self.root / f"step_{attempt:07d}_{verdict.kind}", 1
        while folder.exists():
            copies += 1
            folder = self.root / f"step_{attempt:07d}_{verdict.kind}_{copies}"
        names, steps, norms = heat_map
        content = {
            "verdict": verdict._asdict(),
            "decision": decision,
            "monitor": monitor,
            "detected_at": attempt,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "rollback": rollback,
            "step_seconds": sorted(r.step_seconds for r in history)[len(history) // 2] if history else 0.0,
            "series": [
                {
                    "attempt": r.attempt,
                    "step": r.step,
                    "value": r.value,
                    "rank_values": r.rank_values,
                    "gradient_norm": r.gradient_norm,
                    "vetoed": r.vetoed,
                }
                for r in history
            ],
            "gradient_norms": {"groups": names, "attempts": steps, "norms": norms},
            "batches": [row | {"rank": rank} for rank, rows in enumerate(everyone) for row in rows],
        }
        content |= {"blame": blame(content), "first_to_rise": first_to_rise(content), "words": in_words(content)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "report.json", content)
            draw_episode(content, folder / "episode.png")
        except Exception as error:  # a full disk must not end the run, nor leave the other ranks waiting
            rank_zero_warn(f"the report of the episode at step {attempt} could not be written to {folder}: {error}")
