"""The LightningModule: span masks, the encoder, cross entropy per codebook on masked frames, metrics, optimizer.

Legend: B clips, T frames, K codebooks, V codes, M masked frames of this rank's micro-batch, D width.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_modules import health
from lightning_modules.codebook_metrics import CodebookMetric
from lightning_modules.encoder import Encoder, EncoderConfig, check_codes, compile_blocks
from lightning_modules.fused_heads import HeadLosses
from lightning_modules.heads import build_heads, gather_frames, gather_targets
from lightning_modules.losses import mean_loss, nats_to_bits, sample_bits
from lightning_modules.masking import mask_count, masked_indices, span_mask, unmasked_indices
from lightning_modules.optimization import OptimizerConfig

Batch = dict[str, Any]
masked_frames = lru_cache(maxsize=4096)(mask_count)  # the masked frames of a clip depend on its length alone
Config = TypeVar("Config", EncoderConfig, OptimizerConfig)


def as_config(kind: type[Config], value: Any) -> Config:
    """Return ``value`` as a configuration; a checkpoint holds it as a dictionary."""
    return kind(**value) if isinstance(value, dict) else value


class AcousticMLM(LightningModule):
    """Masked acoustic language model on codec tokens.

    The loss is the sum over codebooks of the mean cross entropy in nats over all masked frames of the optimizer step,
    on all ranks and micro-batches: clip values mean what they mean in the figure only for the sum.

    Args:
        encoder: size and options of the encoder and its heads.
        optimizer: the optimizer and its schedule.
        mask_prob: share of frames that start spans would cover if they did not overlap.
        mask_length: frames per span.
        health_every_n_steps: interval of the health signals in optimizer steps; 0 turns them off.
        compile: compile the blocks with ``torch.compile``.
    """

    gradient_norm_total: Tensor | None

    def __init__(
        self,
        encoder: EncoderConfig,
        optimizer: OptimizerConfig,
        mask_prob: float = 0.8,
        mask_length: int = 5,
        health_every_n_steps: int = 0,
        compile: bool = False,
    ) -> None:
        super().__init__()
        encoder, optimizer = as_config(EncoderConfig, encoder), as_config(OptimizerConfig, optimizer)
        # Plain values: they load under weights-only loading, and loggers cannot take frozen dataclasses.
        self.save_hyperparameters(
            {
                "encoder": asdict(encoder),
                "optimizer": asdict(optimizer),
                "mask_prob": mask_prob,
                "mask_length": mask_length,
                "health_every_n_steps": health_every_n_steps,
                "compile": compile,
            }
        )
        self.config, self.optimizer_config = encoder, optimizer
        self.mask_prob, self.mask_length = mask_prob, mask_length
        self.health_every_n_steps = health_every_n_steps
        mask_count(5, mask_prob, mask_length)  # refuses options out of range now, not at the first batch
        self.encoder, self.heads = Encoder(encoder), build_heads(encoder)
        if compile:
            compile_blocks(self.encoder)
        self.metrics = CodebookMetric(encoder.num_codebooks)
        self.gradient_norm_total = None  # left by whoever computed it before clipping
        self._frames_of_window: list[int] = []  # global masked frames, micro-batch by micro-batch
        self._window: Tensor | None = None
        self._update_ratios: dict[str, Tensor] = {}

    # ---- checks and batches ------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse data that does not fit the model.

        Raises:
            ValueError: naming both keys and both numbers.
        """
        data = getattr(self.trainer, "datamodule", None)
        for name in ("num_codebooks", "codebook_size"):
            theirs, mine = getattr(data, name, None), getattr(self.config, name)
            if theirs is not None and theirs != mine:
                raise ValueError(f"model.encoder.{name}={mine} but the data has {name}={theirs}; set them equal")

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Draw the masks on the CPU: a function of each clip's own seed, and no device sync later."""
        batch = dict(batch)
        codes_BKT, num_frames_B = batch["codes"], batch["num_frames"]
        check_codes(codes_BKT, self.config)
        frames = codes_BKT.shape[-1]
        full = bool((num_frames_B == frames).all())
        if self.trainer.predicting:
            mask_BT = torch.zeros(codes_BKT.shape[0], frames, dtype=torch.bool)
        else:
            mask_BT = span_mask(batch["mask_seed"], num_frames_B, frames, prob=self.mask_prob, length=self.mask_length)
        everyone = batch.pop("global_num_frames", None)
        if everyone is not None:
            total = sum(masked_frames(int(n), self.mask_prob, self.mask_length) for n in everyone.tolist())
        else:  # a foreign loader: equal clips on all ranks are assumed
            total = int(mask_BT.sum()) * self.trainer.world_size
        return batch | {
            "mask": mask_BT,
            "index": masked_indices(mask_BT),
            "valid": None if full else num_frames_B,
            "unmasked": unmasked_indices(mask_BT, num_frames_B, limit=256),
            "global_masked": total,
        }

    # ---- steps -------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> tuple[Tensor, HeadLosses]:
        """Return ``(hidden [B, T, D], losses on masked frames)`` of a prepared batch."""
        seed = int(batch.get("batch_number", 0)) if self.config.layerdrop else None
        hidden_BTD: Tensor = self.encoder(batch["codes"], batch["mask"], batch["valid"], layerdrop_seed=seed)
        targets_KM = gather_targets(batch["codes"], batch["index"])
        return hidden_BTD, self.heads.losses(gather_frames(hidden_BTD, batch["index"]), targets_KM)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Return the loss, and what a guard or a report may want: pooled sums and per-sample bits."""
        accumulate = self.trainer.accumulate_grad_batches
        if batch_idx % accumulate == 0:
            self._frames_of_window, self._window = [], None
        self._frames_of_window.append(batch["global_masked"])
        with health.probing(self.encoder, enabled=self._is_health_step()):
            hidden_BTD, losses = self(batch)
        # Every micro-batch is divided by the first one's count; `on_after_backward` puts right what differs.
        loss = mean_loss(losses.objective_K, self._frames_of_window[0], self.trainer.world_size)
        nats_K = losses.nats_K
        self._add_to_window(nats_K, losses.correct_K, losses.frames)
        if not self.trainer.fit_loop._should_accumulate():
            self._log_step(batch, hidden_BTD.detach())
        bits_K = nats_to_bits(nats_K)
        count = bits_K.new_full((), losses.frames)
        return {
            "loss": loss,
            "sums": {f"train/bits_codebook_{k}": (bits_K[k], count) for k in range(len(bits_K))}
            | {"train/loss": (nats_K.sum(), count)},
            "codebook_bits": bits_K / max(1, losses.frames),
            "sample_bits": sample_bits(losses.nats_KM[0], batch["index"], batch["mask"].shape),
        }

    def on_after_backward(self) -> None:
        """Make the accumulated gradient the mean over all masked frames of the step, however they were spread."""
        if self.trainer.fit_loop._should_accumulate():
            return
        nominal = self._frames_of_window[0] * self.trainer.accumulate_grad_batches
        total = sum(self._frames_of_window)
        if total not in (0, nominal):
            torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], nominal / total)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm that was logged and judged. Lightning's own clipping refuses fused optimizers under AMP."""
        norm, self.gradient_norm_total = self.gradient_norm_total, None
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for p in self.parameters() if p.grad is not None]
        if norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        torch.nn.utils.clip_grads_with_norm_(parameters, float(gradient_clip_val), norm, foreach=True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the step; measure it where it is a health step; clip query and key weights where that is asked for."""
        before = health.weight_copies(self) if self._is_health_step() else None
        super().optimizer_step(*args, **kwargs)
        if before is not None:
            self._update_ratios = health.update_ratios(self, before)
        if self.config.qk_clip:
            largest_NH = health.max_logits(self.encoder)
            if self.trainer.world_size > 1:
                dist.all_reduce(largest_NH, op=dist.ReduceOp.MAX)
            health.apply_qk_clip(self.encoder, largest_NH, self.config.qk_clip)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the update-to-weight ratios: the step itself may not log."""
        if self._update_ratios:
            self._log_once({f"health/update_ratio_{k}": v for k, v in self._update_ratios.items()})
            self._update_ratios = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one batch of the fixed validation clips, with their fixed masks."""
        _, losses = self(batch)
        self.metrics.update(losses.nats_K, losses.correct_K, losses.frames)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log ``val/loss`` in nats and ``val/bits_codebook_k``, pooled over all ranks."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the same under ``test/``."""
        self._log_metrics("test")

    def _log_metrics(self, prefix: str) -> None:
        self.log_dict({f"{prefix}/{name}": value for name, value in self.metrics.compute().items()})
        self.metrics.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return hidden states of the last layer `[B, T, D]`, nothing masked."""
        hidden_BTD: Tensor = self.encoder(batch["codes"], batch["mask"], batch["valid"])
        return hidden_BTD

    # ---- logging -----------------------------------------------------------------------------------------------

    def _attempt(self) -> int:
        return int(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _is_health_step(self) -> bool:
        every = self.health_every_n_steps
        return bool(every) and (self._attempt() + 1) % every == 0

    def _add_to_window(self, nats_K: Tensor, correct_K: Tensor, count: int) -> None:
        sums = torch.cat([nats_K, correct_K.to(nats_K), nats_K.new_full((1,), count)])
        self._window = sums if self._window is None else self._window + sums

    def _log_step(self, batch: Batch, hidden_BTD: Tensor) -> None:
        """Log the step's means over all ranks, on the steps that the loggers write."""
        if self._is_health_step():
            self._log_health(batch, hidden_BTD)
        if (self._attempt() + 1) % self.trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        assert self._window is not None
        sums = self._window.clone()
        if self.trainer.world_size > 1:  # a step decides this, never a rank
            dist.all_reduce(sums)
        num_codebooks = self.config.num_codebooks
        nats_K, accuracy_K = sums[:num_codebooks] / sums[-1], sums[num_codebooks:-1] / sums[-1]
        rows = {"train/loss": nats_K.sum(), "optim/lr": self.trainer.optimizers[0].param_groups[0]["lr"]}
        for k in range(num_codebooks):
            rows[f"train/bits_codebook_{k}"] = nats_to_bits(nats_K[k])
            rows[f"train/accuracy_codebook_{k}"] = accuracy_K[k]
        rows["data/batch_number"] = float(batch.get("batch_number", 0))
        rows["guard/accepted_step"] = float(self.trainer.global_step)
        self.log_dict(rows, on_step=True, on_epoch=False)
        self.log("bits", rows["train/bits_codebook_0"], prog_bar=True, logger=False)

    @torch.no_grad()
    def _log_health(self, batch: Batch, hidden_BTD: Tensor) -> None:
        """Log rank 0's health signals: what tells why a run spiked."""
        rows: dict[str, Tensor] = {}
        largest_NH, rms_N = health.max_logits(self.encoder), self.encoder.block_rms_N
        for n in range(self.config.num_layers):
            rows[f"health/max_logit_{n:02d}"] = largest_NH[n].max()
            rows[f"health/residual_rms_{n:02d}"] = rms_N[n]
        for name, index in (("masked", batch["index"]), ("unmasked", batch["unmasked"])):
            logits_KMV = self.heads(gather_frames(hidden_BTD, index))
            targets_KM = gather_targets(batch["codes"], index)
            sums = health.prediction_sums(logits_KMV, targets_KM)
            frames = max(1, sums.frames)
            for k in range(self.config.num_codebooks):
                rows[f"health/{name}_accuracy_codebook_{k}"] = sums.correct_K[k] / frames
            if name == "masked":
                size = self.config.codebook_size
                dead_K = health.dead_codes(
                    health.code_counts(targets_KM, size), health.code_counts(logits_KMV.argmax(dim=-1), size)
                )
                for k in range(self.config.num_codebooks):
                    rows[f"health/entropy_bits_codebook_{k}"] = nats_to_bits(sums.entropy_K[k] / frames)
                    rows[f"health/logit_norm_codebook_{k}"] = sums.logit_norm_K[k] / frames
                    rows[f"health/dead_codes_codebook_{k}"] = dead_K[k].float()
        self._log_once(rows)

    def _log_once(self, rows: dict[str, Tensor]) -> None:
        # Straight to the loggers: a value given to `self.log` would be repeated in every later row of the epoch.
        for logger in self.trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in rows.items()}, step=self._attempt())

    def configure_optimizers(self) -> Any:
        """AdamW over all parameters and its schedule, stepped with every optimizer step."""
        optimizer, schedule = self.optimizer_config.build(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
