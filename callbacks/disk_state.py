"""Load a Lightning checkpoint into a running fit, in place of a snapshot, inside ``on_train_batch_end``.

``trainer.fit(ckpt_path=...)`` would do more and restart the loops; here the loops are running, and their trackers are
brought to the phase in which the hook finds them (processed = k, completed = k - 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.checkpoint_files import GUARD_KEY
from callbacks.random_states import KEY as RNG_KEY
from callbacks.trainer_state import DATA_TRACKERS, align_fetcher, loop_trackers, set_rng_state

KEYS = {  # where a checkpoint keeps each tracker
    "epoch": "epoch_progress",
    "batch": "epoch_loop.batch_progress",
    "scheduler": "epoch_loop.scheduler_progress",
    "optimizer": "epoch_loop.automatic_optimization.optim_progress",
    "validation": "epoch_loop.val_loop.batch_progress",
}


def load_checkpoint_in_place(
    trainer: Trainer, me: Callback, path: Path, *, keep_data_counters: bool = False
) -> dict[str, Any]:
    """Put the run back to a checkpoint file and return ``{"guard": ..., "stream": ...}`` from it.

    Args:
        trainer: the running trainer.
        me: the callback that calls; its own state is left to it.
        path: the file, readable by every rank.
        keep_data_counters: as in `trainer_state.restore_plain`.
    """
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    module = trainer.lightning_module
    module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    plugin = trainer.precision_plugin
    if (saved := checkpoint.get(type(plugin).__qualname__)) is not None:
        plugin.load_state_dict(saved)
    _load_callbacks(trainer, me, checkpoint)
    fit = checkpoint["loops"]["fit_loop"]
    _load_trackers(trainer, fit, keep_data_counters)
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)
    states = checkpoint.get(RNG_KEY)
    if states is not None and len(states) == trainer.world_size:
        set_rng_state(states[trainer.global_rank])
    loaders = fit["state_dict"].get("combined_loader") or [None]
    return {"guard": checkpoint[GUARD_KEY], "stream": loaders[0]}


def _load_callbacks(trainer: Trainer, me: Callback, checkpoint: dict[str, Any]) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callback is me or isinstance(callback, Checkpoint):
            continue
        callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is not None:
            callback.load_state_dict(state)


def _load_trackers(trainer: Trainer, saved: dict[str, Any], keep_data_counters: bool) -> None:
    live = loop_trackers(trainer)
    for name, tracker in live.items():
        if not (keep_data_counters and name in DATA_TRACKERS):
            tracker.load_state_dict(saved[KEYS[name]])
    if keep_data_counters:
        return
    # A file written after the hook, at the end of an epoch say, is further by what follows the hook.
    for batches in (live["batch"].current, live["batch"].total):
        batches.completed = batches.processed - 1
    for epochs in (live["epoch"].current, live["epoch"].total):
        epochs.processed = epochs.started - 1
        epochs.completed = min(epochs.completed, epochs.processed)
    align_fetcher(trainer)
