"""Find the training logs under the paths of a command line and read each as one :class:`Series`."""

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.readers.columns import ColumnError, ColumnRequest
from experiments.readers.formats import EVENT_FILE, Source, read_table
from experiments.readers.opening import DAMAGED, Tick
from experiments.readers.series import Series, align
from experiments.readers.table import LogError, NotALogError

# What a run folder holds beside its logs. Everything else is judged by its content.
OTHER_SUFFIXES = frozenset(
    {
        *(".py", ".pyc", ".ipynb", ".sh", ".c", ".h", ".cpp", ".cu", ".rs", ".js", ".css", ".html", ".xml", ".svg"),
        *(".md", ".rst", ".tex", ".bib", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".lock", ".sha256", ".md5"),
        *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".onnx", ".pkl", ".pickle", ".npy", ".npz", ".h5", ".hdf5"),
        *(".parquet", ".arrow", ".feather", ".db", ".sqlite", ".model", ".zip", ".tar", ".tgz", ".whl", ".so", ".o"),
        *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".mp4", ".wav", ".flac", ".mp3", ".ogg", ".opus"),
    }
)
TRAINER_STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-\d+")
OTHER_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})


def discover(paths: Sequence[Path], on_error: Callable[[str], None]) -> list[Source]:
    """List the logs under the given files and folders, each once, in the order given (names sorted within a folder).

    Args:
        paths: Files and folders.
        on_error: Told, in one line, of a path that does not exist or cannot be listed.
    """
    sources: list[Source] = []
    seen: set[str] = set()
    for path in paths:
        if os.path.isdir(path):
            found = list(_walk(path, on_error))
        elif os.path.exists(path):
            found = [Source(path, (path,), named=True)]
        else:
            on_error(f"{path}: no such file or folder")
            continue
        for source in found:
            real = "|".join(os.path.realpath(file) for file in source.files)
            if real not in seen:
                seen.add(real)
                sources.append(source)
    return sources


def _walk(folder: Path, on_error: Callable[[str], None]) -> Iterator[Source]:
    def failed(error: OSError) -> None:
        on_error(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if name not in OTHER_FOLDERS and not name.startswith("."))
        _drop_older_checkpoints(Path(parent), folders, TRAINER_STATE in names)
        here = Path(parent)
        events = tuple(here / name for name in sorted(names) if EVENT_FILE in name)
        if events:
            yield Source(events[0] if len(events) == 1 else here, events, named=False)
        for name in sorted(names):
            file = here / name
            if EVENT_FILE not in name and not name.startswith(".") and _may_be_log(file):
                yield Source(file, (file,), named=False)


def _drop_older_checkpoints(parent: Path, folders: list[str], has_state: bool) -> None:
    """Of a Hugging Face run's checkpoints keep the last: each ``trainer_state.json`` repeats those before it."""
    found = [name for name in folders if CHECKPOINT.fullmatch(name) and (parent / name / TRAINER_STATE).exists()]
    found.sort(key=lambda name: int(name.rpartition("-")[2]))
    for name in found if has_state else found[:-1]:
        folders.remove(name)


def _may_be_log(file: Path) -> bool:
    if file.suffix.lower() in OTHER_SUFFIXES:
        return False
    try:
        status = file.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def read_series(source: Source, request: ColumnRequest, tick: Tick = lambda _: None) -> Series:
    """Read one log.

    Args:
        source: From :func:`discover`.
        request: Columns the user named.
        tick: Progress, in bytes.

    Returns:
        The run's series.

    Raises:
        NotALogError: The file is no log with a loss column (an error only where the user named the file).
        LogError: The log cannot be read, or has no column of the name asked for.
    """
    try:
        table = read_table(source, request, tick)
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise LogError(source.path, f"cannot be read ({reason})") from None
    try:
        return align(table, source.path, request)
    except ColumnError as error:
        # In a folder, a file without the column is passed over, unless it is plainly a training log.
        plainly_a_log = ColumnRequest().names_a_loss(table.names)
        raise (LogError if source.named or plainly_a_log else NotALogError)(source.path, str(error)) from None
