"""The detector's contract: kinds, non-finite values, shifts, gradient norms, state, and what it refuses."""

import json
import math
import random
from collections.abc import Callable

import pytest
import torch

from callbacks.detector import KINDS, Detector, DetectorConfig, Verdict


def noisy(count: int, level: float = 3.0, noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + noise * draw.gauss(0.0, 1.0) for _ in range(count)]


def falling(count: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [4.9 + 4.5 * math.exp(-step / 800) + noise * draw.gauss(0.0, 1.0) for step in range(count)]


def run(values: list[float], config: DetectorConfig | None = None) -> list[Verdict]:
    detector = Detector(config)
    return [detector.update(step, {"loss": value}) for step, value in enumerate(values)]


def acts(verdicts: list[Verdict]) -> list[int]:
    return [step for step, verdict in enumerate(verdicts) if verdict.act]


def raised(values: list[float], start: int, rise: Callable[[int], float], end: int | None = None) -> list[float]:
    out = list(values)
    for step in range(start, len(values) if end is None else end):
        out[step] += rise(step - start)
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_healthy_descent_calls_for_nothing(seed: int, noise: float) -> None:
    verdicts = run(falling(3000, noise, seed))
    assert acts(verdicts) == []
    assert {verdict.kind for verdict in verdicts} == {"ok"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 10, 500])
def test_non_finite_is_flagged_at_once_and_never_blinds(bad: float, at: int) -> None:
    values = noisy(800)
    values[at] = bad
    verdicts = run(raised(values, 700, lambda _: 3.0))
    assert verdicts[at].kind == "non_finite"
    assert verdicts[at].act
    found = acts(verdicts)
    assert found[0] == at
    assert 700 <= found[1] <= 702


def test_non_finite_to_the_end_keeps_its_onset() -> None:
    verdicts = run([*noisy(300), *([math.nan] * 50)])
    assert all(verdict.act and verdict.onset == 300 for verdict in verdicts[300:])


def test_jump_that_stays_is_acted_on_within_two_steps_and_then_becomes_the_baseline() -> None:
    verdicts = run(raised(noisy(2000), 1000, lambda _: 2.0))
    assert 1000 <= acts(verdicts)[0] <= 1002
    assert acts(verdicts)[1:] == []
    assert abs(verdicts[acts(verdicts)[0]].onset - 1000) <= 1
    assert verdicts[1100].kind == "jump"
    assert sum(verdict.kind == "shift" for verdict in verdicts) == 1
    assert all(verdict.kind == "ok" for verdict in verdicts[1400:])
    assert abs(verdicts[-1].baseline - 5.0) < 0.1


def test_mert_jump_is_found_where_peers_are_blind() -> None:
    """5.9 -> 9.2 is x1.56: below every multiple-of-the-mean rule."""
    values = [5.9 + 0.05 * x for x in noisy(3000, 0.0, 1.0)]
    verdicts = run(raised(values, 2000, lambda k: 3.3 * math.exp(-k / 2000)))
    assert 2000 <= acts(verdicts)[0] <= 2001
    assert verdicts[2050].kind == "jump"


@pytest.mark.parametrize("ramp", [1, 50, 500, 2000])
def test_ramps_are_found_before_they_have_cost_two_nats(ramp: int) -> None:
    values = raised(falling(12000), 5000, lambda k: 2.3 * min(1.0, k / ramp))
    found = acts(run(values))
    assert found
    assert found[0] >= 5000
    assert values[found[0]] - 4.9 < 2.0 or ramp == 1


def test_slow_climb_is_a_rise_reported_near_its_start() -> None:
    values = raised(falling(12000, 0.02), 5000, lambda k: 2.3 * min(1.0, k / 5000))
    verdicts = run(values)
    first = acts(verdicts)[0]
    assert verdicts[first].kind == "rise"
    assert 5000 < first < 6000
    assert len(acts(verdicts)) <= 4


def test_runaway_loss_is_a_divergence() -> None:
    values = raised(falling(6000, 0.02), 5000, lambda k: 0.1 * math.exp(min(k, 500) / 60))
    verdicts = run(values)
    assert 5000 <= acts(verdicts)[0] < 5100
    assert "divergence" in {verdict.kind for verdict in verdicts}


def test_small_shift_is_harmless_reported_once_and_becomes_the_baseline() -> None:
    verdicts = run(raised(noisy(3000, 5.0, 0.01), 2000, lambda _: 0.1))
    assert acts(verdicts) == []
    shifts = [step for step, verdict in enumerate(verdicts) if verdict.kind == "shift"]
    assert len(shifts) == 1
    assert 2000 < shifts[0] < 2400
    assert abs(verdicts[-1].baseline - 5.1) < 0.01


def test_single_outlier_in_a_young_run_is_no_reason_to_act() -> None:
    values = noisy(1000)
    values[600] *= 1.4
    verdicts = run(values)
    assert verdicts[600].kind == "outlier"
    assert acts(verdicts) == []
    assert abs(verdicts[601].baseline - 3.0) < 0.05, "the outlier entered the baseline"


def test_runs_whose_data_has_outliers_never_act_on_one() -> None:
    draw = random.Random(3)
    values = noisy(9000)
    for step in range(400, 9000, 150):
        values[step + draw.randrange(100)] *= draw.uniform(1.2, 1.6)
    assert acts(run(values)) == []


def test_lone_outlier_without_precedent_in_a_long_quiet_run_is_acted_on() -> None:
    values = noisy(6000)
    values[5500] *= 1.4
    assert acts(run(values)) == [5500]


def test_epoch_saw_teeth_of_the_noise_size_are_normal() -> None:
    values = [value + 0.05 * (1 - step % 500 / 500) for step, value in enumerate(noisy(8000))]
    assert acts(run(values)) == []


def test_drops_are_normal() -> None:
    values = [value - (0.8 if step > 1500 else 0.0) for step, value in enumerate(noisy(3000))]
    assert {verdict.kind for verdict in run(values)} == {"ok"}


def test_min_rise_sets_what_matters() -> None:
    values = raised(noisy(3000, 5.0, 0.01), 2000, lambda _: 0.1)
    assert acts(run(values, DetectorConfig(min_rise=0.005)))[0] in range(2000, 2010)
    assert acts(run(raised(noisy(3000), 2000, lambda _: 0.6), DetectorConfig(min_rise=0.5))) == []


def test_patience_sets_how_long_a_level_is_held_against_the_run() -> None:
    values = raised(noisy(2000), 1000, lambda _: 2.0)
    ends = [
        next(step for step, verdict in enumerate(run(values, DetectorConfig(patience=rows))) if verdict.kind == "shift")
        for rows in (50, 400)
    ]
    assert ends[0] < 1100
    assert 1350 < ends[1] < 1500


def test_stricter_budgets_raise_the_bars() -> None:
    strict, loose = Detector(DetectorConfig(false_vetoes=0.01)), Detector(DetectorConfig(false_vetoes=100.0))
    draw = random.Random(2)
    for step in range(3000):
        norm = math.exp(0.3 * draw.gauss(0.0, 1.0))
        for detector in (strict, loose):
            detector.update(step, {"loss": 3.0, "grad_norm": norm})
    assert strict.veto_limit() > 1.5 * loose.veto_limit()


def test_gravest_series_wins_and_every_series_is_judged() -> None:
    detector = Detector()
    first, second = noisy(500, seed=1), noisy(500, 5.0, seed=2)
    for step in range(400):
        detector.update(step, {"bits_0": first[step], "bits_1": second[step]})
    verdict = detector.update(400, {"bits_0": first[400], "bits_1": math.nan})
    assert (verdict.kind, verdict.series, verdict.act) == ("non_finite", "bits_1", True)
    for step in range(401, 404):
        verdict = detector.update(step, {"bits_0": 9.0, "bits_1": second[step]})
    assert (verdict.kind, verdict.series) == ("jump", "bits_0")


def test_missing_series_and_gaps_in_steps_are_fine() -> None:
    detector = Detector()
    for row, value in enumerate(noisy(600)):
        values = {"loss": value, "other": 2.0} if row % 3 else {"loss": value}
        assert detector.update(100 * row, values).kind == "ok"


def test_veto_limit_is_infinite_in_warm_up_then_above_the_noise_and_below_a_blow_up() -> None:
    detector, draw = Detector(), random.Random(1)
    assert detector.veto_limit() == math.inf
    limits, norms = [], [math.exp(0.2 * draw.gauss(0.0, 1.0)) for _ in range(5000)]
    for step, norm in enumerate(norms):
        limits.append(detector.veto_limit())
        assert not detector.update(step, {"loss": 3.0, "grad_norm": norm}).act
    assert all(norm <= limit for norm, limit in zip(norms, limits, strict=True))
    assert 2.0 < detector.veto_limit() < 8.0


def test_gradient_norm_never_acts_alone_and_its_limit_gives_way() -> None:
    detector = Detector()
    for step in range(300):
        detector.update(step, {"loss": 3.0 + 0.01 * (step % 7), "grad_norm": 1.0 + 0.1 * (step % 5)})
    limit = detector.veto_limit()
    verdict = detector.update(300, {"loss": 3.0, "grad_norm": 50.0})
    assert (verdict.kind, verdict.series, verdict.act) == ("outlier", "grad_norm", False)
    assert detector.veto_limit() == limit, "a refused norm must not enter the baseline"
    for step in range(301, 320):
        verdict = detector.update(step, {"loss": 3.0, "grad_norm": 50.0})
        assert not verdict.act
    assert detector.veto_limit() == math.inf, "refusing every update is no cure"
    for step in range(320, 400):
        detector.update(step, {"loss": 3.0, "grad_norm": 50.0})
    assert 50.0 < detector.veto_limit() < 500.0
    bad = detector.update(400, {"loss": 3.0, "grad_norm": math.nan})
    assert (bad.kind, bad.act) == ("non_finite", False)


def test_zero_gradient_norms_are_ignored() -> None:
    detector = Detector()
    for step in range(300):
        verdict = detector.update(step, {"loss": 3.0, "grad_norm": 0.0 if step % 10 == 0 else 1.0 + 0.1 * (step % 5)})
        assert verdict.kind == "ok"
    assert detector.veto_limit() < 10.0


def test_state_is_plain_small_and_gives_identical_verdicts_from_any_step(tmp_path) -> None:  # type: ignore[no-untyped-def]
    values = raised(noisy(1500), 700, lambda _: 1.0, 760)
    values[300] = math.nan
    series = [{"loss": value, "grad_norm": abs(value)} for value in values]
    whole = Detector()
    expected = [repr(whole.update(step, row)) for step, row in enumerate(series)]
    for cut in (0, 5, 301, 705, 759, 1000):
        first, second, third = Detector(), Detector(), Detector()
        for step in range(cut):
            first.update(step, series[step])
        text = json.dumps(first.state_dict())
        assert len(text) < 60_000
        torch.save(first.state_dict(), tmp_path / "state.pt")
        second.load_state_dict(json.loads(text))
        third.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for other in (second, third):
            assert [repr(other.update(step, series[step])) for step in range(cut, 1500)] == expected[cut:]
            assert other.veto_limit() == whole.veto_limit()


def test_state_dict_is_a_copy() -> None:
    detector = Detector()
    for step, value in enumerate(noisy(100)):
        detector.update(step, {"loss": value})
    before = json.dumps(detector.state_dict())
    saved = detector.state_dict()
    for step, value in enumerate(noisy(100, seed=1), start=100):
        detector.update(step, {"loss": value})
    assert json.dumps(saved) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("false_alarms", 0.0), ("false_vetoes", -1.0), ("false_alarms", math.nan), ("min_rise", 1.0), ("warmup", 1),
        ("patience", 1),
    ],
)  # fmt: skip
def test_config_refuses_what_makes_no_sense(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        DetectorConfig(**{name: value})  # type: ignore[arg-type]


def test_empty_values_and_foreign_state_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one series"):
        Detector().update(0, {})
    with pytest.raises(ValueError, match="version"):
        Detector().load_state_dict({"version": 99})


def test_kinds_are_the_documented_ones() -> None:
    assert KINDS == ("ok", "outlier", "jump", "rise", "divergence", "shift", "non_finite")
