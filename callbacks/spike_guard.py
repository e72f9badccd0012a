"""SpikeGuard: watch a loss, refuse broken updates, and put a run that spiked back on its path.

A thin adapter: the rules are in `detector` (what happened), `policy` (what to do), `snapshots` (copies) and
`trainer_state` (what a run consists of). Every decision is taken on all ranks from the same reduced numbers.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks import veto
from callbacks.checkpoint_files import GUARD_KEY
from callbacks.detector import Detector, DetectorConfig, Verdict
from callbacks.episode_report import EpisodeFolder, gather
from callbacks.episodes import EpisodeTracker
from callbacks.forensics import describe
from callbacks.gradient_norms import GradientNorms, GroupedNorms
from callbacks.learning_rate import put_back
from callbacks.monitored import missing, monitored, step_record
from callbacks.policy import Action, Retries, TrainingStopped, check_action, decide
from callbacks.rollback import AfterRollback, Rollback
from callbacks.snapshots import SnapshotRing, check_host_memory, host_memory_available
from callbacks.step_sums import StepReport, StepSums
from callbacks.stream_protocol import find_stream
from callbacks.trainer_state import live_tensors, plain_state


class SpikeGuard(Callback):
    """Detect loss spikes at every optimizer step and act on them.

    Args:
        monitor: the watched metric: a name logged with ``self.log``, a key of what ``training_step`` returns, or
            ``loss``. A key of the returned ``sums`` dictionary, ``(sum, count)``, is pooled exactly over ranks and
            micro-batches.
        action: the most that may be done: ``log`` never changes the run, ``veto`` refuses broken updates, ``rollback``
            also puts the run back, ``stop`` ends it where ``rollback`` would have rolled it back.
        detector: the detector's parameters.
        after: what happens after a rollback.
        snapshot_every: accepted steps between snapshots; 0 chooses the period from their measured cost.
        snapshot_budget: with ``snapshot_every=0``, the share of training time that snapshots may take.
        ring_slots: snapshots kept in host memory, per rank.
        healthy_steps: attempted steps that must follow a snapshot before it is trusted.
        onset_margin: how many attempted steps before the onset a target must lie, since a cause precedes its effect.
        max_vetoes: updates refused in a row for a finite norm out of range. Beyond that the weights are the cause,
            and refusing keeps them where they are; non-finite ones are always refused.
        max_retries: rollbacks at one place before the run is stopped; each goes further back than the one before.
        clear_steps: accepted steps beyond the trouble after which it counts as overcome.
        lag: steps by which the host reads the reduced numbers late; -1 means 1 on an accelerator or with several
            ranks, so that nothing waits, and 0 otherwise.
        dirpath: folder for episodes; the default is ``<default_root_dir>/episodes``.

    Raises:
        ValueError: for an unknown action or a number out of range.
    """

    def __init__(
        self,
        monitor: str = "train/bits_codebook_0",
        action: Action = "rollback",
        detector: DetectorConfig | None = None,
        after: AfterRollback | None = None,
        snapshot_every: int = 0,
        snapshot_budget: float = 0.01,
        ring_slots: int = 3,
        healthy_steps: int = 10,
        onset_margin: int = 2,
        max_vetoes: int = 2,
        max_retries: int = 3,
        clear_steps: int = 100,
        lag: Literal[-1, 0, 1] = -1,
        dirpath: str | None = None,
    ) -> None:
        self.action = check_action(action)
        for name, value, low in (
            ("snapshot_every", snapshot_every, 0),
            ("healthy_steps", healthy_steps, 1),
            ("onset_margin", onset_margin, 1),
            ("max_vetoes", max_vetoes, 0),
            ("max_retries", max_retries, 0),
        ):
            if value < low:
                raise ValueError(f"spike_guard.{name}={value}: must be at least {low}")
        if not 0 < snapshot_budget < 1:
            raise ValueError(f"spike_guard.snapshot_budget={snapshot_budget}: must lie between 0 and 1")
        self.monitor = monitor
        self.detector = Detector(detector or DetectorConfig())
        self.tracker = EpisodeTracker()
        self.retries = Retries(max_retries, clear_steps)
        self.ring = SnapshotRing(ring_slots, pin=torch.cuda.is_available())
        self.snapshot_every, self.snapshot_budget = snapshot_every, snapshot_budget
        self.healthy_steps, self.onset_margin, self.lag = healthy_steps, onset_margin, lag
        self.max_vetoes, self.out_of_range = max_vetoes, 0
        self.rollback = Rollback(self, after or AfterRollback())
        self.folder = EpisodeFolder(dirpath)
        self.sums = StepSums()
        self.run_id = uuid.uuid4().hex
        self.period = snapshot_every or 1
        self.counts = {"vetoed": 0, "overflows": 0, "rollbacks": 0, "steps_lost": 0, "episodes": 0}
        self.history: deque[StepReport] = deque(maxlen=200)
        self.attempt = -1
        self.last_trouble = -1
        self.trusted_to = -1  # the newest attempted step that enough healthy steps have followed
        self.bad_run = 0  # non-finite steps in a row
        self.noted: tuple[str, int] = ("", -1)  # kind and attempted step of the episode noted last
        self.found = False  # whether the monitored metric was ever there
        self.next_snapshot = 0
        self.stream: Any = None
        self._norms: GroupedNorms | None = None
        self._records: list[Any] = []
        self._refused: Tensor | float = 0.0
        self._norm: Tensor | float = math.nan
        self._step_began = 0.0

    # ---- start -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that this run can be guarded, before any data is touched.

        Raises:
            ValueError: for manual optimization, several optimizers' worth of memory, or options that cannot work here.
        """
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "SpikeGuard needs automatic optimization: with automatic_optimization=False it cannot know "
                "when an optimizer step is taken. Remove the callback or set automatic_optimization=True"
            )
        costly = trainer.strategy.root_device.type != "cpu" or trainer.world_size > 1
        self.sums = StepSums(lag=int(costly) if self.lag == -1 else self.lag)
        self.run_id = trainer.strategy.broadcast(self.run_id)
        if self.action == "rollback":
            self._check_memory(trainer, pl_module)

    def _check_memory(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = max(1, trainer.world_size // max(1, trainer.num_nodes))
        # The poorest host decides for all: one rank must not stop while the others go on.
        known = [n for n in gather(host_memory_available()) if n is not None]
        check_host_memory(pl_module.parameters(), self.ring.slots, ranks, min(known, default=None))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the folder for episodes."""
        self.folder.open(trainer)
        self._norms = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the stream: a loader that can tell and take its position."""
        self.stream = find_stream(trainer)
        self.rollback.check(trainer, self.stream)
        self._step_began = time.perf_counter()

    # ---- each optimizer step -----------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Refuse the update on the device when its gradient norm is non-finite or out of range."""
        self._norm = self._gradient_norm(trainer, pl_module)
        if self.action == "log":
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        # A gradient scaler meets overflows as part of its work and skips those updates itself.
        limit = self.detector.veto_limit() if self.out_of_range < self.max_vetoes else math.inf
        self._refused = veto.refuse(optimizer, self._norm, limit, scaler)
        self.rollback.before_step(trainer, optimizer)

    def _gradient_norm(self, trainer: Trainer, pl_module: LightningModule) -> Tensor:
        before_me = trainer.callbacks[: trainer.callbacks.index(self)]  # type: ignore[attr-defined]
        if any(isinstance(c, GradientNorms) for c in before_me):  # one after the guard has left last step's norm
            known = getattr(pl_module, "gradient_norm_total", None)
            if isinstance(known, Tensor):
                return known
        if self._norms is None:
            self._norms = GroupedNorms(pl_module.named_parameters())
        return self._norms()[0]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the step once its last micro-batch is done; act; take a snapshot when one is due."""
        for optimizer in trainer.optimizers:
            put_back(optimizer)  # a gradient scaler may have skipped the step that was to be scaled
        pair = monitored(self.monitor, outputs, trainer)
        self.found = self.found or pair is not None
        nothing = torch.zeros((), device=pl_module.device)
        self.sums.add(*(pair or (nothing, nothing)))
        self._records.append(step_record(batch, batch_idx, outputs))
        if trainer.fit_loop._should_accumulate():
            return
        if not self.found:
            raise ValueError(f"spike_guard.monitor={self.monitor!r}: {missing(outputs, trainer)}")
        now = time.perf_counter()
        extras: list[Tensor | float] = [self._norm, self._refused, self.ring.last_seconds, now - self._step_began]
        self._step_began = now
        self.attempt = trainer.fit_loop.epoch_loop._batches_that_stepped
        context = {"attempt": self.attempt, "step": trainer.global_step, "batches": self._records}
        self._records, self._refused, self._norm = [], 0.0, math.nan
        report = self.sums.push(extras, context)
        if report is not None and self._judge(trainer, report):
            return
        if self.action == "rollback" and trainer.global_step >= self.next_snapshot:
            self.snapshot(trainer)

    def _judge(self, trainer: Trainer, report: StepReport) -> bool:
        """Return whether the run was put back."""
        values = {self.monitor: report.value}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if math.isfinite(report.gradient_norm) or scaler is None:
            values["grad_norm/total"] = report.gradient_norm
        else:
            self.counts["overflows"] += 1
        self.counts["vetoed"] += int(report.vetoed)
        self.history.append(report)
        in_range = not math.isfinite(report.gradient_norm) or report.gradient_norm <= self.detector.veto_limit()
        self.out_of_range = 0 if in_range else self.out_of_range + 1
        self.bad_run = self.bad_run + 1 if not math.isfinite(report.value) else 0
        verdict = self.detector.update(report.attempt, values)
        self.tracker.update(report.attempt, verdict, values)
        if verdict.kind in ("jump", "rise", "divergence", "non_finite"):
            self.last_trouble = report.attempt
        else:
            self._earn_trust(trainer, report)
        if report.vetoed:
            self._log(trainer, {"guard/vetoed": self.counts["vetoed"]})
        refused = report.vetoed or scaler is not None  # a scaler skips non-finite updates itself
        decision = decide(verdict.kind, verdict.act, self.action, refused=refused, bad_run=self.bad_run)
        if decision == "stop":
            self._episode(trainer, verdict, decision, None)
            self.rollback.reject(trainer, verdict.onset - self.onset_margin - 1, [])
            good = self.rollback.newest_file(trainer) or "not on disk"
            raise TrainingStopped(f"{describe(verdict)}; action: stop. The last good state is {good}")
        if decision == "rollback":
            return self._roll_back(trainer, verdict)
        if verdict.act:
            self._note(trainer, verdict)
        return False

    def _note(self, trainer: Trainer, verdict: Verdict) -> None:
        """Write an episode that nothing is done about, once for as long as it goes on."""
        kind, last = self.noted
        self.noted = (verdict.kind, self.attempt)
        if verdict.kind != kind or self.attempt > last + self.healthy_steps:
            rank_zero_warn(f"{describe(verdict)}: noted, action: {self.action}")
            self._episode(trainer, verdict, "note", None)

    def _earn_trust(self, trainer: Trainer, report: StepReport) -> None:
        settled = report.attempt - self.healthy_steps
        if settled > self.last_trouble:
            self.ring.mark_good(settled)
            self.trusted_to = max(self.trusted_to, settled)
            self.retries.passed(report.step)

    # ---- snapshots and rollback --------------------------------------------------------------------------------

    def snapshot(self, trainer: Trainer) -> None:
        """Take a snapshot of the run as it is now and decide when the next is due."""
        plain = plain_state(trainer, self, self.stream) | {"guard": self._detection_state()}
        self.ring.take(live_tensors(trainer, self), trainer.global_step, self.attempt, plain)
        if not self.snapshot_every and self.history:
            seconds = self.history[-1].snapshot_seconds, max(1e-9, self.history[-1].step_seconds)
            spread = math.ceil(self.healthy_steps / (self.ring.slots - 1))  # or none would be old enough to be trusted
            self.period = max(spread, min(1000, math.ceil(seconds[0] / (self.snapshot_budget * seconds[1]))))
        # Multiples of the period, so that a resumed run takes its snapshots at the same steps.
        self.next_snapshot = (trainer.global_step // self.period + 1) * self.period

    def _roll_back(self, trainer: Trainer, verdict: Verdict) -> bool:
        lost_from = trainer.global_step
        if not self.retries.allow(trainer.global_step):
            self._give_up(trainer, verdict, f"it came back after {self.retries.count} rollbacks at this place")
        before = verdict.onset - self.retries.widened(self.onset_margin)
        target = self.rollback.choose(trainer, before)
        if target is None:
            if verdict.kind == "non_finite" and not self.rollback.weights_are_finite(trainer):
                self._give_up(trainer, verdict, "no trusted state lies before its onset and the weights are not finite")
            if self.bad_run > self.healthy_steps:
                self._give_up(
                    trainer, verdict, f"{self.bad_run} steps in a row were not finite and no state is trusted"
                )
            rank_zero_warn(f"{describe(verdict)}: no trusted state lies before its onset yet, training goes on")
            self.retries.count -= 1
            self._note(trainer, verdict)
            return False
        record = self.rollback.perform(trainer, target, verdict)
        self.counts["rollbacks"] += 1
        self.counts["steps_lost"] += lost_from - trainer.global_step
        self._episode(trainer, verdict, "rollback", record)
        self.last_trouble, self.out_of_range, self.bad_run = self.attempt, 0, 0
        self.rollback.settle_checkpoints(trainer, target)
        self.next_snapshot = trainer.global_step + 1
        self._log(
            trainer,
            {
                "guard/rollbacks": self.counts["rollbacks"],
                "guard/steps_lost": self.counts["steps_lost"],
                "guard/rolled_back_to": trainer.global_step,
                "guard/lr_scale": self.rollback.lr_scale,
            },
        )
        rank_zero_info(
            f"{describe(verdict)}: rolled back from step {lost_from} to {trainer.global_step} in "
            f"{record['seconds']:.2f} s; rollback {self.counts['rollbacks']}"
        )
        return True

    def _give_up(self, trainer: Trainer, verdict: Verdict, why: str) -> None:
        path = self.rollback.save_last_good(trainer, verdict)
        self._episode(trainer, verdict, "stop", None)
        raise TrainingStopped(
            f"{describe(verdict)}: {why} (max_retries={self.retries.max_retries}). "
            f"The last good state is {path or 'not on disk: no trusted state existed'}"
        )

    # ---- records -----------------------------------------------------------------------------------------------

    def _episode(self, trainer: Trainer, verdict: Verdict, decision: str, rollback: dict[str, Any] | None) -> None:
        self.counts["episodes"] += 1
        norms = next((c for c in trainer.callbacks if isinstance(c, GradientNorms)), None)  # type: ignore[attr-defined]
        heat = norms.heat_map() if norms is not None else ([], [], [])
        self.folder.write(trainer, verdict, decision, rollback, list(self.history), heat, self.monitor)
        self._log(trainer, {"guard/episodes": self.counts["episodes"]})

    def _log(self, trainer: Trainer, row: dict[str, float]) -> None:
        # Straight to the loggers: a value given to `self.log` would be repeated in every later row of the epoch.
        for logger in trainer.loggers:
            logger.log_metrics({k: float(v) for k, v in row.items()}, step=self.attempt)

    def _detection_state(self) -> dict[str, Any]:
        return {
            "detector": self.detector.state_dict(),
            "tracker": self.tracker.state_dict(),
            "pending": self.sums.state_dict(),
        }

    def load_detection_state(self, state: dict[str, Any]) -> None:
        """Put the detector and the tracker back to where a snapshot saw them."""
        self.detector.load_state_dict(state["detector"])
        self.tracker.load_state_dict(state["tracker"])
        self.sums.load_state_dict(state["pending"])

    def guard_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the guard: plain values that load under weights-only loading."""
        return self._detection_state() | {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "last_trouble": self.last_trouble,
            "out_of_range": self.out_of_range,
            "trusted_to": self.trusted_to,
            "bad_run": self.bad_run,
            "period": self.period,
            "counts": dict(self.counts),
            "retries": self.retries.state_dict(),
            "rollback": self.rollback.state_dict(),
            "monitor": self.monitor,
        }

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the guard's state into the checkpoint."""
        checkpoint[GUARD_KEY] = self.guard_state()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the guard's state out of the checkpoint, if a guard wrote it."""
        state = checkpoint.get(GUARD_KEY)
        if state is None:
            return
        self.load_guard_state(state)

    def load_guard_state(self, state: dict[str, Any]) -> None:
        """Restore what `guard_state` returned."""
        if state["monitor"] == self.monitor:
            self.load_detection_state(state)
        else:
            rank_zero_warn(
                f"spike_guard.monitor={self.monitor}: the checkpoint watched {state['monitor']}; "
                "the detector starts anew"
            )
        self.run_id, self.attempt = state["run_id"], state["attempt"]
        self.last_trouble, self.period = state["last_trouble"], self.snapshot_every or state["period"]
        self.trusted_to, self.bad_run = state["trusted_to"], state["bad_run"]
        self.counts, self.out_of_range = dict(state["counts"]), state["out_of_range"]
        self.retries.load_state_dict(state["retries"])
        self.rollback.load_state_dict(state["rollback"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge what is still in flight and say so if it was bad: nothing can be rolled back any more."""
        for report in self.sums.drain():
            values = {self.monitor: report.value}
            verdict = self.detector.update(report.attempt, values)
            self.history.append(report)
            if verdict.act:
                rank_zero_warn(f"{describe(verdict)}: in the last step of the run; its last checkpoint holds it")
                self._note(trainer, verdict)
        self.tracker.close()
