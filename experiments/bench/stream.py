"""``python -m experiments bench stream``: what the stream costs, against a raw gather of the same bytes.

Every contender serves shuffled clips `[B, T, K]` int16 as tensors from the same files in the same process, in
interleaved rounds; ratios are medians over the rounds. CPU time is the steadier number on a shared machine.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from datamodules.loader import TokenLoader
from datamodules.order import Order
from datamodules.shard_writer import ShardWriter
from datamodules.shards import HEADER_BYTES, Codec, load_index
from datamodules.stream import ShardSet, TokenStream

CODEC = Codec("synthetic", 24000, 75.0, 8, 1024, {})
FRAMES = 375
FAR = 10**8
Source = Callable[[int], object]
Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """Run the benchmark; returns the exit status."""
    args = _arguments(argv)
    console = Console()
    if args.scale:
        from experiments.bench import stream_scale

        return stream_scale.run(args)
    if args.memory_of is not None:
        print(_resident_after(args.memory_of, args.batch))
        return 0
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        folder = Path(scratch) / "set"
        _make_set(folder, args.gigabytes)
        result = {
            "settings": {"gigabytes": args.gigabytes, "batch": args.batch, "rounds": args.rounds, "frames": FRAMES},
            "first_batch": _first_batch(folder, args.batch),
            "warm": _interleaved(_contenders(folder, args.batch), args),
            "cold": _cold(folder, args.batch),
            "workers": _with_workers(folder, args),
            "seek": _seek(folder, args.batch),
            "order": _order_of_1e8(),
            "memory_mb": _memory(folder, Path(scratch) / "small", args),
        }
    _show(console, result)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=1))
        console.print(f"written: {args.json}")
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments bench stream", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the synthetic set (default 1)")
    parser.add_argument("--batch", type=int, default=64, help="clips of a batch (default 64)")
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds (default 40)")
    parser.add_argument("--scratch", help="folder for the synthetic set (default: the system's)")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--scale", action="store_true", help="simulate a set of --hours on --ranks instead")
    parser.add_argument("--hours", type=int, default=160_000, help="of the simulated set (default 160000)")
    parser.add_argument("--ranks", type=int, default=1024, help="of the simulated run (default 1024)")
    parser.add_argument("--global-batch", type=int, default=8192, help="of the simulated run (default 8192)")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _make_set(folder: Path, gigabytes: float) -> None:
    """Write tracks of 30 to 300 s of random codes."""
    rng = np.random.default_rng(0)
    wanted, written = int(gigabytes * 1e9), 0
    with ShardWriter(folder, CODEC) as writer, Progress(transient=True) as progress:
        task = progress.add_task("writing the synthetic set", total=wanted)
        for number in itertools.count():
            codes = rng.integers(0, 1024, (8, int(rng.integers(2250, 22500))), dtype=np.int16)
            writer.add(codes, f"track {number}")
            written += codes.nbytes
            progress.update(task, completed=written)
            if written >= wanted:
                return


def _stream(folder: Path, batch: int) -> TokenStream:
    return TokenStream([ShardSet(str(folder))], num_frames=FRAMES, global_batch=batch)


def _first_batch(folder: Path, batch: int) -> Row:
    """Seconds from nothing (no index read) to the first batch, its blocks hashed; page cache warm and cold."""
    times: dict[str, list[float]] = {"warm": [], "cold": [], "warm CPU": []}
    for name, _ in itertools.product(("warm", "cold"), range(9)):
        if name == "cold":
            _forget(folder)
        _clock.start()
        next(iter(TokenLoader(_stream(folder, batch))))
        _clock.stop()
        times[name].append(_clock.wall)
        if name == "warm":
            times["warm CPU"].append(_clock.cpu)
        _touch(folder)
    return {name: statistics.median(values) for name, values in times.items()}


def _contenders(folder: Path, batch: int) -> dict[str, Source]:
    """Each takes a number of batches and serves them."""
    found: dict[str, Source] = {
        "raw gather, memory map": _raw_memmap(folder, batch),
        "raw gather, preadv": _raw_preadv(folder, batch),
        "this stream, 0 workers": _ours(folder, batch),
        "this stream, 0 workers, no hashes": _ours(folder, batch, verify=False),
    }
    if importlib.util.find_spec("torchdata") is not None:
        found["torchdata StatefulDataLoader, 0 workers"] = _torchdata(folder, batch)
    if importlib.util.find_spec("litdata") is not None:
        found["litdata StreamingDataLoader, 0 workers"] = _litdata(folder, batch)
    return found


def _places(folder: Path) -> Iterator[tuple[int, int]]:
    """Random shards and first frames, for ever."""
    shards = load_index(folder).shards
    rng = np.random.default_rng(1)
    frames = np.array([shard.frames for shard in shards])
    while True:
        chosen = rng.choice(len(shards), 8192, p=frames / frames.sum())
        starts = (rng.random(8192) * (frames[chosen] - FRAMES)).astype(np.int64)
        yield from zip(chosen.tolist(), starts.tolist(), strict=True)


def _raw_memmap(folder: Path, batch: int) -> Source:
    shards = load_index(folder).shards
    maps = [np.memmap(folder / s.file, np.int16, "r", HEADER_BYTES, (s.frames, 8)) for s in shards]
    places = _places(folder)

    def serve(batches: int) -> None:
        todo = list(itertools.islice(places, batches * batch))
        _clock.start()
        for low in range(0, len(todo), batch):
            out = np.empty((batch, FRAMES, 8), np.int16)
            for row, (shard, start) in enumerate(todo[low : low + batch]):
                out[row] = maps[shard][start : start + FRAMES]
            torch.from_numpy(out)
        _clock.stop()

    return serve


def _raw_preadv(folder: Path, batch: int) -> Source:
    files = [os.open(folder / shard.file, os.O_RDONLY) for shard in load_index(folder).shards]
    places, size = _places(folder), FRAMES * 16

    def serve(batches: int) -> None:
        todo = list(itertools.islice(places, batches * batch))
        _clock.start()
        for low in range(0, len(todo), batch):
            out = np.empty((batch, FRAMES, 8), np.int16)
            view = memoryview(out.data).cast("B")
            for row, (shard, start) in enumerate(todo[low : low + batch]):
                os.preadv(files[shard], [view[row * size : (row + 1) * size]], HEADER_BYTES + start * 16)
            torch.from_numpy(out)
        _clock.stop()

    return serve


def _ours(folder: Path, batch: int, verify: bool = True) -> Source:
    stream = TokenStream([ShardSet(str(folder))], num_frames=FRAMES, global_batch=batch, verify=verify)
    return _loop(iter(TokenLoader(stream)), warm_up=stream.batches_per_epoch)


def _loop(batches: Iterator[object], warm_up: int) -> Source:
    for _ in range(warm_up):
        next(batches)

    def serve(count: int) -> None:
        _clock.start()
        for _ in range(count):
            next(batches)
        _clock.stop()

    return serve


class _Clips(torch.utils.data.Dataset[torch.Tensor]):
    """The set as a map-style dataset of whole batches' worth of clips, for loaders that bring their own order."""

    def __init__(self, folder: Path) -> None:
        self.shards = load_index(folder).shards
        self.files = [os.open(folder / shard.file, os.O_RDONLY) for shard in self.shards]
        self.ends = np.cumsum([shard.frames // FRAMES for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, items: list[int]) -> torch.Tensor:
        out = np.empty((len(items), FRAMES, 8), np.int16)
        view, size = memoryview(out.data).cast("B"), FRAMES * 16
        shards = np.searchsorted(self.ends, items, side="right").tolist()
        for row, (item, shard) in enumerate(zip(items, shards, strict=True)):
            first = item - (int(self.ends[shard - 1]) if shard else 0)
            place = HEADER_BYTES + first * size
            os.preadv(self.files[shard], [view[row * size : (row + 1) * size]], place)
        return torch.from_numpy(out)


def _torchdata(folder: Path, batch: int) -> Source:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(_Clips(folder), batch, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    return _loop(itertools.chain.from_iterable(itertools.repeat(loader)), warm_up=20)


@functools.cache
def _clips(folder: str) -> _Clips:
    return _Clips(Path(folder))


def _one_clip(item: int, folder: str) -> np.ndarray[Any, np.dtype[np.int16]]:
    clip: np.ndarray[Any, np.dtype[np.int16]] = _clips(folder).__getitems__([item])[0].numpy()
    return clip


def _litdata(folder: Path, batch: int) -> Source:
    """The same clips as litdata's own chunks of 64 MB; written once, by one process."""
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
    import litdata

    out = folder.parent / "litdata"
    inputs = list(range(min(20_000, len(_Clips(folder)))))
    litdata.optimize(
        functools.partial(_one_clip, folder=str(folder)), inputs, str(out), chunk_bytes="64MB", num_workers=1
    )
    loader = litdata.StreamingDataLoader(litdata.StreamingDataset(str(out), shuffle=True), batch_size=batch)
    return _loop(itertools.chain.from_iterable(itertools.repeat(loader)), warm_up=20)


class _Clock:
    """Wall and CPU time of the last stretch between start and stop."""

    wall = cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu


_clock = _Clock()


def _interleaved(contenders: dict[str, Source], args: argparse.Namespace, batches: int = 40) -> list[Row]:
    """Rounds in which each contender serves a few batches; ratios to the memory map of the same round."""
    walls: dict[str, list[float]] = {name: [] for name in contenders}
    cpus: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, serve in contenders.items():
            serve(batches)
            walls[name].append(_clock.wall / batches / args.batch)
            cpus[name].append(_clock.cpu / batches / args.batch)
    base = next(iter(contenders))
    return [
        {
            "name": name,
            "clips_per_s": 1 / statistics.median(walls[name]),
            "cpu_us": 1e6 * statistics.median(cpus[name]),
            "ratio_wall": statistics.median(a / b for a, b in zip(walls[base], walls[name], strict=True)),
            "ratio_cpu": statistics.median(a / b for a, b in zip(cpus[base], cpus[name], strict=True)),
        }
        for name in contenders
    ]


def _cold(folder: Path, batch: int, batches: int = 25) -> list[Row]:
    """Clips a second when nothing is in the page cache."""
    rows = []
    for name, make in (("raw gather, memory map", _raw_memmap), ("this stream, 0 workers", _cold_ours)):
        rates = []
        for _ in range(3):
            serve = make(folder, batch)
            _forget(folder)
            serve(batches)
            rates.append(batches * batch / _clock.wall)
        rows.append({"name": name, "clips_per_s": statistics.median(rates)})
    _touch(folder)
    return rows


def _cold_ours(folder: Path, batch: int) -> Source:
    """As `_ours`, hashes off as in the raw gather, and nothing read before."""
    stream = TokenStream([ShardSet(str(folder))], num_frames=FRAMES, global_batch=batch, verify=False)
    return _loop(iter(TokenLoader(stream)), warm_up=0)


def _forget(folder: Path) -> None:
    """Drop the set's pages from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _touch(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


def _with_workers(folder: Path, args: argparse.Namespace, batches: int = 150) -> list[Row]:
    """Clips a second and CPU of all processes with reading processes."""
    rows = []
    for workers in (0, 1, 2):
        loader = TokenLoader(_stream(folder, args.batch), num_workers=workers)
        source = iter(loader)
        start = time.perf_counter()
        next(source)
        first = time.perf_counter() - start
        for _ in range(loader.stream.batches_per_epoch // 4):
            next(source)
        before, start = _cpu_of_all(), time.perf_counter()
        for _ in range(batches):
            next(source)
        wall, cpu = time.perf_counter() - start, _cpu_of_all() - before
        clips = batches * args.batch
        rows.append({"workers": workers, "clips_per_s": clips / wall, "cpu_us": 1e6 * cpu / clips, "first_s": first})
        loader.close()
    return rows


def _cpu_of_all() -> float:
    """CPU seconds of this process and its living children."""
    total = time.process_time()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _seek(folder: Path, batch: int) -> list[Row]:
    """Milliseconds from `load_state_dict` to the batch: a rewind, and a resume from nothing."""
    loader = TokenLoader(_stream(folder, batch))
    rows = []
    for position in (0, 10**4, 10**6, FAR):
        state = {**loader.state_dict(), "batch_number": position // batch}
        rewinds, resumes = [], []
        for _ in range(15):
            start = time.perf_counter()
            loader.load_state_dict(state)
            next(iter(loader))
            rewinds.append(time.perf_counter() - start)
            start = time.perf_counter()
            fresh = TokenLoader(_stream(folder, batch))
            fresh.load_state_dict(state)
            next(iter(fresh))
            resumes.append(time.perf_counter() - start)
            next(_elsewhere(loader))
        rows.append(
            {
                "position": position,
                "rewind_ms": 1e3 * statistics.median(rewinds),
                "resume_ms": 1e3 * statistics.median(resumes),
            }
        )
    return rows


def _elsewhere(loader: TokenLoader) -> Iterator[object]:
    """The loader moved far from where it was, so that the next rewind finds nothing planned."""
    loader.load_state_dict({**loader.state_dict(), "batch_number": 123_456_789})
    return iter(loader)


def _order_of_1e8() -> Row:
    """Time and memory of the order of 10^8 clips: nothing is materialised."""
    order = Order(part_clips=(0, FAR), shard_clips=(0, FAR), seed=0, global_batch=1024)
    positions = np.arange(8192) + FAR // 2
    order.samples(positions)
    times = []
    for _ in range(30):
        start = time.process_time()
        order.samples(positions)
        times.append(time.process_time() - start)
    tracemalloc.start()
    order.samples(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.process_time()
    whole = np.random.default_rng(0).permutation(FAR // 10)
    drawn = time.process_time() - start
    return {
        "ns_per_clip": 1e9 * statistics.median(times) / len(positions),
        "peak_mb": peak / 1e6,
        "permutation_s": 10 * drawn,
        "permutation_mb": 10 * whole.nbytes / 1e6,
    }


def _memory(folder: Path, small: Path, args: argparse.Namespace) -> Row:
    """Resident megabytes of a process that served 300 batches, over those of one that only imported, by set size."""
    _make_set(small, args.gigabytes / 8)
    sizes = {}
    for name, path in (("none", ""), ("an eighth", str(small)), ("whole", str(folder))):
        command = [sys.executable, "-m", "experiments", "bench", "stream", "--batch", str(args.batch)]
        done = subprocess.run([*command, f"--memory-of={path}"], capture_output=True, text=True, check=True)
        sizes[name] = float(done.stdout)
    return {name: size - sizes["none"] for name, size in sizes.items() if name != "none"}


def _resident_after(path: str, batch: int) -> float:
    if path:
        batches = iter(TokenLoader(_stream(Path(path), batch)))
        for _ in range(300):
            next(batches)
    fields = Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()
    return float(fields[0]) / 1000


def _show(console: Console, result: dict[str, Any]) -> None:
    settings = result["settings"]
    title = f"{settings['gigabytes']} GB, batches of {settings['batch']} clips of {FRAMES} frames x 8 codebooks"
    table = Table("source", "clips/s", "CPU us/clip", "ratio (wall)", "ratio (CPU)", title=f"warm page cache; {title}")
    for row in result["warm"]:
        ratios = (f"{row['ratio_wall']:.2f}", f"{row['ratio_cpu']:.2f}")
        table.add_row(row["name"], f"{row['clips_per_s']:,.0f}", f"{row['cpu_us']:.2f}", *ratios)
    console.print(table)
    for name in ("torchdata", "litdata"):
        if importlib.util.find_spec(name) is None:
            console.print(f"{name} is not installed: skipped (pip install {name} to compare)")
    for row in result["workers"]:
        rate, cpu = f"{row['clips_per_s']:,.0f} clips/s", f"{row['cpu_us']:.1f} CPU us/clip in all processes"
        console.print(f"{row['workers']} workers: {rate}, {cpu}, first batch after {row['first_s']:.3f} s")
    for row in result["cold"]:
        console.print(f"cold page cache, {row['name']}: {row['clips_per_s']:,.0f} clips/s")
    first, order, memory = result["first_batch"], result["order"], result["memory_mb"]
    console.print(
        f"first batch, index and hashes included: {first['warm']:.3f} s warm"
        f" ({first['warm CPU']:.3f} s of CPU), {first['cold']:.3f} s cold"
    )
    for row in result["seek"]:
        times = f"rewind {row['rewind_ms']:.1f} ms, resume from nothing {row['resume_ms']:.1f} ms"
        console.print(f"position {row['position']:,}: {times}")
    console.print(
        f"order of 10^8 clips: {order['ns_per_clip']:.0f} ns a clip, {order['peak_mb']:.1f} MB at its peak;"
        f" a permutation of them: {order['permutation_s']:.1f} s, {order['permutation_mb']:.0f} MB an epoch"
    )
    sizes = ", ".join(f"{name} of the set: {size:.0f} MB" for name, size in memory.items())
    console.print(f"memory over a process that only imports: {sizes}")
