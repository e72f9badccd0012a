"""Departures too slow for a single row: an exponential average judged against its own history."""

import math
from typing import ClassVar

from callbacks.detector_baseline import TINY, Record, TailBar, upper_spread
from callbacks.detector_state import SortedWindow, Stateful

LEVEL_SAMPLES = 16
NOISE_SAMPLES = 32
NOISE_LAG = 8  # samples before a residual counts as noise, so that a climb cannot widen its own band
MIN_SAMPLES = 12
SLOW_SCORE = 6.0
CLIMB_SCORE = 8.0
CLIMB_RISE = 0.15  # of the level or the range, whichever is larger


class SlowScale(Stateful):
    """An exponential average of `period` rows, sampled once a period.

    Because the noise is that of the average itself, autocorrelation of the series needs no model.
    """

    __slots__ = ("average", "best", "best_at", "center", "count", "gain", "level", "noise", "period", "record",
                 "spread", "start", "waiting")  # fmt: skip
    STATE: ClassVar[tuple[str, ...]] = ("average", "best", "best_at", "center", "count", "level", "noise", "record",
                                        "spread", "start", "waiting")  # fmt: skip

    def __init__(self, period: int) -> None:
        self.period = period
        self.gain = 2.0 / (period + 1)
        self.level = SortedWindow(LEVEL_SAMPLES)
        self.noise = SortedWindow(NOISE_SAMPLES)
        self.record = Record(period)
        self.waiting: list[float] = []
        self.average = math.nan
        self.count = 0
        self.center = 0.0
        self.spread = math.inf
        self.start = -1  # step at which the average last rose above its centre
        self.best = math.inf
        self.best_at = -1

    def add(self, step: int, x: float) -> float:
        """Average one row in; return the score of the average (0 while there is no history)."""
        average = self.average
        self.average = average = x if average != average else average + self.gain * (x - average)
        distance = average - self.center
        if distance <= 0.0 or self.spread == math.inf:
            self.start = -1
            return 0.0
        if self.start < 0:
            self.start = step
        return distance / self.spread

    def learn(self, size: float, floor: float) -> None:
        """Count one healthy row and take a sample once a period."""
        self.record.tick()
        self.count += 1
        if self.count < self.period or self.average != self.average:
            return
        self.count = 0
        ready = len(self.noise) >= MIN_SAMPLES
        if len(self.level) >= 4:
            self.waiting.append((self.average - self.level.median()) / size)
            if len(self.waiting) > (NOISE_LAG if ready else 0):
                self.noise.push(self.waiting.pop(0))
        self.level.push(self.average)
        if ready:
            middle = self.noise.median()
            self.spread = max(upper_spread(self.noise, middle) * size, floor, TINY)
            self.center = self.level.median() + max(middle, 0.0) * size

    def departs(self, score: float, least: float, bar: TailBar, seen: int) -> bool:
        """Whether the average has left its range by more than `least`."""
        if score <= SLOW_SCORE or self.average - self.center <= least:
            return False
        return score > bar(self.record.top, seen / self.period)

    def climbs(self, step: int, unit: float, recent: float) -> bool:
        """Whether the average has climbed far above its best value so far, however slowly.

        Args:
            step: the current step.
            unit: size of the series: its level or its range, whichever is larger.
            recent: how far the level has fallen in the second half of the run.
        """
        if self.count or self.spread == math.inf:
            return False
        if self.average <= self.best:
            self.best, self.best_at = self.average, step
            return False
        rise = self.average - self.best
        return rise > CLIMB_SCORE * self.spread and rise > max(CLIMB_RISE * unit, 2.0 * recent)

    def settle(self) -> None:
        """Forget an event that is over: the level is the old one."""
        if self.spread != math.inf:
            self.average = min(self.average, self.center)
        self.start = -1
        self.record.forget()

    def accept(self, average: float) -> None:
        """Take `average` for the new normal, so that a rise is reported once."""
        offset = average - self.center
        self.level.refill([value + offset for value in self.level.values()])
        self.center = self.average = self.best = average
        self.start = -1
        self.record.forget()

    def move(self, offset: float, level: float) -> None:
        """Follow a baseline that was moved by `offset` to `level`."""
        self.average = self.best = level
        self.level.refill([value + offset for value in self.level.values()])
        self.center += offset
        self.start = -1
