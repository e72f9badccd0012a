"""`python -m experiments shards info|verify|merge|split|import`: look at shard sets, check them, make new ones of them.

Exit status: 0 all well; 1 a fault or an error; 2 usage; 3 `import --skip-bad` left tracks out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from datamodules.imports import AXES, READERS
from datamodules.shards import Codec
from datamodules.track_facts import SPLITS
from experiments import set_editing, set_reports


def main(argv: list[str]) -> int:
    """Run the verb; see the module's text for the exit status."""
    args = _parser().parse_args(argv)
    act: Callable[[argparse.Namespace], int] = args.act
    try:
        return act(args)
    except KeyboardInterrupt:
        print("stopped; nothing is lost: the same command goes on", file=sys.stderr)
        return 130
    except ImportError as error:
        print(f"error: {error.name or error} is not installed: pip install 'ballast[parquet]'", file=sys.stderr)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments shards", description="Look at and edit shard sets.")
    verbs = parser.add_subparsers(required=True, metavar="info|verify|merge|split|import")
    _add_info(verbs.add_parser("info", help="tracks, hours, licences, entropies, dead codes, duplicates"))
    _add_verify(verbs.add_parser("verify", help="read every byte; name every fault and what to do"))
    _add_merge(verbs.add_parser("merge", help="several sets of one codec into one"))
    _add_split(verbs.add_parser("split", help="a new set with other splits, or fewer tracks"))
    _add_import(verbs.add_parser("import", help="codes that others made: fairseq text, .npy per track, parquet"))
    return parser


def _add_info(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("sets", nargs="+", metavar="DIR", help="shard sets, or `bundled`")
    verb.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON too")
    verb.add_argument(
        "--sample-hours", type=float, default=20.0, help="hours for the bigram line (default %(default)s)"
    )
    verb.set_defaults(act=set_reports.info)


def _add_verify(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("sets", nargs="+", metavar="DIR", help="shard sets, or `bundled`")
    verb.set_defaults(act=set_reports.verify)


def _add_merge(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("sets", nargs="+", metavar="DIR")
    verb.add_argument("--out", required=True, type=Path, metavar="DIR")
    verb.add_argument("--prefix", action="store_true", help="put each set's folder name before its tracks' names")
    verb.add_argument("--drop-duplicates", action="store_true", help="keep one of tracks whose codes are the same")
    verb.add_argument("--shard-mb", type=float, default=64.0, help="size of a shard (default %(default)s MiB)")
    verb.set_defaults(act=set_editing.merge)


def _add_split(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("set", metavar="DIR")
    verb.add_argument("--out", required=True, type=Path, metavar="DIR")
    verb.add_argument("--val-fraction", type=float, help="split anew by the hash of the track's name")
    verb.add_argument("--metadata", type=Path, help="CSV: track, split and any of licence, attribution, source")
    verb.add_argument("--only-split", choices=SPLITS, help="keep the tracks of one split only")
    verb.add_argument("--licence", action="append", metavar="NAME", help="keep tracks of this licence; may be repeated")
    verb.add_argument("--shard-mb", type=float, default=64.0, help="size of a shard (default %(default)s MiB)")
    verb.set_defaults(act=set_editing.split)


def _add_import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("format", choices=sorted(READERS))
    verb.add_argument("source", type=Path, help="folder (or one .parquet file)")
    verb.add_argument("--out", required=True, type=Path, metavar="DIR")
    verb.add_argument("--codec", required=True, help="name of the codec that made the codes, e.g. encodec_24khz")
    verb.add_argument("--sample-rate", type=int, default=24_000, help="Hz (default %(default)s)")
    verb.add_argument("--frame-rate", type=float, default=75.0, help="frames a second (default %(default)s)")
    verb.add_argument("--codebooks", type=int, default=8, help="(default %(default)s)")
    verb.add_argument("--codebook-size", type=int, default=1024, help="(default %(default)s)")
    verb.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE", help="e.g. bandwidth_kbps=6.0")
    verb.add_argument("--axes", choices=AXES, default="auto", help="order of the codes' axes (default by shape)")
    verb.add_argument("--licence", default="unknown", help="of tracks that name none")
    verb.add_argument("--source-name", default="unknown", help="where the audio comes from")
    verb.add_argument("--val-fraction", type=float, default=0.0, help="where the files name no splits")
    verb.add_argument("--skip-bad", action="store_true", help="leave bad tracks out, count them, exit with 3")
    verb.add_argument("--shard-mb", type=float, default=64.0, help="size of a shard (default %(default)s MiB)")
    verb.set_defaults(act=lambda args: set_editing.import_codes(args, import_codec(args)))


def import_codec(args: argparse.Namespace) -> Codec:
    """The codec that an import's options describe.

    Raises:
        ValueError: a setting without "=", or a number out of range.
    """
    settings: dict[str, str] = {}
    for pair in args.setting:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--setting {pair}: must be KEY=VALUE")
        settings[key] = value
    return Codec(args.codec, args.sample_rate, args.frame_rate, args.codebooks, args.codebook_size, settings)
