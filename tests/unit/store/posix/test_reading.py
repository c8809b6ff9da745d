# SPDX-License-Identifier: MIT
"""Cold blocks are read around the page cache, warm ones from it, and every byte arrives."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreSpec
from ucm.store.posix import file_io
from ucm.store.posix.block_file import FOOTER_BYTES
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.lease import HostLease
from ucm.store.posix.reading import DIRECT_BYTES, IoMode, read_direct
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    HURRY_S,
    SPEC,
    assert_loads,
    incoming,
    key_of,
    load,
    outgoing,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# Nothing here is a multiple of a sector, let alone of a page.
ODD = StoreSpec("odd_x2", (2_500_001, 77_777), SPEC.identity)
ALIGNED = StoreSpec("aligned_x1", (1 << 21,), SPEC.identity)
HUGE = StoreSpec("huge_x1", (9_000_000,), SPEC.identity)  # Read in pieces.
SMALL = StoreSpec("small_x1", (5000,), SPEC.identity)
# With the footer, its files end where a sector ends.
SECTORS = StoreSpec("sectors_x1", ((1 << 17) - FOOTER_BYTES + 512,), SPEC.identity)


@pytest.fixture
def direct_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets at which files were read around the page cache."""
    offsets: list[int] = []
    preadv = os.preadv

    def record(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            offsets.append(offset)
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", record)
    return offsets


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[..., PosixStore]:
    def open_store(spec: StoreSpec, io_mode: IoMode = IoMode.AUTO) -> PosixStore:
        return PosixStore(spec, PosixStoreConfig((str(tmp_path),), io_mode=io_mode))

    return open_store


def drop(storage: Path, spec: StoreSpec, number: int, first: int = 0) -> None:
    """Drop a block's file from the page cache, from byte `first` on."""
    descriptor = os.open(block_path(storage, spec, key_of(number)), os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, first, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def require_direct(store: PosixStore) -> None:
    direct = store.files._file_systems[0].direct
    if direct is None or not direct.work:
        pytest.skip("this file system cannot be read around the page cache")


@pytest.mark.parametrize("spec", [ODD, ALIGNED, SMALL, SECTORS], ids=lambda spec: spec.namespace)
@pytest.mark.parametrize("io_mode", IoMode)
def test_every_mode_reads_the_same_bytes_cold_and_warm(
    open_store: Callable[..., PosixStore], tmp_path: Path, spec: StoreSpec, io_mode: IoMode
) -> None:
    store = open_store(spec, io_mode)
    assert store.dump(outgoing([1, 2, 3], spec)) == [DONE] * 3
    assert_loads(store, [1, 2, 3])
    for number in (1, 2, 3):
        drop(tmp_path, spec, number)
    assert_loads(store, [3, 1, 2])
    store.close()


def test_only_what_is_not_cached_is_read_around_the_page_cache(
    open_store: Callable[..., PosixStore], tmp_path: Path, direct_reads: list[int]
) -> None:
    store = open_store(ODD)
    require_direct(store)
    if not store.files._file_systems[0].tells_cached:
        pytest.skip("this kernel cannot tell what it has in its page cache")
    store.dump(outgoing([1, 2], ODD))
    direct_reads.clear()
    assert_loads(store, [1, 2])
    assert direct_reads == []
    drop(tmp_path, ODD, 2)
    assert_loads(store, [1, 2])
    assert direct_reads == [0, file_io._HUGE_PAGE_BYTES]
    store.close()


def test_without_a_kernel_that_can_tell_the_page_cache_is_tried_first(
    open_store: Callable[..., PosixStore], tmp_path: Path, direct_reads: list[int]
) -> None:
    store = open_store(ODD)
    require_direct(store)
    found = store.files._file_systems[0]
    store.files._file_systems = [found._replace(tells_cached=False, prompt=None)]
    store.files.can_read_now = False
    store.dump(outgoing([1], ODD))
    direct_reads.clear()
    assert_loads(store, [1])
    assert direct_reads == []
    drop(tmp_path, ODD, 1, first=1 << 20)
    assert_loads(store, [1])
    assert direct_reads
    assert direct_reads[0] >= 1 << 20  # What was cached came from there.
    store.close()


def test_direct_mode_never_reads_through_the_page_cache(
    open_store: Callable[..., PosixStore], direct_reads: list[int]
) -> None:
    store = open_store(ODD, IoMode.DIRECT)
    require_direct(store)
    store.dump(outgoing([1], ODD))
    direct_reads.clear()
    assert_loads(store, [1])
    assert direct_reads == [0, file_io._HUGE_PAGE_BYTES]
    store.close()


def test_buffered_mode_never_reads_around_it(
    open_store: Callable[..., PosixStore], tmp_path: Path, direct_reads: list[int]
) -> None:
    store = open_store(ODD, IoMode.BUFFERED)
    store.dump(outgoing([1], ODD))
    drop(tmp_path, ODD, 1)
    assert_loads(store, [1])
    assert direct_reads == []
    store.close()


def test_small_blocks_are_not_worth_it(
    open_store: Callable[..., PosixStore], tmp_path: Path, direct_reads: list[int]
) -> None:
    store = open_store(SMALL)
    direct_reads.clear()  # Opening the store tries it out.
    assert SMALL.block_bytes < DIRECT_BYTES
    store.dump(outgoing([1], SMALL))
    drop(tmp_path, SMALL, 1)
    assert_loads(store, [1])
    assert direct_reads == []
    store.close()


@pytest.mark.parametrize("refused_at", ["open", "flag", "read"])
def test_a_file_system_that_refuses_is_read_through_the_page_cache_with_one_warning(
    open_store: Callable[..., PosixStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused_at: str,
) -> None:
    preadv = os.preadv

    def refuse(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, buffers, offset, flags)

    change = fcntl.fcntl

    def refuse_flag(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return change(descriptor, command, argument)

    if refused_at == "open":
        monkeypatch.setattr(os, "preadv", refuse)
        store = open_store(ODD)
    else:
        store = open_store(ODD)
        require_direct(store)
        if refused_at == "flag":
            monkeypatch.setattr(fcntl, "fcntl", refuse_flag)
        else:
            monkeypatch.setattr(os, "preadv", refuse)
    store.dump(outgoing([1, 2, 3], ODD))
    for number in (1, 2, 3):
        drop(tmp_path, ODD, number)
    assert_loads(store, [1, 2, 3])
    told = [record.getMessage() for record in caplog.records if "page cache" in record.getMessage()]
    assert len(told) == 1
    assert str(tmp_path) in told[0]
    store.close()


def test_another_error_of_a_direct_read_costs_the_block_only(
    open_store: Callable[..., PosixStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(ODD)
    require_direct(store)
    store.dump(outgoing([1, 2], ODD))
    for number in (1, 2):
        drop(tmp_path, ODD, number)
    preadv = os.preadv

    def fail(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if key_of(1).hex() in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", fail)
    assert [status.name for status in load(store, [1, 2])[0]] == ["FAILED", "DONE"]
    direct = store.files._file_systems[0].direct
    assert direct is not None
    assert direct.work
    assert "page cache" not in caplog.text
    store.close()


@pytest.mark.parametrize("spec", [ALIGNED, SECTORS], ids=lambda spec: spec.namespace)
@pytest.mark.parametrize("change", [-4096, -512, -64, -1, 1, 512, 4096, 1 << 20])
def test_a_cold_file_of_another_length_is_no_block(
    open_store: Callable[..., PosixStore], tmp_path: Path, spec: StoreSpec, change: int
) -> None:
    store = open_store(spec)
    store.dump(outgoing([1], spec))
    path = block_path(tmp_path, spec, key_of(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + bytes(change))
    drop(tmp_path, spec, 1)
    if change == -64:  # Exactly a payload, as the native store leaves it.
        assert_loads(store, [1])
    else:
        assert load(store, [1])[0] == [CORRUPT]
    store.close()


@pytest.mark.parametrize("spec", [ODD, HUGE], ids=lambda spec: spec.namespace)
def test_no_call_returns_while_a_block_of_its_is_being_published(tmp_path: Path, spec: StoreSpec) -> None:
    config = PosixStoreConfig((str(tmp_path),), load_timeout_s=HURRY_S)
    store = PosixStore(spec, config)
    store.files.can_read_now = False  # A worker is to do it.
    store.dump(outgoing([1], spec))
    ended = []

    def publish() -> None:
        time.sleep(HURRY_S + 0.5)  # Nothing real takes so long.
        ended.append(True)

    (guarded,) = incoming([1], spec)
    store.load([guarded.block._replace(publish=publish)])
    assert ended == [True]
    store.close()


def test_a_direct_read_that_stops_between_sectors_is_no_end_of_a_file(
    open_store: Callable[..., PosixStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(SECTORS)
    require_direct(store)
    store.dump(outgoing([1, 2], SECTORS))
    with block_path(tmp_path, SECTORS, key_of(2)).open("ab") as longer:
        longer.write(b"!")
    for number in (1, 2):
        drop(tmp_path, SECTORS, number)
    stops_at = [SECTORS.block_bytes + FOOTER_BYTES, 1 << 16]
    preadv = os.preadv

    def stop(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return min(preadv(descriptor, buffers, offset, flags), stops_at.pop())
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", stop)
    assert_loads(store, [1])
    assert load(store, [2])[0] == [CORRUPT]
    assert stops_at == []
    store.close()


def test_a_direct_read_may_begin_anywhere(tmp_path: Path) -> None:
    data = os.urandom(10_001)
    (tmp_path / "file").write_bytes(data)
    room = memoryview(bytearray(10_002))
    room[:5000] = data[:5000]
    store = PosixStore(SMALL, PosixStoreConfig((str(tmp_path / "store"),)))
    require_direct(store)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    bounce = file_io.Scratch().bounce[:4096]
    assert read_direct(descriptor, [room[:3333], room[3333:]], 0, 5000, HostLease(), bounce) == (10_001, True)
    assert bytes(room[:10_001]) == data
    os.close(descriptor)
    store.close()


def test_a_worker_reads_into_memory_that_asks_for_a_huge_page() -> None:
    bounce = file_io.Scratch().bounce
    address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
    assert address % file_io._HUGE_PAGE_BYTES == 0
    flags = {}
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(number, 16) for number in match.groups())
        elif line.startswith("VmFlags:"):
            flags[first, last] = line.split()[1:]
    (ours,) = (flags[first, last] for first, last in flags if first <= address < last)
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in ours  # Asked for;
    assert "sh" not in ours  # and shared memory gets none.
    assert "wf" in ours  # A fork leaves it alone.
