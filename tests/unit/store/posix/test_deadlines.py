# SPDX-License-Identifier: MIT
"""Every operation of a PosixStore on a file system that has stopped: a real one, in the kernel."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from ucm.store import StoreUnavailableError
from ucm.store.factory import StoreConfig, claim_identity, open_store
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.engine import THREAD_NAME_PREFIX
from ucm.store.posix.store import PosixStore
from ucm.testing.fuse_mount import FaultyMount, faulty_mount
from ucm.testing.store_conformance import (
    DONE,
    FAILED,
    SPEC,
    GuardedBlock,
    assert_loads,
    incoming,
    key_of,
    outgoing,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE_S = 1.0
# What a busy machine may add. Ending the threads of an engine takes two seconds at most.
SLACK_S = 5.0
CLOSE_S = 2.0
# A second, and what a busy machine may add.
RECOVERY_S = 1.0 + SLACK_S


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    with faulty_mount(tmp_path / "mount") as mount:
        yield mount


def config(mount: FaultyMount) -> PosixStoreConfig:
    return PosixStoreConfig(
        (str(mount.path / "kv"),),
        load_timeout_s=DEADLINE_S,
        dump_timeout_s=DEADLINE_S,
        lookup_timeout_s=DEADLINE_S,
    )


@pytest.fixture
def store(mount: FaultyMount) -> Iterator[PosixStore]:
    store = PosixStore(SPEC, config(mount))
    soon(lambda: store.dump(outgoing([1, 2])) == [DONE, DONE])
    yield store
    mount.resume()
    store.close()


def soon(condition: Callable[[], bool]) -> None:
    """Wait for storage that works to be used again: its workers, and its server, need a moment."""
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline


def test_storage_that_hangs_costs_few_calls_their_deadline(mount: FaultyMount, store: PosixStore) -> None:
    mount.stop()
    many = [key_of(number) for number in range(100, 120)]
    assert store.lookup(many) == [False] * 20
    since = time.monotonic()
    for _ in range(50):
        assert store.lookup(many) == [False] * 20
        assert store.load([guarded.block for guarded in incoming([3, 4])]) == [FAILED, FAILED]
    assert time.monotonic() - since < 2 * DEADLINE_S + SLACK_S
    mount.resume()
    soon(lambda: store.lookup([key_of(1)]) == [True])
    soon(lambda: store.dump(outgoing([5])) == [DONE])
    assert_loads(store, [1, 2, 5])


def scan(store: PosixStore) -> None:
    with pytest.raises(StoreUnavailableError, match=r"no answer within 1 s"):
        list(store.scan())


@pytest.mark.parametrize(
    ("operation", "answer"),
    [
        (lambda store: store.lookup([key_of(1), key_of(2)]), [False, False]),
        (lambda store: store.load([guarded.block for guarded in incoming([1, 2])]), [FAILED, FAILED]),
        (lambda store: store.dump(outgoing([3, 4])), [FAILED, FAILED]),
        (lambda store: store.delete([key_of(1)]), [False]),
        (scan, None),
    ],
    ids=["lookup", "load", "dump", "delete", "scan"],
)
def test_an_operation_returns_at_its_deadline_and_works_again_when_storage_does(
    store: PosixStore, mount: FaultyMount, operation: Callable[[PosixStore], object], answer: object
) -> None:
    mount.stop()
    start = time.monotonic()
    assert operation(store) == answer
    assert DEADLINE_S <= time.monotonic() - start < DEADLINE_S + SLACK_S

    mount.resume()
    soon(lambda: store.dump(outgoing([5])) == [DONE])
    assert_loads(store, [2, 5])
    assert key_of(2) in list(store.scan())


def test_a_read_that_the_kernel_finishes_after_the_deadline_changes_no_page(
    store: PosixStore, mount: FaultyMount
) -> None:
    memory = incoming([1, 2])
    mount.hang("read")
    assert store.load([guarded.block for guarded in memory]) == [FAILED, FAILED]
    for guarded in memory:
        for segment in guarded.block.segments:
            segment[:] = bytes(len(segment))  # The page has a new owner.
    mount.heal()
    store.close()  # Waits for the workers, which go on now.
    for guarded in memory:
        assert not any(guarded.payload)
        guarded.assert_guards_intact()


@pytest.mark.parametrize("call", ["create", "write", "flush", "rename2"])
def test_a_write_that_the_kernel_finishes_after_the_deadline_is_never_a_wrong_block(
    store: PosixStore, mount: FaultyMount, call: str
) -> None:
    memory = GuardedBlock(SPEC, key_of(3), payload_of(3))
    mount.hang(call)
    mount.hang("rename")
    assert store.dump([memory.block]) == [FAILED]
    for segment in memory.block.segments:
        segment[:] = bytes(len(segment))  # The page has a new owner.
    mount.heal()
    store.close()
    again = PosixStore(SPEC, config(mount))
    # A rename that was under way already may still happen: of a block that was whole by then.
    if again.lookup([key_of(3)]) == [True]:
        assert call == "rename2"
        assert_loads(again, [3])
    assert list((mount.path / "kv").glob("**/.tmp/*")) == []
    again.close()


@pytest.mark.parametrize(
    "opening",
    [
        lambda settings: open_store(SPEC, settings),
        lambda settings: claim_identity(settings, "pool", {"dtype": "bfloat16"}),
    ],
    ids=["store", "identity record"],
)
def test_opening_gives_up_at_its_deadline(
    mount: FaultyMount, opening: Callable[[StoreConfig], object]
) -> None:
    mount.stop()
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="no answer within 1 s"):
        opening(StoreConfig("UcmPosixStore", config(mount)))
    assert time.monotonic() - start < DEADLINE_S + CLOSE_S + SLACK_S
    mount.resume()


def test_closing_is_bounded_and_the_stuck_threads_end_when_storage_answers(
    store: PosixStore, mount: FaultyMount
) -> None:
    mount.stop()
    store.load([guarded.block for guarded in incoming([1, 2])])
    stuck = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME_PREFIX)]
    assert stuck
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < CLOSE_S + SLACK_S
    mount.resume()
    for thread in stuck:
        thread.join(timeout=30)
        assert not thread.is_alive()
