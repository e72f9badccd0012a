"""Codes that others made: every layout comes out the same, every fault names its file and row."""

import re

import numpy as np
import pytest

from datamodules.imports import orient, read_fairseq, read_npy, read_parquet
from datamodules.set_statistics import read_tracks
from datamodules.shard_reader import ShardReader
from datamodules.shards import Codec, load_index
from experiments import shard_sets

CODEC = Codec("encodec_24khz", 24_000, 75.0, 4, 1024, {})
ENCODEC = ["--codec", "encodec_24khz", "--codebooks", "4"]


def codes(seed, frames=50):
    return np.random.default_rng(seed).integers(0, 1024, (4, frames))


def write_fairseq(folder, split, tracks, manifest=True):
    folder.mkdir(exist_ok=True)
    for book in range(4):
        text = "".join(" ".join(map(str, track[book])) + "\n" for track in tracks)
        (folder / f"{split}.codec_{book}").write_text(text)
    if manifest:
        rows = "".join(f"{split}/{i}.wav\t{track.shape[1] * 320 - 100}\n" for i, track in enumerate(tracks))
        (folder / f"{split}.tsv").write_text("/data/audio\n" + rows)


def contents(folder):
    reader = ShardReader(folder, load_index(folder))
    return {track.name: (split, codes_KT) for track, split, codes_KT in read_tracks(reader)}


def test_fairseq_text_becomes_a_set_with_its_splits(tmp_path):
    write_fairseq(tmp_path / "mert", "train", [codes(0), codes(1, 70)])
    write_fairseq(tmp_path / "mert", "valid", [codes(2)])
    argv = ["import", "fairseq", str(tmp_path / "mert"), "--out", str(tmp_path / "set"), *ENCODEC]
    assert shard_sets.main([*argv, "--setting", "bandwidth_kbps=6.0", "--licence", "CC0-1.0"]) == 0
    found = contents(tmp_path / "set")
    assert {name: split for name, (split, _) in found.items()} == {
        "train/0.wav": "train",
        "train/1.wav": "train",
        "valid/0.wav": "val",
    }
    np.testing.assert_array_equal(found["train/1.wav"][1], codes(1, 70))
    assert load_index(tmp_path / "set").codec.settings == {"bandwidth_kbps": "6.0"}


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("train.codec_2", lambda text: text.replace(" ", " x", 1), r"train.codec_2: line 1: not whole numbers"),
        (
            "train.codec_3",
            lambda text: text.rsplit(" ", 1)[0] + "\n",
            r"line 2: .*different lengths: \[50, 50, 50, 49\]",
        ),
        ("train.codec_1", lambda text: text.split("\n")[0] + "\n", r"train.codec_1: ends after 1 lines"),
        (
            "train.codec_0",
            lambda text: "1024" + text[text.index(" ") :],
            r"line 1: code 1024 outside 0..1023 at codebook 0",
        ),
        (
            "train.tsv",
            lambda text: text.replace("\t15900", "\t32000", 1),
            r"50 frames, the manifest's 32000 samples make 100",
        ),
        ("train.tsv", lambda text: text + "more.wav\t1000\n", r"names 3 tracks, train.codec_0 has 2 lines"),
        ("train.tsv", lambda text: text.replace("\t", " "), r"train.tsv: line 2: must be a path, a tab"),
        ("train.codec_3", None, r"train.codec_3 missing"),
        ("train.codec_4", lambda text: "1 2\n", r"a codebook more than the 4"),
    ],
)
def test_fairseq_faults_name_file_and_line(tmp_path, capsys, file, edit, message):
    write_fairseq(tmp_path / "mert", "train", [codes(0), codes(1)])
    path = tmp_path / "mert" / file
    if edit is None:
        path.unlink()
    else:
        path.write_text(edit(path.read_text() if path.exists() else ""))
    argv = ["import", "fairseq", str(tmp_path / "mert"), "--out", str(tmp_path / "set"), *ENCODEC]
    assert shard_sets.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "set").exists()


def test_bad_tracks_are_left_out_only_when_asked_and_counted(tmp_path, capsys):
    write_fairseq(tmp_path / "mert", "train", [codes(0), codes(1), codes(2)], manifest=False)
    path = tmp_path / "mert" / "train.codec_0"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "9999 " + lines[1].split(" ", 1)[1], lines[2]]) + "\n")
    argv = ["import", "fairseq", str(tmp_path / "mert"), "--out", str(tmp_path / "set"), *ENCODEC]
    assert shard_sets.main([*argv, "--skip-bad"]) == 3
    assert "left out: " in capsys.readouterr().err
    assert set(contents(tmp_path / "set")) == {"train/00000000", "train/00000002"}


def test_one_npy_a_track_in_any_order_of_axes(tmp_path):
    (tmp_path / "npy" / "deep").mkdir(parents=True)
    np.save(tmp_path / "npy" / "a.npy", codes(0))
    np.save(tmp_path / "npy" / "b.npy", codes(1).T.astype(np.uint16))
    np.save(tmp_path / "npy" / "deep" / "c.npy", codes(2)[None].astype(np.int64))
    np.save(tmp_path / "npy" / "flat.npy", codes(3).T.reshape(-1))
    argv = ["import", "npy", str(tmp_path / "npy"), "--out", str(tmp_path / "set"), *ENCODEC, "--val-fraction", "0.9"]
    assert shard_sets.main(argv) == 0
    found = contents(tmp_path / "set")
    for seed, name in enumerate(("a", "b", "deep/c", "flat")):
        np.testing.assert_array_equal(found[name][1], codes(seed))
    assert "val" in {split for split, _ in found.values()}


def test_npy_that_cannot_be_codes_gives_a_reason(tmp_path):
    np.save(tmp_path / "float.npy", codes(0).astype(np.float32))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "shape.npy", np.zeros((3, 50), np.int16))
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.int16))
    (tmp_path / "text.npy").write_text("no")
    (tmp_path / "cut.npy").write_bytes((tmp_path / "shape.npy").read_bytes()[:-9])
    reasons = {track.name: track.reason for track in read_npy(tmp_path, CODEC)}
    words = {
        "float": "float32",
        "object": "not an array of numbers",
        "shape": "no axis of 4",
        "square": "--axes",
        "text": "",
        "cut": "",
    }
    for name, word in words.items():
        assert reasons[name], name
        assert word in reasons[name]
    assert orient(np.zeros((4, 4), np.int16), 4, "tk").shape == (4, 4)


@pytest.mark.parametrize("layout", ["kt", "tk", "flat"])
def test_parquet_as_datasets_writes_it(tmp_path, layout):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    arrange = {"kt": lambda c: c.tolist(), "tk": lambda c: c.T.tolist(), "flat": lambda c: c.T.reshape(-1).tolist()}[
        layout
    ]
    (tmp_path / "data").mkdir()
    for file, seeds in (("train-00000-of-00001", (0, 1)), ("validation-00000-of-00001", (2,))):
        table = pyarrow.table(
            {
                "id": [f"song {seed}" for seed in seeds],
                "audio_codes": [arrange(codes(seed)) for seed in seeds],
                "license": ["CC-BY-4.0", None][: len(seeds)],
            }
        )
        parquet.write_table(table, tmp_path / "data" / f"{file}.parquet")
    argv = [
        "import",
        "parquet",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "set"),
        *ENCODEC,
        "--licence",
        "CC0-1.0",
    ]
    assert shard_sets.main(argv) == 0
    found = contents(tmp_path / "set")
    assert {name: split for name, (split, _) in found.items()} == {
        "song 0": "train",
        "song 1": "train",
        "song 2": "val",
    }
    for seed in range(3):
        np.testing.assert_array_equal(found[f"song {seed}"][1], codes(seed))
    licences = {track.name: track.licence for shard in load_index(tmp_path / "set").shards for track in shard.tracks}
    assert licences == {"song 0": "CC-BY-4.0", "song 1": "CC0-1.0", "song 2": "CC-BY-4.0"}


def test_parquet_faults_name_file_and_row(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: no column codes or .*; it has text"):
        list(read_parquet(tmp_path, CODEC))
    ragged = pyarrow.table({"codes": [codes(0).tolist(), [[1, 2], [1], [1], [1]], None]})
    parquet.write_table(ragged, tmp_path / "a.parquet")
    tracks = list(read_parquet(tmp_path, CODEC))
    assert [track.reason for track in tracks] == ["", "the codebooks have different lengths: [2, 1, 1, 1]", "no codes"]
    assert tracks[1].place.endswith("a.parquet: row 1")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        list(read_parquet(tmp_path / "a.parquet", CODEC))


def test_nothing_to_import_is_one_line(tmp_path, capsys):
    for name, word in (("fairseq", "no SPLIT.codec_0"), ("npy", "no .npy"), ("parquet", "no .parquet")):
        assert shard_sets.main(["import", name, str(tmp_path), "--out", str(tmp_path / "set"), *ENCODEC]) == 1
        assert word in capsys.readouterr().err
        assert not (tmp_path / "set").exists()
    with pytest.raises(ValueError, match=r"no SPLIT.codec_0"):
        next(read_fairseq(tmp_path, CODEC))
