"""The picture of a scan: it is drawn for every kind of run, and no spike is lost to thinning."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from callbacks.detector import DetectorConfig
from experiments import scan_plot
from experiments.readers.series import Series
from experiments.scan_detect import ScanResult, detect


def result_of(loss: list[float], grad: list[float | None] | None = None) -> ScanResult:
    count = len(loss)
    series = Series(
        Path("runs/a/metrics.csv"), "csv", count, list(range(count)), list(range(count)), loss,
        grad or [None] * count, "train/loss", "gnorm" if grad else None, "step",
    )  # fmt: skip
    return detect(series, DetectorConfig())


def noisy(count: int, level: float = 3.0) -> list[float]:
    return (level + 0.05 * np.random.default_rng(0).standard_normal(count)).tolist()


def spiky() -> ScanResult:
    loss = noisy(900)
    loss[500:560] = [value + 3.0 for value in loss[500:560]]
    loss[800] = math.nan
    return result_of(loss, grad=[1.0 + 0.01 * (i % 7) for i in range(900)])


@pytest.mark.parametrize(
    "loss",
    [
        [], [math.nan], [1.0], [0.5] * 50, [math.nan] * 40, [math.inf, -math.inf] * 20, noisy(200, -3.0),
        [*noisy(200), *(10.0**k for k in range(300))], [*noisy(100, 0.0), 1e6, *noisy(100, 0.0)],
    ],
    ids=["empty", "one_nan", "one", "constant", "nans", "infinities", "negative", "divergence", "around_zero"],
)  # fmt: skip
def test_every_kind_of_run_is_drawn(tmp_path: Path, loss: list[float]) -> None:
    (path,) = scan_plot.draw([result_of(loss)], tmp_path / "out.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_many_runs_make_pages(tmp_path: Path) -> None:
    results = [result_of(noisy(30))] * (scan_plot.RUNS_PER_PAGE + 1)
    pages = scan_plot.draw(results, tmp_path / "out.png")
    assert pages == [tmp_path / "out-1.png", tmp_path / "out-2.png"]
    assert sorted(tmp_path.iterdir()) == pages


def test_episodes_band_and_gradient_panel_are_there() -> None:
    result = spiky()
    kinds = {episode.kind for episode in result.episodes if episode.actionable}
    assert "non_finite" in kinds
    figure = scan_plot._page([result])
    (panel,) = figure.subfigs
    loss_axes, grad_axes = panel.axes
    shaded = [patch.get_facecolor()[:3] for patch in loss_axes.patches]
    for kind in kinds:
        assert any(np.allclose(color, hex_color(scan_plot.COLORS[kind])) for color in shaded), kind
    assert len(loss_axes.collections) == 1  # the band
    assert grad_axes.get_ylabel() == "gnorm"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "non_finite (acts)" in labels
    assert "gradient norm" in labels


def hex_color(text: str) -> tuple[float, ...]:
    return tuple(int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_thinning_keeps_every_spike() -> None:
    y = np.ones(1_000_000)
    y[[12_345, 999_999]] = 50.0, -50.0
    y[500_000:500_100] = np.nan
    keep = scan_plot.thin(y)
    assert len(keep) <= scan_plot.MAX_POINTS
    assert {12_345, 999_999} <= set(keep.tolist())
    assert (np.diff(keep) > 0).all()


def test_a_resumed_run_is_not_drawn_as_a_zig_zag() -> None:
    axes = Figure().subplots()
    scan_plot._curve(axes, np.array([1.0, 2.0, 3.0, 2.0, 3.0]), np.arange(5.0), "blue")
    x = np.asarray(axes.lines[0].get_xdata(), float)
    assert np.isnan(x[3])
    assert (np.diff(x[:3]) > 0).all()


@pytest.mark.parametrize(
    ("loss", "scale"),
    [(noisy(300), "linear"), ([*noisy(300), 500.0], "log"), ([*noisy(300, 0.0), 500.0], "symlog")],
)
def test_extreme_ranges_get_a_logarithmic_axis(loss: list[float], scale: str) -> None:
    axes = Figure().subplots()
    scan_plot.set_scale(axes, np.asarray(loss))
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low < min(loss)
    assert high > max(loss)


def test_the_first_descent_does_not_squeeze_the_run_but_later_spikes_stay_in_view() -> None:
    axes = Figure().subplots()
    loss = [11.0 - 0.7 * i for i in range(10)] + [4.0 + 0.01 * (i % 5) for i in range(990)]
    loss[700] = 4.8
    scan_plot.set_scale(axes, np.asarray(loss))
    assert 4.8 < axes.get_ylim()[1] < 6.0


def test_names_drop_what_the_runs_share() -> None:
    assert scan_plot.short_names(["runs/x/a/m.csv", "runs/x/b/m.csv"]) == ["a/m.csv", "b/m.csv"]
    assert scan_plot.short_names(["m.csv"]) == ["m.csv"]
    (name,) = scan_plot.short_names(["a" * 200])
    assert len(name) <= 62
