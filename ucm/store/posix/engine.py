# SPDX-License-Identifier: MIT
"""IoEngine: the worker threads that all PosixStores of a process share.

Storage can hang, so no caller waits for it: a batch goes to the workers, and the
caller waits until it is finished or its time is up. What certainly does not have
to wait, the caller does itself: waking a worker takes longer than a small block,
and far longer when another Python thread holds the GIL.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import queue
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ucm.store.errors import StoreUnavailableError
from ucm.store.posix.file_io import Scratch
from ucm.store.posix.lease import CallersLease, HostLease, LeaseRevokedError
from ucm.store.posix.readers import Readers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREAD_NAME_PREFIX = "ucm-io"
_CLOSE_TIMEOUT_S = 2.0
# So much data is worth one more thread from the start.
_BYTES_PER_THREAD = 2 * 1024 * 1024
# What waits for nothing is work for processors; more threads than those only fight for the GIL.
_PROCESSORS = len(os.sched_getaffinity(0))
# Two threads with smaller items than that pass the GIL to each other for longer than they work. Of larger
# ones that depends on the storage (reading tmpfs takes twice as long as a disk's page cache): they are shared
# once one of them has taken so long, or from the start if they are large enough to take longer anywhere.
_LEAST_SHARED_BYTES, _SURELY_SHARED_BYTES = 256 * 1024, 512 * 1024
_LEAST_SHARED_S = 0.00008
# An item that takes no longer has not waited for storage: more workers would not make it faster.
_PROMPT_S = 0.0002
# So long a worker stays at its work while others of the same urgency wait.
_TURN_S = 0.001

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Urgency(enum.IntEnum):
    """The order in which waiting batches get workers."""

    READ = 0  # A request waits for it.
    WRITE = 1


# A batch that takes longer gets more workers. Blocks in the page cache are served by few threads,
# which is fastest under the GIL; slow storage gets all of them, and a hung file does not hold up the rest.
# Looking how far a batch is disturbs its worker: no request waits for a backup, so that begins later.
_PATIENCE_S = {Urgency.READ: 0.001, Urgency.WRITE: 0.004}
_PATIENCE_AFTER_THAT_S = 0.001


class Work(Protocol[T_co]):
    """What is done for one item of a batch."""

    def __call__(self, index: int, scratch: Scratch, lease: HostLease, /) -> T_co:
        """Handle item `index`; may raise `LeaseRevokedError` once the caller has gone."""


class _Lane:
    """Items of one batch that are handed out in order, those of one store for instance.

    Attributes:
        batch: What they belong to.
        item_bytes: How much each of them moves.
        todo: Shared by the workers: taking the next item is one step.
        workers: How many are at it; changed by the engine only.
    """

    __slots__ = ("batch", "item_bytes", "todo", "workers")

    def __init__(self, batch: _Batch[Any], items: range, item_bytes: int) -> None:
        self.batch = batch
        self.item_bytes = item_bytes
        self.todo = deque(items)
        self.workers = 0

    def take(self) -> int | None:
        """Return the next item; None if there is none."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None


class _Batch(Generic[T]):
    """Items handed out to any number of workers, and one caller waiting for all of them.

    Args:
        parts: What the work is called with, a lane each, and how many bytes an item of it moves; the first
            one begins with the first item.
        work: Handles one item.
        urgency: The order among batches.
        lease: Guards the caller's memory.
    """

    def __init__(
        self, parts: Sequence[tuple[range, int]], work: Work[T], urgency: Urgency, lease: HostLease
    ) -> None:
        self.urgency = urgency
        self.lanes = [_Lane(self, items, item_bytes) for items, item_bytes in parts]
        self._work = work
        self._lease = lease
        self._first = parts[0][0].start
        self._unfinished = sum(len(items) for items, _ in parts)
        self._results: list[T | None] = [None] * self._unfinished
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._over = threading.Lock()
        self._over.acquire()

    def run(self, lane: _Lane, scratch: Scratch, should_leave: Callable[[], bool]) -> None:
        """Handle items of a lane until none is left, the caller has gone, or another lane comes first."""
        finished = 0
        error = None
        try:
            while (index := lane.take()) is not None:
                self._results[index - self._first] = self._work(index, scratch, self._lease)
                finished += 1
                if should_leave():
                    break
        except LeaseRevokedError:
            pass
        except Exception as exc:
            # `results` raises it again, in the caller's thread.
            self._hand_out_no_more()
            error = exc
        self._settle(finished, error)

    def help(self, attempt: Work[T | None], scratch: Scratch, lease: CallersLease, deadline: float) -> bool:
        """Handle items in the caller's own thread; False if what is left has to wait for storage."""
        finished = 0
        stuck = False
        for lane in self.lanes:
            while time.monotonic() < deadline and not stuck and (index := lane.take()) is not None:
                result = attempt(index, scratch, lease)
                if result is None:
                    lane.todo.appendleft(index)
                    stuck = True
                else:
                    self._results[index - self._first] = result
                    finished += 1
        self._settle(finished)
        return not stuck

    def handed_out(self) -> int:
        """Return how many items are done, or being done."""
        return len(self._results) - sum(len(lane.todo) for lane in self.lanes)

    def cancel(self) -> None:
        """Send the caller home with what there is."""
        with self._lock:
            self._send_home()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all results are there or the batch was cancelled; False if the time is up before.

        Not to be called again after True.
        """
        return self._over.acquire(timeout=max(0.0, timeout_s))

    def end(self) -> None:
        """Hand nothing out any more, and take the caller's memory back from the workers."""
        self._hand_out_no_more()
        self._lease.revoke()

    def results(self) -> list[T | None]:
        """Return what was finished; None where nothing was."""
        if self._error:
            raise self._error
        return list(self._results)

    def _hand_out_no_more(self) -> None:
        for lane in self.lanes:
            lane.todo.clear()

    def _settle(self, finished: int, error: Exception | None = None) -> None:
        with self._lock:
            self._unfinished -= finished
            self._error = self._error or error
            if not self._unfinished or self._error:
                self._send_home()

    def _send_home(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._over.release()


class _CallerMemory(threading.local):
    """The calling threads' private memory; SGLang has two or three."""

    def __init__(self) -> None:
        self.scratch = Scratch()


_caller = _CallerMemory()


class _CountedCaller:
    """Counts callers that write themselves as writers."""

    __slots__ = ("_at_work", "_lock")

    def __init__(self, at_work: dict[Urgency, int], lock: threading.Lock) -> None:
        self._at_work = at_work
        self._lock = lock

    def __enter__(self) -> None:
        with self._lock:
            self._at_work[Urgency.WRITE] += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._at_work[Urgency.WRITE] -= 1


class IoEngine:
    """A bounded set of daemon threads working off batches, the urgent ones first.

    Threads start when there is work for them and sleep when there is none. A
    worker stuck in storage is lost until storage answers; batches then have the
    others, and fail at their deadlines when there are no others.

    Who waits for whom:

    - Workers go where the fewest workers are, again and again: large blocks do not hold up
      small ones, nor a slow store the others of its batch.
    - Writes get half of the workers, and one while somebody reads, a caller that writes itself
      included: storage that takes no writes still answers reads, and a backup leaves
      the processors to a prefetch.
    - Reads come first, but leave one worker to the writes.
    - A caller does not wait for workers all of which storage has kept for longer than
      that already: a file system that hangs costs few calls their deadlines, not all.
    """

    def __init__(self, threads: int) -> None:
        self._limit = threads
        self._lock = threading.Lock()
        self._queues: tuple[list[_Lane], ...] = tuple([] for _ in Urgency)
        self._at_work = dict.fromkeys(Urgency, 0)
        # When each worker began with its present item.
        self._begun: dict[Urgency, dict[int, float]] = {urgency: {} for urgency in Urgency}
        self._readers = Readers()
        self._give_way = {Urgency.READ: None, Urgency.WRITE: self._readers.give_way}
        self._callers_part: dict[Urgency, contextlib.AbstractContextManager[None]] = {
            Urgency.READ: contextlib.nullcontext(),
            Urgency.WRITE: _CountedCaller(self._at_work, self._lock),
        }
        self._callers_own = {urgency: CallersLease(self._give_way[urgency]) for urgency in Urgency}
        # One entry wakes one worker. Cheaper than a condition, and a batch may be gone when the worker looks.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting: set[_Batch[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def run(
        self,
        work: Work[T],
        count: int,
        *,
        urgency: Urgency,
        timeout_s: float,
        moved_bytes: int = 0,
        attempt: Work[T | None] | None = None,
        parts: Sequence[tuple[int, int]] = (),
    ) -> list[T | None]:
        """Do `work` for every index below `count`.

        Args:
            work: Called in worker threads, for several items at once.
            count: Number of items.
            urgency: Which batches come first.
            timeout_s: From now until this call returns, finished or not.
            moved_bytes: How much the batch moves: decides how many threads begin. More
                workers join a batch that takes long.
            attempt: Called in this thread first, beside some workers if there is much to
                do. Never waits for storage; None leaves this item and those after it
                to the workers: they hardly are any better.
            parts: How many items in a row belong together, and how many bytes each of them moves;
                those with the largest come first. No part waits for another one.

        Returns:
            One result per item, in order; None for an item not finished in time. No
            worker holds or gets the lease after that.

        Raises:
            StoreUnavailableError: The engine is closed, or cannot start its first thread.
            Exception: Whatever `work` raised first.
        """
        if not count:
            return []
        deadline = time.monotonic() + timeout_s
        if urgency is Urgency.WRITE:
            work = self._giving_way(work)
            attempt = None if attempt is None else self._giving_way(attempt)
            return self._run(work, count, urgency, deadline, moved_bytes, attempt, parts)
        self._readers.enter()
        try:
            return self._run(work, count, urgency, deadline, moved_bytes, attempt, parts)
        finally:
            self._readers.leave()
            if not self._readers and self._queues[Urgency.WRITE]:
                self._call(self._most(Urgency.WRITE))

    def _run(
        self,
        work: Work[T],
        count: int,
        urgency: Urgency,
        deadline: float,
        moved_bytes: int,
        attempt: Work[T | None] | None,
        parts: Sequence[tuple[int, int]],
    ) -> list[T | None]:
        parts = parts or [(count, moved_bytes // count)]
        largest = parts[0][1]
        threads = min(count, 1 + moved_bytes // _BYTES_PER_THREAD)
        is_shared = attempt is not None and largest >= _LEAST_SHARED_BYTES
        helpers = min(threads, _PROCESSORS) - 1 if is_shared else 0
        results: list[T | None] = []
        if attempt is not None and (not helpers or largest < _SURELY_SHARED_BYTES):
            with self._callers_part[urgency]:
                results += self._attempt(attempt, count, urgency, deadline, may_be_shared=helpers > 0)
            if len(results) == count:
                return results
        batch = _Batch(_left(parts, len(results)), work, urgency, HostLease(self._give_way[urgency]))
        try:
            if attempt is not None and helpers:
                self._submit(batch, helpers, _LEAST_SHARED_BYTES)
                with self._callers_part[urgency]:
                    done = batch.help(attempt, _caller.scratch, self._callers_own[urgency], deadline)
                if done:
                    threads = helpers
                else:
                    self._queue(batch)
                    self._call(threads - helpers)
            else:
                self._submit(batch, threads)
            if self._nobody_comes(urgency, deadline - time.monotonic()):
                deadline = time.monotonic()
            since = time.monotonic()
            patience = _PATIENCE_S[urgency]
            while not batch.wait(min(patience, deadline - time.monotonic())):
                patience = _PATIENCE_AFTER_THAT_S
                if threads >= min(count, self._limit) or time.monotonic() >= deadline:
                    batch.wait(deadline - time.monotonic())
                    break
                if (time.monotonic() - since) * threads > batch.handed_out() * _PROMPT_S:
                    self._call(threads)
                    threads *= 2
        finally:
            batch.end()
            with self._lock:
                self._waiting.discard(batch)
                lanes = self._queues[urgency]
                lanes[:] = [lane for lane in lanes if lane.batch is not batch]
            batch.lanes.clear()  # They refer to each other: it would be kept until the next collection.
        return results + batch.results()

    def _attempt(
        self, work: Work[T | None], count: int, urgency: Urgency, deadline: float, *, may_be_shared: bool
    ) -> list[T]:
        """Return the results of the items before the first one that has to wait.

        If they may be shared with workers, no more than those up to the first that takes long enough.
        """
        scratch, lease = _caller.scratch, self._callers_own[urgency]
        results: list[T] = []
        now = time.monotonic()
        for index in range(count):
            result, begun = work(index, scratch, lease), now
            now = time.monotonic()
            if result is None:
                break
            results.append(result)
            if now > deadline:
                break
            if may_be_shared and now - begun > _LEAST_SHARED_S:
                break
        return results

    def _giving_way(self, work: Work[T]) -> Work[T]:
        """Let those who read go first after each item, too."""

        def work_and_rest(index: int, scratch: Scratch, lease: HostLease) -> T:
            result = work(index, scratch, lease)
            self._readers.give_way()
            return result

        return work_and_rest

    def grow(self, threads: int) -> None:
        """Allow at least so many threads."""
        with self._lock:
            self._limit = max(self._limit, threads)

    def close(self) -> None:
        """Cancel all batches and end the threads; one stuck in storage ends when it comes back."""
        with self._lock:
            self._closed = True
            for batch in self._waiting:
                batch.cancel()
            for _ in self._threads:
                self._wakes.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _submit(self, batch: _Batch[Any], workers: int, least_bytes: int = 0) -> None:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("the store is closed")
            self._waiting.add(batch)
        self._queue(batch, least_bytes)
        self._call(workers)

    def _queue(self, batch: _Batch[Any], least_bytes: int = 0) -> None:
        """Let workers find a batch's lanes with items of that size or larger.

        Once more if its caller puts something back: they drop empty lanes.
        """
        with self._lock:
            lanes = self._queues[batch.urgency]
            lanes += [lane for lane in batch.lanes if lane.item_bytes >= least_bytes and lane not in lanes]

    def _call(self, workers: int) -> None:
        """Wake or start workers, as far as there are any."""
        with self._lock:
            if self._closed:
                return
            woken = min(workers, self._idle)
            # Whoever is woken counts as busy from here on, not from when it gets to run.
            self._idle -= woken
            for _ in range(woken):
                self._wakes.put(None)
            for _ in range(min(workers - woken, self._limit - len(self._threads))):
                self._start_thread()

    def _start_thread(self) -> None:
        name = f"{THREAD_NAME_PREFIX}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # A limit on threads, or the interpreter is shutting down.
            if not self._threads:
                raise StoreUnavailableError(f"cannot start an I/O thread: {exc}") from exc
        else:
            self._threads.append(thread)

    def _serve(self) -> None:
        _name_kernel_thread(threading.current_thread().name)
        scratch = Scratch()
        while (lane := self._next_lane()) is not None:
            lane.batch.run(lane, scratch, partial(self._should_leave, lane.batch, time.monotonic()))
            self._leave(lane)
            del lane  # While this thread sleeps it keeps no memory of a caller alive.

    def _next_lane(self) -> _Lane | None:
        """Enter a lane, once there is any; None if the engine is closed."""
        while True:
            with self._lock:
                if self._closed:
                    return None
                for urgency, lanes in zip(Urgency, self._queues, strict=True):
                    lanes[:] = [lane for lane in lanes if lane.todo]
                    if lanes and self._at_work[urgency] < self._most(urgency):
                        lane = min(lanes, key=_workers)
                        lane.workers += 1
                        self._at_work[urgency] += 1
                        self._begun[urgency][threading.get_ident()] = time.monotonic()
                        return lane
                self._idle += 1
            self._wakes.get()

    def _leave(self, lane: _Lane) -> None:
        with self._lock:
            lane.workers -= 1
            self._at_work[lane.batch.urgency] -= 1
            del self._begun[lane.batch.urgency][threading.get_ident()]
            # Among equals it is the others' turn. Within a batch the order is the caller's.
            self._queues[lane.batch.urgency].sort(key=lambda other: other.batch is lane.batch)

    def _most(self, urgency: Urgency) -> int:
        """Return how many workers there may be at this kind of work now."""
        return 1 if urgency is Urgency.WRITE and self._readers else self._share(urgency)

    def _share(self, urgency: Urgency) -> int:
        """Return how many workers there may be at this kind of work at all."""
        return max(1, self._limit - 1 if urgency is Urgency.READ else self._limit // 2)

    def _nobody_comes(self, urgency: Urgency, within_s: float) -> bool:
        """Tell whether all workers there may be have been at one item for longer than a caller would wait."""
        long_ago = time.monotonic() - within_s
        with self._lock:
            same = self._begun[urgency]
            every = {**self._begun[Urgency.READ], **self._begun[Urgency.WRITE]}
            for begun, most in ((every, self._limit), (same, self._share(urgency))):
                if len(begun) >= most and max(begun.values()) < long_ago:
                    return True
        return False

    def _should_leave(self, batch: _Batch[Any], since: float) -> bool:
        """Tell whether a worker that is at a batch since then makes room for another one."""
        urgency, reads = batch.urgency, self._queues[Urgency.READ]
        self._begun[urgency][threading.get_ident()] = time.monotonic()
        if urgency is Urgency.WRITE and (reads or self._at_work[urgency] > self._most(urgency)):
            return True
        others_wait = any(lane.batch is not batch for lane in tuple(self._queues[urgency]))
        return others_wait and time.monotonic() - since > _TURN_S


def _workers(lane: _Lane) -> int:
    return lane.workers


def _left(parts: Sequence[tuple[int, int]], first: int) -> list[tuple[range, int]]:
    """Return the indices of each part instead of their number, without those below `first`."""
    ends = itertools.accumulate(count for count, _ in parts)
    left = [
        (range(max(end - count, first), end), size) for (count, size), end in zip(parts, ends, strict=True)
    ]
    return [(items, size) for items, size in left if items]


def _name_kernel_thread(name: str) -> None:
    """Show the current thread under its name in `top -H`, as Python itself does from 3.14 on."""
    with contextlib.suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name, encoding="ascii")


class SharedEngine:
    """The one engine of this process: opened with its first user, closed with its last."""

    _lock = threading.Lock()
    _engine: IoEngine | None = None
    _users = 0

    @classmethod
    def acquire(cls, threads: int) -> IoEngine:
        """Return the engine with room for at least `threads`; pair with one `release`."""
        with cls._lock:
            if cls._engine is None:
                cls._engine = IoEngine(threads)
            cls._engine.grow(threads)
            cls._users += 1
            return cls._engine

    @classmethod
    def release(cls) -> None:
        """Give the engine back; the last one ends its threads, within two seconds."""
        with cls._lock:
            cls._users -= 1
            if cls._users:
                return
            engine, cls._engine = cls._engine, None
        if engine is not None:
            engine.close()


def run_alone(work: Callable[[], object], timeout_s: float) -> bool:
    """Do something that may wait for storage in a worker; False if it takes longer than `timeout_s`.

    Raises:
        StoreUnavailableError: There is no worker to be had.
        Exception: Whatever `work` raised.
    """
    engine = SharedEngine.acquire(1)

    def item(_index: int, _scratch: Scratch, _lease: HostLease) -> bool:
        work()
        return True

    try:
        return engine.run(item, 1, urgency=Urgency.WRITE, timeout_s=timeout_s) == [True]
    finally:
        SharedEngine.release()
