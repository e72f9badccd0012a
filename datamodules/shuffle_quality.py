"""How well an order is shuffled: numbers to put beside a block shuffle before trusting a loss curve under it.

Correlated batches look like loss spikes, so whoever shuffles in blocks should know how far that is from a global
shuffle.

Legend: B clips of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datamodules.order import Order

NEAR_CLIPS = 10


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """Averages over some global batches.

    Attributes:
        shards: distinct shards in a batch.
        near: share of a batch's clips that have another one of the same batch within `NEAR_CLIPS` clips.
        spread: standard deviation over batches of their mean clip id, in units of that of independent draws; 1 is a
            global shuffle, more means that consecutive batches come from different regions of the set.
    """

    shards: float
    near: float
    spread: float

    def __str__(self) -> str:
        return f"{self.shards:.1f} shards a batch, {self.near:.1%} near neighbours, spread {self.spread:.2f}"


def shuffle_quality(order: Order, batches: int = 200) -> ShuffleQuality:
    """Measure an order on the first `batches` global batches of its first epoch (all, where there are fewer)."""
    batches = min(batches, order.batches_per_epoch)
    numbers = np.linspace(0, order.batches_per_epoch - 1, batches).astype(np.int64)
    bounds = np.array(order.shard_clips, np.int64)
    shards, near, means = [], [], []
    for number in numbers.tolist():
        sample_B = np.sort(order.samples(order.positions(number))[0])
        shards.append(len(np.unique(np.searchsorted(bounds, sample_B, side="right"))))
        gaps = np.concatenate([[np.inf], np.diff(sample_B), [np.inf]])
        near.append(float(np.mean(np.minimum(gaps[:-1], gaps[1:]) <= NEAR_CLIPS)))
        means.append(float(sample_B.mean()))
    alone = order.num_clips / np.sqrt(12 * order.global_batch)
    return ShuffleQuality(float(np.mean(shards)), float(np.mean(near)), float(np.std(means) / alone))
