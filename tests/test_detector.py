"""The detector's contract: kinds, non-finite values, state, and the veto limit."""

import json
import math
import random

import pytest

from callbacks.detector import Detector, DetectorConfig, Verdict


def noisy(count: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + noise * draw.gauss(0.0, 1.0) for _ in range(count)]


def run(values: list[float], config: DetectorConfig | None = None) -> list[Verdict]:
    detector = Detector(config)
    return [detector.update(step, {"loss": value}) for step, value in enumerate(values)]


def acts(verdicts: list[Verdict]) -> list[int]:
    return [step for step, verdict in enumerate(verdicts) if verdict.act]


def test_healthy_run_is_ok() -> None:
    assert acts(run(noisy(3000))) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 10, 500])
def test_non_finite_is_flagged_at_once_and_never_blinds(bad: float, at: int) -> None:
    values = noisy(800)
    values[at] = bad
    values[700:] = [value + 3.0 for value in values[700:]]
    verdicts = run(values)
    assert verdicts[at].kind == "non_finite"
    assert verdicts[at].act
    found = acts(verdicts)
    assert found[0] == at
    assert 700 <= found[1] <= 702


def test_jump_that_stays_is_acted_on_within_two_steps_and_then_becomes_the_baseline() -> None:
    values = noisy(2000)
    values[1000:] = [value + 2.0 for value in values[1000:]]
    verdicts = run(values)
    assert 1000 <= acts(verdicts)[0] <= 1002
    assert verdicts[acts(verdicts)[0]].onset in (999, 1000, 1001)
    assert sum(verdict.kind == "shift" for verdict in verdicts) == 1
    assert all(verdict.kind == "ok" for verdict in verdicts[1700:])


def test_single_small_outlier_is_no_reason_to_act() -> None:
    values = noisy(1000)
    values[600] *= 1.4
    verdicts = run(values)
    assert verdicts[600].kind == "outlier"
    assert acts(verdicts) == []


def test_state_round_trip_gives_identical_verdicts_from_any_step() -> None:
    values = noisy(900)
    values[500:560] = [value + 1.0 for value in values[500:560]]
    values[300] = math.nan
    series = [{"loss": value, "grad_norm": abs(value)} for value in values]
    whole = Detector()
    expected = [repr(whole.update(step, row)) for step, row in enumerate(series)]
    for cut in (5, 301, 505, 559, 600):
        first, second = Detector(), Detector()
        for step in range(cut):
            first.update(step, series[step])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [repr(second.update(step, series[step])) for step in range(cut, 900)] == expected[cut:]
        assert second.veto_limit() == whole.veto_limit()


def test_veto_limit_is_infinite_in_warm_up_then_above_the_noise_and_below_a_blow_up() -> None:
    detector, draw = Detector(), random.Random(1)
    assert detector.veto_limit() == math.inf
    norms = [math.exp(0.2 * draw.gauss(0.0, 1.0)) for _ in range(2000)]
    limits = []
    for step, norm in enumerate(norms):
        limits.append(detector.veto_limit())
        detector.update(step, {"loss": 3.0, "grad_norm": norm})
    assert all(norm < limit for norm, limit in zip(norms, limits, strict=True))
    assert 2.0 < detector.veto_limit() < 12.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("false_alarms", 0.0), ("false_vetoes", -1.0), ("min_rise", 1.0), ("warmup", 1), ("patience", 1)],
)
def test_config_refuses_what_makes_no_sense(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        DetectorConfig(**{name: value})


def test_empty_values_and_foreign_state_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one series"):
        Detector().update(0, {})
    with pytest.raises(ValueError, match="version"):
        Detector().load_state_dict({"version": 99})
