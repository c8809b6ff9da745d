# SPDX-License-Identifier: MIT
"""The report of a benchmark that is one list of comparisons."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.plot import draw_speedups
from benchmarks.results import Report, comparison_details, comparison_table, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Comparison, Table


def report_comparisons(
    comparisons: Sequence[Comparison],
    *,
    name: str,
    title: str,
    method: str,
    what: str,
    axes: tuple[str, str, str],
    tables: Sequence[Table] = (),
) -> Report:
    """Report comparisons in one table and one plot.

    Args:
        comparisons: All of them.
        name: Of the benchmark.
        title: Of the report and the plot.
        method: How it was measured.
        what: What the verdict is on.
        axes: The labels that select the plot's panel, the line of its y axis, and the colour.
        tables: Come before the table of all comparisons.
    """
    panel, row, series = axes
    return Report(
        name=name,
        title=title,
        method=method,
        verdicts=[summarize(what, comparisons)],
        tables=[*tables, comparison_table("Comparisons", comparisons)],
        details={"comparisons": comparison_details(comparisons)},
        draw=partial(draw_speedups, comparisons, title=title, panel=panel, row=row, series=series),
    )
