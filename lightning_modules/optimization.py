"""The optimizer's options and its schedule, as one dataclass; MERT's values are the defaults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_modules.schedules import Schedule, schedule_factor


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW over all parameters, norms and biases included as in fairseq, with a schedule counted in accepted steps.

    Args:
        lr: peak learning rate.
        betas: Adam's two decay rates.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay, on every parameter.
        schedule: shape after warm-up: linear, cosine or constant.
        warmup_steps: optimizer steps from 0 to the peak.
        total_steps: optimizer steps until the decay ends. Taken from here, never from the trainer: asking Lightning
            for its estimate makes it forget the position of a resumed stream.
        fused: use the fused kernel, which can also refuse an update on the device.

    Raises:
        ValueError: for a number out of range.
    """

    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 0.01
    schedule: Schedule = "linear"
    warmup_steps: int = 32_000
    total_steps: int = 400_000
    fused: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.eps <= 0 or self.weight_decay < 0:
            raise ValueError(
                f"model.optimizer: lr={self.lr} and eps={self.eps} must be above 0, "
                f"weight_decay={self.weight_decay} not below"
            )
        schedule_factor(0, schedule=self.schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps)

    def build(self, parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.AdamW, LambdaLR]:
        """Return the optimizer and its per-step schedule."""
        optimizer = torch.optim.AdamW(
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, fused=self.fused
        )
        factor = partial(
            schedule_factor, schedule=self.schedule, warmup_steps=self.warmup_steps, total_steps=self.total_steps
        )
        return optimizer, LambdaLR(optimizer, factor)
