"""Compare the weights of all ranks now and then: ranks that have drifted apart train on without a word.

One small all-gather every ``every_n_steps`` optimizer steps, on all ranks; with one rank nothing is done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


def first_difference(names: list[str], sums: list[Tensor]) -> str | None:
    """Return the first tensor whose checksum is not the same on all ranks, and how it differs; None if all agree.

    Args:
        names: one per tensor.
        sums: one vector per rank, a checksum per tensor. NaN equals NaN: every rank has it.
    """
    table = torch.stack(sums).nan_to_num(nan=0.0, posinf=1e300, neginf=-1e300)
    differs = (table != table[0]).any(dim=0)
    if not bool(differs.any()):
        return None
    index = int(differs.int().argmax())
    values = ", ".join(f"rank {rank} {float(row[index]):.9g}" for rank, row in enumerate(table))
    return f"{names[index]} ({values})"


class RankChecksums(Callback):
    """Stop the run, on all ranks, when the weights differ between ranks.

    Args:
        every_n_steps: interval in optimizer steps; 0 turns it off.

    Raises:
        ValueError: if the interval is negative.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        if every_n_steps < 0:
            raise ValueError(f"rank_checksums.every_n_steps={every_n_steps}: must not be negative")
        self.every_n_steps = every_n_steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Compare, on the steps that are due; a step decides this, never a rank."""
        due = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if not due or trainer.world_size == 1 or trainer.fit_loop._should_accumulate():
            return
        named = [(name, p) for name, p in pl_module.named_parameters() if not hasattr(p, "to_local")]
        if not named:  # sharded parameters differ between ranks by design
            return
        mine = torch.stack([p.detach().double().sum() for _, p in named])
        everyone = [torch.zeros_like(mine) for _ in range(trainer.world_size)]
        dist.all_gather(everyone, mine)
        found = first_difference([name for name, _ in named], everyone)
        if found is not None:
            raise ValueError(f"the ranks' weights differ after step {trainer.global_step}, first in {found}")
