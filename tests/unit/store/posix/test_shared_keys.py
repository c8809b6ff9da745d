# SPDX-License-Identifier: MIT
"""Several processes that store the same keys at the same instant, as data-parallel ranks and replicas do."""

from __future__ import annotations

import multiprocessing
import queue
from typing import TYPE_CHECKING

from ucm.store.interface import Block, BlockKey, BlockStatus, StoreSpec
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

PROCESSES = 4
ROUNDS = 300
KEYS = 3
SEGMENT_BYTES = 20_000
SPEC = StoreSpec("", (SEGMENT_BYTES, SEGMENT_BYTES), bytes(16))

_context = multiprocessing.get_context("forkserver")


def payload(writer: int) -> bytes:
    return bytes([writer]) * SEGMENT_BYTES


def blocks(number: int, segments: list[bytearray]) -> list[Block]:
    """The keys of a round, each with memory of its own for both segments."""
    keys = [BlockKey((number * KEYS + place).to_bytes(16, "little")) for place in range(KEYS)]
    pairs = zip(segments[::2], segments[1::2], strict=True)
    return [Block(key, [memoryview(k), memoryview(v)]) for key, (k, v) in zip(keys, pairs, strict=True)]


def write_and_read(writer: int, root: Path, together: Barrier, outcome: Queue[list[str]]) -> None:
    """Store each round's keys together with the others, and load them when all are done."""
    store = PosixStore(SPEC, PosixStoreConfig(storage_backends=(str(root),), dump_timeout_s=60))
    whole = {payload(each) * 2 for each in range(PROCESSES)}
    wrong = []
    for number in range(ROUNDS):
        together.wait(60)
        stored = store.dump(blocks(number, [bytearray(payload(writer)) for _ in range(2 * KEYS)]))
        together.wait(60)
        memory = [bytearray(SEGMENT_BYTES) for _ in range(2 * KEYS)]
        loaded = store.load(blocks(number, memory))
        if {*stored, *loaded} != {BlockStatus.DONE}:
            wrong.append(f"round {number}: {stored} {loaded}")
        if not {bytes(k + v) for k, v in zip(memory[::2], memory[1::2], strict=True)} <= whole:
            wrong.append(f"round {number}: mixed bytes")
    store.close()
    outcome.put(wrong)


# sglang #31926
def test_the_same_keys_from_four_processes_end_in_one_whole_block_each(tmp_path: Path) -> None:
    together, outcome = _context.Barrier(PROCESSES), _context.Queue()
    processes = [
        _context.Process(target=write_and_read, args=(writer, tmp_path, together, outcome), daemon=True)
        for writer in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    try:
        assert [outcome.get(timeout=240) for _ in processes] == [[]] * PROCESSES
    except queue.Empty:
        raise AssertionError("a process says nothing") from None
    finally:
        for process in processes:
            process.kill()

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == ROUNDS * KEYS
