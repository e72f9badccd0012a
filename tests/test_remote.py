"""Remote shard sets: a real S3 server on loopback, and an HTTP server that fails, stalls, truncates and lies."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from flawed_server import Flawed

from datamodules import cache_folder
from datamodules.cache_folder import CacheError, locked, make_room, used_bytes
from datamodules.object_fetch import FetchError, FetchPolicy, ObjectStore
from datamodules.remote import CacheSettings, ShardCache, is_remote, load_remote_index, open_remote, open_set
from datamodules.set_statistics import read_tracks
from datamodules.shard_reader import ShardReader
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec, ShardError, load_index

pytest.importorskip("aiohttp")
CODEC = Codec("rvq_mel", 24_000, 75.0, 2, 16, {})
QUICK = FetchPolicy(attempts=4, timeout=0.5, backoff=0.01, longest_backoff=0.05, range_bytes=3000)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("set")
    with ShardWriter(root, CODEC, 8000) as writer:
        for seed in range(12):
            writer.add(np.random.default_rng(seed).integers(0, 16, (2, 1000)).astype(np.int16), f"t{seed}")
    assert len(load_index(root).shards) == 6  # of 8,128 bytes each
    return root


@pytest.fixture
def serve(shards):
    with contextlib.ExitStack() as stack:

        def start(flaw=lambda path, number: "", root=shards):
            server = stack.enter_context(Flawed(root, flaw))
            stack.callback(server.shutdown)
            return server

        yield start


def settings(folder, max_bytes=10**6, ahead=0, policy=QUICK):
    return CacheSettings(folder, max_bytes, ahead, policy)


def read_all(url, cache_settings):
    index, cache = open_remote(url, cache_settings)
    reader = ShardReader(url, index, open_shard=cache.open_shard)
    return {track.name: codes_KT.tobytes() for track, _, codes_KT in read_tracks(reader)}


def local(shards):
    return {
        track.name: codes_KT.tobytes() for track, _, codes_KT in read_tracks(ShardReader(shards, load_index(shards)))
    }


def test_http_set_reads_like_the_local_one_and_only_once(serve, shards, tmp_path):
    server = serve()
    assert read_all(server.url, settings(tmp_path)) == local(shards)
    assert not [name for name in server.asked if "offsets" in name]
    before = server.requests
    assert read_all(server.url, settings(tmp_path)) == local(shards)
    assert server.requests == before + 1  # the index alone
    assert not list(tmp_path.glob("*/*.part"))


@pytest.mark.parametrize("flaw", ["500", "503", "stall", "cut"])
def test_failures_that_pass_are_survived(serve, shards, tmp_path, flaw):
    server = serve(lambda path, number: flaw if number % 7 == 1 else "")
    assert read_all(server.url, settings(tmp_path)) == local(shards)


def test_a_server_without_ranges_serves_too(serve, shards, tmp_path):
    server = serve()
    server.ranges = False
    assert read_all(server.url, settings(tmp_path)) == local(shards)


@pytest.mark.parametrize("flaw", ["500", "stall", "cut"])
def test_failures_that_stay_end_in_one_sentence_in_bounded_time(serve, shards, tmp_path, flaw):
    server = serve(lambda path, number: flaw if path.endswith("npy") else "")
    index, cache = open_remote(server.url, settings(tmp_path))
    began = time.monotonic()
    with pytest.raises(
        FetchError, match=r"shard-00000.npy: cannot be fetched: 4 tries in a row failed, last: "
    ) as error:
        cache.open_shard(index.shards[0])
    assert time.monotonic() - began < 10
    assert "\n" not in str(error.value)
    assert not (cache.folder / "shard-00000.npy").exists()


@pytest.mark.parametrize("status", ["403", "404"])
def test_what_trying_again_cannot_cure_fails_at_once(serve, tmp_path, status):
    server = serve(lambda path, number: status if path.endswith("npy") else "")
    index, cache = open_remote(server.url, settings(tmp_path))
    before = server.requests
    with pytest.raises(FetchError, match="check the URL and its permissions"):
        cache.open_shard(index.shards[0])
    assert server.requests == before + 1
    with pytest.raises(FetchError, match=r"nothing/index.json: cannot be fetched"):
        load_remote_index(f"{server.url}/nothing", QUICK)


def test_no_server_at_all(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(FetchError, match="4 tries in a row failed"):
        open_remote(url, settings(tmp_path))
    with pytest.raises(ValueError, match="nosuch"):
        open_remote("nosuch://bucket/set", settings(tmp_path))


def test_garbled_bytes_are_fetched_again_and_never_kept(serve, shards, tmp_path):
    once = serve(lambda path, number: "garble" if number == 3 else "")
    assert read_all(once.url, settings(tmp_path / "a")) == local(shards)
    always = serve(lambda path, number: "garble" if path.endswith("npy") else "")
    index, cache = open_remote(always.url, settings(tmp_path / "b"))
    with pytest.raises(FetchError, match=r"sha256 is not the one in the index \(fetched twice\)"):
        cache.open_shard(index.shards[0])
    assert not list((tmp_path / "b").glob("*/*.npy"))


def test_a_shard_too_short_at_the_store_says_so(serve, shards, tmp_path):
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: 5000 if path.suffix == ".npy" else None])
    index, cache = open_remote(serve(root=tmp_path).url, settings(tmp_path / "cache"))
    with pytest.raises(FetchError, match=r"shard-00000.npy: cannot be fetched"):
        cache.open_shard(index.shards[0])


def test_a_damaged_index_is_refused(serve, shards, tmp_path):
    (tmp_path / "index.json").write_bytes((shards / "index.json").read_bytes()[:-50])
    with pytest.raises(ShardError, match=r"index.json: damaged"):
        open_remote(serve(root=tmp_path).url, settings(tmp_path / "cache"))


def test_a_fetch_goes_on_where_it_was_cut(serve, shards, tmp_path):
    server = serve(lambda path, number: "500" if path.endswith("npy") and number > 3 else "")
    index, cache = open_remote(server.url, settings(tmp_path))
    with pytest.raises(FetchError):
        cache.open_shard(index.shards[0])
    part = next(cache.folder.glob("*.part"))
    assert part.stat().st_size == 6000  # two ranges came
    server.flaw = lambda path, number: ""
    before = server.requests
    assert cache.open_shard(index.shards[0]).read_bytes() == (shards / "shard-00000.npy").read_bytes()
    assert server.requests == before + 1


def test_the_cache_stays_within_its_bound_and_drops_the_oldest(serve, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "GRACE_SECONDS", 0.3)
    index, cache = open_remote(serve().url, settings(tmp_path, max_bytes=3 * 8128 + 100))
    for number, shard in enumerate(index.shards[:3]):
        path = cache.open_shard(shard)
        os.utime(path, (1000 + number, 1000))
    os.utime(cache.folder / "shard-00000.npy", (2000, 1000))  # used again, later than the others
    cache.open_shard(index.shards[3])
    assert {path.name for path in cache.folder.glob("*.npy")} == {f"shard-0000{i}.npy" for i in (0, 2, 3)}
    assert used_bytes(tmp_path) <= 3 * 8128 + 100
    assert read_all(serve().url, settings(tmp_path, max_bytes=3 * 8128 + 100)) == local(shards)
    assert used_bytes(tmp_path) <= 3 * 8128 + 100


def test_a_cache_too_small_is_refused_at_once(serve, tmp_path):
    with pytest.raises(ValueError, match="raise max_bytes or lower"):
        open_remote(serve().url, settings(tmp_path, max_bytes=20_000, ahead=4))


def test_fetching_ahead_fills_the_cache_before_it_is_asked(serve, shards, tmp_path):
    server = serve()
    index, cache = open_remote(server.url, settings(tmp_path, ahead=2))
    cache.fetch_ahead(index.shards)
    end = time.monotonic() + 10
    while len(list(cache.folder.glob("*.npy"))) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    before = server.requests
    for shard in index.shards:
        assert cache.open_shard(shard).read_bytes() == (shards / shard.file).read_bytes()
    cache.fetch_ahead(index.shards)
    time.sleep(0.05)
    assert server.requests == before


def test_the_first_miss_brings_the_whole_set_where_it_fits(serve, shards, tmp_path):
    server = serve()
    index, cache = open_remote(server.url, settings(tmp_path / "a", ahead=2))
    cache.open_shard(index.shards[4])
    end = time.monotonic() + 10
    while len(list(cache.folder.glob("*.npy"))) < 6 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(list(cache.folder.glob("*.npy"))) == 6
    assert server.requests == 1 + 6 * 3  # the index, and each of 3 ranges once
    index, small = open_remote(server.url, settings(tmp_path / "b", max_bytes=4 * 8128, ahead=2))
    small.open_shard(index.shards[4])
    time.sleep(0.2)
    assert [path.name for path in small.folder.glob("*.npy")] == ["shard-00004.npy"]


def test_a_failure_ahead_is_reported_by_the_one_who_needs_the_shard(serve, tmp_path):
    server = serve(lambda path, number: "404" if "00003.npy" in path else "")
    index, cache = open_remote(server.url, settings(tmp_path, ahead=2))
    cache.fetch_ahead(index.shards)
    assert cache.open_shard(index.shards[5]).exists()
    with pytest.raises(FetchError, match=r"shard-00003\.npy"):
        cache.open_shard(index.shards[3])


def test_locks_and_room_end_in_a_sentence(tmp_path):
    (tmp_path / "set").mkdir()
    with (
        locked(tmp_path / "a.lock", 1),
        pytest.raises(CacheError, match="held by another process"),
        locked(tmp_path / "a.lock", 0.1),
    ):
        pass
    (tmp_path / "set" / "busy.npy").write_bytes(bytes(80))  # just used
    with pytest.raises(CacheError, match="no room for 50 bytes"):
        make_room(tmp_path, 100, tmp_path / "set" / "new.npy.50.part", 50, 0.1)
    os.utime(tmp_path / "set" / "busy.npy", (1, 1))
    make_room(tmp_path, 100, tmp_path / "set" / "new.npy.50.part", 50, 0.1)
    assert used_bytes(tmp_path) == 50
    make_room(tmp_path, 60, tmp_path / "set" / "other.npy.40.part", 40, 0.1)  # nobody fetches new.npy
    assert used_bytes(tmp_path) == 40


def rank(url, folder, results):
    index, cache = open_remote(url, settings(folder))
    results.put([cache.open_shard(shard).read_bytes() for shard in index.shards])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_share_one_fetch_of_each_shard(serve, shards, tmp_path, method):
    server = serve()
    if method == "fork":
        open_remote(server.url, settings(tmp_path / "other"))  # the parent's event loop must not be the children's
    context = multiprocessing.get_context(method)
    results = context.Queue()
    ranks = [context.Process(target=rank, args=(server.url, tmp_path / "cache", results)) for _ in range(3)]
    server.asked.clear()
    for process in ranks:
        process.start()
    found = [results.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(10)
    expected = [(shards / f"shard-0000{i}.npy").read_bytes() for i in range(6)]
    assert found == [expected] * 3
    assert len([name for name in server.asked if name.startswith("/shard-00002.npy ")]) == 3  # 3 ranges, not 9


def test_a_killed_rank_leaves_its_lock_and_part_to_others(serve, shards, tmp_path):
    server = serve(lambda path, number: "stall" if number > 3 else "")
    slow = settings(tmp_path, policy=FetchPolicy(attempts=50, timeout=5, range_bytes=3000))
    index, cache = open_remote(server.url, slow)
    process = multiprocessing.get_context("fork").Process(
        target=ShardCache(server.url, index, slow).open_shard, args=(index.shards[0],)
    )
    process.start()
    end = time.monotonic() + 20
    while not any(part.stat().st_size == 6000 for part in cache.folder.glob("*.part")) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    server.flaw = lambda path, number: ""
    server.asked.clear()
    assert cache.open_shard(index.shards[0]).read_bytes() == (shards / "shard-00000.npy").read_bytes()
    assert set(server.asked) == {"/shard-00000.npy bytes=6000-8127"}


def test_a_cache_survives_pickling(serve, shards, tmp_path):
    index, cache = open_remote(serve().url, settings(tmp_path, ahead=1))
    cache.fetch_ahead(index.shards[:1])
    again = pickle.loads(pickle.dumps(cache))
    assert again.open_shard(index.shards[1]).read_bytes() == (shards / "shard-00001.npy").read_bytes()
    again.fetch_ahead(index.shards[2:3])


@pytest.fixture(scope="module")
def s3():
    """A moto server in a process of its own, on loopback."""
    pytest.importorskip("moto")
    pytest.importorskip("flask")
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def test_s3_server(s3, shards, tmp_path):
    import s3fs

    options = {"key": "test", "secret": "test", "endpoint_url": s3}
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    fs.mkdir("music")
    for path in shards.iterdir():
        fs.put_file(str(path), f"music/sets/a/{path.name}")
    policy = FetchPolicy(attempts=3, timeout=10, backoff=0.01, range_bytes=3000, storage_options=options)
    assert read_all("s3://music/sets/a", settings(tmp_path, policy=policy)) == local(shards)
    with pytest.raises(FetchError, match=r"s3://music/sets/b/index.json: cannot be fetched \(FileNotFoundError"):
        open_remote("s3://music/sets/b", settings(tmp_path, policy=policy))
    fs.pipe_file("music/sets/a/shard-00001.npy", bytes(8128))
    index, cache = open_remote("s3://music/sets/a", settings(tmp_path / "new", policy=policy))
    assert cache.open_shard(index.shards[0]).exists()
    with pytest.raises(FetchError, match="sha256 is not the one in the index"):
        cache.open_shard(index.shards[1])


def test_policies_out_of_range():
    for wrong in ({"attempts": 0}, {"timeout": 0}, {"range_bytes": 0}, {"backoff": -1}):
        with pytest.raises(ValueError, match="must be above 0"):
            FetchPolicy(**wrong)
    index, open_shard = open_set("bundled")
    assert index.checksum == load_index("bundled").checksum
    assert open_shard is None
    assert is_remote("s3://a/b")
    assert not is_remote("/data/set")
    assert ObjectStore("http://x/y/", QUICK).url == "http://x/y"
    assert isinstance(Path(CacheSettings().folder), Path)


def batches(stream, workers):
    from datamodules.loader import TokenLoader  # not above: the ranks spawned here need no torch

    loader = TokenLoader(stream, num_workers=workers, start_method="fork" if workers else None)
    return [batch["codes"].numpy().tobytes() for batch, _ in zip(loader, range(6), strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_over_a_cache_is_the_local_stream(serve, shards, tmp_path, workers):
    from datamodules.stream import ShardSet, TokenStream

    index, cache = open_remote(serve().url, settings(tmp_path, ahead=2))
    options = {"num_frames": 64, "global_batch": 8, "seed": 3}
    remote = TokenStream([ShardSet("http://set", index=index, open_shard=cache.open_shard)], **options)
    assert batches(remote, workers) == batches(TokenStream([ShardSet(str(shards))], **options), 0)
