# SPDX-License-Identifier: MIT
"""StoreConformance: what every store must do, as tests that a store's test class inherits.

A store joins by telling how it is opened and how to reach its data past the API:

    class TestMyStore(DurableStoreConformance):
        def open_store(self, storage, spec, timeout_s=30.0): ...
        def raw_read(self, storage, spec, key): ...
        def raw_write(self, storage, spec, key, stored): ...
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ucm.store import Block, BlockKey, BlockStatus, KVStore, StoreSpec, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from pathlib import Path

DONE, MISSING, CORRUPT, FAILED = (
    BlockStatus.DONE,
    BlockStatus.MISSING,
    BlockStatus.CORRUPT,
    BlockStatus.FAILED,
)

SPEC = StoreSpec(namespace="pool_4096x3", segment_bytes=(4096, 1, 903), identity=b"identity of pool")
OTHER_IDENTITY = StoreSpec(SPEC.namespace, SPEC.segment_bytes, b"another identity")

# A deadline short enough to be waited for, and long enough for whatever does not hang.
HURRY_S = 2.0

_GUARD = bytes(range(64))
_UNTOUCHED = 0xEE


class GuardedBlock:
    """A block's segments with bytes around each that nobody may change.

    Args:
        spec: Gives the segment sizes.
        key: The block's key.
        payload: What the segments hold; None for memory to load into.
    """

    def __init__(self, spec: StoreSpec, key: BlockKey, payload: bytes | None = None) -> None:
        self._buffers = [bytearray(_GUARD + bytes([_UNTOUCHED]) * n + _GUARD) for n in spec.segment_bytes]
        segments = [memoryview(buffer)[len(_GUARD) : -len(_GUARD)] for buffer in self._buffers]
        self.published: list[bytes] = []
        self.block = Block(key, segments, lambda: self.published.append(self.payload))
        start = 0
        for segment in segments if payload is not None else ():
            segment[:] = (payload or b"")[start : start + len(segment)]
            start += len(segment)

    @property
    def payload(self) -> bytes:
        """All segments in one piece."""
        return b"".join(self.block.segments)

    @property
    def is_untouched(self) -> bool:
        """Nothing was ever written to the segments."""
        return not self.payload.strip(bytes([_UNTOUCHED]))

    def assert_guards_intact(self) -> None:
        """Fail if a byte beside the segments has changed."""
        for buffer in self._buffers:
            assert buffer[: len(_GUARD)] == _GUARD
            assert buffer[-len(_GUARD) :] == _GUARD


def key_of(number: int) -> BlockKey:
    """Return a key that is as random as a real one, and always the same."""
    return BlockKey(hashlib.md5(str(number).encode(), usedforsecurity=False).digest())


def payload_of(number: int, spec: StoreSpec = SPEC, version: int = 0) -> bytes:
    """Return bytes that nothing but this number and version gives."""
    return random.Random(f"{number} {version}").randbytes(spec.block_bytes)  # noqa: S311 -- test data.


def outgoing(numbers: Sequence[int], spec: StoreSpec = SPEC, version: int = 0) -> list[Block]:
    """Return blocks to dump, one per number."""
    return [GuardedBlock(spec, key_of(n), payload_of(n, spec, version)).block for n in numbers]


def incoming(numbers: Sequence[int], spec: StoreSpec = SPEC) -> list[GuardedBlock]:
    """Return memory to load into, one block per number."""
    return [GuardedBlock(spec, key_of(n)) for n in numbers]


def load(store: KVStore, numbers: Sequence[int]) -> tuple[list[BlockStatus], list[GuardedBlock]]:
    """Load blocks by number; return their verdicts and memory, guards and what was published checked."""
    memory = incoming(numbers, store.spec)
    statuses = store.load([guarded.block for guarded in memory])
    for guarded, status in zip(memory, statuses, strict=True):
        guarded.assert_guards_intact()
        # Published when its time was just up, a block counts as failed.
        may_be = {guarded.payload} if status in (DONE, FAILED) else set()
        assert may_be >= set(guarded.published) >= ({guarded.payload} if status is DONE else set())
    return statuses, memory


def assert_loads(store: KVStore, numbers: Sequence[int]) -> None:
    """Fail unless all blocks load with the bytes of `payload_of`."""
    statuses, memory = load(store, numbers)
    assert statuses == [DONE] * len(numbers)
    for number, guarded in zip(numbers, memory, strict=True):
        assert guarded.payload == payload_of(number, store.spec)


def _flip(stored: bytes, offset: int) -> bytes:
    damaged = bytearray(stored)
    damaged[offset] ^= 0x01
    return bytes(damaged)


# Each takes the good stored form. The first group can be told from the outside, the second cannot.
WRONG_LENGTHS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda stored: b"",  # noqa: ARG005 -- all take the stored form.
    "one byte short": lambda stored: stored[:-1],
    "cut in the payload": lambda stored: stored[:1000],
    "one byte long": lambda stored: stored + b"x",
    "twice": lambda stored: stored * 2,
}
WRONG_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "first payload byte": lambda stored: _flip(stored, 0),
    "last payload byte": lambda stored: _flip(stored, SPEC.block_bytes - 1),
    "first footer byte": lambda stored: _flip(stored, SPEC.block_bytes),
    "last footer byte": lambda stored: _flip(stored, -1),
    "zeros": lambda stored: bytes(len(stored)),
    "payload lost in a crash": lambda stored: bytes(SPEC.block_bytes) + stored[SPEC.block_bytes :],
}


class StoreConformance:
    """The contract of `KVStore`. Joined by a class with the three methods below."""

    def open_store(self, storage: Path, spec: StoreSpec, timeout_s: float = 30.0) -> KVStore:
        """Open the store on `storage`, an empty directory at first; every deadline is `timeout_s`."""
        raise NotImplementedError

    def raw_read(self, storage: Path, spec: StoreSpec, key: BlockKey) -> bytes | None:
        """Return the stored form of a block past the API; None if there is none."""
        raise NotImplementedError

    def raw_write(self, storage: Path, spec: StoreSpec, key: BlockKey, stored: bytes) -> None:
        """Replace the stored form of a block past the API."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Path:
        return tmp_path / "storage"

    @pytest.fixture
    def store(self, storage: Path) -> Iterator[KVStore]:
        store = self.open_store(storage, SPEC)
        yield store
        store.close()

    def damage(self, storage: Path, number: int, change: Callable[[bytes], bytes]) -> None:
        """Replace a block's stored form by a changed one."""
        stored = self.raw_read(storage, SPEC, key_of(number))
        assert stored is not None
        self.raw_write(storage, SPEC, key_of(number), change(stored))

    def test_a_dumped_block_loads_byte_for_byte(self, store: KVStore) -> None:
        assert store.dump(outgoing([1])) == [DONE]
        assert_loads(store, [1])

    def test_every_byte_value_survives(self, store: KVStore) -> None:
        payload = (bytes(range(256)) * 20)[: SPEC.block_bytes]
        assert store.dump([GuardedBlock(SPEC, key_of(1), payload).block]) == [DONE]
        statuses, [loaded] = load(store, [1])
        assert statuses == [DONE]
        assert loaded.payload == payload

    def test_a_block_of_one_segment_loads_byte_for_byte(self, storage: Path) -> None:
        spec = StoreSpec("flat_70000x1", (70_000,), SPEC.identity)
        store = self.open_store(storage, spec)
        assert store.dump(outgoing([1], spec)) == [DONE]
        assert_loads(store, [1])
        store.close()

    def test_a_block_far_larger_than_any_buffer_loads_byte_for_byte(self, storage: Path) -> None:
        spec = StoreSpec("large_x2", (2_500_001, 4_000_003), SPEC.identity)
        store = self.open_store(storage, spec)
        assert store.dump(outgoing([1, 2], spec)) == [DONE, DONE]
        assert_loads(store, [1, 2])
        store.close()

    def test_a_dump_leaves_the_segments_as_they_are(self, store: KVStore) -> None:
        guarded = GuardedBlock(SPEC, key_of(1), payload_of(1))
        store.dump([guarded.block])
        assert guarded.payload == payload_of(1)
        guarded.assert_guards_intact()

    def test_the_stored_form_begins_with_the_payload(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([1]))
        stored = self.raw_read(storage, SPEC, key_of(1))
        assert stored is not None
        assert stored[: SPEC.block_bytes] == payload_of(1)

    def test_lookup_answers_for_each_key_when_there_are_holes(self, store: KVStore) -> None:
        store.dump(outgoing([0, 2, 5]))
        assert store.lookup([key_of(n) for n in range(6)]) == [True, False, True, False, False, True]

    def test_a_missing_block_costs_only_itself_and_its_memory_is_not_touched(self, store: KVStore) -> None:
        store.dump(outgoing([1, 3]))
        statuses, memory = load(store, [1, 2, 3, 4])
        assert statuses == [DONE, MISSING, DONE, MISSING]
        assert [guarded.is_untouched for guarded in memory] == [False, True, False, True]
        assert memory[2].payload == payload_of(3)

    def test_a_block_that_vanishes_between_lookup_and_load_is_missing(self, store: KVStore) -> None:
        store.dump(outgoing([0, 1, 2, 3]))
        assert store.lookup([key_of(n) for n in range(4)]) == [True] * 4
        store.delete([key_of(2), key_of(3)])
        statuses, memory = load(store, [0, 1, 2, 3])
        assert statuses == [DONE, DONE, MISSING, MISSING]
        assert memory[1].payload == payload_of(1)
        assert memory[2].is_untouched

    @pytest.mark.parametrize("change", WRONG_LENGTHS.values(), ids=WRONG_LENGTHS)
    def test_a_block_of_wrong_length_is_no_hit(
        self, store: KVStore, storage: Path, change: Callable[[bytes], bytes]
    ) -> None:
        store.dump(outgoing([1, 2]))
        self.damage(storage, 1, change)
        assert store.lookup([key_of(1), key_of(2)]) == [False, True]

    @pytest.mark.parametrize("change", WRONG_LENGTHS.values(), ids=WRONG_LENGTHS)
    def test_a_dump_replaces_a_block_of_wrong_length(
        self, store: KVStore, storage: Path, change: Callable[[bytes], bytes]
    ) -> None:
        store.dump(outgoing([1]))
        self.damage(storage, 1, change)
        assert store.dump(outgoing([1])) == [DONE]
        assert_loads(store, [1])

    @pytest.mark.parametrize(
        "change", [*WRONG_LENGTHS.values(), *WRONG_BYTES.values()], ids=[*WRONG_LENGTHS, *WRONG_BYTES]
    )
    def test_a_damaged_block_costs_only_itself(
        self, store: KVStore, storage: Path, change: Callable[[bytes], bytes]
    ) -> None:
        store.dump(outgoing([0, 1, 2]))
        self.damage(storage, 1, change)
        statuses, memory = load(store, [0, 1, 2])
        assert statuses == [DONE, CORRUPT, DONE]
        assert memory[0].payload == payload_of(0)
        assert memory[2].payload == payload_of(2)

    @pytest.mark.parametrize("change", WRONG_BYTES.values(), ids=WRONG_BYTES)
    def test_a_damaged_block_is_absent_after_one_load_until_the_next_dump(
        self, store: KVStore, storage: Path, change: Callable[[bytes], bytes]
    ) -> None:
        store.dump(outgoing([1]))
        self.damage(storage, 1, change)
        load(store, [1])
        assert store.lookup([key_of(1)]) == [False]
        assert store.dump(outgoing([1])) == [DONE]
        assert_loads(store, [1])

    def test_a_block_under_another_key_is_not_loaded(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([1]))
        stored = self.raw_read(storage, SPEC, key_of(1))
        assert stored is not None
        self.raw_write(storage, SPEC, key_of(2), stored)
        assert load(store, [2])[0] == [CORRUPT]

    def test_a_block_of_another_identity_is_not_loaded_and_gives_way(
        self, store: KVStore, storage: Path
    ) -> None:
        other = self.open_store(storage, OTHER_IDENTITY)
        other.dump(outgoing([1], version=7))
        assert load(store, [1])[0] == [CORRUPT]
        assert store.dump(outgoing([1])) == [DONE]
        assert_loads(store, [1])
        other.close()

    def test_a_key_that_is_stored_already_counts_as_done_and_keeps_its_bytes(self, store: KVStore) -> None:
        store.dump(outgoing([1]))
        assert store.dump(outgoing([1, 2], version=1)) == [DONE, DONE]
        assert_loads(store, [1])

    def test_300_blocks_in_one_call_keep_their_order(self, store: KVStore) -> None:
        numbers = list(range(300))
        assert store.dump(outgoing(numbers)) == [DONE] * 300
        assert store.lookup([key_of(n) for n in numbers]) == [True] * 300
        assert_loads(store, numbers)

    def test_an_empty_batch_has_no_verdicts(self, store: KVStore) -> None:
        assert store.lookup([]) == []
        assert store.load([]) == []
        assert store.dump([]) == []
        assert store.delete([]) == []

    def test_a_key_twice_in_one_batch_gets_a_verdict_each(self, store: KVStore) -> None:
        assert store.dump(outgoing([1, 2, 1])) == [DONE] * 3
        assert store.lookup([key_of(1), key_of(1)]) == [True, True]
        assert_loads(store, [1, 2, 1])

    @pytest.mark.parametrize("sizes", [(4096, 1), (4096, 1, 904), (1, 4096, 903), (5000,)])
    def test_a_block_of_another_shape_is_refused_before_anything_is_read(
        self, store: KVStore, sizes: tuple[int, ...]
    ) -> None:
        store.dump(outgoing([1]))
        wrong = GuardedBlock(StoreSpec("x", sizes, SPEC.identity), key_of(1))
        with pytest.raises(ValueError, match="segments of"):
            store.load([incoming([1])[0].block, wrong.block])
        with pytest.raises(ValueError, match="segments of"):
            store.dump([wrong.block])
        assert wrong.is_untouched

    def test_loading_into_read_only_memory_is_refused(self, store: KVStore) -> None:
        store.dump(outgoing([1]))
        read_only = [segment.toreadonly() for segment in incoming([1])[0].block.segments]
        with pytest.raises(ValueError, match="read-only"):
            store.load([Block(key_of(1), read_only)])

    def test_delete_removes_what_is_there_and_tells(self, store: KVStore) -> None:
        store.dump(outgoing([1, 3]))
        assert store.delete([key_of(1), key_of(2)]) == [True, False]
        assert store.lookup([key_of(1), key_of(3)]) == [False, True]

    def test_scan_yields_the_stored_keys_of_its_own_identity(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([1, 2, 3]))
        store.delete([key_of(2)])
        other = self.open_store(storage, OTHER_IDENTITY)
        other.dump(outgoing([4]))
        assert sorted(store.scan()) == sorted([key_of(1), key_of(3)])
        other.close()

    def test_stats_count_blocks_and_bytes(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([1, 2]))
        store.dump(outgoing([2, 3]))
        self.damage(storage, 2, WRONG_BYTES["zeros"])
        load(store, [1, 2, 3, 4])
        store.lookup([key_of(1), key_of(4)])
        stats = store.stats()
        assert (stats.dumped, stats.dumped_bytes, stats.dump_failed) == (3, 3 * SPEC.block_bytes, 0)
        assert (stats.loaded, stats.loaded_bytes) == (2, 2 * SPEC.block_bytes)
        assert (stats.load_corrupt, stats.load_missing, stats.load_failed) == (1, 1, 0)
        assert (stats.lookup_hit, stats.lookup_missing, stats.deadlines_missed) == (1, 1, 0)

    def test_many_threads_may_use_one_store_at_once(self, store: KVStore) -> None:
        def use(worker: int) -> None:
            numbers = list(range(worker, worker + 20))  # Neighbours overlap.
            assert store.dump(outgoing(numbers)) == [DONE] * 20
            assert_loads(store, numbers)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(use, range(0, 40, 5)))

    def test_closing_twice_does_nothing(self, store: KVStore) -> None:
        store.close()
        store.close()

    def test_a_closed_store_says_so(self, store: KVStore) -> None:
        store.close()
        with pytest.raises(StoreUnavailableError):
            store.lookup([key_of(1)])
        with pytest.raises(StoreUnavailableError):
            store.load([incoming([1])[0].block])
        with pytest.raises(StoreUnavailableError):
            store.dump(outgoing([1]))
        with pytest.raises(StoreUnavailableError):
            store.delete([key_of(1)])
        with pytest.raises(StoreUnavailableError):
            store.scan()


class DurableStoreConformance(StoreConformance):
    """What a store adds whose data outlives it and is shared with other processes.

    The class is sent to other processes, so it must be importable there.
    """

    def hang(self, key: BlockKey, operation: str) -> AbstractContextManager[threading.Event]:
        """Let storage not answer in the midst of "lookup", "load" or "dump" of one block.

        The event is set once something hangs. At the end of the context storage goes on.
        """
        raise NotImplementedError

    def unfinished_files(self, storage: Path) -> list[str]:
        """Return what unfinished dumps have left behind."""
        raise NotImplementedError

    def test_blocks_are_there_after_reopening(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([1, 2]))
        store.close()
        again = self.open_store(storage, SPEC)
        assert_loads(again, [1, 2])
        again.close()

    def test_blocks_are_there_for_other_stores_at_once(self, store: KVStore, storage: Path) -> None:
        other = self.open_store(storage, SPEC)
        store.dump(outgoing([1]))
        assert other.lookup([key_of(1)]) == [True]
        assert_loads(other, [1])
        other.close()

    def test_processes_dumping_the_same_keys_end_in_one_good_block_each(
        self, store: KVStore, storage: Path
    ) -> None:
        rounds, numbers = 100, list(range(16))
        writers = [_Child(_dump_rounds, type(self), storage, rounds, numbers, version) for version in (1, 2)]
        for round_number in range(rounds):
            for writer in writers:
                writer.send(round_number)  # Both start the round together.
            for writer in writers:
                assert writer.receive() == [DONE] * len(numbers)
            in_round = [round_number * 100 + n for n in numbers]
            statuses, memory = load(store, in_round)
            assert statuses == [DONE] * len(numbers)
            for number, guarded in zip(in_round, memory, strict=True):
                assert guarded.payload in (payload_of(number, version=1), payload_of(number, version=2))
        for writer in writers:
            writer.end()
        assert self.unfinished_files(storage) == []

    def test_readers_see_whole_blocks_while_writers_replace_them(self, store: KVStore, storage: Path) -> None:
        writers = [_Child(_rewrite, type(self), storage, version) for version in (1, 2)]
        for writer in writers:
            assert writer.receive() == "writing"
        versions = [payload_of(1, version=1), payload_of(1, version=2)]
        seen: list[int] = []
        loads, deadline = 0, time.monotonic() + 60
        while loads < 500 or not seen:  # On a busy machine a writer may rest between removing and writing.
            assert time.monotonic() < deadline, "nobody writes"
            [status], [guarded] = load(store, [1])
            assert status in (DONE, MISSING)
            if status is DONE:
                seen.append(versions.index(guarded.payload))
            loads += 1
        for writer in writers:
            writer.kill()

    def test_a_writer_killed_at_any_instant_leaves_no_false_hit_and_no_orphan(self, storage: Path) -> None:
        numbers = list(range(200))
        rng = random.Random(1)  # noqa: S311 -- a repeatable choice of instants.
        for _ in range(20):
            writer = _Child(_dump_endlessly, type(self), storage, numbers)
            for _ in range(rng.randrange(1, 30)):
                writer.receive()
            writer.kill()
            store = self.open_store(storage, SPEC)
            assert self.unfinished_files(storage) == []
            found = store.lookup([key_of(n) for n in numbers])
            assert_loads(store, [n for n, is_stored in zip(numbers, found, strict=True) if is_stored])
            store.close()

    def test_a_hung_block_costs_itself_only_and_its_memory_is_left_alone_after_the_deadline(
        self, store: KVStore, storage: Path
    ) -> None:
        store.dump(outgoing([0, 1, 2, 3]))
        hurried = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        with self.hang(key_of(1), "load"):
            statuses, memory = load(hurried, [0, 1, 2, 3])
            at_return = memory[1].payload
        assert statuses == [DONE, FAILED, DONE, DONE]
        assert hurried.stats().deadlines_missed == 1
        # The hung read goes on now, and closing the last store waits until it is over.
        hurried.close()
        store.close()
        assert memory[1].payload == at_return
        assert memory[1].published == []

    def test_a_hung_lookup_is_a_miss_at_the_deadline(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing([0, 1]))
        hurried = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        with self.hang(key_of(1), "lookup"):
            assert hurried.lookup([key_of(0), key_of(1)]) == [True, False]
        hurried.close()

    def test_a_dump_that_missed_its_deadline_is_never_published(self, storage: Path) -> None:
        hurried = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        memory = GuardedBlock(SPEC, key_of(1), payload_of(1))
        with self.hang(key_of(1), "dump"):
            assert hurried.dump([memory.block, *outgoing([2])]) == [FAILED, DONE]
            memory.block.segments[0][:] = bytes(SPEC.segment_bytes[0])  # The page has a new owner.
        hurried.close()
        assert self.unfinished_files(storage) == []
        store = self.open_store(storage, SPEC)
        assert store.lookup([key_of(1), key_of(2)]) == [False, True]
        store.close()

    def test_service_returns_when_storage_does(self, store: KVStore, storage: Path) -> None:
        store.dump(outgoing(list(range(40))))
        hurried = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        with self.hang(key_of(1), "load"):
            assert load(hurried, [1] * 20)[0] == [FAILED] * 20  # More than there are workers.
            assert load(hurried, [2])[0] in ([FAILED], [DONE])  # Done, if that takes no worker.
        patient = self.open_store(storage, SPEC)
        assert_loads(patient, list(range(40)))
        hurried.close()
        patient.close()

    def test_closing_is_bounded_while_storage_hangs(self, storage: Path) -> None:
        store = self.open_store(storage, SPEC, timeout_s=HURRY_S)
        store.dump(outgoing([1]))
        with self.hang(key_of(1), "load"):
            load(store, [1])
            closing = threading.Thread(target=store.close)
            closing.start()
            closing.join(timeout=15)
            assert not closing.is_alive()

    def test_closing_sends_waiting_callers_home(self, storage: Path) -> None:
        store = self.open_store(storage, SPEC, timeout_s=60)
        store.dump(outgoing([1]))
        with self.hang(key_of(1), "load") as hanging, ThreadPoolExecutor(1) as caller:
            waiting = caller.submit(store.load, [incoming([1])[0].block])
            assert hanging.wait(30)
            store.close()
            assert waiting.result(timeout=15) == [FAILED]


_Store = type[DurableStoreConformance]


class _Child:
    """Another process with a pipe to it."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload([__name__])

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._ours, theirs = self._context.Pipe()
        self._process = self._context.Process(target=target, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: object) -> None:
        self._ours.send(message)

    def receive(self) -> object:
        assert self._ours.poll(60), "the other process says nothing"
        return self._ours.recv()

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def end(self) -> None:
        self._process.join(60)
        assert self._process.exitcode == 0


def _dump_rounds(
    pipe: Connection, kind: _Store, storage: Path, rounds: int, numbers: list[int], version: int
) -> None:
    store = kind().open_store(storage, SPEC)
    for _ in range(rounds):
        base = pipe.recv() * 100
        pipe.send(store.dump(outgoing([base + n for n in numbers], version=version)))
    store.close()


def _rewrite(pipe: Connection, kind: _Store, storage: Path, version: int) -> None:
    store = kind().open_store(storage, SPEC)
    store.dump(outgoing([1], version=version))
    pipe.send("writing")
    while True:
        store.delete([key_of(1)])
        store.dump(outgoing([1], version=version))


def _dump_endlessly(pipe: Connection, kind: _Store, storage: Path, numbers: list[int]) -> None:
    store = kind().open_store(storage, SPEC)
    while True:
        for start in range(0, len(numbers), 20):
            store.dump(outgoing(numbers[start : start + 20]))
            pipe.send("dumped")
        store.delete([key_of(n) for n in numbers])
