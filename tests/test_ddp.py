"""Two gloo ranks: what one of them sees, both act on."""

import itertools
import json
from pathlib import Path

import pytest
from ddp import ROOT, run_ranks

RANKS = str(ROOT / "tests" / "rollback_ranks.py")


def check_ranks(output: str, skipped: str) -> None:
    for rank in (0, 1):
        line = next((x for x in output.splitlines() if f"RANK {rank} " in x), None)
        assert line is not None, output[-3000:]
        assert f"rollbacks=1 skipped={skipped} equal_ranks=True losses=True different=[]" in line


def test_a_fault_on_one_rank_is_rolled_back_bitwise_on_both(tmp_path: Path) -> None:
    done = run_ranks([RANKS, str(tmp_path), "--accumulate", "4", "--scheme", "deepnorm"])
    check_ranks(done.stdout, "[[48, 64]]")


def test_reading_the_reduced_numbers_late_is_as_exact(tmp_path: Path) -> None:
    done = run_ranks([RANKS, str(tmp_path), "--lag", "1"])
    check_ranks(done.stdout, "[[12, 17]]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "workers", "scheme", "data"),
    list(itertools.product((1, 4), (0, 2), ("pre", "deepnorm"), ("advance", "replay"))),
)
def test_full_product_on_two_ranks(tmp_path: Path, accumulate: int, workers: int, scheme: str, data: str) -> None:
    done = run_ranks(
        [
            RANKS,
            str(tmp_path),
            "--accumulate",
            str(accumulate),
            "--workers",
            str(workers),
            "--scheme",
            scheme,
            "--data",
            data,
        ]
    )
    first = 13 if data == "replay" else 12
    check_ranks(done.stdout, f"[[{first * accumulate}, {16 * accumulate}]]")


def test_the_command_line_trains_on_two_ranks_and_rolls_both_back(tmp_path: Path) -> None:
    """A fault in rank 1's loss alone: both ranks roll back, the run ends 0, and rank 1 is named."""
    done = run_ranks(
        [
            "-m",
            "experiments",
            "fit",
            "-c",
            "experiments/configs/deepnorm_clip1.yaml",
            "--trainer.devices",
            "2",
            "--trainer.strategy",
            "ddp",
            "--trainer.accelerator",
            "cpu",
            "--model.encoder.dim",
            "32",
            "--model.encoder.num_layers",
            "2",
            "--model.encoder.ffn_dim",
            "64",
            "--model.optimizer.total_steps",
            "90",
            "--data.num_frames",
            "64",
            "--trainer.logger",
            "false",
            "--trainer.default_root_dir",
            str(tmp_path),
            "--checkpoint.dirpath",
            str(tmp_path / "checkpoints"),
            "--fault_injection.at_batch",
            "60",
            "--fault_injection.num_batches",
            "3",
            "--fault_injection.kind",
            "loss_scale",
            "--fault_injection.rank",
            "1",
            "--fault_injection.factor",
            "5.0",
            "--spike_guard.snapshot_every",
            "5",
        ]
    )
    assert done.returncode == 0, done.stdout[-3000:]
    reports = [json.loads(p.read_text()) for p in (tmp_path / "episodes").glob("*/report.json")]
    rolled = [r for r in reports if r["decision"] == "rollback"]
    assert rolled, done.stdout[-3000:]
    bad = next(r for r in rolled[0]["series"] if r["attempt"] == rolled[0]["verdict"]["onset"])
    assert bad["rank_values"][1] > 3 * bad["rank_values"][0]
    assert {row["rank"] for row in rolled[0]["batches"]} == {0, 1}


def test_sharded_parameters_are_rolled_back_shard_by_shard(tmp_path: Path) -> None:
    done = run_ranks([str(ROOT / "tests" / "sharded_ranks.py"), str(tmp_path)])
    for rank in (0, 1):
        assert f"RANK {rank} rollbacks=1 equal=True norms=True" in done.stdout, done.stdout[-3000:]
