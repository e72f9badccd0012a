"""``python -m experiments scan PATH...``: find the loss spikes in finished runs' logs.

Reads Lightning CSV logs, CSV, TSV and JSON lines, Hugging Face ``trainer_state.json``, TensorBoard event files, offline
Weights & Biases runs, fairseq and Megatron-LM text logs; see docs/scan.md. Imports neither torch nor Lightning.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from callbacks.detector import DetectorConfig
from experiments.log_readers import discover, read_series
from experiments.readers.columns import ColumnRequest
from experiments.readers.formats import Source
from experiments.readers.table import LogError, NotALogError
from experiments.scan_detect import ScanResult, detect, run_record
from experiments.scan_report import episode_table, one_line, summary, write_json

PICTURES = (".png", ".pdf", ".svg", "")
PLAIN_WIDTH = 160  # of the table where the output is no terminal
DETECTOR_HELP = {
    "false_alarms": "tolerated false alarms per 100 000 healthy values",
    "false_vetoes": "tolerated refused updates (gradient norm alone) per 100 000 healthy values",
    "min_rise": "smallest rise that matters, as a fraction of the progress made so far",
    "warmup": "values before a series is judged",
    "patience": "values after which a raised but steady level is accepted",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see `{self.prog} --help`)\n")


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    out = _Parser(prog="python -m experiments scan", description="Find the loss spikes in finished runs' logs.")
    out.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="log file, or folder to search for logs")
    out.add_argument("--column", metavar="NAME", help="loss column (default: the known names, best first)")
    out.add_argument("--grad-column", metavar="NAME", help="gradient norm column (default: the known names)")
    out.add_argument("--step-column", metavar="NAME", help="step column (default: the known names, else the row)")
    out.add_argument("--json", metavar="OUT", type=Path, help="write everything found to this file")
    out.add_argument("--plot", metavar="OUT", type=Path, help="draw each run with its episodes to this PNG")
    out.add_argument("--all", action="store_true", help="list every episode (default: at most 10 a run)")
    group = out.add_argument_group("detector", "what counts as an alarm; the defaults serve every run")
    for option in _detector_options():
        flag, kind = f"--{option.name.replace('_', '-')}", type(option.default)
        text = f"{DETECTOR_HELP.get(option.name, option.name)} (default {option.default})"
        group.add_argument(flag, type=kind, default=option.default, metavar="X", help=text)
    return out


def _detector_options() -> list[dataclasses.Field[Any]]:
    return [option for option in dataclasses.fields(DetectorConfig) if type(option.default) in (int, float)]


def main(argv: list[str] | None = None) -> int:
    """Scan and report.

    Returns:
        0; 1 if something could not be read; 2 if nothing was found or the command line is wrong; 130 on Ctrl-C.
    """
    args = parser().parse_args(argv)
    try:
        return _scan(args)
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, and Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _scan(args: argparse.Namespace) -> int:
    errors: list[str] = []

    def on_error(message: str) -> None:
        errors.append(message)
        print(f"error: {one_line(message)}", file=sys.stderr)

    try:
        config = DetectorConfig(**{option.name: getattr(args, option.name) for option in _detector_options()})
        _check_output(args.json)
        _check_output(args.plot, PICTURES)
    except ValueError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    sources = discover(args.paths, on_error)
    request = ColumnRequest(args.column, args.grad_column, args.step_column)
    results = scan_sources(sources, request, config, on_error)
    if not results:
        if not errors:
            places = ", ".join(str(path) for path in args.paths)
            print(f"error: no training logs found in {places} ({len(sources)} files looked at)", file=sys.stderr)
        return 1 if errors else 2
    return _report(args, results, on_error) or int(bool(errors))


def _check_output(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Refuse an output that cannot be written before anything is read.

    Raises:
        ValueError: Its folder does not exist, it is a folder, or it has another suffix.
    """
    if path is not None and suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path}: cannot draw a '{path.suffix}'; choose from {', '.join(filter(None, suffixes))}")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path}: no folder {path.parent} to write to")
    if path is not None and path.is_dir():
        raise ValueError(f"{path}: is a folder; name a file")


def scan_sources(
    sources: Sequence[Source], request: ColumnRequest, config: DetectorConfig, on_error: Callable[[str], None]
) -> list[ScanResult]:
    """Read and judge every run, with a progress bar on a terminal; what cannot be read is reported and left out.

    Args:
        sources: From :func:`experiments.log_readers.discover`.
        request: Columns the user named.
        config: The detector's parameters.
        on_error: Told, in one line, of each log that cannot be read.
    """
    results: list[ScanResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        # Half of a file's bytes count as done when it is read, half when it is judged.
        task = progress.add_task("scan", total=2 * sum(source.num_bytes for source in sources))
        done = 0
        for source in sources:
            progress.update(task, description=source.path.name[-30:])
            try:
                results.append(_scan_one(source, request, config, lambda n: progress.advance(task, n)))
            except NotALogError as error:
                if source.named:
                    on_error(str(error))
            except LogError as error:
                on_error(str(error))
            done += 2 * source.num_bytes
            progress.update(task, completed=done)
    return results


def _scan_one(
    source: Source, request: ColumnRequest, config: DetectorConfig, advance: Callable[[float], None]
) -> ScanResult:
    series = read_series(source, request, advance)
    per_value = source.num_bytes / max(len(series.rows), 1)
    return detect(series, config, lambda values: advance(values * per_value))


def _report(args: argparse.Namespace, results: list[ScanResult], on_error: Callable[[str], None]) -> int:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    for result in results:
        for note in result.series.notes:
            print(f"note: {one_line(f'{result.series.path}: {note}')}", file=sys.stderr)
    console.print(episode_table(results, args.all))
    console.print(summary(results), highlight=False)
    try:
        if args.json:
            write_json(args.json, [run_record(result) for result in results])
        if args.plot:
            from experiments.scan_plot import draw

            for page in draw(results, args.plot):
                console.print(f"drew {page}", highlight=False, markup=False)
    except OSError as error:
        on_error(f"{error.filename or args.json or args.plot}: cannot be written ({error.strerror})")
        return 1
    return 0
