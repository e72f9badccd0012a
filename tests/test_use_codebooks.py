"""Training on the leading codebooks, and the count of every rank's frames that needs no collective."""

from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.codec_tokens import CodecTokens
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec


def test_the_leading_codebooks_are_served_and_the_rest_is_the_same() -> None:
    whole = CodecTokens(num_frames=32, global_batch=4)
    part = CodecTokens(num_frames=32, global_batch=4, use_codebooks=3)
    assert (whole.num_codebooks, part.num_codebooks) == (8, 3)
    a, b = next(iter(whole.train_dataloader())), next(iter(part.train_dataloader()))
    assert torch.equal(a["codes"][:, :3], b["codes"])
    assert torch.equal(a["mask_seed"], b["mask_seed"])
    assert next(iter(part.val_dataloader()))["codes"].shape[1] == 3


def test_more_codebooks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use_codebooks=9.*codebooks=8"):
        CodecTokens(use_codebooks=9)


def test_every_rank_knows_the_lengths_of_all_ranks_clips(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codec = Codec("rvq_mel", 24000, 75.0, 2, 16, {})
    with ShardWriter(tmp_path, codec) as writer:
        for i in range(40):  # most are shorter than a clip
            codes = rng.integers(0, 16, (2, int(rng.integers(5, 60))), dtype=np.int16)
            writer.add(codes, f"track{i}", licence="CC0", attribution="nobody", source="generated")
    data = CodecTokens(data_dir=str(tmp_path), num_frames=50, global_batch=6, val_split="train")
    stream = data._stream("train")
    for number in range(12):
        shares = [stream.batch(number, rank=rank, world=3) for rank in range(3)]
        together = torch.cat([share["num_frames"] for share in shares])
        assert len(set(together.tolist())) > 1
        for share in shares:
            assert sorted(share["global_num_frames"].tolist()) == sorted(together.tolist())
