# SPDX-License-Identifier: MIT
"""StoreCounters: one store's statistics, counted batch by batch from any thread."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from ucm.store.interface import BlockStatus, StoreStats

if TYPE_CHECKING:
    from collections.abc import Sequence


class StoreCounters:
    """Collects `StoreStats`."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._stats = StoreStats()
        self._lock = threading.Lock()

    def looked_up(self, found: Sequence[bool]) -> None:
        """Count one lookup's answers."""
        hits = sum(found)
        with self._lock:
            self._stats.lookup_hit += hits
            self._stats.lookup_missing += len(found) - hits

    def loaded(self, statuses: Sequence[BlockStatus], unverified: int = 0) -> None:
        """Count one load's verdicts; `unverified` of those that are done had no checksum."""
        done = statuses.count(BlockStatus.DONE)
        with self._lock:
            self._stats.loaded += done
            self._stats.loaded_unverified += unverified
            self._stats.loaded_bytes += done * self._block_bytes
            if done == len(statuses):  # The usual case.
                return
            self._stats.load_missing += statuses.count(BlockStatus.MISSING)
            self._stats.load_corrupt += statuses.count(BlockStatus.CORRUPT)
            self._stats.load_failed += statuses.count(BlockStatus.FAILED)

    def dumped(self, written: int, failed: int) -> None:
        """Count one dump; blocks that were stored already are neither."""
        with self._lock:
            self._stats.dumped += written
            self._stats.dumped_bytes += written * self._block_bytes
            self._stats.dump_failed += failed

    def missed_deadline(self) -> None:
        """Count a batch that returned without all its verdicts."""
        with self._lock:
            self._stats.deadlines_missed += 1

    def evicted(self, blocks: int, disk_bytes: int) -> None:
        """Count blocks that were evicted."""
        with self._lock:
            self._stats.evicted += blocks
            self._stats.evicted_bytes += disk_bytes

    def snapshot(self) -> StoreStats:
        """Return a copy that no longer changes."""
        with self._lock:
            return dataclasses.replace(self._stats)
