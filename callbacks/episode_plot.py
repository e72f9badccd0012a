"""The picture of an episode: the loss with its baseline band, onset, decision and target; gradient norms as a heat map."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callbacks.forensics import in_words, number


def draw_episode(report: Mapping[str, Any], out: Path) -> None:
    """Draw one report and write the picture whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, heat_axes = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1])
    _loss_panel(loss_axes, report)
    _heat_panel(figure, heat_axes, report)
    figure.suptitle(_wrapped(in_words(report), 110), fontsize=9)
    partial = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(partial, dpi=110)
    os.replace(partial, out)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _loss_panel(axes: Any, report: Mapping[str, Any]) -> None:
    verdict, series = report["verdict"], report["series"]
    steps = [s["attempt"] for s in series]
    axes.plot(steps, [number(s["value"]) for s in series], color="#0072B2", linewidth=1.2, label=report["monitor"])
    level, noise = number(verdict["baseline"]), number(verdict["scale"])
    if math.isfinite(level) and math.isfinite(noise):
        axes.axhspan(level - 3 * noise, level + 3 * noise, color="#0072B2", alpha=0.12, label="baseline, 3 times the noise")
    refused = [s["attempt"] for s in series if s["vetoed"]]
    if refused:
        axes.plot(refused, [level] * len(refused), "x", color="#D55E00", label="update refused")
    axes.axvline(verdict["onset"], color="#D55E00", linewidth=1, label=f"onset {verdict['onset']}")
    axes.axvline(report["detected_at"], color="black", linewidth=1, linestyle="--",
                 label=f"decision at {report['detected_at']}: {report['decision']}")  # fmt: skip
    back = report.get("rollback")
    if back:
        label = f"snapshot used: step {back['to_step']}, from {back['source']}"
        axes.axvline(back["to_attempt"], color="#009E73", linewidth=1.5, label=label)
    axes.set_ylabel(report["monitor"])
    axes.legend(fontsize=7, loc="upper left")
    axes.grid(alpha=0.25)


def _heat_panel(figure: Any, axes: Any, report: Mapping[str, Any]) -> None:
    table = report["gradient_norms"]
    axes.set_xlabel("optimizer step (attempted)")
    if not table["groups"]:
        axes.text(0.5, 0.5, "no gradient norms were kept", ha="center", transform=axes.transAxes)
        return
    columns = zip(*table["norms"], strict=True)
    floor = 1e-12
    logs = [[math.log10(max(v, floor)) if math.isfinite(v := number(x)) else math.nan for x in column] for column in columns]
    steps = table["attempts"]
    image = axes.imshow(logs, aspect="auto", cmap="viridis", interpolation="nearest",
                        extent=(steps[0] - 0.5, steps[-1] + 0.5, len(logs) - 0.5, -0.5))  # fmt: skip
    axes.set_yticks(range(len(table["groups"])), table["groups"], fontsize=7)
    axes.set_ylabel("gradient norm per block")
    figure.colorbar(image, ax=axes, label="log10 of the norm, before clipping", pad=0.01)
    axes.axvline(report["verdict"]["onset"], color="#D55E00", linewidth=1)
