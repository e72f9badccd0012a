"""`python -m experiments tokenize AUDIO... --out DIR --codec CODEC`: any folder of audio into a shard set.

Killed at any moment, the same command goes on where it stopped and ends with the same set. Exit status: 0 all files
are in; 3 some were bad and left out (named, with reasons, in DIR/rejected.csv); 1 an error, nothing to train on; 2
usage; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from datamodules.audio import find_audio
from datamodules.book_fitting import FIT_FRAMES
from datamodules.codecs import CODECS
from datamodules.shard_journal import JOURNAL_NAME, write_atomically
from datamodules.shard_writer import ShardWriter
from datamodules.shards import INDEX_NAME, load_index
from datamodules.tokenizer import Encoded, encode_files
from datamodules.track_facts import TrackFacts
from experiments.progress import WorkProgress
from experiments.tokenize_plan import BOOKS_NAME, SETTINGS_NAME, Plan, make_plan

REJECTED_NAME = "rejected.csv"
SOME_REJECTED = 3
CODEBOOK_SIZE = 1024


def main(argv: list[str]) -> int:
    """Run the verb; see the module's text for the exit status."""
    args = _parser().parse_args(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print(f"stopped; nothing is lost: the same command goes on in {args.out}", file=sys.stderr)
        return 130
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {_missing(error) if isinstance(error, ImportError) else error}", file=sys.stderr)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{place}; free the disk or the folder and run it again", file=sys.stderr)
    return 1


def run(args: argparse.Namespace) -> int:
    """Find, fit, encode, write; raise ValueError for what the user can put right."""
    files, passed_over = find_audio(args.audio)
    if not files:
        raise ValueError(f"no audio below {', '.join(map(str, args.audio))} ({passed_over} other files)")
    with _fresh_folder(args.out):
        plan = make_plan(args, files)
        print(_opening(plan, passed_over), file=sys.stderr)
        rejected, frames = _encode(plan)
    _write_rejected(args.out, rejected)
    return _closing(plan, rejected, frames)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments tokenize", description="Turn folders of audio into a shard set of codec tokens."
    )
    add = parser.add_argument
    choices = "; ".join(f"{key}: {what}" for key, (_, _, what) in CODECS.items())
    add("audio", nargs="+", type=Path, metavar="AUDIO", help="folders (recursive) or files")
    add("--out", required=True, type=Path, metavar="DIR", help="the shard set; made if absent")
    add("--codec", required=True, help=choices)
    add("--weights", help="folder of weights, or a hub id (encodec_24khz, dac_24khz)")
    add("--fit", action="store_true", help="rvq_mel, lyra: fit the books on this audio first")
    add("--fit-frames", type=int, default=FIT_FRAMES, help="frames to fit on (default %(default)s)")
    add("--codebook-size", type=int, default=CODEBOOK_SIZE, help="codes a book, for --fit (default %(default)s)")
    add("--seed", type=int, default=0, help="of --fit (default %(default)s)")
    add("--books", type=Path, help="rvq_mel, lyra: books fitted before (books.npz, or a shard set's folder)")
    add("--num-codebooks", type=int, default=8, help="codebooks to keep (default %(default)s)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (encodec_24khz, dac_24khz)")
    add("--batch-windows", type=int, default=None, help="20 s windows encoded at once (default 1; 8 on cuda)")
    add("--workers", type=int, default=None, help="processes (default: one a core, 1 on cuda; 0: none)")
    add("--val-fraction", type=float, default=0.05, help="share of tracks for validation (default %(default)s)")
    add("--min-seconds", type=float, default=1.0, help="shorter files are left out (default %(default)s)")
    add("--licence", default="unknown", help="of all tracks, SPDX")
    add("--attribution", default="unknown", help="whom to name, for all tracks")
    add("--source", default="unknown", help="where the audio comes from")
    add("--metadata", type=Path, help="CSV: track, and any of licence, attribution, source, split")
    add("--shard-mb", type=float, default=64.0, help="size of a shard (default %(default)s MiB)")
    return parser


@contextmanager
def _fresh_folder(out: Path) -> Iterator[None]:
    """Leave nothing behind where an error comes before the first track: a folder made here goes again."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; --out must be a folder")
    found = {path.name.removesuffix(".tmp") for path in out.iterdir()} if out.exists() else set()
    existed = bool(found)
    if existed and not found & {SETTINGS_NAME, JOURNAL_NAME, INDEX_NAME, BOOKS_NAME}:
        raise ValueError(f"{out}: holds other files and no shard set; choose an empty or new folder")
    try:
        yield
    except (ValueError, ImportError):
        if not existed and out.is_dir() and not list(out.glob("shard-*")):
            shutil.rmtree(out)
        raise


def _encode(plan: Plan) -> tuple[list[Encoded], int]:
    """Encode what is not yet in the set; return the bad files and the frames now added."""
    rejected: list[Encoded] = []
    frames = 0
    with ShardWriter(plan.out, plan.codec.spec, plan.shard_bytes) as writer:
        rest = [file for file in plan.files if file.track not in writer]
        done = sum(file.bytes for file in plan.files) - sum(file.bytes for file in rest)
        with WorkProgress("encoding", sum(file.bytes for file in plan.files), "bytes", done) as bar:
            for result in encode_files(rest, plan.options, plan.min_seconds, plan.workers, plan.codec):
                if result.codes_KT is None:
                    rejected.append(result)
                    bar.say(f"left out: {result.file.path}: {result.reason}")
                else:
                    frames += result.codes_KT.shape[1]
                    _add(writer, result, plan.facts[result.file.track])
                bar.advance(result.file.bytes, f"{frames / plan.codec.spec.frame_rate / 3600:.2f} h")
        if not writer.done:
            first = f"{rejected[0].file.path}: {rejected[0].reason}"
            raise ValueError(f"none of the {len(plan.files)} files can be used; first: {first}")
    return rejected, frames


def _add(writer: ShardWriter, result: Encoded, facts: TrackFacts) -> None:
    assert result.codes_KT is not None
    writer.add(
        result.codes_KT,
        result.file.track,
        licence=facts.licence,
        attribution=facts.attribution,
        source=facts.source,
        split=facts.split,
    )


def _write_rejected(out: Path, rejected: Sequence[Encoded]) -> None:
    if not rejected:
        (out / REJECTED_NAME).unlink(missing_ok=True)
        return
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("track", "bytes", "reason"))
    rows.writerows((bad.file.track, bad.file.bytes, bad.reason) for bad in rejected)
    write_atomically(out / REJECTED_NAME, text.getvalue().encode())


def _opening(plan: Plan, passed_over: int) -> str:
    size = sum(file.bytes for file in plan.files) / 1e6
    spec = plan.codec.spec
    return (
        f"{len(plan.files)} audio files, {size:.1f} MB ({passed_over} other files passed over); {spec.name}:"
        f" {spec.codebooks} codebooks of {spec.codebook_size}, {spec.frame_rate:g} frames a second"
    )


def _closing(plan: Plan, rejected: list[Encoded], frames: int) -> int:
    hours = frames / plan.codec.spec.frame_rate / 3600
    kept = len(plan.files) - len(rejected)
    print(f"{plan.out}: {kept} tracks in the set, {hours:.3f} h added now")
    if "val" not in load_index(plan.out).splits:
        print("warning: no track is in the validation split; raise --val-fraction", file=sys.stderr)
    if rejected:
        print(f"{len(rejected)} files left out, reasons in {plan.out / REJECTED_NAME}", file=sys.stderr)
        return SOME_REJECTED
    return 0


def _missing(error: ImportError) -> str:
    return f"{error.name or error} is not installed: pip install 'ballast[audio]'"
