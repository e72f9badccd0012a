"""Every YAML that ships is parsed for every verb and trains a step in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks.spike_guard import SpikeGuard
from experiments.cli import CONFIGS, run
from lightning_modules.acoustic_mlm import AcousticMLM
from lightning_modules.encoder import Encoder, EncoderConfig

FILES = sorted(CONFIGS.glob("*.yaml"))
FULL = ("mert_95m", "mert_330m")
# What makes any of them small enough for a step here; the rest of the file stays as it is.
TINY = [
    "--model.encoder.dim",
    "32",
    "--model.encoder.num_layers",
    "2",
    "--model.encoder.num_heads",
    "2",
    "--model.encoder.ffn_dim",
    "64",
    "--model.encoder.conv_kernel",
    "8",
    "--model.encoder.conv_groups",
    "4",
    "--data.num_frames",
    "32",
    "--data.global_batch",
    "4",
    "--data.val_clips",
    "4",
    "--trainer.accelerator",
    "cpu",
]


def quiet(tmp_path: Path) -> list[str]:
    return [
        "--trainer.default_root_dir",
        str(tmp_path),
        "--checkpoint.dirpath",
        str(tmp_path / "checkpoints"),
        "--trainer.logger",
        "false",
        "--trainer.enable_progress_bar",
        "false",
        "--trainer.enable_model_summary",
        "false",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_config_opens_with_its_command_its_minutes_and_its_result(file: Path) -> None:
    head = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert "python -m experiments fit" in head
    assert any(word in head for word in ("minute", "hours", "About", "500 steps"))
    assert "bits" in head or "unigram" in head


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_config_parses_alone_and_on_top_of_base(
    file: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for files in ([file], [CONFIGS / "base.yaml", file]):
        with pytest.raises(SystemExit) as done:
            run([verb, *(arg for f in files for arg in ("-c", str(f))), "--run_name", "zed", "--print_config"])
        assert done.value.code == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["run_name"] == "zed"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_config_trains_a_step(file: Path, tmp_path: Path) -> None:
    steps = ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
    cli = run(["fit", "-c", str(file), *TINY, *quiet(tmp_path), *steps])
    assert cli.trainer.global_step == 1
    assert any(isinstance(c, SpikeGuard) for c in cli.trainer.callbacks)
    assert any(isinstance(c, ModelCheckpoint) for c in cli.trainer.callbacks)
    assert "val/bits_codebook_0" in cli.trainer.callback_metrics


def encoder_of(name: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for file in ("base", name):
        merged |= yaml.safe_load((CONFIGS / f"{file}.yaml").read_text())["model"]["encoder"]
    return merged


@pytest.mark.parametrize(("name", "block_parameters"), [("mert_95m", 12 * 7_087_872), ("mert_330m", 24 * 12_596_224)])
def test_full_recipes_have_the_published_blocks(name: str, block_parameters: int) -> None:
    with torch.device("meta"):
        encoder = Encoder(EncoderConfig(**encoder_of(name)))
    assert sum(p.numel() for p in encoder.blocks.parameters()) == block_parameters


@pytest.mark.slow
def test_one_real_step_of_the_95m_recipe(tmp_path: Path) -> None:
    cli = run(
        [
            "fit",
            "-c",
            str(CONFIGS / "mert_95m.yaml"),
            *quiet(tmp_path),
            "--data.global_batch",
            "2",
            "--trainer.max_steps",
            "1",
            "--trainer.limit_val_batches",
            "0",
            "--trainer.accelerator",
            "cpu",
        ]
    )
    assert cli.trainer.global_step == 1
    assert isinstance(cli.model, AcousticMLM)
    assert sum(p.numel() for p in cli.model.parameters()) > 90e6


def test_an_override_of_a_shared_value_moves_everything_that_depends_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(
            [
                "fit",
                "-c",
                str(CONFIGS / "deepnorm_clip1.yaml"),
                "--run_name",
                "zed",
                "--model.optimizer.total_steps",
                "7",
                "--print_config=skip_null",
            ]
        )
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (
        printed["trainer"]["default_root_dir"].startswith("runs/${")
        or printed["trainer"]["default_root_dir"] == "runs/zed"
    )


def test_the_run_name_moves_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    cli = run(
        ["fit", "-c", str(CONFIGS / "smoke.yaml"), *TINY, "--run_name", "zed", "--model.optimizer.total_steps", "8"]
    )
    assert cli.trainer.global_step == 8
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"zed"}
    assert (tmp_path / "runs/zed/checkpoints/last.ckpt").is_file()
    assert (tmp_path / "runs/zed/csv/version_0/metrics.csv").is_file()
    assert yaml.safe_load((tmp_path / "runs/zed/config.yaml").read_text())["run_name"] == "zed"
