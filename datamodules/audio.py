"""Finding and reading audio files: any folder, any rate, any number of channels, to mono float32 at one rate.

Decoding is soundfile's (its own libsndfile: wav, flac, ogg, opus, mp3, aiff, ...), resampling soxr's, both block by
block. A file that cannot be trusted whole raises `AudioError` with its reason.

Legend: N samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.containers import cut_short, looks_like_audio

EXTENSIONS = frozenset(
    "." + name
    for name in (
        *("wav", "wave", "flac", "ogg", "oga", "opus", "mp3", "aif", "aiff", "aifc", "au", "snd", "w64", "rf64", "caf"),
        *("m4a", "aac", "wma", "mp4", "mpc", "ape", "wv"),  # not decoded: named as left out rather than passed over
    )
)
BLOCK_FRAMES = 1 << 18
LOUDEST = 16.0
EXACT_LENGTH = frozenset(("WAV", "WAVEX", "RF64", "W64", "FLAC", "AIFF", "AU", "CAF"))

Audio = npt.NDArray[np.float32]


class AudioError(ValueError):
    """A file that must not be trained on; the message is the reason, without the path."""


@dataclass(frozen=True, slots=True)
class AudioFile:
    """One file to read.

    Attributes:
        track: its id, the path relative to the folder it was found in, with "/".
        path: where it is.
        bytes: its size.
    """

    track: str
    path: Path
    bytes: int


def find_audio(sources: Sequence[str | Path]) -> tuple[list[AudioFile], int]:
    """Find the audio below some folders, recursively; files may be given directly too.

    A file counts as audio by its extension or by its first bytes, so that one under a wrong name is still found and a
    text file called `.wav` is reported later rather than passed over.

    Args:
        sources: folders or files.

    Returns:
        The files, ordered by track id, and how many other files were passed over.

    Raises:
        ValueError: a source is missing, or two files would get the same track id.
    """
    found: dict[str, AudioFile] = {}
    passed_over = 0
    for source in dict.fromkeys(Path(source) for source in sources):
        if not source.exists():
            raise ValueError(f"{source}: no such file or folder")
        prefix = f"{source.resolve().name}/" if len(sources) > 1 and source.is_dir() else ""
        for path in _walk(source):
            if path.suffix.lower() not in EXTENSIONS and not looks_like_audio(path):
                passed_over += 1
                continue
            relative = path.relative_to(source).as_posix() if source.is_dir() else path.name
            _add(found, AudioFile(_printable(prefix + relative), path, _bytes(path)))
    return [found[track] for track in sorted(found)], passed_over


def _add(found: dict[str, AudioFile], file: AudioFile) -> None:
    other = found.setdefault(file.track, file)
    if other is not file and not os.path.samefile(other.path, file.path):
        raise ValueError(f"{other.path} and {file.path} would both be track {file.track!r}; give their common folder")


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _printable(name: str) -> str:
    """File names that are not UTF-8 reach Python as lone surrogates, which JSON files cannot hold."""
    return name.encode("utf-8", "backslashreplace").decode()


def _walk(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    for folder, folders, names in os.walk(source, followlinks=True):
        here = Path(folder).resolve()
        folders[:] = sorted(f for f in folders if not here.is_relative_to(Path(folder, f).resolve()))  # link loops
        for name in sorted(names):
            path = Path(folder, name)
            dead_link = path.is_symlink() and not path.exists()  # reported later; pipes and sockets are not
            if not name.startswith("._") and (path.is_file() or dead_link):  # "._x.wav": macOS resource forks
                yield path


def read_audio(
    path: str | Path, sample_rate: int, *, min_seconds: float = 0.0, start: float = 0.0, seconds: float | None = None
) -> Audio:
    """Read one file as mono at one rate.

    Channels are averaged. With `seconds`, an excerpt from `start` (0..1, share of what could be the excerpt's start).

    Args:
        path: the file.
        sample_rate: wanted, Hz.
        min_seconds: shorter files are refused.
        start: place of the excerpt, 0..1.
        seconds: length of the excerpt; None reads all.

    Returns:
        Audio `[1, N]`.

    Raises:
        AudioError: empty, not audio, cut short, too short, silent, or with samples that are not numbers.
        ImportError: soundfile or soxr is not installed.
    """
    import soundfile

    path = Path(path)
    _check_container(path)
    try:
        with path.open("rb") as raw, soundfile.SoundFile(raw) as file:
            if min_seconds and file.frames < min_seconds * file.samplerate:
                raise AudioError(_too_short(file.frames / file.samplerate, min_seconds))
            audio_N = _decode(file, sample_rate, start, seconds)
    except soundfile.SoundFileError as error:
        raise AudioError(f"cannot be decoded as audio: {_tidy(error)}") from None
    except OSError as error:
        raise AudioError(f"cannot be read: {error.strerror or error}") from None
    if seconds is None and len(audio_N) < max(min_seconds * sample_rate * 0.999, 1):
        raise AudioError(_too_short(len(audio_N) / sample_rate, min_seconds))
    if seconds is None and not audio_N.any():
        raise AudioError("silent: every sample is zero")
    return audio_N[None]


def _check_container(path: Path) -> None:
    try:
        if path.stat().st_size == 0:
            raise AudioError("empty file")
        if reason := cut_short(path):
            raise AudioError(reason)
    except OSError as error:
        raise AudioError(f"cannot be read: {error.strerror or error}") from None


def _decode(file: object, sample_rate: int, start: float, seconds: float | None) -> npt.NDArray[np.float32]:
    """Decode, mix down and resample an open `soundfile.SoundFile`, block by block."""
    import soundfile
    import soxr

    assert isinstance(file, soundfile.SoundFile)
    rate, promised = file.samplerate, file.frames
    wanted = promised if seconds is None else min(round(seconds * rate), promised)
    if wanted < promised:
        file.seek(int(start * (promised - wanted)))
    resample = soxr.ResampleStream(rate, sample_rate, 1, dtype="float32") if rate != sample_rate else None
    parts: list[npt.NDArray[np.float32]] = []
    done = 0
    while done < wanted or seconds is None:
        frames = BLOCK_FRAMES if seconds is None else min(BLOCK_FRAMES, wanted - done)
        block = file.read(frames, "float32", always_2d=True)
        if not len(block):
            break
        mono = _mono(block, done)
        done += len(block)
        parts.append(resample.resample_chunk(mono) if resample else mono)
    if done < wanted and file.format in EXACT_LENGTH:
        raise AudioError(f"cut short: its header promises {promised} frames, {done} can be decoded")
    if resample:
        parts.append(resample.resample_chunk(np.empty(0, np.float32), last=True))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _mono(block: npt.NDArray[np.float32], first: int) -> npt.NDArray[np.float32]:
    if not np.isfinite(block).all():
        bad = int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
        raise AudioError(f"samples that are not numbers (NaN or infinite), first at sample {first + bad}")
    loudest = float(np.abs(block).max())
    if loudest > LOUDEST:
        raise AudioError(f"samples up to {loudest:.4g}: not audio within -1..1 (integers written as floats?)")
    return np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))


def _too_short(seconds: float, wanted: float) -> str:
    return f"too short: {seconds:.3f} s, at least {wanted:g} s are wanted"


def _tidy(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.split(">: ", 1)[-1].rstrip(". ")
