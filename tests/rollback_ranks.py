"""Script for two ranks: a fault on rank 1, its rollback on both, and the run that never saw it; prints what differs."""

from __future__ import annotations

import argparse
from pathlib import Path

import guard_runs as runs
import torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--scheme", default="pre")
    parser.add_argument("--data", default="advance")
    parser.add_argument("--lag", type=int, default=0)
    args = parser.parse_args()
    options = {
        "devices": 2,
        "accumulate": args.accumulate,
        "workers": args.workers,
        "scheme": args.scheme,
        "data": args.data,
        "steps": 20,
        "lag": args.lag,
    }
    trainer, losses, guard = runs.train(
        args.folder / "fault",
        fault_at=13 * args.accumulate,
        kind="loss_scale",
        factor=-1e4,
        rank=1,
        script={15: 14},
        **options,
    )
    mine = runs.everything(trainer)
    sums = torch.stack([v.double().sum() for v in mine["weights"].values()])
    everyone = [torch.zeros_like(sums) for _ in range(2)]
    torch.distributed.all_gather(everyone, sums)
    clean, clean_losses, _ = runs.train(args.folder / "clean", skip=guard.rollback.skipped, script={}, **options)
    different = runs.differences(mine, runs.everything(clean))
    print(
        f"RANK {trainer.global_rank} rollbacks={guard.counts['rollbacks']} skipped={guard.rollback.skipped} "
        f"equal_ranks={torch.equal(everyone[0], everyone[1])} losses={losses.by_step == clean_losses.by_step} "
        f"different={different[:3]}",
        flush=True,
    )
