# SPDX-License-Identifier: MIT
"""Readers: who reads now, and the writers that let them go first."""

from __future__ import annotations

import threading
import time

# A writer that has worked for less since its last rest goes on: steps can be short.
_LEAST_WORK_S = 0.0001
# Otherwise it rests twice as long as it has worked, within these bounds.
_LEAST_REST_S, _MOST_REST_S = 0.001, 0.005


class _LastRest(threading.local):
    """When the current thread last came back from a rest, on the monotonic clock."""

    at = 0.0


class Readers:
    """The callers that read at present.

    A writer competes with them for processors, and worse, for the GIL: after each system call it takes
    the GIL from a reader, who has it back tens of microseconds later. A prefetch of small blocks is over
    in less than a millisecond, so a writer has to stop in the midst of a block for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._last_rest = _LastRest()

    def __bool__(self) -> bool:
        """Tell whether there are any."""
        return self._count > 0

    def enter(self) -> None:
        """Count one more."""
        with self._lock:
            self._count += 1

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self._count -= 1

    def give_way(self) -> None:
        """Rest if there are readers; writers call it between any two steps.

        The rest goes on when they have left: after a query comes the prefetch.
        """
        if self._count and (worked := time.monotonic() - self._last_rest.at) > _LEAST_WORK_S:
            time.sleep(min(max(2 * worked, _LEAST_REST_S), _MOST_REST_S))
            self._last_rest.at = time.monotonic()
