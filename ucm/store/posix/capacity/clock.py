# SPDX-License-Identifier: MIT
"""FileClock: the time as a file system stamps it on files, with its jumps remembered for a while."""

from __future__ import annotations

import contextlib
import os
import time

_JUMP_NS = 1_000_000_000


class FileClock:
    """Tells what was written just now, also if the clock has been set meanwhile.

    Args:
        path: A file that may be touched; the clock may be another machine's.
        fresh_s: How long a file counts as written just now.
    """

    def __init__(self, path: str, fresh_s: float) -> None:
        self._path = path
        self._fresh_ns = int(fresh_s * 1e9)
        # How far the clock was ahead of the monotonic one, and when that was last seen.
        self._offsets: dict[int, int] = {}
        self.now_ns = 0
        self.read()

    def read(self) -> int:
        """Look at the clock; return how far it has jumped since the last time, in nanoseconds."""
        with contextlib.suppress(OSError), open(self._path, "ab"):
            pass
        try:
            os.utime(self._path)
            self.now_ns = os.stat(self._path).st_mtime_ns
        except OSError:
            self.now_ns = time.time_ns()
        monotonic_ns = time.monotonic_ns()
        offset = self.now_ns - monotonic_ns
        last = next(reversed(self._offsets), offset)
        jump = offset - last
        if abs(jump) < _JUMP_NS and self._offsets:
            # The same offset, give or take what it takes to look.
            offset, jump = last, 0
        self._offsets.pop(offset, None)
        self._offsets[offset] = monotonic_ns
        for old, seen_ns in list(self._offsets.items()):
            if monotonic_ns - seen_ns > self._fresh_ns:
                del self._offsets[old]
        return jump

    def is_fresh(self, time_ns: int) -> bool:
        """Tell whether something may have been written just now, by any recent setting of the clock."""
        return time_ns > time.monotonic_ns() + min(self._offsets) - self._fresh_ns
