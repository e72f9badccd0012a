"""SpikeGuard in somebody else's project: any module, any loader, any metric name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

import callbacks.spike_guard as module
from callbacks.rollback import AfterRollback
from callbacks.spike_guard import SpikeGuard


class Stock(BoringModel):
    """Lightning's own example, with a jump at one batch; it knows nothing of the guard."""

    def __init__(self, bad_batch: int = -1, returns: str = "dict", scale: float = 1e4) -> None:
        super().__init__()
        self.bad_batch, self.returns, self.scale, self.seen, self.validations = bad_batch, returns, scale, 0, 0
        self.epochs_ended = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.step(batch) + 1.0
        if self.seen == self.bad_batch:
            loss = loss * self.scale
        self.seen += 1
        self.log("my/loss", loss.detach())
        return {"dict": {"loss": loss}, "tensor": loss, "none": None if self.seen % 5 == 0 else loss}[self.returns]

    def on_validation_epoch_end(self) -> None:
        self.validations += 1

    def on_train_epoch_end(self) -> None:
        self.epochs_ended += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


def fit(model: LightningModule, guard: SpikeGuard, tmp_path: Path, **options: Any) -> Trainer:
    seed_everything(1)
    trainer = Trainer(
        default_root_dir=tmp_path, callbacks=[guard], logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, enable_checkpointing=False, **({"max_epochs": 3} | options),
    )  # fmt: skip
    loader = DataLoader(RandomDataset(32, 64), batch_size=1)
    trainer.fit(model, loader, DataLoader(RandomDataset(32, 4), batch_size=1))
    return trainer


@pytest.mark.parametrize(("monitor", "returns"), [("loss", "dict"), ("loss", "tensor"), ("my/loss", "dict")])
def test_a_sized_loader_keeps_its_epochs_and_validations(tmp_path: Path, monitor: str, returns: str) -> None:
    model = Stock(bad_batch=100, returns=returns)
    guard = SpikeGuard(monitor=monitor, snapshot_every=5, onset_margin=1)
    trainer = fit(model, guard, tmp_path)
    assert guard.counts["rollbacks"] >= 1
    assert (model.validations, model.epochs_ended) == (3 + 1, 3)  # one of them is the sanity check
    assert model.seen == 3 * 64
    assert trainer.global_step == 3 * 64 - guard.counts["steps_lost"]
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert float(model.layer.weight.abs().max()) < 10


def test_a_step_that_returns_none_is_no_step_to_judge(tmp_path: Path) -> None:
    guard = SpikeGuard(monitor="loss", action="log")
    fit(Stock(returns="none"), guard, tmp_path, max_epochs=1)
    assert guard.counts["rollbacks"] == 0


def test_accumulated_losses_are_seen_undivided_once_a_step(tmp_path: Path) -> None:
    guard = SpikeGuard(monitor="loss", action="log")
    trainer = fit(Stock(), guard, tmp_path, max_epochs=1, accumulate_grad_batches=4)
    values = [r.value for r in guard.history]
    assert len(values) == trainer.global_step == 16
    assert all(v > 0.9 for v in values)  # each loss is about 1 or more; a quarter of it would be below


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    model = Stock()
    model.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization"):
        fit(model, SpikeGuard(monitor="loss"), tmp_path)


def test_an_unknown_metric_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"monitor='codebok'.*loss.*my/loss"):
        fit(Stock(), SpikeGuard(monitor="codebok"), tmp_path)


def test_replay_needs_a_loader_with_a_position(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose advance"):
        fit(Stock(), SpikeGuard(monitor="loss", after=AfterRollback(data="replay")), tmp_path)


def test_a_ring_too_large_for_the_host_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_memory_available", lambda: 100)
    with pytest.raises(ValueError, match=r"needs 0\.0 GiB.*0\.0 GiB are available"):
        fit(Stock(), SpikeGuard(monitor="loss"), tmp_path)


def test_overflows_of_a_gradient_scaler_are_counted_and_are_no_spikes(tmp_path: Path) -> None:
    class Overflowing(Stock):
        def on_after_backward(self) -> None:
            if self.seen in (30, 31):
                self.layer.weight.grad.fill_(float("inf"))

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    guard = SpikeGuard(monitor="loss")
    model = Overflowing()
    fit(model, guard, tmp_path, max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert guard.counts["overflows"] == 2
    assert guard.counts["rollbacks"] == guard.counts["vetoed"] == 0
    assert scaler.get_scale() == 16.0
    assert bool(model.layer.weight.isfinite().all())


def test_a_fused_optimizer_under_a_scaler_is_refused(tmp_path: Path) -> None:
    class Fused(Stock):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.layer.parameters(), fused=True)

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with pytest.raises(ValueError, match="fused"):
        fit(Fused(), SpikeGuard(monitor="loss"), tmp_path, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def test_no_callback_owns_an_attribute_that_lightning_overwrites() -> None:
    for attribute in ("log", "log_dict"):
        assert attribute not in vars(SpikeGuard(monitor="loss"))


@pytest.mark.parametrize("option", [{"action": "explode"}, {"snapshot_every": -1}, {"healthy_steps": 0}, {"snapshot_budget": 2.0}, {"ring_slots": 1}])
def test_wrong_options_name_their_key(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        SpikeGuard(**option)


def test_a_norm_that_stays_out_of_range_is_refused_only_so_often(tmp_path: Path) -> None:
    """When the weights are the cause, refusing every update would keep the run where it is for ever."""

    class Steep(Stock):
        def on_after_backward(self) -> None:
            noise = 1.0 + 0.05 * ((self.seen * 7) % 11 - 5) / 5
            self.layer.weight.grad.fill_(noise * (50.0 if 41 <= self.seen < 49 else 1.0))
            self.layer.bias.grad.zero_()

    guard = SpikeGuard(monitor="loss", action="veto", max_vetoes=2)
    fit(Steep(), guard, tmp_path, max_epochs=1)
    assert guard.counts["vetoed"] == 2
    assert [r.attempt for r in guard.history if r.vetoed] == [40, 41]
