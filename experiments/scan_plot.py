"""The picture of ``scan``: each run's loss with its baseline band and its episodes, the gradient norm below.

Legend of shapes: N values of a run, M points drawn.
"""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import SymmetricalLogLocator
from numpy.typing import NDArray

from callbacks.episodes import Episode
from experiments.scan_detect import ScanResult
from experiments.scan_report import one_line, write_atomically

Floats = NDArray[np.float64]

RUNS_PER_PAGE = 12
PANELS_ACROSS = 3
PANEL_INCHES = (5.4, 3.1)
DPI = 110
MAX_POINTS = 3000  # drawn per curve; the smallest and largest value of each stretch are kept
BAND = 4.0  # half width of the baseline band, in units of the noise
EXTREME_RANGE = 8.0  # largest value over median beyond which a linear axis shows nothing but the spike
OFF_SCALE = 1e3  # times the 99th percentile: a divergence beyond it runs off a logarithmic axis
DESCENT_ROOM = 0.5  # how much of the initial descent is shown, in ranges of the later values
LARGEST_DRAWN = 1e100
MAX_MARKS = 60  # outliers and shifts marked per run
COLORS = {
    "outlier": "#8a8a8a", "shift": "#17a2b8", "jump": "#e69500", "rise": "#b04fc4", "divergence": "#d62728",
    "non_finite": "#7a0010",
}  # fmt: skip
LOSS_COLOR, GRAD_COLOR, BAND_COLOR = "#1f5fa8", "#4d7a3a", "#9db8d6"


def draw(results: Sequence[ScanResult], out: Path) -> list[Path]:
    """Draw all runs, twelve to a page.

    Args:
        results: Scanned runs.
        out: PNG, PDF or SVG to write, by its suffix; with several pages ``NAME-1.png``, ``NAME-2.png``, ...

    Returns:
        The files written.
    """
    pages = [results[i : i + RUNS_PER_PAGE] for i in range(0, len(results), RUNS_PER_PAGE)]
    written: list[Path] = []
    for number, page in enumerate(pages, 1):
        path = out if len(pages) == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}")
        write_atomically(path, _render(_page(page), out.suffix))
        written.append(path)
    return written


def _render(figure: Figure, suffix: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.lower().lstrip(".") or "png")
    return buffer.getvalue()


def _page(results: Sequence[ScanResult]) -> Figure:
    across = min(len(results), PANELS_ACROSS if len(results) > 4 else 2)
    down = math.ceil(len(results) / across)
    scale = 1.6 if len(results) == 1 else 1.0
    width, height = PANEL_INCHES[0] * across * scale, PANEL_INCHES[1] * down * scale
    figure = Figure(figsize=(width, height + 0.5), dpi=DPI, layout="constrained")
    panels = figure.subfigures(down, across, squeeze=False).ravel()
    names = short_names([one_line(str(result.series.path)) for result in results])
    for panel, result, name in zip(panels, results, names, strict=False):
        _run_panel(panel, result, name)
    figure.legend(handles=list(_legend(results)), loc="outside lower center", ncols=9, fontsize=8, frameon=False)
    return figure


def short_names(paths: Sequence[str], limit: int = 60) -> list[str]:
    """Drop the folders all runs share, and the middle of what is still too long."""
    parts = [path.split("/") for path in paths]
    shared = 0
    if len(parts) > 1:
        while all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
            shared += 1
    names = ["/".join(p[shared:]) for p in parts]
    return [name if len(name) <= limit else f"{name[: limit // 2 - 1]}...{name[-limit // 2 + 2 :]}" for name in names]


def _run_panel(panel: SubFigure, result: ScanResult, name: str) -> None:
    has_grad = any(value is not None for value in result.series.grad_norm)
    axes = panel.subplots(
        2 if has_grad else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if has_grad else [1]
    )
    top = axes[0, 0]
    x = plain_axis(result.series.steps)
    top.set_title(name.replace("$", r"\$"), fontsize=8.5, loc="left")
    top.set_ylabel(result.series.column.replace("$", r"\$")[:32], fontsize=8)
    loss = np.asarray(result.series.loss, np.float64)
    if len(loss):
        _band(top, x, result)
        _curve(top, x, loss, LOSS_COLOR)
        set_scale(top, loss)
        for episode in _worth_marking(result.episodes):
            _mark(top, result, episode)
    else:
        top.text(0.5, 0.5, "no values", transform=top.transAxes, ha="center", color="#888888")
    if has_grad:
        _grad_panel(axes[1, 0], x, result)
    axes[-1, 0].set_xlabel((result.series.step_column or "row").replace("$", r"\$")[:32], fontsize=8)
    for ax in axes.ravel():
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.2, linewidth=0.5)


def _grad_panel(ax: Axes, x: Floats, result: ScanResult) -> None:
    norms = np.array([math.nan if value is None else value for value in result.series.grad_norm], np.float64)
    seen = np.isfinite(norms)
    _curve(ax, x[seen], norms[seen], GRAD_COLOR)
    set_scale(ax, norms)
    ax.set_ylabel((result.series.grad_column or "").replace("$", r"\$")[:18], fontsize=7)
    for episode in result.episodes:
        for row in episode.precursors.values():
            ax.axvline(result.step_at(row), color=COLORS["jump"], linewidth=0.8)


def plain_axis(steps: Sequence[float]) -> Floats:
    """Return the steps as drawn, [N]."""
    return np.asarray(steps, np.float64)


def _curve(ax: Axes, x: Floats, y: Floats, color: str) -> None:
    """Draw one curve, thinned, broken where the steps go back (a resumed run) instead of zig-zagging."""
    keep = thin(y)
    x, y = x[keep], y[keep]
    y = drawable(y)
    back = np.flatnonzero(np.diff(x) < 0) + 1
    ax.plot(np.insert(x, back, np.nan), np.insert(y, back, np.nan), color=color, linewidth=0.8)


def drawable(y: Floats) -> Floats:
    """Blank non-finite values, and bound the others to what a logarithmic axis can label; same shape."""
    return np.where(np.isfinite(y), np.clip(y, -LARGEST_DRAWN, LARGEST_DRAWN), np.nan)


def thin(y: Floats) -> NDArray[np.intp]:
    """Choose the points to draw: all, or the smallest and the largest of each stretch so that no spike is lost.

    Args:
        y: Values, [N], non-finite ones included.

    Returns:
        Ascending indices, [M] with M <= MAX_POINTS.
    """
    if len(y) <= MAX_POINTS:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), MAX_POINTS // 2 + 1).astype(np.intp)
    chosen: list[np.intp] = []
    for begin, end in itertools.pairwise(edges):
        part = y[begin:end]
        if np.isfinite(part).any():
            finite = np.where(np.isfinite(part), part, np.nan)
            chosen += [begin + np.nanargmin(finite), begin + np.nanargmax(finite)]
        else:
            chosen.append(begin)
    return np.unique(np.asarray(chosen, np.intp))


def _band(ax: Axes, x: Floats, result: ScanResult) -> None:
    """Shade the baseline, plus and minus ``BAND`` times the noise."""
    stride = max(1, len(x) // MAX_POINTS)
    base = drawable(np.asarray(result.baseline, np.float64)[::stride])
    half = drawable(BAND * np.asarray(result.scale, np.float64)[::stride])
    x = x[::stride]
    known = np.isfinite(base) & np.isfinite(half) & (np.diff(x, prepend=x[0]) >= 0)
    ax.fill_between(x, base - half, base + half, where=known.tolist(), color=BAND_COLOR, alpha=0.45, linewidth=0)


def set_scale(ax: Axes, y: Floats) -> None:
    """Choose a logarithmic axis for an extreme range, and limits that show every finite value.

    Args:
        ax: Where ``y`` is drawn.
        y: Values, [N].
    """
    finite = drawable(y)[np.isfinite(y)]
    if not len(finite):
        ax.set_yticks([])
        ax.text(0.5, 0.5, "every value is non-finite", transform=ax.transAxes, ha="center", fontsize=9)
        return
    low, high = float(finite.min()), float(finite.max())
    middle = float(np.median(np.abs(finite)))
    if max(abs(low), abs(high)) <= EXTREME_RANGE * max(middle, 1e-300):
        _set_linear(ax, finite)
    elif low > 0:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.1, min(high, OFF_SCALE * float(np.quantile(finite, 0.99))) * 1.3)
    else:
        threshold = max(middle, 1e-12)
        ax.set_yscale("symlog", linthresh=threshold)
        ax.yaxis.set_major_locator(_few_decades(threshold))
        ax.set_ylim(min(3 * low, -threshold), 3 * max(high, threshold))


def _few_decades(threshold: float) -> SymmetricalLogLocator:
    locator = SymmetricalLogLocator(base=10, linthresh=threshold)
    locator.set_params(numticks=7)
    return locator


def _set_linear(ax: Axes, finite: Floats) -> None:
    """Let the first steep descent run off the top: it would squeeze the rest of the run into a line."""
    low, high = float(finite.min()), float(finite.max())
    later = finite[len(finite) // 50 :]
    top = min(high, later.max() + DESCENT_ROOM * (later.max() - low)) if len(finite) >= 100 else high
    pad = 0.05 * (top - low) or 0.05 * max(abs(high), 1e-6)
    ax.set_ylim(low - pad, top + 2 * pad)


def _worth_marking(episodes: Sequence[Episode]) -> Iterator[Episode]:
    harmless = 0
    for episode in sorted(episodes, key=lambda e: -e.severity if math.isfinite(e.severity) else -math.inf):
        harmless += not episode.actionable
        if episode.actionable or harmless <= MAX_MARKS:
            yield episode


def _mark(ax: Axes, result: ScanResult, episode: Episode) -> None:
    """Shade an actionable episode from onset to recovery and mark its peak; give a harmless one a small mark."""
    color = COLORS.get(episode.kind, "#000000")
    peak = episode.peak if math.isfinite(episode.peak) else episode.baseline
    peak_at = result.step_at(episode.peak_step)
    if not episode.actionable:
        ax.plot(peak_at, peak, marker="x", color=color, markersize=5, markeredgewidth=1.0, linestyle="none")
        return
    onset = result.step_at(episode.onset)
    end = result.step_at(episode.recovered if episode.recovered is not None else episode.end)
    ax.axvspan(onset, max(end, onset), color=color, alpha=0.16, linewidth=0)
    ax.axvline(onset, color=color, linewidth=1.0)
    peak = min(peak, ax.get_ylim()[1])
    ax.plot(peak_at, peak, marker="v", color=color, markersize=5, linestyle="none", clip_on=False)


def _legend(results: Sequence[ScanResult]) -> Iterator[Line2D | Patch]:
    yield Line2D([], [], color=LOSS_COLOR, linewidth=1, label="loss")
    yield Patch(color=BAND_COLOR, alpha=0.45, label=f"baseline ± {BAND:g} noise")
    if any(result.series.grad_column for result in results):
        yield Line2D([], [], color=GRAD_COLOR, linewidth=1, label="gradient norm")
    found = {(episode.kind, episode.actionable) for result in results for episode in result.episodes}
    for kind, color in COLORS.items():
        if (kind, True) in found:
            yield Line2D([], [], color=color, marker="v", linewidth=1, label=f"{kind} (acts)")
        if (kind, False) in found:
            yield Line2D([], [], color=color, marker="x", linestyle="none", label=f"{kind} (harmless)")
