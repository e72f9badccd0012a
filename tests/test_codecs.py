"""The codecs behind one interface: shapes, reproducibility, windows, and what is said when something is missing."""

import importlib.util
import os
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import music

from datamodules.codec_rvq_mel import LogMel, hertz_to_mel, mel_filters, mel_to_hertz
from datamodules.codecs import CODECS, CodecOptions, build_codec, build_features
from datamodules.residual_kmeans import ResidualKMeans, fit, load_books

LYRA = os.environ.get("BALLAST_LYRA_WEIGHTS", "")


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    features_TD = LogMel()(np.ascontiguousarray(music(20, 24_000, 0).T))
    path = tmp_path_factory.mktemp("books") / "books.npz"
    path.write_bytes(fit(features_TD, 3, 32).to_bytes())
    return path


def audio(seconds, seed=1):
    return np.ascontiguousarray(music(seconds, 24_000, seed).T)


def test_log_mel_puts_a_sine_into_its_band_and_follows_its_power():
    time_N = np.arange(24_000) / 24_000
    corners = mel_to_hertz(np.linspace(hertz_to_mel(30), hertz_to_mel(12_000), 130))
    for hertz in (200.0, 1000.0, 5000.0):
        sine = np.sin(2 * np.pi * hertz * time_N).astype(np.float32)[None]
        loud, soft = LogMel()(sine), LogMel()(0.1 * sine)
        band = int(loud[30].argmax())
        assert corners[band] < hertz < corners[band + 2]
        assert loud[30, band] - soft[30, band] == pytest.approx(np.log(100), abs=1e-2)


def test_mel_filters_are_averages_without_gaps():
    filters_FM = mel_filters()
    np.testing.assert_allclose(filters_FM.sum(axis=0), 1, rtol=1e-5)
    hertz = np.arange(513) * 24_000 / 1024
    inside = (hertz > 60) & (hertz < 11_900)
    assert (filters_FM[inside].sum(axis=1) > 0).all()
    assert (np.diff(filters_FM.argmax(axis=0)) >= 0).all()


def test_frame_t_hears_only_its_surroundings():
    sound = np.zeros((1, 24_000), np.float32)
    sound[0, 40 * 320 + 160] = 1.0
    loud_T = LogMel()(sound).max(axis=1) > np.log(2e-7)
    assert loud_T.nonzero()[0].tolist() == [39, 40, 41]
    assert LogMel()(sound[:, :1000]).shape == (3, 128)  # 1000 // 320


def test_rvq_mel_encodes_and_the_books_bring_the_features_back(books):
    codec = build_codec(CodecOptions("rvq_mel", books=str(books), num_codebooks=3))
    codes_KT = codec.encode(audio(4))
    assert (codes_KT.dtype, codes_KT.shape) == (np.int16, (3, 300))
    assert (codec.spec.sample_rate, codec.spec.frame_rate, codec.spec.codebook_size) == (24_000, 75, 32)
    features_TD, residual = LogMel()(audio(4)), load_books(books)
    left_TD = [(features_TD - residual.decode(codes_KT[:k])) / residual.scale_D for k in range(4)]
    energy = [float(np.square(left).mean()) for left in left_TD]
    assert energy[0] > energy[1] > energy[2] > energy[3]
    assert energy[3] < 0.85 * energy[0]
    fewer = build_codec(CodecOptions("rvq_mel", books=str(books), num_codebooks=2))
    np.testing.assert_array_equal(fewer.encode(audio(4)), codes_KT[:2])
    assert fewer.spec.settings["books_sha256"] != codec.spec.settings["books_sha256"]


def test_nearest_centroids_against_brute_force(books):
    residual = load_books(books)
    rest_TD = (LogMel()(audio(1)) - residual.mean_D) / residual.scale_D
    codes_KT = residual.encode(LogMel()(audio(1)))
    for book_VD, code_T in zip(residual.books_KVD, codes_KT, strict=True):
        distance_TV = np.square(rest_TD[:, None].astype(np.float64) - book_VD).sum(axis=2)
        chosen = distance_TV[np.arange(len(code_T)), code_T]
        np.testing.assert_allclose(chosen, distance_TV.min(axis=1), rtol=1e-4)
        rest_TD = rest_TD - book_VD[code_T]


def test_long_audio_gives_the_codes_of_its_parts(books):
    codec = build_codec(CodecOptions("rvq_mel", books=str(books), num_codebooks=3))
    long = np.tile(audio(20), (1, 4))  # 6000 frames, more than one chunk
    codes_KT = codec.encode(long)
    lows = range(0, long.shape[1], 480_000)
    parts = np.concatenate([codec.encode(long[:, low : low + 480_000]) for low in lows], axis=1)
    assert (codes_KT == parts).mean() > 0.99  # only frames at the seams hear something else


def test_fit_is_reproducible_and_books_survive_the_disk(books, tmp_path):
    features_TD = LogMel()(audio(20, 0))
    again = fit(features_TD, 3, 32)
    assert again.digest == load_books(books).digest
    assert fit(features_TD, 3, 32, seed=1).digest != again.digest
    with pytest.raises(ValueError, match="20 frames cannot fit books of 32 codes"):
        fit(features_TD[:20], 3, 32)
    data = books.read_bytes()
    for name, broken in (("cut", data[: len(data) // 2]), ("text", b"no books"), ("empty", b"")):
        (tmp_path / name).write_bytes(broken)
        with pytest.raises(ValueError, match="not a file of books"):
            load_books(tmp_path / name)
    np.savez(tmp_path / "shapes.npz", books=np.zeros((2, 4, 8)), mean=np.zeros(7), scale=np.ones(8))
    with pytest.raises(ValueError, match=r"must be \(K, V, D\)"):
        load_books(tmp_path / "shapes.npz")


@pytest.mark.parametrize("backend", ["faiss", "sklearn"])
def test_both_backends_fit_clusters_that_are_there(backend, monkeypatch):
    pytest.importorskip(backend)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == backend else None)
    rng = np.random.default_rng(0)
    centres_VD = rng.normal(size=(8, 5)).astype(np.float32) * 10
    features_TD = np.repeat(centres_VD, 50, axis=0) + rng.normal(0, 0.01, (400, 5)).astype(np.float32)
    books = fit(features_TD, 2, 8)
    codes_KT = books.encode(features_TD)
    left = np.square((features_TD - books.decode(codes_KT)) / books.scale_D).mean()
    assert left < 0.05
    assert fit(features_TD, 2, 8).digest == books.digest


def test_constant_features_do_not_break_the_fit():
    books = fit(np.zeros((100, 4), np.float32), 2, 8)
    assert np.isfinite(books.books_KVD).all()
    assert books.encode(np.zeros((5, 4), np.float32)).shape == (2, 5)


# --- EnCodec and DAC: the real classes, small configurations, random weights in a local folder ---

SMALL_ENCODEC = {"num_filters": 4, "hidden_size": 16, "codebook_dim": 16, "num_lstm_layers": 1}
SMALL_DAC = {
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 16,
    "downsampling_ratios": [2, 4, 5, 8],
    "n_codebooks": 12,
    "codebook_dim": 4,
    "sampling_rate": 24_000,
}


@pytest.fixture(scope="module")
def neural(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    import torch

    root = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    encodec = transformers.EncodecModel(transformers.EncodecConfig(**SMALL_ENCODEC))
    with torch.inference_mode():  # the books start at zero, where every distance is a tie: spread them over the latents
        latents_DT = encodec.eval().encoder(torch.from_numpy(audio(5))[None])[0]
        for number, layer in enumerate(encodec.quantizer.layers):
            layer.codebook.embed.normal_().mul_(latents_DT.std(dim=1) / (number + 1))
            layer.codebook.embed.add_(latents_DT.mean(dim=1) if number == 0 else 0)
    dac = transformers.DacModel(transformers.DacConfig(**SMALL_DAC))
    encodec.save_pretrained(root / "encodec")
    dac.save_pretrained(root / "dac")
    return root


def load(neural, name, **options):
    return build_codec(CodecOptions(name, weights=str(neural / name.split("_")[0]), **options))


def test_encodec_short_audio_is_the_models_own_codes(neural):
    import torch
    from transformers import EncodecModel

    codec = load(neural, "encodec_24khz")
    sound = audio(3)
    codes_KT = codec.encode(sound)
    model = EncodecModel.from_pretrained(neural / "encodec").eval()
    with torch.inference_mode():
        expected = model.encode(torch.from_numpy(sound)[None], bandwidth=6.0).audio_codes[0, 0].numpy()
    np.testing.assert_array_equal(codes_KT, expected)
    assert (codes_KT.shape, codes_KT.dtype, codec.spec.frame_rate) == ((8, 225), np.int16, 75.0)
    assert len(np.unique(codes_KT)) > 20


def test_dac_short_audio_is_the_models_own_codes(neural):
    import torch
    from transformers import DacModel

    codec = load(neural, "dac_24khz")
    sound = audio(3)
    model = DacModel.from_pretrained(neural / "dac").eval()
    with torch.inference_mode():
        expected = model.encode(torch.from_numpy(sound)[None], n_quantizers=8).audio_codes[0].numpy()
    np.testing.assert_array_equal(codec.encode(sound), expected)
    assert codec.encode(sound[:, :-100]).shape == (8, 225)  # the last frame is padded, not dropped


@pytest.mark.parametrize("name", ["encodec_24khz", "dac_24khz"])
def test_windows_give_the_codes_of_the_whole(neural, name):
    codec = load(neural, name)
    sound = audio(9, 2)[:, :-77]
    whole_KT = codec.encode(sound)
    codec._window, codec._context = 150, 150
    agree = (codec.encode(sound) == whole_KT).mean()
    assert agree > 0.98, agree
    codec._batch = 3
    assert (codec.encode(sound) == whole_KT).mean() > 0.98
    codec._batch, codec._context = 1, 0
    assert (codec.encode(sound) == whole_KT).mean() < agree  # the context is what makes them agree


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40_000), st.integers(1, 50), st.integers(0, 20))
def test_windows_keep_every_frame_once_and_stay_short(samples, window, context):
    from datamodules.codec_encodec import windows

    kept = []
    for part in windows(samples, 320, window, context):
        assert 0 < part.stop - part.start <= (window + 2 * context) * 320
        assert part.start % 320 == 0
        assert part.start // 320 <= part.low < part.high <= -(-part.stop // 320)
        kept += range(part.low, part.high)
    assert kept == list(range(-(-samples // 320)))


def test_weights_that_are_not_whole_are_refused(neural, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "encodec"
    folder.mkdir()
    (folder / "config.json").write_bytes((neural / "encodec" / "config.json").read_bytes())
    weights = load_file(neural / "encodec" / "model.safetensors")
    lost = next(key for key in weights if key.startswith("encoder."))
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="weights are missing or of another shape"):
        build_codec(CodecOptions("encodec_24khz", weights=str(folder)))
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="no EncodecModel can be read there") as error:
        build_codec(CodecOptions("encodec_24khz", weights=str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("opus", {}, "unknown; choose from rvq_mel"),
        ("rvq_mel", {}, "give --fit"),
        ("rvq_mel", {"weights": "x"}, "has no weights"),
        ("rvq_mel", {"books": "x", "device": "cuda"}, "runs on the CPU only"),
        ("rvq_mel", {"books": "nowhere.npz"}, "no such file of books"),
        ("encodec_24khz", {"weights": "./nowhere"}, "no such folder"),
        ("encodec_24khz", {"books": "x"}, "its own quantizer"),
        ("encodec_24khz", {"device": "cuda:99"}, "not usable here"),
        ("lyra", {}, "needs --weights"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(name, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build_codec(CodecOptions(name, **options))
    assert "\n" not in str(error.value)


def test_neural_limits_are_named(neural):
    with pytest.raises(ValueError, match="this DAC has 12"):
        load(neural, "dac_24khz", num_codebooks=13)
    with pytest.raises(ValueError, match="this EnCodec has at most 32"):
        load(neural, "encodec_24khz", num_codebooks=33)


def test_a_hub_id_without_network_fails_at_once(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"127.0.0.1:9 cannot be reached .*give its folder as --weights") as error:
        build_codec(CodecOptions("encodec_24khz", weights="ballast-tests/no-such-model"))
    assert time.monotonic() - began < 15  # transformers' own retries take 23 s
    assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        build_codec(CodecOptions("dac_24khz", weights="ballast-tests/no-such-model"))


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers.*pip install 'ballast\[codecs\]'"):
        build_codec(CodecOptions("dac_24khz"))
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(ValueError, match=r"pip install 'ballast\[lyra\]'"):
        build_features(CodecOptions("lyra", weights="somewhere"))


@pytest.mark.parametrize("name", list(CODECS))
def test_audio_of_another_shape_is_refused(name, neural, books):
    if name == "lyra":
        pytest.skip("needs the user's weights")
    options = {"books": str(books), "num_codebooks": 3} if name == "rvq_mel" else {"weights": str(neural / name[:-6])}
    codec = build_codec(CodecOptions(name, **options))
    for shape, kind in (((9600,), np.float32), ((2, 9600), np.float32), ((1, 9600), np.float64), ((1, 9), np.float32)):
        wrong = np.zeros(shape, kind)
        with pytest.raises(ValueError, match=r"float32 \[1, N\]|less than one frame"):
            codec.encode(wrong)


@pytest.mark.skipif(not LYRA, reason="set BALLAST_LYRA_WEIGHTS to a folder with soundstream_encoder.tflite")
def test_lyra_latents_and_books(tmp_path):
    pytest.importorskip("ai_edge_litert")
    features = build_features(CodecOptions("lyra", weights=LYRA))
    latents_TD = features(audio(10))
    assert latents_TD.shape == (750, 64)
    np.testing.assert_array_equal(features(audio(10)), latents_TD)  # a track starts afresh, whatever came before
    (tmp_path / "books.npz").write_bytes(fit(latents_TD, 4, 64).to_bytes())
    codec = build_codec(CodecOptions("lyra", weights=LYRA, books=str(tmp_path / "books.npz"), num_codebooks=4))
    codes_KT = codec.encode(audio(10))
    assert codes_KT.shape == (4, 750)
    assert codec.spec.frame_rate == 75
    residual: ResidualKMeans = load_books(tmp_path / "books.npz")
    energy = np.square((latents_TD - residual.decode(codes_KT)) / residual.scale_D).mean()
    assert energy < 0.6
