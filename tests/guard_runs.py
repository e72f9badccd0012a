"""Short guarded runs on the bundled tokens, and everything of a run that two runs can be compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from callbacks.checkpoint_files import GuardedCheckpoint
from callbacks.detector import Detector, Verdict
from callbacks.fault_injection import FaultInjection
from callbacks.gradient_norms import GradientNorms
from callbacks.random_states import RandomStates
from callbacks.rollback import AfterRollback
from callbacks.spike_guard import SpikeGuard
from callbacks.trainer_state import rng_state
from datamodules.codec_tokens import CodecTokens
from lightning_modules.acoustic_mlm import AcousticMLM
from lightning_modules.encoder import EncoderConfig
from lightning_modules.optimization import OptimizerConfig


class ScriptedDetector(Detector):
    """Calls a jump at the given attempted steps, so that a test decides when a rollback happens, not the noise."""

    def __init__(self, at: dict[int, int]) -> None:
        super().__init__()
        self.at = at  # attempted step -> onset
        self.seen = 0

    def update(self, step: int, values: Any) -> Verdict:
        self.seen += 1
        if step in self.at:
            return Verdict("jump", True, self.at[step], "scripted", 99.0, 1.0, 0.1, 9.9)
        return Verdict("ok", False, step, "scripted", 0.0, 1.0, 0.1, 0.0)

    def veto_limit(self) -> float:
        return float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class Losses(Callback):
    """The loss of every optimizer step by accepted step: what a rolled-back run overwrites."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[float]] = {}
        self.batches: list[int] = []
        self._window: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._window.append(float(outputs["loss"]))
        self.batches.append(batch["batch_number"])
        if not trainer.fit_loop._should_accumulate():
            self.by_step[trainer.global_step] = self._window
            self._window = []


class Skip(Callback):
    """Start the stream with some global batches never served: the run that never saw the fault."""

    def __init__(self, ranges: list[list[int]]) -> None:
        self.ranges = ranges

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loader = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
        loader.load_state_dict(loader.state_dict() | {"skip": self.ranges})


def model(scheme: str = "pre", total_steps: int = 40) -> AcousticMLM:
    encoder = EncoderConfig(
        dim=16,
        num_layers=2,
        num_heads=2,
        ffn_dim=32,
        scheme=scheme,
        conv_kernel=8,
        conv_groups=4,
        dropout=0.1,  # type: ignore[arg-type]
    )
    return AcousticMLM(encoder, OptimizerConfig(lr=3e-3, warmup_steps=4, total_steps=total_steps))


def train(
    folder: Path,
    *,
    fault_at: int = -1,
    fault_batches: int = 1,
    skip: list[list[int]] | None = None,
    script: dict[int, int] | None = None,
    scheme: str = "pre",
    steps: int = 24,
    accumulate: int = 1,
    workers: int = 0,
    data: str = "advance",
    omit: frozenset[str] = frozenset(),
    action: str = "rollback",
    guarded: bool = True,
    devices: int = 1,
    epoch_batches: int | None = None,
    validate_every: int = 7,
    snapshot_every: int = 4,
    healthy_steps: int = 2,
    checkpoint_every: int = 1000,
    checkpoint_at_epoch_end: bool = False,
    ckpt_path: str | None = None,
    extra: list[Callback] | None = None,
    kind: str = "learning_rate",
    factor: float = 300.0,
    rank: int | None = None,
    lag: int = -1,
    after: AfterRollback | None = None,
    max_retries: int = 3,
    norms_first: bool = True,
) -> tuple[Trainer, Losses, SpikeGuard]:
    """Train a tiny model and return the trainer, its losses and the guard."""
    seed_everything(7)
    losses = Losses()
    guard = SpikeGuard(
        action=action,
        after=after or AfterRollback(data=data),
        snapshot_every=snapshot_every,  # type: ignore[arg-type]
        healthy_steps=healthy_steps,
        onset_margin=1,
        dirpath=str(folder / "episodes"),
        lag=lag,
        max_retries=max_retries,  # type: ignore[arg-type]
    )
    if script is not None:
        guard.detector = ScriptedDetector(script)
    guard.rollback.omit = omit
    fault = FaultInjection(fault_at, fault_batches, kind=kind, factor=factor, rank=rank)  # type: ignore[arg-type]
    callbacks: list[Callback] = [
        RandomStates(),
        EMAWeightAveraging(decay=0.9),
        losses,
        fault,
        *([GradientNorms(1)] if norms_first else []),
        *([guard] if guarded else []),
        *(extra or []),
        GuardedCheckpoint(
            dirpath=folder / "checkpoints",
            every_n_train_steps=None if checkpoint_at_epoch_end else checkpoint_every,
            every_n_epochs=1 if checkpoint_at_epoch_end else None,
            save_on_train_epoch_end=checkpoint_at_epoch_end or None,
            save_last=True,
            enable_version_counter=False,
            save_top_k=-1,
        ),
    ]
    if skip is not None:
        callbacks.insert(0, Skip(skip))
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        val_check_interval=validate_every,
        check_val_every_n_epoch=None if epoch_batches is None else 1,
        limit_train_batches=epoch_batches if epoch_batches is not None else 1.0,
    )
    tokens = CodecTokens(num_frames=24, global_batch=4, seed=3, val_clips=4, num_workers=workers)
    trainer.fit(model(scheme), tokens, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer, losses, guard


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return all that must be equal: weights, moments, EMA, LR, random states, counters."""
    ema = next(c for c in trainer.callbacks if isinstance(c, EMAWeightAveraging))  # type: ignore[attr-defined]
    optimizer = trainer.optimizers[0]
    rng = rng_state()
    guard = next((c for c in trainer.callbacks if isinstance(c, SpikeGuard)), None)  # type: ignore[attr-defined]
    states = [s for p in optimizer.param_groups[0]["params"] for s in [optimizer.state[p]]]
    return {
        "weights": {k: v.clone() for k, v in trainer.lightning_module.state_dict().items()},
        "moments": [{k: v.clone() for k, v in s.items()} for s in states],
        "ema": {k: v.clone() for k, v in ema._average_model.state_dict().items()} if ema._average_model else {},
        "ema_step": ema.state_dict(),
        "lr": [g["lr"] for g in optimizer.param_groups],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict()["last_epoch"],
        "torch_rng": rng["torch"],
        "numpy_rng": rng["numpy"][1],
        "python_rng": rng["python"],
        "global_step": trainer.global_step,
        # What the detector has seen is that of the accepted trajectory, the step in flight included.
        "judged": guard.detector.seen if guard is not None and isinstance(guard.detector, ScriptedDetector) else None,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.state_dict(),
        "epochs": trainer.fit_loop.epoch_progress.state_dict(),
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the paths at which two nested structures differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: length"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [f"{path}: {a} != {b}"]
