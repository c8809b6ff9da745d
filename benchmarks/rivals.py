# SPDX-License-Identifier: MIT
"""Our backend against all others that run here, and against what no backend can beat."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.backends import FILE, OURS
from benchmarks.block_work import PHASES
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.page_sets import LIMIT_PHASES, PageSet
from benchmarks.pairs import run_pairs
from benchmarks.processes import resident_bytes, usage
from benchmarks.remote import REPOSITORY, RemoteContestant, RemoteError
from benchmarks.reporting import report_comparisons
from benchmarks.results import Comparison, Report, Table, format_bytes, glance_table, progress
from benchmarks.rival_packages import RivalMissingError, python_path
from benchmarks.rival_process import MEMORY, PLAIN_FILES
from benchmarks.rival_setups import OUR_SIDE, SEGMENT_BYTES, Rival, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SETTLE_S = 2.0
METHOD = f"""\
Each side is a process of its own with the same host pools of SGLang, its backend created by SGLang's factory
and called as its cache controller does: sidecars and then the primary KV to set, the other way round to get,
one query over all pools. Keys are new in every turn, host pages are overwritten before each get and compared
after it, data is warm. `native`: our connector on UCM's own PosixStore. `{FILE}`, `nixl`, `mooncake`: those
of SGLang. `nixl` is its POSIX plugin with `use_direct_io` off, `nixl direct` with it on, its default: it then
waits for the disk, others for the page cache. Both write in place and check nothing. `mooncake` keeps
data in memory, in a segment of {format_bytes(SEGMENT_BYTES)} that counts as its memory as far as it was used
(so do its master's threads, memory and processor time): `TCP` goes over the loopback interface, as to another
machine; `memcpy` is what it does within one. Limits: `{PLAIN_FILES}` writes and reads one open file a pool
with one call, `{MEMORY}` copies in memory on one thread. Required: as fast as `native` and `{FILE}`."""


def measure(
    directories: Sequence[Path],
    *,
    packages: Path,
    rivals: Sequence[Rival],
    page_sets: Sequence[PageSet],
    budget_s: float,
    idle_s: float,
) -> Report:
    """Compare on every directory, set of pages and rival; a rival that cannot run here is left out.

    Raises:
        RemoteError: Our own side has failed.
        RuntimeError: No rival runs here.
    """
    run = Run(packages=packages, page_sets=page_sets, budget_s=budget_s, idle_s=idle_s)
    for directory in directories:
        is_first = directory == directories[0]
        run.compare(
            [rival for rival in rivals if _is_measured(rival, directory, is_first=is_first)], directory
        )
    return run.report()


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a backend added to an idle process that had the pools of one set of pages, after use."""

    backend: str
    threads: int
    resident_bytes: int
    idle_share: float  # Of one core.


class Side(RemoteContestant):
    """One side, in a process of its own."""

    def __init__(self, name: str, directory: Path, setup: Setup) -> None:
        super().__init__(
            name,
            "benchmarks.rival_process",
            [name, str(directory), json.dumps(setup.settings)],
            os.environ | {"PYTHONPATH": python_path(REPOSITORY)} | setup.environment,
        )
        self._processes = (self.pid, *setup.helpers)

    def open(self, page_set: PageSet) -> dict[str, int]:
        """Go over to a set of pages; returns `moved_bytes`, and `threads` and `resident_bytes` so far."""
        return dict(self.call("open", page_set.name))

    def costs(self, before: dict[str, int], idle_s: float) -> Costs:
        """Watch the process, and those that it needs, doing nothing."""
        time.sleep(SETTLE_S)
        used = self._cpu_s()
        time.sleep(idle_s)
        return Costs(
            backend=self.name,
            threads=sum(usage(pid).threads for pid in self._processes) - before["threads"],
            resident_bytes=sum(map(resident_bytes, self._processes)) - before["resident_bytes"],
            idle_share=(self._cpu_s() - used) / idle_s,
        )

    def _cpu_s(self) -> float:
        return sum(usage(pid).cpu_s for pid in self._processes)


@dataclass(slots=True, kw_only=True)
class Run:
    """How to measure, and what has been measured so far; `left_out` says why something was not."""

    packages: Path
    page_sets: Sequence[PageSet]
    budget_s: float
    idle_s: float
    comparisons: list[Comparison] = field(default_factory=list)
    costs: dict[str, Costs] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def compare(self, rivals: Sequence[Rival], directory: Path) -> None:
        """Compare with one rival after the other; those that have been found missing are skipped."""
        with self._started(OUR_SIDE, directory) as ours:
            for rival in rivals:
                if rival.name not in self.left_out:
                    self._compare_with(rival, ours, directory)

    def report(self) -> Report:
        """Report everything measured."""
        left_out = [f"Left out: {name}: {reason}" for name, reason in self.left_out.items()]
        if not self.comparisons:
            raise RuntimeError("\n".join(["no backend to compare with", *left_out]))
        report = report_comparisons(
            self.comparisons,
            name="rivals",
            title="Our backend against the others, and against the limits",
            method=METHOD,
            what="Set, get and exists",
            axes=("call", "pages", "backend"),
            tables=[
                self._costs_table(),
                glance_table(
                    "Speed-ups at a glance", self.comparisons, rows=("pages", "call"), columns=("backend",)
                ),
            ],
        )
        report.verdicts += left_out
        report.details |= {"costs": [asdict(cost) for cost in self.costs.values()], "left_out": self.left_out}
        return report

    def _compare_with(self, rival: Rival, ours: Side, directory: Path) -> None:
        storage = describe_filesystem(directory)
        other: Side | None = None
        try:
            with ExitStack() as stack:
                for page_set in self.page_sets:
                    other = other or stack.enter_context(self._started(rival, directory))
                    try:
                        self._compare_on(page_set, rival, ours, other, storage)
                    except RemoteError as exc:
                        if exc.contestant == OURS:
                            raise
                        self._leave_out(f"{rival.name}, {page_set.name} on {storage}", exc)
                        other = None  # Its process has ended; other pages may suit a new one.
        except RivalMissingError as exc:
            self._leave_out(rival.name, exc)

    def _leave_out(self, what: str, reason: Exception) -> None:
        progress(f"rivals: {what} left out: {reason}")
        self.left_out[what] = str(reason)

    def _compare_on(self, page_set: PageSet, rival: Rival, ours: Side, other: Side, storage: str) -> None:
        progress(f"rivals: {rival.name}, {page_set.name} on {storage}")
        before = {side: side.open(page_set) for side in (ours, other)}
        times = run_pairs(ours, other, LIMIT_PHASES if rival.is_limit else PHASES, budget_s=self.budget_s)
        for side in (ours, other):
            # Later, what an earlier set of pages has left would be counted with it.
            if page_set == self.page_sets[0] and side.name not in self.costs:
                self.costs[side.name] = side.costs(before[side], self.idle_s)
        self.comparisons += [
            Comparison(
                labels={"pages": f"{page_set.name} on {storage}", "call": phase, "backend": rival.name},
                other=rival.name,
                moved_bytes=before[ours]["moved_bytes"] if phase in LIMIT_PHASES else 0,
                times=paired,
                required_speedup=1.0 if rival.is_required else None,
            )
            for phase, paired in times.items()
        ]

    @contextmanager
    def _started(self, rival: Rival, parent: Path) -> Iterator[Side]:
        directory = Path(tempfile.mkdtemp(dir=parent))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            setup = rival.prepare(stack, self.packages, directory)
            yield stack.enter_context(closing(Side(rival.name, directory, setup)))

    def _costs_table(self) -> Table:
        columns = ["backend", "threads", "resident memory", "idle CPU, % of a core"]
        rows = [
            [cost.backend, f"{cost.threads:+d}", _signed_bytes(cost.resident_bytes), f"{cost.idle_share:.2%}"]
            for cost in self.costs.values()
        ]
        title = f"Added to a process with the host pools of {self.page_sets[0].name}, after use"
        return Table(title, columns, rows)


def _is_measured(rival: Rival, directory: Path, *, is_first: bool) -> bool:
    if rival.needs_disk:
        return describe_filesystem(directory) not in MEMORY_FILESYSTEMS
    return is_first or not rival.stores_in_memory


def _signed_bytes(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"
