"""Sliding windows that stay sorted, and state that is plain numbers and lists."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class SortedWindow:
    """The last `size` finite values, in order of arrival and sorted.

    Inserting and dropping are one bisection and one memmove each: about a microsecond at 256 values in CPython, and
    every order statistic is then free.

    Args:
        size: how many values are kept; older ones leave.
        values: initial values, oldest first.
    """

    __slots__ = ("arrived", "ordered", "size")

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        assert size > 0
        self.size = size
        self.arrived: deque[float] = deque(values, maxlen=size)
        self.ordered: list[float] = sorted(self.arrived)

    def __len__(self) -> int:
        return len(self.ordered)

    def push(self, value: float) -> None:
        """Add `value`; the oldest value leaves when the window is full."""
        ordered = self.ordered
        if len(ordered) == self.size:
            del ordered[bisect_left(ordered, self.arrived[0])]
        self.arrived.append(value)  # maxlen drops the oldest
        insort(ordered, value)

    def drop(self) -> None:
        """Drop the oldest value; the window must not be empty."""
        del self.ordered[bisect_left(self.ordered, self.arrived.popleft())]

    def median(self) -> float:
        """Return the median (the mean of the two middle values of an even number); the window must not be empty."""
        ordered = self.ordered
        half = len(ordered) >> 1
        return ordered[half] if len(ordered) & 1 else 0.5 * (ordered[half - 1] + ordered[half])

    def quantile(self, q: float) -> float:
        """Return the `q` quantile, interpolated between its neighbours; the window must not be empty."""
        ordered = self.ordered
        position = q * (len(ordered) - 1)
        low = int(position)
        if low + 1 >= len(ordered):
            return ordered[-1]
        return ordered[low] + (position - low) * (ordered[low + 1] - ordered[low])

    def refill(self, values: Iterable[float]) -> None:
        """Replace the content by `values`, oldest first."""
        self.arrived = deque(values, maxlen=self.size)
        self.ordered = sorted(self.arrived)

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self.arrived)


class Stateful:
    """An object whose attributes named in `STATE` are its whole state: numbers, lists, windows, or such objects."""

    __slots__ = ()
    STATE: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, lists and dicts."""
        return {name: _dump(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in self.STATE:
            current, saved = getattr(self, name), state[name]
            if isinstance(current, SortedWindow):
                current.refill(saved)
            elif isinstance(current, Stateful):
                current.load_state_dict(saved)
            elif isinstance(current, list) and current and isinstance(current[0], Stateful):
                for part, part_state in zip(current, saved, strict=True):
                    part.load_state_dict(part_state)
            else:
                setattr(self, name, list(saved) if isinstance(saved, list) else saved)


def _dump(value: Any) -> Any:
    if isinstance(value, SortedWindow):
        return value.values()
    if isinstance(value, Stateful):
        return value.state_dict()
    return [_dump(item) for item in value] if isinstance(value, list) else value
