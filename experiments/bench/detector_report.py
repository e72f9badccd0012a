"""Tables and picture of the detector benchmark."""

import math
from pathlib import Path
from typing import Any

REAL = (
    ("recall", "recall", ".2f"),
    ("macro recall", "macro_recall", ".2f"),
    ("precision", "precision", ".2f"),
    ("false alarms", "false_alarms", "d"),
    ("per 100K steps", "fa_per_100k", ".2f"),
    ("clean runs alarmed", "clean_alarmed", "s"),
    ("non-finite at first row", "non_finite_first_row", "s"),
    ("median delay", "median_delay", ".0f"),
    ("p90 delay", "p90_delay", ".0f"),
)
SYNTHETIC = (
    ("recall", "recall", ".3f"),
    ("precision", "precision", ".2f"),
    ("false alarms per 100K", "fa_per_100k", ".2f"),
    ("median delay", "median_delay", ".0f"),
    ("p90 delay", "p90_delay", ".0f"),
    ("longest run of flags", "longest_run", "d"),
)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: dict[str, Any], columns: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [format(row[key], spec) for _, key, spec in columns]


def _real(results: dict[str, Any]) -> list[str]:
    rules = results["rules"]
    head = ["rule", *[title for title, _, _ in REAL]]
    out = [
        f"### {results['runs']} real runs",
        "",
        _table(head, [[n, *_cells(r["all"], REAL)] for n, r in rules.items()]),
    ]
    head = ["rule", "design: recall", "macro", "precision", "FA", "held out: recall", "macro", "precision", "FA"]
    keys = (("", "recall", ".2f"), ("", "macro_recall", ".2f"), ("", "precision", ".2f"), ("", "false_alarms", "d"))
    rows = [[n, *_cells(r["design"], keys), *_cells(r["held_out"], keys)] for n, r in rules.items()]
    out += ["", "### The split by source", "", _table(head, rows)]
    kinds = sorted({kind for r in rules.values() for kind in r["all"]["kinds"]})
    rows = [[n, *[r["all"]["kinds"][kind] for kind in kinds]] for n, r in rules.items()]
    return [*out, "", "### Events found by kind, real runs", "", _table(["rule", *kinds], rows)]


def _synthetic(results: dict[str, Any]) -> list[str]:
    rules = results["rules"]
    head = ["rule", *[title for title, _, _ in SYNTHETIC]]
    title = f"### {results['traces']} synthetic traces of {results['rows']} rows, seed {results['seed']}"
    out = [title, "", _table(head, [[n, *_cells(r, SYNTHETIC)] for n, r in rules.items()])]
    first = next(iter(rules.values()))
    head = ["rule", *first["kinds"], *[f"jump {size}" for size in first["sizes"]]]
    rows = [[n, *r["kinds"].values(), *r["sizes"].values()] for n, r in rules.items()]
    return [*out, "", "### Events found by kind and by size of the jump, synthetic traces", "", _table(head, rows)]


def _vetoes(results: dict[str, Any]) -> list[str]:
    rows = []
    for part in ("real", "synthetic"):
        if part in results and results[part]["vetoes"]["healthy_updates"]:
            v = results[part]["vetoes"]
            before = f"{v['refused_before_jump']}/{v['jumps_with_precursor']}" if v["jumps_with_precursor"] else "-"
            rows.append([part, str(v["healthy_updates"]), str(v["refused"]), f"{v['refused_per_100k']:.2f}", before])
    head = ["set", "healthy updates", "refused", "per 100K", "refused before the jump, where the norm warns"]
    out = ["### Updates refused by the gradient norm alone", "", _table(head, rows)] if rows else []
    head = ["replay", "first update refused", "first call for action", "false"]
    replays = [
        [n, f"{r['first_veto']:+d}" if r["first_veto"] is not None else "never",
         f"{r['first_act']:+d}" if r["first_act"] is not None else "never", str(r["false"])]
        for n, r in results["bloom"].items()
    ]  # fmt: skip
    return [*out, "", "### Published spikes, steps relative to the loss jump", "", _table(head, replays)]


def tables(results: dict[str, Any], ours: str) -> str:
    """Return the whole report as Markdown; `ours` is the name of the detector's own row."""
    out: list[str] = []
    if "real" in results:
        out += [*_real(results["real"]), ""]
    if "synthetic" in results:
        out += [*_synthetic(results["synthetic"]), ""]
    out += [*_vetoes(results), "", "### Cost", ""]
    cost = results["cost"]
    theirs = cost["Lightning SpikeDetection"]
    rows = [[n, f"{us:.1f}", f"{us / theirs:.2f}"] for n, us in cost.items()]
    out.append(_table(["rule", "microseconds a step", "of SpikeDetection"], rows))
    return "\n".join(out).replace(f"| {ours} |", f"| **{ours}** |")


def picture(results: dict[str, Any], ours: str, path: Path) -> None:
    """Draw recall against false alarms, one point a rule, real runs left and synthetic traces right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    parts = [part for part in ("real", "synthetic") if part in results]
    figure, axes = plt.subplots(1, len(parts), figsize=(6.5 * len(parts) + 2.5, 6), squeeze=False)
    names = list(results[parts[0]]["rules"])
    for axis, part in zip(axes[0], parts, strict=True):
        rules = results[part]["rules"]
        rows = {name: rules[name]["all"] if part == "real" else rules[name] for name in names}
        _scatter(axis, rows, ours)
        count = results[part]["runs" if part == "real" else "traces"]
        axis.set_title(f"{count} {'real runs' if part == 'real' else 'synthetic traces'}")
    handles = [
        Line2D(
            [], [], marker="o", linestyle="", color="crimson" if name == ours else "steelblue", label=f"{number} {name}"
        )
        for number, name in enumerate(names, start=1)
    ]
    figure.tight_layout(rect=(0, 0, 1 - 2.6 / figure.get_figwidth(), 1))
    figure.legend(handles=handles, loc="center right", fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _scatter(axis: Any, rows: dict[str, dict[str, Any]], ours: str) -> None:
    floor = 0.02  # where "none" is drawn on a log axis
    places: dict[tuple[float, float], list[str]] = {}
    for number, (name, row) in enumerate(rows.items(), start=1):
        x, y = max(row["fa_per_100k"], floor), row["recall"]
        own = name == ours
        axis.scatter(x, y, s=90 if own else 36, color="crimson" if own else "steelblue", zorder=3)
        near = (round(math.log10(x) * 5) / 5, round(y * 25) / 25)  # points this close share a label
        places.setdefault(near, [f"{x}", f"{y}"]).append(str(number))
    for x_text, y_text, *numbers in places.values():
        where = (float(x_text), float(y_text))
        axis.annotate(", ".join(numbers), where, (6, 4), textcoords="offset points", fontsize=9)
    axis.set_xscale("log")
    largest = max(row["fa_per_100k"] for row in rows.values())
    axis.set_xlim(floor * 0.7, 10 ** math.ceil(math.log10(max(largest, 1.0))))
    axis.set_ylim(-0.03, 1.07)
    axis.set_xlabel(f"false alarms per 100K steps ({floor:g} and less at the left edge)")
    axis.set_ylabel("recall")
    axis.grid(alpha=0.3)
