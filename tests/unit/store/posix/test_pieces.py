# SPDX-License-Identifier: MIT
"""A large block is read in pieces by several threads, and judged as one."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.store import StoreSpec
from ucm.store.posix import pieces
from ucm.store.posix.block_file import FOOTER_BYTES
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.pieces import cut, part_of, pieces_of
from ucm.store.posix.reading import ALIGNMENT, IoMode
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    MISSING,
    SPEC,
    assert_loads,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = StoreSpec("large_x3", (3_000_001, 5, 3_600_000), SPEC.identity)
PIECES = 4


@pytest.fixture(params=["disk", "memory"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    monkeypatch.setattr(pieces, "_LEAST_BYTES", LARGE.block_bytes // PIECES)
    if request.param == "disk":
        yield tmp_path
        return
    memory: Path = request.getfixturevalue("memory")
    directory = memory / f"pieces-{os.getpid()}"
    yield directory
    for file in sorted(directory.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    directory.rmdir()


@pytest.fixture
def store(storage: Path) -> Iterator[PosixStore]:
    store = PosixStore(LARGE, PosixStoreConfig((str(storage),)))
    yield store
    store.close()


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that read a piece, in order."""
    names: list[str] = []
    read = pieces.LargeBlock._read

    def record(self: pieces.LargeBlock, *arguments: object) -> bool | None:
        names.append(threading.current_thread().name)
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pieces.LargeBlock, "_read", record)
    return names


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@given(st.integers(1, 1 << 26), st.integers(1, 8))
def test_pieces_cover_a_block_once_and_start_aligned(size: int, count: int) -> None:
    ranges = cut(size, count)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert all(start % ALIGNMENT == 0 and start < stop for start, stop in ranges)
    assert len(ranges) <= count


@given(st.lists(st.binary(max_size=9), min_size=1), st.data())
def test_a_part_of_buffers_is_the_same_part_of_their_bytes(buffers: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(buffers)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    part = part_of([memoryview(buffer) for buffer in buffers], start, stop)
    assert b"".join(part) == whole[start:stop]


@pytest.mark.parametrize(
    ("block_bytes", "blocks", "expected"),
    [(7 << 20, 1, 1), (8 << 20, 1, 2), (64 << 20, 1, 4), (64 << 20, 4, 2), (64 << 20, 8, 1), (1, 0, 1)],
)
def test_only_few_large_blocks_are_cut(block_bytes: int, blocks: int, expected: int) -> None:
    assert pieces_of(block_bytes, blocks) == expected


@pytest.mark.parametrize("io_mode", IoMode)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_every_mode_reads_all_of_a_large_block(
    storage: Path, io_mode: IoMode, warm: bool, read_by: list[str]
) -> None:
    store = PosixStore(LARGE, PosixStoreConfig((str(storage),), io_mode=io_mode))
    store.dump(outgoing([1, 2], LARGE))
    if not warm:
        drop(block_path(storage, LARGE, key_of(1)))
    assert_loads(store, [1])
    assert len(read_by) >= PIECES
    assert_loads(store, [2, 1])
    store.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: the caller reads alone")
def test_several_threads_read_one_block(store: PosixStore, read_by: list[str]) -> None:
    store.dump(outgoing([1], LARGE))
    for _ in range(200):
        read_by.clear()
        assert_loads(store, [1])
        if len(set(read_by)) > 1:
            return
    raise AssertionError(f"only {set(read_by)}")


@pytest.mark.parametrize("offset", [0, 1_700_000, 3_400_000, 6_600_005])
def test_damage_in_any_piece_is_found_and_the_file_removed(
    store: PosixStore, storage: Path, offset: int
) -> None:
    store.dump(outgoing([1, 2], LARGE))
    path = block_path(storage, LARGE, key_of(1))
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    statuses, blocks = load(store, [1, 2])
    assert statuses == [CORRUPT, DONE]
    assert blocks[1].payload == payload_of(2, LARGE)
    assert not path.exists()
    assert load(store, [1])[0] == [MISSING]


@pytest.mark.parametrize(
    "size", [0, 1, 1_700_000, LARGE.block_bytes - 1, LARGE.block_bytes + FOOTER_BYTES - 1]
)
def test_a_cut_block_is_corrupt(store: PosixStore, storage: Path, size: int) -> None:
    store.dump(outgoing([1], LARGE))
    os.truncate(block_path(storage, LARGE, key_of(1)), size)
    assert load(store, [1])[0] == [CORRUPT]


def test_a_block_with_something_behind_it_is_corrupt(store: PosixStore, storage: Path) -> None:
    store.dump(outgoing([1], LARGE))
    with block_path(storage, LARGE, key_of(1)).open("ab") as file:
        file.write(b"x")
    assert load(store, [1])[0] == [CORRUPT]


def test_a_payload_without_a_footer_loads(store: PosixStore, storage: Path) -> None:
    store.dump(outgoing([1], LARGE))
    os.truncate(block_path(storage, LARGE, key_of(1)), LARGE.block_bytes)
    assert_loads(store, [1])
    assert store.stats().loaded_unverified == 1


def test_a_block_replaced_between_two_pieces_is_one_or_the_other(store: PosixStore) -> None:
    store.dump(outgoing([1], LARGE))
    whole = {payload_of(1, LARGE, version) for version in (0, 1)}
    loaded = 0

    def rewrite() -> None:
        for version in range(3000):
            store.delete([key_of(1)])
            store.dump(outgoing([1], LARGE, version % 2))
            if version >= 60 and loaded:  # A busy machine may need more rounds.
                break

    writer = threading.Thread(target=rewrite)
    writer.start()
    while writer.is_alive():
        statuses, [block] = load(store, [1])
        assert statuses in ([DONE], [MISSING])
        if statuses == [DONE]:
            loaded += 1
            assert block.payload in whole
    writer.join()
    assert loaded


def test_a_mixture_of_two_blocks_is_read_again(
    store: PosixStore, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = block_path(storage, LARGE, key_of(1)), storage / "other"
    store.dump(outgoing([1], LARGE, 1))
    path.rename(other)
    store.dump(outgoing([1], LARGE, 0))
    read = pieces.LargeBlock._read
    turn = threading.Lock()

    def replace_once(self: pieces.LargeBlock, index: int, *arguments: object) -> bool | None:
        with turn:
            done = read(self, index, *arguments)  # type: ignore[arg-type]
            if other.exists():
                other.rename(path)
        return done

    monkeypatch.setattr(pieces.LargeBlock, "_read", replace_once)
    statuses, [block] = load(store, [1])
    assert statuses == [DONE]
    assert block.payload == payload_of(1, LARGE, 1)
    block.assert_guards_intact()


def test_a_missing_block_beside_a_stored_one_costs_only_itself(store: PosixStore) -> None:
    store.dump(outgoing([1], LARGE))
    statuses, blocks = load(store, [2, 1])
    assert statuses == [MISSING, DONE]
    assert blocks[1].payload == payload_of(1, LARGE)


def test_a_block_whose_pieces_cannot_be_read_is_read_as_one(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.dump(outgoing([1], LARGE))
    monkeypatch.setattr(store.files, "load_piece", _fail)
    monkeypatch.setattr(store.files, "load_piece_now", _fail)
    assert_loads(store, [1])


def _fail(*_arguments: object) -> bool:
    raise OSError(5, "input/output error")


def test_what_is_loaded_is_counted_by_blocks(store: PosixStore) -> None:
    store.dump(outgoing([1], LARGE))
    load(store, [1, 2])
    assert (store.stats().loaded, store.stats().load_missing) == (1, 1)
