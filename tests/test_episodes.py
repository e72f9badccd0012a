"""Verdicts to episodes."""

import json
import math
import random

from callbacks.detector import Detector
from callbacks.episodes import Episode, EpisodeTracker


def follow(series: list[dict[str, float]]) -> tuple[list[Episode], EpisodeTracker]:
    detector, tracker = Detector(), EpisodeTracker()
    closed = []
    for step, row in enumerate(series):
        done = tracker.update(step, detector.update(step, row), row)
        if done is not None:
            closed.append(done)
    return closed, tracker


def rows(count: int, seed: int = 0) -> list[dict[str, float]]:
    draw = random.Random(seed)
    return [
        {"loss": 3.0 + 0.05 * draw.gauss(0, 1), "grad_norm": math.exp(0.1 * draw.gauss(0, 1))} for _ in range(count)
    ]


def test_a_jump_that_recovers_is_one_episode_with_its_numbers() -> None:
    series = rows(1200)
    for step in range(600, 660):
        series[step]["loss"] += 2.0
    series[598]["grad_norm"] = 40.0
    closed, tracker = follow(series)
    assert tracker.open is None
    (episode,) = closed
    assert episode.kind == "jump"
    assert episode.actionable
    assert abs(episode.onset - 600) <= 1
    assert 600 <= episode.peak_step < 660
    assert 4.9 < episode.peak < 5.3
    assert 1.8 < episode.excess < 2.3
    assert episode.severity > 10
    assert episode.recovered is not None
    assert 660 <= episode.recovered <= 664
    assert episode.precursors == {"grad_norm": 598}


def test_non_finite_to_the_end_stays_open_and_can_be_closed() -> None:
    series = rows(400)
    for step in range(300, 400):
        series[step]["loss"] = math.nan
    closed, tracker = follow(series)
    assert closed == []
    last = tracker.close()
    assert last is not None
    assert (last.kind, last.onset, last.recovered) == ("non_finite", 300, None)


def test_tracker_state_round_trip_inside_an_episode() -> None:
    series = rows(900)
    for step in range(600, 660):
        series[step]["loss"] += 2.0
    expected, _ = follow(series)
    detector, tracker, again = Detector(), EpisodeTracker(), EpisodeTracker()
    for step in range(620):
        tracker.update(step, detector.update(step, series[step]), series[step])
    again.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    closed = [
        done
        for step in range(620, 900)
        if (done := again.update(step, detector.update(step, series[step]), series[step]))
    ]
    assert closed == expected
