"""Reading audio: what is found, what is refused and why, and that reading changes nothing that is heard."""

import os
import re

import numpy as np
import pytest
import soundfile
from sounds import mixed_folder, music, write

from datamodules.audio import AudioError, find_audio, read_audio
from datamodules.track_facts import TrackFacts, assign_splits, read_facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("audio")
    return root, *mixed_folder(root, 2.0)


def test_finds_everything_that_may_be_audio_in_a_fixed_order(folder):
    root, good, bad = folder
    files, passed_over = find_audio([root])
    assert [file.track for file in files] == sorted(good | set(bad))
    assert passed_over == 2  # the text file and the picture


def test_good_files_are_read_and_bad_ones_name_their_fault(folder):
    root, good, bad = folder
    for file in find_audio([root])[0]:
        if file.track in good:
            audio_1N = read_audio(file.path, 24_000, min_seconds=1)
            assert audio_1N.dtype == np.float32
            assert audio_1N.shape[1] / 24_000 == pytest.approx(2.0, abs=0.08), file.track  # mp3 pads its frames
            assert 0.01 < np.abs(audio_1N).max() <= 1.5
        else:
            with pytest.raises(AudioError, match=bad[file.track]) as error:
                read_audio(file.path, 24_000, min_seconds=1)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 96_000])
def test_resampling_keeps_pitch_and_level(tmp_path, rate):
    time = np.arange(3 * rate) / rate
    soundfile.write(tmp_path / "a.wav", 0.5 * np.sin(2 * np.pi * 440 * time), rate, subtype="FLOAT")
    audio = read_audio(tmp_path / "a.wav", 24_000)[0]
    middle = audio[24_000:48_000]
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000, 48_000) / 24_000)
    assert len(audio) == 72_000
    assert np.abs(middle - expected).max() < 2e-3


def test_channels_are_averaged_over_block_borders(tmp_path):
    sound = music(12.0, 24_000, 1, 3)  # longer than one block of 2**18 frames
    soundfile.write(tmp_path / "a.wav", sound, 24_000, subtype="FLOAT")
    audio = read_audio(tmp_path / "a.wav", 24_000)
    np.testing.assert_allclose(audio[0], sound.mean(axis=1), atol=1e-6)


def test_excerpt_is_the_same_as_that_part_of_the_whole(tmp_path):
    path = write(tmp_path / "a.flac", 6.0, 24_000, 2)
    whole = read_audio(path, 24_000)
    part = read_audio(path, 24_000, start=0.5, seconds=2.0)
    np.testing.assert_array_equal(part[0], whole[0, 48_000:96_000])


def test_every_cut_of_a_wav_or_ogg_is_noticed(tmp_path):
    for name in ("a.wav", "a.ogg", "a.flac"):
        whole = write(tmp_path / name, 3.0, 24_000, 3).read_bytes()
        for cut in np.random.default_rng(0).integers(1, len(whole) - 1, 40):
            (tmp_path / name).write_bytes(whole[:cut])
            with pytest.raises(AudioError):
                read_audio(tmp_path / name, 24_000)


def test_random_damage_never_escapes_as_another_error(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("a.wav", "a.ogg", "a.flac", "a.mp3"):
        whole = write(tmp_path / name, 1.5, 24_000, 4).read_bytes()
        for _ in range(30):
            data = bytearray(whole)
            for place in rng.integers(0, len(data), 8):
                data[place] = rng.integers(0, 256)
            (tmp_path / name).write_bytes(bytes(data))
            try:
                audio_1N = read_audio(tmp_path / name, 24_000)
            except AudioError:
                continue
            assert np.isfinite(audio_1N).all()


def test_a_wav_written_to_a_pipe_is_whole(tmp_path):
    path = write(tmp_path / "a.wav", 2.0, 24_000, 5)
    data = bytearray(path.read_bytes())
    place = data.index(b"data") + 4
    data[place : place + 4] = b"\xff\xff\xff\xff"  # ffmpeg's size when it cannot seek back
    path.write_bytes(bytes(data))
    assert read_audio(path, 24_000).shape[1] == 48_000


@pytest.mark.parametrize(
    "subtype", ["PCM_U8", "PCM_24", "PCM_32", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610"]
)
def test_all_kinds_of_wav(tmp_path, subtype):
    path = write(tmp_path / "a.wav", 2.0, 8_000, 5, subtype=subtype)
    audio_1N = read_audio(path, 24_000, min_seconds=1)
    assert audio_1N.shape[1] == pytest.approx(48_000, abs=3000)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(AudioError):
        read_audio(path, 24_000, min_seconds=1)


def test_wav_with_other_chunks_even_unpadded(tmp_path):
    whole = write(tmp_path / "a.wav", 2.0, 24_000, 5).read_bytes()
    place = whole.index(b"data")
    for chunk in (b"LIST\x05\x00\x00\x00INFO!\x00", b"id3 \x04\x00\x00\x00tags", b"bext\x00\x00\x00\x00"):
        (tmp_path / "a.wav").write_bytes(whole[:place] + chunk + whole[place:])
        assert read_audio(tmp_path / "a.wav", 24_000).shape[1] == 48_000


def test_dead_links_and_vanished_files_are_reported_and_pipes_do_not_hang(tmp_path):
    write(tmp_path / "good.wav", 1.5, 8_000, 6)
    (tmp_path / "dead.wav").symlink_to(tmp_path / "nowhere.wav")
    os.mkfifo(tmp_path / "pipe.wav")
    files, _ = find_audio([tmp_path])
    assert [file.track for file in files] == ["dead.wav", "good.wav"]
    with pytest.raises(AudioError, match="cannot be read: No such file"):
        read_audio(files[0].path, 24_000)


def test_missing_source_and_two_files_of_one_id(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        find_audio([tmp_path / "nowhere"])
    for side in ("left", "right"):
        write(tmp_path / side / "x" / "song.wav", 1.0, 8_000, 6)
    with pytest.raises(ValueError, match=r"would both be track 'x/song.wav'"):
        find_audio([tmp_path / "left" / "x", tmp_path / "right" / "x"])
    files, _ = find_audio([tmp_path / "left", tmp_path / "right"])
    assert [file.track for file in files] == ["left/x/song.wav", "right/x/song.wav"]


def test_link_loops_end_and_links_to_neighbours_are_followed(tmp_path):
    write(tmp_path / "music" / "a" / "song.wav", 1.0, 8_000, 7)
    (tmp_path / "music" / "ab").symlink_to(tmp_path / "music" / "a")
    (tmp_path / "music" / "a" / "up").symlink_to(tmp_path / "music")
    files, _ = find_audio([tmp_path / "music"])
    assert "a/song.wav" in {file.track for file in files}
    assert len(files) < 10


def test_splits_depend_on_the_track_alone():
    tracks = [f"t{i}" for i in range(2000)]
    splits = assign_splits(tracks, 0.1, {})
    assert 150 < sum(split == "val" for split in splits.values()) < 250
    assert assign_splits(tracks[::-1][:1500], 0.1, {}).items() <= splits.items()
    few = assign_splits(["a", "b", "c"], 0.001, {})
    assert sorted(few.values()) == ["train", "train", "val"]
    chosen = next(track for track, split in few.items() if split == "val")
    assert assign_splits(["a", "b", "c"], 0.001, {}, usable=lambda track: track != chosen)[chosen] == "train"
    assert assign_splits(["a", "b"], 0.001, {"a": "val"}) == {"a": "val", "b": "train"}
    assert set(assign_splits(tracks, 0, {}).values()) == {"train"}


def test_sidecar_csv(tmp_path):
    path = tmp_path / "facts.csv"
    path.write_text("track,license,split,mood\na.wav,CC-BY-4.0,val,sad\nb.wav,,,\n")
    facts = read_facts(path, TrackFacts("MIT", "me"))
    assert facts["a.wav"] == TrackFacts("CC-BY-4.0", "me", split="val")
    assert facts["b.wav"] == TrackFacts("MIT", "me")
    for text, message in (
        ("name,licence\n", "no column track or path or file"),
        ("track,split\na,dev\n", "line 2: split='dev': choose from train, val, test"),
        ("track\na\na\n", "line 3: track 'a' is named twice"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_facts(path, TrackFacts())
