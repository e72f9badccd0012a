"""The rule for a loss-like series: what departs, whether it matters, and when it is over.

A departure is acted on when it is *sustained* (a run of rows, or a slow average out of its range), or when one row is
so large that no training curve explains it, or when one row is without precedent in a long quiet history. It must also
*matter*: exceed a fraction of the level, and undo a part of what the second half of the run has gained.
"""

import math
from typing import ClassVar, NamedTuple

from callbacks.detector_baseline import Baseline, Progress, Record, TailBar, finite
from callbacks.detector_slow import SlowScale
from callbacks.detector_state import SortedWindow, Stateful

OPEN, RAISED, LOOSE = 5.0, 3.0, 2.5  # scores: an excursion opens, a row counts as raised, a row may belong to the onset
REPORTED = 7.0  # a single row above this is reported as an outlier
RUNS = (2, 3, 5, 8)  # rows in a row that are judged together
RUN_SCORES = (7.0, 6.0, 5.0, 4.5)  # smallest geometric mean of their scores
RUN_LOW = 3.5  # every row of a run must exceed this
RECORD_LOW = 1.5  # what counts as a run on record
BIG_ROWS, BIG = 3, 0.5  # rows all raised by half of the level (and half of the range): acted on whatever came before
HUGE_SCORE, REACH = 20.0, 0.25  # one row, if it also doubles the level and exceeds a quarter of the range
LONE_SCORE, LONE_HISTORY = 7.5, 4000  # one row without precedent, and the quiet rows that it takes to say so
SETBACK = 0.5  # share of the second half's gain that must be undone
CLIP = 4.0  # largest score that enters the slow averages: one outlier must not look like a rise
PERIODS = (12, 64)
REARM = 5.0  # a second call for action needs a row this much above the rows before it, or twice the first one's excess
RECENT = 32
SPENT = 0.01  # part of its peak below which an excursion is over, however small the noise
GROWING = 1.25  # growth of the excess over half of the patience that forbids accepting the level


class Judgement(NamedTuple):
    """One series' verdict on one step, in the series' own unit."""

    kind: str
    act: bool
    onset: int
    score: float
    baseline: float
    scale: float
    excess: float


class LossMonitor(Stateful):
    """Baseline of one loss-like series and the state of its current excursion.

    Args:
        warmup: accepted values before anything is judged.
        patience: rows after which a raised level is accepted as normal.
        min_rise: smallest rise that matters, as a fraction of the level or the range.
        rate: tolerated false alarms per row.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        "base", "progress", "slow", "lone", "runs", "scores", "recent", "quiet", "streak", "onset", "length", "raised",
        "calm", "peak", "halfway", "acted", "kind", "held", "aftermath", "rise_from", "risen", "bad", "bad_onset",
    )  # fmt: skip

    def __init__(self, warmup: int, patience: int, min_rise: float, rate: float) -> None:
        self.warmup, self.patience, self.min_rise = warmup, patience, min_rise
        self.bar = TailBar(rate)
        self.base = Baseline()
        self.progress = Progress()
        self.slow = [SlowScale(period) for period in PERIODS]
        self.lone = Record(16)
        self.runs = [Record(16) for _ in RUNS]
        self.scores = [0.0] * max(RUNS)  # of the last rows
        self.recent = SortedWindow(RECENT)  # values of the excursion: the next baseline if they stay
        self.quiet = 0  # accepted rows since the last outlier without precedent
        self.streak = -1  # first step of the current streak of loosely raised rows
        self.onset = -1
        self.length = 0  # rows of the current excursion; 0 when there is none
        self.raised = 0
        self.calm = 0
        self.peak = 0.0
        self.halfway = 0.0  # excess of the level after half of the patience
        self.acted = 0.0  # excess at the last call for action; 0 when there was none
        self.kind = "ok"
        self.held = [0.0] * (1 + len(RUNS))  # records of the excursion, kept if it proves harmless
        self.aftermath = 0  # rows during which a slow rise is taken for the rest of an event already acted on
        self.rise_from = 0.0  # where the last slow rise began, and its excess when it was reported
        self.risen = 0.0
        self.bad = 0  # non-finite values in a row
        self.bad_onset = -1

    def update(self, step: int, value: float) -> Judgement:
        """Judge `value`, and learn from it unless it is abnormal."""
        base = self.base
        if not math.isfinite(value):
            if self.bad == 0:
                self.bad_onset = step
            self.bad += 1
            return Judgement("non_finite", True, self.bad_onset, math.inf, base.center, base.spread, math.inf)
        self.bad = 0
        x = finite(value)
        if base.seen < self.warmup:
            self._learn(x)
            return Judgement("ok", False, step, 0.0, x, 0.0, 0.0)
        center, spread = base.center, base.spread
        excess = x - center
        if self.aftermath:
            self.aftermath -= 1
        score = excess / spread
        self.scores.append(score)
        del self.scores[0]
        self.streak = -1 if score < LOOSE else step if self.streak < 0 else self.streak
        slow = self._slow_hit(step, x, score)
        if self.length == 0:
            if score < OPEN:
                self._healthy(x, score)
                return slow or Judgement("ok", False, step, score, center, spread, excess)
            self._open(step)
        kind, act = self._excursion(x, score, excess, slow)
        onset = step if kind in ("ok", "shift") else self.onset
        return Judgement(kind, act, onset, score, center, spread, excess)

    def unit(self) -> float:
        """Return the size of the series: its level or its range, whichever is larger."""
        return max(self.progress.range, abs(self.base.center))

    def least(self) -> float:
        """Return the smallest excess that matters."""
        return max(self.min_rise * self.unit(), SETBACK * self.progress.recent(self.base.median))

    def _learn(self, x: float) -> None:
        base = self.base
        base.learn(x)
        self.progress.learn(base.median)
        base.floor = 1e-3 * self.progress.range
        size = base.size()
        for scale in self.slow:
            scale.learn(size, base.floor)

    def _healthy(self, x: float, score: float) -> None:
        lone = self.lone
        if score > lone.now:
            lone.now = score
        lone.tick()
        raised = score > RECORD_LOW
        for rows, record in zip(RUNS, self.runs, strict=True):
            if raised:
                record.now = max(record.now, self._run(rows, RECORD_LOW))
            record.tick()
        self.quiet += 1
        self._learn(x)

    def _run(self, rows: int, low: float) -> float:
        """Return the geometric mean of the last rows' scores, or 0 if one of them is not above `low`."""
        last = self.scores[-rows:]
        return math.prod(last) ** (1.0 / rows) if min(last) > low else 0.0

    def _slow_hit(self, step: int, x: float, score: float) -> Judgement | None:
        base = self.base
        clipped = x if score < CLIP else base.center + CLIP * base.spread
        hit: Judgement | None = None
        for scale in self.slow:
            slow_score = scale.add(step, clipped)
            if slow_score <= scale.record.now:
                continue
            if scale.departs(slow_score, self.least(), self.bar, base.seen):
                hit = hit or self._rise(scale.start, slow_score, scale.average, scale.center)
            elif self.length == 0:
                scale.record.now = slow_score
        slowest = self.slow[-1]
        if slowest.climbs(step, self.unit(), self.progress.recent(base.median)) and self.length == 0 and hit is None:
            best = slowest.best
            hit = self._rise(slowest.best_at, (slowest.average - best) / slowest.spread, slowest.average, best)
        return None if hit is None else self._report(hit)

    def _report(self, rise: Judgement) -> Judgement | None:
        """Report a rise once, and again only when it has doubled; a rise in an event's aftermath is a part of it."""
        average = rise.baseline + rise.excess
        fresh = self.aftermath == 0
        for scale in self.slow:
            if scale.spread != math.inf:
                scale.accept(scale.average)
        self.aftermath = self.patience
        if fresh:
            self.rise_from, self.risen = rise.baseline, rise.excess
            return rise
        total = average - self.rise_from
        if self.risen == 0.0 or total <= 2.0 * self.risen:
            return None
        self.risen = total
        kind = "divergence" if total > max(abs(self.rise_from), self.progress.range) else "rise"
        return rise._replace(kind=kind, baseline=self.rise_from, excess=total)

    def _rise(self, onset: int, score: float, average: float, reference: float) -> Judgement:
        return Judgement("rise", True, onset, score, reference, self.base.spread, average - reference)

    def _open(self, step: int) -> None:
        self.onset = step if self.streak < 0 else self.streak
        self.length = self.raised = self.calm = 0
        self.peak = self.acted = self.halfway = 0.0
        self.kind = "outlier"
        self.held = [0.0] * (1 + len(RUNS))
        self.recent.refill(())

    def _excursion(self, x: float, score: float, excess: float, slow: Judgement | None) -> tuple[str, bool]:
        self.length += 1
        self.recent.push(x)
        raised = score > RAISED and excess > SPENT * self.peak
        self.raised += raised
        self.calm = 0 if raised or slow is not None else self.calm + 1
        if self.calm >= 3 or (self.calm and self.raised == 1):
            self._close()
            self._learn(x)
            return "ok", False
        if 2 * self.length == self.patience - self.patience % 2:
            self.halfway = self.recent.median() - self.base.center
        if self.length > self.patience and self._steady():
            return self._rebase(), False
        self.peak = max(self.peak, excess)
        act = self._acts(score, excess, slow)
        if act:
            self.acted = max(self.peak, 1e-300)
        elif self.acted == 0.0:
            self._hold(score)
        self._name(excess)
        if self.kind == "outlier" and (score < REPORTED or excess < self.min_rise * self.unit()):
            return "ok", False
        return (self.kind if raised or act else "ok"), act

    def _acts(self, score: float, excess: float, slow: Judgement | None) -> bool:
        """Whether this row calls for action, for the first time in this excursion or once more."""
        sudden = self._sudden(score, excess)
        if self.acted > 0.0:
            before = sorted(self.scores[-4:-1])[1]
            again = self.peak > 2.0 * self.acted or score > REARM * max(before, RAISED)
            return again and sudden and excess > 0.2 * min(self.acted, self.unit())
        if not sudden and slow is None:
            return False
        self.kind = "jump" if sudden else "rise"
        return True

    def _sudden(self, score: float, excess: float) -> bool:
        base, seen = self.base, self.base.seen
        level, reach = abs(base.center), self.progress.range
        alone = self.scores[-2] <= RUN_LOW
        huge = max(HUGE_SCORE, self.bar(self.lone.top, seen)) if alone else HUGE_SCORE
        if score > huge and excess > max(level, REACH * reach):
            return True
        held = min(self.scores[-BIG_ROWS:])
        if held > RUN_SCORES[1] and held * base.spread > BIG * max(level, reach):
            return True
        matters = self.least()
        if excess <= matters:
            return False
        for rows, least, record in zip(RUNS, RUN_SCORES, self.runs, strict=True):
            run = self._run(rows, RUN_LOW)
            if run > least and run * base.spread > matters and run > self.bar(record.top, seen / rows):
                return True
        return self.quiet >= LONE_HISTORY and score > max(LONE_SCORE, self.bar(self.lone.top, seen))

    def _hold(self, score: float) -> None:
        self.held[0] = max(self.held[0], score)
        for index, rows in enumerate(RUNS, start=1):
            self.held[index] = max(self.held[index], self._run(rows, RECORD_LOW))

    def _name(self, excess: float) -> None:
        """Call it a divergence once eight rows in a row have more than doubled the level and left the run's range."""
        if self.acted == 0.0 or excess <= self.unit():
            return
        if min(self.scores) * self.base.spread > max(self.unit(), max(self.progress.track) - self.base.center):
            self.kind = "divergence"

    def _close(self) -> None:
        bar = max(LONE_SCORE, self.bar(self.lone.top, self.base.seen))
        if self.raised == 1 and self.peak > self.base.spread * bar:
            self.quiet = 0  # lone outliers of this size do happen in this run
        if self.acted == 0.0:
            for record, value in zip([self.lone, *self.runs], self.held, strict=True):
                record.now = max(record.now, value)
        else:
            self.aftermath, self.risen = self.patience, 0.0
            for record in [self.lone, *self.runs]:
                record.forget()
            for scale in self.slow:
                scale.settle()
        self.length = 0

    def _steady(self) -> bool:
        """Whether a level raised for `patience` rows has stopped growing; if not, wait for half as long again."""
        now = self.recent.median() - self.base.center
        if now <= GROWING * self.halfway:
            return True
        self.length = self.patience // 2
        self.halfway = now
        return False

    def _rebase(self) -> str:
        offset = self.base.move(self.recent.values())
        for scale in self.slow:
            scale.move(offset, self.base.median)
        self._close()
        return "shift"
