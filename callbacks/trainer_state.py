"""What a training run consists of, as a tree of live tensors and a plain dictionary, and how to put it back in place.

A Lightning adapter around `callbacks.snapshots`. Both `live_tensors`/`plain_state` and `restore_plain` are called from
``on_train_batch_end`` at an accumulation boundary, where all loop counters are in one phase (ready = started =
processed = k, completed = k - 1; the loop adds the rest after the hook). Trackers are written directly:
``load_state_dict`` of a loop would mark it as resuming.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

# Trackers that count data: they stay where they are when the data of a loader that ends by itself moves on.
DATA_TRACKERS = ("epoch", "batch", "validation")
# The components of a snapshot. Leaving out any one breaks the equality of a rolled-back run with one that never saw
# the fault; `omit` exists so that a test can prove that of each.
COMPONENTS = ("model", "optimizer", "scheduler", "scaler", "rng", "loops", "callbacks", "metrics", "stream")


def _named_state(prefix: str, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}/{index}/{key}", value
            index += 1


def callback_modules(callback: Callback) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules a callback holds itself, such as the averaged model of a weight-averaging callback."""
    for name, value in vars(callback).items():
        if isinstance(value, nn.Module):
            yield name, value


def _callbacks(trainer: Trainer, me: Callback) -> list[tuple[str, Callback]]:
    # Checkpoint callbacks keep paths, not training state; the guard saves itself.
    kept: list[Callback] = [c for c in trainer.callbacks if c is not me and not isinstance(c, Checkpoint)]  # type: ignore[attr-defined]
    return [(f"{i}/{c.state_key}", c) for i, c in enumerate(kept)]


def live_tensors(trainer: Trainer, me: Callback) -> dict[str, Tensor]:
    """Return the live parameters, buffers (non-persistent ones too), optimizer states and averaged models by name."""
    tree: dict[str, Tensor] = {}
    module = trainer.lightning_module
    tree |= {f"model/{name}": p.data for name, p in module.named_parameters()}
    tree |= {f"model/{name}": b for name, b in module.named_buffers()}
    for i, optimizer in enumerate(trainer.optimizers):
        tree |= dict(_named_state(f"optimizer/{i}", optimizer))
    for key, callback in _callbacks(trainer, me):
        for attribute, held in callback_modules(callback):
            tree |= {f"callbacks/{key}/{attribute}/{n}": t.data for n, t in held.named_parameters()}
            tree |= {f"callbacks/{key}/{attribute}/{n}": t for n, t in held.named_buffers()}
    return tree


def rng_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            str(name),
            torch.from_numpy(np.array(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put every random generator of this process back to ``state``."""
    torch.set_rng_state(state["torch"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _metrics(trainer: Trainer) -> dict[str, Metric]:
    named = {f"module/{n}": m for n, m in trainer.lightning_module.named_modules() if isinstance(m, Metric)}
    results = trainer.fit_loop.epoch_loop._results
    return named | {f"results/{k}": m for k, m in results.items() if isinstance(m, Metric)}


def _metric_state(metric: Metric) -> dict[str, Any]:
    keys = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "has_reset"]
    return {k: copy.deepcopy(vars(metric)[k]) for k in keys if k in vars(metric)}


def loop_trackers(trainer: Trainer) -> dict[str, Any]:
    """Return the live progress trackers that follow the accepted trajectory, by name."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return {
        "epoch": fit.epoch_progress,
        "batch": epoch.batch_progress,
        "scheduler": epoch.scheduler_progress,
        "optimizer": epoch.automatic_optimization.optim_progress,
        "validation": epoch.val_loop.batch_progress,
    }


def plain_state(trainer: Trainer, me: Callback, stream: Any | None) -> dict[str, Any]:
    """Return everything of the run that is not in `live_tensors`, copied."""
    return {
        "optimizer": [
            [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in o.param_groups]
            for o in trainer.optimizers
        ],
        "scheduler": [copy.deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        "scaler": copy.deepcopy(trainer.precision_plugin.state_dict()),
        "rng": rng_state(),
        "loops": {k: copy.deepcopy(v.state_dict()) for k, v in loop_trackers(trainer).items()}
        | {"accumulate": trainer.accumulate_grad_batches},
        "callbacks": {key: copy.deepcopy(c.state_dict()) for key, c in _callbacks(trainer, me)},
        "metrics": {name: _metric_state(m) for name, m in _metrics(trainer).items()},
        "stream": copy.deepcopy(stream.state_dict()) if stream is not None else None,
    }


def forget_new_optimizer_state(trainer: Trainer, known: set[str]) -> None:
    """Drop optimizer states that were created after the snapshot: the optimizer would make them anew from zero."""
    for i, optimizer in enumerate(trainer.optimizers):
        index = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                if any(f"optimizer/{i}/{index}/{k}" not in known for k, v in state.items() if isinstance(v, Tensor)):
                    optimizer.state.pop(parameter)
                index += 1


def restore_plain(
    trainer: Trainer,
    me: Callback,
    state: Mapping[str, Any],
    *,
    keep_data_counters: bool = False,
    omit: frozenset[str] = frozenset(),
) -> None:
    """Put back what `plain_state` saved, except the stream, gradients cleared and the random states last.

    Args:
        trainer: the running trainer, inside ``on_train_batch_end``.
        me: the callback that calls.
        state: what `plain_state` returned.
        keep_data_counters: leave the counts of batches and epochs alone. Right for a loader that ends by itself: its
            epoch must still be seen to end, or validation and epoch-wise schedules would silently stop.
        omit: components to leave as they are, for tests.
    """
    if "optimizer" not in omit:
        for optimizer, groups in zip(trainer.optimizers, state["optimizer"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(copy.deepcopy(saved))
    if "scheduler" not in omit:
        for config, saved in zip(trainer.lr_scheduler_configs, state["scheduler"], strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(saved))
    if "scaler" not in omit and state["scaler"]:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(state["scaler"]))
    if "loops" not in omit:
        _restore_loops(trainer, state["loops"], keep_data_counters)
    if "callbacks" not in omit:
        for key, callback in _callbacks(trainer, me):
            if state["callbacks"].get(key):
                callback.load_state_dict(copy.deepcopy(state["callbacks"][key]))
    if "metrics" not in omit:
        for name, metric in _metrics(trainer).items():
            saved = state["metrics"].get(name)
            if saved is None:
                metric.reset()
            else:
                vars(metric).update(copy.deepcopy(saved))
    for optimizer in trainer.optimizers:
        optimizer.zero_grad(set_to_none=True)
    if "rng" not in omit:
        set_rng_state(state["rng"])


def _restore_loops(trainer: Trainer, saved: Mapping[str, Any], keep_data_counters: bool) -> None:
    for name, progress in loop_trackers(trainer).items():
        if keep_data_counters and name in DATA_TRACKERS:
            continue
        progress.load_state_dict(copy.deepcopy(saved[name]))
    if keep_data_counters:
        return
    trainer.accumulate_grad_batches = saved["accumulate"]
    align_fetcher(trainer)


def align_fetcher(trainer: Trainer) -> None:
    """Tell the data fetcher how far the epoch is: it decides by its own count which batch is the last."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.fetched = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
