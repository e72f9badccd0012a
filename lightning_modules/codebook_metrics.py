"""Bits and accuracy per codebook as one torchmetrics metric, pooled over batches and ranks by masked frames."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_modules.losses import nats_to_bits


class CodebookMetric(Metric):
    """Mean bits and accuracy of each codebook over all masked frames seen.

    Args:
        num_codebooks: K.
    """

    full_state_update = False
    nats_K: Tensor
    correct_K: Tensor
    frames: Tensor

    def __init__(self, num_codebooks: int) -> None:
        super().__init__()
        self.add_state("nats_K", torch.zeros(num_codebooks, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("correct_K", torch.zeros(num_codebooks, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("frames", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats_K: Tensor, correct_K: Tensor, frames: int) -> None:
        """Add the sums of one batch over its ``frames`` masked frames."""
        self.nats_K += nats_K.detach().double()
        self.correct_K += correct_K.detach().double()
        self.frames += frames

    def compute(self) -> dict[str, Tensor]:
        """Return ``loss`` (nats, summed over codebooks), ``bits_codebook_k`` and ``accuracy_codebook_k``."""
        frames = self.frames.clamp(min=1)
        nats_K, accuracy_K = (self.nats_K / frames).float(), (self.correct_K / frames).float()
        values = {"loss": nats_K.sum()}
        for k in range(len(nats_K)):
            values[f"bits_codebook_{k}"] = nats_to_bits(nats_K[k])
            values[f"accuracy_codebook_{k}"] = accuracy_K[k]
        return values
