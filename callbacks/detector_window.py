"""A sliding window that is kept sorted, so that order statistics cost nothing to read.

Inserting and dropping are one bisection and one memmove each: about a microsecond at 256 values in CPython.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class SortedWindow:
    """The last `size` finite values, in order of arrival and sorted.

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
        if len(self.ordered) == self.size:
            del self.ordered[bisect_left(self.ordered, self.arrived[0])]
        self.arrived.append(value)  # maxlen drops the oldest
        insort(self.ordered, value)

    def quantile(self, q: float) -> float:
        """Return the `q` quantile, interpolated between its neighbours (NaN when empty)."""
        ordered = self.ordered
        if not ordered:
            return float("nan")
        position = q * (len(ordered) - 1)
        low = int(position)
        if low + 1 >= len(ordered):
            return ordered[-1]
        return ordered[low] + (position - low) * (ordered[low + 1] - ordered[low])

    def clear(self) -> None:
        """Forget everything."""
        self.arrived.clear()
        self.ordered.clear()

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self.arrived)
