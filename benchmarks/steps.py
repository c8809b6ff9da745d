# SPDX-License-Identifier: MIT
"""Where the time of a single block goes."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.machine import describe_filesystem
from benchmarks.pairs import expect
from benchmarks.results import Report, Table, format_bytes, progress
from benchmarks.store import EmbeddedWork, SystemCalls
from ucm.store.posix.block_file import payload_checksum
from ucm.store.posix.file_io import is_stored_already

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_BLOCKS = 100
MOST_BYTES = 200_000_000
PROCESSOR_CACHE_BYTES = 64_000_000
SET, GET = "set", "get"
OURS = "ours"
CHECKSUM = "checksum"
T = TypeVar("T")

METHOD = """\
`ours` is the embedded store, called for one block of one segment at a time. The steps are what it does
for a block, each as a bare call from Python, one after the other, on files of their own: asking whether the
block is there, XXH3-64 of the payload, and the file's system calls. `rest` is what ours takes beyond their
sum: the interpreter, for footer, verdicts, deadlines and counters. Medians in microseconds, in turns on
the same storage. Data is in the page cache, but not in the processor's caches, which are filled with other
data before each call. No store in Python with a checksum takes less than the steps. `checksum,
share` is that step's part of ours."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one call on blocks of one size, by step."""

    storage: str
    page_bytes: int
    call: str
    blocks: int
    ours_s: float
    steps_s: dict[str, float]

    @property
    def rest_s(self) -> float:
        """What no step accounts for."""
        return self.ours_s - sum(self.steps_s.values())


def measure(directories: Sequence[Path], *, page_sizes: Sequence[int]) -> Report:
    """Take blocks of every size apart on every directory."""
    found = [
        breakdown
        for parent in directories
        for page_bytes in page_sizes
        for breakdown in _measure(parent, page_bytes)
    ]
    return Report(
        name="steps",
        title="Where the time of a block goes",
        method=METHOD,
        verdicts=[],
        tables=[
            _table(call, [breakdown for breakdown in found if breakdown.call == call]) for call in (SET, GET)
        ],
        details={"breakdowns": [asdict(breakdown) for breakdown in found]},
    )


class Clock:
    """Takes the time of steps, in their order."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def time(self, step: str, call: Callable[[], T]) -> T:
        """Make a call that is one step."""
        begun = time.perf_counter()
        result = call()
        self._seconds.setdefault(step, []).append(time.perf_counter() - begun)
        return result

    def medians(self) -> dict[str, float]:
        """Return the median of each step."""
        return {step: statistics.median(seconds) for step, seconds in self._seconds.items()}


class Steps(SystemCalls):
    """The steps of a block, one by one."""

    def set_in_steps(self, key: bytes, clock: Clock) -> None:
        """Store the page."""
        final, temporary, views = self._path(key), self._temporary(key), self._views[0]
        clock.time("look", lambda: is_stored_already(final, (self.pages.page_bytes,)))
        clock.time(CHECKSUM, lambda: payload_checksum(views))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = clock.time("create", lambda: os.open(temporary, flags))
        clock.time("write", lambda: os.pwritev(descriptor, views, 0))
        clock.time("close", lambda: os.close(descriptor))
        clock.time("rename", lambda: os.rename(temporary, final))  # noqa: PTH104 -- as above

    def get_in_steps(self, key: bytes, clock: Clock) -> None:
        """Load the page."""
        path, views = self._path(key), self._views[0]
        descriptor = clock.time("open", lambda: os.open(path, os.O_RDONLY | os.O_NOATIME))
        clock.time("read", lambda: os.preadv(descriptor, views, 0))
        clock.time("close", lambda: os.close(descriptor))
        clock.time(CHECKSUM, lambda: payload_checksum(views))


def _measure(parent: Path, page_bytes: int) -> list[Breakdown]:
    storage = describe_filesystem(parent)
    progress(f"steps: {format_bytes(page_bytes)}, {storage}")
    directory = Path(tempfile.mkdtemp(dir=parent))
    ours = EmbeddedWork(directory / "ours", page_bytes, 1)
    steps = Steps(directory / "steps", page_bytes, 1)
    clocks, wholes = {SET: Clock(), GET: Clock()}, {SET: Clock(), GET: Clock()}
    other_data = bytes(PROCESSOR_CACHE_BYTES)

    def set_ours(key: bytes) -> None:
        expect(wholes[SET].time(OURS, lambda: ours.set([key])), [True], SET)

    def get_ours(key: bytes) -> None:
        expect(wholes[GET].time(OURS, lambda: ours.get([key])), [True], GET)

    def set_in_steps(key: bytes) -> None:
        steps.set_in_steps(key, clocks[SET])

    def get_in_steps(key: bytes) -> None:
        steps.get_in_steps(key, clocks[GET])

    count = min(MOST_BLOCKS, MOST_BYTES // page_bytes)
    with closing(ours), closing(steps):
        for _ in range(count):
            key = os.urandom(16)
            for call in (set_ours, set_in_steps, get_ours, get_in_steps):
                payload_checksum([memoryview(other_data)])  # Fills the processor's caches.
                call(key)
    shutil.rmtree(directory)
    return [
        Breakdown(storage, page_bytes, call, count, wholes[call].medians()[OURS], clocks[call].medians())
        for call in (SET, GET)
    ]


def _table(call: str, breakdowns: Sequence[Breakdown]) -> Table:
    steps = list(breakdowns[0].steps_s)
    rows = [
        [
            each.storage,
            format_bytes(each.page_bytes),
            str(each.blocks),
            *(f"{seconds * 1e6:.1f}" for seconds in (each.ours_s, *each.steps_s.values(), each.rest_s)),
            f"{each.steps_s[CHECKSUM] / each.ours_s:.0%}",
        ]
        for each in breakdowns
    ]
    return Table(
        f"One {call}, us", ["storage", "page", "blocks", OURS, *steps, "rest", "checksum, share"], rows
    )
