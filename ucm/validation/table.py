# SPDX-License-Identifier: MIT
"""A report as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from ucm.validation.results import CachedTokens, Report

_MIB = 1024 * 1024


def print_report(report: Report, console: Console) -> None:
    """Print phases, pools and the verdict."""
    console.print(phase_table(report))
    if report.pools:
        console.print(pool_table(report))
    for problem in report.problems:
        console.print(f"[red]{problem}", highlight=False)
    console.print(verdict(report), highlight=False)


def phase_table(report: Report) -> Table:
    """Build the table of phases."""
    # Fits into 80 columns, the width of a log.
    table = _table(f"{report.model} ({report.selection})")
    table.add_column("phase", no_wrap=True)
    for heading in ("prompt", "device", "host", "storage", "expected", "TTFT s", "Δlogprob"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for phase in report.phases:
        table.add_row(
            phase.name,
            str(phase.prompt_tokens),
            str(phase.cached.device),
            str(phase.cached.host),
            str(phase.cached.storage),
            _expected(phase.expected),
            f"{phase.ttft_s:.3f}",
            f"{phase.max_abs_logprob_delta:.2g}",
            "[red]failed" if phase.problems else "[green]ok",
        )
    return table


def pool_table(report: Report) -> Table:
    """Build the table of pools."""
    table = _table("on storage")
    # Names the pool, too.
    table.add_column("namespace", no_wrap=True)
    for heading in ("page bytes", "pages", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in report.pools:
        table.add_row(
            pool.namespace or f"{pool.name} (root)",
            str(pool.page_bytes),
            str(pool.pages),
            f"{pool.bytes / _MIB:.2f}",
        )
    return table


def verdict(report: Report) -> str:
    """Say in one line whether the expectations were met, and what storage gave."""
    restored = [phase for phase in report.phases if phase.expected.storage]
    got = sum(phase.cached.storage for phase in restored)
    expected = sum(phase.expected.storage for phase in restored)
    failed = sum(1 for phase in report.phases if phase.problems)
    outcome = "OK" if report.ok else f"NOT OK, {failed} of {len(report.phases)} phases failed"
    return f"{outcome}: {got} of {expected} restorable tokens came from storage in {len(restored)} phases"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _expected(expected: CachedTokens) -> str:
    parts = [
        f"{tokens} {tier}"
        for tier, tokens in (("L1", expected.device), ("L2", expected.host), ("L3", expected.storage))
        if tokens
    ]
    return ", ".join(parts) or "0"
