"""From audio files to codes, in order, by any number of worker processes.

Results come in the order of the files whatever the number of workers, so a set is the same however it was made and
however often it was interrupted. A file that cannot be trusted gives a reason instead of codes; one that crashes its
worker is tried once more alone and then counted as bad, too.

Legend: K codebooks, T frames.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from datamodules.audio import AudioError, AudioFile, read_audio
from datamodules.codecs import AudioCodec, CodecOptions, Codes, build_codec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """What became of one file.

    Attributes:
        file: the file.
        codes_KT: its codes, `[K, T]`; None where it is bad.
        reason: why it is bad, or "".
    """

    file: AudioFile
    codes_KT: Codes | None
    reason: str = ""


def encode_file(file: AudioFile, codec: AudioCodec, min_seconds: float) -> Encoded:
    """Read and encode one file; a bad one comes back with its reason."""
    try:
        audio_1N = read_audio(file.path, codec.spec.sample_rate, min_seconds=min_seconds)
        return Encoded(file, codec.encode(audio_1N))
    except (AudioError, ValueError) as error:
        return Encoded(file, None, str(error))
    except MemoryError:
        return Encoded(file, None, "not enough memory for it")


def encode_files(
    files: Sequence[AudioFile], options: CodecOptions, min_seconds: float, workers: int, codec: AudioCodec | None = None
) -> Iterator[Encoded]:
    """Encode files in order.

    Args:
        files: what to encode.
        options: the codec; each worker builds its own.
        min_seconds: shorter files are bad.
        workers: processes; 0 works in this one.
        codec: the codec, already built, for `workers=0`.

    Yields:
        One `Encoded` per file, in the order of `files`.
    """
    if workers == 0:
        ready = codec or build_codec(options)
        yield from (encode_file(file, ready, min_seconds) for file in files)
        return
    rest = deque(files)
    while rest:
        try:
            for result in _pooled(list(rest), options, min_seconds, workers):
                rest.popleft()
                yield result
        except BrokenProcessPool:
            yield _alone(rest.popleft(), options, min_seconds)


def _alone(file: AudioFile, options: CodecOptions, min_seconds: float) -> Encoded:
    """Encode one file in a process of its own, after a worker died."""
    try:
        return next(_pooled([file], options, min_seconds, 1))
    except BrokenProcessPool:
        return Encoded(file, None, "crashed the process that read it (a decoder's fault, or out of memory)")


def _pooled(files: list[AudioFile], options: CodecOptions, min_seconds: float, workers: int) -> Iterator[Encoded]:
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")  # read by the workers' libraries; spinning threads cost more than they bring
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(files)), mp_context=context, initializer=_start_worker, initargs=(options, min_seconds)
    )
    waiting: deque[Future[Encoded]] = deque()
    try:
        for file in files:
            waiting.append(pool.submit(_work, file))
            if len(waiting) >= IN_FLIGHT_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        if waiting:  # stopped half-way: do not wait for the files in flight
            for child in multiprocessing.active_children():
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[AudioCodec, float]


def _start_worker(options: CodecOptions, min_seconds: float) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = build_codec(options), min_seconds


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(file: AudioFile) -> Encoded:
    codec, min_seconds = _worker
    return encode_file(file, codec, min_seconds)
