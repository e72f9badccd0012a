"""From verdicts to episodes: when a departure began, how far it went, what kind it was, when it was over."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from callbacks.detector import GRADIENT_KEY, Verdict

_GRAVITY = ("shift", "outlier", "rise", "jump", "divergence", "non_finite")


@dataclass(frozen=True)
class Episode:
    """One departure of the monitored series, with all that was seen of it.

    Attributes:
        kind: gravest kind seen, one of the detector's kinds except "ok".
        series: series of the gravest verdict.
        onset: step at which it began (estimated, may lie before the first verdict).
        detected: step of the first verdict.
        acted: step of the first verdict that asked for action; None when there was none.
        peak_step: step of the largest finite excess.
        peak: value of `series` at its peak, in the series' unit.
        baseline: expected value at the onset, in the series' unit.
        severity: largest score, in units of the noise (infinite for non-finite values).
        excess: largest finite excess over the baseline, in the series' unit (bits for bits).
        end: step of the last verdict that belongs to it.
        recovered: first step back in the band; None while open or when the level was accepted as new.
        precursors: other series that left their range before or during it, with the step at which they did.
    """

    kind: str
    series: str
    onset: int
    detected: int
    acted: int | None
    peak_step: int
    peak: float
    baseline: float
    severity: float
    excess: float
    end: int
    recovered: int | None
    precursors: dict[str, int]

    @property
    def actionable(self) -> bool:
        """Whether a guard was asked to act."""
        return self.acted is not None


class EpisodeTracker:
    """Groups verdicts into episodes.

    Args:
        gap: steps (updates) without a finding after which an episode is closed.
        lookback: updates for which a finding in another series still counts as seen first.
    """

    def __init__(self, gap: int = 20, lookback: int = 20) -> None:
        if gap < 1 or lookback < 0:
            raise ValueError(f"gap={gap!r}, lookback={lookback!r}: expected gap >= 1 and lookback >= 0")
        self.gap, self.lookback = gap, lookback
        self.open: Episode | None = None
        self._quiet = 0
        self._back: int | None = None
        self._early: dict[str, list[int]] = {}  # series -> [step, updates since]

    def update(self, step: int, verdict: Verdict, values: Mapping[str, float]) -> Episode | None:
        """Take one verdict; return the episode that this step closed, if any."""
        self._age()
        if verdict.kind == "ok":
            return self._calm(step)
        if GRADIENT_KEY in verdict.series and not verdict.act:
            self._early.setdefault(verdict.series, [step, 0])
            if self.open is not None:
                self._note(verdict.series, step)
            return self._calm(step)
        self._extend(step, verdict, float(values.get(verdict.series, math.nan)))
        return self.close(step) if verdict.kind == "shift" else None

    def close(self, step: int | None = None) -> Episode | None:
        """Close the open episode (at the end of a run) and return it."""
        done, self.open = self.open, None
        if done is not None and done.kind != "shift" and self._back is not None:
            done = replace(done, recovered=self._back)
        self._quiet, self._back = 0, None
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {
            "open": None if self.open is None else asdict(self.open),
            "quiet": self._quiet,
            "back": self._back,
            "early": {name: list(seen) for name, seen in self._early.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.open = None if state["open"] is None else Episode(**state["open"])
        self._quiet, self._back = state["quiet"], state["back"]
        self._early = {name: list(seen) for name, seen in state["early"].items()}

    def _age(self) -> None:
        for name in list(self._early):
            self._early[name][1] += 1
            if self._early[name][1] > self.lookback:
                del self._early[name]

    def _calm(self, step: int) -> Episode | None:
        if self.open is None:
            return None
        self._quiet += 1
        if self._back is None:
            self._back = step
        return self.close(step) if self._quiet >= self.gap else None

    def _note(self, series: str, step: int) -> None:
        assert self.open is not None
        if series not in self.open.precursors and series != self.open.series:
            self.open = replace(self.open, precursors={**self.open.precursors, series: step})

    def _extend(self, step: int, verdict: Verdict, value: float) -> None:
        self._quiet, self._back = 0, None
        if self.open is None:
            seen = {name: first for name, (first, _) in self._early.items() if name != verdict.series}
            self.open = Episode(
                verdict.kind, verdict.series, verdict.onset, step, step if verdict.act else None, step, value,
                verdict.baseline, verdict.score, verdict.excess, step, None, seen,
            )  # fmt: skip
            return
        self.open = self._merge(self.open, step, verdict, value)

    @staticmethod
    def _merge(old: Episode, step: int, verdict: Verdict, value: float) -> Episode:
        graver = _GRAVITY.index(verdict.kind) > _GRAVITY.index(old.kind)
        higher = math.isfinite(verdict.excess) and (verdict.excess > old.excess or not math.isfinite(old.excess))
        acted = step if old.acted is None and verdict.act else old.acted
        if higher:
            old = replace(old, peak_step=step, peak=value, excess=verdict.excess)
        severity = max(old.severity, verdict.score)
        kind, series = (verdict.kind, verdict.series) if graver else (old.kind, old.series)
        return replace(old, kind=kind, series=series, severity=severity, acted=acted, end=step)
