"""Gradient norms before and after clipping, in total and per block, computed once per optimizer step without a sync.

The norm is left on the module as ``gradient_norm_total`` (a device scalar), so that clipping, veto and log all use the
same number. Parameters are grouped by the first number in their name (``encoder.blocks.3.attention.qkv`` -> block_03);
what has none is grouped by ``embedding``, ``heads`` or ``other``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from callbacks.snapshots import local

NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def group_of(name: str) -> str:
    """Return the panel a parameter belongs to.

    >>> group_of("encoder.blocks.3.attention.qkv.weight"), group_of("heads.weight")
    ('block_03', 'heads')
    """
    for word in ("head", "embed"):
        if word in name:
            return {"head": "heads", "embed": "embedding"}[word]
    found = NUMBER.search(name)
    return f"block_{int(found[1]):02d}" if found else "other"


class GroupedNorms:
    """Norms of the gradients of named parameters, total and per group, as one small device tensor.

    Args:
        parameters: ``(name, parameter)`` pairs; frozen ones are left out. The squares of sharded ones (DTensor) are
            summed over ranks.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        named = [(name, p) for name, p in parameters if p.requires_grad]
        self.parameters = [p for _, p in named]
        groups = [group_of(name) for name, _ in named]
        self.names = sorted(set(groups))
        order = {name: i for i, name in enumerate(self.names)}
        self._group_index = [order[g] for g in groups]
        self.sharded = any(hasattr(p, "to_local") for p in self.parameters)
        self._index: tuple[list[int], Tensor] | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return ``[1 + G]`` norms in fp32: total first, then one per name in ``names``. No host sync."""
        pairs = [
            (local(p.grad), i) for p, i in zip(self.parameters, self._group_index, strict=True) if p.grad is not None
        ]
        if not pairs:
            return torch.zeros(1 + len(self.names))
        device = pairs[0][0].device
        norms = torch.stack([n.to(device, torch.float32) for n in torch._foreach_norm([g for g, _ in pairs])])
        squares = torch.zeros(1 + len(self.names), device=device)
        squares.index_add_(0, self._index_on(device, [1 + i for _, i in pairs]), norms.square())
        squares[0] = squares[1:].sum()
        if self.sharded:
            torch.distributed.all_reduce(squares)
        return squares.sqrt()

    def _index_on(self, device: torch.device, groups: list[int]) -> Tensor:
        # Kept on the device: copying a list there at every step would wait for the queue to drain.
        if self._index is None or self._index[0] != groups or self._index[1].device != device:
            self._index = (groups, torch.tensor(groups, device=device))
        return self._index[1]


class GradientNorms(Callback):
    """Log ``grad_norm/total``, ``grad_norm/clipped`` and ``grad_norm/<group>`` every ``every_n_steps`` optimizer steps.

    Args:
        every_n_steps: logging interval in optimizer steps; the norms themselves are computed at every step.
        history: how many steps of per-group norms are kept for an episode's heat map.

    Raises:
        ValueError: if an argument is not positive.
    """

    def __init__(self, every_n_steps: int = 10, history: int = 200) -> None:
        if every_n_steps < 1 or history < 1:
            raise ValueError(f"gradient_norms: every_n_steps={every_n_steps} and history={history} must be at least 1")
        self.every_n_steps = every_n_steps
        self.norms: GroupedNorms | None = None
        self.history: deque[tuple[int, Tensor]] = deque(maxlen=history)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Group the parameters once."""
        self.norms = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Compute the norms of the accumulated, unscaled, unclipped gradients."""
        if self.norms is None:  # here, not earlier: sharding strategies replace parameters after `on_fit_start`
            self.norms = GroupedNorms(pl_module.named_parameters())
        values = self.norms()
        pl_module.gradient_norm_total = values[0]
        self.history.append((trainer.fit_loop.epoch_loop._batches_that_stepped, values[1:]))
        # Counted as Lightning counts its log steps, so that norms and losses stand in one row.
        if (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % self.every_n_steps == 0:
            self._log(trainer, pl_module, values)

    def _log(self, trainer: Trainer, pl_module: LightningModule, values: Tensor) -> None:
        assert self.norms is not None
        rows: dict[str, Any] = {f"grad_norm/{name}": values[1 + i] for i, name in enumerate(self.norms.names)}
        rows["grad_norm/total"] = values[0]
        limit = float(trainer.gradient_clip_val or 0.0)
        by_norm = trainer.gradient_clip_algorithm in (None, "norm")
        rows["grad_norm/clipped"] = values[0].clamp(max=limit) if limit > 0 and by_norm else values[0]
        pl_module.log_dict(rows, on_step=True, on_epoch=False)

    def heat_map(self) -> tuple[list[str], list[int], list[list[float]]]:
        """Return ``(group names, attempted steps [S], norms [S][G])`` of the steps kept. Reads from the device."""
        if self.norms is None or not self.history:
            return [], [], []
        steps = [step for step, _ in self.history]
        table: list[list[float]] = torch.stack([v for _, v in self.history]).tolist()
        return self.norms.names, steps, table
