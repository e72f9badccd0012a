"""The rule for gradient norms: a limit above which an update should be refused, from the norm alone.

Norms are judged on a log scale. The limit follows the heaviest tail seen so far, and gives way when the norms stay
high: refusing every update is no cure.
"""

import math
from typing import ClassVar

from callbacks.detector_baseline import Baseline, Record, TailBar
from callbacks.detector_series import Judgement
from callbacks.detector_state import SortedWindow, Stateful

MIN_FACTOR = math.log(2.0)  # a norm below twice its usual size is never refused
MIN_SCORE = 7.0
GIVE_WAY = 8  # refusals in a row after which the limit is lifted until the norm is back or has become normal
GROWTH = 1.5  # one outlier raises the record by at most this factor
SETTLED = 64  # high norms in a row that become the new normal


class GradientMonitor(Stateful):
    """Baseline of one gradient norm.

    Args:
        warmup: accepted values before anything is judged.
        rate: tolerated refusals per healthy update.
    """

    STATE: ClassVar[tuple[str, ...]] = ("base", "record", "recent", "refused", "onset", "bad", "bad_onset")

    def __init__(self, warmup: int, rate: float) -> None:
        self.warmup = warmup
        self.bar = TailBar(rate)
        self.base = Baseline(positive=False)  # logarithms
        self.record = Record(16)
        self.recent = SortedWindow(32)
        self.refused = 0
        self.onset = -1
        self.bad = 0
        self.bad_onset = -1

    def limit(self) -> float:
        """Return the largest norm that should not be refused; infinity while warming up or after giving way."""
        if self.base.seen < self.warmup or self.refused >= GIVE_WAY:
            return math.inf
        return math.exp(min(self._log_limit(), 700.0))

    def update(self, step: int, value: float) -> Judgement:
        """Judge `value`, and learn from it unless it is abnormal; norms of zero or less are ignored."""
        base = self.base
        usual = math.exp(min(base.center, 700.0)) if base.seen else 0.0
        if not math.isfinite(value):
            if self.bad == 0:
                self.bad_onset = step
            self.bad += 1
            return Judgement("non_finite", False, self.bad_onset, math.inf, usual, 0.0, math.inf)
        self.bad = 0
        if value <= 0.0:
            return Judgement("ok", False, step, 0.0, usual, 0.0, value - usual)
        x = math.log(value)
        if base.seen < self.warmup:
            base.learn(x)
            return Judgement("ok", False, step, 0.0, value, 0.0, 0.0)
        score = (x - base.center) / base.spread
        kind = self._judge(step, x, score)
        onset = self.onset if kind in ("outlier", "jump") else step
        return Judgement(kind, False, onset, score, usual, usual * math.expm1(min(base.spread, 700.0)), value - usual)

    def _log_limit(self) -> float:
        base = self.base
        return base.center + max(self._bar() * base.spread, MIN_FACTOR)

    def _bar(self) -> float:
        return max(MIN_SCORE, self.bar(self.record.top, self.base.seen))

    def _judge(self, step: int, x: float, score: float) -> str:
        if x <= self._log_limit():
            self.refused = 0
            self.record.now = max(self.record.now, score)
            self.record.tick()
            self.base.learn(x)
            return "ok"
        if self.refused == 0:
            self.onset = step
            self.recent.refill(())
        self.refused += 1
        self.recent.push(x)
        if self.refused > SETTLED:
            self.base.move(self.recent.values())
            self.refused = 0
            return "shift"
        self.record.now = max(self.record.now, min(score, GROWTH * self._bar()))
        return "outlier" if self.refused == 1 else "jump"
