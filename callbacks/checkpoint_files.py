"""Checkpoints on disk under a guard: which can be trusted, which must never be resumed from, and writing them safely.

Lightning's ModelCheckpoint keeps a poisoned file after a rollback, since it believes that step is saved already, and
saves non-finite weights over good ones. `GuardedCheckpoint` refuses the latter and writes atomically;
`reject_newer` deals with the former for any checkpoint callback.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from callbacks.policy import TrainingStopped

REJECTED = ".rejected"
GUARD_KEY = "spike_guard"  # under this key a checkpoint holds the guard's own state


def read_guard_state(path: Path) -> dict[str, Any] | None:
    """Return the guard's state in a checkpoint file, or None if the file is unreadable or holds none."""
    try:
        # A sharded checkpoint is a folder, with everything but the tensors in one file.
        file = path / "meta.pt" if path.is_dir() else path
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=not path.is_dir())
    except Exception:
        return None  # a damaged file is not a rollback target, whatever is wrong with it
    state = checkpoint.get(GUARD_KEY)
    return state if isinstance(state, dict) else None


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Return the folders that the trainer's checkpoint callbacks write to."""
    folders = {Path(c.dirpath) for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath}
    return sorted(f for f in folders if f.is_dir())


def guarded_files(folders: Iterable[Path], run_id: str) -> list[tuple[int, Path]]:
    """Return ``(attempted step, path)`` of every resumable file of this run, oldest first."""
    found = []
    for path in (p for folder in folders for p in folder.glob("*.ckpt") if not p.is_symlink()):
        state = read_guard_state(path)
        if state is not None and state.get("run_id") == run_id:
            found.append((int(state["attempt"]), path))
    return sorted(found)


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def reject_newer(trainer: Trainer, run_id: str, attempt: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Rename every resumable file written after attempted step ``attempt`` so that nothing resumes from it.

    Call it on rank 0, after the accepted state was written. Files rejected earlier are deleted: one generation is kept
    for inspection.

    Args:
        trainer: whose checkpoint callbacks' folders are searched.
        run_id: files of other runs are left alone.
        attempt: the last attempted step of the accepted trajectory.
        keep: files that hold the accepted state.
    """
    folders = checkpoint_folders(trainer)
    kept = {path.resolve() for path in keep}
    doomed = [path for at, path in guarded_files(folders, run_id) if at > attempt and path.resolve() not in kept]
    for folder in folders:
        for old in folder.glob(f"*{REJECTED}"):
            remove(old)
    for path in doomed:
        path.rename(path.with_name(path.name + REJECTED))
    for folder in folders:
        for link in folder.glob("*.ckpt"):
            if link.is_symlink() and not link.exists():
                link.unlink()
    return doomed


def forget_missing(callback: ModelCheckpoint) -> None:
    """Make a checkpoint callback forget files that are gone and the step it saved last. Call it on every rank."""
    kept = {path: score for path, score in callback.best_k_models.items() if os.path.exists(path)}
    if kept != callback.best_k_models:
        callback.best_k_models = kept
        better = min if callback.mode == "min" else max
        worse = max if callback.mode == "min" else min
        callback.best_model_path = better(kept, key=lambda p: kept[p]) if kept else ""
        callback.best_model_score = kept.get(callback.best_model_path)
        callback.kth_best_model_path = worse(kept, key=lambda p: kept[p]) if len(kept) == callback.save_top_k else ""
        callback.kth_value = kept.get(callback.kth_best_model_path, torch.tensor(torch.inf))
    if callback.best_model_path and not os.path.exists(callback.best_model_path):
        callback.best_model_path = ""
    callback._last_global_step_saved = -1


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every value of every floating-point tensor is finite."""
    norms = [
        n
        for t in tensors
        if t.is_floating_point() and t.numel()
        for n in [torch.linalg.vector_norm(t.detach().float())]
    ]
    return bool(torch.stack([n.cpu() for n in norms]).isfinite().all()) if norms else True


class GuardedCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that writes atomically and never writes non-finite weights.

    The file is written beside its target and renamed after fsync, so that a kill leaves the old file whole, wherever
    the system's temporary folder is.
    """

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if not is_finite(trainer.lightning_module.parameters()):  # equal on all ranks: gradients are reduced
            rank_zero_warn(f"not saving {filepath}: the weights hold non-finite values; the file before it stays")
            self._refused = filepath
            if self.best_model_path == filepath:
                self.best_model_path = self._last_checkpoint_saved
            return
        save_atomically(trainer, filepath, weights_only=self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        if current == getattr(self, "_refused", None):  # nothing was written in its place
            self.best_k_models.pop(current, None)
            self.last_model_path = previous if self.last_model_path == current else self.last_model_path
            return False
        return super()._should_remove_checkpoint(trainer, previous, current)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save on an exception, but not when the guard gave up a state that must not be resumed from."""
        if not isinstance(exception, TrainingStopped):
            super().on_exception(trainer, pl_module, exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step as ``last``, also when it is no multiple of the interval."""
        super().on_train_end(trainer, pl_module)
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def save_atomically(trainer: Trainer, filepath: str | Path, *, weights_only: bool = False) -> None:
    """Save a checkpoint on all ranks; the file appears whole or not at all."""
    target = Path(filepath)
    partial = target.with_name(f".{target.name}.partial")
    trainer.save_checkpoint(partial, weights_only)
    if trainer.is_global_zero and partial.is_dir():
        if target.exists():  # a folder cannot replace another in one step: the old one steps aside first
            target.rename(target.with_name(f".{target.name}.old"))
        partial.rename(target)
        shutil.rmtree(target.with_name(f".{target.name}.old"), ignore_errors=True)
    elif trainer.is_global_zero and partial.is_file():
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    trainer.strategy.barrier("checkpoint")
