# SPDX-License-Identifier: MIT
"""Wait until what was generated has reached the storage.

SGLang backs up asynchronously, says nothing over HTTP about what is pending, and drops it on `/flush_cache`.
So a validation watches what arrives: the files in a storage directory it can see, or else the server's
counter of backed-up tokens. Without either it can only wait for a fixed time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.validation.client import SGLangClient

PageCounts = Callable[[], Mapping[str, int]]

_POLL_S = 0.1
_COUNTER = re.compile(r"^sglang:backuped_tokens_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class BackupMonitor:
    """Count pages that must arrive, and wait for them.

    Args:
        count: Returns the pages stored so far, by pool; None: nothing can be counted.
        quiet_s: How long nothing more may arrive after the last page; without `count`, the whole wait.
        deadline_s: How long to wait for missing pages before going on without them.
        say: Gets one line if pages are missing at the deadline.
    """

    def __init__(
        self, count: PageCounts | None, *, quiet_s: float, deadline_s: float, say: Callable[[str], None]
    ) -> None:
        self._count = count
        self._quiet_s = quiet_s
        self._deadline_s = deadline_s
        self._say = say
        self._expected_pages = 0
        self._before = dict(count()) if count else {}

    def expect(self, pages: int) -> None:
        """Note that a request just answered leaves this many new pages in its largest pool."""
        self._expected_pages += pages

    def settle(self) -> None:
        """Block until the expected pages have arrived in some pool and no pool grows any more."""
        if self._count is None:
            time.sleep(self._quiet_s)
            return
        deadline = time.monotonic() + self._deadline_s
        seen, changed_at = dict(self._count()), time.monotonic()
        while True:
            arrived = max((pages - self._before.get(pool, 0) for pool, pages in seen.items()), default=0)
            now = time.monotonic()
            if arrived >= self._expected_pages and now - changed_at >= self._quiet_s:
                break
            if now > deadline:
                self._say(
                    f"storage got {arrived} of {self._expected_pages} pages in {self._deadline_s:.0f} s"
                )
                break
            time.sleep(_POLL_S)
            latest = dict(self._count())
            if latest != seen:
                seen, changed_at = latest, time.monotonic()
        self._before, self._expected_pages = seen, 0


def metrics_counts(client: SGLangClient, page_tokens: int) -> PageCounts | None:
    """Count pages by the server's metrics; None on a server without `--enable-metrics`."""

    def count() -> dict[str, int]:
        text = client.metrics() or ""
        return {"tokens": int(sum(float(value) for value in _COUNTER.findall(text)) / page_tokens)}

    return count if client.metrics() is not None else None
