"""From verdicts to episodes: when a departure began, how far it went, what kind it was, when it was over."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from callbacks.detector import GRADIENT_KEY, Verdict

GRAVITY = ("shift", "outlier", "rise", "jump", "divergence", "non_finite")
LONGEST_WINDOW = 64


@dataclass(frozen=True)
class Episode:
    """One departure of a monitored series, with all that was seen of it.

    Attributes:
        kind: gravest kind seen, one of the detector's kinds except "ok"; "shift" when nobody was asked to act and the
            level was accepted as new.
        series: series of the verdict that opened it.
        onset: step at which it began (estimated, may lie before the first verdict).
        detected: step of the first verdict.
        acted: step of the first verdict that asked for action; None when there was none.
        peak_step: step of the largest finite excess.
        peak: value of `series` at its peak, in the series' unit.
        baseline: expected value at the onset, in the series' unit.
        scale: noise at the onset, in the series' unit.
        severity: largest score, in units of the noise (infinite for non-finite values).
        excess: largest finite excess over the baseline, in the series' unit (bits for bits).
        end: step of the last verdict that belongs to it.
        recovered: step from which the series was back at its baseline; None if it never was.
        precursors: other series that left their range before or during it, with the step at which each did.
    """

    kind: str
    series: str
    onset: int
    detected: int
    acted: int | None
    peak_step: int
    peak: float
    baseline: float
    scale: float
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

    An episode outlives the detector's own excursion: a level that the detector has accepted as normal may still come
    back, as after a jump that takes thousands of steps to recover.

    Args:
        gap: updates without a finding, back at the baseline, after which an episode is closed.
        lookback: updates for which a finding in another series still counts as seen first.
        settled: updates without a finding, not back at the baseline, after which a new finding is a new episode.
        give_up: updates after which an episode that has not recovered is closed.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, gap: int = 20, lookback: int = 20, settled: int = 300, give_up: int = 50_000) -> None:
        if gap < 1 or lookback < 0 or give_up < gap:
            raise ValueError(
                f"gap={gap!r}, lookback={lookback!r}, give_up={give_up!r}: expected 1 <= gap <= give_up, 0 <= lookback"
            )
        self.gap, self.lookback, self.settled, self.give_up = gap, lookback, settled, give_up
        self.open: Episode | None = None
        self._age = 0  # updates since the episode was opened
        self._quiet = 0  # updates without a finding
        self._accepted = False  # the detector took the raised level for the new normal
        self._recent: list[list[float]] = []  # [step, value] of the series' last rows
        self._early: dict[str, list[int]] = {}  # other series -> [step, updates since]

    def update(self, step: int, verdict: Verdict, values: Mapping[str, float]) -> Episode | None:
        """Take one verdict and the values it was made from.

        Returns:
            The episode that this step closed, if any.
        """
        self._forget_early()
        closed: Episode | None = None
        if GRADIENT_KEY in verdict.series and not verdict.act:
            if verdict.kind != "ok":
                self._note(verdict.series, step)
        elif verdict.kind == "shift":
            return self._shift(step, verdict, values)
        elif verdict.kind != "ok" and not (self._accepted and not verdict.act):
            if self._accepted and self.open is not None and verdict.kind != "non_finite":
                closed = self.close()
            self._extend(step, verdict, float(values.get(verdict.series, math.nan)))
            return closed
        return self._rest(step, values)

    def close(self) -> Episode | None:
        """Close the open episode (at the end of a run) and return it."""
        done, self.open = self.open, None
        self._age = self._quiet = 0
        self._accepted, self._recent = False, []
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {
            "open": None if self.open is None else asdict(self.open),
            "age": self._age,
            "quiet": self._quiet,
            "accepted": self._accepted,
            "recent": [list(row) for row in self._recent],
            "early": {name: list(seen) for name, seen in self._early.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.open = None if state["open"] is None else Episode(**state["open"])
        self._age, self._quiet = state["age"], state["quiet"]
        self._accepted, self._recent = state["accepted"], [list(row) for row in state["recent"]]
        self._early = {name: list(seen) for name, seen in state["early"].items()}

    def _forget_early(self) -> None:
        for name in list(self._early):
            self._early[name][1] += 1
            if self._early[name][1] > self.lookback:
                del self._early[name]

    def _note(self, series: str, step: int) -> None:
        self._early.setdefault(series, [step, 0])
        if self.open is not None and series not in self.open.precursors:
            self.open = replace(self.open, precursors={**self.open.precursors, series: step})

    def _shift(self, step: int, verdict: Verdict, values: Mapping[str, float]) -> Episode | None:
        if self.open is None:
            self._extend(step, verdict, float(values.get(verdict.series, math.nan)))
        elif not self.open.actionable:
            self.open = replace(self.open, kind="shift", end=step)
        else:
            self._accepted = True
            return self._rest(step, values)
        return self.close()

    def _rest(self, step: int, values: Mapping[str, float]) -> Episode | None:
        """One update without a finding of its own: has the series come back, and for how long?"""
        episode = self.open
        if episode is None:
            return None
        self._age += 1
        self._quiet += 1
        if episode.recovered is None:
            self._remember(step, values.get(episode.series))
            back = self._back(episode)
            if back is not None:
                self.open = episode = replace(episode, recovered=back)
                self._quiet = 0
            elif self._quiet >= self.settled:
                self._accepted = True
        done = episode.recovered is not None and self._quiet >= self.gap
        return self.close() if done or self._age > self.give_up else None

    def _remember(self, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self._recent.append([step, value])
            del self._recent[:-LONGEST_WINDOW]

    def _back(self, episode: Episode) -> int | None:
        """Return the step since which the series is at its baseline again, if it is.

        The median over a quarter of the episode's age must be there.
        """
        rows = min(LONGEST_WINDOW, (1 if episode.kind != "rise" else 12) + self._age // 4)
        if len(self._recent) < rows:
            return None
        last = self._recent[-rows:]
        if median(value for _, value in last) - episode.baseline > self._tolerance(episode, rows):
            return None
        return self._since(episode)

    def _tolerance(self, episode: Episode, rows: float) -> float:
        """Return by how much the mean of `rows` rows may exceed the baseline: its noise, but 1 to 3 % of the peak."""
        noise = episode.scale / math.sqrt(rows)
        peak = episode.excess
        return max(min(noise, 0.03 * peak), 0.01 * peak) if math.isfinite(peak) else noise

    def _since(self, episode: Episode) -> int:
        """Return the earliest recent step from which on the rows, taken together, are at the baseline."""
        total, since = 0.0, self._recent[-1][0]
        for count, (step, value) in enumerate(reversed(self._recent), start=1):
            over = value - episode.baseline
            if step <= episode.end or over > 3.5 * episode.scale:
                break
            total += over
            if total / count <= self._tolerance(episode, count / 4):  # two standard errors
                since = step
        return int(since)

    def _extend(self, step: int, verdict: Verdict, value: float) -> None:
        self._quiet = 0
        if self.open is None:
            seen = {name: first for name, (first, _) in self._early.items() if name != verdict.series}
            self._age, self._accepted, self._recent = 0, False, []
            self.open = Episode(
                kind=verdict.kind, series=verdict.series, onset=verdict.onset, detected=step,
                acted=step if verdict.act else None, peak_step=step, peak=value, baseline=verdict.baseline,
                scale=verdict.scale, severity=verdict.score, excess=verdict.excess, end=step, recovered=None,
                precursors=seen,
            )  # fmt: skip
        else:
            self._age += 1
            self.open = self._merge(replace(self.open, recovered=None), step, verdict, value)
        if self.open.series == verdict.series:
            self._remember(step, value)

    @staticmethod
    def _merge(old: Episode, step: int, verdict: Verdict, value: float) -> Episode:
        kind = max(old.kind, verdict.kind, key=GRAVITY.index)
        acted = step if old.acted is None and verdict.act else old.acted
        old = replace(old, kind=kind, severity=max(old.severity, verdict.score), acted=acted, end=step)
        if verdict.series != old.series:
            return replace(old, precursors={verdict.series: step, **old.precursors})
        higher = math.isfinite(verdict.excess) and not verdict.excess <= old.excess
        if higher or not math.isfinite(old.excess):
            return replace(old, peak_step=step, peak=value, excess=verdict.excess)
        return old
