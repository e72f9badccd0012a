"""Scale the learning rate of one optimizer step and put it back, whatever scheduler is in charge."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

# Optimizer -> (learning rates before, learning rates scaled), while a scaled step is due.
_pending: WeakKeyDictionary[Optimizer, tuple[list[float], list[float]] | None] = WeakKeyDictionary()


def scale_next_step(optimizer: Optimizer, factor: float) -> None:
    """Multiply every group's learning rate by ``factor`` for the step about to be taken; several calls multiply.

    Call it from ``on_before_optimizer_step``: the optimizer reads its groups after that hook. The rates are put back
    right after the update, before any scheduler looks at them. Where a gradient scaler may skip the step, call
    `put_back` once it is over.
    """
    if optimizer not in _pending:  # one hook for good: hooks must not come and go while they run
        optimizer.register_step_post_hook(lambda *_: put_back(optimizer))
    now = [group["lr"] for group in optimizer.param_groups]
    known = _pending.get(optimizer)
    before = known[0] if known is not None and known[1] == now else now
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    _pending[optimizer] = (before, [group["lr"] for group in optimizer.param_groups])


def put_back(optimizer: Optimizer, *_: Any) -> None:
    """Undo a scaling that is due; rates that something else has set meanwhile are left alone."""
    known = _pending.get(optimizer)
    if known is None:
        return
    for group, before, scaled in zip(optimizer.param_groups, *known, strict=True):
        if group["lr"] == scaled:
            group["lr"] = before
    _pending[optimizer] = None
