"""Damage of every kind: one clear error each, from reading and from verifying; a fuzz loop in which none is silent."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from datamodules.loader import TokenLoader
from datamodules.shard_verify import verify_set
from datamodules.shard_writer import ShardWriter
from datamodules.shards import Codec, load_index, parse_index
from datamodules.stream import BadShards, ShardSet, TokenStream

CODEC = Codec("test", 24000, 75.0, 4, 64, {"bandwidth": 6.0})
TRACKS, SHARDS = 12, 3


def make_set(root: Path, seed: int = 0, codec: Codec = CODEC) -> Path:
    rng = np.random.default_rng(seed)
    with ShardWriter(root, codec, 1600 * codec.codebooks // 4) as writer:
        for i in range(TRACKS):
            writer.add(rng.integers(0, codec.codebook_size, (codec.codebooks, 50)), f"{seed}-{i}")
    assert len(load_index(root).shards) == SHARDS
    return root


def serve(root: Path, skip: bool = False, verify: bool = True) -> list[bytes]:
    """The codes of three epochs, which touch every crop's bytes; raises what reading raises."""
    policy = BadShards("skip", 1) if skip else None
    stream = TokenStream([ShardSet(str(root))], num_frames=10, global_batch=12, on_bad_shard=policy, verify=verify)
    batches = iter(TokenLoader(stream))
    return [next(batches)["codes"].numpy().tobytes() for _ in range(3 * stream.batches_per_epoch)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return make_set(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def flip(path: Path, place: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bits
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(path, change(np.load(path)))


def swap(root: Path) -> None:
    a, b, spare = root / "shard-00000.npy", root / "shard-00001.npy", root / "spare"
    a.rename(spare), b.rename(a), spare.rename(b)


def with_index_of(root: Path, codec: Codec) -> None:
    make_set(root / "other", 9, codec)
    shutil.copy(root / "other" / "index.json", root / "index.json")
    shutil.rmtree(root / "other")


def code_out_of_range(array: np.ndarray) -> np.ndarray:
    array[123, 2] = 64
    return array


S0, O0 = "shard-00000.npy", "shard-00000.offsets.npy"
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "header flipped": (lambda r: flip(r / S0, 30), f"{S0}: damaged: its .npy header is damaged"),
    "magic flipped": (lambda r: flip(r / S0, 0), f"{S0}: damaged: its .npy header is damaged"),
    "padding flipped": (lambda r: flip(r / S0, 120), f"{S0}: damaged: its .npy header is"),
    "data flipped": (lambda r: flip(r / S0, 500), f"{S0}: damaged: bytes 0..1728 do not have the sha256"),
    "offsets flipped": (lambda r: flip(r / O0, 140), f"{O0}: damaged: its sha256"),
    "index flipped": (lambda r: flip(r / "index.json", 2), "index.json: damaged: not valid JSON|not a ballast"),
    "data truncated": (lambda r: (r / S0).write_bytes((r / S0).read_bytes()[:-1]), f"{S0}: truncated: 1727 bytes"),
    "data empty": (lambda r: (r / S0).write_bytes(b""), f"{S0}: truncated: 0 bytes, index.json says 1728"),
    "data extended": (lambda r: (r / S0).open("ab").write(b"x"), f"{S0}: too long: 1729 bytes"),
    "offsets truncated": (lambda r: (r / O0).write_bytes(b""), f"{O0}: truncated: 0 bytes"),
    "index truncated": (lambda r: (r / "index.json").write_bytes(b'{"a'), r"index\.json: damaged: not valid JSON"),
    "data missing": (lambda r: (r / S0).unlink(), f"{S0}: listed in index.json but missing"),
    "offsets missing": (lambda r: (r / O0).unlink(), f"{O0}: listed in index.json but missing"),
    "index missing": (lambda r: (r / "index.json").unlink(), r"index\.json: no index\.json"),
    "swapped": (swap, f"{S0}: damaged: bytes .* do not have the sha256|{S0[:-5]}1.npy: damaged: bytes"),
    "wrong dtype": (lambda r: rewrite(r / S0, lambda a: a.astype("<u2")), f"{S0}: damaged: wrong dtype: .* uint16"),
    "big endian": (lambda r: rewrite(r / S0, lambda a: a.astype(">i2")), f"{S0}: damaged: wrong dtype: .* >i2"),
    "wider dtype": (lambda r: rewrite(r / S0, lambda a: a.astype("<i4")), f"{S0}: too long"),
    "transposed": (lambda r: rewrite(r / S0, lambda a: a.T.copy()), rf"{S0}: damaged: transposed: .* \(4, 200\)"),
    "fortran order": (lambda r: rewrite(r / S0, np.asfortranarray), f"{S0}: damaged: transposed: .*Fortran order"),
    "other shape": (
        lambda r: rewrite(r / S0, lambda a: a.reshape(400, 2)),
        f"{S0}: damaged: wrong shape",
    ),
    "code out of range": (lambda r: rewrite(r / S0, code_out_of_range), f"{S0}: damaged: bytes .* sha256"),
    "other set's index": (lambda r: with_index_of(r, CODEC), f"{S0}: damaged: .*sha256|{O0[:-13]}"),
    "other codec's index": (
        lambda r: with_index_of(r, Codec("other", 24000, 75.0, 8, 1024, {})),
        f"{S0}: truncated|too long",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_damage_is_one_clear_error(copy, kind):
    damage, message = KINDS[kind]
    damage(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        serve(copy)
    assert "\n" not in str(caught.value)
    if kind == "index missing":
        return
    faults = [fault for fault in verify_set(copy) if fault.fatal]
    assert faults
    assert all(str(copy) in fault.file and fault.remedy for fault in faults)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "index" not in kind and kind != "swapped"])
def test_each_kind_of_damage_can_be_skipped(copy, kind):
    KINDS[kind][0](copy)
    with pytest.warns(UserWarning, match=r"shard skipped \(1 so far\)"):
        batches = serve(copy, skip=True)
    with pytest.warns(UserWarning, match="shard skipped"):
        assert serve(copy, skip=True) == batches


def test_extra_files_are_ignored_and_named_by_verify(sound, copy):
    (copy / "shard-00099.npy").write_bytes(b"whatever")
    (copy / "shard-00098.npy.tmp").write_bytes(b"whatever")
    assert serve(copy) == serve(sound)
    faults = verify_set(copy)
    assert [Path(fault.file).name for fault in faults] == ["shard-00098.npy.tmp", "shard-00099.npy"]
    assert not any(fault.fatal for fault in faults)


def test_a_code_out_of_range_is_placed_even_without_hashes(copy):
    rewrite(copy / S0, code_out_of_range)
    with pytest.raises(ValueError, match=r"code 64 outside 0\.\.63 at row 123, codebook 2, frame \d of the clip"):
        serve(copy, verify=False)


def test_verify_names_the_rows_and_tracks(copy):
    rewrite(copy / S0, code_out_of_range)
    faults = [str(fault) for fault in verify_set(copy)]
    assert any(
        "row 0: rows 0..199 do not have the recorded sha256 (tracks 0-0, 0-1, 0-2 and 1 more)" in f for f in faults
    )
    assert any("row 123: code 64 outside 0..63 in codebook 2 (1 such codes)" in fault for fault in faults)


def test_verify_places_a_fault_in_a_later_block(tmp_path, monkeypatch):
    for module in ("shards", "shard_files", "shard_verify", "shard_writer"):
        monkeypatch.setattr(f"datamodules.{module}.BLOCK_BYTES", 300)  # not a multiple of a frame
    root = make_set(tmp_path / "set")
    assert verify_set(root) == []
    serve(root)
    rewrite(root / S0, code_out_of_range)
    faults = verify_set(root)
    rows = sorted(fault.row for fault in faults if fault.row is not None)
    block = (128 + 123 * 8 + 4) // 300
    assert rows == [(block * 300 - 128) // 8, 123]
    with pytest.raises(ValueError, match=f"bytes {block * 300}..{block * 300 + 300} do not have"):
        serve(root)


def same_content(root: Path, index: bytes) -> bool:
    """Whether a changed index still says exactly the same (white space, an escape)."""
    try:
        return json.loads((root / "index.json").read_bytes()) == json.loads(index)
    except ValueError:
        return False


def damage_once(root: Path, rng: np.random.Generator) -> str:
    paths = sorted(root.iterdir())
    weights = np.array([3.0 if path.name == "index.json" else 1.0 for path in paths])
    path = paths[rng.choice(len(paths), p=weights / weights.sum())]
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "byte", "zero run", "cut", "grow", "insert", "delete", "unlink", "copy of another"])
    place = int(rng.integers(len(data)))
    if kind == "flip":
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == "byte":
        data[place] = int(rng.integers(256))
    elif kind == "zero run":
        data[place : place + 16] = bytes(len(data[place : place + 16]))
    elif kind == "cut":
        del data[place:]
    elif kind == "grow":
        data += rng.bytes(int(rng.integers(1, 40)))
    elif kind == "insert":
        data[place:place] = rng.bytes(2)
    elif kind == "delete":
        del data[place : place + int(rng.integers(1, 9))]
    elif kind == "unlink":
        path.unlink()
        return f"{path.name}: {kind}"
    else:
        data = bytearray(paths[int(rng.integers(len(paths)))].read_bytes())
    path.write_bytes(data)
    return f"{path.name}: {kind} at {place}"


def test_fuzz_no_damage_is_silent_or_without_a_message(sound, tmp_path):
    expected, index = serve(sound), (sound / "index.json").read_bytes()
    files = {path.name: path.read_bytes() for path in sound.iterdir()}
    root = tmp_path / "copy"
    root.mkdir()
    rng = np.random.default_rng(2026)
    loud = 0
    for _ in range(600):
        for name, data in files.items():
            if not (root / name).exists() or (root / name).read_bytes() != data:
                (root / name).write_bytes(data)
        what = damage_once(root, rng)
        changed = any(not (root / n).exists() or (root / n).read_bytes() != d for n, d in files.items())
        try:
            got = serve(root)
        except (ValueError, FileNotFoundError) as error:
            message = str(error)
            assert message.count("\n") == 0, what
            assert str(root) in message, (what, message)
            loud += 1
            continue
        assert not changed or same_content(root, index), f"silent: {what}"
        assert got == expected, what
    assert loud >= 500


def test_fuzz_skipping_never_serves_damaged_codes(sound, tmp_path):
    files = {path.name: path.read_bytes() for path in sound.iterdir()}
    whole = {
        bytes(f) for f in np.concatenate([np.load(sound / s.file) for s in load_index(sound).shards]).view("V8")[:, 0]
    }
    root = tmp_path / "copy"
    root.mkdir()
    rng = np.random.default_rng(7)
    for _ in range(60):
        for name, data in files.items():
            (root / name).write_bytes(data)
        damage_once(root, rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                batches = serve(root, skip=True)
            except (ValueError, FileNotFoundError):
                continue
        served = np.frombuffer(b"".join(batches), "<i2").reshape(-1, 4, 10).transpose(0, 2, 1)
        frames = {bytes(f) for f in np.ascontiguousarray(served).view("V8").reshape(-1)}
        assert frames <= whole


def test_fuzz_any_bytes_as_an_index_are_an_error_or_an_index():
    rng = np.random.default_rng(3)
    for _ in range(300):
        text = rng.choice(
            [b'{"format": "ballast-shards"', b"[]", b"null", b"{}", b"\xff\xfe", b'{"format": 1}', b"[" * 10**5]
        )
        with pytest.raises(ValueError, match="x"):
            parse_index(text + rng.bytes(int(rng.integers(4))), "x")
