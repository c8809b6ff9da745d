# SPDX-License-Identifier: MIT
"""Stores with a capacity, their processes and their evictors: all of them real, and some of them killed."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.store import StoreSpec
from ucm.store.posix.capacity import service, supervisor
from ucm.store.posix.capacity.uses import DIRECTORY, MINUTE_NS
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.aged_blocks import dump_aged
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import DONE, SPEC, assert_loads, key_of, load, outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_BYTES = 8192
KV = StoreSpec("", (BLOCK_BYTES - 64,), SPEC.identity)
SWA = StoreSpec("sglang_v2/swa_8128x1", (BLOCK_BYTES - 64,), SPEC.identity)
PATIENCE_S = 60.0


_opened: list[PosixStore] = []


@pytest.fixture(autouse=True)
def _hurry_and_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(service, "_TICK_S", 0.1)
    yield
    while _opened:
        _opened.pop().close()


def open_store(
    storage: Path | tuple[Path, ...], spec: StoreSpec = KV, blocks: float | None = None
) -> PosixStore:
    roots = storage if isinstance(storage, tuple) else (storage,)
    capacity = None if blocks is None else str(int(blocks * BLOCK_BYTES))
    store = PosixStore(
        spec, PosixStoreConfig.from_mapping({"storage_backends": roots, "capacity_bytes": capacity})
    )
    _opened.append(store)
    return store


def fill(storage: Path, spec: StoreSpec, minutes: int, pages: int = 1) -> None:
    """Store some blocks in each of the last so many minutes, without a capacity."""
    with contextlib.closing(open_store(storage, spec)) as store:
        for minute in range(minutes):
            numbers = range(minute * pages, (minute + 1) * pages)
            dump_aged(store, storage, numbers, minutes_ago=minutes - minute + 2)


def until(condition: Callable[[], Any]) -> Any:  # noqa: ANN401 -- whatever the condition returns.
    """Wait for something to become true, and return it."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def evictors(storage: Path) -> list[int]:
    """Return the process ids of the evictors that work on a root."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes()
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if f'"{storage}"'.encode() in command and b"capacity.process" in command and state != "Z":
                    found.append(int(process.name))
    return found


def blocks_below(storage: Path) -> int:
    return sum(1 for _ in storage.glob("**/???/" + "?" * 32))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == service.THREAD_NAME]


def test_without_a_capacity_there_is_no_thread_no_file_and_no_evictor(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.dump(outgoing([1], KV)) == [DONE]
    assert_loads(store, [1])
    store.touch([key_of(1)])
    assert threads() == []
    assert not (tmp_path / ".ucm").exists()
    assert evictors(tmp_path) == []
    assert store.evicts is False


def test_pools_of_one_root_are_kept_below_it_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for spec in (KV, SWA):
        fill(tmp_path, spec, minutes=10)
    caplog.set_level(logging.INFO)
    kv, swa = (open_store(tmp_path, spec, blocks=19) for spec in (KV, SWA))
    until(lambda: kv.stats().evicted and swa.stats().evicted)
    keys = [key_of(number) for number in range(10)]
    assert kv.lookup(keys) == swa.lookup(keys) == [False] + [True] * 9
    assert (kv.stats().evicted, kv.stats().evicted_bytes) == (1, BLOCK_BYTES)
    [line] = [message for message in caplog.messages if "evicted" in message]
    assert re.match(rf"evicted 2 blocks, 0\.000 GB, from {tmp_path} in \d+\.\d s", line)


def test_what_is_dumped_later_makes_room_for_itself(tmp_path: Path) -> None:
    fill(tmp_path, KV, minutes=10)
    store = open_store(tmp_path, blocks=10.5)
    for number in range(100, 104):
        store.dump(outgoing([number], KV))
    until(lambda: store.stats().evicted >= 4)
    assert_loads(store, [100, 101, 102, 103, 9, 8, 7])


def test_a_load_a_touch_and_a_repeated_dump_count_as_use(tmp_path: Path) -> None:
    fill(tmp_path, KV, minutes=10)
    store = open_store(tmp_path, blocks=1000)
    load(store, [0])
    store.touch([key_of(1)])
    store.dump(outgoing([2], KV))
    now = time.time_ns()

    def used(number: int) -> bool:
        return block_path(tmp_path, KV, key_of(number)).stat().st_mtime_ns > now - 2 * MINUTE_NS

    until(lambda: used(0) and used(1) and used(2))
    assert not used(3)


def test_the_callers_and_the_workers_list_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, KV, minutes=10)
    store = open_store(tmp_path, blocks=9)
    calls: list[tuple[str, str]] = []
    for name in ("listdir", "scandir", "statvfs", "utime", "unlink"):
        original = getattr(os, name)

        def call(*args: Any, name: str = name, original: Callable[..., Any] = original, **kwargs: Any) -> Any:  # noqa: ANN401
            calls.append((name, threading.current_thread().name))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    for number in range(100, 300):
        store.dump(outgoing([number], KV))
        load(store, [number, 1000])
        store.lookup([key_of(number)])
        store.touch([key_of(9)])
    until(lambda: store.stats().evicted)
    store.close()
    assert {thread for _, thread in calls} <= {service.THREAD_NAME}


def test_every_root_has_an_evictor_of_its_own(tmp_path: Path) -> None:
    roots = (tmp_path / "a", tmp_path / "b")
    with contextlib.closing(open_store(roots)) as plain:
        plain.dump(outgoing(range(60), KV))
    for root in roots:
        for path in root.glob("???/*"):
            os.utime(path, (1e9, 1e9))
    store = open_store(roots, blocks=10)
    until(lambda: all(blocks_below(root) <= 9 for root in roots))
    assert [len(evictors(root)) for root in roots] == [1, 1]
    store.touch([key_of(number) for number in range(60)])
    left = [path for root in roots for path in root.glob("???/*")]
    until(lambda: all(path.stat().st_mtime > 1e9 for path in left))
    store.close()
    assert [len(evictors(root)) for root in roots] == [0, 0]


def test_ten_openings_leave_no_thread_no_descriptor_and_no_process_behind(tmp_path: Path) -> None:
    def once() -> None:
        store = open_store(tmp_path, blocks=100)
        store.dump(outgoing([1], KV))
        until(lambda: evictors(tmp_path))
        store.close()
        _opened.clear()

    def descriptors_and_threads() -> tuple[int, int]:
        gc.collect()  # Stores of other tests have descriptors too.
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    once()
    before = descriptors_and_threads()
    for _ in range(10):
        once()

    def as_few_as_before() -> bool:  # Fewer, if something of another test has ended meanwhile.
        return all(now <= then for now, then in zip(descriptors_and_threads(), before, strict=True))

    until(as_few_as_before)
    assert evictors(tmp_path) == []


def test_closing_tells_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_TICK_S", 1000.0)
    (tmp_path / DIRECTORY).mkdir(parents=True)
    with (tmp_path / DIRECTORY / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Another process's evictor, which does nothing.
        store = open_store(tmp_path, blocks=100)
        store.dump(outgoing([1], KV))
        store.touch([key_of(2)])
        store.close()
    assert key_of(2).hex() in "".join(path.read_text() for path in (tmp_path / DIRECTORY).glob("*.uses"))
    assert key_of(1).hex() in "".join(path.read_text() for path in (tmp_path / DIRECTORY).glob("*.uses"))


SERVER = """
import sys, time
from ucm.store.posix.capacity import service
service._TICK_S = 0.1
from ucm.testing.store_conformance import *
from ucm.store.posix.store import PosixStore
from ucm.store.posix.config import PosixStoreConfig
store = PosixStore(
    StoreSpec("", (8192 - 64,), SPEC.identity),
    PosixStoreConfig.from_mapping({"storage_backends": sys.argv[1], "capacity_bytes": sys.argv[2]}),
)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def server(storage: Path, blocks: float) -> Iterator[subprocess.Popen[str]]:
    """Run another process with a store of the same capacity."""
    command = [sys.executable, "-c", textwrap.dedent(SERVER), str(storage), str(int(blocks * BLOCK_BYTES))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_of_many_processes_one_evicts_and_when_it_is_killed_another_takes_over(tmp_path: Path) -> None:
    with server(tmp_path, blocks=19) as first:
        [before] = until(lambda: evictors(tmp_path))
        with server(tmp_path, blocks=19):
            open_store(tmp_path, blocks=19)
            time.sleep(0.5)
            assert evictors(tmp_path) == [before]
            first.kill()
            first.wait()
            [after] = until(lambda: [process for process in evictors(tmp_path) if process != before])
            fill(tmp_path / "other", SWA, minutes=30)
            (tmp_path / "other/sglang_v2").rename(tmp_path / "sglang_v2")
            os.kill(after, signal.SIGKILL)  # The new one scans.
            until(lambda: blocks_below(tmp_path) == 18)
            until(lambda: len(evictors(tmp_path)) == 1)


def test_an_evictor_killed_in_the_middle_is_replaced_and_the_work_is_finished(tmp_path: Path) -> None:
    fill(tmp_path, KV, minutes=30, pages=100)
    store = open_store(tmp_path, blocks=500)

    def has_shrunk(blocks: int) -> bool:
        return blocks_below(tmp_path) < blocks

    def has_ended(evictor: int) -> bool:
        return evictor not in evictors(tmp_path)

    killed = 0
    while killed < 5 and blocks_below(tmp_path) > 600:
        at_start = blocks_below(tmp_path)
        [evictor] = until(lambda: evictors(tmp_path))
        until(partial(has_shrunk, at_start))
        os.kill(evictor, signal.SIGKILL)
        killed += 1
        until(partial(has_ended, evictor))
    until(lambda: blocks_below(tmp_path) <= 475)
    assert killed
    # No more than a minute's blocks too many, and the newest of them.
    assert blocks_below(tmp_path) >= 400
    assert_loads(store, range(3000 - 400, 3000))


def test_an_evictor_that_fails_by_a_fault_of_its_own_says_why_and_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIRECTORY).mkdir(parents=True)
    note = tmp_path / DIRECTORY / "odd.uses"
    # A size no disk has: more than an index can take.
    note.write_text(json.dumps({"written": {"": [2**60, [key_of(1).hex()]]}, "used": {}}))
    open_store(tmp_path, blocks=19)
    until(lambda: any("ended with status 1" in message for message in caplog.messages))
    assert any("eviction below" in message and "error: " in message for message in caplog.messages)
    assert not note.exists()
    until(lambda: evictors(tmp_path))


def test_an_evictor_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    with server(tmp_path, blocks=19) as process:
        until(lambda: evictors(tmp_path))
        process.kill()
        process.wait()
        until(lambda: not evictors(tmp_path))


def test_without_an_evictor_stores_work_and_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    store = open_store(tmp_path, blocks=19)
    until(lambda: caplog.messages)
    time.sleep(0.5)
    assert store.dump(outgoing([1], KV)) == [DONE]
    assert_loads(store, [1])
    assert caplog.messages == [f"capacity: no evictor for {tmp_path}: No such file or directory"]


def test_a_root_where_nothing_can_be_told_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".ucm").mkdir()
    (tmp_path / DIRECTORY).write_text("in the way")
    store = open_store(tmp_path, blocks=19)
    assert store.dump(outgoing([1], KV)) == [DONE]
    until(lambda: len(caplog.messages) >= 2)
    for _ in range(5):  # Many rounds more.
        assert store.dump(outgoing([1], KV)) == [DONE]
        time.sleep(0.1)
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == f"capacity: no evictor for {tmp_path}: File exists"
    assert caplog.messages[1].startswith("capacity: cannot tell what was used: ")


def test_a_root_replaced_while_running_is_looked_through_again(tmp_path: Path) -> None:
    storage = tmp_path / "kv"
    store = open_store(storage, blocks=19)
    until(lambda: evictors(storage))
    fill(tmp_path / "other", SWA, minutes=30)
    storage.rename(tmp_path / "away")
    (tmp_path / "other").rename(storage)
    assert store.dump(outgoing([1], KV)) == [DONE]
    until(lambda: blocks_below(storage) <= 19)


def test_the_evictor_needs_only_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ucm.store.posix.capacity.process; "
        "print(*(m for m in sys.modules if m.partition('.')[0] in ('xxhash', 'torch', 'yaml', 'site')))"
    )
    said = subprocess.run(  # noqa: S603 -- our own code.
        [sys.executable, "-I", "-S", "-c", code, supervisor._SEARCH_PATH],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert said.stdout.strip() == ""
