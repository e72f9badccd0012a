"""Generated sound for the tests of audio, codecs and tokenization: nothing is downloaded, seeds are fixed."""

from pathlib import Path

import numpy as np
import soundfile


def music(seconds: float, rate: int, seed: int, channels: int = 1) -> np.ndarray:
    """Notes of a random scale with noise on top, `[N, channels]` float32: every second sounds different."""
    rng = np.random.default_rng(seed)
    out = rng.normal(0, 0.02, (round(seconds * rate), channels))
    for start in np.arange(0, seconds, 0.25):
        hertz = min(110 * 2 ** (rng.integers(0, 36) / 12), rate * 0.45)
        part = out[round(start * rate) : round((start + 0.5) * rate)]
        time = np.arange(len(part)) / rate
        note = np.sin(2 * np.pi * hertz * time) * np.exp(-6 * time)
        part += 0.3 * note[:, None] * rng.uniform(0.3, 1, channels)
    return np.clip(out, -1, 1).astype(np.float32)


def write(path: Path, seconds: float, rate: int, seed: int, channels: int = 1, **options: str) -> Path:
    """Write generated music; the format is the suffix's unless `format` is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, music(seconds, rate, seed, channels), rate, **options)
    return path


def mixed_folder(root: Path, seconds: float, copies: int = 1) -> tuple[set[str], dict[str, str]]:
    """A folder as users have them: all formats, rates, channels and names, and every kind of bad file.

    Returns:
        Track ids that must be in the set, and track id -> word that its reason must hold for those that must not.
    """
    good = set()
    for copy in range(copies):
        album = root / f"album {copy}"
        seed = 100 * copy
        write(album / "cd.wav", seconds, 44_100, seed, 2)
        write(album / "narrow.wav", seconds, 8_000, seed + 1)
        write(album / "surround.flac", seconds, 48_000, seed + 2, 6)
        write(album / "deep" / "er" / "song.ogg", seconds, 44_100, seed + 3, 2)
        write(album / "voice.opus", seconds, 48_000, seed + 4, 2, format="OGG", subtype="OPUS")
        write(album / "Päusé (live) #1.mp3", seconds, 44_100, seed + 5, 2)
        write(album / "float.wav", seconds, 24_000, seed + 6, 1, subtype="FLOAT")
        write(album / "really-flac.mp3", seconds, 22_050, seed + 7, 1, format="FLAC")
        write(album / "no-extension", seconds, 24_000, seed + 8, 1, format="WAV")
        good |= {path.relative_to(root).as_posix() for path in album.rglob("*") if path.is_file()}
    bad = {"empty.wav": "empty", "notes.flac": "decoded", "nan.wav": "not numbers", "inf.wav": "not numbers"}
    bad |= {"silence.wav": "silent", "blip.wav": "too short", "cut.flac": "cut|decoded", "cut.wav": "cut short"}
    bad |= {"cut.ogg": "cut short", "film.m4a": "decoded", "zero samples.wav": "too short", "integers.wav": "up to"}
    (root / "empty.wav").touch()
    (root / "notes.flac").write_text("these are liner notes, not music\n" * 50)
    (root / "liner notes.txt").write_text("passed over\n")
    (root / "cover.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    (root / "film.m4a").write_bytes(b"\x00\x00\x00\x20ftypM4A " + bytes(2000))
    for name, value in (("nan.wav", np.nan), ("inf.wav", -np.inf)):
        sound = music(seconds, 24_000, 900)
        sound[len(sound) // 2] = value
        soundfile.write(root / name, sound, 24_000, subtype="FLOAT")
    soundfile.write(root / "integers.wav", music(seconds, 24_000, 901) * 32_768, 24_000, subtype="FLOAT")
    soundfile.write(root / "silence.wav", np.zeros(24_000 * 3, np.float32), 24_000)
    soundfile.write(root / "zero samples.wav", np.zeros((0, 1), np.float32), 24_000)
    write(root / "blip.wav", 0.01, 24_000, 902)
    for name in ("cut.flac", "cut.wav", "cut.ogg"):
        whole = write(root / name, max(seconds, 3), 44_100, 903).read_bytes()
        (root / name).write_bytes(whole[: len(whole) * 2 // 3])
    return good, bad
