# SPDX-License-Identifier: MIT
"""What other processes do to a PosixStore: write until killed, die in the midst, write the same keys."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from ucm.store import BlockStatus, StoreSpec
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.posix_faults import faulty_call
from ucm.testing.store_conformance import SPEC, incoming, key_of, outgoing, payload_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

LARGE = StoreSpec("large_300000x1", (300_000,), SPEC.identity)


def open_store(root: str, spec: StoreSpec) -> PosixStore:
    """Open a store whose deadlines no busy machine misses."""
    patience = dict.fromkeys(("load_timeout_s", "dump_timeout_s", "lookup_timeout_s"), 60.0)
    return PosixStore(spec, PosixStoreConfig((root,), **patience))  # type: ignore[arg-type]  # Only floats.


def write_endlessly(pipe: Connection, root: str, spec: StoreSpec, numbers: list[int]) -> None:
    """Say once that it writes, then store and remove blocks until killed."""
    store, blocks = open_store(root, spec), outgoing(numbers, spec)
    pipe.send("writing")
    while True:
        store.dump(blocks)
        store.delete([block.key for block in blocks])


def die_in_dump(_pipe: Connection, root: str, call: str, when: str) -> None:
    """Be killed "before", "after" or half-way through ("in") a system call on the second block stored."""
    store = open_store(root, SPEC)
    store.dump(outgoing([0]))

    def kill(original: Callable[..., object], *args: object, **kwargs: object) -> None:
        if when == "after":
            original(*args, **kwargs)
        if when == "in":
            descriptor, buffers, offset = args
            original(descriptor, [buffers[0][:1000]], offset)  # type: ignore[index]  # pwritev's.
        os.kill(os.getpid(), signal.SIGKILL)

    with faulty_call(call, key_of(1).hex(), kill):
        store.dump(outgoing([1]))
    raise AssertionError(f"{call} was not called")


def write_same_keys(
    pipe: Connection, root: str, barrier: Barrier, version: int, versions: int, rounds: int, count: int
) -> None:
    """Store the same keys as the others, round by round; send "" or what went wrong."""
    store, numbers = open_store(root, SPEC), list(range(count))
    blocks, memory = outgoing(numbers, version=version), incoming(numbers)
    payloads = {n: {payload_of(n, version=each) for each in range(versions)} for n in numbers}
    done = [BlockStatus.DONE] * count
    trouble = ""
    for _ in range(rounds):
        barrier.wait()
        if store.dump(blocks) != done:
            trouble = "a dump failed"
        barrier.wait()
        if version == 0:
            if store.load([guarded.block for guarded in memory]) != done:
                trouble = "a load failed"
            if any(guarded.payload not in payloads[n] for n, guarded in enumerate(memory)):
                trouble = "a block is nobody's"
            store.delete([block.key for block in blocks])
    store.close()
    pipe.send(trouble)
