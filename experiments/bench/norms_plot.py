"""The picture of ``bench norms``."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MARKS = "osv^Dx*P"
UNIFORM_BITS = 10.0


def draw_gradients(axes: Axes, norms: dict[str, list[float]]) -> None:
    """Gradient norm of each block, each scheme named at the end of its line."""
    colors = plt.get_cmap("tab10")
    for index, (scheme, values) in enumerate(norms.items()):
        style = ("-", "--")[index // 10]
        axes.plot(range(len(values)), values, color=colors(index % 10), linestyle=style, linewidth=1.6, label=scheme)
    axes.set_yscale("log")
    axes.set_xlabel("block (0 is next to the input)")
    axes.set_ylabel("gradient norm at initialization")
    axes.set_title("Gradients before the first step", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def draw_sweep(axes: Axes, rates: list[float], bits: dict[str, list[float]], unigram: float) -> None:
    """Final bits over the peak learning rate; at the unigram line a run has learned nothing from the context."""
    colors = plt.get_cmap("tab10")
    for index, (name, values) in enumerate(bits.items()):
        shown = [UNIFORM_BITS if math.isnan(value) else min(value, UNIFORM_BITS) for value in values]
        axes.plot(rates, shown, marker=MARKS[index % len(MARKS)], markersize=5, color=colors(index), label=name)
    lines = {unigram: "unigram: nothing learned from the context"}
    if any(value >= UNIFORM_BITS or math.isnan(value) for values in bits.values() for value in values):
        lines[UNIFORM_BITS] = "uniform guess, or diverged"
    for (level, text), style in zip(lines.items(), ("--", ":"), strict=False):
        axes.axhline(level, color="0.5", linewidth=1, linestyle=style, label=text)
    axes.set_xscale("log")
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("bits on codebook 0, last tenth of the run")
    axes.set_title("Sensitivity to the learning rate", loc="left", fontsize=10)
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def draw(
    norms: dict[str, list[float]], rates: list[float], bits: dict[str, list[float]], unigram: float, out: Path
) -> None:
    """Write the picture."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2))
    draw_gradients(left, norms)
    draw_sweep(right, rates, bits, unigram)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)
