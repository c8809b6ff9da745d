# SPDX-License-Identifier: MIT
"""A long lookup asks for what is not known, and for a few of those that are."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest

from ucm.store.posix import known
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.known import SPOT_CHECKS, KnownKeys
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import block_path, hanging_call
from ucm.testing.store_conformance import MISSING, SPEC, key_of, load, outgoing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.store import BlockKey
    from ucm.store.posix.blocks import Verdict

MANY = 100
KEYS = [key_of(n) for n in range(MANY)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    store = PosixStore(SPEC, PosixStoreConfig((str(tmp_path),)))
    yield store
    store.close()


@pytest.fixture
def looks(store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that storage is asked for."""
    asked: list[bytes] = []
    look, look_now = store.files.look, store.files.look_now

    def record(key: BlockKey) -> Verdict:
        asked.append(key)
        return look(key)

    def record_now(key: BlockKey) -> Verdict | None:
        asked.append(key)
        return look_now(key)

    monkeypatch.setattr(store.files, "look", record)
    monkeypatch.setattr(store.files, "look_now", record_now)
    return asked


def remove(storage: Path, number: int) -> None:
    block_path(storage, SPEC, key_of(number)).unlink()


@pytest.mark.parametrize("learn", ["dump", "lookup"])
def test_known_blocks_are_asked_for_by_sample(store: PosixStore, looks: list[bytes], learn: str) -> None:
    store.dump(outgoing(list(range(MANY))))
    if learn == "lookup":
        store.known.clear()
        assert store.lookup(KEYS) == [True] * MANY
    looks.clear()
    assert store.lookup(KEYS) == [True] * MANY
    assert len(set(looks)) == SPOT_CHECKS
    assert {KEYS[0], KEYS[-1]} <= set(looks)


def test_unknown_blocks_are_all_asked_for(store: PosixStore, looks: list[bytes]) -> None:
    store.dump(outgoing(list(range(20))))
    looks.clear()
    assert store.lookup(KEYS) == [True] * 20 + [False] * (MANY - 20)
    assert set(KEYS[20:]) <= set(looks)
    assert len(set(looks) & set(KEYS[:20])) < 20


def test_few_blocks_are_always_asked_for(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing(list(range(SPOT_CHECKS))))
    for number in range(SPOT_CHECKS):
        remove(tmp_path, number)
        there = [n > number for n in range(SPOT_CHECKS)]
        assert store.lookup(KEYS[:SPOT_CHECKS]) == there


def test_a_known_block_that_is_gone_ends_the_trust_in_all(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing(list(range(MANY))))
    for number in (3, 50, MANY - 1):  # The last one is always asked for.
        remove(tmp_path, number)
    assert store.lookup(KEYS) == [n not in (3, 50, MANY - 1) for n in range(MANY)]


def test_a_removed_cache_is_seen_at_once(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing(list(range(MANY))))
    shutil.rmtree(tmp_path / SPEC.namespace)
    assert store.lookup(KEYS) == [False] * MANY


def test_a_block_that_does_not_answer_costs_itself_only_and_one_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PosixStore(SPEC, PosixStoreConfig((str(tmp_path),), lookup_timeout_s=2.0))
    store.dump(outgoing(list(range(MANY))))
    with hanging_call("stat", key_of(0).hex()):
        began = time.monotonic()
        assert store.lookup(KEYS) == [False] + [True] * (MANY - 1)
        assert time.monotonic() - began < 15
    assert len(caplog.records) == 1
    assert key_of(50) in store.known
    store.close()


def test_a_block_that_is_gone_when_it_is_loaded_ends_the_trust_in_all(
    store: PosixStore, tmp_path: Path
) -> None:
    store.dump(outgoing(list(range(MANY))))
    for number in (1, 2):  # Not among those that are asked for.
        remove(tmp_path, number)
    assert store.lookup(KEYS) == [True] * MANY
    assert load(store, [1])[0] == [MISSING]
    assert store.lookup(KEYS) == [n not in (1, 2) for n in range(MANY)]


def test_what_was_deleted_or_damaged_is_not_known(store: PosixStore, tmp_path: Path) -> None:
    store.dump(outgoing(list(range(MANY))))
    store.delete([key_of(7)])
    damaged = block_path(tmp_path, SPEC, key_of(8))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    load(store, [8])
    assert store.lookup(KEYS) == [n not in (7, 8) for n in range(MANY)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_GENERATION_KEYS", 10)
    seen = KnownKeys()
    for key in KEYS:
        seen.add([key])
    assert sum(key in seen for key in KEYS) <= 22
    assert KEYS[-1] in seen
    seen.discard(KEYS)
    assert not any(key in seen for key in KEYS)
