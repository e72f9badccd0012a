"""The LightningDataModule over token shards: arguments in, loaders out, position kept in its own state as well.

Lightning drops a loader's state when `trainer.estimated_stepping_batches` was read first (pytorch-lightning issue
20550), so the position is also part of the DataModule's state, which is restored in any order of events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from datamodules.loader import FixedLoader, TokenLoader
from datamodules.shards import load_index
from datamodules.shuffle_quality import shuffle_quality
from datamodules.stream import BadShards, ShardSet, TokenStream, used_codebooks


class SetArguments(TypedDict, total=False):
    """One shard set of a mixture: its folder and its relative weight."""

    path: str
    weight: float


class CodecTokens(L.LightningDataModule):
    """Crops of codec tokens, exact under every resume, rewind and rescale.

    Args:
        data_dir: folder or URL (s3://, gs://, http://) of a shard set, or "bundled" for the music inside the package.
            Ignored where `sets` is given.
        sets: a mixture of shard sets, e.g. `[{path: a, weight: 0.7}, {path: b, weight: 0.3}]`.
        num_frames: T, frames of a clip.
        global_batch: clips of one micro-batch over all ranks; each rank gets `global_batch / world_size`.
        seed: of order, crops and masks.
        codebooks: K that the model expects; None takes what the data has.
        use_codebooks: train on the first so many codebooks only, as a codec does at a lower bitrate; None for all.
        min_frames: tracks shorter than this are left out; those between this and `num_frames` are padded.
        num_workers: reading processes a rank; 0 is the fast setting for local files.
        persistent_workers: keep the workers between epochs and rewinds.
        start_method: "fork", "spawn" or "forkserver"; None for the platform's own.
        on_bad_shard: "raise", or "skip" to replace the clips of a damaged shard by others, counted in
            `num_substituted`.
        max_bad_shards: with "skip", more damaged shards than this end the run.
        verify: check the sha256 of every block on first touch.
        shuffle_shards: 0 for the global shuffle; n > 0 shuffles within n shards at a time (for sets far larger than
            the cache).
        train_split: name of the training split.
        val_split: name of the validation split; a split is by track.
        test_split: name of the test split; None takes the validation split.
        val_batch: clips of one validation batch on each rank; None for the training share.
        val_clips: validate on this many clips, spread evenly over the split; None for all.
        cache_dir: where shards of a URL are kept, on a local disk; shared by the ranks of a machine.
        cache_gb: the cache never holds more.
        storage_options: for the URL's fsspec filesystem (keys, endpoint, ...).

    Raises:
        FileNotFoundError: a folder or index is absent.
        ValueError: an argument out of range, or data that does not fit.
    """

    def __init__(
        self,
        data_dir: str = "bundled",
        sets: list[SetArguments] | None = None,
        num_frames: int = 375,
        global_batch: int = 32,
        seed: int = 0,
        codebooks: int | None = None,
        use_codebooks: int | None = None,
        min_frames: int = 1,
        num_workers: int = 0,
        persistent_workers: bool = False,
        start_method: str | None = None,
        on_bad_shard: str = "raise",
        max_bad_shards: int = 1,
        verify: bool = True,
        shuffle_shards: int = 0,
        train_split: str = "train",
        val_split: str = "val",
        test_split: str | None = None,
        val_batch: int | None = None,
        val_clips: int | None = None,
        cache_dir: str = "~/.cache/ballast/shards",
        cache_gb: float = 64.0,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        remote = RemoteSettings(cache_dir, cache_gb, storage_options or {}, shuffled_in_blocks=shuffle_shards > 0)
        self._sets = _shard_sets(sets or [{"path": data_dir}], remote)
        self._bad = BadShards(on_bad_shard, max_bad_shards)
        self._num_frames, self._global_batch, self._seed = num_frames, global_batch, seed
        self._min_frames, self._verify, self._shuffle_shards = min_frames, verify, shuffle_shards
        self._num_workers, self._persistent_workers, self._start_method = num_workers, persistent_workers, start_method
        self._splits = {"train": train_split, "val": val_split, "test": test_split or val_split}
        self._val_batch, self._val_clips = val_batch, val_clips
        self._pending: Mapping[str, Any] | None = None
        self.train_loader: TokenLoader | None = None
        self.codec = self._sets[0].index.codec if self._sets[0].index is not None else None
        assert self.codec is not None
        self._use_codebooks = use_codebooks
        self.num_codebooks: int = used_codebooks(use_codebooks, self.codec.codebooks)
        self.codebook_size: int = self.codec.codebook_size
        if codebooks is not None and codebooks != self.codec.codebooks:
            raise ValueError(
                f"data.codebooks={codebooks}, but {self._sets[0].path}/index.json has codebooks={self.codec.codebooks}:"
                " set data.codebooks (and the model's) to the number in the data"
            )

    def train_dataloader(self) -> TokenLoader:
        """The endless training loader of this rank, at the position last restored."""
        rank, world = self._rank()
        if self.train_loader is None or (self.train_loader.rank, self.train_loader.world) != (rank, world):
            state = self._pending or (self.train_loader.state_dict() if self.train_loader else None)
            stream = self._stream("train")
            if self._shuffle_shards:
                whole = dataclasses.replace(stream.order, shuffle_shards=0)
                rank_zero_info(
                    f"data.shuffle_shards={self._shuffle_shards}: {shuffle_quality(stream.order)}"
                    f" (a global shuffle: {shuffle_quality(whole)})"
                )
            self.train_loader = TokenLoader(
                stream,
                rank=rank,
                world=world,
                num_workers=self._num_workers,
                persistent_workers=self._persistent_workers,
                start_method=self._start_method,
                in_flight=self._in_flight,
            )
            if state is not None:
                self.train_loader.load_state_dict(state)
            self._pending = None
        return self.train_loader

    def val_dataloader(self) -> FixedLoader:
        """Validation: fixed clips of the validation split, fixed masks."""
        return self._fixed("val")

    def test_dataloader(self) -> FixedLoader:
        """As validation, over the test split."""
        return self._fixed("test")

    def predict_dataloader(self) -> FixedLoader:
        """As testing."""
        return self._fixed("test")

    def teardown(self, stage: str) -> None:
        """End the reading processes."""
        if self.train_loader is not None:
            self.train_loader.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the training stream, as `TokenLoader.state_dict`; empty before training."""
        if self.train_loader is not None:
            return self.train_loader.state_dict()
        return dict(self._pending or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position, now or as soon as the loader is built.

        Raises:
            ValueError: the state is of another data set, seed or global batch.
        """
        if not state_dict:
            return
        if self.train_loader is not None:
            self.train_loader.load_state_dict(state_dict)
        else:
            self._pending = dict(state_dict)

    def _in_flight(self) -> bool:
        """Whether the batch handed out last has not gone through its training step yet."""
        if self.trainer is None or not self.trainer.training:
            return False
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(progress.ready > progress.processed)

    def _rank(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def _stream(self, role: str, global_batch: int | None = None) -> TokenStream:
        return TokenStream(
            self._sets,
            num_frames=self._num_frames,
            global_batch=global_batch or self._global_batch,
            seed=self._seed,
            split=self._splits[role],
            min_frames=self._min_frames,
            shuffle_shards=self._shuffle_shards if role == "train" else 0,
            on_bad_shard=self._bad if role == "train" else BadShards(),
            use_codebooks=self._use_codebooks,
            verify=self._verify,
        )

    def _fixed(self, role: str) -> FixedLoader:
        rank, world = self._rank()
        batch = self._val_batch if self._val_batch is not None else max(1, self._global_batch // world)
        return FixedLoader(self._stream(role, 1), batch, rank=rank, world=world, max_clips=self._val_clips)


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How shards of a URL are kept; see the arguments of `CodecTokens`."""

    cache_dir: str
    cache_gb: float
    storage_options: Mapping[str, Any]
    shuffled_in_blocks: bool


def _shard_sets(rows: list[SetArguments], remote: RemoteSettings) -> list[ShardSet]:
    if bad := [row for row in rows if set(row) - {"path", "weight"} or "path" not in row]:
        raise ValueError(f"data.sets: each needs a path and may have a weight, got {bad[0]}")
    return [_shard_set(row["path"], float(row.get("weight", 1.0)), remote) for row in rows]


def _shard_set(path: str, weight: float, remote: RemoteSettings) -> ShardSet:
    if "://" not in path:
        return ShardSet(path, weight, load_index(path))
    from datamodules.object_fetch import FetchPolicy  # needs fsspec, an extra
    from datamodules.remote import CacheSettings, open_remote

    policy = FetchPolicy(storage_options=dict(remote.storage_options))
    room = int(remote.cache_gb * 1e9)
    index, cache = open_remote(path, CacheSettings(folder=Path(remote.cache_dir), max_bytes=room, policy=policy))
    needed = sum(shard.bytes for shard in index.shards)
    if needed > room and not remote.shuffled_in_blocks:
        rank_zero_warn(
            f"data.cache_gb={remote.cache_gb}: {path} has {needed / 1e9:.1f} GB and every batch draws from all of it:"
            " shards will be fetched again and again; give the cache more room, or set data.shuffle_shards"
        )
    ahead = cache.fetch_ahead if needed <= room or remote.shuffled_in_blocks else None
    return ShardSet(path, weight, index, cache.open_shard, ahead)
