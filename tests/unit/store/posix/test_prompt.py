# SPDX-License-Identifier: MIT
"""What needs no waiting happens in the caller's thread, and nothing else does."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreSpec
from ucm.store.posix import engine
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.engine import THREAD_NAME_PREFIX, IoEngine
from ucm.store.posix.prompt import PromptDirectory, is_cached
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path, faulty_call
from ucm.testing.store_conformance import CORRUPT, DONE, SPEC, assert_loads, key_of, load, outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZE = file_bytes(SPEC)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many workers each batch asked for that needed any."""
    asked: list[int] = []
    submit = IoEngine._submit

    def record(engine: IoEngine, batch: object, workers: int, *least_bytes: int) -> None:
        asked.append(workers)
        submit(engine, batch, workers, *least_bytes)  # type: ignore[arg-type]  # What the engine gave us.

    monkeypatch.setattr(IoEngine, "_submit", record)
    return asked


@pytest.fixture
def store(tmp_path: Path, batches: list[int]) -> Iterator[PosixStore]:
    store = PosixStore(SPEC, PosixStoreConfig((str(tmp_path),)))
    if store.files._file_systems[0].prompt is None:
        pytest.skip("this kernel or file system cannot tell what it has in its caches")
    store.dump(outgoing(list(range(4))))
    batches.clear()
    yield store
    store.close()


def path_of(storage: Path, number: int) -> Path:
    return block_path(storage, SPEC, key_of(number))


def name_of(storage: Path, number: int) -> str:
    return str(path_of(storage, number).relative_to(storage / SPEC.namespace))


def descriptors() -> int:
    gc.collect()  # What earlier tests left must not be closed between two counts.
    return len(list(Path("/proc/self/fd").iterdir()))


def drop_from_the_page_cache(path: Path, first: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # Only what is on the disk can be dropped.
    os.posix_fadvise(descriptor, first, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def test_cached_blocks_are_found_and_loaded_without_a_worker(store: PosixStore, batches: list[int]) -> None:
    assert store.lookup([key_of(n) for n in range(4)]) == [True] * 4
    assert_loads(store, list(range(4)))
    assert batches == []


def test_a_block_that_is_not_cached_takes_a_worker(
    store: PosixStore, tmp_path: Path, batches: list[int]
) -> None:
    drop_from_the_page_cache(path_of(tmp_path, 2))
    assert_loads(store, list(range(4)))
    assert batches == [1]


def test_a_worker_reads_what_is_not_cached_into_memory_of_its_own(store: PosixStore, tmp_path: Path) -> None:
    drop_from_the_page_cache(path_of(tmp_path, 2))
    (block,) = outgoing([2])
    segments = {id(segment) for segment in block.segments}
    into_segments = []

    def record(preadv: Callable[..., int], descriptor: int, buffers: list[memoryview], *rest: object) -> int:
        into_segments.append(any(id(buffer) in segments for buffer in buffers))
        return preadv(descriptor, buffers, *rest)

    with faulty_call("preadv", path_of(tmp_path, 2).name, record):
        assert store.load([block]) == [DONE]
    # A read straight into the segments would hold the caller's memory for as long as storage takes.
    assert into_segments
    assert not any(into_segments)


def test_a_missing_block_takes_a_worker(store: PosixStore, batches: list[int]) -> None:
    assert store.lookup([key_of(1), key_of(77)]) == [True, False]
    assert batches == [1]


def test_a_dump_takes_a_worker(store: PosixStore, batches: list[int]) -> None:
    assert store.dump(outgoing([9])) == [DONE]
    assert batches == [1]


def test_a_damaged_block_is_removed_by_a_worker(store: PosixStore, tmp_path: Path) -> None:
    path = path_of(tmp_path, 1)
    path.write_bytes(bytes(SIZE))
    removers = []

    def record(unlink: Callable[..., None], *args: object) -> None:
        removers.append(threading.current_thread().name)
        unlink(*args)

    original = os.unlink
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", lambda *args: record(original, *args))
        assert load(store, [0, 1])[0] == [DONE, CORRUPT]
    assert [name.startswith(THREAD_NAME_PREFIX) for name in removers] == [True]
    assert not path.exists()


def test_reading_does_not_write_the_access_time(store: PosixStore, tmp_path: Path) -> None:
    before = path_of(tmp_path, 1).stat()
    os.utime(path_of(tmp_path, 1), ns=(before.st_atime_ns - 10**15, before.st_mtime_ns))
    assert_loads(store, [1])
    assert path_of(tmp_path, 1).stat().st_atime_ns == before.st_atime_ns - 10**15


def test_no_descriptor_stays_open(store: PosixStore, tmp_path: Path) -> None:
    path_of(tmp_path, 1).write_bytes(b"short")
    before = descriptors()
    for _ in range(20):
        store.lookup([key_of(0), key_of(1), key_of(77)])
        load(store, [0, 77])
    assert descriptors() == before


def test_the_directory_is_closed_with_its_last_user(tmp_path: Path) -> None:
    before = descriptors()
    directory = PromptDirectory(str(tmp_path))
    assert descriptors() == before + 1
    del directory
    assert descriptors() == before


def link_to_another_block(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [link_to_another_block, fifo, directory, longer, shorter, Path.unlink])
@pytest.mark.usefixtures("store")
def test_what_is_no_block_file_is_left_to_the_workers(tmp_path: Path, change: Callable[[Path], None]) -> None:
    prompt, name = PromptDirectory(str(tmp_path / SPEC.namespace)), name_of(tmp_path, 1)
    room = [memoryview(bytearray(SIZE + 1))]
    assert prompt.is_stored(name, (SIZE,))
    assert prompt.read(name, room, 0, SIZE)

    change(path_of(tmp_path, 1))

    assert not prompt.is_stored(name, (SIZE,))
    assert not prompt.read(name, room, 0, SIZE)


@pytest.mark.usefixtures("store")
def test_an_unreadable_block_is_no_hit(tmp_path: Path) -> None:
    path_of(tmp_path, 1).chmod(0)
    assert not PromptDirectory(str(tmp_path / SPEC.namespace)).is_stored(name_of(tmp_path, 1), (SIZE,))


def test_a_file_that_is_only_partly_cached_is_left_to_the_workers(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 8 << 20
    path.write_bytes(bytes(size))
    prompt, room = PromptDirectory(str(tmp_path)), [memoryview(bytearray(size + 1))]
    if not prompt.read("file", room, 0, size):
        pytest.skip("this kernel or file system cannot tell what it has in its caches")
    drop_from_the_page_cache(path, size // 2)
    assert not prompt.read("file", room, 0, size)


@pytest.mark.usefixtures("store")
def test_looking_for_cached_data_reads_nothing_ahead(tmp_path: Path) -> None:
    drop_from_the_page_cache(path_of(tmp_path, 1))
    prompt = PromptDirectory(str(tmp_path / SPEC.namespace))
    assert not prompt.read(name_of(tmp_path, 1), [memoryview(bytearray(SIZE + 1))], 0, SIZE)
    with path_of(tmp_path, 1).open("rb") as file:
        assert not is_cached(file.fileno(), 0, 1)


def test_in_memory_even_a_dump_and_a_miss_take_no_worker(memory: Path, batches: list[int]) -> None:
    with tempfile.TemporaryDirectory(dir=memory) as storage:
        store = PosixStore(SPEC, PosixStoreConfig((storage,)))
        batches.clear()
        assert store.dump(outgoing([1, 2])) == [DONE] * 2
        assert store.lookup([key_of(1), key_of(3)]) == [True, False]
        assert_loads(store, [1, 2])
        assert batches == []
        store.close()


def test_much_data_in_memory_is_shared_with_a_worker_for_every_other_processor(
    memory: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_PROCESSORS", 3)
    large = StoreSpec("large_x1", (3_000_000,), SPEC.identity)
    with tempfile.TemporaryDirectory(dir=memory) as storage:
        store = PosixStore(large, PosixStoreConfig((storage,)))
        batches.clear()
        assert store.dump(outgoing([1], large)) == [DONE]
        assert batches == []
        assert store.dump(outgoing([1, 2, 3, 4], large)) == [DONE] * 4
        assert_loads(store, [1, 2, 3, 4])
        assert batches == [2, 2]
        store.close()


def test_a_large_block_that_finds_no_space_fails_before_it_is_written(tmp_path: Path) -> None:
    large = StoreSpec("large_x1", (3_000_000,), SPEC.identity)
    store = PosixStore(large, PosixStoreConfig((str(tmp_path),)))
    if not store.files._file_systems[0].preallocates:
        pytest.skip("this file system does not reserve space")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    def never(*_args: object) -> None:
        raise AssertionError("written")

    with (
        faulty_call("posix_fallocate", key_of(1).hex(), full),
        faulty_call("pwritev", key_of(1).hex(), never),
    ):
        assert [status.name for status in store.dump(outgoing([1, 2], large))] == ["FAILED", "DONE"]
    assert list(tmp_path.glob("**/.tmp/*")) == []
    store.close()
