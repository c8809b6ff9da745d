# SPDX-License-Identifier: MIT
"""CapacityService: one thread per process that tells evictors what was used, and sees that there are any."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from ucm.store.posix.capacity.supervisor import EvictorSupervisor
from ucm.store.posix.capacity.uses import UseLog, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.store.options import Capacity
    from ucm.store.posix.capacity.evictor import Run
    from ucm.store.posix.layout import BlockLayout

logger = logging.getLogger(__name__)

THREAD_NAME = "ucm-capacity"
# How often it looks around without being woken, and so does an evictor.
_TICK_S = 10.0
_JOIN_TIMEOUT_S = 2.0
# Told so often, the evictor is never far behind: in parts of the capacity, or bytes where that is unknown.
_NEWS_SHARE = 0.01
_NEWS_BYTES = 1024**3


class CapacityService:
    """Keeps the roots of this process's stores below their capacity.

    What stores tell costs them a few microseconds; everything that touches storage happens in the
    service's one thread and in the evictors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roots: dict[str, EvictorSupervisor] = {}
        self._logs: dict[UseLog, Callable[[int, int], None]] = {}
        self._left: list[UseLog] = []
        self._news_bytes = _NEWS_BYTES
        self._untold_bytes = 0
        self._problem = ""
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def add(
        self,
        layout: BlockLayout,
        namespace: str,
        file_bytes: int,
        capacity: Capacity,
        on_evicted: Callable[[int, int], None],
    ) -> UseLog:
        """Let a store take part; see `SharedCapacity.join`."""
        log = UseLog(layout, namespace, file_bytes, self._written)
        with self._lock:
            for root in layout.roots:
                if root not in self._roots:
                    self._roots[root] = EvictorSupervisor(root, capacity, _TICK_S)
            if capacity.size_bytes:
                self._news_bytes = min(self._news_bytes, 1 + int(capacity.size_bytes * _NEWS_SHARE))
            self._logs[log] = on_evicted
        self._ring()
        return log

    def remove(self, log: UseLog) -> bool:
        """Let a store go, once what it told is published; True if it was the last one."""
        with self._lock:
            if self._logs.pop(log, None):
                self._left.append(log)
            return not self._logs

    def close(self) -> None:
        """End the thread and this process's evictors, within seconds."""
        with self._lock:
            self._closed = True
        self._ring()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _written(self, written_bytes: int) -> None:
        # Two threads at once may lose a count: then the news comes a little later.
        self._untold_bytes += written_bytes
        if self._untold_bytes >= self._news_bytes:
            self._untold_bytes = 0
            self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _serve(self) -> None:
        closed = False
        while not closed:
            self._wait()
            closed = self._closed
            if not closed:
                self._look_after_evictors()
            self._publish()
        for root in self._roots.values():
            root.close()
        with self._lock:
            os.close(self._bell)
            self._bell = -1

    def _wait(self) -> None:
        poller = select.poll()
        for descriptor in (self._bell, *(root.reports for root in self._roots.values())):
            if descriptor is not None:
                poller.register(descriptor, select.POLLIN)
        poller.poll(_TICK_S * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _look_after_evictors(self) -> None:
        with self._lock:
            roots = dict(self._roots)
        for name, root in roots.items():
            for run in root.look_after():
                self._take_in(name, run)

    def _publish(self) -> None:
        with self._lock:
            logs, self._left = [*self._logs, *self._left], []
            roots = dict(self._roots)
        try:
            for root in publish(list(roots), logs):
                roots[root].wake()
                self._problem = ""
        except OSError as exc:
            problem = f"{exc.filename}: {exc.strerror}"
            if problem != self._problem:
                logger.warning("capacity: cannot tell what was used: %s", problem)
            self._problem = problem

    def _take_in(self, root: str, run: Run) -> None:
        """Log and count what an evictor has done."""
        self._roots[root].tell_problem(_problem_of(root, run))
        if not run.blocks:
            return
        logger.info(
            "evicted %d blocks, %.3f GB, from %s in %.1f s; %.3f of %.3f GB are in use",
            sum(run.blocks.values()),
            sum(run.disk_bytes.values()) / 1e9,
            root,
            run.seconds,
            run.left_bytes / 1e9,
            run.limit_bytes / 1e9,
        )
        with self._lock:
            logs = dict(self._logs)
        for log, on_evicted in logs.items():
            if root in log.layout.roots and log.namespace in run.blocks:
                on_evicted(run.blocks[log.namespace], run.disk_bytes[log.namespace])


class SharedCapacity:
    """This process's service: opened with the first store that has a capacity, closed with the last."""

    _lock = threading.Lock()
    _service: CapacityService | None = None

    @classmethod
    def join(
        cls,
        layout: BlockLayout,
        namespace: str,
        file_bytes: int,
        capacity: Capacity,
        on_evicted: Callable[[int, int], None],
    ) -> UseLog:
        """Let a store take part; pair with one `leave`.

        Args:
            layout: The store's.
            namespace: The store's.
            file_bytes: Size of its block files.
            capacity: Of each of its roots; the first store of a root decides.
            on_evicted: Called with how many blocks and bytes of the namespace our evictor has removed.

        Returns:
            Where the store notes what it writes and uses.
        """
        with cls._lock:
            if cls._service is None:
                cls._service = CapacityService()
            return cls._service.add(layout, namespace, file_bytes, capacity, on_evicted)

    @classmethod
    def leave(cls, log: UseLog) -> None:
        """Let a store go; the last one ends the thread and this process's evictors, within seconds."""
        with cls._lock:
            service = cls._service
            if service is None or not service.remove(log):
                return
            cls._service = None
        service.close()


def _problem_of(root: str, run: Run) -> str:
    if run.failed:
        return f"{run.failed} blocks cannot be removed; first {run.problem}"
    if run.problem:
        return f"eviction below {root} has failed; {run.problem}"
    if run.left_bytes > run.limit_bytes:
        return f"blocks below {root} take more than their capacity, but all of them were used just now"
    return ""
