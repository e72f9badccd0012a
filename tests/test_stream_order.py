"""The order: bijections, exactly-once, equal global batches for any world, mixtures, block shuffle, crops."""

import itertools

import numpy as np
import pytest

from datamodules.clips import clip_table
from datamodules.order import PERIOD, Order, mixture_quotas, next_unskipped
from datamodules.permutation import below, hash_words, mix, permute
from datamodules.shards import Codec, Shard, ShardIndex, Track
from datamodules.shuffle_quality import shuffle_quality

CODEC = Codec("test", 24000, 75.0, 4, 64, {})


def index_of(shards: list[list[int]], split: str = "train") -> ShardIndex:
    rows = []
    for number, lengths in enumerate(shards):
        tracks = tuple(Track(f"{number}-{i}", n, "CC0", "a", "s") for i, n in enumerate(lengths))
        low, high, top = (0,) * 4, (63,) * 4, (0.1,) * 4
        rows.append(
            Shard(f"{number}.npy", f"{number}.o", split, sum(lengths), 0, "", 0, "", "", low, high, top, tracks)
        )
    return ShardIndex(CODEC, tuple(rows), "x")


def order_of(clips: int, batch: int, seed: int = 0, **more) -> Order:
    return Order(part_clips=(0, clips), shard_clips=(0, clips), seed=seed, global_batch=batch, **more)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097])
def test_permute_is_a_bijection_that_depends_on_the_key(size):
    orders = [permute(np.arange(size), size, hash_words(seed)) for seed in range(4)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(size))
    if size > 15:
        assert all((a != b).any() for a, b in itertools.pairwise(orders))


def test_permute_has_no_structure_left():
    size = 20_000
    order = permute(np.arange(size), size, hash_words(5))
    expected = 1 / 12  # variance of a uniform share
    shares = order / size
    assert np.var(shares[:2000]) == pytest.approx(expected, rel=0.1)
    lag_1 = np.corrcoef(shares[:-1], shares[1:])[0, 1]
    assert abs(lag_1) < 3 / np.sqrt(size)
    assert np.mean(np.abs(np.diff(order)) <= 10) < 0.003


def test_permute_is_the_same_one_at_a_time_and_for_mixed_sizes():
    sizes = np.array([5, 100, 7, 1000, 2])
    index = np.array([4, 99, 3, 500, 1])
    keys = hash_words(np.arange(5))
    together = permute(index, sizes, keys)
    alone = [int(permute(index[i : i + 1], int(sizes[i]), keys[i : i + 1])[0]) for i in range(5)]
    assert together.tolist() == alone


def test_hash_is_the_published_finaliser():
    # SplitMix64 from seed 0: its first outputs (Vigna's reference implementation)
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([1, 2, 3], np.uint64) * golden
    assert [hex(int(x)) for x in mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_below_is_uniform_and_in_range():
    values = below(hash_words(1, np.arange(70_000)), 7)
    counts = np.bincount(values, minlength=7)
    assert len(counts) == 7
    assert abs(counts - 10_000).max() < 400


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_every_epoch_serves_every_clip_once_on_equal_ranks(world):
    order = order_of(1000, 12)
    orders = []
    for epoch in range(3):
        ids = []
        for number in range(epoch * 83, (epoch + 1) * 83):
            shares = [order.samples(order.positions(number, rank, world))[0] for rank in range(world)]
            assert {len(share) for share in shares} == {12 // world}
            whole = order.samples(order.positions(number))[0]
            np.testing.assert_array_equal(np.concatenate(shares), whole)
            ids.append(whole)
        orders.append(np.concatenate(ids))
        assert len(np.unique(orders[-1])) == len(orders[-1]) == 996
    assert order.batches_per_epoch == 83
    assert (orders[0] != orders[1]).any()


def test_seed_decides_order_crops_and_masks():
    positions = np.arange(200)
    a, b, again = order_of(500, 10, 1), order_of(500, 10, 2), order_of(500, 10, 1)
    assert (a.samples(positions)[0] != b.samples(positions)[0]).any()
    np.testing.assert_array_equal(a.samples(positions)[0], again.samples(positions)[0])
    assert len(np.unique(a.mask_seeds(np.arange(10_000)))) == 10_000
    assert not np.isin(a.mask_seeds(positions), b.mask_seeds(positions)).any()
    assert a.mask_seeds(positions).min() >= 0
    same, other = a.crop_bits(positions, np.zeros(200, int)), a.crop_bits(positions, np.ones(200, int))
    assert (same != other).all()


def test_position_1e8_costs_what_position_0_costs():
    order = order_of(10**8, 1024)
    table = 10**8 // 1024
    for number in (0, table - 1, table, 10 * table + 5, 10**9):
        sample, epoch = order.samples(order.positions(number, 3, 8))
        assert len(np.unique(sample)) == 128
        assert 0 <= sample.min() <= sample.max() < 10**8
        assert set(epoch.tolist()) == {number // table}


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (5, 0.001 * 10), (0.05, 0.9, 0.05)])
def test_mixture_keeps_exact_shares_and_goes_through_every_part_in_turn(weights):
    sizes = [900, 400, 77][: len(weights)]
    bounds = tuple(np.cumsum([0, *sizes]).tolist())
    order = Order(part_clips=bounds, shard_clips=bounds, seed=3, global_batch=10, weights=weights)
    sample, epoch = order.samples(np.arange(2 * PERIOD))
    part = np.searchsorted(bounds, sample, side="right") - 1
    shares = np.array(weights) / sum(weights)
    for c, size in enumerate(sizes):
        assert abs((part[:PERIOD] == c).sum() - shares[c] * PERIOD) < 1
        for e in range(int(epoch[part == c].max())):  # whole epochs of this part
            mine = np.sort(sample[(part == c) & (epoch == e)])
            np.testing.assert_array_equal(mine, np.arange(size) + bounds[c])
    if len(weights) == 2 and weights[0] == 0.7:  # interleaved, not one after the other
        assert 0.6 < (part[:500] == 0).mean() < 0.8
    one_by_one = [int(order.samples(np.array([p]))[0][0]) for p in range(0, 2 * PERIOD, 997)]
    assert one_by_one == sample[::997].tolist()


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan")), (1.0, 1e-9)])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        mixture_quotas(weights, 2)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_block_shuffle_is_exact_and_touches_few_shards(window):
    bounds = tuple(np.cumsum([0, 100, 50, 1, 130, 219, 88, 12]).tolist())
    order = Order(part_clips=(0, 600), shard_clips=bounds, seed=1, global_batch=20, shuffle_shards=window)
    for epoch in range(2):
        sample, _ = order.samples(np.arange(epoch * 600, (epoch + 1) * 600))
        np.testing.assert_array_equal(np.sort(sample), np.arange(600))
        shard = np.searchsorted(bounds, sample, side="right") - 1
        changes = len(np.unique(shard[:60]))
        assert changes <= 2 * window
    assert (order.samples(np.arange(600))[0] != order.samples(np.arange(600, 1200))[0]).any()


def test_crops_reach_every_start_equally_often_and_never_leave_the_track():
    table = clip_table([index_of([[25, 10, 4], [100]])], "train", 10)
    assert table.num_clips == 2 + 1 + 1 + 10
    bits = hash_words(9, np.arange(64_000))
    row, start, length = table.locate(np.tile([0, 1], 32_000), bits)
    assert set(row.tolist()) == {0}
    assert set(length.tolist()) == {10}
    counts = np.bincount(start, minlength=16)
    assert len(counts) == 16  # 25 - 10 + 1
    assert abs(counts - 4000).max() < 5 * 64
    row, start, length = table.locate(np.array([2, 3, 13]), bits[:3])
    assert row.tolist() == [1, 2, 3]
    assert start[:2].tolist() == [0, 0]
    assert length.tolist() == [10, 4, 10]


def test_validation_crops_tile_the_track():
    table = clip_table([index_of([[25, 10, 4], [100]])], "train", 10)
    row, start, _ = table.locate(np.arange(14), None)
    assert row.tolist() == [0, 0, 1, 2] + [3] * 10
    assert start.tolist() == [0, 10, 0, 0, *range(0, 100, 10)]


def test_short_tracks_are_padded_or_left_out_and_counted():
    index = index_of([[25, 3, 4], [2, 50]])
    assert clip_table([index], "train", 10).dropped == 0
    table = clip_table([index], "train", 10, min_frames=4)
    assert (table.dropped, table.num_clips) == (2, 2 + 1 + 5)
    row, _, length = table.locate(np.arange(8), None)
    assert table.track_id[row].tolist() == [0, 0, 2, 4, 4, 4, 4, 4]  # numbers of the tracks that stay do not move
    assert length.tolist() == [10, 10, 4, 10, 10, 10, 10, 10]
    with pytest.raises(ValueError, match="no clip of it"):
        clip_table([index], "train", 10, min_frames=51)
    with pytest.raises(ValueError, match=r"split='val'.*\['train'\]"):
        clip_table([index], "val", 10)


def test_skip_ranges_hop():
    skip = [(5, 7), (7, 9), (20, 21)]
    assert [next_unskipped(n, skip) for n in (4, 5, 6, 8, 9, 20, 21)] == [4, 9, 9, 9, 9, 21, 21]
    assert next_unskipped(3, []) == 3


def test_substitutes_are_pure_and_stay_in_their_part():
    order = Order(part_clips=(0, 50, 80), shard_clips=(0, 50, 80), seed=1, global_batch=4, weights=(1, 1))
    sample = np.array([3, 60, 49, 50])
    position = np.arange(4)
    first = order.substitute(position, sample, None, 0)
    np.testing.assert_array_equal(first, order.substitute(position, sample, None, 0))
    assert (first != order.substitute(position, sample, None, 1)).any()
    assert ((first < 50) == (sample < 50)).all()
    with pytest.raises(ValueError, match="no usable clip"):
        order.substitute(position, sample, np.arange(80), 1000)


def test_numbers_out_of_range_are_refused_by_name():
    for key, value in (("batch", 0), ("batch", 101), ("shuffle_shards", -1)):
        more = {"shuffle_shards": value} if key == "shuffle_shards" else {}
        with pytest.raises(ValueError, match=str(value)):
            order_of(100, value if key == "batch" else 10, **more)
    with pytest.raises(ValueError, match="not divisible by 3 ranks"):
        order_of(100, 10).positions(0, 0, 3)


def test_shuffle_quality_tells_a_block_shuffle_from_a_global_one():
    bounds = tuple(range(0, 64_001, 1000))

    def quality(window: int):
        order = Order((0, 64_000), bounds, seed=2, global_batch=64, shuffle_shards=window)
        return shuffle_quality(order)

    whole, blocks, one = quality(0), quality(8), quality(1)
    assert whole.shards == pytest.approx(64 * (1 - (1 - 1 / 64) ** 64), rel=0.03)
    assert whole.near == pytest.approx(1 - (1 - 20 / 64_000) ** 63, abs=0.01)
    assert whole.spread == pytest.approx(1, abs=0.15)
    assert 7 < blocks.shards <= 9  # a batch may straddle two windows
    assert blocks.near == pytest.approx(1 - (1 - 20 / 8000) ** 63, abs=0.02)
    assert 1 <= one.shards < 1.2
    assert whole.spread < blocks.spread < one.spread
