"""``make demo``: train the figure's four configurations, break one on purpose, and show that the guard saves it.

Six short runs on the bundled music, two at a time; then the figure, a table and where they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from experiments.figure import draw, reference_lines_of, write_curves
from experiments.run_records import RunRecord, read_run

CONFIGS = Path(__file__).parent / "configs"
# run -> (title, configs, further options). Same seed and same data in all; only what a title names differs.
RUNS: dict[str, tuple[str, list[str], list[str]]] = {
    "prenorm_clip10": ("Pre-Norm, clip 10", ["prenorm_clip10"], []),
    "prenorm_clip1": ("Pre-Norm, clip 1", ["prenorm_clip1"], []),
    "attn_relax_clip1": ("Pre-Norm, attn. relax, clip 1", ["attn_relax_clip1"], []),
    "deepnorm_clip1": ("DeepNorm, clip 1", ["deepnorm_clip1"], []),
    "deepnorm_fault_log": (
        "DeepNorm, fault, guard only logs",
        ["deepnorm_clip1", "demo_fault"],
        ["--spike_guard.action", "log"],
    ),
    "deepnorm_fault_rollback": ("DeepNorm, fault, guard rolls back", ["deepnorm_clip1", "demo_fault"], []),
}
QUEUES = (
    ("prenorm_clip10", "attn_relax_clip1", "deepnorm_fault_log"),
    ("deepnorm_clip1", "prenorm_clip1", "deepnorm_fault_rollback"),
)


def command(name: str, root: Path, steps: int) -> list[str]:
    """Return the arguments that train one run."""
    _, configs, options = RUNS[name]
    files = [arg for config in configs for arg in ("-c", str(CONFIGS / f"{config}.yaml"))]
    scaled = ["--model.optimizer.total_steps", str(steps)]
    if "demo_fault" in configs:
        scaled += ["--fault_injection.at_batch", str(steps // 5)]
    folder = root / name
    return [
        "fit",
        *files,
        "--run_name",
        name,
        "--trainer.default_root_dir",
        str(folder),
        "--checkpoint.dirpath",
        str(folder / "checkpoints"),
        "--trainer.logger",
        json.dumps(
            [
                {
                    "class_path": "lightning.pytorch.loggers.CSVLogger",
                    "init_args": {"save_dir": str(folder), "name": "csv", "flush_logs_every_n_steps": 20},
                },
                {
                    "class_path": "experiments.run_config.RunWandbLogger",
                    "init_args": {"name": name, "save_dir": str(folder)},
                },
            ]
        ),
        *scaled,
        *options,
    ]


def worker(names: list[str], root: Path, steps: int) -> int:
    """Train runs one after the other in this process, so that the imports are paid for once."""
    from experiments.cli import main as train

    for name in names:
        status = train(command(name, root, steps))
        if status:
            return status
    return 0


def logged_steps(folder: Path) -> int:
    """Return the last accepted step in a run's log so far."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_run(folder).accepted[-1]
    return 0


def train_all(root: Path, steps: int, console: Console) -> int:
    """Start one process per queue and show their progress until they end."""
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    root.mkdir(parents=True, exist_ok=True)
    jobs = []
    for number, queue in enumerate(QUEUES):
        log = open(root / f"worker_{number}.log", "w")  # noqa: SIM115  closed when the process ends
        argv = [sys.executable, "-m", "experiments.demo", "--out", str(root), "--steps", str(steps), "--worker", *queue]
        jobs.append((subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=steps * len(RUNS))
            while any(job.poll() is None for job, _ in jobs):
                if any(job.poll() for job, _ in jobs):
                    break
                progress.update(task, completed=sum(min(steps, logged_steps(root / name)) for name in RUNS))
                time.sleep(1.0)
            progress.update(task, completed=steps * len(RUNS))
    finally:
        for job, log in jobs:
            if job.poll() is None:
                job.kill()
            job.wait()
            log.close()
    for number, (job, _) in enumerate(jobs):
        if job.returncode:
            tail = (root / f"worker_{number}.log").read_text().splitlines()[-5:]
            print("\n".join([*tail, f"error: a run failed; see {root / f'worker_{number}.log'}"]), file=sys.stderr)
            return 1
    return 0


def table_rows(runs: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """Return one row per run: final bits, spikes, steps and seconds lost."""
    return [
        {
            "run": RUNS[name][0],
            "final_bits": round(run.final_bits(), 3),
            "spikes": len(run.episodes),
            "rollbacks": len(run.rollbacks),
            "steps_lost": run.steps_lost(),
            "seconds_lost": round(run.seconds_lost(), 2),
        }
        for name, run in runs.items()
    ]


def report(root: Path, console: Console) -> None:
    """Draw the figure, write and print the table, and say in words what happened."""
    runs = {name: read_run(root / name) for name in RUNS}
    lines = reference_lines_of(runs["deepnorm_clip1"])
    clean = [(RUNS[n][0], runs[n]) for n in list(RUNS)[:4]]
    drill = [(RUNS[n][0], runs[n]) for n in list(RUNS)[3:]]
    picture = root / "figure.png"
    draw(
        {"Four configurations, same seed and data": clean, "One fault: logged only, and rolled back": drill},
        {"unigram": lines["unigram"]} if lines else {},
        picture,
    )
    write_curves([*clean, *drill[1:]], root / "figure.csv")
    rows = table_rows(runs)
    with open(root / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = Table("run", "final bits", "spikes", "rollbacks", "steps lost", "seconds lost")
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(str(v) for v in row.values()))
    console.print(table)
    ends = {name: run.final_bits() for name, run in runs.items()}
    console.print(
        f"Without fault DeepNorm ends at {ends['deepnorm_clip1']:.2f} bits. With the fault and the guard only logging: "
        f"{ends['deepnorm_fault_log']:.2f}. With the guard rolling back: {ends['deepnorm_fault_rollback']:.2f} "
        f"(a difference of {ends['deepnorm_fault_rollback'] - ends['deepnorm_clip1']:+.2f})."
    )
    console.print(f"figure: {picture}\ncurves: {root / 'figure.csv'}\ntable:  {root / 'table.csv'}", soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs and the figure")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of each run (default 500)")
    parser.add_argument("--worker", nargs="+", choices=list(RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 50:
        parser.error(f"--steps {args.steps}: at least 50, or there is nothing to see")
    if args.worker:
        return worker(args.worker, args.out, args.steps)
    console = Console()
    root = args.out
    if root.exists() and any(root.iterdir()):
        root = root.with_name(f"{root.name}_{time.strftime('%Y%m%d_%H%M%S')}")  # nothing of an earlier demo is lost
    console.print(f"Six runs of {args.steps} steps on the bundled music, two at a time, into {root}")
    status = train_all(root, args.steps, console)
    if status == 0:
        report(root, console)
    return status


if __name__ == "__main__":
    sys.exit(main())
