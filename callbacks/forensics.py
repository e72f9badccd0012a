"""The verdict of an episode in words: one bad sample, one bad rank or the whole batch, and which block rose first.

Pure functions on the plain content of a report.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SHARE = 0.6  # one sample or rank is to blame when it alone makes up this share of the excess
RISE = 3.0  # a block's gradient norm has risen when it is this many times its median before


def number(value: Any) -> float:
    """Return a report's number, which may be text where it is not finite."""
    return float(value) if value is not None else math.nan


def excess(values: Sequence[Any], level: float) -> list[float]:
    """Return what each value lies above ``level``; what is not finite counts as infinitely much."""
    above = [number(v) - level for v in values]
    return [max(0.0, x) if math.isfinite(x) else math.inf for x in above]


def culprit(parts: Sequence[float]) -> int | None:
    """Return the index of the one part that makes up most of the total, or None if no single one does.

    >>> culprit([0.1, 5.0, 0.2]), culprit([1.0, 1.2, 0.9]), culprit([0.0, math.inf, math.inf])
    (1, None, None)
    """
    if len(parts) < 2:
        return None
    infinite = [i for i, x in enumerate(parts) if math.isinf(x)]
    if infinite:
        return infinite[0] if len(infinite) == 1 else None
    total, worst = sum(parts), max(range(len(parts)), key=lambda i: parts[i])
    return worst if total > 0 and parts[worst] >= SHARE * total else None


def blame(report: Mapping[str, Any]) -> dict[str, Any]:
    """Say who is to blame at the onset of an episode.

    Returns:
        ``{"who": "rank" | "sample" | "batch" | "unknown", "words": ..., ...}`` with the rank, the sample and the batch.
    """
    verdict = report["verdict"]
    level, onset = number(verdict["baseline"]), int(verdict["onset"])
    at_onset = next((s for s in report["series"] if s["attempt"] == onset), None)
    if at_onset is None:
        return {"who": "unknown", "words": f"the step of the onset ({onset}) is older than what was kept"}
    rank = culprit(excess(at_onset["rank_values"], level))
    rows = [b for b in report["batches"] if b["attempt"] == onset and "sample_bits" in b]
    if rank is not None:
        rows = [b for b in rows if b["rank"] == rank]
    samples = [(b, i, bits) for b in rows for i, bits in enumerate(b["sample_bits"])]
    worst = culprit(excess([s[2] for s in samples], level))
    if worst is not None:
        row, place, bits = samples[worst]
        ids = row.get("sample_id", [])
        name = f"sample {ids[place]}" if place < len(ids) else f"clip {place}"
        words = f"one bad sample: {name} of batch {row['batch_number']} on rank {row['rank']} ({number(bits):.2f} bits)"
        return {"who": "sample", "words": words, "rank": row["rank"], "sample": ids[place] if ids else place}
    if rank is not None:
        others = [number(v) for i, v in enumerate(at_onset["rank_values"]) if i != rank]
        value = number(at_onset["rank_values"][rank])
        words = f"one bad rank: rank {rank} at {value:.2f}, the others at {statistics.mean(others):.2f}"
        return {"who": "rank", "words": words, "rank": rank}
    return {
        "who": "batch",
        "words": "the whole batch: no single rank or sample stands out, which points to the weights",
    }


def first_to_rise(report: Mapping[str, Any], lead: int = 10) -> dict[str, Any] | None:
    """Return the group whose gradient norm left its range first, within ``lead`` steps before the onset or after.

    Returns:
        ``{"group", "attempt", "times"}``, or None where no norms were kept or none rose.
    """
    table = report["gradient_norms"]
    onset = int(report["verdict"]["onset"])
    before = [i for i, step in enumerate(table["attempts"]) if step < onset - lead]
    after = [i for i, step in enumerate(table["attempts"]) if step >= onset - lead]
    if len(before) < 5:
        return None
    rises = []
    for g, name in enumerate(table["groups"]):
        normal = statistics.median(number(table["norms"][i][g]) for i in before)
        for i in after:
            value = number(table["norms"][i][g])
            if not math.isfinite(value) or value > RISE * max(normal, 1e-12):
                times = value / max(normal, 1e-12) if math.isfinite(value) else math.inf
                rises.append((int(table["attempts"][i]), -times, name))
                break
    if not rises:
        return None
    attempt, times, name = min(rises)
    return {"group": name, "attempt": attempt, "times": -times}


def describe(verdict: Any) -> str:
    """Return a verdict of the detector in one sentence."""
    return (
        f"{verdict.kind} in {verdict.series} at step {verdict.onset}: {verdict.excess:+.3g} above its level of "
        f"{verdict.baseline:.4g} ({verdict.score:.0f} times the noise)"
    )


def in_words(report: Mapping[str, Any]) -> str:
    """Return the episode in two or three sentences."""
    verdict = report["verdict"]
    text = (
        f"{verdict['kind']} of {verdict['series']} at step {verdict['onset']}: {number(verdict['excess']):+.3g} above "
        f"{number(verdict['baseline']):.4g}, {number(verdict['score']):.0f} times the noise. {blame(report)['words']}."
    )
    first = first_to_rise(report)
    if first is not None:
        text += (
            f" The gradient of {first['group']} rose first, at step {first['attempt']} ({first['times']:.1f} times)."
        )
    return text
