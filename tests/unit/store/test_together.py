# SPDX-License-Identifier: MIT
"""Calls of several stores together: one deadline, one batch, and an outcome each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreSpec, StoreUnavailableError
from ucm.store.memory import MemoryStore
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.engine import IoEngine
from ucm.store.posix.store import PosixStore
from ucm.store.together import dump_together, load_together, lookup_together
from ucm.testing.fault_injecting_store import FaultInjectingStore
from ucm.testing.posix_faults import faulty_call, hanging_call
from ucm.testing.store_conformance import DONE, FAILED, MISSING, SPEC, incoming, key_of, outgoing, payload_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPECS = [StoreSpec(f"pool_{n}x1", (1000 + n,), SPEC.identity) for n in range(3)]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[PosixStore]]:
    stores = [PosixStore(spec, PosixStoreConfig((str(tmp_path),))) for spec in SPECS]
    yield stores
    for store in stores:
        store.close()


def test_each_store_gets_its_own_blocks_and_verdicts(stores: list[PosixStore]) -> None:
    wanted = [[1], [1, 2, 3], [2, 3]]
    dumps = [(store, outgoing(numbers, store.spec)) for store, numbers in zip(stores, wanted, strict=True)]
    assert dump_together(dumps) == [[DONE], [DONE] * 3, [DONE] * 2]

    keys = [key_of(n) for n in (1, 2, 3)]
    found = [[True, False, False], [True] * 3, [False, True, True]]
    assert lookup_together([(store, keys) for store in stores]) == found

    memory = [incoming([1, 2, 3], store.spec) for store in stores]
    loads = [(store, [guarded.block for guarded in mine]) for store, mine in zip(stores, memory, strict=True)]
    assert load_together(loads) == [[DONE if there else MISSING for there in one] for one in found]
    for store, mine, there in zip(stores, memory, found, strict=True):
        for number, guarded, is_there in zip((1, 2, 3), mine, there, strict=True):
            assert guarded.payload == payload_of(number, store.spec) if is_there else guarded.is_untouched
    assert [store.stats().loaded for store in stores] == [1, 3, 2]


def test_posix_stores_share_one_batch(stores: list[PosixStore], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    run = IoEngine.run

    def record(engine: IoEngine, work: object, count: int, **options: object) -> object:
        counts.append(count)
        return run(engine, work, count, **options)  # type: ignore[arg-type]  # What it was called with.

    monkeypatch.setattr(IoEngine, "run", record)
    dump_together([(store, outgoing([1, 2], store.spec)) for store in stores])
    assert counts == [6]


def test_nothing_to_do_has_no_outcomes(stores: list[PosixStore]) -> None:
    assert dump_together([]) == []
    assert dump_together([(stores[0], []), (stores[1], [])]) == [[], []]


def test_a_fault_after_the_work_costs_no_other_store(
    stores: list[PosixStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("a fault of our own")

    dump_together([(store, outgoing([1], store.spec)) for store in stores])
    monkeypatch.setattr(stores[1].counters, "loaded", fail)
    blocks = [[incoming([1], store.spec)[0].block] for store in stores]
    first, fault, last = load_together(list(zip(stores, blocks, strict=True)))
    assert [first, last] == [[DONE], [DONE]]
    assert isinstance(fault, RuntimeError)


def test_what_one_store_refuses_costs_no_other(stores: list[PosixStore]) -> None:
    stores[0].close()
    of_another_shape = outgoing([1], SPEC)
    closed, refused, done = dump_together(
        [
            (stores[0], outgoing([1], SPECS[0])),
            (stores[1], of_another_shape),
            (stores[2], outgoing([1], SPECS[2])),
        ]
    )
    assert isinstance(closed, StoreUnavailableError)
    assert isinstance(refused, ValueError)
    assert done == [DONE]


def test_a_fault_of_our_own_in_one_store_costs_no_other(stores: list[PosixStore]) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError

    with faulty_call("open", SPECS[1].namespace, broken):
        outcomes = dump_together([(store, outgoing([1], store.spec)) for store in stores])
    assert outcomes[0] == outcomes[2] == [DONE]
    assert isinstance(outcomes[1], ZeroDivisionError)


def test_stores_of_another_kind_take_part(stores: list[PosixStore]) -> None:
    memory, broken = MemoryStore(SPEC), FaultInjectingStore(MemoryStore(SPEC))
    broken.fail("dump", OSError(5, "Input/output error"))
    first, second, third = dump_together(
        [
            (broken, outgoing([1], SPEC)),
            (stores[0], outgoing([1], SPECS[0])),
            (memory, outgoing([1, 2], SPEC)),
        ]
    )
    assert isinstance(first, OSError)
    assert [second, third] == [[DONE], [DONE] * 2]


def hurried(storage: Path, timeout_s: float) -> list[PosixStore]:
    config = PosixStoreConfig(
        (str(storage),),
        load_timeout_s=timeout_s,
        dump_timeout_s=timeout_s,
        lookup_timeout_s=timeout_s,
    )
    return [PosixStore(spec, config) for spec in SPECS]


@pytest.mark.parametrize("operation", ["lookup", "load", "dump"])
def test_a_hung_file_system_costs_one_deadline_for_all(
    stores: list[PosixStore], tmp_path: Path, operation: str
) -> None:
    dump_together([(store, outgoing([1], store.spec)) for store in stores])
    impatient = hurried(tmp_path, timeout_s=2.0)
    with hanging_call({"lookup": "stat", "load": "open", "dump": "access"}[operation], key_of(1).hex()):
        start = time.monotonic()
        if operation == "lookup":
            keys = [key_of(1)]
            assert lookup_together([(store, keys) for store in impatient]) == [[False]] * 3
        else:
            together = load_together if operation == "load" else dump_together
            blocks = [(store, outgoing([1], store.spec)) for store in impatient]
            if operation == "load":
                blocks = [(store, [incoming([1], store.spec)[0].block]) for store in impatient]
            assert together(blocks) == [[FAILED]] * 3
        assert 2.0 <= time.monotonic() - start < 3.9  # Two of them would be 4.0.
    for store in impatient:
        store.close()


@pytest.mark.parametrize("count", [1, 2])
def test_the_time_may_have_begun_earlier(stores: list[PosixStore], count: int) -> None:
    blocks = [(store, outgoing([1], store.spec)) for store in stores[:count]]
    with hanging_call("access", key_of(1).hex()):
        start = time.monotonic()
        assert dump_together(blocks, since=start - 30.0) == [[FAILED]] * count
        assert time.monotonic() - start < 15
