"""The detector benchmark: its data, its score, the peers' rules, and what the detector reaches on it."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from callbacks.detector import Detector
from callbacks.episodes import Episode, EpisodeTracker

os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # compiling takes longer than these short traces

from experiments.bench import detector as bench
from experiments.bench.detector_curves import JUMP, NOISES, SPIKED, traces
from experiments.bench.detector_gradients import bloom_replays
from experiments.bench.detector_peers import PEERS
from experiments.bench.detector_synthetic import SHAPES, SyntheticScore, Trace
from experiments.bench.detector_synthetic import traces as synthetic
from experiments.bench.detector_traces import (
    ACTIONABLE,
    BENIGN,
    FOLDER,
    HELD_OUT,
    IGNORED,
    NORMAL,
    RealScore,
    RealTrace,
    alarms,
    load,
    zones,
)

SHORT = 6000  # rows; the longer runs are scored by the slow test and the benchmark itself


def events(steps: list[float], values: list[float]) -> list[Episode]:
    detector, tracker, found = Detector(), EpisodeTracker(), []
    for step, value in zip(steps, values, strict=True):
        row = {"bits": value}
        done = tracker.update(int(step), detector.update(int(step), row), row)
        found += [done] if done else []
    last = tracker.close()
    return found + ([last] if last else [])


def check_figure(noise: float, interval: int, near: int) -> None:
    for name, steps, bits in traces(noise, interval):
        found = events(steps.tolist(), bits.tolist())
        if name != SPIKED:
            assert found == [], f"{name} at noise {noise}"
            continue
        (episode,) = found
        assert episode.kind == "jump"
        assert episode.actionable
        assert abs(episode.onset - JUMP) <= 2 * interval
        assert episode.recovered is not None
        assert abs(episode.recovered - 30_000) <= near


@pytest.mark.parametrize("noise", NOISES)
def test_figure_logged_every_100_steps_has_one_episode_on_deepnorm(noise: float) -> None:
    check_figure(noise, 100, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_figure_logged_every_step_has_one_episode_on_deepnorm(noise: float) -> None:
    check_figure(noise, 1, 2000)


def test_deepnorm_jump_is_found_at_its_step() -> None:
    for name, steps, bits in traces(0.4, 1):
        if name == SPIKED:
            (episode,) = events(steps[18_000:22_000].tolist(), bits[18_000:22_000].tolist())
            assert abs(episode.onset - JUMP) <= 2
            assert episode.acted is not None
            assert JUMP <= episode.acted <= JUMP + 2


def test_bloom_updates_are_refused_before_the_loss_jumps() -> None:
    replays = bloom_replays()
    assert replays["BLOOM-176B"]["first_veto"] <= -3
    assert replays["BLOOM-104B"]["first_veto"] == -1
    for replay in replays.values():
        assert replay["first_act"] <= 0
        assert replay["false"] == 0


def test_every_bundled_run_names_its_source_and_has_labels() -> None:
    runs = list(load())
    assert len(runs) == 45
    index = (FOLDER / "index.csv").read_text().splitlines()
    assert len(index) == 46
    assert all("https://github.com/" in line for line in index[1:])
    assert sum(len(run.labels["events"]) for run in runs) > 400
    assert {run.source for run in runs} > HELD_OUT
    for run in runs:
        assert len(run.loss) == len(run.steps) == len(run.grad_norm) >= 300
        assert (np.diff(run.steps) > 0).all()


def hand_made(loss: list[float], labels: list[dict[str, object]]) -> RealTrace:
    full = {
        "clean": not labels,
        "ambiguous": False,
        "ignore_rows": [{"start_row": 90, "end_row": 95}],
        "events": labels,
    }
    size = len(loss)
    return RealTrace("made-01", "made", np.arange(size) * 1.0, np.array(loss), np.full(size, math.nan), full)


def label(start: int, end: int, actionable: bool, ambiguous: bool = False) -> dict[str, object]:
    return {
        "start_row": start,
        "end_row": end,
        "actionable": actionable,
        "ambiguous": ambiguous,
        "kind": "transient_spike",
    }


def test_zones_and_score_of_a_hand_made_run() -> None:
    trace = hand_made([1.0] * 200, [label(50, 52, True), label(120, 120, False), label(150, 150, False, True)])
    zone = zones(trace.labels, 200)
    assert set(zone[:30]) == {IGNORED}
    assert [int(zone[row]) for row in (47, 48, 60, 61, 92, 118, 122, 123, 150)] == [
        NORMAL, ACTIONABLE, ACTIONABLE, NORMAL, IGNORED, BENIGN, BENIGN, NORMAL, IGNORED,
    ]  # fmt: skip
    score = RealScore()
    score.add(trace, np.array([10, 49, 50, 92, 120, 150, 180]))
    row = score.row()
    assert (row["recall"], row["false_alarms"], row["median_delay"]) == (1.0, 2, -1.0)
    assert row["precision"] == pytest.approx(1 / 3)
    assert row["precision_lenient"] == pytest.approx(1 / 2)
    assert alarms(np.array([5, 6, 25, 47])) == [5, 47]


def test_synthetic_score_counts_hits_false_alarms_and_runs() -> None:
    trace = Trace("plateau", np.ones(4000), np.ones(4000), start=2000, horizon=500, factor=1.3)
    score = SyntheticScore()
    score.add(trace, np.array([100, 700, 720, 1500, 1997, 2001, 2002, 2003, 3000]))
    row = score.row()
    assert (row["recall"], row["median_delay"], row["longest_run"]) == (1.0, -3.0, 3)
    assert score.false_alarms == 2
    assert row["sizes"]["x1.2-1.6"] == "1/1"


def test_lightning_rule_equals_lightnings_own_code() -> None:
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    from experiments.bench.detector_cost import _OneProcess

    draw = np.random.default_rng(0)
    loss = 2.0 + 0.1 * draw.standard_normal(300)
    loss[[50, 120, 121]], loss[200], loss[250] = 9.0, math.nan, 3.5
    theirs, flagged = SpikeDetection(exclude_batches_path="unused"), []
    theirs._handle_spike = lambda fabric, batch: (_ for _ in ()).throw(TrainingSpikeException(batch))  # type: ignore[method-assign]
    for step, value in enumerate(loss):
        try:
            theirs.on_train_batch_end(_OneProcess(), torch.tensor(value), None, step)  # type: ignore[arg-type]
        except TrainingSpikeException:
            flagged.append(step)
    ours = np.flatnonzero(PEERS["Lightning SpikeDetection"](loss, np.full(300, math.nan))).tolist()
    assert ours == flagged == [50, 120, 121, 200]


def test_peer_rules_do_what_their_tables_say() -> None:
    none = np.full(4000, math.nan)
    loss = 3.0 + 0.02 * np.random.default_rng(0).standard_normal(4000)
    loss[3000] = math.nan
    flags = {name: np.flatnonzero(rule(loss, none)).tolist() for name, rule in PEERS.items()}
    assert len(flags["OLMo-core skip-step, loss"]) >= 129, "the NaN stays in its window for 128 steps"
    assert flags["Megatron spiky x10 and NaN"] == flags["NaN only (Composer, Keras)"] == [3000]
    assert flags["llm-foundry KillLossSpike"] == []
    loss = np.where(np.arange(4000) >= 2000, 1.56, 1.0) * np.where(np.isnan(loss), 3.0, loss)
    blind = ("Lightning SpikeDetection", "llm-foundry KillLossSpike", "Megatron spiky x10 and NaN", "entrenar 3x EMA")
    for name in blind:
        assert not PEERS[name](loss, none).any(), f"{name} should not see a jump of x1.56"
    for name in (
        "OLMo-core skip-step, loss",
        "median/MAD z 8",
        "EMA z 6",
        "Page-Hinkley",
        "CUSUM k 0.5 h 8",
        "ksuit +20% of mean 50",
    ):
        first = np.flatnonzero(PEERS[name](loss, none)[100:]) + 100
        assert 2000 <= first[first >= 2000][0] < 2200


def test_short_real_runs_are_found_without_false_alarms() -> None:
    score = RealScore()
    for run in load():
        if len(run.loss) <= SHORT:
            score.add(run, bench.ballast(run.loss, run.grad_norm)[0])
    row = score.row()
    assert row["events"] >= 15
    assert row["recall"] >= 0.95
    assert row["precision"] >= 0.9
    assert row["clean_alarmed"].startswith("0/")
    assert row["non_finite_first_row"] == f"{score.first_rows[1]}/{score.first_rows[1]}"


@pytest.mark.slow
def test_all_real_runs_meet_the_published_numbers() -> None:
    score = RealScore()
    for run in load():
        score.add(run, bench.ballast(run.loss, run.grad_norm)[0])
    row = score.row()
    assert row["recall"] >= 0.95
    assert row["macro_recall"] >= 0.95
    assert row["precision"] >= 0.9
    assert row["fa_per_100k"] <= 0.3
    assert row["non_finite_first_row"] == f"{score.first_rows[1]}/{score.first_rows[1]}"


def test_synthetic_traces_are_reproducible_and_mostly_found() -> None:
    pairs = zip(synthetic(8, 2000, 5), synthetic(8, 2000, 5), strict=True)
    assert all(np.array_equal(a.loss, b.loss, equal_nan=True) for a, b in pairs)
    first = synthetic(12, 8000, 5)
    assert {trace.shape for trace in first} == {"clean", *SHAPES}
    score = SyntheticScore()
    for trace in first:
        score.add(trace, bench.ballast(trace.loss, trace.grad_norm)[0])
    assert score.row()["recall"] >= 0.75
    assert score.false_alarms <= 1
    assert score.longest <= 400


def test_command_writes_table_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--synthetic", "8", "--rows", "2000", "--seed", "1", "--quick", "--no-real", "--out", str(tmp_path)]
    assert bench.main(argv) == 0
    results = json.loads((tmp_path / "detector.json").read_text())
    assert set(results["synthetic"]["rules"]) == {"Ballast", *PEERS}
    assert set(results["cost"]) >= {"Ballast, loss", "Lightning SpikeDetection"}
    assert "**Ballast**" in (tmp_path / "detector.md").read_text()
    assert (tmp_path / "detector.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert bench.main(["--rows", "5"]) == 2
    assert capsys.readouterr().err.startswith("error: --rows 5")
