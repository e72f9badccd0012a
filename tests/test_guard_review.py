"""Ways in which a guard that looks right loses a run: each was one of ours once."""

import csv
import math
from pathlib import Path
from typing import Any

import guard_runs as runs
import pytest
import torch
from torch import nn

from callbacks.gradient_norms import GradientNorms
from callbacks.learning_rate import put_back, scale_next_step
from callbacks.policy import TrainingStopped
from experiments.figure import smoothed
from experiments.run_records import BITS, read_run


@pytest.mark.parametrize("every", [1, 2, 3])
def test_frequent_snapshots_earn_trust_all_the_same(tmp_path: Path, every: int) -> None:
    _, _, guard = runs.train(tmp_path, fault_at=21, script={23: 22}, steps=28, snapshot_every=every, healthy_steps=10)
    assert guard.counts["rollbacks"] == 1


class Poison(runs.Callback):
    """Make a weight NaN at one step, behind the guard's back."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.at:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = math.nan


@pytest.mark.parametrize("top_k", [1, -1])
def test_a_refused_save_leaves_the_file_before_it(tmp_path: Path, top_k: int) -> None:
    from callbacks.checkpoint_files import GuardedCheckpoint

    keeper = GuardedCheckpoint(
        dirpath=tmp_path / "kept", every_n_train_steps=4, save_top_k=top_k, save_last=True, enable_version_counter=False
    )
    runs.train(tmp_path, steps=14, action="log", extra=[Poison(7), keeper])
    files = sorted((tmp_path / "kept").glob("*.ckpt"))
    assert files
    for file in files:
        state = torch.load(file, weights_only=True)
        assert state["global_step"] == 4
        assert all(bool(v.isfinite().all()) for v in state["state_dict"].values())
    assert Path(keeper.best_model_path).is_file()


def test_a_run_that_is_stopped_saves_no_rejected_state(tmp_path: Path) -> None:
    from callbacks.checkpoint_files import GuardedCheckpoint

    keeper = GuardedCheckpoint(
        dirpath=tmp_path / "kept", every_n_train_steps=3, save_top_k=-1, save_last=True, save_on_exception=True
    )
    with pytest.raises(TrainingStopped, match=r"action: stop.*last good state is .*\.ckpt"):
        runs.train(tmp_path, fault_at=13, script={15: 14}, action="stop", extra=[keeper])
    steps = [torch.load(f, weights_only=True)["global_step"] for f in (tmp_path / "kept").glob("*.ckpt")]
    assert steps
    assert max(steps) <= 12


def test_norms_that_come_after_the_guard_are_not_believed(tmp_path: Path) -> None:
    """Callbacks run in order: a later one has left the norm of the step before."""
    trainer, _, guard = runs.train(
        tmp_path, fault_at=9, kind="non_finite", action="veto", steps=14, extra=[GradientNorms(1)], norms_first=False
    )
    assert guard.counts["vetoed"] == 1
    assert all(bool(p.isfinite().all()) for p in trainer.lightning_module.parameters())


def test_two_scalings_of_one_step_multiply_and_are_undone() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.ones(1)
        before = float(weight)
        scale_next_step(optimizer, 2.0)
        scale_next_step(optimizer, 3.0)
        optimizer.step()
        assert before - float(weight) == pytest.approx(0.6)
        assert optimizer.param_groups[0]["lr"] == 0.1
    scale_next_step(optimizer, 5.0)  # a gradient scaler skips this step
    put_back(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_one_refused_non_finite_step_costs_no_rollback(tmp_path: Path) -> None:
    _, _, guard = runs.train(tmp_path, fault_at=12, kind="non_finite", steps=18)
    assert (guard.counts["vetoed"], guard.counts["rollbacks"]) == (1, 0)


def test_a_long_bad_stretch_is_one_episode_in_log_mode(tmp_path: Path) -> None:
    runs.train(tmp_path, fault_at=12, fault_batches=8, kind="non_finite", action="log", steps=24)
    assert len(list((tmp_path / "episodes").iterdir())) == 1


def test_a_run_whose_loss_stays_non_finite_ends(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped):
        runs.train(tmp_path, fault_at=6, fault_batches=400, kind="non_finite", steps=200)


def test_the_mean_survives_a_nan() -> None:
    assert smoothed([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


def test_rows_that_a_resumed_run_wrote_anew_replace_the_old(tmp_path: Path) -> None:
    for version, steps in ((0, range(6)), (1, range(3, 9))):
        folder = tmp_path / "csv" / f"version_{version}"
        folder.mkdir(parents=True)
        with open(folder / "metrics.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", BITS])
            writer.writerows([step, 5.0 + version] for step in steps)
    run = read_run(tmp_path)
    assert run.steps == list(range(9))
    assert run.bits == [5.0] * 3 + [6.0] * 6
