# SPDX-License-Identifier: MIT
"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


def describe_machine() -> dict[str, object]:
    """Return cores, CPU, memory, kernel, versions, and how busy the machine is now.

    No host name, no paths: results are meant to be published.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("sglang", "torch", "ucm-sglang", "xxhash")},
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def describe_filesystem(directory: Path) -> str:
    """Return the type of the file system a directory is on."""
    resolved = directory.resolve()
    best, found = Path(), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount_point = Path(before.split()[4])
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= len(best.parts):
            best, found = mount_point, after.split()[0]
    return found


def available_memory_bytes() -> int:
    """Return how much memory can be used without taking any from others."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not tell the available memory")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
