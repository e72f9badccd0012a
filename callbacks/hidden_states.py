"""Write the hidden states that ``predict`` computes: one ``.npy`` per clip, named by track and first frame."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class HiddenStateWriter(BasePredictionWriter):
    """Write each clip's hidden states, fp32 ``[frames, D]``, padding removed.

    Args:
        dirpath: the folder; the default is ``<default_root_dir>/hidden_states``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        super().__init__("batch")
        self.dirpath = dirpath

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch; every rank writes its own clips."""
        if not isinstance(prediction, Tensor) or not isinstance(batch, Mapping):
            raise ValueError("hidden_states: predict_step must return hidden states [B, T, D] of a dictionary batch")
        folder = Path(self.dirpath or Path(trainer.default_root_dir) / "hidden_states")
        folder.mkdir(parents=True, exist_ok=True)
        hidden_BTD = prediction.detach().float().cpu().numpy()
        rows = zip(batch["track_id"].tolist(), batch["start"].tolist(), batch["num_frames"].tolist(), strict=True)
        for hidden_TD, (track, start, frames) in zip(hidden_BTD, rows, strict=True):
            target = folder / f"track_{track:06d}_frame_{start:09d}.npy"
            partial = target.with_name(f".{target.name}.partial")
            with open(partial, "wb") as file:
                np.save(file, hidden_TD[:frames])
            os.replace(partial, target)
