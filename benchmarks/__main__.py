# SPDX-License-Identifier: MIT
"""Run the benchmarks: `python -m benchmarks pools --quick`. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import progress, write_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.results import Report

RESULTS = Path(__file__).resolve().parent / "results"
MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 (a tmpfs of the system's, used below a directory of our own)


def main() -> int:
    """Parse the command line and run what it names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Interleaved comparisons on this machine; results go to benchmarks/results.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"what to measure: {', '.join(BENCHMARKS)}; default: all of them",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and pairs: does it run, not how fast"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        action="append",
        metavar="DIR",
        help="where to store, may be repeated; default: one in memory and one on disk",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="of `pools`: just models, of `rivals`: just backends, with TEXT in their name",
    )
    parser.add_argument(
        "--native",
        type=Path,
        metavar="DIR",
        help="of `store` and `cold`: where the native wheel is (pip install --target DIR --no-deps)",
    )
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="DIR",
        help="of `rivals`: where other backends' packages are installed and kept; default: a temporary one",
    )
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="where results are written"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: choose from {', '.join(BENCHMARKS)}")
    # Ended from outside, a benchmark must not leave gigabytes behind in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parents = arguments.directory or _default_parents()
    for name in arguments.names or BENCHMARKS:
        progress(f"{name}: started")
        with _temporary_directories(parents) as directories:
            report = BENCHMARKS[name](directories, arguments)
        write_report(report, arguments.output)
    return 0


def _pools(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import pools

    cases = [case for case in pools.CASES if arguments.only.lower() in case.name.lower()]
    batches = [1, 8] if arguments.quick else [1, 8, 32, 128]
    budget_s = 0.0 if arguments.quick else 0.5
    return pools.measure(directories, cases=cases, batches=batches, budget_s=budget_s)


def _restore_v4(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import restore_v4

    return restore_v4.measure(directories, budget_s=0.0 if arguments.quick else 20.0)


def _checksum(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import checksum

    sizes = checksum.PAGE_BYTES[::3] if arguments.quick else checksum.PAGE_BYTES
    return checksum.measure(directories, page_sizes=sizes, budget_s=0.0 if arguments.quick else 5.0)


def _backup(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import backup

    sizes = backup.PAGE_BYTES[1::4] if arguments.quick else backup.PAGE_BYTES
    return backup.measure(directories, page_sizes=sizes, budget_s=0.0 if arguments.quick else 3.0)


def _capacity(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import capacity

    sizes = capacity.PAGE_BYTES[1::3] if arguments.quick else capacity.PAGE_BYTES
    return capacity.measure(directories, page_sizes=sizes, budget_s=0.0 if arguments.quick else 3.0)


def _store(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import store

    sizes = store.PAGE_BYTES[::3] if arguments.quick else store.PAGE_BYTES
    budget_s = 0.0 if arguments.quick else 3.0
    with _native(arguments) as native:
        return store.measure(directories, native=native, page_sizes=sizes, budget_s=budget_s)


def _steps(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import steps, store

    return steps.measure(directories, page_sizes=store.PAGE_BYTES[:: 3 if arguments.quick else 1])


def _cold(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import cold

    sizes = cold.PAGE_BYTES[1:4:2] if arguments.quick else cold.PAGE_BYTES
    budget_s = 0.0 if arguments.quick else 4.0
    with _native(arguments) as native:
        return cold.measure(directories, native=native, page_sizes=sizes, budget_s=budget_s)


@contextmanager
def _native(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give the directory that the native wheel is installed in."""
    from benchmarks import store

    with tempfile.TemporaryDirectory() as temporary:
        if arguments.native is None:
            store.install_native(Path(temporary))
        yield arguments.native or Path(temporary)


def _rivals(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import page_sets, rival_setups, rivals

    chosen = [rival for rival in rival_setups.RIVALS if arguments.only.lower() in rival.name.lower()]
    with tempfile.TemporaryDirectory() as temporary:
        return rivals.measure(
            directories,
            packages=arguments.packages or Path(temporary),
            rivals=chosen,
            page_sets=page_sets.PAGE_SETS[1:2] if arguments.quick else page_sets.PAGE_SETS,
            budget_s=0.0,
            idle_s=1.0 if arguments.quick else 10.0,
        )


def _idle(directories: list[Path], arguments: argparse.Namespace) -> Report:
    from benchmarks import idle

    return idle.measure(
        directories[0], watch_s=3.0 if arguments.quick else 60.0, with_servers=not arguments.quick
    )


BENCHMARKS: dict[str, Callable[[list[Path], argparse.Namespace], Report]] = {
    "pools": _pools,
    "restore_v4": _restore_v4,
    "checksum": _checksum,
    "backup": _backup,
    "capacity": _capacity,
    "idle": _idle,
    "store": _store,
    "steps": _steps,
    "cold": _cold,
    "rivals": _rivals,
}


def _default_parents() -> list[Path]:
    disk = Path(tempfile.gettempdir())
    return [MEMORY_DIRECTORY, disk] if MEMORY_DIRECTORY.is_dir() else [disk]


@contextmanager
def _temporary_directories(parents: list[Path]) -> Iterator[list[Path]]:
    directories = [Path(tempfile.mkdtemp(prefix="ucm-bench-", dir=parent)) for parent in parents]
    try:
        yield directories
    finally:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
