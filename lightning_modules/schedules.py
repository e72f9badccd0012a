"""Learning-rate schedules: pure functions from the accepted step to a factor on the peak learning rate."""

import math
from typing import Literal

__all__ = ["Schedule", "schedule_factor"]

Schedule = Literal["linear", "cosine", "constant"]


def schedule_factor(
    step: int,
    *,
    schedule: Schedule = "linear",
    warmup_steps: int = 0,
    total_steps: int,
    end_factor: float = 0.0,
    power: float = 1.0,
) -> float:
    """Factor on the peak learning rate at a step.

    Linear warm-up from 0 over ``warmup_steps``; then ``linear`` decays as ``(1 - progress)^power`` to ``end_factor``
    at ``total_steps`` (fairseq ``polynomial_decay_schedule.py``; MERT: 32 000, 400 000, power 1, end 0), ``cosine``
    as half a cosine (arXiv 1608.03983, eq. 5), ``constant`` not at all. Beyond ``total_steps`` the last value stays.

    Args:
        step: Optimizer steps taken, 0 or more.
        schedule: ``linear``, ``cosine`` or ``constant``.
        warmup_steps: Steps of warm-up.
        total_steps: Step at which the decay ends.
        end_factor: Factor at the end of the decay.
        power: Exponent of the linear decay.

    Raises:
        ValueError: Unknown schedule, negative warm-up, or a decay that ends before the warm-up does.
    """
    if schedule not in ("linear", "cosine", "constant"):
        raise ValueError(f"schedule={schedule!r} is unknown; choose from linear, cosine, constant")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} is out of range; it must be 0 or more")
    if schedule != "constant" and total_steps <= warmup_steps:
        raise ValueError(f"total_steps={total_steps} is out of range; it must be above warmup_steps={warmup_steps}")
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    shape = (1.0 - progress) ** power if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return end_factor + (1.0 - end_factor) * shape
