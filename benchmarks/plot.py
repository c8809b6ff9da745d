# SPDX-License-Identifier: MIT
"""Draw comparisons; needs matplotlib, imported only when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.results import Comparison


def draw_speedups(
    comparisons: Sequence[Comparison], path: Path, *, title: str, panel: str, row: str, series: str
) -> None:
    """Draw the speed-up of every comparison as a point with the range of its pairs.

    `panel`, `row` and `series` name the labels that select the sub-plot, the line of its y axis, the colour.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullFormatter, StrMethodFormatter

    panels = list(dict.fromkeys(comparison.labels[panel] for comparison in comparisons))
    rows = list(dict.fromkeys(comparison.labels[row] for comparison in comparisons))
    all_series = list(dict.fromkeys(comparison.labels[series] for comparison in comparisons))
    figure, axes = plt.subplots(
        1,
        len(panels),
        sharey=True,
        squeeze=False,
        figsize=(3 + 3.2 * len(panels), 1.8 + (0.2 + 0.09 * len(all_series)) * len(rows)),
        layout="constrained",
    )
    for axis, panel_name in zip(axes[0], panels, strict=True):
        for number, series_name in enumerate(all_series):
            chosen = [
                comparison
                for comparison in comparisons
                if comparison.labels[panel] == panel_name and comparison.labels[series] == series_name
            ]
            shift = (number - (len(all_series) - 1) / 2) * 0.7 / len(all_series)
            middles = [comparison.times.speedup for comparison in chosen]
            axis.errorbar(
                middles,
                [rows.index(comparison.labels[row]) + shift for comparison in chosen],
                xerr=[
                    [m - min(c.times.speedups) for m, c in zip(middles, chosen, strict=True)],
                    [max(c.times.speedups) - m for m, c in zip(middles, chosen, strict=True)],
                ],
                fmt="o",
                markersize=3.5,
                linewidth=0.8,
                label=f"{series_name} {series}",
            )
        for required in {c.required_speedup for c in comparisons if c.labels[panel] == panel_name} - {None}:
            axis.axvline(required, color="black", linewidth=0.8, linestyle="--")
        axis.set_xscale("log")
        axis.set_title(panel_name, fontsize=10)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.grid(alpha=0.3)
        low, high = axis.get_xlim()
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
        axis.xaxis.set_major_locator(FixedLocator(ticks))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.tick_params(axis="x", labelsize=8)
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel("times as fast as the other (point: median of pairs, bar: their range)", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
