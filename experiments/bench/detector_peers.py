"""Public loss-spike rules, written anew from their formulas at their own default parameters.

Every rule is causal: `rule(loss, grad_norm) -> flagged`, arrays of shape [N], one row per logged step; the decision for
a row uses that row and earlier ones. The trace is open loop: a flag does not change what follows. Loops are compiled
when numba is installed (extra `bench`) and run as plain Python otherwise, with equal results.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

FloatN = npt.NDArray[np.float64]
BoolN = npt.NDArray[np.bool_]
Rule = Callable[[FloatN, FloatN], BoolN]
F = TypeVar("F", bound=Callable[..., Any])

try:
    from numba import njit
except ImportError:  # plain Python loops: the same numbers, slower
    njit = None


def compiled(function: F) -> F:
    """Compile with numba where there is numba."""
    return function if njit is None else cast(F, njit(cache=True)(function))


@compiled
def _lightning(x: FloatN, window: int, relative: float) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    ring = np.zeros(window)
    place, filled, last = 0, 0, 0.0
    for t in range(x.size):
        v = x[t]
        if t >= 1:
            mean = ring[:filled].sum() / filled if filled else math.nan
            rise = v - last > 0.0 and abs(v - mean) >= abs(relative * mean)
            flagged[t] = not math.isfinite(v) or rise
        if not flagged[t]:
            last = v
            if not math.isnan(v):
                ring[place] = v
                place, filled = (place + 1) % window, min(window, filled + 1)
    return flagged


@compiled
def _kill_loss_spike(x: FloatN, patience: int, multiple: float, window: int, cap: float) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    total, bad, high, count = 0.0, 0, 0, 0
    for t in range(x.size):
        if t >= window:
            mean = total / window if bad == 0 else math.nan
            count = count + 1 if x[t] >= multiple * mean else 0
            flagged[t] = count > patience or (t + 1 >= 2 * window and high >= window / 2)
            old = x[t - window]
            if math.isfinite(old):
                total -= old
            else:
                bad -= 1
            high -= old > cap
        if math.isfinite(x[t]):
            total += x[t]
        else:
            bad += 1
        high += x[t] > cap
    return flagged


@compiled
def _sigma_window(x: FloatN, window: int, sigma: float) -> BoolN:
    """OLMo-core skip-step: keep a step iff x - mean <= sigma std of the previous `window` values (any NaN: skip)."""
    flagged = np.zeros(x.size, np.bool_)
    for t in range(max(2, window // 2) - 1, x.size):
        past = x[max(0, t - window) : t]
        mean = past.sum() / past.size
        std = math.sqrt(((past - mean) ** 2).sum() / (past.size - 1)) if past.size > 1 else math.nan
        flagged[t] = not (x[t] - mean <= sigma * std)
    return flagged


@compiled
def _running_z(x: FloatN, window: int, z: float) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    total, squares = 0.0, 0.0
    for t in range(x.size):
        total += x[t]
        squares += x[t] * x[t]
        if t >= window:
            total -= x[t - window]
            squares -= x[t - window] * x[t - window]
            variance = squares / window - (total / window) ** 2
            flagged[t] = variance > 0.0 and (x[t] - total / window) > z * math.sqrt(variance)
    return flagged


@compiled
def _megatron(x: FloatN, factor: float, samples: int) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    largest, seen = 0.0, 0
    for t in range(x.size):
        if not math.isfinite(x[t]):
            flagged[t] = True  # its separate NaN check
        elif seen < samples:
            largest, seen = max(largest, abs(x[t])), seen + 1
        else:
            flagged[t] = abs(x[t]) >= factor * largest
    return flagged


@compiled
def _flagscale(x: FloatN, rise: float, start: int) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    if x.size <= start:
        return flagged
    last = x[start]
    for t in range(start + 1, x.size):
        if math.isnan(x[t]) or math.isnan(last):
            last = x[t]
        elif math.isinf(x[t]) or math.isinf(last) or (x[t] - last) / last >= rise:
            flagged[t] = True
        else:
            last = x[t]
    return flagged


@compiled
def _average_ratio(x: FloatN, ratio: float, gain: float) -> BoolN:
    """metaseq's span-9 average, and any rule of the form x > ratio * EMA with the spikes kept out."""
    flagged = np.zeros(x.size, np.bool_)
    average = x[0]
    for t in range(x.size):
        if x[t] / average > ratio if average != 0.0 else False:
            flagged[t] = True
        else:
            average += gain * (x[t] - average)
    return flagged


@compiled
def _mean_ratio(x: FloatN, window: int, ratio: float) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    for t in range(window, x.size):
        flagged[t] = x[t] > ratio * x[t - window : t].sum() / window
    return flagged


@compiled
def _school_of_ai(x: FloatN, window: int, z: float, ratio: float, least: float, cooldown: int) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    ring = np.zeros(window)
    place, filled, wait = 0, 0, 0
    for t in range(x.size):
        if filled == window and wait == 0:
            mean, std = ring.mean(), ring.std()
            flagged[t] = x[t] - mean >= least and (x[t] > mean + z * std or x[t] > ratio * mean)
        wait = max(0, wait - 1)
        if flagged[t]:
            wait = cooldown
        elif math.isfinite(x[t]):
            ring[place] = x[t]
            place, filled = (place + 1) % window, min(window, filled + 1)
    return flagged


@compiled
def _zclip(g: FloatN, keep: float, z: float, warmup: int) -> BoolN:
    flagged = np.zeros(g.size, np.bool_)
    if g.size <= warmup:
        return flagged
    mean, variance = g[:warmup].mean(), g[:warmup].var()
    for t in range(warmup, g.size):
        std = math.sqrt(variance)
        score, taken = (g[t] - mean) / (std + 1e-6), g[t]
        if score > z:
            flagged[t] = True
            taken = mean + z * std / (score / z)
        mean = keep * mean + (1.0 - keep) * taken
        variance = keep * variance + (1.0 - keep) * (taken - mean) ** 2
    return flagged


@compiled
def _median_mad(x: FloatN, window: int, z: float, least: int, floor: float, longest: int) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    ring = np.zeros(window)
    place, filled, run = 0, 0, 0
    middle, spread = 0.0, math.inf
    for t in range(x.size):
        if not math.isfinite(x[t]):
            flagged[t] = True
            continue
        if filled >= least:
            middle = np.median(ring[:filled])
            spread = max(1.4826 * np.median(np.abs(ring[:filled] - middle)), floor * abs(middle))
            flagged[t] = x[t] - middle > z * spread
        run = run + 1 if flagged[t] else 0
        if not flagged[t] or run > longest:
            ring[place] = x[t]
            place, filled = (place + 1) % window, min(window, filled + 1)
    return flagged


@compiled
def _average_z(x: FloatN, gain: float, z: float, slack: float, warmup: int) -> BoolN:
    """EMA z-score (slack < 0), or CUSUM of the EMA residuals with slack k and height z."""
    flagged = np.zeros(x.size, np.bool_)
    mean, variance, total = x[0], 0.0, 0.0
    for t in range(1, x.size):
        d = x[t] - mean
        if not math.isfinite(d):
            flagged[t] = True
            continue
        if t >= warmup and variance > 0.0:
            score = d / math.sqrt(variance)
            total = max(0.0, total + score - slack)
            flagged[t] = score > z if slack < 0.0 else total > z
            if flagged[t]:
                total = 0.0
                if slack < 0.0:
                    continue
        mean += gain * d
        variance = (1.0 - gain) * (variance + gain * d * d)
    return flagged


@compiled
def _page_hinkley(x: FloatN, slack: float, height: float, keep: float, least: int) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    mean, count, total, lowest = 0.0, 0, 0.0, 0.0
    for t in range(x.size):
        if not math.isfinite(x[t]):
            flagged[t] = True
            continue
        count += 1
        mean += (x[t] - mean) / count
        total = keep * total + (x[t] - mean - slack)
        lowest = min(lowest, total)
        if count >= least and total - lowest > height:
            flagged[t] = True
            mean, count, total, lowest = 0.0, 0, 0.0, 0.0
    return flagged


def _ratio_to_last(x: FloatN, ratio: float) -> BoolN:
    flagged = np.zeros(x.size, np.bool_)
    flagged[1:] = x[1:] > ratio * x[:-1]
    return flagged


def _either(rule: Callable[[FloatN], BoolN], loss: FloatN, grad_norm: FloatN) -> BoolN:
    """Judge the loss, and the gradient norm too where it is logged."""
    flagged = rule(loss)
    return flagged | rule(grad_norm) if np.isfinite(grad_norm).any() else flagged


def _gradient_only(rule: Callable[[FloatN], BoolN], grad_norm: FloatN) -> BoolN:
    logged = np.isfinite(grad_norm).any()
    return rule(grad_norm) if logged else np.zeros(grad_norm.size, np.bool_)


# name -> rule; sources: the tools' own code or documentation, numbers are their defaults (river's for Page-Hinkley)
PEERS: dict[str, Rule] = {
    "Lightning SpikeDetection": lambda x, g: _lightning(x, 10, 2.0),
    "Lightning, rtol 0.3": lambda x, g: _lightning(x, 10, 0.3),
    "llm-foundry KillLossSpike": lambda x, g: _kill_loss_spike(x, 4, 2.0, max(100, round(0.05 * x.size)), 10.0),
    "OLMo-core skip-step, loss": lambda x, g: _sigma_window(x, 128, 6.0),
    "OLMo-core skip-step, loss and norm": lambda x, g: _either(lambda v: _sigma_window(v, 128, 6.0), x, g),
    "llm.c z 7, loss and norm": lambda x, g: _either(lambda v: _running_z(v, 128, 7.0), x, g),
    "Megatron spiky x10 and NaN": lambda x, g: _megatron(x, 10.0, 100),
    "FlagScale +20%": lambda x, g: _flagscale(x, 0.2, 500),
    "InternEvo x1.5": lambda x, g: _ratio_to_last(x, 1.5),
    "metaseq EWM ratio 1.2": lambda x, g: _average_ratio(x, 1.2, 0.2),
    "ksuit +20% of mean 50": lambda x, g: _mean_ratio(x, 50, 1.2),
    "School-of-AI z 3 / ratio 2": lambda x, g: _school_of_ai(x, 100, 3.0, 2.0, 0.5, 50),
    "entrenar 3x EMA": lambda x, g: _average_ratio(x, 3.0, 0.1),
    "NaN only (Composer, Keras)": lambda x, g: ~np.isfinite(x),
    "ZClip z 2.5 (norm)": lambda x, g: _gradient_only(lambda v: _zclip(v, 0.97, 2.5, 25), g),
    "median/MAD z 8": lambda x, g: _median_mad(x, 256, 8.0, 64, 0.002, 200),
    "EMA z 6": lambda x, g: _average_z(x, 0.02, 6.0, -1.0, 100),
    "CUSUM k 0.5 h 8": lambda x, g: _average_z(x, 0.02, 8.0, 0.5, 100),
    "Page-Hinkley": lambda x, g: _page_hinkley(x, 0.005, 50.0, 0.9999, 30),
}
