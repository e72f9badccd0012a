"""``python -m experiments replay EPISODE``: rebuild an episode's batches from the shards and recompute their loss.

The batches are rebuilt from their numbers alone, checked against the sample ids in the report, and judged by the
weights of a checkpoint: a batch that is harmless there was not the cause by itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from callbacks.episode_report import write_json
from experiments.run_records import read_report


def find_report(path: Path) -> Path:
    """Return the report of an episode's folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    report = path if path.name == "report.json" else path / "report.json"
    if not report.is_file():
        raise FileNotFoundError(
            f"{path}: no report.json; name the folder of an episode, such as runs/NAME/episodes/step_..."
        )
    return report


def run_folder(report: Path) -> Path:
    """Return the folder of the run that wrote a report: the nearest one above it with a config.yaml.

    Raises:
        FileNotFoundError: if there is none.
    """
    for folder in report.resolve().parents:
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"{report}: no config.yaml above it; the run's configuration is needed to rebuild its batches"
    )


def rebuild(report: dict[str, Any], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Rebuild every batch of the report, whole, and check its sample ids.

    Raises:
        ValueError: if the data holds other samples at these places than the run was trained on.
    """
    from datamodules.codec_tokens import CodecTokens

    stream = CodecTokens(**config["data"])._stream("train")
    seen: dict[int, dict[int, list[int]]] = {}
    for row in report["batches"]:
        seen.setdefault(int(row["batch_number"]), {})[int(row["rank"])] = row.get("sample_id", [])
    batches = []
    for number, ranks in sorted(seen.items()):
        batch = stream.batch(number)
        trained = sorted(i for ids in ranks.values() for i in ids)
        if trained and trained != sorted(batch["sample_id"].tolist()):
            raise ValueError(
                f"batch {number}: the data gives other samples than the run was trained on; is it the same set?"
            )
        batches.append(batch)
    return batches


@torch.no_grad()
def judge(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch's bits per codebook and per sample under the model's weights."""
    from lightning_modules.heads import gather_frames, gather_targets
    from lightning_modules.losses import nats_to_bits, sample_bits
    from lightning_modules.masking import masked_indices, span_mask

    codes_BKT = batch["codes"]
    mask_BT = span_mask(
        batch["mask_seed"], batch["num_frames"], codes_BKT.shape[-1], prob=model.mask_prob, length=model.mask_length
    )
    index_M = masked_indices(mask_BT)
    hidden_BTD = model.encoder(codes_BKT, mask_BT, batch["num_frames"])
    losses = model.heads.losses(gather_frames(hidden_BTD, index_M), gather_targets(codes_BKT, index_M))
    samples = sample_bits(losses.nats_KM[0], index_M, mask_BT.shape)
    return {
        "batch_number": batch["batch_number"],
        "codebook_bits": (nats_to_bits(losses.nats_K) / losses.frames).tolist(),
        "sample_bits": samples.tolist(),
        "sample_id": batch["sample_id"].tolist(),
        "track_id": batch["track_id"].tolist(),
        "start": batch["start"].tolist(),
    }


def default_checkpoint(run: Path, config: dict[str, Any]) -> Path:
    """Return the run's last checkpoint.

    Raises:
        FileNotFoundError: if there is none.
    """
    named = Path((config.get("checkpoint") or {}).get("dirpath") or run / "checkpoints") / "last.ckpt"
    for path in (named, run / "checkpoints" / "last.ckpt"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{named}: no such checkpoint; name one with --ckpt")


def replay(episode: Path, checkpoint: Path | None) -> tuple[dict[str, Any], Path]:
    """Rebuild and judge an episode; return what was found and where it was written."""
    from lightning_modules.acoustic_mlm import AcousticMLM
    from lightning_modules.encoder import EncoderConfig
    from lightning_modules.optimization import OptimizerConfig

    file = find_report(episode)
    run = run_folder(file)
    report, config = read_report(file), yaml.safe_load((run / "config.yaml").read_text())
    path = checkpoint or default_checkpoint(run, config)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    options = config["model"] | {
        "encoder": EncoderConfig(**config["model"]["encoder"]),
        "optimizer": OptimizerConfig(**config["model"]["optimizer"]),
        "compile": False,
    }
    model = AcousticMLM(**options)
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["state_dict"])
    except Exception as error:  # whatever is wrong with it, it is not this run's checkpoint
        raise ValueError(f"{path}: not a checkpoint of this run: {' '.join(str(error).split())[:300]}") from error
    model.eval()
    found = {
        "episode": str(file.parent), "checkpoint": str(path), "words": report.get("words", ""),
        "batches": [judge(model, batch) for batch in rebuild(report, config)],
    }  # fmt: skip
    out = file.parent / "replay.json"
    write_json(out, found)
    return found, out


def main(argv: list[str]) -> int:
    """Replay one episode."""
    parser = argparse.ArgumentParser(prog="python -m experiments replay", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "episodes",
        nargs="+",
        metavar="EPISODE",
        type=Path,
        help="folder of an episode, such as runs/NAME/episodes/step_0000102_jump",
    )
    parser.add_argument("--ckpt", type=Path, help="checkpoint that judges the batches; default: the run's last.ckpt")
    args = parser.parse_args(argv)
    status = 0
    for episode in args.episodes:
        try:
            show(*replay(episode, args.ckpt))
        except (FileNotFoundError, ValueError, KeyError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
    return status


def show(found: dict[str, Any], out: Path) -> None:
    """Print one line per batch: its loss and its worst sample."""
    table = Table("batch", "bits, codebook 0", "worst sample", "its bits", "track", "frame")
    for row in found["batches"]:
        worst = max(range(len(row["sample_bits"])), key=lambda i: row["sample_bits"][i])
        cells = (
            row["sample_id"][worst],
            f"{row['sample_bits'][worst]:.2f}",
            row["track_id"][worst],
            row["start"][worst],
        )
        table.add_row(str(row["batch_number"]), f"{row['codebook_bits'][0]:.2f}", *(str(c) for c in cells))
    console = Console()
    console.print(found["words"])
    console.print(table)
    console.print(f"under {found['checkpoint']}; all samples and codebooks: {out}", soft_wrap=True)
