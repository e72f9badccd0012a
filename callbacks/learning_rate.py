"""Scale the learning rate of one optimizer step and put it back, whatever scheduler is in charge."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def scale_next_step(optimizer: Optimizer, factor: float) -> None:
    """Multiply every group's learning rate by ``factor`` for the step about to be taken.

    Call it from ``on_before_optimizer_step``: the optimizer reads its groups after that hook. The rates are put back
    right after the update, before any scheduler looks at them.
    """
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor

    def put_back(*_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
        handle.remove()

    handle = optimizer.register_step_post_hook(put_back)
