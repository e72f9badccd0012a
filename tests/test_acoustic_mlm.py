"""The LightningModule: its loss over accumulation and ranks, its clipping, what it logs."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp import ROOT, run_ranks
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from callbacks.gradient_norms import GradientNorms
from datamodules.codec_tokens import CodecTokens
from lightning_modules.acoustic_mlm import AcousticMLM
from lightning_modules.encoder import EncoderConfig
from lightning_modules.losses import sample_bits
from lightning_modules.optimization import OptimizerConfig


class Gradients(Callback):
    """Keep the gradient of the first optimizer step, before clipping."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.first = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]


def module(**options: Any) -> AcousticMLM:
    seed_everything(5, verbose=False)
    encoder = EncoderConfig(dim=16, num_layers=1, num_heads=2, ffn_dim=16, conv_kernel=8, conv_groups=4)
    return AcousticMLM(encoder, OptimizerConfig(lr=1e-3, warmup_steps=1, total_steps=50), **options)


def train(
    tmp_path: Path, *callbacks: Callback, data: Any = None, model: AcousticMLM | None = None, **options: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "default_root_dir": tmp_path,
        "max_steps": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(callbacks=list(callbacks), **(defaults | options))
    trainer.fit(model or module(), data or CodecTokens(num_frames=40, global_batch=2))
    return trainer


class Ragged(CodecTokens):
    """Clips of very different lengths: the first batches hold 5 to 40 valid frames."""

    def _short(self, batch: dict[str, Any]) -> dict[str, Any]:
        lengths = torch.tensor([5 + (7 * int(p)) % 36 for p in batch["position"]])
        codes = batch["codes"].clone()
        for clip, n in enumerate(lengths):
            codes[clip, :, n:] = 0
        return batch | {"codes": codes, "num_frames": lengths, "global_num_frames": lengths}

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        inner = loader._next
        loader._next = lambda: self._short(inner())  # type: ignore[method-assign]
        return loader


def test_accumulated_ragged_micro_batches_equal_one_big_batch(tmp_path: Path) -> None:
    small, big = Gradients(), Gradients()
    train(tmp_path, small, data=Ragged(num_frames=40, global_batch=2), accumulate_grad_batches=4)
    train(tmp_path, big, data=Ragged(num_frames=40, global_batch=8))
    for a, b in zip(small.first, big.first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_clipping_uses_the_logged_norm_and_logs_both(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv")
    train(tmp_path, GradientNorms(1), logger=logger, max_steps=3, gradient_clip_val=0.5, log_every_n_steps=1)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r.get("grad_norm/total")]
    assert len(rows) == 3
    for row in rows:
        assert float(row["grad_norm/total"]) > 0.5
        assert float(row["grad_norm/clipped"]) == pytest.approx(0.5)
        groups = [
            float(v) ** 2
            for k, v in row.items()
            if k in ("grad_norm/block_00", "grad_norm/embedding", "grad_norm/heads", "grad_norm/other")
        ]
        assert sum(groups) ** 0.5 == pytest.approx(float(row["grad_norm/total"]), rel=1e-5)
        assert float(row["train/loss"]) == pytest.approx(
            sum(float(row[f"train/bits_codebook_{k}"]) for k in range(8)) * 0.693147, rel=1e-5
        )
    names = {name.partition("/")[0] for name in rows[0] if "/" in name}
    assert names <= {"train", "val", "grad_norm", "guard", "optim", "data", "health"}


def test_clipping_happens(tmp_path: Path) -> None:
    class Norm(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                self.norm = float(torch.nn.utils.get_total_norm(grads))

    for callbacks in ([], [GradientNorms(1)]):
        norm = Norm()
        train(tmp_path, norm, *callbacks, max_steps=2, gradient_clip_val=0.25)
        assert norm.norm == pytest.approx(0.25, rel=1e-4)


def test_health_signals_are_logged_on_their_steps_only(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv")
    train(tmp_path, logger=logger, max_steps=4, log_every_n_steps=1, model=module(health_every_n_steps=2))
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    seen = [int(r["step"]) for r in rows if r.get("health/max_logit_00")]
    assert seen == [1, 3]
    row: dict[str, str] = {}
    for r in (r for r in rows if int(r["step"]) == 1):
        row |= {k: v for k, v in r.items() if v}
    assert 9 < float(row["health/entropy_bits_codebook_0"]) <= 10
    for name in ("residual_rms_00", "unmasked_accuracy_codebook_7", "dead_codes_codebook_0", "update_ratio_heads"):
        assert row.get(f"health/{name}"), name


def test_a_module_built_from_python_loads_from_its_checkpoint(tmp_path: Path) -> None:
    model = module()
    trainer = train(tmp_path, model=model)
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    again = AcousticMLM.load_from_checkpoint(tmp_path / "m.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_bits_of_a_clip_are_means_over_its_own_frames() -> None:
    nats = torch.tensor([1.0, 2.0, 4.0]) * 0.6931471805599453
    bits = sample_bits(nats, torch.tensor([0, 3, 8]), (3, 4))
    torch.testing.assert_close(bits, torch.tensor([1.5, 0.0, 4.0]))


RANKS = """
import sys
import torch
from pathlib import Path
import test_acoustic_mlm as t
g = t.Gradients()
trainer = t.train(Path(sys.argv[1]), g, data=t.CodecTokens(num_frames=40, global_batch=8), devices=2, strategy="ddp")
torch.save(g.first, Path(sys.argv[1]) / f"rank{trainer.global_rank}.pt")
"""


def test_two_ranks_have_the_gradient_of_one_big_batch(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_ranks([str(script), str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    one = Gradients()
    train(tmp_path, one, data=CodecTokens(num_frames=40, global_batch=8))
    for rank in (0, 1):
        for a, b in zip(torch.load(tmp_path / f"rank{rank}.pt"), one.first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
