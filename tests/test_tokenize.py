"""The tokenize verb: a mixed folder, killed and resumed, bad files left out, and what it says when it cannot work."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sounds import mixed_folder, write

from datamodules.audio import find_audio, read_audio
from datamodules.codecs import CodecOptions, build_codec
from datamodules.shard_reader import ShardReader
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec, load_index
from experiments import tokenize

ROOT = Path(__file__).parent.parent
SMALL = ["--codec", "rvq_mel", "--fit", "--fit-frames", "800", "--codebook-size", "16", "--num-codebooks", "2"]


def run(*args, workers=0):
    return tokenize.main([*map(str, args), "--workers", str(workers)])


def start(*args, workers=1, env=None):
    command = [sys.executable, "-m", "experiments", "tokenize", *map(str, args), "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=pipe, stdout=pipe, text=True)


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.endswith(".tmp")}


def tracks_of(folder):
    index = load_index(folder)
    reader = ShardReader(folder, index)
    return {
        track.name: (track, shard.split, reader.read_track(number, place))
        for number, shard in enumerate(index.shards)
        for place, track in enumerate(shard.tracks)
    }


def wait_for_tracks(folder, count, process, limit=60):
    """Wait until `count` tracks are on record in an unfinished set."""
    end = time.monotonic() + limit
    while time.monotonic() < end and process.poll() is None:
        journal = folder / "journal.jsonl"
        if journal.exists() and journal.read_bytes().count(b'"track"') >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"{count} tracks were not written before the end or the limit")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A mixed folder and the set made of it without interruption."""
    root = tmp_path_factory.mktemp("mixed")
    good, bad = mixed_folder(root / "music", 2.0)
    code = run(root / "music", "--out", root / "set", *SMALL, "--licence", "CC0-1.0", "--source", "generated")
    return root, good, bad, code


def test_good_files_are_in_and_bad_ones_are_named(mixed):
    root, good, bad, code = mixed
    assert code == 3
    tracks = tracks_of(root / "set")
    assert set(tracks) == good
    codec = build_codec(CodecOptions("rvq_mel", books=str(root / "set" / "books.npz"), num_codebooks=2))
    assert load_index(root / "set").codec == codec.spec
    for name, (track, _, codes_KT) in tracks.items():
        np.testing.assert_array_equal(codes_KT, codec.encode(read_audio(root / "music" / name, 24_000)))
        assert (track.licence, track.source) == ("CC0-1.0", "generated")
    assert {split for _, split, _ in tracks.values()} == {"train", "val"}
    rows = {row["track"]: row["reason"] for row in csv.DictReader((root / "set" / "rejected.csv").open())}
    assert set(rows) == set(bad)
    assert any(word in rows["cut.flac"] for word in ("cut", "decoded"))


def test_killed_half_way_it_goes_on_and_ends_the_same(mixed, tmp_path):
    root, _, _, _ = mixed
    out = tmp_path / "set"
    args = (root / "music", "--out", out, *SMALL, "--licence", "CC0-1.0", "--source", "generated")
    for count in (2, 5):
        process = start(*args)
        wait_for_tracks(out, count, process)
        process.kill()
        process.wait(10)
        assert not (out / "index.json").exists()  # nothing reads as whole
    assert run(*args) == 3
    assert content(out) == content(root / "set")


def test_workers_make_the_same_set_and_do_not_outlive_a_kill(mixed, tmp_path):
    root, _, _, _ = mixed
    out = tmp_path / "set"
    args = (root / "music", "--out", out, *SMALL, "--licence", "CC0-1.0", "--source", "generated")
    process = start(*args, workers=2)
    wait_for_tracks(out, 1, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait(10)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(children) >= 2
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    process = start(*args, workers=2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert content(out) == content(root / "set")


def test_ctrl_c_stops_with_a_sentence(mixed, tmp_path):
    root, _, _, _ = mixed
    process = start(root / "music", "--out", tmp_path / "set", *SMALL)
    wait_for_tracks(tmp_path / "set", 1, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors


def test_a_file_that_crashes_the_decoder_is_left_out(tmp_path):
    for name in ("a", "crash", "z"):
        write(tmp_path / "music" / f"{name}.wav", 1.5, 24_000, 1)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, soundfile\n"
        "class Crashing(soundfile.SoundFile):\n"
        "    def __init__(self, file, *args, **kwargs):\n"
        "        if 'crash' in os.path.basename(str(file.name)) and os.environ.get('IN_WORKER'): os.abort()\n"
        "        super().__init__(file, *args, **kwargs)\n"
        "soundfile.SoundFile = Crashing\n"
    )
    shutil.copy(make_books(tmp_path), tmp_path / "books.npz")
    env = {"PYTHONPATH": str(tmp_path / "site"), "IN_WORKER": "1"}
    args = ("--codec", "rvq_mel", "--books", tmp_path / "books.npz", "--num-codebooks", "2", "--val-fraction", "0")
    process = start(tmp_path / "music", "--out", tmp_path / "set", *args, workers=2, env=env)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "crash.wav: crashed the process that read it" in errors
    assert set(tracks_of(tmp_path / "set")) == {"a.wav", "z.wav"}


def make_books(tmp_path):
    write(tmp_path / "fit" / "a.wav", 12, 24_000, 9)
    assert run(tmp_path / "fit", "--out", tmp_path / "fitted", *SMALL, "--val-fraction", "0") == 0
    return tmp_path / "fitted" / "books.npz"


def test_run_again_it_adds_what_is_new_and_only_that(tmp_path):
    write(tmp_path / "music" / "a.wav", 12, 24_000, 1)
    args = (tmp_path / "music", "--out", tmp_path / "set", *SMALL, "--val-fraction", "0")
    assert run(*args) == 0
    before = content(tmp_path / "set")
    assert run(*args) == 0
    assert content(tmp_path / "set") == before
    write(tmp_path / "music" / "0.wav", 2, 24_000, 2)
    assert run(*args) == 0
    assert set(tracks_of(tmp_path / "set")) == {"a.wav", "0.wav"}
    for name in ("shard-00000.npy", "books.npz"):
        assert content(tmp_path / "set")[name] == before[name]


def test_other_options_for_a_set_begun_are_refused(tmp_path, capsys):
    make_books(tmp_path)
    fit, out = tmp_path / "fit", tmp_path / "fitted"
    before = content(out)
    for options, message in (
        ([*SMALL, "--val-fraction", "0", "--min-seconds", "2"], "--min-seconds was 1.0, is 2.0"),
        (["--codec", "encodec_24khz"], "--codec was rvq_mel, is encodec_24khz"),
    ):
        assert run(fit, "--out", out, *options) == 1
        assert message in capsys.readouterr().err
    assert content(out) == before


def test_sidecar_gives_licences_and_splits(tmp_path):
    books = make_books(tmp_path)
    for name in ("a", "b", "c"):
        write(tmp_path / "music" / f"{name}.wav", 1.5, 24_000, 1)
    (tmp_path / "facts.csv").write_text("path,licence,attribution,split\na.wav,CC-BY-4.0,Ann,val\n")
    args = ("--codec", "rvq_mel", "--books", books, "--num-codebooks", "2", "--metadata", tmp_path / "facts.csv")
    assert run(tmp_path / "music", "--out", tmp_path / "set", *args, "--licence", "CC0-1.0") == 0
    tracks = tracks_of(tmp_path / "set")
    assert {name: (track.licence, track.attribution, split) for name, (track, split, _) in tracks.items()} == {
        "a.wav": ("CC-BY-4.0", "Ann", "val"),
        "b.wav": ("CC0-1.0", "unknown", "train"),
        "c.wav": ("CC0-1.0", "unknown", "train"),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere", *SMALL], "nowhere: no such file or folder"),
        (["empty", *SMALL], "no audio below"),
        (["bad", *SMALL], "none of the files can be read"),
        (["music", "--codec", "mp3"], "codec='mp3': unknown; choose from rvq_mel"),
        (["music", "--codec", "rvq_mel"], "give --fit"),
        (["music", "--codec", "encodec_24khz", "--fit"], "its own quantizer"),
        (["music", "--codec", "dac_24khz", "--weights", "./no/folder"], "no such folder"),
        (["music", *SMALL, "--device", "cuda"], "runs on the CPU only"),
        (["music", *SMALL, "--val-fraction", "1.5"], "val_fraction=1.5"),
        (["music", *SMALL, "--min-seconds", "nan"], "--min-seconds nan"),
        (["music", *SMALL, "--shard-mb", "0"], "--shard-mb 0.0"),
        (["music", *SMALL, "--metadata", "nowhere.csv"], "nowhere.csv: cannot be read"),
        (["music", "--codec", "rvq_mel", "--fit", "--codebook-size", "1024"], "frames cannot fit books of 1024 codes"),
        (["music", "--codec", "rvq_mel", "--books", "music/a.wav"], "not a file of books"),
    ],
)
def test_what_cannot_work_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "music" / "a.wav", 4, 24_000, 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.wav").write_text("no")
    assert run(*options, "--out", "set") == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in errors if line.startswith("error: ")]) == 1
    assert errors[-1].startswith("error: ")
    assert message in errors[-1]
    assert not (tmp_path / "set").exists()


def test_a_folder_with_other_things_is_left_alone(tmp_path, capsys):
    write(tmp_path / "music" / "a.wav", 12, 24_000, 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    assert run(tmp_path / "music", "--out", tmp_path / "thesis", *SMALL) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_killed_between_a_full_shard_and_its_closing(tmp_path, monkeypatch):
    codec = Codec("rvq_mel", 24_000, 75.0, 2, 16, {})
    codes_KT = np.ones((2, 300), np.int16)

    def fill(folder, names):
        with ShardWriter(folder, codec, 2000) as writer:
            for name in names:
                if name not in writer:
                    writer.add(codes_KT, name)

    fill(tmp_path / "whole", "abcde")
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_finish", lambda self, split: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            fill(tmp_path / "set", "abcde")
    fill(tmp_path / "set", "abcde")
    assert content(tmp_path / "set") == content(tmp_path / "whole")


@pytest.mark.parametrize("left", ["books.npz.tmp", "tokenize.json.tmp"])
def test_killed_before_the_first_track(tmp_path, left):
    write(tmp_path / "music" / "a.wav", 12, 24_000, 1)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / left).write_bytes(b"half")
    for out in ("set", "whole"):
        assert run(tmp_path / "music", "--out", tmp_path / out, *SMALL, "--val-fraction", "0") == 0
    assert content(tmp_path / "set") == content(tmp_path / "whole")


@pytest.mark.slow
def test_twenty_minutes_of_mixed_audio_killed_resumed_verified_and_trained_on(tmp_path):
    good, bad = mixed_folder(tmp_path / "music", 45.0, copies=3)  # 27 files, 20 minutes
    options = ("--codec", "rvq_mel", "--fit", "--fit-frames", "20000", "--shard-mb", "0.5")
    whole, out = tmp_path / "whole", tmp_path / "set"
    assert run(tmp_path / "music", "--out", whole, *options, workers=2) == 3
    process = start(tmp_path / "music", "--out", out, *options, workers=2)
    wait_for_tracks(out, 13, process, limit=600)
    process.kill()
    process.wait(10)
    process = start(tmp_path / "music", "--out", out, *options, workers=2)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 3, errors
    assert content(out) == content(whole)
    assert set(tracks_of(out)) == good
    assert load_index(out).hours * 60 == pytest.approx(20.25, rel=0.01)
    rows = {row["track"] for row in csv.DictReader((out / "rejected.csv").open())}
    assert rows == set(bad)
    verbs = [sys.executable, "-m", "experiments"]
    assert subprocess.run([*verbs, "shards", "verify", str(out)], cwd=ROOT, check=False).returncode == 0
    smoke = ("-c", str(ROOT / "experiments" / "configs" / "smoke.yaml"))
    train = [*verbs, "fit", *smoke, "--data.data_dir", str(out), "--trainer.default_root_dir", str(tmp_path)]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((out / "tokenize.json").read_text())["codec"] == "rvq_mel"
    assert find_audio([tmp_path / "music"])[1] == 2
