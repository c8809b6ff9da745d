# SPDX-License-Identifier: MIT
"""Threads, memory and processor time of a running process, from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process has used so far."""

    threads: int
    cpu_s: float


def usage(pid: int) -> ProcessUsage:
    """Read threads, and user and system time over all of them."""
    # The second field is the command in parentheses and may hold anything.
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, threads = int(values[11]), int(values[12]), int(values[17])
    return ProcessUsage(threads=threads, cpu_s=(user + system) / _TICKS_PER_SECOND)


def command_line(pid: int) -> str:
    """Return a process's command line, or the title that it gave itself."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def resident_bytes(pid: int) -> int:
    """Read how much memory a process has in use. It takes the kernel some milliseconds a gigabyte."""
    # Exact: other files count in each thread's own book first, which adds up with hundreds of threads.
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup does not tell the resident memory")
