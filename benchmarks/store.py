# SPDX-License-Identifier: MIT
"""The embedded store against the native UCM store."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.block_work import PHASES, BlockWork, make_shards
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.native_store import NativeProcess
from benchmarks.pairs import run_pairs
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    format_bytes,
    glance_table,
    progress,
)
from ucm.store import Block, BlockKey, BlockStatus, StoreSpec
from ucm.store.factory import StoreConfig, open_store
from ucm.store.posix.layout import SHARD_HEX_DIGITS, TEMP_DIRECTORY
from ucm.testing import native_ucm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_BYTES = (34_560, 65_536, 177_408, 262_144, 786_240, 1_048_576, 2_752_512, 4_194_304)
PAGES = 32
LOOKUP_PAGE_BYTES, LOOKUP_PAGES = 4096, 1000
SMALL_PAGE_BYTES = 177_408
SMALL_PAGE_SPEEDUP = 1.25
LOOKUP_SPEEDUP = 1.3
SHARED_PAGE_BYTES = 262_144
METHOD = f"""\
`ours` is the embedded PosixStore with checksums on, `other` the native PosixStore of {native_ucm.wheel()}
with `io_direct` off, in a process of its own. Both store, look up and load {PAGES} blocks of one
segment ({LOOKUP_PAGES} for `exists`), under new keys in every turn, in directories that exist: the native
store makes them at the start, ours while it is used. `system calls` is no store: Python that makes a file's
calls and nothing else, on one thread, or on one a processor for pages of {SHARED_PAGE_BYTES} bytes and
more. Required: no slower at any size,
{SMALL_PAGE_SPEEDUP} times as fast up to {SMALL_PAGE_BYTES} bytes, {LOOKUP_SPEEDUP} times as fast when
looking up {LOOKUP_PAGES} keys."""


def install_native(directory: Path) -> None:
    """Install the native wheel into a directory of its own, so that it never meets our package."""
    progress(f"store: installing {native_ucm.wheel()}")
    native_ucm.install(directory)


def measure(
    directories: Sequence[Path], *, native: Path, page_sizes: Sequence[int], budget_s: float
) -> Report:
    """Compare on every directory and page size."""
    comparisons: list[Comparison] = []
    for parent in directories:
        for page_bytes in page_sizes:
            comparisons += _compare(parent, native, page_bytes, PAGES, budget_s)
        comparisons += _compare(parent, native, LOOKUP_PAGE_BYTES, LOOKUP_PAGES, budget_s)
    return report_comparisons(
        comparisons,
        name="store",
        title="The embedded store against the native UCM store",
        method=METHOD,
        what="Store",
        axes=("call", "page", "storage"),
        tables=[
            glance_table(
                f"Speed-ups over {other}",
                [comparison for comparison in comparisons if comparison.other == other],
                rows=("storage", "page"),
                columns=("call",),
            )
            for other in dict.fromkeys(comparison.other for comparison in comparisons)
        ],
    )


class EmbeddedWork(BlockWork):
    """Our store; keywords are options of it."""

    def __init__(self, directory: Path, page_bytes: int, count: int, **options: object) -> None:
        super().__init__("ours", directory, page_bytes, count)
        spec = StoreSpec(namespace="benchmark", segment_bytes=(page_bytes,), identity=bytes(16))
        self._store = open_store(
            spec, StoreConfig.from_mapping({"storage_backends": str(directory), **options})
        )
        make_shards(directory)
        self._segments = [self.pages.views(page) for page in range(count)]

    def set(self, keys: Sequence[bytes]) -> list[bool]:
        """Dump."""
        return [status is BlockStatus.DONE for status in self._store.dump(self._blocks(keys))]

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Load."""
        return [status is BlockStatus.DONE for status in self._store.load(self._blocks(keys))]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Look the keys up."""
        return self._store.lookup([BlockKey(key) for key in keys])

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the blocks."""
        self._store.delete([BlockKey(key) for key in keys])

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _blocks(self, keys: Sequence[bytes]) -> list[Block]:
        return [Block(BlockKey(key), segments) for key, segments in zip(keys, self._segments, strict=True)]


class SystemCalls(BlockWork):
    """What no store in Python can do without: a file's system calls, without checksum, footer or deadline.

    One thread, or one for each processor if the pages are large enough to be worth it.
    """

    def __init__(self, directory: Path, page_bytes: int, count: int) -> None:
        super().__init__("system calls", directory, page_bytes, count)
        (directory / TEMP_DIRECTORY).mkdir(parents=True)
        make_shards(directory)
        self._prefix = str(directory)
        self._views = [self.pages.views(page) for page in range(count)]
        self._threads = len(os.sched_getaffinity(0)) if page_bytes >= SHARED_PAGE_BYTES else 1
        self._executor = ThreadPoolExecutor(self._threads)

    def set(self, keys: Sequence[bytes]) -> list[bool]:
        """Write each page beside and rename it."""
        return self._for_all(self._write, keys)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Read each page."""
        return self._for_all(self._read, keys)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask for each file."""
        return [os.access(self._path(key), os.F_OK) for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the files."""
        for key in keys:
            Path(self._path(key)).unlink()

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()

    def _for_all(self, call: Callable[[bytes, int], bool], keys: Sequence[bytes]) -> list[bool]:
        numbers = range(len(keys))
        return list((map if self._threads == 1 else self._executor.map)(call, keys, numbers))

    def _write(self, key: bytes, page: int) -> bool:
        temporary = self._temporary(key)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        written = os.pwritev(descriptor, self._views[page], 0)
        os.close(descriptor)
        os.rename(temporary, self._path(key))  # noqa: PTH104 -- the call and nothing else is measured.
        return written == self.pages.page_bytes

    def _read(self, key: bytes, page: int) -> bool:
        descriptor = os.open(self._path(key), os.O_RDONLY)
        read = os.preadv(descriptor, self._views[page], 0)
        os.close(descriptor)
        return read == self.pages.page_bytes

    def _temporary(self, key: bytes) -> str:
        return f"{self._prefix}/{TEMP_DIRECTORY}/{key.hex()}"

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._prefix}/{name[:SHARD_HEX_DIGITS]}/{name}"


def _compare(parent: Path, native: Path, page_bytes: int, count: int, budget_s: float) -> list[Comparison]:
    storage = describe_filesystem(parent)
    progress(f"store: {count} x {format_bytes(page_bytes)}, {storage}")
    directory = Path(tempfile.mkdtemp(dir=parent))
    native_directory = directory / "native"
    native_directory.mkdir()
    comparisons = []
    for other in (
        NativeProcess(native, native_directory, page_bytes, count),
        SystemCalls(directory / "calls", page_bytes, count),
    ):
        ours = EmbeddedWork(directory / f"ours beside {other.name}", page_bytes, count)
        with closing(ours), closing(other):
            times = run_pairs(ours, other, PHASES, budget_s=budget_s)
        comparisons += [
            Comparison(
                labels={
                    "storage": storage,
                    "page": format_bytes(page_bytes),
                    "pages": str(count),
                    "call": phase,
                },
                other=other.name,
                moved_bytes=0 if phase.startswith("exists") else page_bytes * count,
                times=paired,
                required_speedup=_required(phase, page_bytes, count)
                if other.name == NativeProcess.name
                else None,
            )
            for phase, paired in times.items()
        ]
    if storage in MEMORY_FILESYSTEMS:
        shutil.rmtree(directory)  # On a disk that comes last: see `BlockWork.finish`.
    return comparisons


def _required(phase: str, page_bytes: int, count: int) -> float | None:
    if phase.startswith("exists"):
        return LOOKUP_SPEEDUP if count == LOOKUP_PAGES else None
    if count == LOOKUP_PAGES:
        return None
    return SMALL_PAGE_SPEEDUP if page_bytes <= SMALL_PAGE_BYTES else 1.0
