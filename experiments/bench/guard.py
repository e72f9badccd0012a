"""``bench guard``: what the guard costs a step, how fast a snapshot is, and how long a rollback takes against a restart.

Hook times are measured around the hooks themselves, inside real Trainer runs, with Lightning's SpikeDetection in the
same run; copies are compared with a plain copy of the same bytes in the same process. Medians of repeated rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor

from callbacks.episode_report import write_json
from callbacks.gradient_norms import GradientNorms
from callbacks.snapshots import SnapshotRing, tree_bytes
from callbacks.spike_guard import SpikeGuard
from datamodules.codec_tokens import CodecTokens
from lightning_modules.acoustic_mlm import AcousticMLM
from lightning_modules.encoder import EncoderConfig
from lightning_modules.optimization import OptimizerConfig

SIZES = {
    "small": (EncoderConfig(dim=128, num_layers=3, num_heads=4, ffn_dim=512, conv_kernel=32, conv_groups=8), 128, 8),
    "95M": (EncoderConfig(scheme="post"), 374, 2),
}
HOOKS = ("on_before_optimizer_step", "on_train_batch_end")


class Timed:
    """Adds up the seconds spent in a callback's hooks, step by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def wrap(self, name: str, callback: Callback) -> Callback:
        """Replace the callback's hooks by timed ones."""
        for hook in HOOKS:
            setattr(callback, hook, partial(self._call, name, getattr(callback, hook), hook == "on_train_batch_end"))
        return callback

    def _call(self, name: str, function: Callable[..., Any], last: bool, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.perf_counter() - begin
            steps = self.seconds[name]
            if name + "/open" in self.seconds and self.seconds[name + "/open"]:
                spent += self.seconds[name + "/open"].pop()
            (steps if last else self.seconds[name + "/open"]).append(spent)


class StepTimes(Callback):
    """Seconds from one batch start to the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())

    def median(self) -> float:
        """Median step, the first few left out."""
        return statistics.median(b - a for a, b in zip(self.starts[3:], self.starts[4:], strict=False))


def cost_per_step(size: str, steps: int, devices: int = 1) -> dict[str, float]:
    """Return median milliseconds per step of the hooks of the guard, the norms and SpikeDetection, and of the step."""
    config, frames, clips = SIZES[size]
    seed_everything(1, verbose=False)
    timed, clock = Timed(), StepTimes()
    callbacks = [
        clock,
        timed.wrap("gradient norms", GradientNorms(every_n_steps=50)),
        # Snapshots are measured apart: their period is chosen so that they stay below their budget.
        timed.wrap("guard", SpikeGuard(action="veto")),
        timed.wrap("SpikeDetection", SpikeDetection(rtol=1e9)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            default_root_dir=folder, max_steps=steps, max_epochs=-1, accelerator="cpu", devices=devices, logger=False,
            strategy="ddp" if devices > 1 else "auto", gradient_clip_val=1.0, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, use_distributed_sampler=False,
            callbacks=callbacks,
        )  # fmt: skip
        module = AcousticMLM(config, OptimizerConfig(lr=1e-4, warmup_steps=10, total_steps=10_000))
        trainer.fit(module, CodecTokens(num_frames=frames, global_batch=clips * devices))
    row = {name: 1e3 * statistics.median(timed.seconds[name][3:]) for name in ("guard", "gradient norms", "SpikeDetection")}
    return row | {"step": 1e3 * clock.median()}


def two_ranks(steps: int) -> dict[str, float]:
    """The same with two gloo ranks, in processes of their own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "experiments.bench.guard", "--child", str(steps)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise RuntimeError(f"the two-rank run failed: {done.stderr[-1000:]}")
    result: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return result


def training_tree(size: str) -> dict[str, Tensor]:
    """Weights and Adam moments of a model of this size."""
    module = AcousticMLM(SIZES[size][0], OptimizerConfig())
    tree = {name: p.data for name, p in module.named_parameters()}
    return tree | {f"{moment}/{n}": torch.rand_like(p) for moment in ("exp_avg", "exp_avg_sq") for n, p in tree.items()}


def seconds(function: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def copies(size: str, rounds: int) -> dict[str, float]:
    """Return median seconds of a snapshot, a restore, a plain copy of the same bytes and torch.save of the same tree."""
    tree = training_tree(size)
    ring = SnapshotRing(2)
    flat = torch.cat([t.reshape(-1) for t in tree.values()])
    twin = torch.empty_like(flat).zero_()
    for attempt in range(3):  # the first fill of a buffer pays for its pages
        ring.take(tree, attempt, attempt, {})
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(3, 3 + rounds):
            found["plain copy"].append(seconds(lambda: twin.copy_(flat)))
            found["snapshot"].append(seconds(lambda a=attempt: ring.take(tree, a, a, {})))  # type: ignore[misc]
            found["restore"].append(seconds(lambda: ring.restore(ring.snapshots[-1], tree)))
            if attempt < 6:
                found["torch.save"].append(seconds(lambda: torch.save(tree, Path(folder) / "x.pt")))
    return {name: statistics.median(values) for name, values in found.items()} | {"bytes": float(tree_bytes(tree))}


def back_to_training() -> dict[str, float]:
    """Return seconds of a rollback in process and of a restart from the checkpoint on disk, for the smoke run."""
    config = str(Path(__file__).parent.parent / "configs" / "smoke.yaml")
    environment = os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "experiments", "fit", "-c", config, "--trainer.default_root_dir", folder,
                "--checkpoint.dirpath", f"{folder}/checkpoints", "--trainer.logger", "false"]  # fmt: skip
        subprocess.run(argv, env=environment, capture_output=True, check=True, timeout=300)
        report = next(Path(folder).glob("episodes/*/report.json"))
        rollback = json.loads(report.read_text())["rollback"]["seconds"]
        again = [*argv, "--ckpt_path", f"{folder}/checkpoints/last.ckpt", "--model.optimizer.total_steps", "61",
                 "--fault_injection.at_batch", "-1"]  # fmt: skip
        restart = seconds(lambda: subprocess.run(again, env=environment, capture_output=True, check=True, timeout=300))
    return {"rollback": rollback, "restart": restart}


def print_table(result: dict[str, Any]) -> None:
    """Print what was measured, as ratios."""
    for name, row in result["cost"].items():
        ours = row["guard"] + row["gradient norms"]
        print(f"{name}: step {row['step']:.1f} ms; guard {row['guard']:.3f} ms + norms {row['gradient norms']:.3f} ms "
              f"= {100 * ours / row['step']:.2f} % of the step; SpikeDetection {row['SpikeDetection']:.3f} ms; "
              f"guard / SpikeDetection {row['guard'] / row['SpikeDetection']:.2f}")  # fmt: skip
    for name, row in result["copies"].items():
        print(f"{name} ({row['bytes'] / 1e9:.2f} GB): snapshot {row['snapshot'] / row['plain copy']:.2f}, restore "
              f"{row['restore'] / row['plain copy']:.2f}, torch.save {row['torch.save'] / row['plain copy']:.1f} "
              f"times a plain copy of the same bytes ({row['plain copy']:.3f} s)")  # fmt: skip
    back = result["back"]
    print(f"back to training: rollback {back['rollback']:.3f} s, restart from disk {back['restart']:.1f} s, "
          f"{back['restart'] / back['rollback']:.0f} times")  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m experiments bench guard", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--rounds", type=int, default=9, help="repeats of each copy (default 9)")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        row = cost_per_step("small", args.child, devices=2)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print("RESULT " + json.dumps(row), flush=True)
        return 0
    sizes = ["small"] if args.quick else ["small", "95M"]
    result: dict[str, Any] = {"cost": {}, "copies": {}}
    for size in sizes:
        result["cost"][f"{size}, one process"] = cost_per_step(size, 60 if size == "small" else 10)
    result["cost"]["small, two gloo ranks"] = two_ranks(60)
    for size in sizes:
        result["copies"][size] = copies(size, args.rounds)
    result["back"] = back_to_training()
    print_table(result)
    if args.json:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
