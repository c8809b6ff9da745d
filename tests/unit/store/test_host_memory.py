# SPDX-License-Identifier: MIT
"""Copies arrive whole or are refused, and small work does not hand the GIL over."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from xxhash import xxh3_64_intdigest

from ucm.store.host_memory import ALWAYS_FREE_BYTES, OFTEN_FREE_BYTES, Gil, copy
from ucm.store.posix.block_file import payload_checksum

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def new_gil(monkeypatch: pytest.MonkeyPatch) -> Gil:
    """Let nobody know anything about the GIL yet."""
    found = Gil()
    monkeypatch.setattr("ucm.store.host_memory.gil", found)
    monkeypatch.setattr("ucm.store.posix.block_file.gil", found)
    return found


@pytest.fixture
def gil_comes_back_at_once(new_gil: Gil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it never have come back late, whatever the test does."""
    del new_gil
    monkeypatch.setattr("ucm.store.host_memory._LATE_S", 60)


@pytest.fixture
def gil_comes_back_late(new_gil: Gil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it have come back late a moment ago, and that not be forgotten during the test."""
    monkeypatch.setattr("ucm.store.host_memory._MEMORY_S", 60)
    new_gil.is_back(OFTEN_FREE_BYTES, time.monotonic() - 1)


either_way = pytest.mark.parametrize("gil", ["gil_comes_back_at_once", "gil_comes_back_late"])
SIZES = [
    0,
    1,
    65_536,
    65_537,
    OFTEN_FREE_BYTES - 1,
    OFTEN_FREE_BYTES,
    ALWAYS_FREE_BYTES - 1,
    3 * ALWAYS_FREE_BYTES + 7,
]


@either_way
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_whole_and_no_longer(request: pytest.FixtureRequest, gil: str, size: int) -> None:
    request.getfixturevalue(gil)
    source = bytearray(os.urandom(size))
    target = bytearray(b"." * (size + 100))
    copy(memoryview(target)[50:], memoryview(source))
    assert target == b"." * 50 + source + b"." * 50


@either_way
@pytest.mark.parametrize("size", [1, OFTEN_FREE_BYTES, ALWAYS_FREE_BYTES])
def test_what_does_not_fit_is_refused(request: pytest.FixtureRequest, gil: str, size: int) -> None:
    request.getfixturevalue(gil)
    target = memoryview(bytearray(size))
    with pytest.raises(ValueError, match=r"fit|structure"):
        copy(target[1:], memoryview(bytearray(size)))
    assert bytes(target) == bytes(size)


@either_way
@pytest.mark.parametrize(
    "sizes",
    [*([size] for size in SIZES[1:]), [65_536, 1, 2_000_000, 700_001], [3_000_000, 1_048_576, 70_000]],
    ids=str,
)
def test_a_checksum_does_not_depend_on_the_gil(
    request: pytest.FixtureRequest, gil: str, sizes: list[int]
) -> None:
    request.getfixturevalue(gil)
    segments = [memoryview(os.urandom(size)) for size in sizes]
    assert payload_checksum(segments) == xxh3_64_intdigest(b"".join(segments))


def hands_the_gil_over(work: Callable[[], object]) -> bool:
    """Tell whether another thread that waits for the GIL gets it while `work` is done many times.

    Once would not do: it takes that thread longer to wake up than to hash a small segment.
    """
    start, had_it = threading.Lock(), []

    def other() -> None:
        with start:
            had_it.append(True)

    start.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    while not thread.is_alive():
        pass
    time.sleep(0.05)  # It is at the lock by now.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # Nobody has to hand the GIL over who does not want to.
    try:
        start.release()
        waited = time.monotonic() + 0.05
        while time.monotonic() < waited:  # It waits for the GIL by now.
            pass
        assert not had_it
        for _ in range(300):
            work()
            if had_it:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        thread.join()


needs_gil = pytest.mark.skipif(
    sys.version_info >= (3, 13) and not sys._is_gil_enabled(), reason="there is no GIL"
)
SMALL = [[65_536], [OFTEN_FREE_BYTES - 1], [34_560] * 20]
MEDIUM = [[OFTEN_FREE_BYTES], [786_240], [ALWAYS_FREE_BYTES - 1], [700_001] * 6]


@needs_gil
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_small_segments_are_hashed_without_handing_the_gil_over(sizes: list[int]) -> None:
    segments = [memoryview(bytearray(size)) for size in sizes]
    assert not hands_the_gil_over(lambda: payload_checksum(segments))


@needs_gil
@pytest.mark.parametrize("sizes", [*SMALL, *MEDIUM], ids=str)
@pytest.mark.usefixtures("gil_comes_back_late")
def test_nor_are_medium_ones_where_it_comes_back_late(sizes: list[int]) -> None:
    segments = [memoryview(bytearray(size)) for size in sizes]
    assert not hands_the_gil_over(lambda: payload_checksum(segments))
    other = memoryview(bytearray(max(sizes)))
    assert not hands_the_gil_over(lambda: copy(other, segments[0]))


@needs_gil
@pytest.mark.usefixtures("gil_comes_back_at_once")
@pytest.mark.parametrize("size", [OFTEN_FREE_BYTES, 8 * ALWAYS_FREE_BYTES])
def test_other_segments_do_not_keep_the_gil(size: int) -> None:
    one, other = (memoryview(bytearray(size)) for _ in range(2))
    assert hands_the_gil_over(lambda: payload_checksum([one]))
    assert hands_the_gil_over(lambda: copy(one, other))


@needs_gil
@pytest.mark.usefixtures("gil_comes_back_late")
def test_large_segments_do_not_keep_the_gil_even_where_it_comes_back_late() -> None:
    one, other = (memoryview(bytearray(8 * ALWAYS_FREE_BYTES)) for _ in range(2))
    assert hands_the_gil_over(lambda: payload_checksum([one]))
    assert hands_the_gil_over(lambda: copy(one, other))


@needs_gil
@pytest.mark.parametrize("work", ["hash", "copy"])
def test_beside_a_busy_thread_it_is_learned_that_the_gil_comes_back_late(work: str, new_gil: Gil) -> None:
    one, other = (memoryview(bytearray(OFTEN_FREE_BYTES)) for _ in range(2))
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    busy = threading.Thread(target=spin)
    assert new_gil.lets_go(OFTEN_FREE_BYTES)
    busy.start()
    try:
        deadline = time.monotonic() + 30
        while new_gil.lets_go(OFTEN_FREE_BYTES):  # Until that thread has been awake, too.
            assert time.monotonic() < deadline
            payload_checksum([one]) if work == "hash" else copy(one, other)
    finally:
        stop.set()
        busy.join()


def at(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    """Let it be so late by the clock of `host_memory`."""
    monkeypatch.setattr("ucm.store.host_memory.time", SimpleNamespace(monotonic=lambda: now))


def test_a_late_return_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Gil()
    at(monkeypatch, 1000.01)
    found.is_back(OFTEN_FREE_BYTES, since=1000.0)
    for now in (1000.01, 1000.2):
        at(monkeypatch, now)
        assert not found.lets_go(OFTEN_FREE_BYTES)
        assert not found.lets_go(ALWAYS_FREE_BYTES - 1)
        assert found.lets_go(ALWAYS_FREE_BYTES)
    at(monkeypatch, 1000.3)
    assert found.lets_go(OFTEN_FREE_BYTES)


def test_a_prompt_return_and_long_work_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Gil()
    at(monkeypatch, 1000.0)
    found.is_back(OFTEN_FREE_BYTES, since=999.999)
    found.is_back(ALWAYS_FREE_BYTES, since=999.0)
    assert found.lets_go(OFTEN_FREE_BYTES)
