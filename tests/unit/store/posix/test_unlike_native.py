# SPDX-License-Identifier: MIT
"""Faults of UCM's native PosixStore without a test elsewhere; docs/compared-with-ucm.md names all."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ucm.store import StoreSpec
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import hanging_call
from ucm.testing.storage_faults import FAULTS
from ucm.testing.store_conformance import (
    DONE,
    FAILED,
    MISSING,
    SPEC,
    assert_loads,
    key_of,
    load,
    outgoing,
)


def open_store(root: Path, spec: StoreSpec = SPEC, load_timeout_s: float = 60.0) -> PosixStore:
    return PosixStore(spec, PosixStoreConfig((str(root),), load_timeout_s=load_timeout_s))


def test_blocks_on_a_file_system_that_turned_read_only_are_still_hits(tmp_path: Path) -> None:
    [read_only] = [fault for fault in FAULTS if fault.name == "read-only"]
    with read_only.ready(tmp_path) as strike:
        store = open_store(strike.root)
        assert store.dump(outgoing([1, 2])) == [DONE, DONE]
        with strike.begin():
            assert store.lookup([key_of(1), key_of(2), key_of(3)]) == [True, True, False]
            assert_loads(store, [1, 2])
            assert store.dump(outgoing([1, 3])) == [DONE, FAILED]
        assert store.dump(outgoing([3])) == [DONE]
        store.close()


def test_stores_of_different_block_sizes_share_a_directory_and_miss_each_others_blocks(
    tmp_path: Path,
) -> None:
    larger = StoreSpec(SPEC.namespace, (9000,), SPEC.identity)
    store, other = open_store(tmp_path), open_store(tmp_path, larger)
    assert store.dump(outgoing([1])) == [DONE]
    assert other.dump(outgoing([2], larger)) == [DONE]
    assert store.lookup([key_of(1), key_of(2)]) == [True, False]
    assert other.lookup([key_of(1), key_of(2)]) == [False, True]
    assert load(store, [3])[0] == [MISSING]
    store.close()
    other.close()


def test_idle_workers_do_not_wake_up(tmp_path: Path) -> None:
    store = open_store(tmp_path, load_timeout_s=0.2)
    store.dump(outgoing(list(range(20))))
    with hanging_call("preadv", key_of(1).hex()):
        load(store, list(range(20)))  # So that there are several.
    workers = [f"/proc/self/task/{thread.native_id}/status" for thread in store.engine._threads]
    assert workers
    # Until whatever they were doing is over.
    before = sleeps(workers)
    for _ in range(50):
        threading.Event().wait(0.2)
        before, last = sleeps(workers), before
        if before == last:
            break
    threading.Event().wait(0.5)
    assert sleeps(workers) == before
    store.close()


def sleeps(workers: list[str]) -> list[str]:
    """Return how often each thread has gone to sleep."""
    return [
        line
        for status in workers
        for line in Path(status).read_text().splitlines()
        if line.startswith("voluntary_ctxt_switches")
    ]


_USE = """
import sys
from pathlib import Path
from ucm.store.factory import StoreConfig, open_store
from ucm.testing.store_conformance import SPEC, assert_loads, key_of, outgoing
store = open_store(SPEC, StoreConfig.from_mapping({"storage_backends": sys.argv[1]}))
store.dump(outgoing([1, 2]))
store.lookup([key_of(3)])
assert_loads(store, [1, 2])
store.close()
"""


def test_a_store_prints_nothing_and_writes_nothing_but_below_its_root(tmp_path: Path) -> None:
    working_directory = tmp_path / "here"
    working_directory.mkdir()
    used = subprocess.run(  # noqa: S603 -- our own interpreter and code.
        [sys.executable, "-c", _USE, str(tmp_path / "kv")],
        cwd=working_directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (used.returncode, used.stdout, used.stderr) == (0, "", "")
    assert list(working_directory.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path != working_directory] == ["kv"]


def test_threads_that_write_one_key_of_many_segments_end_in_one_of_their_blocks(tmp_path: Path) -> None:
    spec = StoreSpec("many_x32", (20_000,) * 32, SPEC.identity)
    store = open_store(tmp_path, spec)
    with ThreadPoolExecutor(4) as threads:
        for number in range(50):
            payloads = [outgoing([number], spec, version=writer) for writer in range(4)]
            assert list(threads.map(store.dump, payloads)) == [[DONE]] * 4
            [status], [loaded] = load(store, [number])
            assert status is DONE
            assert loaded.payload in [b"".join(blocks[0].segments) for blocks in payloads]
    store.close()
