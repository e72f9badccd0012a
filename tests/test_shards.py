"""The shard set: what is written is what is read, whatever interrupts the writer."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from datamodules.shard_reader import ShardReader
from datamodules.shard_verify import verify_set
from datamodules.shard_writer import ShardWriter
from datamodules.shards import BUNDLED, Codec, ShardError, load_index

CODEC = Codec("test", 24000, 75.0, 4, 64, {"bandwidth": 6.0})


def music(seed: int, frames: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (4, frames), dtype=np.int16)


def write(root: Path, lengths: list[int], shard_bytes: int = 4096, start: int = 0) -> None:
    with ShardWriter(root, CODEC, shard_bytes) as writer:
        for i, frames in enumerate(lengths, start):
            writer.add(music(i, frames), f"t{i}", licence="CC0-1.0", attribution=f"a{i}", source=f"s{i}")


def write_and_stop(root: Path, lengths: list[int]) -> None:
    """Write some tracks, then be interrupted."""
    with ShardWriter(root, CODEC, 4096) as writer:
        for i, frames in enumerate(lengths):
            writer.add(music(i, frames), f"t{i}", licence="CC0-1.0", attribution=f"a{i}", source=f"s{i}")
        raise KeyboardInterrupt


def read_all(root: Path) -> dict[str, np.ndarray]:
    index = load_index(root)
    reader = ShardReader(root, index)
    return {
        track.name: reader.read_track(number, place)
        for number, shard in enumerate(index.shards)
        for place, track in enumerate(shard.tracks)
    }


def folder_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


def test_round_trip_keeps_codes_and_rows(tmp_path):
    lengths = [100, 7, 1, 900, 350, 351]
    write(tmp_path, lengths)
    read = read_all(tmp_path)
    assert list(read) == [f"t{i}" for i in range(6)]
    for i, frames in enumerate(lengths):
        np.testing.assert_array_equal(read[f"t{i}"], music(i, frames))
    index = load_index(tmp_path)
    assert len(index.shards) == 2
    assert index.shards[0].tracks[1].attribution == "a1"
    assert index.hours == pytest.approx(sum(lengths) / 75 / 3600)
    for shard in index.shards:  # any tool can open the files
        codes = np.load(tmp_path / shard.file)
        assert (codes.dtype, codes.shape) == (np.dtype("<i2"), (shard.frames, 4))
        np.testing.assert_array_equal(codes.min(0), shard.code_min)
        np.testing.assert_array_equal(codes.max(0), shard.code_max)
        offsets = np.load(tmp_path / shard.offsets_file)
        np.testing.assert_array_equal(np.diff(offsets), [track.frames for track in shard.tracks])
    assert verify_set(tmp_path) == []


def test_splits_lie_in_shards_of_their_own(tmp_path):
    with ShardWriter(tmp_path, CODEC) as writer:
        for i in range(6):
            writer.add(music(i, 50), f"t{i}", split="val" if i % 3 == 0 else "train")
    index = load_index(tmp_path)
    names = {split: [t.name for shard in index.of_split(split) for t in shard.tracks] for split in index.splits}
    assert names == {"val": ["t0", "t3"], "train": ["t1", "t2", "t4", "t5"]}


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4, 5])
def test_interrupted_writer_goes_on_and_ends_with_the_same_files(tmp_path, stop):
    lengths = [300, 400, 10, 700, 20]
    write(tmp_path / "whole", lengths)
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(tmp_path / "cut", lengths[:stop])
    with pytest.raises(FileNotFoundError, match=r"index\.json: no index"):
        load_index(tmp_path / "cut")
    with ShardWriter(tmp_path / "cut", CODEC, 4096) as writer:
        assert writer.done == {f"t{i}" for i in range(stop)}
        for i, frames in enumerate(lengths):
            if f"t{i}" not in writer:
                writer.add(music(i, frames), f"t{i}", licence="CC0-1.0", attribution=f"a{i}", source=f"s{i}")
    assert folder_bytes(tmp_path / "cut") == folder_bytes(tmp_path / "whole")


def test_killed_writer_goes_on(tmp_path):
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
from test_shards import CODEC, music
from datamodules.shard_writer import ShardWriter
with ShardWriter({str(tmp_path / "cut")!r}, CODEC, 4096) as writer:
    for i in range(100000):
        writer.add(music(i, 100 + i % 50), f"t{{i}}")
        print(i, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        seen = [int(next(child.stdout)) for _ in range(40)]
        time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    with ShardWriter(tmp_path / "cut", CODEC, 4096) as writer:
        assert {f"t{i}" for i in seen} <= writer.done
        count = len(writer.done)
        writer.add(music(count, 100 + count % 50), f"t{count}")
    read = read_all(tmp_path / "cut")
    assert list(read) == [f"t{i}" for i in range(count + 1)]
    for i in range(count + 1):
        np.testing.assert_array_equal(read[f"t{i}"], music(i, 100 + i % 50))
    assert verify_set(tmp_path / "cut") == []


@pytest.mark.parametrize("damage", ["torn journal", "torn data", "renamed", "orphan"])
def test_every_torn_state_is_taken_up(tmp_path, damage):
    write(tmp_path / "whole", [300, 100, 20])
    root = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(root, [300, 100])
    shard = root / "shard-00000.npy.tmp"
    if damage == "torn journal":
        with (root / "journal.jsonl").open("ab") as file:
            file.write(b'{"shard": 0, "split": "tr')
    elif damage == "torn data":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "renamed":
        shard.rename(root / "shard-00000.npy")
    else:
        (root / "shard-00001.npy.tmp").write_bytes(b"begun, never recorded")
    with ShardWriter(root, CODEC, 4096) as writer:
        assert writer.done == ({"t0"} if damage == "torn data" else {"t0", "t1"})
        for i, frames in enumerate([300, 100, 20]):
            if f"t{i}" not in writer:
                writer.add(music(i, frames), f"t{i}", licence="CC0-1.0", attribution=f"a{i}", source=f"s{i}")
    assert folder_bytes(root) == folder_bytes(tmp_path / "whole")


def test_a_finished_set_can_be_added_to_and_stays_whole_meanwhile(tmp_path):
    write(tmp_path, [100, 200])
    before = read_all(tmp_path)
    with ShardWriter(tmp_path, CODEC, 4096) as writer:
        assert writer.done == {"t0", "t1"}
        writer.add(music(2, 50), "t2")
        assert list(read_all(tmp_path)) == list(before)
    assert list(read_all(tmp_path)) == ["t0", "t1", "t2"]


def test_closing_without_news_changes_nothing(tmp_path):
    write(tmp_path, [100, 200])
    before = folder_bytes(tmp_path)
    with ShardWriter(tmp_path, CODEC):
        pass
    assert folder_bytes(tmp_path) == before


def test_a_failed_write_leaves_what_was_recorded(tmp_path, monkeypatch):
    import datamodules.shard_writer as module

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with ShardWriter(tmp_path, CODEC) as writer:
        writer.add(music(0, 100), "t0")
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                writer.add(music(1, 100), "t1")
        writer.add(music(2, 100), "t2")
    read = read_all(tmp_path)
    assert list(read) == ["t0", "t2"]
    np.testing.assert_array_equal(read["t2"], music(2, 100))


BAD_CODES = [
    (np.zeros((4, 5), np.float32), r"must be integers \[K, T\]"),
    (np.zeros((4, 0), np.int16), "T > 0"),
    (np.zeros((3, 5), np.int16), "3 codebooks, codec 'test' has 4"),
    (np.zeros((5, 4), np.int16), "transposed"),
    (np.full((4, 5), 64, np.uint16), r"code 64 outside 0\.\.63 at codebook 0, frame 0 \(20 such codes\)"),
    (np.array([[0] * 5] * 3 + [[0, 0, -1, 0, 0]]), "code -1 .* codebook 3, frame 2"),
]


@pytest.mark.parametrize(("codes", "message"), BAD_CODES)
def test_codes_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, codes, message):
    with ShardWriter(tmp_path, CODEC) as writer:
        writer.add(music(0, 10), "t0")
        with pytest.raises(ValueError, match=message):
            writer.add(codes, "t1")
    assert list(read_all(tmp_path)) == ["t0"]


def test_refusals_name_what_is_wrong(tmp_path):
    write(tmp_path, [100])
    other = Codec("test", 24000, 150.0, 4, 64, {"bandwidth": 6.0})
    with pytest.raises(ValueError, match=r"another codec \(frame_rate: 75.0 against 150.0\)"):
        ShardWriter(tmp_path, other)
    with ShardWriter(tmp_path, CODEC) as writer:
        with pytest.raises(ValueError, match="'t0': already in"):
            writer.add(music(0, 10), "t0")
        with pytest.raises(ValueError, match="another writer"):
            ShardWriter(tmp_path, CODEC)
    with pytest.raises(ValueError, match="nothing to index"), ShardWriter(tmp_path / "empty", CODEC):
        pass
    with pytest.raises(FileNotFoundError, match="no such data folder"):
        load_index(tmp_path / "absent")
    with pytest.raises(ValueError, match="codebooks=0"):
        Codec("test", 24000, 75.0, 0, 64, {})
    with pytest.raises(ValueError, match="plain JSON"):
        Codec("test", 24000, 75.0, 4, 64, {"x": object()})


def edited(root: Path, change) -> None:
    data = json.loads((root / "index.json").read_text())
    change(data)
    (root / "index.json").write_text(json.dumps(data))


INDEX_EDITS = [
    (lambda d: d["shards"][0]["tracks"][0].update(frames=101), "sum to 301, the shard's frames are 300"),
    (lambda d: d["shards"][0].update(frames=301), "sum to 300, the shard's frames are 301"),
    (lambda d: d["codec"].update(codebooks=8), "300 frames of 8 need"),
    (lambda d: d["codec"].update(frame_rate=150.0), "changed after it was written"),
    (lambda d: d["shards"][0]["tracks"][0].update(licence="CC0"), "changed after it was written"),
    (lambda d: d.update(version=2), "version is 2; this version reads only 1"),
    (lambda d: d.update(layout="codebooks,frames"), "layout is"),
    (lambda d: d.update(dtype="uint16"), "dtype is 'uint16'"),
    (lambda d: d.pop("shards"), "key 'shards' is missing"),
    (lambda d: d["shards"][0].update(bytes="many"), "bytes is 'many', not int"),
    (lambda d: d["shards"].append(d["shards"][0]), "listed twice"),
    (lambda d: d["shards"][0].update(file="../x.npy"), "outside the folder"),
    (lambda d: d["shards"][0].update(code_max=[64] * 4), r"outside 0\.\.63"),
]


@pytest.mark.parametrize(("change", "message"), INDEX_EDITS)
def test_an_edited_index_is_refused_with_a_sentence(tmp_path, change, message):
    write(tmp_path, [100, 200], 1 << 20)
    edited(tmp_path, change)
    with pytest.raises(ShardError, match=message) as caught:
        load_index(tmp_path)
    assert str(tmp_path / "index.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(verify_set(tmp_path)) == 1


def test_bundled_set_is_whole_licensed_and_split_by_track():
    index = load_index("bundled")
    assert verify_set("bundled") == []
    assert 45 < index.hours * 60 < 60
    assert index.codec.codebooks == 8
    tracks = [track for shard in index.shards for track in shard.tracks]
    assert len({track.name for track in tracks}) == len(tracks)
    attribution = (BUNDLED / "ATTRIBUTION.md").read_text()
    for track in tracks:
        assert track.licence in ("CC-BY-SA-3.0", "CC-BY-SA-3.0+ or GPL-2+", "public-domain", "CC-BY-3.0")
        assert track.attribution != "unknown"
        assert f"| {track.name} |" in attribution
        assert track.attribution in attribution
    assert len({track.name.split("__")[0] for track in tracks}) >= 4
    assert {shard.split for shard in index.shards} == {"train", "val"}
