"""Killed at any point and started again, a guarded run ends where the uninterrupted one ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import guard_runs as runs
import pytest
import torch
from ddp import ROOT

SCRIPT = """
import os, signal, sys
from pathlib import Path
import guard_runs as runs

class Kill(runs.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        mark = Path(sys.argv[1], "killed")
        if trainer.fit_loop.epoch_loop._batches_that_stepped == int(sys.argv[2]) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

last = Path(sys.argv[1], "checkpoints", "last.ckpt")
trainer, losses, guard = runs.train(
    Path(sys.argv[1]), fault_at=13, script={15: 14}, steps=24, checkpoint_every=5, snapshot_every=1, healthy_steps=1,
    lag=int(sys.argv[3]), extra=[Kill()], ckpt_path=str(last) if last.exists() else None)
import torch
end = {"all": runs.everything(trainer), "counts": guard.counts, "skipped": guard.rollback.skipped}
torch.save(end, Path(sys.argv[1], "end.pt"))
"""


def run_once(folder: Path, kill_at: int, lag: int = 0) -> int:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(kill_at), str(lag)],
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(done.stderr[-3000:])
    return done.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "killed").touch()
    assert run_once(folder, -1) == 0
    return torch.load(folder / "end.pt", weights_only=False)


# attempted steps: 7 healthy; 13 the fault's own; 14 between fault and detection; 16 just after the rollback; 22 later.
@pytest.mark.parametrize(
    "kill_at", [7, 14, 16, *[pytest.param(k, marks=pytest.mark.slow) for k in (10, 12, 13, 15, 17, 19, 22)]]
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, uninterrupted: dict, kill_at: int) -> None:
    assert run_once(tmp_path, kill_at) == -signal.SIGKILL
    assert run_once(tmp_path, kill_at) == 0
    resumed = torch.load(tmp_path / "end.pt", weights_only=False)
    assert runs.differences(uninterrupted["all"], resumed["all"]) == []
    assert uninterrupted["skipped"] == resumed["skipped"]
    assert uninterrupted["counts"]["rollbacks"] == resumed["counts"]["rollbacks"] == 1


def test_a_step_in_flight_is_judged_after_the_resume(tmp_path: Path) -> None:
    """Reading the numbers one step late, the last report is in no hand when the checkpoint is written."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "killed").touch()
    assert run_once(tmp_path / "whole", -1, lag=1) == 0
    assert run_once(tmp_path / "cut", 17, lag=1) == -signal.SIGKILL
    assert run_once(tmp_path / "cut", 17, lag=1) == 0
    whole, cut = (torch.load(tmp_path / name / "end.pt", weights_only=False) for name in ("whole", "cut"))
    assert runs.differences(whole["all"], cut["all"]) == []


def test_a_kill_while_saving_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    body = SCRIPT.replace("steps=24, checkpoint_every=5", "steps=4000, checkpoint_every=1")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": "/dev/shm",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(folder), "-1", "0"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    last = folder / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 90
    while not last.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.7)
    process.kill()
    process.wait()
    for file in (folder / "checkpoints").glob("*.ckpt"):
        assert torch.load(file, weights_only=True)["global_step"] > 0


def test_resume_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, whole_losses, _ = runs.train(tmp_path / "whole", steps=20)
    runs.train(tmp_path / "half", steps=11, checkpoint_every=11)
    resumed, losses, _ = runs.train(
        tmp_path / "half", steps=20, checkpoint_every=11, ckpt_path=str(tmp_path / "half" / "checkpoints" / "last.ckpt")
    )
    assert runs.differences(runs.everything(whole), runs.everything(resumed)) == []
    assert {k: v for k, v in whole_losses.by_step.items() if k > 11} == losses.by_step
