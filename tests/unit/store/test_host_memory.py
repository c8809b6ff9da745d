# SPDX-License-Identifier: MIT
"""Copies arrive whole or are refused, and small work does not hand the GIL over."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ucm.store.host_memory import LEAST_FREE_BYTES, copy
from ucm.store.posix.block_file import payload_checksum

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("size", [0, 1, LEAST_FREE_BYTES - 1, LEAST_FREE_BYTES, 3 * LEAST_FREE_BYTES + 7])
def test_a_copy_is_whole_and_no_longer(size: int) -> None:
    source = bytearray(os.urandom(size))
    target = bytearray(b"." * (size + 100))
    copy(memoryview(target)[50:], memoryview(source))
    assert target == b"." * 50 + source + b"." * 50


@pytest.mark.parametrize("size", [1, LEAST_FREE_BYTES])
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


@pytest.mark.skipif(sys.version_info >= (3, 13) and not sys._is_gil_enabled(), reason="there is no GIL")
@pytest.mark.parametrize(
    "sizes", [[65_536], [786_240], [LEAST_FREE_BYTES - 1], [34_560] * 20, [700_001] * 6], ids=str
)
def test_segments_that_are_not_large_are_hashed_without_handing_the_gil_over(sizes: list[int]) -> None:
    segments = [memoryview(bytearray(size)) for size in sizes]
    assert not hands_the_gil_over(lambda: payload_checksum(segments))


@pytest.mark.skipif(sys.version_info >= (3, 13) and not sys._is_gil_enabled(), reason="there is no GIL")
def test_large_segments_do_not_keep_the_gil() -> None:
    one, other = (memoryview(bytearray(8 * LEAST_FREE_BYTES)) for _ in range(2))
    assert hands_the_gil_over(lambda: payload_checksum([one]))
    assert hands_the_gil_over(lambda: copy(one, other))
