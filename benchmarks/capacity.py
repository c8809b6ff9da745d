# SPDX-License-Identifier: MIT
"""What a capacity costs the calls of a store."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.block_work import PHASES
from benchmarks.machine import describe_filesystem
from benchmarks.pairs import run_pairs
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    format_bytes,
    progress,
)
from benchmarks.store import EmbeddedWork

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_BYTES = (16_384, 34_560, 177_408, 786_240, 2_752_512)
PAGES = 32
CAPACITY = "100GB"
LEAST_SPEEDUP = 0.95
METHOD = f"""\
`ours` is the embedded store with a capacity of {CAPACITY}, `other` the same store without one, both in
this process. The evictor runs, hears of every block and has nothing to remove: all of them are new. Both
store, look up and load {PAGES} blocks of one segment, under new keys in every turn. Required:
{LEAST_SPEEDUP} times as fast."""


def measure(directories: Sequence[Path], *, page_sizes: Sequence[int], budget_s: float) -> Report:
    """Compare on every directory and page size."""
    comparisons: list[Comparison] = []
    for parent in directories:
        for page_bytes in page_sizes:
            comparisons += _compare(parent, page_bytes, budget_s)
    return report_comparisons(
        comparisons,
        name="capacity",
        title="A store with a capacity against one without",
        method=METHOD,
        what="Store",
        axes=("call", "page", "storage"),
    )


def _compare(parent: Path, page_bytes: int, budget_s: float) -> list[Comparison]:
    storage = describe_filesystem(parent)
    progress(f"capacity: {PAGES} x {format_bytes(page_bytes)}, {storage}")
    directory = Path(tempfile.mkdtemp(dir=parent))
    with (
        closing(EmbeddedWork(directory / "with", page_bytes, PAGES, capacity_bytes=CAPACITY)) as ours,
        closing(EmbeddedWork(directory / "without", page_bytes, PAGES)) as other,
    ):
        times = run_pairs(ours, other, PHASES, budget_s=budget_s)
    shutil.rmtree(directory, ignore_errors=True)
    return [
        Comparison(
            labels={"storage": storage, "page": format_bytes(page_bytes), "pages": str(PAGES), "call": phase},
            other="no capacity",
            moved_bytes=0 if phase.startswith("exists") else page_bytes * PAGES,
            times=paired,
            required_speedup=LEAST_SPEEDUP,
        )
        for phase, paired in times.items()
    ]
