# SPDX-License-Identifier: MIT
"""FaultInjectingStore misbehaves as told, and only so."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest

from ucm.store.memory import MemoryStore
from ucm.testing.fault_injecting_store import FaultInjectingStore
from ucm.testing.store_conformance import (
    CORRUPT,
    DONE,
    FAILED,
    SPEC,
    StoreConformance,
    assert_loads,
    key_of,
    load,
    outgoing,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.store import BlockKey, KVStore, StoreSpec


class TestUndisturbed(StoreConformance):
    """With no fault injected it keeps the contract of the store inside."""

    def setup_method(self) -> None:
        self._stored: dict[BlockKey, bytes] = {}

    def open_store(self, storage: Path, spec: StoreSpec, timeout_s: float = 30.0) -> KVStore:  # noqa: ARG002
        return FaultInjectingStore(MemoryStore(spec, self._stored))

    def raw_read(self, storage: Path, spec: StoreSpec, key: BlockKey) -> bytes | None:  # noqa: ARG002
        return self._stored.get(key)

    def raw_write(self, storage: Path, spec: StoreSpec, key: BlockKey, stored: bytes) -> None:  # noqa: ARG002
        self._stored[key] = stored


@pytest.fixture
def store() -> FaultInjectingStore:
    store = FaultInjectingStore(MemoryStore(SPEC))
    store.dump(outgoing([1, 2, 3]))
    return store


@pytest.mark.parametrize("error", [OSError(5, "EIO"), ValueError("x"), TimeoutError()])
def test_an_injected_error_is_raised_until_healed(store: FaultInjectingStore, error: Exception) -> None:
    store.fail("load", error)
    with pytest.raises(type(error)):
        load(store, [1])
    store.heal()
    assert_loads(store, [1])


def test_an_injected_verdict_costs_only_its_key(store: FaultInjectingStore) -> None:
    store.answer("load", key_of(2), CORRUPT)
    statuses, memory = load(store, [1, 2, 3])
    assert statuses == [DONE, CORRUPT, DONE]
    assert memory[1].is_untouched


def test_an_injected_dump_verdict_stores_nothing(store: FaultInjectingStore) -> None:
    store.answer("dump", key_of(4), FAILED)
    assert store.dump(outgoing([4, 5])) == [FAILED, DONE]
    assert store.lookup([key_of(4), key_of(5)]) == [False, True]


def test_an_injected_lookup_answer_can_be_a_lie(store: FaultInjectingStore) -> None:
    store.answer("lookup", key_of(9), DONE)
    assert store.lookup([key_of(1), key_of(9), key_of(8)]) == [True, True, False]


def test_a_held_call_waits_for_its_event(store: FaultInjectingStore) -> None:
    event = threading.Event()
    store.hold("lookup", event)
    with ThreadPoolExecutor(1) as caller:
        answer = caller.submit(store.lookup, [key_of(1)])
        assert wait([answer], timeout=0.05).not_done
        event.set()
        assert answer.result(timeout=30) == [True]
