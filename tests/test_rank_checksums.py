"""Ranks that drift apart are found within the interval, and the first tensor that differs is named."""

from pathlib import Path

import pytest
import torch
from ddp import ROOT, run_ranks

from callbacks.rank_checksums import RankChecksums, first_difference

SCRIPT = """
import sys
from pathlib import Path
import torch
import guard_runs as runs
from callbacks.rank_checksums import RankChecksums

class Perturb(runs.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_rank == 1 and trainer.global_step == 6:
            with torch.no_grad():
                pl_module.heads.projection.bias[3] += 1e-3

runs.train(Path(sys.argv[1]), devices=2, steps=16, script={}, extra=[Perturb(), RankChecksums(5)])
"""


def test_the_first_tensor_that_differs_is_named() -> None:
    same = torch.tensor([1.0, float("nan"), 3.0], dtype=torch.float64)
    assert first_difference(["a", "b", "c"], [same, same.clone()]) is None
    other = torch.tensor([1.0, float("nan"), 3.5], dtype=torch.float64)
    assert first_difference(["a", "b", "c"], [same, other]) == "c (rank 0 3, rank 1 3.5)"
    with pytest.raises(ValueError, match="every_n_steps=-1"):
        RankChecksums(-1)


def test_a_rank_that_drifted_stops_the_run_on_both(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    done = run_ranks([str(script), str(tmp_path)], cwd=ROOT)
    assert done.returncode != 0
    assert "weights differ after step 10, first in heads.projection.bias" in done.stdout
