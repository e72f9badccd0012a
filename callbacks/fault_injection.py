"""Faults for drills: declared in a config, tied to a place in the data, and visible in the log.

A fault is tied to global batch numbers, not to steps: once the data has moved past it, or it is skipped, it cannot
come back, which is how a bad stretch of data or a glitch of a node behaves under a rollback.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks.learning_rate import scale_next_step

Kind = Literal["learning_rate", "loss_scale", "non_finite", "random_codes"]
KINDS: tuple[Kind, ...] = ("learning_rate", "loss_scale", "non_finite", "random_codes")


class FaultInjection(Callback):
    """Inject one fault into global batches ``[at_batch, at_batch + num_batches)``.

    Args:
        at_batch: first global batch number that is hit; -1 injects nothing.
        num_batches: how many batches in a row are hit.
        kind: ``learning_rate`` multiplies the learning rate of those updates by ``factor``; ``loss_scale`` multiplies
            the loss before backward, and what the step reports of it; ``non_finite`` makes both NaN; ``random_codes``
            replaces the batch's codes by uniform noise.
        factor: size of the fault, for the two kinds that have one.
        rank: the only rank that is hit, or None for all. The learning rate is the same on all ranks by construction,
            so ``learning_rate`` refuses a rank.

    Raises:
        ValueError: for an unknown kind or a number out of range.
    """

    def __init__(
        self,
        at_batch: int = -1,
        num_batches: int = 1,
        kind: Kind = "learning_rate",
        factor: float = 100.0,
        rank: int | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"fault_injection.kind={kind!r}: choose from {', '.join(KINDS)}")
        if num_batches < 1 or not math.isfinite(factor):
            raise ValueError(
                f"fault_injection: num_batches={num_batches} must be at least 1 and factor={factor} finite"
            )
        if kind == "learning_rate" and rank is not None:
            raise ValueError(
                f"fault_injection.rank={rank}: a learning-rate fault on one rank would tear the weights apart"
            )
        self.at_batch, self.num_batches, self.kind, self.factor, self.rank = at_batch, num_batches, kind, factor, rank
        self._hit = False

    def _is_hit(self, trainer: Trainer, batch: Any, batch_idx: int) -> bool:
        if self.at_batch < 0 or (self.rank is not None and trainer.global_rank != self.rank):
            return False
        number = batch.get("batch_number", batch_idx) if isinstance(batch, dict) else batch_idx
        return self.at_batch <= int(number) < self.at_batch + self.num_batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Decide whether this batch is hit; corrupt its codes where that is the fault."""
        self._hit = self._is_hit(trainer, batch, batch_idx)
        if not self._hit:
            return
        number = batch.get("batch_number", batch_idx) if isinstance(batch, dict) else batch_idx
        rank_zero_warn(f"fault injection ({self.kind}) at batch {number}: this is a drill, declared in the config")
        if self.kind == "random_codes":
            codes: Tensor = batch["codes"]
            generator = torch.Generator().manual_seed(int(batch.get("batch_number", batch_idx)))
            noise = torch.randint(0, int(codes.max()) + 1, codes.shape, generator=generator)
            codes.copy_(noise)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Scale the loss in place, which scales every gradient of this rank before they are averaged."""
        if self._hit and self.kind in ("loss_scale", "non_finite"):
            loss.mul_(math.nan if self.kind == "non_finite" else self.factor)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Scale the reported sums as the loss was: this callback stands before the guard."""
        if self._hit and self.kind in ("loss_scale", "non_finite") and isinstance(outputs, dict):
            factor = math.nan if self.kind == "non_finite" else self.factor
            sums = outputs.get("sums", {})
            outputs["sums"] = {name: (total * factor, count) for name, (total, count) in sums.items()}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Scale this update's learning rate."""
        if self._hit and self.kind == "learning_rate":
            scale_next_step(optimizer, self.factor)
