"""``python -m experiments bench detector``: Ballast's detector against the public loss-spike rules.

On 45 real training runs with labelled events and on synthetic traces; recall, precision, false alarms, delays, and
microseconds a step next to Lightning's SpikeDetection. Writes a JSON, a Markdown table and a picture.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from callbacks.detector import Detector
from experiments.bench.detector_cost import microseconds
from experiments.bench.detector_gradients import GradientScore, bloom_replays
from experiments.bench.detector_peers import PEERS
from experiments.bench.detector_report import picture, tables
from experiments.bench.detector_synthetic import SyntheticScore, Trace, traces
from experiments.bench.detector_traces import RealScore, RealTrace, load

OURS = "Ballast"
FloatN = npt.NDArray[np.float64]
IntN = npt.NDArray[np.int64]
Judged = tuple[dict[str, IntN], FloatN]  # rule -> flagged rows; limit of the gradient norm per row
T = TypeVar("T", bound=RealTrace | Trace)


def ballast(loss: FloatN, grad_norm: FloatN) -> tuple[IntN, FloatN]:
    """Run the detector over one trace.

    Args:
        loss: `[N]`, NaN where the loss is not a number.
        grad_norm: `[N]`, NaN where it was not logged; a non-finite norm beside a non-finite loss is taken as logged.

    Returns:
        Rows at which it calls for action, and the limit `[N]` above which it would have refused each row's update.
    """
    detector = Detector()
    act, limits = [], np.full(len(loss), math.inf)
    pairs = zip(loss.tolist(), grad_norm.tolist(), strict=True)
    for row, (value, norm) in enumerate(pairs):
        limits[row] = detector.veto_limit()
        values = {"loss": value} if math.isnan(norm) else {"loss": value, "grad_norm": norm}
        if detector.update(row, values).act:
            act.append(row)
    return np.array(act, dtype=np.int64), limits


def _judge(trace: RealTrace | Trace) -> Judged:
    act, limits = ballast(trace.loss, trace.grad_norm)
    return {OURS: act} | _peers(trace.loss, trace.grad_norm), limits


def _spread(judge: Callable[[T], Judged], runs: Sequence[T], jobs: int) -> Iterator[Judged]:
    """Judge the runs in order, in `jobs` processes."""
    if jobs == 1:
        yield from map(judge, runs)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(judge, runs)


def _peers(loss: FloatN, grad_norm: FloatN) -> dict[str, IntN]:
    with np.errstate(all="ignore"):
        return {name: np.flatnonzero(rule(loss, grad_norm)) for name, rule in PEERS.items()}


def real_table(jobs: int, progress: Progress) -> dict[str, Any]:
    """Score every rule on the real runs: all of them, and the two parts of the split by source."""
    runs = list(load())
    scores: dict[str, dict[str, RealScore]] = {}
    gradients = GradientScore()
    judged = zip(runs, _spread(_judge, runs, jobs), strict=True)
    for run, (flags, limits) in progress.track(judged, total=len(runs), description="real runs"):
        gradients.add_healthy(run.grad_norm, limits, clean=bool(run.labels["clean"]))
        for name, rows in flags.items():
            parts = scores.setdefault(name, {part: RealScore() for part in ("all", "design", "held_out")})
            for part in ("all", "held_out" if run.held_out else "design"):
                parts[part].add(run, rows)
    table = {name: {part: score.row() for part, score in parts.items()} for name, parts in scores.items()}
    return {"rules": table, "vetoes": gradients.row(), "runs": len(runs)}


def synthetic_table(count: int, rows: int, seed: int, jobs: int, progress: Progress) -> dict[str, Any]:
    """Score every rule on synthetic traces."""
    runs = traces(count, rows, seed)
    scores: dict[str, SyntheticScore] = {}
    gradients = GradientScore()
    judged = zip(runs, _spread(_judge, runs, jobs), strict=True)
    for run, (flags, limits) in progress.track(judged, total=len(runs), description="synthetic traces"):
        gradients.add_synthetic(run, limits)
        for name, found in flags.items():
            scores.setdefault(name, SyntheticScore()).add(run, found)
    table = {name: score.row() for name, score in scores.items()}
    return {"rules": table, "vetoes": gradients.row(), "traces": len(runs), "rows": rows, "seed": seed}


def parser() -> argparse.ArgumentParser:
    """Return the verb's options."""
    out = argparse.ArgumentParser(prog="python -m experiments bench detector", description=__doc__)
    out.add_argument("--synthetic", type=int, default=1000, help="number of synthetic traces, 0 for none")
    out.add_argument("--rows", type=int, default=20_000, help="rows of a synthetic trace")
    out.add_argument("--seed", type=int, default=1, help="seed of the synthetic traces")
    out.add_argument("--jobs", type=int, default=1, help="processes")
    out.add_argument("--quick", action="store_true", help="100 synthetic traces, a shorter timing")
    out.add_argument("--no-real", action="store_true", help="leave the real runs out")
    out.add_argument("--out", type=Path, default=Path("runs/bench_detector"), help="folder for results and picture")
    return out


def main(argv: list[str]) -> int:
    """Run the comparison; return 0, or 2 on a bad option."""
    args = parser().parse_args(argv)
    for name, low in (("synthetic", 0), ("rows", 2000), ("jobs", 1)):
        if getattr(args, name) < low:
            print(f"error: --{name} {getattr(args, name)}: expected at least {low}", file=sys.stderr)
            return 2
    count = min(args.synthetic, 100) if args.quick else args.synthetic
    results: dict[str, Any] = {"cost": microseconds(*((3, 500) if args.quick else (9, 4000))), "bloom": bloom_replays()}
    with Progress() as progress:
        if not args.no_real:
            results["real"] = real_table(args.jobs, progress)
        if count:
            results["synthetic"] = synthetic_table(count, args.rows, args.seed, args.jobs, progress)
    args.out.mkdir(parents=True, exist_ok=True)
    text = tables(results, OURS)
    (args.out / "detector.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "detector.md").write_text(text + "\n")
    if "real" in results or "synthetic" in results:
        picture(results, OURS, args.out / "detector.png")
    print(text)
    print(f"\nwritten to {args.out}")
    return 0
