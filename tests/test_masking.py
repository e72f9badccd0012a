"""Span masks: coverage, counts, independence of the batch, and bad options."""

import numpy as np
import pytest
import torch

from lightning_modules.masking import (
    clip_mask,
    expected_coverage,
    mask_count,
    masked_indices,
    span_mask,
    unmasked_indices,
)


def test_coverage_of_the_published_recipe() -> None:
    """0.8 / 5 at 374 frames: 58.2 % as drawn, 54.7 % equalized (the level fairseq has at 8 clips)."""
    raw = [clip_mask(seed, 374, equalize=False).mean() for seed in range(400)]
    assert np.mean(raw) == pytest.approx(0.582, abs=0.005)
    assert expected_coverage(374) == pytest.approx(np.mean(raw), abs=0.005)
    equalized = [clip_mask(seed, 374).mean() for seed in range(50)]
    assert np.ptp(equalized) == 0.0
    assert equalized[0] == pytest.approx(0.547, abs=0.015)


def test_equal_lengths_have_equal_counts_and_the_count_is_exact() -> None:
    for frames in [*range(1, 60), 128, 374, 1500]:
        counts = {int(clip_mask(seed, frames).sum()) for seed in range(20)}
        assert counts == {mask_count(frames)}, frames


def test_spans_survive_equalization() -> None:
    """Un-masking single frames breaks spans, yet the median run stays about the span length, not 1."""
    runs: list[int] = []
    for seed in range(50):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], clip_mask(seed, 374).astype(int), [0]])))
        runs += list(edges[1::2] - edges[::2])
    assert 4 <= np.median(runs) <= 6
    assert max(runs) > 10


@pytest.mark.parametrize("prob", [0.01, 0.8, 1.0])
@pytest.mark.parametrize("length", [1, 5, 10])
def test_short_clips_always_have_a_masked_and_an_unmasked_frame(prob: float, length: int) -> None:
    for frames in range(1, 8):
        for seed in range(30):
            mask = clip_mask(seed, frames, prob=prob, length=length)
            assert mask.any()
            assert frames == 1 or not mask.all()
            assert clip_mask(seed, frames, prob=prob, length=length, equalize=False).any()


def test_a_clip_does_not_depend_on_its_batch() -> None:
    alone = span_mask([7], [40], 40)
    together = span_mask([1, 7, -3], [64, 40, 12], 64)
    assert torch.equal(together[1, :40], alone[0])
    assert not together[1, 40:].any()
    assert torch.equal(together, span_mask(torch.tensor([1, 7, -3]), torch.tensor([64, 40, 12]), 64))
    assert not torch.equal(span_mask([8], [40], 40), alone)


def test_seeds_give_independent_masks() -> None:
    masks = np.stack([clip_mask(seed, 374) for seed in range(200)]).astype(float)
    correlation = np.corrcoef(masks)[np.triu_indices(200, 1)]
    assert abs(correlation.mean()) < 0.01
    assert masks[:, 20:-20].mean(axis=0).std() < 0.05, "no frame is favoured"


def test_empty_clip_and_indices() -> None:
    num_frames = torch.tensor([6, 0])
    mask = span_mask([1, 2], num_frames, 6)
    assert not mask[1].any()
    masked, unmasked = masked_indices(mask), unmasked_indices(mask, num_frames)
    assert masked.dtype == torch.int64
    assert sorted([*masked.tolist(), *unmasked.tolist()]) == list(range(6))
    assert len(unmasked_indices(mask, num_frames, limit=1)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prob": 0.0}, "mask_prob=0.0"),
        ({"prob": 1.5}, "mask_prob=1.5"),
        ({"length": 0}, "mask_length=0"),
        ({"min_masks": -1}, "min_masks=-1"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        span_mask([1], [10], 10, **options)  # type: ignore[arg-type]


def test_clip_longer_than_the_batch() -> None:
    with pytest.raises(ValueError, match="num_frames=11"):
        span_mask([1], [11], 10)
