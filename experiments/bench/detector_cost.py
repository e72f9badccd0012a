"""Microseconds a step of the detector, next to Lightning's SpikeDetection in the same run."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from callbacks.detector import Detector


def _loss(seed: int, steps: int) -> list[float]:
    draw = np.random.default_rng(seed)
    step = np.arange(steps)
    loss = 3.0 + 7.0 * np.exp(-step / 800.0) + 0.05 * draw.standard_normal(steps)
    return [float(value) for value in loss]


def _time_ours(losses: list[float], norms: list[float] | None) -> float:
    detector = Detector()
    rows: list[dict[str, float]] = [{"loss": value} for value in losses]
    if norms is not None:
        rows = [row | {"grad_norm": norm} for row, norm in zip(rows, norms, strict=True)]
    start = time.perf_counter()
    for step, row in enumerate(rows):
        detector.update(step, row)
    return (time.perf_counter() - start) / len(losses) * 1e6


class _OneProcess:
    """The part of a Fabric object that SpikeDetection uses, for one process: no collective, so its least cost."""

    global_rank = 0
    root_device = torch.device("cpu")

    @property
    def strategy(self) -> "_OneProcess":
        return self

    def barrier(self) -> None:
        return

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


def _time_lightning(losses: list[float]) -> float:
    from lightning.fabric.utilities.spike import SpikeDetection

    detector, fabric = SpikeDetection(), _OneProcess()
    tensors = [torch.tensor(value) for value in losses]
    start = time.perf_counter()
    for step, loss in enumerate(tensors):
        detector.on_train_batch_end(fabric, loss, None, step)  # type: ignore[arg-type]
    return (time.perf_counter() - start) / len(losses) * 1e6


def microseconds(repeats: int, steps: int = 4000) -> dict[str, Any]:
    """Return the median microseconds a step of each, from interleaved repeats.

    Args:
        repeats: how often each is timed.
        steps: steps of each timing.
    """
    draw = np.random.default_rng(0)
    norms = [float(value) for value in np.exp(0.2 * draw.standard_normal(steps))]
    timers: dict[str, Callable[[list[float]], float]] = {
        "Ballast, loss": lambda losses: _time_ours(losses, None),
        "Ballast, loss and gradient norm": lambda losses: _time_ours(losses, norms),
        "Lightning SpikeDetection": _time_lightning,
    }
    times: dict[str, list[float]] = {name: [] for name in timers}
    for repeat in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer(_loss(repeat, steps)))
    return {name: statistics.median(values) for name, values in times.items()}
