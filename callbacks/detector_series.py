"""Baseline, noise and departures of one series."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from callbacks.detector_window import SortedWindow

LEVEL_WINDOW = 32
NOISE_WINDOW = 256


class Judgement(NamedTuple):
    """One series' verdict on one step, in the series' own unit."""

    kind: str
    act: bool
    onset: int
    score: float
    baseline: float
    scale: float
    excess: float


class SeriesMonitor:
    """Robust baseline of one series and the state of its current excursion."""

    def __init__(self, warmup: int, patience: int, min_rise: float, *, log_scale: bool = False) -> None:
        self.warmup, self.patience, self.min_rise, self.log_scale = warmup, patience, min_rise, log_scale
        self.level = SortedWindow(LEVEL_WINDOW)
        self.noise = SortedWindow(NOISE_WINDOW)
        self.recent = SortedWindow(LEVEL_WINDOW)  # values of the excursion: the next baseline if it stays
        self.seen = 0
        self.highest = -math.inf
        self.non_finite_run = 0
        self.non_finite_onset = 0
        self.onset = -1
        self.length = 0
        self.raised = 0
        self.calm = 0
        self.peak = 0.0
        self.acted = 0.0

    def update(self, step: int, value: float) -> Judgement:
        """Judge `value` and learn from it unless it is abnormal."""
        x = math.log(value) if self.log_scale and value > 0.0 and math.isfinite(value) else value
        if not math.isfinite(x):
            return self._non_finite(step)
        self.non_finite_run = 0
        if self.seen < self.warmup:
            self._accept(x)
            return Judgement("ok", False, step, 0.0, value, 0.0, 0.0)
        baseline = self.level.quantile(0.5) + self.noise.quantile(0.5)
        scale = self._scale(baseline)
        score = (x - baseline) / scale
        kind, act = self._classify(step, x, score, x - baseline)
        onset = self.onset if kind not in ("ok", "shift") else step
        if self.log_scale:
            base = math.exp(baseline)
            return Judgement(kind, act, onset, score, base, base * math.expm1(scale), value - base)
        return Judgement(kind, act, onset, score, baseline, scale, x - baseline)

    def limit(self) -> float:
        """Return the largest value in the series' own unit that is not an outlier; infinity while warming up."""
        if self.seen < self.warmup:
            return math.inf
        baseline = self.level.quantile(0.5) + self.noise.quantile(0.5)
        bound = baseline + max(9.0 * self._scale(baseline), math.log(3.0) if self.log_scale else 0.0)
        return math.exp(min(bound, 700.0)) if self.log_scale else bound

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        state = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        return state | {k: v.values() for k, v in vars(self).items() if isinstance(v, SortedWindow)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; parameters given to the constructor stay."""
        for name, value in state.items():
            if isinstance(value, list):
                setattr(self, name, SortedWindow(getattr(self, name).size, value))
            elif name not in ("warmup", "patience", "min_rise", "log_scale"):
                setattr(self, name, value)

    def _non_finite(self, step: int) -> Judgement:
        if self.non_finite_run == 0:
            self.non_finite_onset = step
        self.non_finite_run += 1
        base = self.level.quantile(0.5)
        return Judgement("non_finite", True, self.non_finite_onset, math.inf, base, 0.0, math.inf)

    def _scale(self, baseline: float) -> float:
        noise = self.noise
        middle = noise.quantile(0.5)
        spread = max((noise.quantile(0.75) - middle) / 0.6745, (noise.quantile(0.95) - middle) / 1.645)
        floor = max(abs(baseline), abs(self.highest), 1e-300) * 1e-9
        return max(spread, floor)

    def _accept(self, x: float) -> None:
        if self.seen:
            self.noise.push(x - self.level.quantile(0.5))
        self.level.push(x)
        self.seen += 1
        self.highest = max(self.highest, self.level.quantile(0.5))

    def _classify(self, step: int, x: float, score: float, excess: float) -> tuple[str, bool]:
        progress = max(0.0, self.highest - self.level.quantile(0.5))
        matters = excess > self.min_rise * progress
        if self.length == 0 and not (score > 6.0 and matters):
            self._accept(x)
            return "ok", False
        if self.length == 0:
            self.onset, self.raised, self.calm, self.peak, self.acted = step, 0, 0, 0.0, 0.0
            self.recent.clear()
        self.length += 1
        self.recent.push(x)
        return self._excursion(x, score, excess, progress)

    def _excursion(self, x: float, score: float, excess: float, progress: float) -> tuple[str, bool]:
        high = score > 4.0
        self.raised, self.calm = (self.raised + 1, 0) if high else (self.raised, self.calm + 1)
        if self.calm >= 3 or (self.calm and self.raised == 1):
            self.length = 0
            self._accept(x)
            return "ok", False
        if self.length > self.patience:
            return self._rebase()
        self.peak = max(self.peak, excess)
        if not high:
            return "ok", False
        huge = score > 30.0 and excess > 0.2 * progress
        if (self.raised >= 2 or huge) and self.peak > 2.0 * self.acted:
            self.acted = self.peak
            return "jump", True
        return ("jump" if self.raised > 1 else "outlier"), False

    def _rebase(self) -> tuple[str, bool]:
        values = self.recent.values()
        self.level = SortedWindow(LEVEL_WINDOW, values)
        self.length = 0
        return "shift", False
