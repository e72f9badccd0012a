"""A ring of preallocated copies of a set of named tensors: the states a run can be put back to.

Torch only; it knows nothing of trainers. A snapshot is taken with one foreach copy into buffers allocated once, and
becomes a rollback target only when it was marked good: health is earned by the steps that follow it.
Legend: a *tree* is ``dict[str, Tensor]`` of live tensors, in any order; values are copied, never the references.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank owns: the local shard of a DTensor, else the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def tree_bytes(tree: Mapping[str, Tensor]) -> int:
    """Return the bytes that one snapshot of ``tree`` needs on this rank."""
    return sum(local(t).numel() * local(t).element_size() for t in tree.values())


@torch.no_grad()
def copy_tensors(destination: list[Tensor], source: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy ``source[i]`` into ``destination[i]`` for all i, in as few kernels as the dtypes allow."""
    if destination:
        torch._foreach_copy_(destination, source, non_blocking=non_blocking)


@dataclass
class Snapshot:
    """One slot of the ring.

    Attributes:
        step: accepted optimizer steps at the time it was taken.
        attempt: attempted optimizer steps at that time; this count never goes back.
        plain: everything that is not a tensor of the tree (counters, schedules, random states), owned by the snapshot.
        good: whether enough healthy steps have followed it.
    """

    step: int
    attempt: int
    plain: dict[str, Any]
    good: bool = False
    buffers: dict[str, Tensor] = field(default_factory=dict, repr=False)


class SnapshotRing:
    """Keep the newest ``slots`` snapshots; buffers are reused, so memory is constant after the ring has filled once.

    Args:
        slots: how many snapshots are kept (at least 2: the newest is rarely old enough to be a target).
        pin: page-lock the buffers, so that copies from an accelerator do not block.

    Raises:
        ValueError: if ``slots`` is below 2.
    """

    def __init__(self, slots: int = 3, *, pin: bool = False) -> None:
        if slots < 2:
            raise ValueError(
                f"ring_slots={slots}: a ring needs at least 2 snapshots, since the newest has not earned trust"
            )
        self.slots = slots
        self.pin = pin
        self.snapshots: list[Snapshot] = []  # oldest first
        self.last_seconds = 0.0
        self._free: list[dict[str, Tensor]] = []
        self._stream: torch.cuda.Stream | None = None
        self._events: tuple[Any, Any] | None = None
        self._copied = 0.0

    def take(self, tree: Mapping[str, Tensor], step: int, attempt: int, plain: dict[str, Any]) -> Snapshot:
        """Copy ``tree`` into a slot (the oldest one's, once the ring is full) and return the snapshot.

        On an accelerator the copy runs on a side stream without blocking the host. The current stream waits for it:
        buffers and averaged models change before the next optimizer step does.
        """
        begin = time.perf_counter()
        while len(self.snapshots) >= self.slots:
            self._release(self.snapshots[self._expendable()])
        buffers = self._free.pop() if self._free else {}
        sources = {name: local(tensor) for name, tensor in tree.items()}
        buffers = {name: self._buffer(buffers.get(name), tensor) for name, tensor in sources.items()}
        self._copy(list(buffers.values()), list(sources.values()))
        snapshot = Snapshot(step, attempt, plain, buffers=buffers)
        self.snapshots.append(snapshot)
        self.last_seconds = max(time.perf_counter() - begin, self._device_seconds())
        return snapshot

    def _device_seconds(self) -> float:
        """Seconds of the last copy on the device that is known to be over; enqueueing it takes next to nothing."""
        if self._events is not None and self._events[1].query():
            self._copied = 1e-3 * self._events[0].elapsed_time(self._events[1])
        return self._copied

    def _expendable(self) -> int:
        # The oldest goes when a newer one has proved itself; else the newest unproven one, so that the others can age:
        # with frequent snapshots every one would be pushed out before it had earned trust.
        return 0 if sum(snapshot.good for snapshot in self.snapshots) > 1 else len(self.snapshots) - 1

    def _release(self, snapshot: Snapshot) -> None:
        self.snapshots.remove(snapshot)
        self._free.append(snapshot.buffers)

    def _buffer(self, old: Tensor | None, like: Tensor) -> Tensor:
        if old is not None and old.shape == like.shape and old.dtype == like.dtype:
            return old
        pin = self.pin and like.device.type == "cuda"
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin)

    def _copy(self, buffers: list[Tensor], sources: list[Tensor]) -> None:
        devices = {t.device for t in sources if t.device.type == "cuda"}
        if not devices:
            copy_tensors(buffers, sources)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(devices)))  # type: ignore[no-untyped-call]
        self._device_seconds()
        self._stream.wait_stream(torch.cuda.current_stream())
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            copy_tensors(buffers, sources, non_blocking=True)
            end.record()
        self._events = (begin, end)
        torch.cuda.current_stream().wait_stream(self._stream)

    def restore(self, snapshot: Snapshot, tree: Mapping[str, Tensor]) -> None:
        """Copy the snapshot back into the live tensors, in place.

        Raises:
            ValueError: if the live tree lacks a tensor of the snapshot or holds one that the snapshot does not know.
        """
        missing, extra = snapshot.buffers.keys() - tree.keys(), tree.keys() - snapshot.buffers.keys()
        if missing or extra:
            raise ValueError(
                f"the run's tensors changed since the snapshot of step {snapshot.step}: "
                f"missing {sorted(missing)[:3]}, new {sorted(extra)[:3]}"
            )
        if self._stream is not None:
            self._stream.synchronize()
        names = list(snapshot.buffers)
        copy_tensors([local(tree[name]) for name in names], [snapshot.buffers[name] for name in names])

    def mark_good(self, up_to_attempt: int) -> None:
        """Mark every snapshot taken at or before attempted step ``up_to_attempt`` as known good."""
        for snapshot in self.snapshots:
            if snapshot.attempt <= up_to_attempt:
                snapshot.good = True

    def newest_good(self, before_attempt: int) -> Snapshot | None:
        """Return the newest known-good snapshot taken before attempted step ``before_attempt``, or None."""
        found = [s for s in self.snapshots if s.good and s.attempt < before_attempt]
        return found[-1] if found else None

    def drop_newer(self, attempt: int) -> None:
        """Forget the snapshots taken after attempted step ``attempt``: they hold a rejected trajectory."""
        for snapshot in [s for s in self.snapshots if s.attempt > attempt]:
            self._release(snapshot)


def host_memory_needed(tensors: Iterable[Tensor], slots: int, ranks_on_host: int, optimizer_states: int = 2) -> int:
    """Return the host bytes a ring will take: parameters plus ``optimizer_states`` moments each, per slot and rank."""
    parameters = sum(local(t).numel() * local(t).element_size() for t in tensors)
    return parameters * (1 + optimizer_states) * slots * ranks_on_host


def check_host_memory(tensors: Iterable[Tensor], slots: int, ranks_on_host: int, available: int | None) -> None:
    """Refuse a ring that the host's memory will not hold.

    Raises:
        ValueError: with the two numbers.
    """
    needed = host_memory_needed(tensors, slots, ranks_on_host)
    if available is not None and needed > available:
        raise ValueError(
            f"spike_guard.ring_slots={slots}: the ring needs {needed / 2**30:.1f} GiB of host memory for "
            f"{ranks_on_host} rank(s) and {available / 2**30:.1f} GiB are available. Use fewer slots or action: veto"
        )


def host_memory_available() -> int | None:
    """Return the bytes of host memory that can be taken without swapping (Linux), or None where it cannot be known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
