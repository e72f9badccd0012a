"""The numbers every rank decides on: one packed all-reduce per optimizer step, read on the host without a sync.

A step's losses arrive per micro-batch and per rank as (sum, count); decisions need their global ratio, and a report
needs to know which rank was bad. Everything a step needs travels in one small vector. With one rank there is no
collective; on an accelerator the host reads it one step late, from pinned memory.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

EXTRAS = 4  # gradient norm, vetoed, snapshot seconds, step seconds


@dataclass
class StepReport:
    """One optimizer step as all ranks see it.

    Attributes:
        attempt: attempted optimizer steps before this one (the loggers' step of this one).
        step: accepted optimizer steps after this one.
        value: the monitored metric, averaged over all micro-batches and ranks by their counts; NaN without counts.
        rank_values: the same, rank by rank.
        gradient_norm: norm before clipping, the same on all ranks; NaN where none was computed.
        vetoed: whether the update was refused on the device.
        snapshot_seconds, step_seconds: the ranks' mean cost of the last snapshot and of a step.
        batches: what the step was trained on, micro-batch by micro-batch, as the guard recorded it on this rank.
    """

    attempt: int
    step: int
    value: float
    rank_values: list[float]
    gradient_norm: float
    vetoed: bool
    snapshot_seconds: float
    step_seconds: float
    batches: list[Any] = field(default_factory=list, repr=False)


class StepSums:
    """Accumulate (sum, count) over micro-batches, reduce over ranks, hand out `StepReport`s in order.

    Args:
        lag: 0 reads each step's vector at once; 1 reads it when the next step is pushed, so that nothing waits.
    """

    def __init__(self, lag: int = 0) -> None:
        if lag not in (0, 1):
            raise ValueError(f"lag={lag}: choose from 0, 1")
        self.lag = lag
        self.sum: Tensor | None = None
        self.count: Tensor | None = None
        self._waiting: deque[tuple[Tensor, Any, dict[str, Any]]] = deque()

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add one micro-batch of this rank. Both are scalars; kept on their device in fp32."""
        total, count = total.detach().float(), count.detach().float()
        self.sum = total if self.sum is None else self.sum + total
        self.count = count if self.count is None else self.count + count

    def push(self, extras: list[Tensor | float], context: dict[str, Any]) -> StepReport | None:
        """Close the step: reduce, start the copy to the host, and return the report that is due, if any.

        Args:
            extras: `EXTRAS` scalars. The first two are equal on all ranks, the others are averaged.
            context: the remaining fields of the report.
        """
        assert len(extras) == EXTRAS
        assert self.sum is not None
        assert self.count is not None
        device = self.sum.device
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        packed = torch.zeros(2 * world + EXTRAS, device=device)
        rank = dist.get_rank() if world > 1 else 0
        packed[2 * rank], packed[2 * rank + 1] = self.sum, self.count
        for i, extra in enumerate(extras):
            packed[2 * world + i] = extra / world
        work = None
        if world > 1:
            # Off the critical path: ranks that are a little apart need not meet here, only one step later.
            work = dist.all_reduce(packed, async_op=packed.device.type == "cpu" and self.lag > 0)
        self.sum = self.count = None
        self._waiting.append((*self._to_host(packed, work), context))
        return self._pop() if len(self._waiting) > self.lag else None

    @staticmethod
    def _to_host(packed: Tensor, work: Any) -> tuple[Tensor, Any]:
        if packed.device.type != "cuda":
            return packed, work
        host = torch.empty(packed.shape, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event

    def _pop(self) -> StepReport:
        host, event, context = self._waiting.popleft()
        self._wait(event)
        numbers: list[float] = host.tolist()
        pairs, extras = numbers[:-EXTRAS], numbers[-EXTRAS:]
        sums, counts = pairs[0::2], pairs[1::2]
        return StepReport(
            value=sum(sums) / sum(counts) if sum(counts) > 0 else math.nan,
            rank_values=[s / c if c > 0 else math.nan for s, c in zip(sums, counts, strict=True)],
            gradient_norm=extras[0],
            vetoed=extras[1] > 0.5,
            snapshot_seconds=extras[2],
            step_seconds=extras[3],
            **context,
        )

    def drain(self) -> list[StepReport]:
        """Return the reports not yet handed out, in order."""
        return [self._pop() for _ in range(len(self._waiting))]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the reports in flight as plain values: a run that goes on elsewhere must judge them, too."""
        rows = []
        for host, event, context in self._waiting:
            self._wait(event)
            rows.append({"numbers": host.tolist(), "attempt": context["attempt"], "step": context["step"]})
        return rows

    def load_state_dict(self, rows: list[dict[str, Any]]) -> None:
        """Put reports in flight back, without the batches they came from."""
        self.clear()
        for row in rows:
            context = {"attempt": row["attempt"], "step": row["step"]}
            self._waiting.append((torch.tensor(row["numbers"]), None, context))

    @staticmethod
    def _wait(event: Any) -> None:
        if event is not None:
            event.synchronize() if isinstance(event, torch.cuda.Event) else event.wait()

    def clear(self) -> None:
        """Forget the micro-batches and reports in flight: they belong to a rejected trajectory."""
        self.sum = self.count = None
        while self._waiting:
            self._pop()  # a collective in flight is waited for: its buffer must not be freed under it
