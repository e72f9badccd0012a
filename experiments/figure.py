"""``python -m experiments figure RUN...``: bits on codebook 0 over steps, with every spike and rollback marked."""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.run_records import RunRecord, read_run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")  # Okabe and Ito
STYLES = ("-", "-", (0, (4, 2)), "-", "-", (0, (4, 2)), "-")  # curves that coincide stay visible


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the trailing mean over up to ``window`` values; non-finite ones are left out."""
    means = []
    for i in range(len(values)):
        finite = [v for v in values[max(0, i + 1 - window) : i + 1] if math.isfinite(v)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def draw_panel(axes: Any, runs: Sequence[tuple[str, RunRecord]], lines: Mapping[str, float], window: int) -> None:
    """Draw runs into one axes: raw values faint, means bold, fault and rollbacks marked, reference lines dashed."""
    for colour, style, (label, run) in zip(COLOURS * 9, STYLES * 9, runs, strict=False):
        mean = smoothed(run.bits, window)
        axes.plot(run.steps, run.bits, color=colour, alpha=0.2, linewidth=0.6)
        axes.plot(
            run.steps, mean, color=colour, linestyle=style, linewidth=1.8, label=f"{label}: {run.final_bits():.2f}"
        )
        for number, (attempt, left, to, _) in enumerate(run.rollbacks):
            at = min(range(len(run.steps)), key=lambda i: abs(run.steps[i] - attempt))
            axes.plot([attempt], [mean[at]], marker="v", color=colour, markersize=9, markeredgecolor="black", zorder=5)
            if number < 6:  # more would hide the curves
                axes.annotate(
                    f"rolled back\nstep {left} to {to}",
                    (attempt, mean[at]),
                    textcoords="offset points",
                    xytext=(12, 10),
                    fontsize=8,
                    color="black",
                    bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
                )
    faults = {run.fault for _, run in runs if run.fault}
    for first, last in faults:
        axes.axvspan(first, last + 1, color="#D55E00", alpha=0.18, linewidth=0)
        axes.annotate(
            "fault injected\n(a drill, declared\nin the config)",
            (first, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-6, -6),
            textcoords="offset points",
            va="top",
            ha="right",
            fontsize=8,
            color="#A33C00",
        )
    for name, value in lines.items():
        axes.axhline(value, color="0.45", linestyle="--", linewidth=0.9)
        label = axes.annotate(
            f"{name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.35",
        )
        label.set_in_layout(False)  # a line out of view must not squeeze the picture
    axes.set_xlabel("optimizer step (attempted)")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower left", title="bits at the end", title_fontsize=8)


def draw(
    panels: Mapping[str, Sequence[tuple[str, RunRecord]]], lines: Mapping[str, float], out: Path, window: int = 30
) -> None:
    """Draw one panel per title and write the picture whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.8), sharey=True, squeeze=False)
    for ax, (title, runs) in zip(axes[0], panels.items(), strict=True):
        draw_panel(ax, runs, lines, window)
        ax.set_title(title, fontsize=11)
    # Single rows of a spike may be very high: the axis follows the means, so that the curves stay readable.
    values = [v for runs in panels.values() for _, run in runs for v in run.bits if math.isfinite(v)]
    means = [v for runs in panels.values() for _, run in runs for v in smoothed(run.bits, window) if math.isfinite(v)]
    if values and means:
        axes[0][0].set_ylim(min(values) - 0.2, max(means) + 0.8)
    axes[0][0].set_ylabel("acoustic MLM loss, codebook 0 (bits)")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(partial, dpi=130)
    os.replace(partial, out)
    plt.close(figure)


def write_curves(runs: Sequence[tuple[str, RunRecord]], out: Path) -> None:
    """Write the curves beside the picture, for whoever wants to compare."""
    partial = out.with_name(f".{out.name}.partial")
    with open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "attempted_step", "accepted_step", "bits_codebook_0"])
        for label, run in runs:
            writer.writerows([label, *row] for row in zip(run.steps, run.accepted, run.bits, strict=True))
    os.replace(partial, out)


def reference_lines_of(run: RunRecord) -> dict[str, float]:
    """Return the unigram and bigram lines of codebook 0 of the data that a run was trained on, if it is at hand."""
    from datamodules.entropy import reference_lines

    folder = (run.config.get("data") or {}).get("data_dir", "bundled")
    try:
        lines = reference_lines(folder)
    except (FileNotFoundError, ValueError) as error:
        print(f"note: no reference lines drawn: {error}", file=sys.stderr)
        return {}
    # A run above the unigram line has learned nothing that context gives.
    return {"unigram": float(lines["unigram"][0]), "one frame back": float(lines["bigram"][0])}


def main(argv: list[str]) -> int:
    """Draw the figure for the runs named."""
    parser = argparse.ArgumentParser(prog="python -m experiments figure", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/prenorm_clip1")
    parser.add_argument("--out", default="figure.png", help="the picture; a CSV of the curves is written beside it")
    parser.add_argument(
        "--label", action="append", default=[], help="a name per run, in order; default: the run's name"
    )
    parser.add_argument("--smooth", type=int, default=30, help="logged rows in the trailing mean (default 30)")
    parser.add_argument("--no-lines", action="store_true", help="do not draw the unigram and bigram lines")
    args = parser.parse_args(argv)
    if args.label and len(args.label) != len(args.runs):
        print(f"error: {len(args.label)} --label for {len(args.runs)} runs; give one per run or none", file=sys.stderr)
        return 2
    if args.smooth < 1:
        print(f"error: --smooth {args.smooth}: must be at least 1", file=sys.stderr)
        return 2
    out = Path(args.out)
    if out.suffix.lower() not in (".png", ".pdf", ".svg", ".jpg"):
        print(f"error: --out {out}: name a .png, .pdf, .svg or .jpg file", file=sys.stderr)
        return 2
    try:
        records = [read_run(path) for path in args.runs]
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    runs = list(zip(args.label or [r.name for r in records], records, strict=True))
    try:
        draw({"": runs}, {} if args.no_lines else reference_lines_of(records[0]), out, args.smooth)
        write_curves(runs, out.with_suffix(".csv"))
    except OSError as error:
        print(f"error: {out}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{out} and {out.with_suffix('.csv')}")
    return 0
