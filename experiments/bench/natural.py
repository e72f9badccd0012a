"""``bench natural``: runs that fail by themselves, with the guard only logging, rolling back, and cutting the rate.

The table is of final bits on codebook 0 per seed; the picture shows every curve. Runs one after the other.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.figure import reference_lines_of, smoothed
from experiments.run_records import RunRecord, read_run

CASES: dict[str, list[str]] = {
    "deepnorm": [],
    "prenorm": ["--model.encoder.scheme", "pre", "--model.optimizer.lr", "1e-1", "--trainer.gradient_clip_val", "0"],
}
GUARDS: dict[str, list[str]] = {
    "off (log)": ["--spike_guard.action", "log"],
    "on": [],
    "on, LR cut": ["--spike_guard.after.lr_factor", "0.5"],
}


def arguments(case: str, guard: str, seed: int, folder: Path, data_dir: str, steps: int) -> list[str]:
    """Return the command line of one run."""
    config = Path(__file__).parent.parent / "configs" / "natural.yaml"
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "csv"},
    }
    return [
        "fit", "-c", str(config), *CASES[case], *GUARDS[guard],
        "--seed_everything", str(seed), "--data.seed", str(seed), "--data.data_dir", data_dir,
        "--trainer.default_root_dir", str(folder), "--checkpoint.dirpath", str(folder / "checkpoints"),
        "--trainer.logger", json.dumps([logger]), "--model.optimizer.warmup_steps", str(steps),
        "--model.optimizer.total_steps", str(steps + 1),
        "--trainer.max_steps", str(steps),
        "--trainer.val_check_interval", str(steps), "--trainer.enable_progress_bar", "false",
        "--trainer.enable_model_summary", "false",
    ]  # fmt: skip


def run_all(root: Path, cases: Sequence[str], seeds: int, data_dir: str, steps: int) -> list[dict[str, Any]]:
    """Train what is not yet there and return one row per run."""
    from experiments.cli import main as train

    rows: list[dict[str, Any]] = []
    for case in cases:
        for seed in range(1, seeds + 1):
            for guard in GUARDS:
                folder = (
                    root / f"{case}_seed{seed}_{guard.replace(' ', '').replace(',', '_').replace('(', '_').strip(')')}"
                )
                status = 0
                if not (folder / "done").exists():
                    status = train(arguments(case, guard, seed, folder, data_dir, steps))
                    (folder / "done").write_text(str(status))
                run = read_run(folder)
                status = int((folder / "done").read_text())
                rows.append(row_of(case, seed, guard, run, status))
                print(rows[-1], flush=True)
    return rows


def row_of(case: str, seed: int, guard: str, run: RunRecord, status: int) -> dict[str, Any]:
    """Return a run's row of the table."""
    return {
        "case": case, "seed": seed, "guard": guard, "final_bits": round(run.final_bits(), 3),
        "best_bits": round(min(smoothed(run.bits, 50)[50:], default=math.nan), 3), "episodes": len(run.episodes),
        "rollbacks": len(run.rollbacks), "steps_lost": run.steps_lost(), "ended": "stopped" if status else "to the end",
        "folder": str(run.folder),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Draw the smoothed curves, one row of panels per case and one panel per guard setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases, guards = list(dict.fromkeys(r["case"] for r in rows)), list(GUARDS)
    figure, axes = plt.subplots(
        len(cases), len(guards), figsize=(5 * len(guards), 3.6 * len(cases)), sharey="row", squeeze=False
    )
    for i, case in enumerate(cases):
        for j, guard in enumerate(guards):
            ax = axes[i][j]
            for row in (r for r in rows if r["case"] == case and r["guard"] == guard):
                run = read_run(row["folder"])
                line = ax.plot(
                    run.steps, smoothed(run.bits, 30), linewidth=1.3, label=f"seed {row['seed']}: {row['final_bits']}"
                )[0]
                for attempt, *_ in run.rollbacks:
                    ax.axvline(attempt, color=line.get_color(), alpha=0.5, linewidth=0.8, linestyle=":")
            lines = reference_lines_of(read_run(rows[0]["folder"]))
            if lines:
                ax.axhline(lines["unigram"], color="0.4", linestyle="--", linewidth=0.8)
            ax.set_title(f"{case}, guard {guard}", fontsize=10)
            ax.set_ylim(7.0, 10.6)
            ax.legend(fontsize=7, title="final bits", title_fontsize=7)
            ax.grid(alpha=0.25)
            ax.set_xlabel("optimizer step (attempted); dotted: rollback")
        axes[i][0].set_ylabel("bits on codebook 0")
    figure.tight_layout()
    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(partial, dpi=110)
    os.replace(partial, out)


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments bench natural", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--data-dir", default="bundled")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/natural"))
    args = parser.parse_args(argv)
    if args.seeds < 1:
        print(f"error: --seeds {args.seeds}: at least 1", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    rows = run_all(args.out, args.cases, args.seeds, args.data_dir, args.steps)
    with open(args.out / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[k for k in rows[0] if k != "folder"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.out / "natural.png")
    for case in args.cases:
        for guard in GUARDS:
            ends = [r["final_bits"] for r in rows if r["case"] == case and r["guard"] == guard]
            print(f"{case:10} guard {guard:12} median final bits {statistics.median(ends):.3f} of {sorted(ends)}")
    return 0
