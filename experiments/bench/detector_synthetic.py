"""Synthetic loss and gradient-norm traces with one labelled event each, and the score of a detector on them.

Loss: power law with relative noise that shrinks to 0.4 - 5 %, autocorrelated (rho 0 .. 0.9), Gaussian or Student t with
4 or 8 degrees of freedom. Jumps are by a factor of 1.05 .. 3. The gradient norm is a log-normal model of our own.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FloatN = npt.NDArray[np.float64]

SHAPES = ("exp_recovery", "ramp200", "glitch", "nan", "plateau", "diverge", "lr_drop")
SIZES = {"x1.05-1.2": 1.2, "x1.2-1.6": 1.6, "x1.6-3": math.inf}  # name -> upper end of the jump factor
SIZED = ("exp_recovery", "ramp200", "plateau")
EARLY, MARGIN, GAP = 500, 5, 50  # rows not scored at the start; precursor rows before the event; rows that join alarms


@dataclass
class Trace:
    """One synthetic run: loss [N], grad_norm [N], and its event (none for shapes "clean" and "lr_drop")."""

    shape: str
    loss: FloatN
    grad_norm: FloatN
    start: int | None = None
    horizon: int = 0  # rows after `start` within which an alarm counts
    factor: float = 0.0

    @property
    def has_event(self) -> bool:
        """Whether something is there to be found."""
        return self.shape not in ("clean", "lr_drop")


def _noise(draw: np.random.Generator, n: int, rho: float, freedom: int | None) -> FloatN:
    """Return unit-variance AR(1) noise [n] from normal or Student-t innovations."""
    if freedom is None:
        innovation = draw.standard_normal(n)
    else:
        innovation = draw.standard_t(freedom, n) / math.sqrt(freedom / (freedom - 2))
    innovation *= math.sqrt(1 - rho * rho)
    out = np.empty(n)
    out[0] = innovation[0] / math.sqrt(1 - rho * rho)
    for t in range(1, n):
        out[t] = rho * out[t - 1] + innovation[t]
    return out


def _log_uniform(draw: np.random.Generator, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def make(draw: np.random.Generator, shape: str, n: int) -> Trace:
    """Draw one trace of `n` rows."""
    t = np.arange(n)
    final, gain = draw.uniform(2, 6), draw.uniform(2, 4)
    tau, power = _log_uniform(draw, 50, 500), draw.uniform(0.3, 0.8)
    base = final + gain * (1 + t / tau) ** -power
    relative = _log_uniform(draw, 0.004, 0.05) * (1 + draw.uniform(1, 3) * (1 + t / tau) ** -0.5)
    rho = draw.choice([0.0, 0.3, 0.6, 0.9])
    freedom = draw.choice([4, 8, 0, 0]) or None
    loss = base * (1 + relative * _noise(draw, n, rho, freedom))
    norm = _log_uniform(draw, 0.2, 3) * (0.3 + 2 * (1 + t / 100) ** -0.7)
    norm_rho = draw.choice([0.0, 0.3, 0.6])
    norm = norm * np.exp(0.2 * _noise(draw, n, norm_rho, draw.choice([5, 0]) or None))
    trace = Trace(shape, loss, norm)
    if shape != "clean":
        trace.start = int(draw.uniform(0.3, 0.7) * n)
        trace.factor = _log_uniform(draw, 1.05, 3)
        _add_event(draw, trace, base, gain)
    return trace


def _add_event(draw: np.random.Generator, trace: Trace, base: FloatN, gain: float) -> None:
    assert trace.start is not None
    start, loss, norm, extra = trace.start, trace.loss, trace.grad_norm, trace.factor - 1
    k = np.arange(loss.size - start)
    rise = base[start] * extra
    if trace.shape == "exp_recovery":
        back = _log_uniform(draw, 20, 2000)
        loss[start:] += rise * np.exp(-k / back)
        if draw.random() < 0.5:  # the norm leaves its range first, as in the BLOOM-176B log
            norm[start - 4 : start] *= np.array([4, 10, 60, 500.0]) ** draw.uniform(0.5, 1)
        norm[start:] *= 1 + 300 * extra * np.exp(-k / (back / 8))
        trace.horizon = 300
    elif trace.shape == "ramp200":
        ramp = np.where(k > 200, np.exp(-(k - 200) / 500.0), k / 200.0)
        loss[start:] += rise * ramp
        norm[start:] *= 1 + 6 * extra * ramp
        trace.horizon = 400
    elif trace.shape == "glitch":
        loss[start] += rise
        norm[start] *= 1 + 4 * extra
        trace.horizon = 1
    elif trace.shape == "nan":
        loss[start] = math.nan if draw.random() < 0.7 else math.inf
        norm[start] = math.nan
        trace.horizon = 1
    elif trace.shape == "plateau":
        loss[start:] += rise
        norm[start:] *= 1.3 + 20 * extra * np.exp(-k / 30.0)
        trace.horizon = 500
    elif trace.shape == "diverge":
        growth = np.minimum(0.02 * np.exp(k / draw.uniform(60, 300)), max(1.5 * gain / base[start], 0.8))
        loss[start:] *= 1 + growth
        norm[start:] *= 1 + 50 * growth
        trace.horizon, trace.factor = 600, float(1 + growth.max())
    else:
        assert trace.shape == "lr_drop"
        loss[start:] *= 1 - draw.uniform(0.02, 0.12) * (1 - np.exp(-k / 30.0))
        norm[start:] *= 0.8


def traces(count: int, rows: int, seed: int) -> list[Trace]:
    """Return `count` traces: three tenths clean, the rest shared equally by `SHAPES`."""
    draw = np.random.default_rng(seed)
    each = max(1, round(0.1 * count))
    clean = max(1, count - each * len(SHAPES))
    shapes = ["clean"] * clean + [shape for shape in SHAPES for _ in range(each)]
    return [make(draw, shape, rows) for shape in shapes]


@dataclass
class SyntheticScore:
    """Counts over a set of traces."""

    found: int = 0
    events: int = 0
    false_alarms: int = 0
    clean_rows: int = 0
    longest: int = 0  # longest run of flagged rows after an event
    delays: list[int] = field(default_factory=list)
    kinds: dict[str, list[int]] = field(default_factory=lambda: {s: [0, 0] for s in SHAPES[:-1]})
    sizes: dict[str, list[int]] = field(default_factory=lambda: {s: [0, 0] for s in SIZES})

    def add(self, trace: Trace, flagged: npt.NDArray[np.int64]) -> None:
        """Count one trace; `flagged` holds the rows at which the detector called for action, ascending."""
        end = trace.start - MARGIN if trace.has_event and trace.start is not None else trace.loss.size
        quiet = flagged[(flagged >= EARLY) & (flagged < end)]
        self.false_alarms += int((np.diff(quiet, prepend=np.int64(-GAP - 1)) > GAP).sum()) if quiet.size else 0
        self.clean_rows += max(0, end - EARLY)
        if not trace.has_event or trace.start is None:
            return
        hits = flagged[(flagged >= trace.start - MARGIN) & (flagged <= trace.start + trace.horizon)]
        places = [self.kinds[trace.shape]]
        if trace.shape in SIZED:
            places.append(self.sizes[next(name for name, end in SIZES.items() if trace.factor < end)])
        for place in places:
            place[0] += bool(hits.size)
            place[1] += 1
        self.events += 1
        self.found += bool(hits.size)
        if hits.size:
            self.delays.append(int(hits[0]) - trace.start)
        self.longest = max(self.longest, _longest_run(flagged[flagged > trace.start]))

    def row(self) -> dict[str, Any]:
        """Return the table's numbers."""
        delays: list[float] = [*self.delays] or [math.nan]
        return {
            "recall": self.found / max(1, self.events),
            "precision": self.found / max(1, self.found + self.false_alarms),
            "fa_per_100k": 1e5 * self.false_alarms / max(1, self.clean_rows),
            "median_delay": float(np.median(delays)),
            "p90_delay": float(np.quantile(delays, 0.9)),
            "longest_run": self.longest,
            "kinds": {k: f"{a}/{b}" for k, (a, b) in self.kinds.items()},
            "sizes": {k: f"{a}/{b}" for k, (a, b) in self.sizes.items()},
        }


def _longest_run(rows: npt.NDArray[np.int64]) -> int:
    if not rows.size:
        return 0
    breaks = np.flatnonzero(np.diff(rows) > 1)
    edges = np.concatenate([np.array([-1]), breaks, np.array([rows.size - 1])])
    return int(np.diff(edges).max())
