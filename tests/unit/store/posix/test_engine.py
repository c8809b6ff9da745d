# SPDX-License-Identifier: MIT
"""IoEngine: bounded threads, deadlines, order, and an end."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ucm.store import BlockStatus, StoreSpec, StoreUnavailableError
from ucm.store.host_memory import OFTEN_FREE_BYTES
from ucm.store.posix import engine as engine_module
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.engine import THREAD_NAME_PREFIX, IoEngine, Urgency
from ucm.store.posix.lease import LeaseRevokedError
from ucm.store.posix.store import PosixStore
from ucm.testing.store_conformance import load, outgoing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.store.posix.engine import Work
    from ucm.store.posix.file_io import Scratch
    from ucm.store.posix.lease import HostLease

LONG_S = 60.0
LARGE = 1 << 30  # Worth as many threads as there may be.
# What an item that hangs costs its batch: the others have this time, on a busy machine too.
HURRY_S = 2.0


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    engine = IoEngine(4)
    yield engine
    engine.close()


def living(engine: IoEngine) -> int:
    """Return how many threads an engine has; those of other tests may still be about to end."""
    assert all(thread.name.startswith(THREAD_NAME_PREFIX) for thread in engine._threads)
    return sum(thread.is_alive() for thread in engine._threads)


def square(index: int, _scratch: Scratch, _lease: HostLease) -> int:
    return index * index


def run(engine: IoEngine, work: object, count: int, timeout_s: float = LONG_S) -> list[object]:
    return engine.run(work, count, urgency=Urgency.READ, timeout_s=timeout_s)  # type: ignore[arg-type]


def keep_all_workers(engine: IoEngine, urgency: Urgency, release: threading.Event) -> None:
    """Let all workers there may be at this kind of work be stuck, until released."""

    def stuck(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        release.wait()

    while len(engine._begun[urgency]) < engine._share(urgency):  # A busy machine may need several batches.
        assert engine.run(stuck, 10, urgency=urgency, timeout_s=0.2, moved_bytes=LARGE) == [None] * 10


def test_results_come_in_order_and_once_each(engine: IoEngine) -> None:
    assert run(engine, square, 1000) == [n * n for n in range(1000)]


def test_what_the_caller_can_do_itself_starts_no_thread(engine: IoEngine) -> None:
    results = engine.run(not_to_be_called, 100, urgency=Urgency.READ, timeout_s=LONG_S, attempt=square)
    assert results == [n * n for n in range(100)]
    assert engine._threads == []


def test_what_the_caller_cannot_do_itself_is_done_by_workers(engine: IoEngine) -> None:
    callers = set()

    def attempt(index: int, _scratch: Scratch, _lease: HostLease) -> int | None:
        callers.add(threading.current_thread())
        return None if index % 3 else -index

    for moved_bytes in (0, LARGE):
        results = engine.run(
            square, 100, urgency=Urgency.READ, timeout_s=LONG_S, moved_bytes=moved_bytes, attempt=attempt
        )
        assert [result for n, result in enumerate(results) if n % 3] == [n * n for n in range(100) if n % 3]
        assert {result for n, result in enumerate(results) if not n % 3} <= {
            value for n in range(100) for value in (n * n, -n)
        }
    assert callers == {threading.current_thread()}


def test_small_items_are_not_shared_between_a_caller_and_workers(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROCESSORS", 3)
    monkeypatch.setattr(engine_module, "_PROMPT_S", LONG_S)  # Nobody is called later, however slow this is.
    for item_bytes, least_s, threads in (
        (64 << 10, -1.0, 0),
        (256 << 10, LONG_S, 0),  # They are done too fast.
        (256 << 10, -1.0, 2),
    ):
        monkeypatch.setattr(engine_module, "_LEAST_SHARED_S", least_s)
        results = engine.run(
            square, 100, urgency=Urgency.READ, timeout_s=LONG_S, moved_bytes=100 * item_bytes, attempt=square
        )
        assert results == [n * n for n in range(100)]
        assert len(engine._threads) == threads


@pytest.mark.parametrize(("count", "item_bytes"), [(4, 512 << 10), (2, 2 << 20)])
def test_large_items_are_shared_from_the_start(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch, count: int, item_bytes: int
) -> None:
    monkeypatch.setattr(engine_module, "_PROCESSORS", 2)
    monkeypatch.setattr(engine_module, "_LEAST_SHARED_S", LONG_S)
    both_at_work = threading.Barrier(2)

    def work(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        both_at_work.wait(LONG_S)
        return index

    results = engine.run(
        work,
        count,
        urgency=Urgency.READ,
        timeout_s=LONG_S,
        moved_bytes=count * item_bytes,
        attempt=work,
    )
    assert results == list(range(count))


def test_only_the_large_items_of_a_mixed_batch_are_shared(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROCESSORS", 2)
    monkeypatch.setattr(engine_module, "_LEAST_SHARED_S", LONG_S)
    both_at_work = threading.Barrier(2)
    large = [(2, 2 << 20)]
    small = [(5, 64 << 10), (5, 1 << 10)]

    def work(index: int, _scratch: Scratch, _lease: HostLease) -> threading.Thread:
        if index < 2:
            both_at_work.wait(LONG_S)
        else:
            time.sleep(0.005)  # A worker would have time to come.
        return threading.current_thread()

    threads = engine.run(
        work,
        12,
        urgency=Urgency.READ,
        timeout_s=LONG_S,
        moved_bytes=4 << 20,
        attempt=work,
        parts=large + small,
    )
    assert len(set(threads[:2])) == 2
    assert set(threads[2:]) == {threading.current_thread()}


def test_small_items_that_the_caller_cannot_do_go_to_workers_after_all(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROCESSORS", 2)

    def attempt(index: int, _scratch: Scratch, _lease: HostLease) -> int | None:
        return index if index < 5 else None

    results = engine.run(
        square,
        12,
        urgency=Urgency.READ,
        timeout_s=LONG_S,
        moved_bytes=4 << 20,
        attempt=attempt,
        parts=[(2, 2 << 20), (10, 1 << 10)],
    )
    assert results[5:] == [n * n for n in range(5, 12)]


def test_items_that_wait_get_more_workers(engine: IoEngine) -> None:
    two_wait = threading.Barrier(2)

    def wait(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        two_wait.wait(LONG_S)
        return index

    assert run(engine, wait, 2) == [0, 1]


@pytest.mark.parametrize(("urgency", "first_s"), [(Urgency.READ, 0.001), (Urgency.WRITE, 0.004)])
def test_a_backup_is_looked_at_later_than_a_load_and_then_as_often(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch, urgency: Urgency, first_s: float
) -> None:
    looks: list[float] = []
    wait = engine_module._Batch.wait

    def noted(batch: engine_module._Batch[None], timeout_s: float) -> bool:
        looks.append(timeout_s)
        return wait(batch, timeout_s)

    def work(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        while len(looks) < 3:
            time.sleep(0.001)

    monkeypatch.setattr(engine_module._Batch, "wait", noted)
    engine.run(work, 10, urgency=urgency, timeout_s=LONG_S)
    assert looks[:3] == [first_s, 0.001, 0.001]


def test_items_that_do_not_wait_get_no_more_workers(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROMPT_S", LONG_S)

    def work(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        time.sleep(0.005)

    run(engine, work, 10)
    assert len(engine._threads) == 1


def test_what_the_caller_puts_back_is_found_after_the_workers_saw_nothing_left(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_PROCESSORS", 2)
    done_by_a_worker = threading.Event()

    def work(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        done_by_a_worker.set()
        return index

    def attempt(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        # The caller has one of the two items, a worker the other one.
        assert done_by_a_worker.wait(LONG_S)
        deadline = time.monotonic() + LONG_S
        while engine._queues[Urgency.READ] and time.monotonic() < deadline:
            time.sleep(0.001)

    results = engine.run(work, 2, urgency=Urgency.READ, timeout_s=LONG_S, moved_bytes=LARGE, attempt=attempt)
    assert results == [0, 1]


def test_a_caller_helps_only_until_the_deadline(engine: IoEngine) -> None:
    def slow(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass
        return index

    def leave_undone(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        """A worker may still come before the caller has gone."""

    results = engine.run(leave_undone, 1000, urgency=Urgency.READ, timeout_s=0.1, attempt=slow)
    assert results[0] == 0
    assert results[-1] is None


def test_what_the_caller_finished_too_late_is_finished(engine: IoEngine) -> None:
    def slow(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        time.sleep(0.2)
        return index

    def leave_undone(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        """A worker may still come before the caller has gone."""

    results = engine.run(leave_undone, 3, urgency=Urgency.READ, timeout_s=0.05, attempt=slow)
    assert results == [0, None, None]  # Done a second time, it would count twice.


def not_to_be_called(_index: int, _scratch: Scratch, lease: HostLease) -> int:
    lease.step()
    raise AssertionError("called")


def test_an_empty_batch_starts_no_thread(engine: IoEngine) -> None:
    assert run(engine, square, 0) == []
    assert engine._threads == []


def test_a_stuck_item_costs_only_itself(engine: IoEngine) -> None:
    release = threading.Event()

    def work(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        if index == 0:
            release.wait()
        return index

    assert run(engine, work, 50, timeout_s=HURRY_S) == [None, *range(1, 50)]
    release.set()


def test_with_all_workers_stuck_batches_fail_at_their_deadline_until_one_is_back(
    engine: IoEngine,
) -> None:
    release = threading.Event()
    keep_all_workers(engine, Urgency.READ, release)
    assert run(engine, square, 2, timeout_s=0.1) == [None, None]
    release.set()
    assert run(engine, square, 2) == [0, 1]


@pytest.mark.parametrize("urgency", Urgency)
def test_a_caller_does_not_wait_for_workers_that_storage_keeps_for_long(
    engine: IoEngine, urgency: Urgency
) -> None:
    release = threading.Event()
    keep_all_workers(engine, urgency, release)
    time.sleep(HURRY_S)
    since = time.monotonic()
    assert engine.run(square, 2, urgency=urgency, timeout_s=HURRY_S) == [None, None]
    assert time.monotonic() - since < HURRY_S
    # Whoever waits longer than they have been gone, waits: they may come back.
    threading.Timer(0.2, release.set).start()
    assert engine.run(square, 2, urgency=urgency, timeout_s=LONG_S) == [0, 1]


def test_an_idle_engine_is_not_taken_for_a_stuck_one(engine: IoEngine) -> None:
    barrier = threading.Barrier(3)

    def together(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        barrier.wait(LONG_S)  # All the readers there may be are at work.
        return index

    for _ in range(3):
        assert run(engine, together, 3) == [0, 1, 2]
        with ThreadPoolExecutor(1) as executor:
            waiting = executor.submit(run, engine, together, 3)
            assert run(engine, square, 1, timeout_s=HURRY_S) == [0]
            assert waiting.result() == [0, 1, 2]
    time.sleep(HURRY_S)
    assert run(engine, square, 1, timeout_s=HURRY_S) == [0]


def test_nobody_gets_or_holds_the_lease_after_the_deadline(engine: IoEngine) -> None:
    release, inside, outcomes = threading.Event(), [0], []

    def work(index: int, _scratch: Scratch, lease: HostLease) -> None:
        with lease:
            inside[0] += 1
            while not lease.revoked:  # A copy that is under way when the deadline comes,
                pass
            for _ in range(100_000):  # and takes a little longer.
                pass
            inside[0] -= 1
        release.wait()
        try:
            with lease:
                outcomes.append(f"{index} touched memory")
        except LeaseRevokedError:
            outcomes.append("refused")
            raise

    run(engine, work, 4, timeout_s=0.5)
    assert inside == [0]
    release.set()
    engine.close()
    assert outcomes
    assert set(outcomes) == {"refused"}


def test_an_unexpected_error_is_raised_to_the_caller_and_the_workers_survive(
    engine: IoEngine,
) -> None:
    def broken(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        raise ZeroDivisionError

    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            run(engine, broken, 3)
    assert run(engine, square, 3) == [0, 1, 4]


def test_a_read_does_not_wait_for_the_whole_write_before_it() -> None:
    engine = IoEngine(1)
    order = []
    read_is_queued, write_has_begun = threading.Event(), threading.Event()

    def write(index: int, _scratch: Scratch, _lease: HostLease) -> None:
        write_has_begun.set()
        if index == 0:
            read_is_queued.wait(LONG_S)
        order.append("write")

    def read(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        order.append("read")

    with ThreadPoolExecutor(2) as callers:
        writing = callers.submit(engine.run, write, 20, urgency=Urgency.WRITE, timeout_s=LONG_S)
        assert write_has_begun.wait(LONG_S)
        reading = callers.submit(engine.run, read, 1, urgency=Urgency.READ, timeout_s=LONG_S)
        while not engine._queues[Urgency.READ]:
            pass
        read_is_queued.set()
        writing.result(LONG_S)
        reading.result(LONG_S)
    engine.close()
    assert order == ["write", "read", *["write"] * 19]


def test_small_items_take_turns_with_large_ones_of_an_earlier_batch() -> None:
    engine = IoEngine(1)
    order = []
    small_is_queued, large_has_begun = threading.Event(), threading.Event()

    def large(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        large_has_begun.set()
        small_is_queued.wait(LONG_S)
        until = time.monotonic() + 0.002
        while time.monotonic() < until:
            pass
        order.append("large")

    def small(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        order.append("small")

    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(engine.run, large, 20, urgency=Urgency.READ, timeout_s=LONG_S)
        assert large_has_begun.wait(LONG_S)
        second = callers.submit(engine.run, small, 3, urgency=Urgency.READ, timeout_s=LONG_S)
        while len(engine._queues[Urgency.READ]) < 2:
            pass
        small_is_queued.set()
        second.result(LONG_S)
        first.result(LONG_S)
    engine.close()
    # At least one small item for each large one: all of them in a row, if nothing interrupts that thread.
    assert order[:2] == ["large", "small"]
    assert order[:6].count("small") == 3


@pytest.mark.parametrize("urgency", Urgency)
def test_a_part_that_hangs_holds_up_no_other_part(engine: IoEngine, urgency: Urgency) -> None:
    release = threading.Event()

    def work(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        if index < 50:
            release.wait()
        return index

    results = engine.run(work, 150, urgency=urgency, timeout_s=HURRY_S, parts=[(50, 0), (0, 0), (100, 0)])
    release.set()
    assert results == [None] * 50 + list(range(50, 150))


@pytest.mark.parametrize(("stuck", "other"), [(Urgency.WRITE, Urgency.READ), (Urgency.READ, Urgency.WRITE)])
def test_reads_and_writes_leave_workers_to_each_other(
    engine: IoEngine, stuck: Urgency, other: Urgency
) -> None:
    release = threading.Event()

    def work(_index: int, _scratch: Scratch, _lease: HostLease) -> None:
        release.wait()

    engine.run(work, 50, urgency=stuck, timeout_s=0.2, moved_bytes=LARGE)
    assert engine.run(square, 50, urgency=other, timeout_s=LONG_S) == [n * n for n in range(50)]
    release.set()


def test_writes_keep_one_worker_while_somebody_reads_and_get_the_others_back(engine: IoEngine) -> None:
    at_work: set[int] = set()
    most_beside_a_read = 0
    reading, read_may_end, two_write = threading.Event(), threading.Event(), threading.Event()

    def write(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        nonlocal most_beside_a_read
        at_work.add(index)
        if index < 10:
            two_write.wait(0.02)  # Time for another one to come.
            most_beside_a_read = max(most_beside_a_read, len(at_work))
        elif len(at_work) > 1:
            two_write.set()
        else:
            read_may_end.set()
            two_write.wait(LONG_S)
        at_work.remove(index)
        return index

    def read_slowly(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        reading.set()
        read_may_end.wait(LONG_S)
        return index

    with ThreadPoolExecutor(1) as caller:
        read = caller.submit(
            engine.run, square, 1, urgency=Urgency.READ, timeout_s=LONG_S, attempt=read_slowly
        )
        assert reading.wait(LONG_S)
        written = engine.run(write, 200, urgency=Urgency.WRITE, timeout_s=LONG_S, moved_bytes=LARGE)
        assert written == list(range(200))
        assert read.result(LONG_S) == [0]
    assert most_beside_a_read == 1
    assert two_write.is_set()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Where the seconds go that writers rest for; nobody waits, and every step counts as long work."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    monkeypatch.setattr("ucm.store.posix.readers._LEAST_WORK_S", -1.0)
    return seconds


@contextlib.contextmanager
def somebody_reading(engine: IoEngine) -> Iterator[None]:
    reading, read_may_end = threading.Event(), threading.Event()

    def read_slowly(index: int, _scratch: Scratch, _lease: HostLease) -> int:
        reading.set()
        read_may_end.wait(LONG_S)
        return index

    with ThreadPoolExecutor(1) as caller:
        read = caller.submit(
            engine.run, square, 1, urgency=Urgency.READ, timeout_s=LONG_S, attempt=read_slowly
        )
        assert reading.wait(LONG_S)
        try:
            yield
        finally:
            read_may_end.set()
        read.result(LONG_S)


@pytest.mark.parametrize("attempt", [None, square], ids=["in a worker", "in the caller's own thread"])
def test_a_writer_rests_after_each_item_while_somebody_reads(
    engine: IoEngine, rests: list[float], attempt: Work[int | None] | None
) -> None:
    with somebody_reading(engine):
        engine.run(square, 10, urgency=Urgency.WRITE, timeout_s=LONG_S, attempt=attempt)
    assert len(rests) == 10
    assert min(rests) > 0
    rests.clear()
    engine.run(square, 10, urgency=Urgency.WRITE, timeout_s=LONG_S, attempt=attempt)
    assert rests == []


@pytest.mark.parametrize("in_own_thread", [False, True], ids=["in a worker", "in the caller's own thread"])
def test_a_writer_rests_between_its_steps_while_somebody_reads(
    engine: IoEngine, rests: list[float], in_own_thread: bool
) -> None:
    def write(index: int, _scratch: Scratch, lease: HostLease) -> int:
        for _ in range(3):
            lease.step()
        return index

    attempt = write if in_own_thread else None
    with somebody_reading(engine):
        engine.run(write, 2, urgency=Urgency.WRITE, timeout_s=LONG_S, attempt=attempt)
    assert len(rests) == 2 * (3 + 1)
    rests.clear()
    with somebody_reading(engine):
        engine.run(write, 2, urgency=Urgency.READ, timeout_s=LONG_S, attempt=attempt)
    assert rests == []


def test_a_dump_rests_in_the_midst_of_a_block_while_somebody_reads(
    tmp_path: Path, rests: list[float]
) -> None:
    # Larger ones are hashed in one piece, without the GIL.
    spec = StoreSpec(namespace="large", segment_bytes=(OFTEN_FREE_BYTES - 1,), identity=bytes(16))
    with contextlib.closing(PosixStore(spec, PosixStoreConfig((str(tmp_path),)))) as store:
        with somebody_reading(store.engine):
            assert store.dump(outgoing([0], spec)) == [BlockStatus.DONE]
        assert len(rests) >= 4 + 5  # Before each quarter is hashed; around creating, writing and renaming.
        assert load(store, [0])[0] == [BlockStatus.DONE]


def test_a_writer_that_has_just_rested_goes_on(engine: IoEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(time, "sleep", rests.append)
    monkeypatch.setattr("ucm.store.posix.readers._LEAST_WORK_S", LONG_S)
    monkeypatch.setattr("ucm.store.posix.readers._LastRest.at", -2 * LONG_S)

    def write(index: int, _scratch: Scratch, lease: HostLease) -> int:
        for _ in range(100):
            lease.step()
        return index

    with somebody_reading(engine):
        engine.run(write, 1, urgency=Urgency.WRITE, timeout_s=LONG_S)
    assert len(rests) == 1


def test_threads_are_never_more_than_allowed() -> None:
    engine = IoEngine(3)
    with ThreadPoolExecutor(8) as callers:
        calls = [
            callers.submit(engine.run, square, 20, urgency=Urgency.READ, timeout_s=LONG_S, moved_bytes=LARGE)
            for _ in range(50)
        ]
    assert all(call.result() == [n * n for n in range(20)] for call in calls)
    assert 1 <= living(engine) <= 3
    engine.close()
    assert living(engine) == 0


def test_an_engine_without_any_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    with pytest.raises(StoreUnavailableError, match="cannot start an I/O thread: can't start new thread"):
        run(IoEngine(2), square, 1)


def test_an_engine_that_cannot_start_more_threads_works_with_those_it_has(
    engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, square, 1)
    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    results = engine.run(square, 100, urgency=Urgency.READ, timeout_s=LONG_S, moved_bytes=LARGE)
    assert results == [n * n for n in range(100)]


def no_more_threads(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_engine_keeps_nothing_of_a_batch_that_is_over(engine: IoEngine) -> None:
    class Memory:
        pass

    def use(memory: Memory) -> weakref.ref[Memory]:
        def work(index: int, _scratch: Scratch, _lease: HostLease) -> tuple[int, Memory]:
            return index, memory

        assert len(run(engine, work, 20)) == 20
        return weakref.ref(memory)

    gc.disable()
    try:
        kept = use(Memory())
        deadline = time.monotonic() + LONG_S
        while kept() is not None and time.monotonic() < deadline:  # A worker may be about to let go of it.
            pass
        assert kept() is None
    finally:
        gc.enable()


def test_a_closed_engine_refuses_work() -> None:
    engine = IoEngine(1)
    engine.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        run(engine, square, 1)


def open_stores(storage: Path, count: int, io_threads: int = 8) -> list[PosixStore]:
    config = PosixStoreConfig((str(storage),), io_threads=io_threads)
    specs = [StoreSpec(f"pool_{n}x1", (1_000_000 + n,), bytes(16)) for n in range(count)]
    return [PosixStore(spec, config) for spec in specs]


@pytest.mark.parametrize("pools", [2, 8])
def test_threads_do_not_grow_with_the_pools_and_end_with_the_last(tmp_path: Path, pools: int) -> None:
    stores = open_stores(tmp_path, pools)
    with ThreadPoolExecutor(pools) as callers:
        calls = [callers.submit(store.dump, outgoing(range(16), store.spec)) for store in stores]
    assert all(call.result() == [BlockStatus.DONE] * 16 for call in calls)
    for store in stores:
        assert load(store, [0])[0] == [BlockStatus.DONE]
    assert len({id(store.engine) for store in stores}) == 1
    engine = stores[0].engine
    assert 1 <= living(engine) <= 8
    for store in stores[1:]:
        store.close()
    assert living(engine)
    stores[0].close()
    assert living(engine) == 0


def test_stores_that_ask_for_different_thread_counts_share_the_larger(tmp_path: Path) -> None:
    small, large = open_stores(tmp_path, 1, io_threads=1), open_stores(tmp_path, 1, io_threads=5)
    assert small[0].engine is large[0].engine
    assert small[0].engine._limit == 5
    small[0].close()
    large[0].close()


def test_reopening_after_the_last_close_works(tmp_path: Path) -> None:
    for _ in range(10):
        [store] = open_stores(tmp_path, 1)
        store.dump(outgoing([1], store.spec))
        assert living(store.engine)
        store.close()
        assert living(store.engine) == 0
