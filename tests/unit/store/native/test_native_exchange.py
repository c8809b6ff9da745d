# SPDX-License-Identifier: MIT
"""Blocks written by one store are read by the other, both ways, with the real package.

Three stores share a directory: UCM's own store as UCM's connector would use it, the same behind our
interface, and the embedded one.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.integration.sglang.namespace import block_keys
from ucm.store import BlockStatus, StoreSpec
from ucm.store.factory import StoreConfig, open_store
from ucm.store.native.package import connector_factory
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    MISSING,
    assert_loads,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.store import BlockKey, KVStore

# Primary KV: right below the root, K and V in one block.
SPEC = StoreSpec("", (70_000, 70_000), b"identity of pool")


class UcmStore:
    """UCM's own PosixStore for bare payloads, driven as UCM's connector does it."""

    def __init__(self, package: Path, root: Path) -> None:
        # Its threads would make closing take seconds.
        self._store: Any = connector_factory(str(package)).create_connector(
            "UcmPipelineStore",
            {
                "store_pipeline": "Posix",
                "storage_backends": [str(root)],
                "device_id": 0,
                "tensor_size": SPEC.segment_bytes[0],
                "shard_size": SPEC.block_bytes,
                "block_size": SPEC.block_bytes,
                "io_direct": False,
                "posix_data_trans_concurrency": 2,
                "posix_lookup_concurrency": 1,
                "store_health": {"passive_enabled": False},
            },
        )

    def dump(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> None:
        buffers = [ctypes.create_string_buffer(payload, len(payload)) for payload in payloads]
        self._store.wait(self._store.dump_data(list(keys), [0] * len(keys), self._addresses(buffers)))

    def load(self, keys: Sequence[bytes]) -> list[bytes]:
        buffers = [ctypes.create_string_buffer(SPEC.block_bytes) for _ in keys]
        self._store.wait(self._store.load_data(list(keys), [0] * len(keys), self._addresses(buffers)))
        return [buffer.raw for buffer in buffers]

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(found) for found in self._store.lookup(list(keys))]

    @staticmethod
    def _addresses(buffers: Sequence[ctypes.Array[ctypes.c_char]]) -> list[list[int]]:
        firsts = [ctypes.addressof(buffer) for buffer in buffers]
        return [[first, first + SPEC.segment_bytes[0]] for first in firsts]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def ucm_store(native_package: Path, root: Path) -> UcmStore:
    return UcmStore(native_package, root)


@pytest.fixture(scope="module")
def native(native_package: Path, root: Path) -> Iterator[KVStore]:
    options = {"engine": "native", "native_package": str(native_package), "storage_backends": str(root)}
    store = open_store(SPEC, StoreConfig.from_mapping(options))
    yield store
    store.close()


@pytest.fixture(scope="module")
def embedded(root: Path) -> Iterator[KVStore]:
    store = open_store(SPEC, StoreConfig.from_mapping({"storage_backends": str(root)}))
    yield store
    store.close()


def keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    return [key_of(number) for number in numbers]


def test_what_ucm_stored_both_of_ours_load_unverified(
    ucm_store: UcmStore, native: KVStore, embedded: KVStore
) -> None:
    numbers = [10, 11, 12]
    ucm_store.dump(keys_of(numbers), [payload_of(number, SPEC) for number in numbers])
    for store in (native, embedded):
        before = store.stats().loaded_unverified
        assert store.lookup(keys_of([*numbers, 13])) == [True, True, True, False]
        assert_loads(store, numbers)
        assert store.stats().loaded_unverified == before + 3


def test_what_the_embedded_store_stored_ucm_and_the_native_one_load(
    ucm_store: UcmStore, native: KVStore, embedded: KVStore
) -> None:
    numbers = [20, 21, 22]
    assert embedded.dump(outgoing(numbers, SPEC)) == [DONE] * 3
    assert ucm_store.lookup(keys_of(numbers)) == [True] * 3
    assert ucm_store.load(keys_of(numbers)) == [payload_of(number, SPEC) for number in numbers]
    assert native.lookup(keys_of(numbers)) == [True] * 3
    assert_loads(native, numbers)


def test_what_the_native_store_stored_ucm_and_the_embedded_one_load(
    ucm_store: UcmStore, native: KVStore, embedded: KVStore
) -> None:
    numbers = [30, 31, 32]
    assert native.dump(outgoing(numbers, SPEC)) == [DONE] * 3
    assert ucm_store.load(keys_of(numbers)) == [payload_of(number, SPEC) for number in numbers]
    before = embedded.stats().loaded_unverified
    assert embedded.lookup(keys_of(numbers)) == [True] * 3
    assert_loads(embedded, numbers)
    assert embedded.stats().loaded_unverified == before


def test_both_of_ours_write_the_same_bytes(native: KVStore, embedded: KVStore, root: Path) -> None:
    files = []
    for store in (native, embedded):
        assert store.dump(outgoing([40], SPEC)) == [DONE]
        path = block_path(root, SPEC, key_of(40))
        files.append(path.read_bytes())
        path.unlink()
    assert files[0] == files[1]


def test_a_page_that_ucm_stored_as_primary_kv_is_found_under_our_key(
    ucm_store: UcmStore, embedded: KVStore, root: Path
) -> None:
    # SPEC section 7: MD5 of `{logical_key}_{model}_{tp_rank}_{tp_size}`, worked out by hand.
    key = bytes.fromhex("05339f7390607af5ed2771c7c3ca5d07")
    ucm_store.dump([key], [payload_of(50, SPEC)])
    assert (root / key.hex()[:3] / key.hex()).is_file()
    assert block_keys(["page"], "_some-model_0_1") == [key]
    assert embedded.lookup(block_keys(["page"], "_some-model_0_1")) == [True]


def test_the_native_store_prints_nothing_and_leaves_our_log_lines_alone(
    native: KVStore, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert native.dump(outgoing([55], SPEC)) == [DONE]
    assert_loads(native, [55])
    logging.getLogger("ucm.store.posix.store").warning("a line of ours")
    assert caplog.messages == ["a line of ours"]
    assert capfd.readouterr() == ("", "")


def test_what_another_store_damages_or_removes_costs_one_page(
    native: KVStore, embedded: KVStore, root: Path
) -> None:
    assert native.dump(outgoing(range(60, 66), SPEC)) == [DONE] * 6
    embedded.delete(keys_of([61]))
    block_path(root, SPEC, key_of(62)).write_bytes(b"")
    with block_path(root, SPEC, key_of(63)).open("r+b") as file:
        file.write(b"damage")
    assert native.lookup(keys_of(range(60, 66))) == [True, False, False, True, True, True]
    statuses, memory = load(native, range(60, 66))
    assert statuses == [DONE, MISSING, CORRUPT, CORRUPT, DONE, DONE]
    assert [guarded.is_untouched for guarded in memory] == [False, True, True, True, False, False]
    assert native.dump(outgoing(range(60, 66), SPEC)) == [BlockStatus.DONE] * 6
    assert_loads(embedded, range(60, 66))


def test_one_error_does_not_make_the_native_store_refuse_the_next_call(native: KVStore, root: Path) -> None:
    assert native.dump(outgoing([70], SPEC)) == [DONE]
    in_the_way = Path(f"{block_path(root, SPEC, key_of(71))}.tmp")
    in_the_way.mkdir(parents=True)
    assert native.dump(outgoing([71], SPEC)) == [BlockStatus.FAILED]
    assert not in_the_way.exists()  # It has removed what it could not write.
    assert native.dump(outgoing([71], SPEC)) == [DONE]
    assert_loads(native, [70, 71])


def test_a_directory_in_place_of_a_block_is_no_success(native: KVStore, root: Path) -> None:
    # The native store says that it has stored such a block.
    block_path(root, SPEC, key_of(80)).mkdir(parents=True)
    assert native.lookup([key_of(80)]) == [False]
    assert native.dump(outgoing([80], SPEC)) == [BlockStatus.FAILED]


def test_a_shard_directory_deleted_while_running_is_made_again(native: KVStore, root: Path) -> None:
    shard = block_path(root, SPEC, key_of(90)).parent
    for file in shard.iterdir():
        file.unlink()
    shard.rmdir()
    assert native.dump(outgoing([90], SPEC)) == [DONE]
    assert_loads(native, [90])


@pytest.mark.parametrize(
    ("pipeline", "dumped", "found", "loaded"),
    [("Fake", DONE, True, CORRUPT), ("Empty", BlockStatus.FAILED, False, MISSING)],
)
def test_a_pipeline_of_ucms_that_keeps_no_bytes_is_never_believed(
    native_package: Path, pipeline: str, dumped: BlockStatus, found: bool, loaded: BlockStatus
) -> None:
    options = {
        "engine": "native",
        "native_package": str(native_package),
        "store_pipeline": pipeline,
        "unique_id": f"test-{os.getpid()}",
    }
    store = open_store(SPEC, StoreConfig.from_mapping(options))
    assert store.dump(outgoing([1], SPEC)) == [dumped]
    assert store.lookup([key_of(1), key_of(2)]) == [found, False]
    statuses, memory = load(store, [1])
    assert statuses == [loaded]
    assert memory[0].is_untouched
    assert store.lookup([key_of(1)]) == [False]
    store.close()
