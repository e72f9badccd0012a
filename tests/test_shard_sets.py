"""shards info, verify, merge and split on small sets, whole and damaged."""

import json

import numpy as np
import pytest

from datamodules.residual_kmeans import ResidualKMeans
from datamodules.set_statistics import read_tracks, set_statistics
from datamodules.shard_reader import ShardReader
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec, load_index
from experiments import shard_sets

CODEC = Codec("rvq_mel", 24_000, 75.0, 2, 16, {})


def codes(seed, frames=300):
    return np.random.default_rng(seed).integers(0, 16, (2, frames)).astype(np.int16)


def make_set(folder, seeds, codec=CODEC, name="t{}", **options):
    with ShardWriter(folder, codec, 4000) as writer:
        for seed in seeds:
            split = "val" if seed % 4 == 3 else "train"
            writer.add(
                codes(seed), name.format(seed), licence="CC0-1.0" if seed % 2 else "CC-BY-4.0", split=split, **options
            )
    return folder


def contents(folder):
    reader = ShardReader(folder, load_index(folder))
    return {track.name: (track.licence, split, codes_KT.tobytes()) for track, split, codes_KT in read_tracks(reader)}


def run(*argv):
    return shard_sets.main(list(map(str, argv)))


def test_statistics_of_a_set_whose_numbers_are_known(tmp_path):
    alternating = np.stack([np.tile([3, 5], 500), np.zeros(1000)]).astype(np.int16)
    with ShardWriter(tmp_path / "set", CODEC) as writer:
        writer.add(alternating, "a", licence="CC0-1.0")
        writer.add(alternating, "b", licence="CC-BY-4.0", split="val")
        writer.add(codes(0, 36_000), "c", licence="CC0-1.0")
    index = load_index(tmp_path / "set")
    whole = set_statistics(tmp_path / "set", index)
    assert whole.duplicates == [["a", "b"]]
    assert whole.splits["train"].tracks == 2
    assert whole.licences["CC0-1.0"].hours == pytest.approx(37_000 / 75 / 3600)
    assert whole.dead_codes == [0, 0]
    assert whole.unigram_bits[0] == pytest.approx(4, abs=0.05)
    assert whole.bigram_bits[0] == pytest.approx(4, abs=0.25)
    with ShardWriter(tmp_path / "two", CODEC) as writer:
        writer.add(alternating, "a")
    two = set_statistics(tmp_path / "two", load_index(tmp_path / "two"))
    assert two.dead_codes == [14, 15]
    assert two.unigram_bits == pytest.approx([1, 0])
    assert two.bigram_bits == pytest.approx([0, 0], abs=1e-9)
    assert two.top_share == [0.5, 1.0]


def test_bigram_sample_is_spread_over_the_set(tmp_path):
    make_set(tmp_path / "set", range(40))
    index = load_index(tmp_path / "set")
    some = set_statistics(tmp_path / "set", index, sample_hours=index.hours / 4)
    assert some.bigram_hours == pytest.approx(index.hours / 4)
    assert some.unigram_bits == set_statistics(tmp_path / "set", index).unigram_bits


def test_info_prints_tables_and_writes_json(tmp_path, capsys):
    make_set(tmp_path / "set", [0, 1, 3])
    assert run("info", tmp_path / "set", "--json", tmp_path / "info.json") == 0
    text = capsys.readouterr().out
    for word in ("3 tracks", "CC-BY-4.0", "val", "unigram bits", "no two tracks have the same codes"):
        assert word in text
    found = json.loads((tmp_path / "info.json").read_text())[str(tmp_path / "set")]
    assert found["splits"]["train"] == {"tracks": 2, "hours": pytest.approx(600 / 75 / 3600)}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: flip(root / "shard-00000.npy", 700), ("shard-00000.npy, row", "sha256", "restore")),
        (lambda root: (root / "shard-00001.npy").unlink(), ("shard-00001.npy", "missing")),
        (lambda root: cut(root / "shard-00001.npy"), ("shard-00001.npy", "truncated")),
        (lambda root: flip(root / "shard-00000.offsets.npy", 140), ("shard-00000.offsets.npy", "sha256")),
        (lambda root: flip(root / "index.json", 300), ("index.json",)),
        (lambda root: (root / "books.npz").write_bytes(b"no"), ("books.npz", "not a file of books")),
        (lambda root: (root / "books.npz").write_bytes(books(1).to_bytes()), ("books.npz", "not the books")),
    ],
)
def test_verify_names_the_fault_and_exits_1(tmp_path, capsys, damage, words):
    codec = Codec("rvq_mel", 24_000, 75.0, 2, 16, {"books_sha256": books(0).digest})
    make_set(tmp_path / "set", range(6), codec)
    (tmp_path / "set" / "books.npz").write_bytes(books(0).to_bytes())
    assert run("verify", tmp_path / "set") == 0
    assert "sound" in capsys.readouterr().out
    damage(tmp_path / "set")
    assert run("verify", tmp_path / "set") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fault: ")]
    assert any(all(word in line for word in words) for line in lines), lines


def test_verify_notes_a_constant_codebook_without_failing(tmp_path, capsys):
    with ShardWriter(tmp_path / "set", CODEC) as writer:
        writer.add(np.stack([codes(0)[0], np.full(300, 7)]), "a")
    assert run("verify", tmp_path / "set") == 0
    assert "codebook 1: one code is 100% of the shard" in capsys.readouterr().out


def books(seed):
    rng = np.random.default_rng(seed)
    return ResidualKMeans(
        rng.normal(size=(2, 16, 4)).astype(np.float32), np.zeros(4, np.float32), np.ones(4, np.float32)
    )


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x01
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-10])


def test_merge_keeps_every_track_with_its_facts(tmp_path, capsys):
    left, right = make_set(tmp_path / "left", [0, 1, 3]), make_set(tmp_path / "right", [4, 5], attribution="Ann")
    assert run("merge", left, right, "--out", tmp_path / "both") == 0
    assert contents(tmp_path / "both") == contents(left) | contents(right)
    by_name = {track.name: track for shard in load_index(tmp_path / "both").shards for track in shard.tracks}
    assert by_name["t5"].attribution == "Ann"
    assert run("merge", left, right, "--out", tmp_path / "both") == 1
    assert "is a finished shard set" in capsys.readouterr().err


def test_merge_refuses_or_prefixes_equal_names_and_drops_duplicates(tmp_path, capsys):
    left, right = make_set(tmp_path / "left", [0, 1]), make_set(tmp_path / "right", [1, 2])
    assert run("merge", left, right, "--out", tmp_path / "both") == 1
    assert "track 't1' is in" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()
    assert run("merge", left, right, "--out", tmp_path / "both", "--prefix", "--drop-duplicates") == 0
    assert set(contents(tmp_path / "both")) == {"left/t0", "left/t1", "right/t2"}


def test_merge_refuses_other_codecs_and_its_own_source(tmp_path, capsys):
    left = make_set(tmp_path / "left", [0])
    other = make_set(tmp_path / "other", [1], Codec("rvq_mel", 24_000, 75.0, 2, 16, {"books_sha256": "x"}))
    assert run("merge", left, other, "--out", tmp_path / "both") == 1
    assert "different codecs (settings" in capsys.readouterr().err
    assert run("merge", left, "--out", left) == 1
    assert run("merge", tmp_path / "nowhere", "--out", tmp_path / "both") == 1
    assert "no such data folder" in capsys.readouterr().err


def test_merge_of_a_damaged_set_leaves_nothing(tmp_path, capsys):
    left = make_set(tmp_path / "left", range(6))
    flip(left / "shard-00001.npy", 900)
    assert run("merge", left, "--out", tmp_path / "both") == 1
    assert "shard-00001.npy" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


def test_split_by_hash_csv_and_licence(tmp_path, capsys):
    root = make_set(tmp_path / "set", range(8))
    assert run("split", root, "--out", tmp_path / "a", "--val-fraction", "0.4") == 0
    assert {name: row[2] for name, row in contents(tmp_path / "a").items()} == {
        n: r[2] for n, r in contents(root).items()
    }
    assert 0 < sum(split == "val" for _, split, _ in contents(tmp_path / "a").values()) < 8
    (tmp_path / "facts.csv").write_text("track,split,licence\nt0,test,MIT\n")
    assert (
        run("split", root, "--out", tmp_path / "b", "--metadata", tmp_path / "facts.csv", "--only-split", "test") == 0
    )
    assert contents(tmp_path / "b") == {"t0": ("MIT", "test", codes(0).tobytes())}
    assert run("split", root, "--out", tmp_path / "c", "--licence", "CC0-1.0") == 0
    assert set(contents(tmp_path / "c")) == {"t1", "t3", "t5", "t7"}
    assert contents(tmp_path / "c")["t3"][1] == "val"
    for options, message in (
        ([], "nothing to do"),
        (["--licence", "MIT"], "no track is left"),
        (["--val-fraction", "2"], "val_fraction=2.0"),
    ):
        assert run("split", root, "--out", tmp_path / "d", *options) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "d").exists()


def test_a_merge_that_was_stopped_goes_on(tmp_path):
    left = make_set(tmp_path / "left", range(6))
    assert run("merge", left, "--out", tmp_path / "whole", "--shard-mb", "0.003") == 0
    stopped = ShardWriter(tmp_path / "both", CODEC, int(0.003 * 2**20))
    for seed in (0, 1, 2):
        stopped.add(codes(seed), f"t{seed}", licence="CC0-1.0" if seed % 2 else "CC-BY-4.0")
    stopped.abandon()
    assert run("merge", left, "--out", tmp_path / "both", "--shard-mb", "0.003") == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "both" / path.name).read_bytes() == path.read_bytes()
