"""`shards merge`, `split` and `import`: new shard sets from old ones or from codes that others made.

All of them write through `ShardWriter`: killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from datamodules.imports import READERS, Imported
from datamodules.set_statistics import read_tracks, track_digest
from datamodules.shard_journal import write_atomically
from datamodules.shard_reader import ShardReader
from datamodules.shard_writer import ShardWriter
from datamodules.shards import INDEX_NAME, Codec, ShardIndex, Track, load_index, resolve_root
from datamodules.track_facts import TrackFacts, assign_splits, read_facts
from experiments.progress import WorkProgress
from experiments.tokenize_plan import BOOKS_NAME

SOME_REJECTED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """One set to copy from."""

    name: str
    root: Path
    index: ShardIndex

    @property
    def frames(self) -> int:
        """Frames of all its shards."""
        return sum(shard.frames for shard in self.index.shards)


# (track, split) -> the same under the names and facts it shall have, or None to leave it out
Edit = Callable[[Track, str], tuple[Track, str] | None]


def merge(args: argparse.Namespace) -> int:
    """Copy the tracks of several sets of one codec into one."""
    sources = _open(args.sets, args.out)
    first = sources[0].index.codec
    for source in sources[1:]:
        if differences := first.differences(source.index.codec):
            raise ValueError(f"{source.name} and {sources[0].name} are of different codecs ({'; '.join(differences)})")
    edits = [_prefixed(source) if args.prefix else _unchanged for source in sources]
    _refuse_same_names(sources, edits)
    kept, dropped = _copy(args, sources, edits, drop_duplicates=args.drop_duplicates)
    print(f"{args.out}: {kept} tracks from {len(sources)} sets, {dropped} left out")
    return 0


def split(args: argparse.Namespace) -> int:
    """Copy a set with other splits, other facts, or fewer tracks."""
    sources = _open([args.set], args.out)
    tracks = {track.name: (track, shard.split) for shard in sources[0].index.shards for track in shard.tracks}
    facts = read_facts(args.metadata, TrackFacts("", "", "")) if args.metadata else {}
    if args.val_fraction is None and not facts and not args.only_split and not args.licence:
        raise ValueError("nothing to do: give --val-fraction, --metadata, --only-split or --licence")
    if strangers := [name for name in facts if name not in tracks]:
        raise ValueError(f"{args.metadata}: {len(strangers)} rows name no track of {args.set}, first {strangers[0]!r}")
    splits = {
        name: facts[name].split if name in facts and facts[name].split else was for name, (_, was) in tracks.items()
    }
    if args.val_fraction is not None:
        splits = assign_splits(list(tracks), args.val_fraction, {name: fact.split for name, fact in facts.items()})

    def edit(track: Track, _: str) -> tuple[Track, str] | None:
        named = facts.get(track.name, TrackFacts("", "", ""))
        known = {key: getattr(named, key) for key in ("licence", "attribution", "source") if getattr(named, key)}
        track = replace(track, **known)
        wanted = args.only_split in (None, splits[track.name]) and (not args.licence or track.licence in args.licence)
        return (track, splits[track.name]) if wanted else None

    kept, dropped = _copy(args, sources, [edit])
    found = load_index(args.out)
    print(f"{args.out}: {kept} tracks, {dropped} left out; splits {', '.join(found.splits)}")
    return 0


def import_codes(args: argparse.Namespace, codec: Codec) -> int:
    """Bring codes that others made into a shard set."""
    if not args.source.exists():
        raise ValueError(f"{args.source}: no such file or folder")
    if args.shard_mb <= 0:
        raise ValueError(f"--shard-mb {args.shard_mb}: must be above 0")
    rejected = 0
    with _cleaned(args.out), ShardWriter(args.out, codec, int(args.shard_mb * 2**20)) as writer:
        names: set[str] = set()
        for track in READERS[args.format](args.source, codec, args.axes):
            reason = f"track {track.name!r} comes twice" if track.name in names else _add(writer, track, args)
            names.add(track.name)
            if reason:
                rejected += 1
                if not args.skip_bad:
                    raise ValueError(f"{track.place}: {reason} (--skip-bad leaves such tracks out)")
                print(f"left out: {track.place}: {reason}", file=sys.stderr)
        if not writer.done:
            raise ValueError(f"{args.source}: no track in it can be used")
        kept = len(writer.done)
    print(f"{args.out}: {kept} tracks, {rejected} left out")
    return SOME_REJECTED if rejected else 0


def _add(writer: ShardWriter, track: Imported, args: argparse.Namespace) -> str:
    """Add a track unless it is in already; return why it cannot be."""
    if track.codes_KT is None or track.name in writer:
        return track.reason
    split = track.split
    if split == "train" and args.val_fraction:
        split = assign_splits([track.name], args.val_fraction, {})[track.name]
    licence = track.licence or args.licence
    try:
        writer.add(track.codes_KT, track.name, licence=licence, source=args.source_name, split=split)
    except ValueError as error:
        return str(error).removeprefix(f"track {track.name!r}: ")
    return ""


def _open(names: Sequence[str], out: Path) -> list[Source]:
    sources = [Source(name, resolve_root(name), load_index(name)) for name in names]
    if any(source.root.resolve() == out.resolve() for source in sources):
        raise ValueError(f"{out}: is one of the sets to read; choose another --out")
    return sources


def _unchanged(track: Track, split: str) -> tuple[Track, str]:
    return track, split


def _prefixed(source: Source) -> Edit:
    return lambda track, split: (replace(track, name=f"{source.root.resolve().name}/{track.name}"), split)


def _refuse_same_names(sources: list[Source], edits: Sequence[Edit]) -> None:
    owner: dict[str, str] = {}
    for source, edit in zip(sources, edits, strict=True):
        for shard in source.index.shards:
            for track in shard.tracks:
                edited = edit(track, shard.split)
                name = edited[0].name if edited else track.name
                if name in owner:
                    raise ValueError(
                        f"track {name!r} is in {owner[name]} and in {source.name}; --prefix keeps them apart"
                    )
                owner[name] = source.name


def _copy(
    args: argparse.Namespace, sources: list[Source], edits: Sequence[Edit], drop_duplicates: bool = False
) -> tuple[int, int]:
    """Copy tracks through a writer; return how many are in the new set and how many were left out."""
    if args.shard_mb <= 0:
        raise ValueError(f"--shard-mb {args.shard_mb}: must be above 0")
    seen: set[str] = set()
    dropped = 0
    with _cleaned(args.out), ShardWriter(args.out, sources[0].index.codec, int(args.shard_mb * 2**20)) as writer:
        with WorkProgress("copying", sum(source.frames for source in sources), "frames") as bar:
            for source, edit in zip(sources, edits, strict=True):
                for track, split, codes_KT in read_tracks(ShardReader(source.root, source.index)):
                    digest = track_digest(codes_KT) if drop_duplicates else track.name
                    edited = None if drop_duplicates and digest in seen else edit(track, split)
                    seen.add(digest)
                    dropped += edited is None
                    if edited is not None and edited[0].name not in writer:
                        kept, facts = edited[0], ("licence", "attribution", "source")
                        given = {key: getattr(kept, key) for key in facts}
                        writer.add(codes_KT, kept.name, **given, split=edited[1])
                    bar.advance(track.frames)
        if not writer.done:
            raise ValueError("no track is left")
        total = len(writer.done)
        books = sources[0].root / BOOKS_NAME
        if books.exists():
            write_atomically(args.out / BOOKS_NAME, books.read_bytes())
    return total, dropped


@contextmanager
def _cleaned(out: Path) -> Iterator[None]:
    """Refuse a finished set; where an error comes before anything is finished, leave nothing of this run behind."""
    if (out / INDEX_NAME).exists():
        raise ValueError(f"{out}: is a finished shard set; choose another --out")
    existed = out.exists() and any(out.iterdir())
    try:
        yield
    except ValueError:
        if not existed and out.is_dir():
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        raise
