"""Run a script with two gloo ranks in a process group of its own, and kill all of it when it takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_ranks(args: list[str], *, timeout: float = 150, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python *args`` from the checkout; a rank that hangs ignores SIGTERM, so the group gets SIGKILL."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment = clean | {
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "MPLBACKEND": "Agg",
    }
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd or ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return subprocess.CompletedProcess(args, -signal.SIGKILL, output, "")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a child that outlived its parent
    return subprocess.CompletedProcess(args, process.returncode, output, "")
