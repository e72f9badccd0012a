"""Script for two ranks with sharded parameters (FSDP2): rolled back, compared with the run that never saw the batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from guard_runs import ScriptedDetector
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from callbacks.spike_guard import SpikeGuard


class Sharded(LightningModule):
    def __init__(self, rows: Tensor, bad: int) -> None:
        super().__init__()
        self.rows = rows
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.seen, self.bad = 0, bad

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean() + 1
        loss = loss * 1e3 if self.seen == self.bad else loss
        self.seen += 1
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.rows[self.global_rank :: 2]), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: Path, rows: Tensor, script: dict[int, int], bad: int) -> tuple[Trainer, SpikeGuard]:
    seed_everything(1)
    guard = SpikeGuard(
        monitor="loss", snapshot_every=4, healthy_steps=2, onset_margin=1, lag=0, dirpath=str(folder / "episodes")
    )
    guard.detector = ScriptedDetector(script)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=20, use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[guard],
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Sharded(rows, bad))
    return trainer, guard


def state(trainer: Trainer) -> list[Tensor]:
    optimizer = trainer.optimizers[0]
    parameters = list(trainer.lightning_module.parameters())
    assert all(hasattr(p, "to_local") for p in parameters)
    moments = [v for p in parameters for v in optimizer.state[p].values()]
    return [t.to_local() if hasattr(t, "to_local") else t for t in (*parameters, *moments)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    # Batches 12 to 15 are passed by; each takes 8 rows, 4 on each rank.
    faulty, guard = train(args.folder / "fault", rows, {15: 14}, bad=13)
    norms = [r.gradient_norm for r in guard.history]
    clean, clean_guard = train(args.folder / "clean", torch.cat([rows[:96], rows[128:]]), {}, bad=-1)
    kept = norms[:12] + norms[16:]
    equal = all(torch.equal(a, b) for a, b in zip(state(faulty), state(clean), strict=True))
    same_norms = kept == [r.gradient_norm for r in clean_guard.history]
    print(f"RANK {faulty.global_rank} rollbacks={guard.counts['rollbacks']} equal={equal} norms={same_norms}", flush=True)
