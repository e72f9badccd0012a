"""The loaders: the same global batches under every cut, rewind, skip, rank and worker; damage refused or counted."""

import itertools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules.loader import FixedLoader, TokenLoader
from datamodules.shard_reader import ShardReader
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec, load_index
from datamodules.stream import BadShards, ShardSet, TokenStream

CODEC = Codec("test", 24000, 75.0, 4, 64, {})
CLIP, BATCH = 10, 12


def make_set(root: Path, tracks: int = 40, seed: int = 0, codec: Codec = CODEC, shard_bytes: int = 2400) -> Path:
    rng = np.random.default_rng(seed)
    with ShardWriter(root, codec, shard_bytes) as writer:
        for i in range(tracks):
            frames = int(rng.integers(4, 90))
            codes = rng.integers(0, codec.codebook_size, (codec.codebooks, frames))
            writer.add(codes, f"{seed}-{i}", split="val" if i % 8 == 7 else "train")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_set(tmp_path_factory.mktemp("set"))


def stream_of(root: Path, **more: Any) -> TokenStream:
    more = {"num_frames": CLIP, "global_batch": BATCH, "seed": 5, **more}
    return TokenStream([ShardSet(str(root))], **more)


def facts(batches: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Everything of the clips of one global batch, whatever ranks they came from, down to the codes."""
    names = ("position", "sample_id", "track_id", "start", "num_frames", "mask_seed")
    rows = [batch[name].tolist() for batch in batches for name in names]
    columns = [list(itertools.chain(*rows[i :: len(names)])) for i in range(len(names))]
    codes = hash(b"".join(batch["codes"].contiguous().numpy().tobytes() for batch in batches))
    return [batches[0]["batch_number"], columns, codes]  # type: ignore[return-value]


class Ranks:
    """The loaders of all ranks, stepped together."""

    def __init__(self, root: Path, world: int = 1, **workers: Any) -> None:
        self.loaders = [TokenLoader(stream_of(root), rank=rank, world=world, **workers) for rank in range(world)]
        self.iters = [iter(loader) for loader in self.loaders]

    def take(self, count: int) -> list[Any]:
        return [facts([next(it) for it in self.iters]) for _ in range(count)]

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return json.loads(json.dumps(states[0]))  # plain data only

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def new_epoch(self) -> None:
        self.iters = [iter(loader) for loader in self.loaders]


@pytest.fixture(scope="module")
def whole(root) -> list[Any]:
    return Ranks(root).take(70)


EPOCH = 13


def test_epoch_length_of_the_set(root):
    assert len(TokenLoader(stream_of(root))) == EPOCH


# The default run samples the product; the slow test below runs all of it.
WORKERS = [
    {},
    {"num_workers": 2, "start_method": "fork"},
    {"num_workers": 2, "start_method": "fork", "persistent_workers": True},
    {"num_workers": 1, "start_method": "fork"},
]
SPAWN = {"num_workers": 2, "start_method": "spawn"}
OTHERS = [{**SPAWN, "persistent_workers": True}, {"num_workers": 3, "start_method": "forkserver"}]
CUTS = [0, 1, EPOCH - 1, EPOCH, EPOCH + 3, 50]


def check_cuts(root: Path, whole: list[Any], world: int, workers: dict[str, Any], cuts: list[int]) -> None:
    """Stop at every cut; go on from each in loaders made anew."""
    first, states, at = Ranks(root, world, **workers), [], 0
    for cut in cuts:
        assert first.take(cut - at) == whole[at:cut]
        states.append(first.state())
        at = cut
    for cut, state in zip(cuts, states, strict=True):
        resumed = Ranks(root, world, **workers)
        resumed.load(state)
        assert resumed.take(6) == whole[cut : cut + 6], (world, workers, cut)


def check_rewinds(root: Path, whole: list[Any], world: int, workers: dict[str, Any]) -> None:
    ranks = Ranks(root, world, **workers)
    ranks.take(4)
    saved = ranks.state()
    for _ in range(2):  # forward, back, and again with the very same state object
        assert ranks.take(EPOCH) == whole[4 : 4 + EPOCH]
        ranks.load(saved)
    ranks.load({**saved, "skip": [[6, 9]]})
    ranks.new_epoch()
    assert ranks.take(3) == [whole[4], whole[5], whole[9]]
    later = ranks.state()
    assert later["batch_number"] == 10
    resumed = Ranks(root, world, **workers)
    resumed.load({**later, "batch_number": 5})
    assert resumed.take(3) == [whole[5], whole[9], whole[10]]
    assert resumed.state()["skip"] == [[6, 9]]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_resume_and_rewind_equal_the_uninterrupted_order(root, whole, world, workers):
    check_cuts(root, whole, world, workers, CUTS if not workers else [1, EPOCH])
    check_rewinds(root, whole, world, workers)


def test_spawned_workers_serve_the_same(root, whole):
    ranks = Ranks(root, 1, num_workers=1, start_method="spawn")
    assert ranks.take(2) == whole[:2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "start_method": "fork"}, SPAWN], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_full_product(root, whole, world, workers):
    check_cuts(root, whole, world, workers, CUTS)
    check_rewinds(root, whole, world, workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", OTHERS, ids=str)
def test_other_ways_to_start_workers(root, whole, workers):
    check_cuts(root, whole, 2, workers, [1, EPOCH + 3])
    check_rewinds(root, whole, 2, workers)


@pytest.mark.parametrize(("before", "after"), itertools.permutations([1, 2, 3, 4], 2))
def test_another_number_of_ranks_continues_the_same_global_batches(root, whole, before, after):
    first = Ranks(root, before)
    assert first.take(EPOCH + 2) == whole[: EPOCH + 2]
    second = Ranks(root, after)
    second.load(first.state())
    assert second.take(EPOCH) == whole[EPOCH + 2 : 2 * EPOCH + 2]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (1, 2)])
def test_another_number_of_workers_continues(root, whole, before, after):
    first = Ranks(root, num_workers=before)
    assert first.take(5) == whole[:5]
    second = Ranks(root, num_workers=after)
    second.load(first.state())
    assert second.take(5) == whole[5:10]


def test_position_is_what_was_handed_out_not_what_was_read_ahead(root):
    ranks = Ranks(root, num_workers=2, prefetch=4)
    ranks.take(3)
    assert ranks.state()["batch_number"] == 3


def test_a_batch_in_flight_is_not_counted_as_trained(root):
    busy = [False]
    loader = TokenLoader(stream_of(root), in_flight=lambda: busy[0])
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict()["batch_number"] == 2
    busy[0] = True
    assert loader.state_dict()["batch_number"] == 1
    loader.load_state_dict({**loader.state_dict(), "batch_number": 7})
    assert loader.state_dict()["batch_number"] == 7


def test_state_is_a_fresh_dict(root):
    loader = TokenLoader(stream_of(root))
    state = loader.state_dict()
    loader.load_state_dict({**state, "skip": [[3, 4]], "banned": [9, 2, 9]})
    assert state["skip"] == []
    taken = loader.state_dict()
    assert (taken["skip"], taken["banned"]) == ([[3, 4]], [2, 9])
    taken["skip"][0][0] = 0
    taken["banned"].clear()
    assert loader.state_dict()["skip"] == [[3, 4]]
    assert loader.state_dict()["banned"] == [2, 9]


def test_state_hops_over_a_skip_that_begins_at_the_next_batch(root, whole):
    ranks = Ranks(root)
    ranks.load({**ranks.state(), "skip": [[0, 3]]})
    assert ranks.state()["batch_number"] == 3
    assert ranks.take(1) == [whole[3]]


BAD_STATES = [
    ({"seed": 6}, "seed is 5, the checkpoint's is 6"),
    ({"global_batch": 24}, "global_batch is 12, the checkpoint's is 24"),
    ({"fingerprint": "abc"}, "fingerprint is .* the checkpoint's is 'abc'.*data set"),
    ({"batch_number": -1}, "batch_number=-1"),
    ({"batch_number": 1.5}, "batch_number=1.5"),
    ({"skip": [[4, 4]]}, r"skip=\[\(4, 4\)\]"),
    ({"banned": [10**6]}, "banned"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(root, whole, change, message):
    ranks = Ranks(root)
    ranks.take(2)
    with pytest.raises(ValueError, match=message):
        ranks.load({**ranks.state(), **change})
    assert ranks.take(1) == [whole[2]]
    state = ranks.state()
    del state["skip"]
    with pytest.raises(ValueError, match="skip missing"):
        ranks.load(state)


@pytest.mark.parametrize(
    "change", [{"num_frames": 11}, {"min_frames": 5}, {"split": "val", "global_batch": 2}, {"shuffle_shards": 2}]
)
def test_the_fingerprint_covers_what_clip_ids_mean(root, change):
    assert stream_of(root, **change).fingerprint != stream_of(root).fingerprint
    assert stream_of(root).fingerprint == stream_of(root).fingerprint


def test_banned_clips_are_replaced_in_place_and_only_there(root, whole):
    banned = [whole[1][1][1][0], whole[3][1][1][5], whole[3][1][1][6]]
    runs = []
    for world, workers in ((1, {}), (3, {}), (1, {"num_workers": 2})):
        ranks = Ranks(root, world, **workers)
        ranks.load({**ranks.state(), "banned": banned})
        got = ranks.take(EPOCH)
        ids = [i for batch in got for i in batch[1][1]]
        assert not set(ids) & set(banned)
        changed = [n for n in range(EPOCH) if got[n] != whole[n]]
        assert changed == [1, 3]
        same = [a == b for a, b in zip(got[3][1][1], whole[3][1][1], strict=True)]
        assert same.count(False) == 2
        runs.append(got)
    assert runs[0] == runs[1] == runs[2]


def test_batches_hold_the_codes_of_the_track(root):
    index = load_index(root)
    reader = ShardReader(root, index)
    tracks = [reader.read_track(n, t) for n, shard in enumerate(index.shards) for t in range(len(shard.tracks))]
    loader = TokenLoader(stream_of(root))
    seen_short = 0
    for batch in itertools.islice(loader, EPOCH):
        assert batch["codes"].dtype == torch.int16
        assert batch["codes"].shape == (BATCH, 4, CLIP)
        assert type(batch["batch_number"]) is int
        for name in ("num_frames", "sample_id", "track_id", "start", "position", "mask_seed"):
            assert batch[name].dtype == torch.int64
            assert batch[name].shape == (BATCH,)
        for codes, length, track, start in zip(
            batch["codes"], batch["num_frames"], batch["track_id"], batch["start"], strict=True
        ):
            expected = np.zeros((4, CLIP), np.int16)
            expected[:, :length] = tracks[track][:, start : start + length]
            np.testing.assert_array_equal(codes.numpy(), expected)
            seen_short += int(length < CLIP)
    assert seen_short > 0


@pytest.mark.filterwarnings("ignore:shard skipped")
@pytest.mark.parametrize("skip", [False, True])
def test_every_rank_knows_the_lengths_of_all(root, tmp_path, skip):
    path = damaged(root, tmp_path)[0] if skip else root
    policy = BadShards("skip", 1) if skip else BadShards()
    streams = [stream_of(path, on_bad_shard=policy) for _ in range(3)]
    banned, shortest = list(range(0, 60, 3)), CLIP
    for number in range(EPOCH):
        parts = [stream.batch(number, banned, rank, 3) for rank, stream in enumerate(streams)]
        whole = torch.cat([part["num_frames"] for part in parts])
        for part in parts:
            torch.testing.assert_close(part["global_num_frames"], whole, rtol=0, atol=0)
        shortest = min(shortest, int(whole.min()))
    assert shortest < CLIP


def test_the_first_codebooks_can_be_served_alone(root):
    whole, few = stream_of(root).batch(3), stream_of(root, use_codebooks=2).batch(3)
    torch.testing.assert_close(few["codes"], whole["codes"][:, :2], rtol=0, atol=0)
    with pytest.raises(ValueError, match="use_codebooks=5: the data has codebooks=4"):
        stream_of(root, use_codebooks=5)


def test_ranks_must_divide_the_global_batch(root):
    with pytest.raises(ValueError, match="global_batch=12: not divisible by 5 ranks"):
        TokenLoader(stream_of(root), world=5)
    with pytest.raises(ValueError, match="rank=2 of world=2"):
        TokenLoader(stream_of(root), rank=2, world=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_validation_is_fixed_and_each_clip_comes_once(root, world):
    def run(seed: int = 5, **more: Any) -> list[Any]:
        stream = stream_of(root, split="val", global_batch=1, seed=seed)
        loaders = [FixedLoader(stream, 4, rank=rank, world=world, **more) for rank in range(world)]
        assert len({len(loader) for loader in loaders}) == 1
        return [[facts([batch]) for batch in loader] for loader in loaders]

    once, again = run(), run()
    assert once == again
    ids = [i for rank in once for batch in rank for i in batch[1][1]]
    clips = stream_of(root, split="val", global_batch=1).table.num_clips
    assert len(ids) == len(set(ids)) == clips - clips % world
    few = run(max_clips=6)
    assert len([i for rank in few for batch in rank for i in batch[1][1]]) == 6
    seeds = [s for rank in once for batch in rank for s in batch[1][5]]
    assert len(set(seeds)) == len(seeds)


def test_training_never_reads_a_validation_track(root):
    index = load_index(root)
    names = [track.name for shard in index.shards for track in shard.tracks]
    val = {track.name for shard in index.of_split("val") for track in shard.tracks}
    seen = {names[t] for batch in itertools.islice(TokenLoader(stream_of(root)), EPOCH) for t in batch["track_id"]}
    assert seen
    assert not seen & val


def test_mixture_is_exact_under_resume_and_ranks(tmp_path):
    sets = [ShardSet(str(make_set(tmp_path / str(i), 20 + 10 * i, i)), weight) for i, weight in enumerate((0.7, 0.3))]

    def loaders(world: int) -> list[TokenLoader]:
        stream = TokenStream(sets, num_frames=CLIP, global_batch=BATCH, seed=1)
        return [TokenLoader(stream, rank=rank, world=world) for rank in range(world)]

    one = loaders(1)
    batches = iter(one[0])
    full = [facts([next(batches)]) for _ in range(200)]
    three = loaders(3)
    for loader in three:
        loader.load_state_dict({**one[0].state_dict(), "batch_number": 150})
    iters = [iter(loader) for loader in three]
    assert [facts([next(it) for it in iters]) for _ in range(50)] == full[150:]
    first = sum(len(shard.tracks) for shard in load_index(tmp_path / "0").shards)
    share = np.mean([track < first for batch in full for track in batch[1][2]])
    assert share == pytest.approx(0.7, abs=3 * (0.7 * 0.3 / 2400) ** 0.5)
    swapped = TokenStream([sets[0], ShardSet(sets[1].path, 0.31)], num_frames=CLIP, global_batch=BATCH, seed=1)
    assert swapped.fingerprint != one[0].stream.fingerprint
    other = make_set(tmp_path / "other", 20, 3, Codec("test", 24000, 150.0, 4, 64, {}))
    with pytest.raises(ValueError, match=r"codec differs.*frame_rate: 75.0 against 150.0"):
        TokenStream([sets[0], ShardSet(str(other))], num_frames=CLIP, global_batch=BATCH)


def damaged(root: Path, tmp_path: Path, which: int = 1) -> tuple[Path, str]:
    """A copy whose `which`-th training shard has one flipped byte."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in root.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    name = load_index(copy).of_split("train")[which].file
    data = bytearray((copy / name).read_bytes())
    data[700] ^= 1
    (copy / name).write_bytes(data)
    return copy, name


def test_damage_stops_the_run_by_default(root, tmp_path):
    copy, name = damaged(root, tmp_path)
    for workers in ({}, {"num_workers": 2}):
        with pytest.raises(ValueError, match=rf"{name}: damaged: bytes .* sha256"):
            list(itertools.islice(TokenLoader(stream_of(copy), **workers), EPOCH))


def test_damage_is_skipped_in_place_when_asked_and_counted(root, whole, tmp_path):
    copy, name = damaged(root, tmp_path)
    runs = []
    for world in (1, 2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stream = stream_of(copy, on_bad_shard=BadShards("skip", 1))
            iters = [iter(TokenLoader(stream, rank=rank, world=world)) for rank in range(world)]
            runs.append([[next(it) for it in iters] for _ in range(EPOCH)])
        assert [str(w.message) for w in caught] == [str(caught[0].message)]
        assert name in str(caught[0].message)
        assert next(iter(stream.bad_shards.values())).count(name) == 1
    results = [[facts(batches) for batches in run] for run in runs]
    assert results[0] == results[1] == results[2]
    bad = set(range(*stream.table.shard_clips[1:3].tolist()))
    ids = [i for batch in results[0] for i in batch[1][1]]
    lost = [i for batch in whole[:EPOCH] for i in batch[1][1] if i in bad]
    assert lost
    assert not set(ids) & bad
    assert sum(batch["num_substituted"] for batches in runs[0] for batch in batches) == len(lost)
    assert {i for batch in whole[:EPOCH] for i in batch[1][1]} - bad <= set(ids)  # all others still come


def test_skipping_has_a_bound(root, tmp_path):
    copy, _ = damaged(root, tmp_path)
    for shard in load_index(copy).of_split("train"):
        data = (copy / shard.file).read_bytes()
        (copy / shard.file).write_bytes(data[:-2])
    with pytest.raises(ValueError, match="truncated"):
        stream_of(copy)
    with (
        pytest.warns(UserWarning, match="shard skipped"),
        pytest.raises(ValueError, match=r"max_bad_shards=2; the last"),
    ):
        stream_of(copy, on_bad_shard=BadShards("skip", 2))
    with pytest.raises(ValueError, match="on_bad_shard='ignore'"):
        BadShards("ignore")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cache_in_front_serves_the_same_and_is_told_what_comes(root, whole, tmp_path, workers):
    told: list[str] = []

    def fetch(shard: Any) -> Path:
        target = tmp_path / shard.file
        target.write_bytes((root / shard.file).read_bytes())  # no offsets file beside it
        return target

    def ahead(shards: Any) -> None:
        told.extend(shard.file for shard in shards)

    part = ShardSet("s3://bucket/set", index=load_index(root), open_shard=fetch, fetch_ahead=ahead)
    stream = TokenStream([part], num_frames=CLIP, global_batch=BATCH, seed=5)
    source = iter(TokenLoader(stream, num_workers=workers, start_method="fork" if workers else None))
    state = TokenLoader(stream_of(root)).state_dict()
    assert TokenLoader(stream).state_dict() == state  # a checkpoint moves between a folder and a store
    assert [facts([next(source)]) for _ in range(EPOCH)] == whole[:EPOCH]
    train = [shard.file for shard in load_index(root).of_split("train")]
    if not workers:
        assert sorted(told) == sorted(train)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(train)


def test_few_open_files_serve_the_same_and_a_file_changed_meanwhile_is_hashed_again(root, whole, tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.shard_files.MAX_OPEN_FILES", 2)
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    stream = stream_of(copy, shuffle_shards=1)
    assert len(stream.table.shards) > 3
    few = iter(TokenLoader(stream_of(copy)))
    assert [facts([next(few)]) for _ in range(EPOCH)] == whole[:EPOCH]
    for number in range(EPOCH):
        stream.batch(number)
    assert len(stream._files._descriptors) <= 2
    for shard in load_index(copy).of_split("train"):
        data = bytearray((copy / shard.file).read_bytes())
        data[200:400] = bytes(200)
        (copy / shard.file).unlink()
        (copy / shard.file).write_bytes(data)
    with pytest.raises(ValueError, match="do not have the sha256"):
        [stream.batch(number) for number in range(2 * EPOCH)]


def test_a_dead_codebook_warns(tmp_path):
    codes = np.random.default_rng(0).integers(0, 64, (4, 500))
    codes[2] = 7
    with ShardWriter(tmp_path, CODEC) as writer:
        writer.add(codes, "t")
    with pytest.warns(UserWarning, match="100% of codebook 2 is one code"):
        stream_of(tmp_path)


def test_a_file_cut_while_open_is_reported(root, tmp_path):
    copy, name = damaged(root, tmp_path)
    stream = stream_of(copy, verify=False)
    for number in range(3):
        stream.batch(number)
    (copy / name).write_bytes((copy / name).read_bytes()[:150])
    with pytest.raises(ValueError, match=rf"{name}: damaged: short read at byte"):
        [stream.batch(number) for number in range(3, 3 + EPOCH)]
