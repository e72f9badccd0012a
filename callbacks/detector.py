"""The loss-spike detector: one verdict per optimizer step from any set of series.

Online and causal. Every series is judged in units of its own recent noise, so nothing has to be told about its scale,
its trend or how often it is logged. Values that were judged abnormal never enter the baseline, and the baseline is
never frozen for good: a level that stays is accepted and reported once as a shift.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from callbacks.detector_gradient import GradientMonitor
from callbacks.detector_series import Judgement, LossMonitor

KINDS = ("ok", "outlier", "jump", "rise", "divergence", "shift", "non_finite")
GRADIENT_KEY = "grad_norm"


@dataclass(frozen=True)
class DetectorConfig:
    """What a person may want to say about alarms.

    Args:
        false_alarms: tolerated false alarms of a loss-like series per 100 000 healthy steps; fewer is stricter.
        false_vetoes: tolerated refused updates (gradient norm alone) per 100 000 healthy steps.
        min_rise: smallest rise that matters, as a fraction of the level or of the run's range, whichever is larger.
        warmup: accepted values of a series before it is judged (non-finite values are always judged).
        patience: steps after which a raised but steady level is accepted as the new normal.

    Raises:
        ValueError: a value is out of its range.
    """

    false_alarms: float = 0.3
    false_vetoes: float = 1.0
    min_rise: float = 0.03
    warmup: int = 20
    patience: int = 300

    def __post_init__(self) -> None:
        for name in ("false_alarms", "false_vetoes"):
            value = getattr(self, name)
            if not 0.0 < value <= 1000.0:
                raise ValueError(f"{name}={value!r}: expected a rate per 100000 steps in (0, 1000]")
        if not 0.0 <= self.min_rise < 1.0:
            raise ValueError(f"min_rise={self.min_rise!r}: expected a fraction in [0, 1)")
        if self.warmup < 8:
            raise ValueError(f"warmup={self.warmup!r}: expected at least 8 values")
        if self.patience < 16:
            raise ValueError(f"patience={self.patience!r}: expected at least 16 steps")


class Verdict(NamedTuple):
    """What one step looked like.

    Attributes:
        kind: one of `KINDS`.
        act: whether a guard should act now.
        onset: the step at which this departure is estimated to have begun (the step itself when ok).
        series: the series that the verdict is about.
        score: departure from the baseline in units of the noise.
        baseline: expected value of that series, in its own unit.
        scale: its noise, in its own unit.
        excess: value minus baseline, in its own unit.
    """

    kind: str
    act: bool
    onset: int
    series: str
    score: float
    baseline: float
    scale: float
    excess: float


_RANK = {kind: rank for rank, kind in enumerate(("ok", "shift", "outlier", "rise", "jump", "divergence", "non_finite"))}


class Detector:
    """Judges each step's values; see `DetectorConfig` for its few parameters.

    The first key of `values` is the series that matters most; a key that contains "grad_norm" is judged as a gradient
    norm (on a log scale, at its own budget) and never asks for action on its own: it is what `veto_limit` is made from,
    so that a bad update is refused before it is made, and what an episode's precursors are.
    """

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self.config = config or DetectorConfig()
        self.monitors: dict[str, LossMonitor | GradientMonitor] = {}
        self._gradient: GradientMonitor | None = None

    def update(self, step: int, values: Mapping[str, float]) -> Verdict:
        """Judge one optimizer step.

        Args:
            step: the step's number; only its order matters, gaps are fine.
            values: value of each series at this step; a series may be missing at some steps.

        Returns:
            The gravest finding: one that asks for action before one that does not, a loss-like series before a gradient
            norm, then by kind; on a tie the series that comes first in `values`.

        Raises:
            ValueError: `values` is empty.
        """
        worst: tuple[bool, bool, int] | None = None
        gravest: tuple[str, Judgement] | None = None
        for name, value in values.items():
            found = (self.monitors.get(name) or self._add(name)).update(int(step), float(value))
            rank = (found.act, found.kind != "ok" and GRADIENT_KEY not in name, _RANK[found.kind])
            if worst is None or rank > worst:
                worst, gravest = rank, (name, found)
        if gravest is None:
            raise ValueError("values={}: expected at least one series")
        name, found = gravest
        return Verdict(found.kind, found.act, found.onset, name, found.score, found.baseline, found.scale, found.excess)

    def veto_limit(self) -> float:
        """Return the largest gradient norm that should not be refused now; infinity while there is no baseline."""
        return math.inf if self._gradient is None else self._gradient.limit()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers, strings, lists and dicts."""
        return {
            "version": 1,
            "config": asdict(self.config),
            "series": {name: monitor.state_dict() for name, monitor in self.monitors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the detector keeps its own configuration.

        Raises:
            ValueError: the state is of another version.
        """
        if state.get("version") != 1:
            raise ValueError(f"detector state version {state.get('version')!r}: expected 1")
        self.monitors, self._gradient = {}, None
        for name, saved in state["series"].items():
            self._add(name).load_state_dict(saved)

    def _add(self, name: str) -> LossMonitor | GradientMonitor:
        config = self.config
        if GRADIENT_KEY in name:
            gradient = GradientMonitor(
                config.warmup, config.false_vetoes / 3e5
            )  # a record is an estimate: keep in hand
            self._gradient = self._gradient or gradient
            self.monitors[name] = gradient
            return gradient
        loss = LossMonitor(config.warmup, config.patience, config.min_rise, config.false_alarms / 1e5)
        self.monitors[name] = loss
        return loss
