"""Random states in the checkpoint, so that a resumed run draws what the uninterrupted one would have drawn.

Lightning's checkpoints hold none. Only rank 0 writes, so the states of all ranks are gathered when one is saved.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from callbacks.trainer_state import rng_state, set_rng_state

KEY = "random_states"


class RandomStates(Callback):
    """Save and restore the random states of torch (CPU and CUDA), numpy and Python, rank by rank."""

    def __init__(self) -> None:
        self._pending: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Gather every rank's states into the checkpoint. Lightning calls this on all ranks."""
        mine = rng_state()
        gathered: list[Any] = [mine]
        if trainer.world_size > 1:
            gathered = [None] * trainer.world_size
            dist.all_gather_object(gathered, mine)
        checkpoint[KEY] = gathered

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember this rank's states; they are set when training starts, after all loaders were built."""
        states = checkpoint.get(KEY)
        if states is None:
            return
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint holds random states of {len(states)} ranks and this run has {trainer.world_size}: "
                "dropout and other random draws will differ from the uninterrupted run"
            )
            return
        self._pending = states[trainer.global_rank]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the states: building a DataLoader's iterator draws from the global generator, so this comes last."""
        if self._pending is not None:
            set_rng_state(self._pending)
            self._pending = None
