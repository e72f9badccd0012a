"""Refuse an optimizer update: weights, moments and the optimizer's step count stay as they are.

A fused torch optimizer skips its whole update when its ``found_inf`` attribute is a tensor holding 1, on CPU and CUDA
alike, so the decision never leaves the device (torch/optim/adamw.py reads the attribute after the closure). Other
optimizers need the answer on the host: their gradients are set to None. Zeroed gradients would still move the weights,
through momentum and decay.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether all of the optimizer's groups use the fused kernel that honours ``found_inf``."""
    return all(group.get("fused") for group in optimizer.param_groups)


@torch.no_grad()
def refuse(optimizer: Optimizer, norm: Tensor, limit: float, scaler: Any | None = None) -> Tensor:
    """Refuse the update about to be taken if its gradient norm is out of range.

    Args:
        optimizer: the raw torch optimizer.
        norm: gradient norm before clipping, a device scalar, equal on all ranks.
        limit: largest norm that is accepted; infinity accepts all finite ones.
        scaler: the gradient scaler in charge, which skips non-finite updates itself and counts them.

    Returns:
        1.0 where refused, else 0.0, as a device scalar.
    """
    finite = norm.isfinite()
    refused = ~finite if scaler is None else torch.zeros_like(finite)
    if math.isfinite(limit):
        refused = refused | (finite & (norm > limit))
    if is_fused(optimizer):
        optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
    elif bool(refused):  # a host sync: the price of an optimizer that is not fused
        optimizer.zero_grad(set_to_none=True)
    return refused.float()
