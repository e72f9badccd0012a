"""Put a running Lightning fit back to a state it was in, from host memory or from a checkpoint, inside a hook.

Called from ``on_train_batch_end`` at an accumulation boundary, on all ranks with the same target.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from callbacks.checkpoint_files import (
    checkpoint_folders,
    forget_missing,
    guarded_files,
    is_finite,
    reject_newer,
    save_atomically,
)
from callbacks.detector import Verdict
from callbacks.disk_state import load_checkpoint_in_place
from callbacks.learning_rate import scale_next_step
from callbacks.snapshots import Snapshot
from callbacks.stream_protocol import merge_ranges
from callbacks.trainer_state import forget_new_optimizer_state, live_tensors, restore_plain
from callbacks.veto import is_fused

if TYPE_CHECKING:
    from callbacks.spike_guard import SpikeGuard


@dataclass(frozen=True)
class AfterRollback:
    """What is done after a rollback. All but ``data`` deviate from the run as configured, so they are off by default.

    Args:
        data: ``advance``: the data moves on, what was in flight is not read again (PaLM's recipe); ``replay``: it is
            read again without the offending batches. Replay needs a position-addressed loader.
        lr_factor: multiply the learning rate by this from here on, per rollback.
        rewarm_steps: let the learning rate climb back from 0 over this many steps.
        reset_moments: forget the optimizer's moments.
        clip_factor: multiply ``gradient_clip_val`` by this from here on, per rollback.

    Raises:
        ValueError: for an unknown choice or a number out of range.
    """

    data: Literal["advance", "replay"] = "advance"
    lr_factor: float = 1.0
    rewarm_steps: int = 0
    reset_moments: bool = False
    clip_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.data not in ("advance", "replay"):
            raise ValueError(f"spike_guard.after.data={self.data!r}: choose from advance, replay")
        if not (0 < self.lr_factor <= 1 and 0 < self.clip_factor <= 1 and self.rewarm_steps >= 0):
            raise ValueError(
                f"spike_guard.after: lr_factor={self.lr_factor} and clip_factor={self.clip_factor} must lie in (0, 1], "
                f"rewarm_steps={self.rewarm_steps} must not be negative"
            )

    def deviations(self) -> dict[str, Any]:
        """Return the options that make the run differ from its configuration, for the record."""
        defaults = AfterRollback()
        return {k: v for k, v in vars(self).items() if k != "data" and v != getattr(defaults, k)}


@dataclass
class Target:
    """A state to go back to: a snapshot in host memory, or a checkpoint file."""

    attempt: int
    snapshot: Snapshot | None = None
    path: Path | None = None


class Rollback:
    """Choose a target, put the run back, and see to the data, the options and the files.

    Args:
        guard: the callback it works for.
        after: what happens after a rollback.
    """

    def __init__(self, guard: SpikeGuard, after: AfterRollback) -> None:
        self.guard, self.after = guard, after
        self.skipped: list[list[int]] = []  # ranges of global batch numbers that the accepted run never trained on
        self.lr_scale, self.clip_scale, self.rewarm_from = 1.0, 1.0, -1
        self.last_target = -1
        self.omit: frozenset[str] = frozenset()  # components left out, for the mutation test

    def check(self, trainer: Trainer, stream: Any | None) -> None:
        """Refuse options that cannot work in this run.

        Raises:
            ValueError: for replay without a position-addressed loader, or a fused optimizer under a gradient scaler.
        """
        if self.after.data == "replay" and stream is None:
            raise ValueError(
                "spike_guard.after.data=replay: the training loader cannot be put to a position "
                "(it has no state_dict with batch_number and skip); choose advance"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and self.guard.action != "log" and any(is_fused(o) for o in trainer.optimizers):
            raise ValueError(
                "precision=16-mixed with a fused optimizer: its gradients are still scaled when they are "
                "judged; set the optimizer's fused to false, or use bf16-mixed"
            )
        if self.clip_scale != 1.0 and trainer.gradient_clip_val:
            trainer.gradient_clip_val = float(trainer.gradient_clip_val) * self.clip_scale

    def before_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Apply the learning-rate cut and re-warm, if a rollback asked for them."""
        factor = self.lr_scale
        if self.rewarm_from >= 0 and self.after.rewarm_steps:
            factor *= min(1.0, (trainer.global_step - self.rewarm_from + 1) / (self.after.rewarm_steps + 1))
        if factor != 1.0:
            scale_next_step(optimizer, factor)

    def choose(self, trainer: Trainer, before: int) -> Target | None:
        """Return the newest trusted state taken before attempted step ``before``, in memory or on disk.

        A retry at the same place goes back beyond the target of the try before, where there is anything older;
        otherwise the same state is tried again with a wider stretch of data passed by.
        """
        if self.guard.retries.count > 1 and self.last_target >= 0:
            older = self._newest(trainer, min(before, self.last_target))
            if older is not None:
                return older
        return self._newest(trainer, before)

    def _newest(self, trainer: Trainer, before: int) -> Target | None:
        in_memory = self.guard.ring.newest_good(before)
        files: list[tuple[int, Path]] = []
        if trainer.is_global_zero:
            newest_trusted = min(before - 1, self.guard.trusted_to)  # on disk, too, trust is earned
            everything = guarded_files(checkpoint_folders(trainer), self.guard.run_id)
            files = [f for f in everything if f[0] <= newest_trusted and f[1].is_file()]
        newest = trainer.strategy.broadcast(files[-1] if files else None)
        if newest is not None and (in_memory is None or newest[0] > in_memory.attempt):
            return Target(newest[0], path=newest[1])
        return Target(in_memory.attempt, snapshot=in_memory) if in_memory is not None else None

    def perform(self, trainer: Trainer, target: Target, verdict: Verdict) -> dict[str, Any]:
        """Put the run back to ``target`` and return the record of what was done."""
        began, guard = time.perf_counter(), self.guard
        now = guard.stream.state_dict() if guard.stream is not None else None
        left = trainer.global_step
        guard.sums.clear()
        if target.snapshot is not None:
            then = target.snapshot.plain["stream"]
            self._move_data(now, then, verdict)
            self._from_memory(trainer, target.snapshot)
            guard.load_detection_state(target.snapshot.plain["guard"])
        else:
            assert target.path is not None
            checkpoint = load_checkpoint_in_place(trainer, guard, target.path, keep_data_counters=guard.stream is None)
            then = checkpoint.get("stream")
            self._move_data(now, then, verdict)
            guard.load_detection_state(checkpoint["guard"])
        guard.ring.drop_newer(target.attempt)
        self.last_target = target.attempt
        self._deviate(trainer)
        return {
            "seconds": time.perf_counter() - began,
            "from_step": left,
            "to_step": trainer.global_step,
            "to_attempt": target.attempt,
            "source": "memory" if target.snapshot is not None else str(target.path),
            "data": self.after.data if now is not None else "moved on",
            "skipped": self.skipped,
            "retry": guard.retries.count,
            "deviations": self.after.deviations(),
        }

    def _from_memory(self, trainer: Trainer, snapshot: Snapshot) -> None:
        guard = self.guard
        if "optimizer" not in self.omit:
            forget_new_optimizer_state(trainer, set(snapshot.buffers))
        tree = live_tensors(trainer, guard)
        wanted = {k: v for k, v in tree.items() if k.split("/", 1)[0] not in self.omit}
        held = {k: v for k, v in snapshot.buffers.items() if k.split("/", 1)[0] not in self.omit}
        guard.ring.restore(Snapshot(snapshot.step, snapshot.attempt, {}, buffers=held), wanted)
        restore_plain(trainer, guard, snapshot.plain, keep_data_counters=guard.stream is None, omit=self.omit)

    def _move_data(self, now: dict[str, Any] | None, then: dict[str, Any] | None, verdict: Verdict) -> None:
        """Record what is passed by, and put the stream to its place."""
        if now is None or then is None:
            return
        guard, here, back = self.guard, int(now["batch_number"]), int(then["batch_number"])
        if self.after.data == "replay":
            suspect = verdict.onset - guard.retries.widened(guard.onset_margin)
            numbers = [r.batch_number for step in guard.history if step.attempt >= suspect for r in step.batches]
            if not guard.history or guard.history[0].attempt > suspect:
                numbers = []  # the onset lies before what is remembered: read nothing of the window again
            offending = [max(back, min(numbers, default=back)), here]
            self.skipped = merge_ranges([*self.skipped, offending])
            state = now | {"batch_number": back, "skip": merge_ranges([*now["skip"], offending])}
        else:
            # A retry passes by a wider stretch: the window in flight, doubled with each further try.
            ahead = here + (here - back) * (2 ** max(0, guard.retries.count - 1) - 1)
            self.skipped = merge_ranges([*self.skipped, [back, ahead]])
            if ahead == here:
                return
            state = now | {"batch_number": ahead}
        if "stream" not in self.omit:
            guard.stream.load_state_dict(copy.deepcopy(state))

    def _deviate(self, trainer: Trainer) -> None:
        after = self.after
        self.lr_scale *= after.lr_factor
        self.rewarm_from = trainer.global_step if after.rewarm_steps else -1
        if after.clip_factor != 1.0 and trainer.gradient_clip_val:
            self.clip_scale *= after.clip_factor
            trainer.gradient_clip_val = float(trainer.gradient_clip_val) * after.clip_factor
        if after.reset_moments:
            for optimizer in trainer.optimizers:
                optimizer.state.clear()

    def settle_checkpoints(self, trainer: Trainer, target: Target) -> None:
        """Reject files of the trajectory left behind and write the accepted state at once."""
        written: list[Path] = []
        ours = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
        for callback in ours:  # first the accepted state, so that a kill in between leaves something to resume from
            last = Path(str(callback.dirpath)) / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
            if callback.save_last or trainer.strategy.broadcast(self._nothing_else(trainer, last.parent, target)):
                callback.last_model_path = callback.last_model_path or str(last)
                save_atomically(trainer, callback.last_model_path)
                written.append(Path(callback.last_model_path))
        self.reject(trainer, target.attempt, written)
        for callback in ours:
            forget_missing(callback)

    def _nothing_else(self, trainer: Trainer, folder: Path, target: Target) -> bool:
        """Whether a folder holds files of this run and all of them are about to be rejected; rank 0 looks."""
        if not trainer.is_global_zero:
            return False
        found = guarded_files([folder], self.guard.run_id) if folder.is_dir() else []
        return bool(found) and all(attempt > target.attempt for attempt, _ in found)

    def reject(self, trainer: Trainer, attempt: int, keep: list[Path]) -> None:
        """Set aside every file written after attempted step ``attempt``, on all ranks."""
        if trainer.is_global_zero:
            for path in reject_newer(trainer, self.guard.run_id, attempt, keep):
                rank_zero_warn(f"{path} held a rejected state: renamed to {path.name}.rejected")
        trainer.strategy.barrier("rejected")

    def newest_file(self, trainer: Trainer) -> str | None:
        """Return the newest resumable file of this run, as rank 0 sees it."""
        found = guarded_files(checkpoint_folders(trainer), self.guard.run_id) if trainer.is_global_zero else []
        path: str | None = trainer.strategy.broadcast(str(found[-1][1]) if found else None)
        return path

    def save_last_good(self, trainer: Trainer, verdict: Verdict) -> str | None:
        """Put the run back to its newest trusted state and write that; None if there is no such state."""
        target = self.choose(trainer, verdict.onset - self.guard.onset_margin) or self._any_good()
        if target is None:
            return None
        if target.path is not None:
            self.reject(trainer, target.attempt, [])
            return str(target.path)
        self.perform(trainer, target, verdict)
        self.settle_checkpoints(trainer, target)
        folders = checkpoint_folders(trainer) or [Path(trainer.default_root_dir)]
        path = trainer.strategy.broadcast(folders[0] / "last_good.ckpt")
        save_atomically(trainer, path)
        return str(path)

    def _any_good(self) -> Target | None:
        good = [s for s in self.guard.ring.snapshots if s.good]
        return Target(good[0].attempt, snapshot=good[0]) if good else None

    def weights_are_finite(self, trainer: Trainer) -> bool:
        """Return whether the weights are finite; equal on all ranks, as their gradients are."""
        return is_finite(p for p in trainer.lightning_module.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the ranges passed by and the deviations in force."""
        return {
            "skipped": copy.deepcopy(self.skipped),
            "lr_scale": self.lr_scale,
            "clip_scale": self.clip_scale,
            "rewarm_from": self.rewarm_from,
            "last_target": self.last_target,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.skipped = copy.deepcopy(state["skipped"])
        self.lr_scale, self.clip_scale = float(state["lr_scale"]), float(state["clip_scale"])
        self.rewarm_from, self.last_target = int(state["rewarm_from"]), int(state["last_target"])
