"""What is normal for a series: its level, its noise, and the largest score it has shown without harm.

Scores are in units of the noise, and the noise is read from the upper quantiles of the residuals x - median(last 32),
so a falling trend, skew and autocorrelation are part of it.
"""

import math
from typing import ClassVar

from callbacks.detector_state import SortedWindow, Stateful

LEVEL_WINDOW = 32
NOISE_WINDOW = 256
YOUNG_NOISE = 48  # residuals kept at least, where the later half of a young run has fewer than NOISE_WINDOW
MEMORY = 16384  # rows over which a record fades
TAIL_INDEX = 4.0  # Student t with 4 degrees of freedom: the heaviest noise that is taken for noise
LAG = 16  # blocks before a score counts as a record, so that a slow departure cannot raise its own bar
Z75, Z95 = 0.6745, 1.645  # quantiles of the standard normal distribution
TINY = 1e-100


def upper_spread(noise: SortedWindow, middle: float) -> float:
    """Return the larger of two normal-consistent estimates of the upper half's spread (75 % and 95 % quantile)."""
    return max((noise.quantile(0.75) - middle) / Z75, (noise.quantile(0.95) - middle) / Z95)


class TailBar:
    """How large a score must be to be no ordinary member of the tail seen so far.

    Weissman's extreme-quantile estimator [1]: with a Pareto tail of index a and a largest score `top` among n, the
    score that is exceeded once in 1/p values is top * (1 / (n p)) ** (1/a).

    [1] I. Weissman, Estimation of parameters and large quantiles based on the k largest observations, JASA 73 (1978).

    Args:
        rate: tolerated exceedances per row (p).
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.cap = 3.0 * math.pow(3e-6 / rate, 1.0 / TAIL_INDEX)  # a few hundred rows say little about 1 in 300 000

    def __call__(self, top: float, seen: float) -> float:
        """Return the bar for a record `top` among `seen` independent values."""
        if top <= 0.0:
            return 0.0
        factor = math.pow(max(seen, 1.0) * self.rate, -1.0 / TAIL_INDEX)
        return max(top, 2.0) * min(self.cap, max(1.2, factor))


class Record(Stateful):
    """The largest harmless score, lagged by `LAG` blocks and fading over `MEMORY` rows."""

    __slots__ = ("block", "count", "now", "queue", "top")
    STATE: ClassVar[tuple[str, ...]] = ("count", "now", "queue", "top")

    def __init__(self, block: int) -> None:
        self.block = block
        self.count = 0
        self.now = 0.0
        self.queue: list[float] = []
        self.top = 0.0

    def tick(self) -> None:
        """Count one healthy row."""
        self.count += 1
        if self.count < self.block:
            return
        self.count = 0
        self.queue.append(self.now)
        self.now = 0.0
        if len(self.queue) > LAG:
            self.top = max(self.queue.pop(0), self.top * (1.0 - self.block / MEMORY))

    def forget(self) -> None:
        """Drop what has not become a record yet: it belonged to an event."""
        self.queue = [0.0] * len(self.queue)
        self.now = 0.0


class Baseline(Stateful):
    """Level and noise of one series, learned from the values that were judged normal.

    Attributes:
        center: expected value; a rising drift is followed, a falling one is not (which errs towards silence).
        spread: noise around it.
        median: median of the last `LEVEL_WINDOW` accepted values.
        seen: number of accepted values.
    """

    __slots__ = ("center", "drift", "floor", "level", "median", "noise", "positive", "seen", "spread")
    STATE: ClassVar[tuple[str, ...]] = (
        "level",
        "noise",
        "seen",
        "median",
        "drift",
        "center",
        "spread",
        "floor",
        "positive",
    )

    def __init__(self, positive: bool = True) -> None:
        self.positive = positive
        self.level = SortedWindow(LEVEL_WINDOW)
        self.noise = SortedWindow(NOISE_WINDOW)
        self.seen = 0
        self.median = 0.0
        self.drift = 0.0
        self.center = 0.0
        self.spread = TINY
        self.floor = TINY

    def learn(self, x: float) -> None:
        """Accept a normal value."""
        if self.positive and x <= 0.0:
            self._leave_positive()
        if self.seen >= 4:
            if len(self.noise) >= max(YOUNG_NOISE, self.seen // 2):
                self.noise.drop()  # a young run's first half is steeper than what is to come
            self.noise.push((x - self.median) / self.size())
        self.level.push(x)
        self.seen += 1
        self.median = self.level.median()
        if self.seen & 7 == 0 or self.seen <= 64:
            self._measure()
        self.center = self.median + self.drift

    def size(self) -> float:
        """Return what the noise is measured in: the level of a positive series, else 1."""
        return max(self.median, TINY) if self.positive else 1.0

    def move(self, values: list[float]) -> float:
        """Take `values` (oldest first) as the new normal; return by how much the level moved."""
        old = self.median
        self.level.refill(values)
        self.median = self.level.median()
        for x in values:
            self.noise.push((x - self.median) / self.size())
        self._measure()
        self.center = self.median + self.drift
        return self.median - old

    def _measure(self) -> None:
        if len(self.noise):
            middle = self.noise.median()
            size = self.size()
            self.drift = max(middle, 0.0) * size
            self.spread = max(upper_spread(self.noise, middle) * size, self.floor, 1e-6 * abs(self.median), TINY)

    def _leave_positive(self) -> None:
        size = self.size()
        self.noise.refill([residual * size for residual in self.noise.values()])
        self.positive = False


class Progress(Stateful):
    """A coarse history of the level, uniform in time: how far the run has come.

    Attributes:
        range: spread of the level since the first sixteenth of the run, whose transients would otherwise dominate.
    """

    __slots__ = ("count", "range", "stride", "track")
    STATE: ClassVar[tuple[str, ...]] = ("count", "range", "stride", "track")
    LENGTH = 64

    def __init__(self) -> None:
        self.track: list[float] = []
        self.stride = 1
        self.count = 0
        self.range = 0.0

    def learn(self, level: float) -> None:
        """Take the level after one more accepted value."""
        self.count += 1
        if self.count < self.stride:
            return
        self.count = 0
        self.track.append(level)
        if len(self.track) >= self.LENGTH:
            self.track = self.track[::2]
            self.stride *= 2
        late = self.track[len(self.track) // 16 :]
        self.range = max(late) - min(late)

    def recent(self, level: float) -> float:
        """Return how far the level has fallen in the second half of the run."""
        return max(0.0, self.track[len(self.track) // 2] - level) if self.track else 0.0


def finite(value: float) -> float:
    """Return a finite value small enough that differences and squares of two such values stay finite."""
    return math.copysign(min(abs(value), 1e150), value)
