"""What `tokenize` decides before the first file is encoded: facts and splits, settings, books, codec."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from datamodules.audio import AudioError, AudioFile, read_audio
from datamodules.book_fitting import sample_features
from datamodules.codecs import AudioCodec, CodecOptions, FrameFeatures, build_codec, build_features
from datamodules.residual_kmeans import ResidualKMeans, fit, load_books
from datamodules.shard_journal import write_atomically
from datamodules.track_facts import TrackFacts, assign_splits, read_facts
from experiments.progress import WorkProgress

BOOKS_NAME = "books.npz"
SETTINGS_NAME = "tokenize.json"
GPU_BATCH = 8
FEW_FRAMES = 20  # a code


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first file is encoded."""

    out: Path
    files: list[AudioFile]
    facts: dict[str, TrackFacts]
    options: CodecOptions
    codec: AudioCodec
    min_seconds: float
    workers: int
    shard_bytes: int


def make_plan(args: argparse.Namespace, files: list[AudioFile]) -> Plan:
    """Check the options against the folder and the libraries, fit books if asked to, build the codec.

    Raises:
        ValueError: an option that cannot be used; the message names it and the choices.
    """
    _check_numbers(args)
    _refuse_other_settings(args)
    on_gpu = args.device != "cpu"
    batch = args.batch_windows if args.batch_windows is not None else (GPU_BATCH if on_gpu else 1)
    workers = args.workers if args.workers is not None else (1 if on_gpu else len(os.sched_getaffinity(0)))
    options = CodecOptions(args.codec, args.weights, None, args.num_codebooks, args.device, batch)
    features = build_features(options)
    facts = track_facts(args, files)
    books = _books(args, features, files)
    options = replace(options, books=None if books is None else str(books))
    codec = build_codec(options)
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out / SETTINGS_NAME, (json.dumps(_settings(args), indent=1) + "\n").encode())
    return Plan(args.out, files, facts, options, codec, args.min_seconds, workers, int(args.shard_mb * 2**20))


def track_facts(args: argparse.Namespace, files: list[AudioFile]) -> dict[str, TrackFacts]:
    """Licence, attribution, source and split of every file."""
    defaults = TrackFacts(args.licence, args.attribution, args.source)
    paths = {file.track: file.path for file in files}
    named = read_facts(args.metadata, defaults) if args.metadata else {}
    if unknown := [track for track in named if track not in paths]:
        print(f"warning: {args.metadata}: {len(unknown)} rows name no file here, first {unknown[0]!r}", file=sys.stderr)

    def usable(track: str) -> bool:
        try:
            return bool(read_audio(paths[track], 24_000, min_seconds=args.min_seconds).size)
        except AudioError:
            return False

    given = {track: fact.split for track, fact in named.items() if track in paths}
    splits = assign_splits(list(paths), args.val_fraction, given, usable)
    return {track: replace(named.get(track, defaults), split=splits[track]) for track in paths}


def _check_numbers(args: argparse.Namespace) -> None:
    lows = {"num_codebooks": 1, "min_seconds": 0, "fit_frames": 2, "codebook_size": 2, "workers": 0, "batch_windows": 1}
    for key, low in lows.items():
        value = getattr(args, key)
        if value is not None and not value >= low:
            raise ValueError(f"--{key.replace('_', '-')} {value}: must be at least {low}")
    if not args.shard_mb > 0:
        raise ValueError(f"--shard-mb {args.shard_mb}: must be above 0")


def _settings(args: argparse.Namespace) -> dict[str, object]:
    return {key: getattr(args, key) for key in ("codec", "num_codebooks", "min_seconds", "val_fraction", "shard_mb")}


def _refuse_other_settings(args: argparse.Namespace) -> None:
    """Refuse to go on in a folder that was begun otherwise: its second half would differ from its first."""
    path = args.out / SETTINGS_NAME
    if not path.exists():
        return
    try:
        before = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ValueError(f"{path}: damaged: not JSON; remove it to go on with the options given now") from None
    changed = [
        f"--{key.replace('_', '-')} was {before[key]}, is {value}"
        for key, value in _settings(args).items()
        if before.get(key, value) != value
    ]
    if changed:
        raise ValueError(f"{args.out}: was begun with {'; '.join(changed)}; give the same, or another --out")


def _books(args: argparse.Namespace, features: FrameFeatures | None, files: list[AudioFile]) -> Path | None:
    """The file of books to use: the set's own, the user's (copied into the set), or newly fitted ones."""
    if features is None:
        if args.fit or args.books is not None:
            raise ValueError(f"{args.codec} has its own quantizer: leave --fit and --books away")
        return None
    if args.fit and args.books is not None:
        raise ValueError("--fit and --books exclude each other")
    own: Path = args.out / BOOKS_NAME
    given = _given_books(args)
    if own.exists():
        if given is not None and given.digest != load_books(own).digest:
            raise ValueError(f"{own}: differs from --books {args.books}; one set has one set of books")
        return own
    if given is None and not args.fit:
        raise ValueError(f"{args.codec} has no books yet: give --fit to make them from this audio, or --books FILE")
    books = given if given is not None else _fit(args, features, files)
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(own, books.to_bytes())
    return own


def _given_books(args: argparse.Namespace) -> ResidualKMeans | None:
    if args.books is None:
        return None
    path = args.books / BOOKS_NAME if args.books.is_dir() else args.books
    return load_books(path).first(args.num_codebooks)


def _fit(args: argparse.Namespace, features: FrameFeatures, files: list[AudioFile]) -> ResidualKMeans:
    with WorkProgress("collecting frames", args.fit_frames, "frames") as bar:
        features_TD = sample_features(files, features, num_frames=args.fit_frames, progress=bar.reach)
    if len(features_TD) < FEW_FRAMES * args.codebook_size:
        many = f"{len(features_TD)} frames are few for books of {args.codebook_size} codes"
        print(f"warning: {many}: use more audio, or a smaller --codebook-size", file=sys.stderr)
    title = f"fitting books on {len(features_TD)} frames"
    with WorkProgress(title, args.num_codebooks, "books") as bar:
        return fit(features_TD, args.num_codebooks, args.codebook_size, seed=args.seed, progress=bar.reach)
