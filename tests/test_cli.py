"""The command line as a user meets it: one clear line for each mistake, nothing half-written, the right exit status."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from ddp import ROOT

import datamodules.codec_tokens
from experiments.__main__ import main
from experiments.cli import CONFIGS

BUNDLED = Path(datamodules.codec_tokens.__file__).parent / "bundled"
TINY = [
    "--model.encoder.dim",
    "32",
    "--model.encoder.num_layers",
    "1",
    "--model.encoder.num_heads",
    "2",
    "--model.encoder.ffn_dim",
    "32",
    "--data.num_frames",
    "32",
    "--data.global_batch",
    "4",
    "--data.val_clips",
    "4",
]


def fit(tmp_path: Path, *more: str) -> list[str]:
    return [
        "fit",
        "-c",
        str(CONFIGS / "smoke.yaml"),
        *TINY,
        "--trainer.logger",
        "false",
        "--trainer.default_root_dir",
        str(tmp_path / "run"),
        "--checkpoint.dirpath",
        str(tmp_path / "run/checkpoints"),
        "--trainer.enable_progress_bar",
        "false",
        "--trainer.enable_model_summary",
        "false",
        *more,
    ]


def complain(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run and return the one line that says `error:`; the exit status must say that it failed."""
    try:
        status = main(args)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    shutil.copytree(BUNDLED, folder)
    return folder


def first_data_file(folder: Path) -> Path:
    return next(p for p in sorted(folder.glob("shard-*.npy")) if "offsets" not in p.name)


def test_unknown_norm_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complain(fit(tmp_path, "--model.encoder.scheme", "deepnrom"), capsys)
    assert "deepnrom" in line
    assert all(name in line for name in ("pre", "post", "deepnorm"))
    assert not (tmp_path / "run").exists()


def test_missing_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complain(fit(tmp_path, "--data.data_dir", str(tmp_path / "nowhere")), capsys)
    assert str(tmp_path / "nowhere") in line
    assert not (tmp_path / "run").exists()


def test_truncated_shard(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = first_data_file(shards)
    os.truncate(victim, victim.stat().st_size - 1000)
    line = complain(fit(tmp_path, "--data.data_dir", str(shards)), capsys)
    assert victim.name in line
    assert not list((tmp_path / "run").glob("**/*.ckpt"))


def test_codes_out_of_range(tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for victim in (p for p in shards.glob("shard-*.npy") if "offsets" not in p.name):
        codes = np.load(victim)
        codes[:, 0] = 1024
        np.save(victim, codes)
    line = complain(fit(tmp_path, "--data.data_dir", str(shards)), capsys)
    assert "shard-" in line


def test_more_codebooks_in_the_data_than_in_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = complain(fit(tmp_path, "--data.use_codebooks", "null"), capsys)
    assert "model.encoder.num_codebooks=2" in line
    assert "num_codebooks=8" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trainer.max_step", "3"], ["max_step"]),
        (["--spike_guard.action", "explode"], ["explode", "rollback"]),
        (["--spike_guard.treshold", "3"], ["treshold"]),
        (["-c", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--model.optimizer.lr", "fast"], ["lr", "fast"]),
        (["--model.optimizer.lr", "-1"], ["lr=-1"]),
        (["--model.encoder.num_heads", "5"], ["num_heads", "32"]),
        (["--data.global_batch", "0"], ["global_batch=0"]),
        (["--ckpt_path", "nowhere.ckpt"], ["nowhere.ckpt"]),
        (["--fault_injection.kind", "learning_rate", "--fault_injection.rank", "1"], ["rank=1"]),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = complain(fit(tmp_path, *flags), capsys)
    assert all(word in line for word in words), line
    assert not list((tmp_path / "run").glob("**/*.ckpt"))


def test_unknown_verb_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "choose from" in complain(["fti"], capsys)
    assert main(["--help"]) == 0
    assert "tokenize" in capsys.readouterr().out


def test_a_second_run_and_a_resume_keep_the_first_config(tmp_path: Path) -> None:
    steps = ["--model.optimizer.total_steps", "8"]
    assert main(fit(tmp_path, *steps)) == 0
    first = (tmp_path / "run/config.yaml").read_bytes()
    last = str(tmp_path / "run/checkpoints/last.ckpt")
    assert main(fit(tmp_path, "--model.optimizer.total_steps", "12", "--ckpt_path", last)) == 0
    assert (tmp_path / "run/config.yaml").read_bytes() == first
    assert (tmp_path / "run/config_resume_1.yaml").is_file()
    assert torch.load(last, weights_only=True)["global_step"] == 12


def test_a_changed_learning_rate_is_reported_on_resume(tmp_path: Path) -> None:
    assert main(fit(tmp_path, "--model.optimizer.total_steps", "8")) == 0
    last = str(tmp_path / "run/checkpoints/last.ckpt")
    with pytest.warns(UserWarning, match=r"optimizer\.lr is 0\.002 in the checkpoint, 0\.1"):
        assert (
            main(
                fit(tmp_path, "--model.optimizer.total_steps", "9", "--model.optimizer.lr", "0.1", "--ckpt_path", last)
            )
            == 0
        )


def test_validate_test_and_predict_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fit(tmp_path, "--model.optimizer.total_steps", "8")) == 0
    last = str(tmp_path / "run/checkpoints/last.ckpt")
    for verb in ("validate", "test", "predict"):
        args = [verb, *fit(tmp_path, "--ckpt_path", last)[1:]]
        assert main(args) == 0
    states = sorted((tmp_path / "run/hidden_states").glob("*.npy"))
    assert len(states) == 4
    assert np.load(states[0]).shape == (32, 32)


def test_a_checkpoint_of_another_scheme_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(fit(tmp_path, "--model.optimizer.total_steps", "8")) == 0
    last = str(tmp_path / "run/checkpoints/last.ckpt")
    line = complain(fit(tmp_path, "--ckpt_path", last, "--model.encoder.scheme", "deepnorm"), capsys)
    assert "scheme=pre" in line
    assert "scheme=deepnorm" in line


def test_a_user_s_callback_list_does_not_drop_the_guard(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay.yaml"
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val/loss"}}
    overlay.write_text(yaml.safe_dump({"trainer": {"callbacks": [stopping]}}))
    from experiments.cli import run

    cli = run(fit(tmp_path, "-c", str(overlay), "--model.optimizer.total_steps", "6"))
    names = {type(c).__name__ for c in cli.trainer.callbacks}
    assert {"EarlyStopping", "SpikeGuard", "GuardedCheckpoint", "GradientNorms", "RandomStates"} <= names


def test_sigterm_saves_and_says_so(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    args = fit(
        tmp_path,
        "--model.optimizer.total_steps",
        "100000",
        "--checkpoint.every_n_train_steps",
        "5000",
        "--trainer.val_check_interval",
        "100000",
        "--fault_injection.at_batch",
        "-1",
    )
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments", *args], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    deadline = time.monotonic() + 90
    while not (tmp_path / "run/config.yaml").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    saved = list((tmp_path / "run/checkpoints").glob("*.ckpt"))
    assert saved
    assert torch.load(saved[0], weights_only=True)["global_step"] > 0


def test_the_smoke_run_leaves_what_a_user_looks_at(tmp_path: Path) -> None:
    """CSV, offline W&B, checkpoints and the episode of the declared fault; the figure is drawn from them."""
    # W&B leaves variables behind in a process that used it; the run under test starts without them.
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment = clean | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "experiments", "fit", "-c", str(CONFIGS / "smoke.yaml")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = tmp_path / "runs/smoke"
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    assert (run / "wandb_run_id").is_file()
    reports = [json.loads(p.read_text()) for p in (run / "episodes").glob("*/report.json")]
    assert [r["decision"] for r in reports] == ["rollback"]
    assert reports[0]["verdict"]["onset"] == 40
    assert main(["figure", str(run), "--out", str(tmp_path / "f.png")]) == 0
    assert (tmp_path / "f.png").stat().st_size > 10_000
    rows = (tmp_path / "f.csv").read_text().splitlines()
    steps = [int(row.split(",")[1]) for row in rows[1:]]
    assert steps == sorted(set(steps))  # the loggers' axis never runs backwards


@pytest.fixture
def last(tmp_path: Path) -> Path:
    assert main(fit(tmp_path, "--model.optimizer.total_steps", "8")) == 0
    return tmp_path / "run/checkpoints/last.ckpt"


def test_checkpoints_that_cannot_be_used(tmp_path: Path, last: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--model.optimizer.total_steps", "12", "--ckpt_path"]
    line = complain(fit(tmp_path, *more, str(last), "--model.encoder.dim", "16"), capsys)
    assert "size mismatch" in line
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(last.read_bytes()[:5000])
    assert "not a readable checkpoint" in complain(fit(tmp_path, *more, str(cut)), capsys)
    assert "random" in complain(["predict", *fit(tmp_path)[1:]], capsys)


def test_every_change_on_resume_is_reported_with_who_wins(tmp_path: Path, last: Path) -> None:
    more = ["--model.optimizer.total_steps", "12", "--model.mask_prob", "0.4", "--ckpt_path", str(last)]
    with pytest.warns(UserWarning, match="mask_prob") as caught:
        assert main(fit(tmp_path, *more)) == 0
    said = " ".join(str(w.message) for w in caught)
    assert "model.mask_prob is 0.8 in the checkpoint, 0.4" in said
    assert (
        "model.optimizer.total_steps is 8 in the checkpoint, 12 in the configuration; the configuration's is used"
        in said
    )


def test_starting_over_in_a_run_s_folder_is_said(tmp_path: Path, last: Path) -> None:
    with pytest.warns(UserWarning, match=r"earlier run.*--ckpt_path"):
        assert main(fit(tmp_path, "--model.optimizer.total_steps", "7")) == 0


def test_figure_and_replay_refuse_what_they_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no metrics.csv" in complain(["figure", str(tmp_path)], capsys)
    assert ".png" in complain(["figure", str(tmp_path), "--out", str(tmp_path / "f.xyz")], capsys)
    assert "no report.json" in complain(["replay", str(tmp_path)], capsys)
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "report.json").write_text("{")
    assert "report.json: not JSON" in complain(["replay", str(tmp_path)], capsys)
    (tmp_path / "report.json").write_text("{}")
    assert "not an episode's report" in complain(["replay", str(tmp_path)], capsys)
