"""Properties that hold for any series: no scale, no blind spot, no lost state, no crash."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callbacks.detector import KINDS, Detector, DetectorConfig
from callbacks.detector_state import SortedWindow
from callbacks.episodes import EpisodeTracker

FAST = settings(max_examples=25, deadline=None, derandomize=True)


def spiked(seed: int, count: int = 600) -> list[float]:
    """A falling noisy curve with one sustained jump, values in (1, 12)."""
    draw = random.Random(seed)
    start = draw.randrange(count // 3, count // 2)
    values = [3.0 + 4.0 * math.exp(-step / 60) + 0.05 * draw.gauss(0, 1) for step in range(count)]
    for step in range(start, start + draw.randrange(3, 40)):
        values[step] += draw.uniform(1.0, 4.0)
    return values


def decisions(values: list[float], config: DetectorConfig | None = None) -> list[tuple[str, bool, int]]:
    detector = Detector(config)
    verdicts = (detector.update(step, {"loss": value}) for step, value in enumerate(values))
    return [(verdict.kind, verdict.act, verdict.onset) for verdict in verdicts]


@FAST
@given(seed=st.integers(0, 10_000), power=st.integers(-60, 60))
def test_scale_does_not_matter(seed: int, power: int) -> None:
    values = spiked(seed)
    assert any(act for _, act, _ in decisions(values))
    assert decisions([value * 2.0**power for value in values]) == decisions(values)


@FAST
@given(seed=st.integers(0, 10_000), offset=st.sampled_from([-1.0, -3.0, -8.0, -40.0]))
def test_jumps_are_found_in_losses_near_or_below_zero(seed: int, offset: float) -> None:
    found = [step for step, (_, act, _) in enumerate(decisions([value + offset for value in spiked(seed)])) if act]
    expected = [step for step, (_, act, _) in enumerate(decisions(spiked(seed))) if act]
    assert found
    assert abs(found[0] - expected[0]) <= 2


numbers = st.floats(allow_nan=True, allow_infinity=True, width=64)


@FAST
@given(values=st.lists(numbers, min_size=1, max_size=200), norms=st.lists(numbers, min_size=200, max_size=200))
def test_no_input_breaks_it_and_non_finite_is_always_seen(values: list[float], norms: list[float]) -> None:
    detector, tracker = Detector(DetectorConfig(warmup=8)), EpisodeTracker()
    for step, (value, norm) in enumerate(zip(values, norms, strict=False)):
        row = {"loss": value, "grad_norm": norm}
        verdict = detector.update(step, row)
        assert verdict.kind in KINDS
        assert (verdict.kind == "non_finite" and verdict.series == "loss") == (not math.isfinite(value))
        assert verdict.onset <= step
        assert not math.isnan(detector.veto_limit())
        tracker.update(step, verdict, row)
    json.dumps(detector.state_dict())


@FAST
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 599), bad=st.lists(st.integers(0, 599), max_size=4))
def test_round_trip_at_any_step_changes_no_decision(seed: int, cut: int, bad: list[int]) -> None:
    values = spiked(seed)
    for step in bad:
        values[step] = math.nan
    first, second = Detector(), Detector()
    for step in range(cut):
        first.update(step, {"loss": values[step]})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(cut, 600):
        row = {"loss": values[step]}
        assert repr(first.update(step, row)) == repr(second.update(step, row))


@FAST
@given(value=st.floats(-1e300, 1e300), tiny=st.floats(0, 1e-9))
def test_constant_series_are_ok(value: float, tiny: float) -> None:
    values = [value * (1.0 + tiny * (step % 2)) for step in range(300)]
    assert {kind for kind, _, _ in decisions(values)} == {"ok"}


@FAST
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), size=st.integers(1, 40))
def test_sorted_window_agrees_with_numpy(values: list[float], size: int) -> None:
    window = SortedWindow(size)
    for count, value in enumerate(values, start=1):
        window.push(value)
        last = values[max(0, count - size) : count]
        assert window.values() == last
        assert window.median() == pytest.approx(float(np.median(last)))
        for q in (0.0, 0.25, 0.95, 1.0):
            assert window.quantile(q) == pytest.approx(float(np.quantile(last, q)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_any_logging_interval_finds_the_jump(seed: int) -> None:
    draw = random.Random(seed)
    curve = [3.0 + 6.0 * math.exp(-step / 3000) for step in range(40_000)]
    for step in range(25_000, 33_000):
        curve[step] += 2.5 * (1 - (step - 25_000) / 8000)
    for interval in (10, 50, 200):
        rows = [curve[step] + 0.05 * draw.gauss(0, 1) for step in range(0, len(curve), interval)]
        found = [row for row, (_, act, _) in enumerate(decisions(rows)) if act]
        assert found
        assert 0 <= found[0] - 25_000 // interval <= 2


@pytest.mark.slow
def test_false_alarms_and_refused_updates_stay_in_budget_on_heavy_tails() -> None:
    draw = np.random.default_rng(0)
    alarms = refused = rows = 0
    for _ in range(20):
        detector = Detector()
        loss = 3.0 + 4.0 * np.exp(-np.arange(20_000) / 500) + 0.05 * draw.standard_t(4, 20_000)
        norm = np.exp(0.2 * draw.standard_t(5, 20_000))
        for step, (value, grad) in enumerate(zip(loss.tolist(), norm.tolist(), strict=True)):
            refused += step >= 100 and grad > detector.veto_limit()
            alarms += detector.update(step, {"loss": value, "grad_norm": grad}).act
            rows += 1
    assert alarms / rows * 1e5 <= 0.75
    assert refused / rows * 1e5 <= 1.0
