"""The DataModule in Lightning's Trainer: two epochs, resumed, rewound from a callback, whatever was asked first."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from datamodules.codec_tokens import CodecTokens
from datamodules.shard_writer import ShardWriter
from datamodules.shards import BUNDLED, Codec

BATCH = 32
EPOCH = 16  # batches of the bundled training split
FACTS = ("position", "sample_id", "start", "mask_seed")


class Model(L.LightningModule):
    """Counts what it is given; the loss depends on the codes so that weights tell batches apart."""

    def __init__(self, asks_for_steps: bool = False, fails_at: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.trained: list[Any] = []
        self.validated: list[Any] = []
        self.asks_for_steps, self.fails_at = asks_for_steps, fails_at

    def training_step(self, batch: dict[str, Any], _: int) -> torch.Tensor:
        if batch["batch_number"] == self.fails_at:
            raise RuntimeError("injected")
        self.trained.append([batch["batch_number"], *(batch[name].tolist() for name in FACTS)])
        return self.weight * batch["codes"].float().mean() / 1024

    def validation_step(self, batch: dict[str, Any], _: int) -> None:
        self.validated.append([batch["sample_id"].tolist(), batch["mask_seed"].tolist()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches == 2 * EPOCH
        return torch.optim.SGD(self.parameters(), 1e-3)


class Rewind(Callback):
    """Goes back from inside on_train_batch_end, as a guard does, `times` times at step `at`."""

    def __init__(self, at: int, to: int, skip: list[list[int]], times: int = 1) -> None:
        self.at, self.to, self.skip, self.times = at, to, skip, times

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.at and self.times:
            self.times -= 1
            loader = trainer.datamodule.train_loader
            loader.load_state_dict({**loader.state_dict(), "batch_number": self.to, "skip": self.skip})


def trainer_of(root: Path, callbacks: list[Callback], epochs: int = 2, **more: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=root,
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{"devices": 1, **more},
    )


def data(**more: Any) -> CodecTokens:
    return CodecTokens(**{"global_batch": BATCH, "seed": 3, "val_clips": 20, **more})


def fit(root: Path, model: Model, callbacks: list[Callback], ckpt: Path | None = None, **more: Any) -> Model:
    workers = {k: more.pop(k) for k in ("num_workers", "persistent_workers", "start_method") if k in more}
    trainer_of(root, callbacks, **more).fit(model, datamodule=data(**workers), ckpt_path=ckpt, weights_only=True)
    return model


def saver(root: Path, step: int) -> ModelCheckpoint:
    return ModelCheckpoint(root, filename="{step}", every_n_train_steps=step, save_top_k=-1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Model:
    return fit(tmp_path_factory.mktemp("whole"), Model(), [])


def test_two_epochs_are_two_permutations_and_validation_is_fixed(whole):
    assert [row[0] for row in whole.trained] == list(range(2 * EPOCH))
    ids = [[i for row in whole.trained[e * EPOCH : (e + 1) * EPOCH] for i in row[2]] for e in range(2)]
    assert all(len(set(part)) == EPOCH * BATCH for part in ids)
    assert ids[0] != ids[1]
    assert len(whole.validated) == 2
    assert whole.validated[0] == whole.validated[1]


@pytest.mark.parametrize("asks", [False, True], ids=["plain", "asks for estimated_stepping_batches"])
@pytest.mark.parametrize("step", [5, EPOCH, EPOCH + 4])
def test_resume_is_exact_in_either_epoch(tmp_path, whole, asks, step):
    first = fit(tmp_path, Model(asks), [saver(tmp_path, step)])
    assert first.trained == whole.trained
    resumed = fit(tmp_path, Model(asks), [], tmp_path / f"step={step}.ckpt")
    assert resumed.trained == whole.trained[step:]
    assert resumed.weight.item() == whole.weight.item()
    assert len(resumed.validated) == (2 if step < EPOCH else 1)


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 2, "start_method": "fork"},
        pytest.param({"num_workers": 2, "start_method": "spawn", "persistent_workers": True}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "start_method": "fork", "persistent_workers": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_is_exact_with_workers(tmp_path, whole, workers):
    fit(tmp_path, Model(True), [saver(tmp_path, EPOCH + 4)], **workers)
    resumed = fit(tmp_path, Model(True), [], tmp_path / f"step={EPOCH + 4}.ckpt", **workers)
    assert resumed.trained == whole.trained[EPOCH + 4 :]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_rewind_from_a_callback_and_a_resume_after_it(tmp_path, whole, workers):
    rewind = Rewind(at=10, to=6, skip=[[8, 10]])
    model = fit(tmp_path, Model(), [rewind, saver(tmp_path, 20)], **workers)
    expected = [*range(10), 6, 7, *range(10, 30)]
    assert [row[0] for row in model.trained] == expected
    assert model.trained[:10] == whole.trained[:10]
    assert model.trained[10:12] == whole.trained[6:8]
    assert model.trained[12:] == whole.trained[10:30]
    resumed = fit(tmp_path, Model(), [], tmp_path / "step=20.ckpt", **workers)
    assert resumed.trained == model.trained[20:]


def test_rewinding_twice_gives_the_same(tmp_path, whole):
    model = fit(tmp_path, Model(), [Rewind(at=10, to=6, skip=[], times=3)])
    numbers = [row[0] for row in model.trained]
    assert numbers[:14] == [*range(10), 6, 6, 6, 7]
    assert model.trained[10] == model.trained[11] == model.trained[12] == whole.trained[6]


def test_a_run_that_dies_in_a_step_loses_no_batch(tmp_path, whole):
    with pytest.raises(RuntimeError, match="injected"):
        fit(tmp_path, Model(fails_at=EPOCH + 3), [OnExceptionCheckpoint(tmp_path)])
    (checkpoint,) = tmp_path.glob("*.ckpt")
    resumed = fit(tmp_path, Model(), [], checkpoint)
    assert resumed.trained == whole.trained[EPOCH + 3 :]


def test_accumulation_counts_micro_batches(tmp_path, whole):
    model = fit(tmp_path, Model(), [saver(tmp_path, 3)], accumulate_grad_batches=4)
    assert model.trained == whole.trained
    resumed = fit(tmp_path, Model(), [], tmp_path / "step=3.ckpt", accumulate_grad_batches=4)
    assert resumed.trained == whole.trained[12:]


def test_other_data_or_seed_is_refused_with_a_sentence(tmp_path):
    fit(tmp_path, Model(), [saver(tmp_path, 2)], max_steps=2)
    for change, message in (
        ({"seed": 4}, "seed is 4, the checkpoint's is 3"),
        ({"global_batch": 16}, "global_batch is 16, the checkpoint's is 32"),
        ({"num_frames": 100}, "fingerprint"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(tmp_path, []).fit(
                Model(), datamodule=data(**change), ckpt_path=tmp_path / "step=2.ckpt", weights_only=True
            )


def test_arguments_are_readable_before_setup_and_refused_by_name(tmp_path):
    module = CodecTokens()
    assert (module.num_codebooks, module.codebook_size) == (8, 1024)
    with pytest.raises(ValueError, match=r"data\.codebooks=4, but .*index\.json has codebooks=8"):
        CodecTokens(codebooks=4)
    with pytest.raises(FileNotFoundError, match=r"absent: no such data folder"):
        CodecTokens(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"data\.sets: each needs a path"):
        CodecTokens(sets=[{"folder": "x"}])  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ValueError, match="on_bad_shard='warn'"):
        CodecTokens(on_bad_shard="warn")
    with pytest.raises(ValueError, match=r"split='tests'.*\['train', 'val'\]"):
        CodecTokens(test_split="tests").test_dataloader()
    for bad in ({"num_frames": 0}, {"global_batch": 0}, {"global_batch": 100_000}, {"shuffle_shards": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            CodecTokens(**bad).train_dataloader()


def test_a_url_serves_what_the_folder_serves(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for path in BUNDLED.iterdir():
        store.pipe_file(f"/music/{path.name}", path.read_bytes())
    settings = {"data_dir": "memory://music", "cache_dir": str(tmp_path)}
    local, remote = data().train_dataloader(), data(**settings).train_dataloader()
    assert local.state_dict() == remote.state_dict()
    for a, b, _ in zip(local, remote, range(EPOCH), strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert any(tmp_path.rglob("shard-00000.npy"))
    with pytest.raises(ValueError, match="cache of 1000000 bytes"):
        data(**settings, cache_gb=0.001)


def test_a_cache_smaller_than_the_set_warns(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    with ShardWriter(tmp_path / "set", Codec("test", 24000, 75.0, 4, 64, {}), 8000) as writer:
        for i in range(12):
            writer.add(np.random.default_rng(i).integers(0, 64, (4, 1000)), f"t{i}")
    store = fsspec.filesystem("memory")
    for path in (tmp_path / "set").iterdir():
        store.pipe_file(f"/small/{path.name}", path.read_bytes())
    settings = {"data_dir": "memory://small", "cache_dir": str(tmp_path / "cache"), "cache_gb": 6e-5, "global_batch": 4}
    with pytest.warns(UserWarning, match="fetched again and again"):
        module = data(**settings)
    local = data(**{**settings, "data_dir": str(tmp_path / "set")}).train_dataloader()
    for a, b, _ in zip(local, module.train_dataloader(), range(6), strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_block_shuffle_prints_its_quality(caplog):
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        CodecTokens(shuffle_shards=1).train_dataloader()
    assert "data.shuffle_shards=1: 1.0 shards a batch" in caplog.text
    assert "(a global shuffle: 1.0 shards a batch" in caplog.text  # the bundled set has one training shard


def test_mixture_argument(whole):
    module = CodecTokens(sets=[{"path": "bundled", "weight": 0.7}, {"path": "bundled", "weight": 0.3}])
    batch = next(iter(module.train_dataloader()))
    assert batch["codes"].shape == (32, 8, 375)
    assert len(module.train_dataloader()) == 2 * 532 // 32


DDP = """
import sys; sys.path[:0] = {path!r}
import json
from test_codec_tokens import Model, Rewind, data, saver, trainer_of
if __name__ == "__main__":
    model = Model(asks_for_steps=True)
    callbacks = [Rewind(10, 6, [[8, 10]]), saver({root!r}, 20)]
    trainer = trainer_of({root!r}, callbacks, devices=2, strategy="ddp")
    trainer.fit(model, datamodule=data(), ckpt_path={ckpt!r}, weights_only=True)
    out = dict(trained=model.trained, weight=model.weight.item(), validated=model.validated)
    json.dump(out, open(f"{root}/{name}-{{trainer.global_rank}}.json", "w"))
"""


def run_ddp(root: Path, name: str, ckpt: Path | None) -> list[dict[str, Any]]:
    import json

    path = [str(Path(__file__).parent), *sys.path]
    script = root / f"{name}.py"
    script.write_text(DDP.format(path=path, root=str(root), name=name, ckpt=None if ckpt is None else str(ckpt)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    child = subprocess.Popen([sys.executable, str(script)], env=env, start_new_session=True, stderr=subprocess.PIPE)
    try:
        _, err = child.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        raise
    assert child.returncode == 0, err.decode()[-2000:]
    return [json.loads((root / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_ranks_train_the_global_batches_of_one(tmp_path, whole):
    ranks = run_ddp(tmp_path, "first", None)
    both = [
        [a[0], *(x + y for x, y in zip(a[1:], b[1:], strict=True))]
        for a, b in zip(ranks[0]["trained"], ranks[1]["trained"], strict=True)
    ]
    order = [*range(10), 6, 7, *range(10, 30)]
    assert both == [whole.trained[i] for i in order]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    assert ranks[0]["validated"] != ranks[1]["validated"]
    single = fit(tmp_path, Model(), [], tmp_path / "step=20.ckpt")  # two ranks' checkpoint, gone on with one
    assert single.trained == [whole.trained[i] for i in order[20:]]
