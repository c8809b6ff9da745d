# SPDX-License-Identifier: MIT
"""Copies arrive whole or are refused, and small work does not hand the GIL over."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ucm.store.host_memory import ALWAYS_FREE_BYTES, OFTEN_FREE_BYTES, Gil, copy
from ucm.store.posix.block_file import payload_checksum

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("size", [0, 1, OFTEN_FREE_BYTES - 1, OFTEN_FREE_BYTES, 3 * ALWAYS_FREE_BYTES + 7])
def test_a_copy_is_whole_and_no_longer(size: int) -> None:
    source = bytearray(os.urandom(size))
    target = bytearray(b"." * (size + 100))
    copy(memoryview(target)[50:], memoryview(source))
    assert target == b"." * 50 + source + b"." * 50


@pytest.mark.parametrize("size", [1, OFTEN_FREE_BYTES])
def test_what_does_not_fit_is_refused(size: int) -> None:
    target = memoryview(bytearray(size))
    with pytest.raises(ValueError, match=r"fit|structure"):
        copy(target[1:], memoryview(bytearray(size)))
    assert bytes(target) == bytes(size)


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


@pytest.fixture
def new_gil(monkeypatch: pytest.MonkeyPatch) -> Gil:
    """Let nobody know anything about the GIL yet."""
    found = Gil()
    monkeypatch.setattr("ucm.store.host_memory.gil", found)
    monkeypatch.setattr("ucm.store.posix.block_file.gil", found)
    return found


@pytest.fixture
def gil_comes_back_late(new_gil: Gil, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it have come back late a moment ago, and that not be forgotten during the test."""
    monkeypatch.setattr("ucm.store.host_memory._MEMORY_S", 60)
    new_gil.is_back(OFTEN_FREE_BYTES, time.monotonic() - 1)


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
@pytest.mark.usefixtures("new_gil")
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
def test_beside_a_busy_thread_it_is_learned_at_once_that_the_gil_comes_back_late(
    work: str, new_gil: Gil
) -> None:
    one, other = (memoryview(bytearray(OFTEN_FREE_BYTES)) for _ in range(2))
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    assert new_gil.lets_go(OFTEN_FREE_BYTES)
    busy.start()
    try:
        for _ in range(20):
            payload_checksum([one]) if work == "hash" else copy(one, other)
            if not new_gil.lets_go(OFTEN_FREE_BYTES):
                return
        pytest.fail("it was never noticed")
    finally:
        stop.set()
        busy.join()


def test_a_late_return_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    found, late = Gil(), time.monotonic()
    now = iter([late + 0.01, late + 0.02, late + 0.02, late + 0.2, late + 0.3])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    found.is_back(OFTEN_FREE_BYTES, late)
    assert not found.lets_go(OFTEN_FREE_BYTES)
    assert not found.lets_go(ALWAYS_FREE_BYTES - 1)
    assert found.lets_go(ALWAYS_FREE_BYTES)
    assert not found.lets_go(OFTEN_FREE_BYTES)
    assert found.lets_go(OFTEN_FREE_BYTES)


def test_a_prompt_return_and_long_work_teach_nothing() -> None:
    found = Gil()
    found.is_back(OFTEN_FREE_BYTES, time.monotonic() - 0.0001)
    found.is_back(ALWAYS_FREE_BYTES, time.monotonic() - 1)
    assert found.lets_go(OFTEN_FREE_BYTES)
