"""A run that spiked and was rolled back equals, bit for bit, the run that never saw what hurt it."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import guard_runs as runs
import pytest
import torch

from callbacks.checkpoint_files import REJECTED
from callbacks.policy import TrainingStopped
from callbacks.trainer_state import COMPONENTS, live_tensors, plain_state, restore_plain

# Snapshots every 4 accepted steps; the fault hits attempted step 13, detection follows at 15 with its onset at 14.
# The target is the snapshot of accepted step 12 (attempt 11): what was trained after it is passed by.
SCRIPT = {15: 14}


def faulty_and_clean(tmp_path: Path, **options: Any) -> tuple[list[str], bool]:
    """Return what differs between a rolled-back run and its reference, and whether their losses are equal."""
    accumulate = options.get("accumulate", 1)
    trainer, losses, guard = runs.train(tmp_path / "fault", fault_at=13 * accumulate, script=SCRIPT, **options)
    assert guard.counts["rollbacks"] == 1
    skipped = guard.rollback.skipped
    first = 13 if options.get("data") == "replay" else 12
    assert skipped == [[first * accumulate, 16 * accumulate]]
    options.pop("omit", None)
    clean, clean_losses, _ = runs.train(tmp_path / "clean", skip=skipped, script={}, **options)
    return runs.differences(runs.everything(trainer), runs.everything(clean)), losses.by_step == clean_losses.by_step


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheme": "deepnorm", "accumulate": 4, "steps": 20},
        {"data": "replay", "workers": 2},
        {"data": "replay", "accumulate": 4, "steps": 20},
        {"epoch_batches": 14, "validate_every": 14},  # an epoch and a validation end inside the window
        {"epoch_batches": 12, "validate_every": 12},  # the target is the last step of an epoch
        {"lag": 1, "steps": 26},  # the host reads one step late
    ],
    ids=["plain", "deepnorm-accumulate", "replay-workers", "replay-accumulate", "over-an-epoch", "at-an-epoch", "lag"],
)
def test_rolled_back_run_equals_the_run_without_the_fault(tmp_path: Path, options: dict[str, Any]) -> None:
    if options.get("lag"):
        trainer, losses, guard = runs.train(tmp_path / "fault", fault_at=13, script=SCRIPT, **options)
        clean, clean_losses, _ = runs.train(tmp_path / "clean", skip=guard.rollback.skipped, script={}, **options)
        assert guard.rollback.skipped == [[12, 17]]
        assert runs.differences(runs.everything(trainer), runs.everything(clean)) == []
        assert losses.by_step == clean_losses.by_step
        return
    different, same_losses = faulty_and_clean(tmp_path, **options)
    assert different == []
    assert same_losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "workers", "scheme", "data", "epoch"),
    list(itertools.product((1, 4), (0, 2), ("pre", "deepnorm"), ("advance", "replay"), (None, 14))),
)
def test_full_product(tmp_path: Path, accumulate: int, workers: int, scheme: str, data: str, epoch: int | None) -> None:
    batches = epoch * accumulate if epoch else None
    different, same_losses = faulty_and_clean(
        tmp_path,
        accumulate=accumulate,
        workers=workers,
        scheme=scheme,
        data=data,
        epoch_batches=batches,
        validate_every=batches or 7,
    )
    assert different == []
    assert same_losses


@pytest.mark.parametrize("component", [c for c in COMPONENTS if c not in ("scaler", "metrics", "stream")])
def test_every_component_of_a_snapshot_is_needed(tmp_path: Path, component: str) -> None:
    different, same_losses = faulty_and_clean(tmp_path, omit=frozenset({component}))
    assert different or not same_losses


def test_replay_needs_the_stream_to_be_moved(tmp_path: Path) -> None:
    trainer, losses, guard = runs.train(
        tmp_path / "fault", fault_at=13, script=SCRIPT, data="replay", omit=frozenset({"stream"})
    )
    clean, clean_losses, _ = runs.train(tmp_path / "clean", skip=guard.rollback.skipped, script={}, data="replay")
    assert losses.by_step != clean_losses.by_step


def test_snapshots_and_log_mode_change_nothing(tmp_path: Path) -> None:
    free, free_losses, _ = runs.train(tmp_path / "free", guarded=False, steps=12)
    watched, watched_losses, _ = runs.train(tmp_path / "watched", snapshot_every=1, steps=12)
    logged, logged_losses, _ = runs.train(tmp_path / "logged", action="log", steps=12)
    assert runs.differences(runs.everything(free), runs.everything(watched)) == []
    assert runs.differences(runs.everything(free), runs.everything(logged)) == []
    assert free_losses.by_step == watched_losses.by_step == logged_losses.by_step


def test_log_mode_lets_a_faulty_run_go_its_way(tmp_path: Path) -> None:
    free, *_ = runs.train(tmp_path / "free", guarded=False, steps=20, fault_at=13)
    logged, _, guard = runs.train(tmp_path / "logged", action="log", steps=20, fault_at=13, script=SCRIPT)
    assert guard.counts["rollbacks"] == 0
    assert guard.counts["episodes"] == 1
    assert runs.differences(runs.everything(free), runs.everything(logged) | {"judged": None}) == []


class RestoreAtOnce(runs.Callback):
    """Take a snapshot at one step and restore it in the same hook."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 6:
            return
        guard = next(c for c in trainer.callbacks if isinstance(c, runs.SpikeGuard))
        plain = plain_state(trainer, guard, guard.stream)
        snapshot = guard.ring.take(live_tensors(trainer, guard), 6, 5, plain)
        guard.ring.restore(snapshot, live_tensors(trainer, guard))
        restore_plain(trainer, guard, plain)
        guard.stream.load_state_dict(plain["stream"])


def test_restoring_a_snapshot_at_once_is_a_no_op(tmp_path: Path) -> None:
    plain, *_ = runs.train(tmp_path / "plain", steps=12)
    restored, *_ = runs.train(tmp_path / "restored", steps=12, extra=[RestoreAtOnce()])
    assert runs.differences(runs.everything(plain), runs.everything(restored)) == []


def test_no_rejected_checkpoint_stays_resumable(tmp_path: Path) -> None:
    trainer, _, guard = runs.train(tmp_path, fault_at=13, script=SCRIPT, checkpoint_every=7, steps=20)
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert any(
        f.name.endswith(REJECTED) for f in files
    )  # that of step 14 was written between the fault and its detection
    clean, _, _ = runs.train(tmp_path / "clean", skip=guard.rollback.skipped, script={}, checkpoint_every=7, steps=20)
    resumable = [f for f in files if f.suffix == ".ckpt"]
    assert {f.name for f in resumable} >= {"last.ckpt"}
    for file in resumable:
        ours = torch.load(file, weights_only=True)
        twin = torch.load(tmp_path / "clean" / "checkpoints" / file.name, weights_only=True)
        assert runs.differences(ours["state_dict"], twin["state_dict"]) == [], file.name
        assert ours["global_step"] == twin["global_step"]


@pytest.mark.parametrize("saved", ["in the hook", "at the end of an epoch"])
def test_without_a_snapshot_old_enough_the_checkpoint_on_disk_serves(tmp_path: Path, saved: str) -> None:
    """The ring holds the first step only; the checkpoint of step 9 is newer and lies before the onset's margin."""
    options: dict[str, Any] = {"snapshot_every": 1000, "steps": 20}
    if saved == "in the hook":
        options |= {"checkpoint_every": 9}
    else:  # the loops have gone on since the hook when such a file is written
        options |= {"epoch_batches": 9, "validate_every": 9, "checkpoint_at_epoch_end": True}
    trainer, losses, guard = runs.train(tmp_path / "fault", fault_at=13, script={15: 12}, **options)
    report = json.loads(next((tmp_path / "fault" / "episodes").glob("*/report.json")).read_text())
    assert report["rollback"]["source"].endswith(".ckpt")
    assert guard.rollback.last_target == 8
    assert guard.rollback.skipped == [[9, 16]]
    clean, clean_losses, _ = runs.train(tmp_path / "clean", skip=[[9, 16]], script={}, **options)
    assert runs.differences(runs.everything(trainer), runs.everything(clean)) == []
    assert losses.by_step == clean_losses.by_step


def test_a_spike_that_comes_back_stops_the_run_within_its_bound(tmp_path: Path) -> None:
    script = {n: n - 1 for n in range(15, 400)}
    with pytest.raises(TrainingStopped, match=r"max_retries=2.*last_good\.ckpt") as error:
        runs.train(tmp_path, script=script, steps=60, max_retries=2)
    assert "after 2 rollbacks" in str(error.value)
    assert (tmp_path / "checkpoints" / "last_good.ckpt").is_file()


def test_stop_ends_the_run_at_the_first_spike(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match="action: stop"):
        runs.train(tmp_path, script=SCRIPT, action="stop")


def test_a_non_finite_loss_never_reaches_the_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 16, "snapshot_every": 4}
    trainer, losses, guard = runs.train(tmp_path, fault_at=9, kind="non_finite", action="veto", **options)
    assert guard.counts["vetoed"] == 1
    weights = trainer.lightning_module.state_dict()
    assert all(bool(v.isfinite().all()) for v in weights.values())
    step = next(iter(trainer.optimizers[0].state.values()))["step"]
    assert int(step) == 15  # one of 16 updates did not happen
    assert not any(math.isnan(x) for x in losses.by_step[11])


def test_deviations_are_applied_and_recorded(tmp_path: Path) -> None:
    after = runs.AfterRollback(lr_factor=0.5, rewarm_steps=3, clip_factor=0.5, reset_moments=True)
    trainer, _, guard = runs.train(tmp_path, fault_at=13, script=SCRIPT, steps=20, after=after)
    assert trainer.gradient_clip_val == 0.5
    assert guard.rollback.lr_scale == 0.5
    moments = next(iter(trainer.optimizers[0].state.values()))["step"]
    assert int(moments) == 20 - 12
    report = next((tmp_path / "episodes").glob("*/report.json")).read_text()
    assert '"lr_factor": 0.5' in report
