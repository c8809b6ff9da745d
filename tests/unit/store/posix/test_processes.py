# SPDX-License-Identifier: MIT
"""Processes that die at any instant, and many that write the same keys."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from typing import TYPE_CHECKING

import pytest

from ucm.testing.store_conformance import DONE, SPEC, key_of, load, payload_of
from ucm.testing.store_processes import LARGE, die_in_dump, open_store, write_endlessly, write_same_keys

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from ucm.store import StoreSpec

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["ucm.testing.store_processes"])


def start(target: object, *args: object) -> tuple[BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    return process, ours


def check(storage: Path, spec: StoreSpec, numbers: list[int]) -> list[bool]:
    """Open the store anew: nothing unfinished, and every hit has the right bytes. Returns the hits."""
    store = open_store(str(storage), spec)
    assert list(storage.glob("**/.tmp/*")) == []
    found = store.lookup([key_of(n) for n in numbers])
    hits = [n for n, is_stored in zip(numbers, found, strict=True) if is_stored]
    statuses, memory = load(store, hits)
    assert statuses == [DONE] * len(hits)
    for number, guarded in zip(hits, memory, strict=True):
        assert guarded.payload == payload_of(number, spec)
    store.close()
    return found


# Mooncake #1139, LMCache #2517
@pytest.mark.parametrize(("spec", "count"), [(SPEC, 32), (LARGE, 6)], ids=["small blocks", "large blocks"])
def test_100_writers_killed_at_random_instants_leave_no_orphan_and_no_false_hit(
    tmp_path: Path, spec: StoreSpec, count: int
) -> None:
    rng = random.Random(1)  # noqa: S311 -- a repeatable choice of instants.
    numbers = list(range(count))
    partly = 0
    for killed in range(400):
        if killed >= 100 and partly > 10:  # A busy machine may need more to hit enough of them at their work.
            break
        writer, pipe = start(write_endlessly, str(tmp_path), spec, numbers)
        assert pipe.poll(60)
        pipe.recv()
        pipe.poll(rng.uniform(0, 0.015))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        pipe.close()
        partly += 0 < sum(check(tmp_path, spec, numbers)) < count
    assert partly > 10  # They were killed in the midst of something.


@pytest.mark.parametrize(
    ("call", "when", "stored"),
    [
        ("open", "before", False),
        ("open", "after", False),
        ("pwritev", "before", False),
        ("pwritev", "in", False),
        ("pwritev", "after", False),
        ("close", "before", False),
        ("close", "after", False),
        ("rename", "before", False),
        ("rename", "after", True),
    ],
)
def test_a_writer_killed_at_each_system_call_leaves_a_whole_block_or_none(
    tmp_path: Path, call: str, when: str, stored: bool
) -> None:
    writer, _pipe = start(die_in_dump, str(tmp_path), call, when)
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    assert check(tmp_path, SPEC, [0, 1]) == [True, stored]


# LMCache #2517
@pytest.mark.parametrize("processes", [2, 8])
def test_processes_that_store_the_same_64_keys_50_times_leave_one_whole_block_each(
    tmp_path: Path, processes: int
) -> None:
    barrier = CONTEXT.Barrier(processes)
    writers = [
        start(write_same_keys, str(tmp_path), barrier, version, processes, 50, 64)
        for version in range(processes)
    ]
    for writer, pipe in writers:
        assert pipe.poll(120)
        assert pipe.recv() == ""
        writer.join(60)
    assert list(tmp_path.glob("**/.tmp/*")) == []
