# SPDX-License-Identifier: MIT
"""Our side of the native interface, against a stand-in for UCM's store that can be made to fail and hang."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ucm.store import StoreUnavailableError
from ucm.store.factory import StoreConfig, open_store
from ucm.store.native import connector
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    FAILED,
    MISSING,
    SPEC,
    GuardedBlock,
    assert_loads,
    incoming,
    key_of,
    load,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucm.store import KVStore


class StandInStore:
    """Stands for a store of UCM's package that keeps objects; its interface as of 0.9.0rc3.

    Attributes:
        objects: What is stored.
        stops_at_a_miss: Answers lookups as older releases do: nothing is found after the first miss.
        broken: Keys whose transfers fail, and how.
        hung: Keys whose transfers do not end before `go_on`; then they still happen.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.objects: dict[bytes, bytes] = {}
        self.stops_at_a_miss = False
        self.broken: dict[bytes, Exception] = {}
        self.hung: set[bytes] = set()
        self.go_on = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found = [key in self.objects for key in keys]
        if self.stops_at_a_miss and False in found:
            first = found.index(False)
            found[first:] = [False] * (len(found) - first)
        return found

    def load_data(
        self, keys: Sequence[bytes], shards: Sequence[int], addresses: Sequence[Sequence[int]]
    ) -> tuple[str, bytes, int]:
        assert list(shards) == [0] * len(keys)
        self.calls.append(("load", len(keys)))
        return "load", keys[0], addresses[0][0]

    def dump_data(
        self, keys: Sequence[bytes], shards: Sequence[int], addresses: Sequence[Sequence[int]]
    ) -> tuple[str, bytes, int]:
        assert list(shards) == [0] * len(keys)
        self.calls.append(("dump", len(keys)))
        return "dump", keys[0], addresses[0][0]

    def wait(self, task: tuple[str, bytes, int]) -> None:
        direction, key, address = task
        if key in self.hung:
            self.go_on.wait()
        if key in self.broken:
            raise self.broken[key]
        if direction == "dump":
            self.objects[key] = ctypes.string_at(address, self.options["block_size"])
        else:
            ctypes.memmove(address, self.objects[key], len(self.objects[key]))


class _Factory:
    def __init__(self) -> None:
        self.opened: list[StandInStore] = []
        self.error: Exception | None = None

    def create_connector(
        self, name: str, options: Mapping[str, Any], module_path: str | None
    ) -> StandInStore:
        assert (name, module_path) == ("UcmPipelineStore", None)
        if self.error:
            raise self.error
        self.opened.append(StandInStore(options))
        return self.opened[-1]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> _Factory:
    factory = _Factory()
    monkeypatch.setattr(connector, "connector_factory", lambda _package: factory)
    return factory


def open_objects(timeout_s: float = 30.0) -> KVStore:
    timeouts = dict.fromkeys(("load_timeout_s", "dump_timeout_s", "lookup_timeout_s"), timeout_s)
    options = {"engine": "native", "store_pipeline": "Mooncake", **timeouts}
    return open_store(SPEC, StoreConfig.from_mapping(options))


@pytest.fixture
def store(factory: _Factory) -> Iterator[KVStore]:
    store = open_objects()
    yield store
    factory.opened[0].go_on.set()
    store.close()


@pytest.fixture
def ucm_store(factory: _Factory, store: KVStore) -> StandInStore:
    assert store
    return factory.opened[0]


def test_a_dumped_block_loads_byte_for_byte(store: KVStore) -> None:
    assert store.dump(outgoing([1, 2])) == [DONE, DONE]
    assert_loads(store, [1, 2])


def test_the_store_is_told_the_size_of_a_block_with_its_footer(ucm_store: StandInStore) -> None:
    sizes = {ucm_store.options[name] for name in ("tensor_size", "shard_size", "block_size")}
    assert sizes == {SPEC.block_bytes + 64}


@pytest.mark.parametrize("stops_at_a_miss", [False, True])
def test_lookup_answers_for_each_key_whatever_the_release_says_after_a_miss(
    store: KVStore, ucm_store: StandInStore, stops_at_a_miss: bool
) -> None:
    ucm_store.stops_at_a_miss = stops_at_a_miss
    store.dump(outgoing([0, 2, 5]))
    assert store.lookup([key_of(n) for n in range(6)]) == [True, False, True, False, False, True]


@pytest.mark.parametrize("error", [RuntimeError("-50002"), ValueError("no"), TimeoutError(), OSError(5, "x")])
def test_whatever_a_transfer_raises_costs_one_block(
    store: KVStore, ucm_store: StandInStore, error: Exception
) -> None:
    store.dump(outgoing([0, 1, 2]))
    ucm_store.broken = {key_of(1): error, key_of(4): error}
    statuses, memory = load(store, [0, 1, 2])
    assert statuses == [DONE, FAILED, DONE]
    assert memory[1].is_untouched
    assert store.dump(outgoing([3, 4, 5])) == [DONE, FAILED, DONE]
    assert ucm_store.calls.count(("load", 1)) == 3  # Never two blocks in one transfer.
    assert ucm_store.calls.count(("dump", 1)) == len(ucm_store.calls) - 3


def test_a_missing_block_costs_only_itself(store: KVStore) -> None:
    store.dump(outgoing([1, 3]))
    statuses, memory = load(store, [1, 2, 3])
    assert statuses == [DONE, MISSING, DONE]
    assert memory[1].is_untouched


def test_a_block_that_vanishes_during_its_load_is_missing(store: KVStore, ucm_store: StandInStore) -> None:
    store.dump(outgoing([1, 2]))
    vanished = ucm_store.objects.pop(key_of(1))
    ucm_store.broken[key_of(1)] = RuntimeError("-50005")
    lookup, answers = ucm_store.lookup, [[True]]
    ucm_store.lookup = lambda keys: answers.pop() if answers else lookup(keys)  # type: ignore[method-assign]
    assert load(store, [1])[0] == [MISSING]
    assert vanished


def test_a_damaged_block_is_absent_until_it_is_stored_anew(
    store: KVStore, ucm_store: StandInStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.dump(outgoing([1, 2]))
    ucm_store.objects[key_of(1)] = bytes(SPEC.block_bytes + 64)
    statuses, memory = load(store, [1, 2])
    assert statuses == [CORRUPT, DONE]
    assert memory[0].is_untouched
    assert f"first Mooncake:{key_of(1).hex()}: no footer" in caplog.messages[0]
    assert store.lookup([key_of(1), key_of(2)]) == [False, True]
    assert store.dump(outgoing([1])) == [DONE]
    assert_loads(store, [1, 2])


def test_a_transfer_that_hangs_costs_its_block_and_no_page_is_written_afterwards(factory: _Factory) -> None:
    store = open_objects(timeout_s=2.0)
    [ucm_store] = factory.opened
    store.dump(outgoing([0, 1, 2]))
    ucm_store.hung = {key_of(1)}
    began = time.monotonic()
    statuses, memory = load(store, [0, 1, 2])
    assert time.monotonic() - began < 15
    assert statuses == [DONE, FAILED, DONE]
    assert store.stats().deadlines_missed == 1
    ucm_store.go_on.set()
    store.close()  # Waits for the transfer, which happens now.
    assert memory[1].is_untouched


def test_a_dump_that_hangs_stores_the_page_as_it_was(factory: _Factory) -> None:
    store = open_objects(timeout_s=2.0)
    [ucm_store] = factory.opened
    ucm_store.hung = {key_of(1)}
    memory = GuardedBlock(SPEC, key_of(1), payload_of(1))
    assert store.dump([memory.block, *outgoing([2])]) == [FAILED, DONE]
    memory.block.segments[0][:] = bytes(SPEC.segment_bytes[0])  # The page has a new owner.
    ucm_store.go_on.set()
    store.close()
    assert ucm_store.objects[key_of(1)][: SPEC.block_bytes] == payload_of(1)


def test_closing_a_store_that_hangs_is_bounded_and_tells(
    factory: _Factory, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_objects(timeout_s=1.0)
    [ucm_store] = factory.opened
    store.dump(outgoing([1]))
    ucm_store.hung = {key_of(1)}
    assert store.load([incoming([1])[0].block]) == [FAILED]
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        store.close()
    assert time.monotonic() - began < 15
    assert "the native store hangs in storage" in caplog.messages[-1]
    ucm_store.go_on.set()


def test_a_closed_store_says_so_and_closing_twice_does_nothing(store: KVStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailableError):
        store.lookup([key_of(1)])


def test_what_the_store_cannot_do_is_no_success(store: KVStore) -> None:
    store.dump(outgoing([1]))
    assert store.delete([key_of(1)]) == [False]
    assert list(store.scan()) == []


def test_a_store_that_refuses_to_open_is_named_with_its_reason(factory: _Factory) -> None:
    factory.error = RuntimeError("-1, invalid size")
    with pytest.raises(StoreUnavailableError, match=r"UcmPipelineStore refuses to open .*-1, invalid size"):
        open_objects()
