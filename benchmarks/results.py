# SPDX-License-Identifier: MIT
"""Turn comparisons into a table, a JSON file and a plot."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.pairs import PairedTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same work done by our backend and by another.

    `labels` tell it from the other comparisons of a report; all of one report have the same label names.
    """

    labels: dict[str, str]
    other: str
    moved_bytes: int  # Per run; 0 where no payload moves.
    times: PairedTimes
    required_speedup: float | None  # None: shown, not required.

    @property
    def is_met(self) -> bool:
        """Whether the median of the pairs reaches what is required."""
        return self.required_speedup is None or self.times.speedup >= self.required_speedup


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True, kw_only=True)
class Report:
    """What one benchmark found.

    `details` goes into the JSON file as it is; `draw` writes a PNG file.
    """

    name: str
    title: str
    method: str
    verdicts: list[str]
    tables: list[Table]
    details: dict[str, object] = field(default_factory=dict)
    draw: Callable[[Path], None] | None = None


def comparison_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """Lay out comparisons, one line each: medians, then the speed-up pair by pair."""
    columns = [
        *comparisons[0].labels,
        "pairs",
        "ours",
        "other",
        "ours GB/s",
        "speed-up",
        "min",
        "max",
        "required",
    ]
    return Table(title, columns, [_comparison_row(comparison) for comparison in comparisons])


def glance_table(
    title: str, comparisons: Sequence[Comparison], *, rows: Sequence[str], columns: Sequence[str]
) -> Table:
    """Lay out the speed-ups alone, by two groups of labels; what misses its requirement is in bold."""
    cells: dict[str, dict[str, str]] = {}
    for comparison in comparisons:
        row = " / ".join(comparison.labels[name] for name in rows)
        column = " / ".join(comparison.labels[name] for name in columns)
        text = f"{comparison.times.speedup:.2f}"
        cells.setdefault(row, {})[column] = text if comparison.is_met else f"**{text}**"
    names = sorted({column for row in cells.values() for column in row}, key=_natural)
    body = [[row, *(found.get(name, "") for name in names)] for row, found in cells.items()]
    return Table(title, [" / ".join(rows), *names], body)


def comparison_details(comparisons: Sequence[Comparison]) -> list[dict[str, object]]:
    """Return everything measured, for the JSON file."""
    return [
        {
            "labels": comparison.labels,
            "other": comparison.other,
            "moved_bytes": comparison.moved_bytes,
            "ours_us": [round(seconds * 1e6, 1) for seconds in comparison.times.ours_s],
            "other_us": [round(seconds * 1e6, 1) for seconds in comparison.times.other_s],
            "speedup": _spread(comparison.times.speedups),
            "required_speedup": comparison.required_speedup,
            "met": comparison.is_met,
        }
        for comparison in comparisons
    ]


def summarize(what: str, comparisons: Sequence[Comparison]) -> str:
    """Say whether the required comparisons are met, and how far the worst is from it."""
    required = [comparison for comparison in comparisons if comparison.required_speedup is not None]
    met = sum(comparison.is_met for comparison in required)
    sentence = f"{what}: {met} of {len(required)} required comparisons met"
    if met == len(required):
        return sentence + "."
    worst = min(
        required, key=lambda comparison: comparison.times.speedup / (comparison.required_speedup or 1)
    )
    name = ", ".join(worst.labels.values())
    return f"{sentence}; the worst is {name}: {worst.times.speedup:.2f} of {worst.required_speedup:.2f}."


def write_report(report: Report, directory: Path) -> None:
    """Print the report and write `<name>.json`, `<name>.md` and, with matplotlib, `<name>.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    document = {
        "benchmark": report.name,
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "verdicts": report.verdicts,
        **report.details,
    }
    (directory / f"{report.name}.json").write_text(json.dumps(document) + "\n")
    plot = directory / f"{report.name}.png"
    drawn = report.draw is not None and _draw(report.draw, plot)
    text = _markdown(report, machine, plot.name if drawn else None)
    (directory / f"{report.name}.md").write_text(text)
    sys.stdout.write(text)


def progress(message: str) -> None:
    """Tell whoever waits what is going on."""
    print(message, file=sys.stderr, flush=True)


def format_bytes(count: int) -> str:
    """Write a size as a person would: `177 KB`, `6.59 MB`."""
    if count < 1000:
        return f"{count} B"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} KB"


def format_seconds(seconds: float) -> str:
    """Write a duration with three significant digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts `get / 8` before `get / 32`."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in text.split(" / ")]


def _comparison_row(comparison: Comparison) -> list[str]:
    times = comparison.times
    ours = statistics.median(times.ours_s)
    required = comparison.required_speedup
    return [
        *comparison.labels.values(),
        str(len(times.ours_s)),
        format_seconds(ours),
        format_seconds(statistics.median(times.other_s)),
        f"{comparison.moved_bytes / ours / 1e9:.2f}" if comparison.moved_bytes else "",
        f"{times.speedup:.2f}",
        f"{min(times.speedups):.2f}",
        f"{max(times.speedups):.2f}",
        "" if required is None else f"{required:.2f} {'met' if comparison.is_met else 'MISSED'}",
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    summary = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 3) for name, value in summary.items()}


def _markdown(report: Report, machine: dict[str, object], plot_name: str | None) -> str:
    facts = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in machine.items())
    parts = [f"# {report.title}", report.method, f"Machine: {facts}.", *report.verdicts]
    if plot_name is not None:
        parts.append(f"![{report.title}]({plot_name})")
    parts += [f"## {table.title}\n\n{_aligned(table)}" for table in report.tables]
    return "\n\n".join(parts) + "\n"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _aligned(table: Table) -> str:
    lines = [list(table.columns), *map(list, table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    texts = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def _draw(draw: Callable[[Path], None], path: Path) -> bool:
    try:
        draw(path)
    except ModuleNotFoundError as exc:
        progress(f"no plot: {exc.name} is not installed (dependency group `bench` in pyproject.toml)")
        return False
    return True
