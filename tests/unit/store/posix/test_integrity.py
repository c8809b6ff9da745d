# SPDX-License-Identifier: MIT
"""What is verified, what becomes of a block that fails, and files that cannot be verified at all."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreSpec
from ucm.store.posix.block_file import file_bytes
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    SPEC,
    assert_loads,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE_ALIGNED = StoreSpec("aligned_8192x2", (8192, 8192), SPEC.identity)


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, memory: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def open_store(storage: Path, spec: StoreSpec = SPEC, *, accept_unverified: bool = True) -> PosixStore:
    return PosixStore(spec, PosixStoreConfig((str(storage),), accept_unverified=accept_unverified))


@pytest.fixture
def store(storage: Path) -> Iterator[PosixStore]:
    store = open_store(storage)
    yield store
    store.close()


def write_raw(storage: Path, number: int, content: bytes, spec: StoreSpec = SPEC) -> Path:
    """Write a file as the native store does: where the block is, and nothing but these bytes."""
    path = block_path(storage, spec, key_of(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def flip(path: Path, offset: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 0x01
    path.write_bytes(damaged)


def test_a_damaged_block_is_a_miss_counted_reported_in_one_line_and_gone(
    store: PosixStore, storage: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.dump(outgoing([1, 2, 3]))
    path = block_path(storage, SPEC, key_of(2))
    flip(path, 100)
    with caplog.at_level(logging.DEBUG):
        assert load(store, [1, 2, 3])[0] == [DONE, CORRUPT, DONE]
    assert caplog.messages == [
        f"load {SPEC.namespace}: 2 of 3 blocks, 0 missing, 1 corrupt, 0 failed; first {path}: "
        "the payload does not match its checksum"
    ]
    assert store.stats().load_corrupt == 1
    assert store.lookup([key_of(2)]) == [False]
    assert not path.exists()
    assert store.dump(outgoing([2])) == [DONE]
    assert_loads(store, [1, 2, 3])


@pytest.mark.parametrize("spec", [SPEC, PAGE_ALIGNED], ids=["odd", "aligned"])
def test_a_file_that_is_exactly_the_payload_is_found_and_loads(storage: Path, spec: StoreSpec) -> None:
    store = open_store(storage, spec)
    store.dump(outgoing([1, 3], spec))
    path = write_raw(storage, 2, payload_of(2, spec), spec)
    assert store.lookup([key_of(n) for n in range(1, 5)]) == [True, True, True, False]
    assert_loads(store, [1, 2, 3])
    assert path.read_bytes() == payload_of(2, spec)
    store.close()


def test_a_payload_that_is_not_in_the_page_cache_loads(tmp_path: Path) -> None:
    store = open_store(tmp_path, PAGE_ALIGNED)
    with write_raw(tmp_path, 1, payload_of(1, PAGE_ALIGNED), PAGE_ALIGNED).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert_loads(store, [1])
    store.close()


def test_what_was_loaded_without_verification_is_counted(store: PosixStore, storage: Path) -> None:
    store.dump(outgoing([1, 3]))
    write_raw(storage, 2, payload_of(2))
    assert_loads(store, [1, 2, 3])
    stats = store.stats()
    assert (stats.loaded, stats.loaded_unverified, stats.loaded_bytes) == (3, 1, 3 * SPEC.block_bytes)


def test_a_dump_replaces_a_bare_payload_by_a_block_that_can_be_verified(
    store: PosixStore, storage: Path
) -> None:
    path = write_raw(storage, 1, payload_of(1))
    assert store.dump(outgoing([1])) == [DONE]
    assert path.stat().st_size == file_bytes(SPEC)
    assert_loads(store, [1])
    assert store.stats().loaded_unverified == 0


def test_clearing_leaves_a_bare_payload_since_nobody_knows_whose_it_is(
    store: PosixStore, storage: Path
) -> None:
    store.dump(outgoing([1]))
    write_raw(storage, 2, payload_of(2))
    assert list(store.scan()) == [key_of(1)]


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: b"",  # noqa: ARG005 -- all take the payload.
        lambda payload: payload[:-1],
        lambda payload: payload + b"x",
        lambda payload: payload + bytes(file_bytes(SPEC) - SPEC.block_bytes - 1),
        lambda payload: payload + bytes(file_bytes(SPEC) - SPEC.block_bytes),
    ],
    ids=["empty", "one byte short", "one byte long", "almost a footer", "a footer of zeros"],
)
def test_anything_but_a_whole_payload_or_a_whole_block_is_corrupt_and_gives_way(
    store: PosixStore, storage: Path, change: Callable[[bytes], bytes]
) -> None:
    path = write_raw(storage, 1, change(payload_of(1)))
    assert load(store, [1])[0] == [CORRUPT]
    assert not path.exists()


def test_a_store_that_wants_proof_takes_a_bare_payload_for_damage(storage: Path) -> None:
    store = open_store(storage, accept_unverified=False)
    path = write_raw(storage, 1, payload_of(1))
    assert store.lookup([key_of(1)]) == [False]
    assert load(store, [1])[0] == [CORRUPT]
    assert not path.exists()
    store.close()


def test_a_block_never_has_its_name_before_its_footer(store: PosixStore) -> None:
    # Whoever is killed between the two would leave what a lookup takes for a block of the native store.
    sizes = set()
    rename = os.rename

    def record(source: str, target: str) -> None:
        sizes.add(Path(source).stat().st_size)
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", record)
        store.dump(outgoing([1, 2]))
    assert sizes == {file_bytes(SPEC)}
