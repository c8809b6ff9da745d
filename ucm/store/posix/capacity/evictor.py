# SPDX-License-Identifier: MIT
"""Evictor: removes the blocks of a storage root that were not used for longest, whatever pool they belong to.

Ages are whole minutes, and whole minutes are removed: the blocks of a page, of all pools and ranks, are
written and used within moments, so that they go together, and with them what cannot be restored without
them. Only a minute that holds more than a run may remove is taken in part, the oldest blocks first.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucm.store.posix.capacity.clock import FileClock
from ucm.store.posix.capacity.index import DISK_BLOCK_BYTES, BlockIndex, Record, block_path
from ucm.store.posix.capacity.uses import DIRECTORY, MINUTE_NS, collect
from ucm.store.posix.layout import TEMP_DIRECTORY
from ucm.store.posix.tree import block_entries, shards
from ucm.store.posix.writer import remove_orphans

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.store.interface import BlockKey
    from ucm.store.options import Capacity

_LOW_SHARE = 0.95
"""A run ends below this part of the capacity, at the end of a minute ..."""
_FLOOR_SHARE = 0.90
"""... or below this one, in the middle of it."""
_FREE_SHARE = 0.01
"""So much of the file system is kept free, whatever the capacity is."""
_FRESH_S = 60.0
# A scan finds what nobody told: blocks of processes that died or have no capacity, and removals.
_SCAN_INTERVAL_S = 1800.0
_SCAN_SHARE = 1 / 200
# Between pieces of work the storage is left to others for as long as a piece took.
_PIECE_S = 0.02


@dataclass(slots=True)
class Run:
    """What one run of evictions has done, in plain values.

    Args:
        blocks: How many blocks of each namespace it removed.
        disk_bytes: What these took.
        failed: How many blocks cannot be removed.
        problem: The first of them and why, or why nothing could be done at all.
        left_bytes: What all blocks take now.
        limit_bytes: What they may take.
        seconds: How long it took.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    disk_bytes: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    problem: str = ""
    left_bytes: int = 0
    limit_bytes: int = 0
    seconds: float = 0.0


class Evictor:
    """One storage root's evictor; there must be no other meanwhile.

    Args:
        root: The storage root.
        capacity: What its blocks may take.
        check: Called between pieces of work; may raise to end it.
    """

    def __init__(self, root: str, capacity: Capacity, check: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._capacity = capacity
        self._check = check
        os.makedirs(f"{root}/{DIRECTORY}/{TEMP_DIRECTORY}", exist_ok=True)
        self._clock = FileClock(f"{root}/{DIRECTORY}/clock", _FRESH_S)
        self._index = BlockIndex()
        # Blocks that cannot be removed: they take space, but trying again and again would not help.
        self._stuck_bytes = 0
        self._scanned: set[tuple[str, BlockKey]] = set()
        self._scanned_root = (0, 0)
        self._next_scan_s = 0.0
        self._piece_began_s = time.monotonic()

    @property
    def disk_bytes(self) -> int:
        """What all blocks take."""
        return self._index.disk_bytes + self._stuck_bytes

    def limit_bytes(self) -> int:
        """Return what the blocks may take now: the capacity, or less on a file system that is all but full.

        Raises:
            OSError: The file system does not tell.
        """
        found = os.statvfs(self._root)
        size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        if not size:  # Some file systems do not know.
            return self._capacity.size_bytes or self.disk_bytes
        room = self.disk_bytes + free - int(size * _FREE_SHARE)
        return max(0, min(self._capacity.of(size), room))

    def step(self) -> Run | None:
        """Learn what happened, and evict if there is too much; None if there was no need.

        Raises:
            OSError: The root cannot be used.
        """
        jumped = abs(self._clock.read()) > MINUTE_NS
        found = os.stat(self._root)
        # Something else may have been mounted or renamed there.
        replaced = (found.st_dev, found.st_ino) != self._scanned_root
        if jumped or replaced or time.monotonic() >= self._next_scan_s:
            self._scanned_root = found.st_dev, found.st_ino
            self._learn()
            self._scan()
        self._learn()
        limit = self.limit_bytes()
        return self._evict(limit) if self.disk_bytes > limit else None

    def _learn(self) -> None:
        """Take over what the processes have told."""
        minute = self._clock.now_ns // MINUTE_NS
        for uses in collect(self._root):
            for namespace, written in uses.written.items():
                size = -(-written.file_bytes // 4096) * 4096
                for key in written.keys:
                    if (namespace, key) in self._scanned:
                        self._scanned.discard((namespace, key))
                    else:
                        self._index.add(minute, Record(namespace, key, size))
            for until_ns, together in uses.used.items():
                for namespace, keys in together.items():
                    for key in keys:
                        self._breathe()
                        _use(block_path(self._root, Record(namespace, key, 0)), until_ns)

    def _scan(self) -> None:
        """Index what is there."""
        began_s = time.monotonic()
        # Who wrote these may tell of them after the scan.
        recent_ns = self._clock.now_ns - 2 * MINUTE_NS
        future_ns = self._clock.now_ns + 2 * MINUTE_NS
        index, scanned = BlockIndex(), set()
        namespaces = set()
        for shard in shards(self._root):
            namespaces.add(shard.namespace)
            for entry in block_entries(shard):
                used_ns = entry.found.st_mtime_ns
                if used_ns > future_ns:
                    # From a clock that was ahead; left so, it would outlive everything.
                    used_ns = self._clock.now_ns
                    with contextlib.suppress(OSError):
                        os.utime(entry.path, ns=(used_ns, used_ns))
                if used_ns > recent_ns:
                    scanned.add((shard.namespace, entry.key))
                size = entry.found.st_blocks * DISK_BLOCK_BYTES
                index.add(used_ns // MINUTE_NS, Record(shard.namespace, entry.key, size))
            self._breathe()
        for namespace in (*namespaces, DIRECTORY):
            with contextlib.suppress(OSError):
                remove_orphans(f"{self._root}/{namespace}/{TEMP_DIRECTORY}")
        self._index, self._scanned, self._stuck_bytes = index, scanned, 0
        ended_s = time.monotonic()
        self._next_scan_s = ended_s + max(_SCAN_INTERVAL_S, (ended_s - began_s) / _SCAN_SHARE)

    def _evict(self, limit: int) -> Run:
        low, floor = int(limit * _LOW_SHARE), int(limit * _FLOOR_SHARE)
        began_s = time.monotonic()
        run = Run(limit_bytes=limit)
        for minute in self._index.minutes():
            if self.disk_bytes <= low or self._clock.is_fresh(minute * MINUTE_NS):
                break
            self._evict_minute(minute, floor, run)
        run.left_bytes, run.seconds = self.disk_bytes, time.monotonic() - began_s
        return run

    def _evict_minute(self, minute: int, floor: int, run: Run) -> None:
        aged: list[tuple[int, Record]] = []
        for record in self._index.take(minute):
            self._breathe()
            try:
                found = os.lstat(block_path(self._root, record))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                self._fail(record, exc, run)
                continue
            record = record._replace(disk_bytes=found.st_blocks * DISK_BLOCK_BYTES)
            if found.st_mtime_ns // MINUTE_NS > minute:
                self._index.add(found.st_mtime_ns // MINUTE_NS, record)
            else:
                aged.append((found.st_mtime_ns, record))
        left_bytes = self.disk_bytes + sum(record.disk_bytes for _, record in aged)
        aged.sort()
        for used_ns, record in aged:
            if left_bytes <= floor or self._clock.is_fresh(used_ns):
                self._index.add(minute, record)
                continue
            self._breathe()
            left_bytes -= self._remove(record, run)

    def _remove(self, record: Record, run: Run) -> int:
        """Remove a block; return how much that has freed."""
        try:
            os.unlink(block_path(self._root, record))
        except FileNotFoundError:
            return record.disk_bytes
        except OSError as exc:
            self._fail(record, exc, run)
            return 0
        _count(run.blocks, record.namespace, 1)
        _count(run.disk_bytes, record.namespace, record.disk_bytes)
        return record.disk_bytes

    def _fail(self, record: Record, error: OSError, run: Run) -> None:
        run.failed += 1
        run.problem = run.problem or f"{block_path(self._root, record)}: {error.strerror}"
        self._stuck_bytes += record.disk_bytes

    def _breathe(self) -> None:
        """Leave the storage to others now and then."""
        worked_s = time.monotonic() - self._piece_began_s
        if worked_s > _PIECE_S:
            self._check()
            time.sleep(min(worked_s, 1.0))
            self._piece_began_s = time.monotonic()


def _count(counts: dict[str, int], namespace: str, amount: int) -> None:
    counts[namespace] = counts.get(namespace, 0) + amount


def _use(path: str, until_ns: int) -> None:
    """Move a block's last use to `until_ns`, unless it is later or the block is gone."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mtime_ns < until_ns:
            os.utime(path, ns=(until_ns, until_ns))
