# SPDX-License-Identifier: MIT
"""What an evictor removes from a storage root, and what it leaves alone: real files, aged by their times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from ucm.store import StoreSpec
from ucm.store.options import Capacity
from ucm.store.posix.capacity import evictor, uses
from ucm.store.posix.capacity.evictor import Evictor, Run
from ucm.store.posix.capacity.index import BlockIndex, Record
from ucm.store.posix.capacity.uses import DIRECTORY, MINUTE_NS, UseLog, publish
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.layout import BlockLayout
from ucm.store.posix.store import PosixStore
from ucm.testing.aged_blocks import age, dump_aged
from ucm.testing.posix_faults import block_path
from ucm.testing.store_conformance import SPEC, key_of, outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# 64 bytes of footer make them whole pages: what they take is what they say.
BLOCK_BYTES = 8192
KV = StoreSpec("", (BLOCK_BYTES - 64,), SPEC.identity)
SWA = StoreSpec("sglang_v2/swa_8128x1", (BLOCK_BYTES - 64,), SPEC.identity)


class Cache:
    """Two pools' stores on one root."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        self.kv, self.swa = (PosixStore(spec, PosixStoreConfig((str(storage),))) for spec in (KV, SWA))

    def fill(self, minutes: int, pages: int = 1) -> None:
        """Store pages of both pools, some in each of the last so many minutes; page 0 is the oldest."""
        for minute in range(minutes):
            numbers = range(minute * pages, (minute + 1) * pages)
            for store in (self.kv, self.swa):
                dump_aged(store, self.storage, numbers, minutes_ago=minutes - minute + 2)

    def stored(self, pages: int) -> list[tuple[bool, bool]]:
        """Tell of each page whether its blocks are stored."""
        keys = [key_of(number) for number in range(pages)]
        return list(zip(self.kv.lookup(keys), self.swa.lookup(keys), strict=True))

    def evictor(self, blocks: float) -> Evictor:
        """Return an evictor that allows for so many blocks."""
        return Evictor(str(self.storage), Capacity(int(blocks * BLOCK_BYTES)))

    def evict(self, blocks: float) -> Run | None:
        """Let an evictor of its own look once."""
        return self.evictor(blocks).step()

    def tell(self, spec: StoreSpec, told: Callable[[UseLog], None]) -> None:
        """Publish what a store of another process would."""
        layout = BlockLayout([str(self.storage)], spec.namespace)
        log = UseLog(layout, spec.namespace, BLOCK_BYTES, lambda _bytes: None)
        told(log)
        publish([str(self.storage)], [log])


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path)
    yield cache
    cache.kv.close()
    cache.swa.close()


BOTH, NONE = (True, True), (False, False)


# What goes, and in which order.


def test_what_was_not_used_for_longest_goes_first_whatever_pool_it_is_of(cache: Cache) -> None:
    cache.fill(minutes=10)
    run = cache.evict(blocks=19)
    assert run is not None
    # Below 95% of 19 blocks are 18.
    assert cache.stored(10) == [NONE] + [BOTH] * 9
    assert run.blocks == {"": 1, SWA.namespace: 1}
    assert run.disk_bytes == {"": BLOCK_BYTES, SWA.namespace: BLOCK_BYTES}
    assert run.left_bytes == 18 * BLOCK_BYTES


def test_nothing_goes_while_there_is_room(cache: Cache) -> None:
    cache.fill(minutes=10)
    assert cache.evict(blocks=20) is None
    assert cache.stored(10) == [BOTH] * 10


def test_what_was_used_in_one_minute_goes_together(cache: Cache) -> None:
    cache.fill(minutes=20, pages=4)
    cache.evict(blocks=159)
    # 151 would be few enough, but 152 end a minute.
    assert cache.stored(80) == [NONE] * 8 + [BOTH] * 72


def test_a_minute_that_holds_too_much_is_taken_in_part_oldest_first(cache: Cache) -> None:
    cache.fill(minutes=1, pages=100)
    order = list(range(100))
    for number in order:
        for spec in (KV, SWA):
            path = block_path(cache.storage, spec, key_of(number))
            second = path.stat().st_mtime // 60 * 60 + number / 2
            os.utime(path, (second, second))
    cache.evict(blocks=180)
    # 90% of 180 blocks.
    assert cache.stored(100) == [NONE] * 19 + [BOTH] * 81


def test_eviction_goes_on_from_where_it_is_when_there_is_more(cache: Cache) -> None:
    cache.fill(minutes=10)
    one = cache.evictor(blocks=19)
    one.step()
    for store in (cache.kv, cache.swa):
        store.dump(outgoing([10, 11], store.spec))
        cache.tell(store.spec, lambda log: log.written([key_of(10), key_of(11)]))
    one.step()
    assert cache.stored(12) == [NONE] * 3 + [BOTH] * 9


def test_what_somebody_else_wrote_without_telling_is_found_by_the_next_scan(cache: Cache) -> None:
    cache.fill(minutes=10)
    one = cache.evictor(blocks=21.2)
    assert one.step() is None
    dump_aged(cache.kv, cache.storage, [100, 101], minutes_ago=30)
    with mock.patch.object(time, "monotonic", return_value=time.monotonic() + 3600):
        assert one.step() is not None
    assert cache.kv.lookup([key_of(100), key_of(101)]) == [False, False]
    assert cache.stored(10) == [BOTH] * 10


def test_a_block_told_of_after_the_scan_found_it_counts_once(cache: Cache) -> None:
    cache.kv.dump(outgoing(range(10), KV))
    one = cache.evictor(blocks=100)
    one.step()
    cache.tell(KV, lambda log: log.written([key_of(number) for number in range(10)]))
    one.step()
    assert one.disk_bytes == 10 * BLOCK_BYTES


# What counts as use.


def test_a_used_block_stays_in_every_pool_it_was_used_in(cache: Cache) -> None:
    cache.fill(minutes=10)
    for spec in (KV, SWA):
        cache.tell(spec, lambda log: log.used([key_of(0)]))
    cache.evict(blocks=19)
    assert cache.stored(10) == [BOTH, NONE] + [BOTH] * 8


def test_a_use_after_the_scan_counts(cache: Cache) -> None:
    cache.fill(minutes=10)
    one = cache.evictor(blocks=19.99)
    with mock.patch.object(Evictor, "limit_bytes", return_value=10**9):
        one.step()
    for spec in (KV, SWA):
        cache.tell(spec, lambda log: log.used([key_of(0)]))
    one.step()
    assert cache.stored(10) == [BOTH, NONE] + [BOTH] * 8


def test_a_block_that_turns_out_younger_than_the_scan_knew_waits_for_its_turn(cache: Cache) -> None:
    cache.fill(minutes=10)
    one = cache.evictor(blocks=19)
    with mock.patch.object(Evictor, "limit_bytes", return_value=10**9):
        one.step()
    for spec in (KV, SWA):
        age(cache.storage, spec, [0], minutes_ago=5)
    one.step()
    assert cache.stored(10) == [BOTH, NONE] + [BOTH] * 8


def test_uses_of_one_minute_are_of_one_age_whoever_tells_of_them_and_when(cache: Cache) -> None:
    cache.fill(minutes=2)
    began = time.time_ns() // MINUTE_NS * MINUTE_NS
    with mock.patch.object(time, "time_ns", return_value=began + 1):
        cache.tell(KV, lambda log: log.used([key_of(0)]))
    with mock.patch.object(time, "time_ns", return_value=began + MINUTE_NS - 1):
        cache.tell(SWA, lambda log: log.used([key_of(0)]))
    cache.evict(blocks=100)
    times = {block_path(cache.storage, spec, key_of(0)).stat().st_mtime_ns for spec in (KV, SWA)}
    assert times == {began + MINUTE_NS - 1}


def test_a_use_never_makes_a_block_older(cache: Cache) -> None:
    cache.kv.dump(outgoing([1], KV))
    path = block_path(cache.storage, KV, key_of(1))
    later = time.time_ns() + 90 * 10**9
    os.utime(path, ns=(later, later))
    cache.tell(KV, lambda log: log.used([key_of(1)]))
    cache.evict(blocks=100)
    assert path.stat().st_mtime_ns == later


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"written": {"": 5}, "used": {}}', b'{"written": {"": [1, ["zz"]]}, "used": {}}'],
)
def test_a_damaged_note_of_uses_is_dropped(cache: Cache, damage: bytes) -> None:
    cache.fill(minutes=10)
    note = cache.storage / DIRECTORY / "broken.uses"
    note.parent.mkdir(parents=True)
    note.write_bytes(damage)
    cache.evict(blocks=19)
    assert not note.exists()
    assert cache.stored(10) == [NONE] + [BOTH] * 9


def test_notes_that_nobody_reads_do_not_pile_up(cache: Cache) -> None:
    with mock.patch.object(uses, "_MAX_FILES", 5):
        for number in range(20):
            cache.tell(KV, partial(UseLog.used, keys=[key_of(number)]))
    assert len(list((cache.storage / DIRECTORY).glob("*.uses"))) < 8


# What was written just now.


def test_what_was_written_just_now_stays_even_if_it_is_too_much(cache: Cache) -> None:
    cache.kv.dump(outgoing(range(20), KV))
    dump_aged(cache.swa, cache.storage, range(5), minutes_ago=10)
    run = cache.evict(blocks=10)
    assert run is not None
    assert cache.stored(20) == [(True, False)] * 20
    assert run.left_bytes > run.limit_bytes


def test_of_a_minute_that_is_just_ending_only_the_older_part_goes(cache: Cache) -> None:
    minute = time.time() // 60 * 60 - 120
    cache.kv.dump(outgoing(range(20), KV))
    for number in range(20):
        second = minute + (50 if number < 10 else 10)
        os.utime(block_path(cache.storage, KV, key_of(number)), (second, second))
    with mock.patch.object(evictor, "_FRESH_S", time.time() - minute - 30):
        cache.evict(blocks=2)
    assert cache.kv.lookup([key_of(number) for number in range(20)]) == [True] * 10 + [False] * 10


class SetClock:
    """The file system's clock, ahead of the real one by what a test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._utime = os.utime

    def utime(self, path: str, *args: object, **kwargs: object) -> None:
        if str(path).endswith("/clock"):
            now = time.time() + self.ahead_s
            self._utime(path, (now, now))
        else:
            self._utime(path, *args, **kwargs)  # type: ignore[arg-type]

    def stamp(self, storage: Path, spec: StoreSpec, numbers: range) -> None:
        """Give blocks the time they would have been written at."""
        now = time.time() + self.ahead_s
        for number in numbers:
            self._utime(block_path(storage, spec, key_of(number)), (now, now))


@pytest.fixture
def clock() -> Iterator[SetClock]:
    clock = SetClock()
    with mock.patch.object(os, "utime", clock.utime):
        yield clock


@pytest.mark.parametrize("jump_s", [86400.0 * 365, 300.0, -300.0, -86400.0 * 365])
def test_a_clock_that_jumps_does_not_evict_what_was_written_just_before(
    cache: Cache, clock: SetClock, jump_s: float
) -> None:
    one = cache.evictor(blocks=15)
    one.step()
    cache.kv.dump(outgoing(range(20), KV))
    clock.stamp(cache.storage, KV, range(20))
    cache.tell(KV, lambda log: log.written([key_of(number) for number in range(20)]))
    clock.ahead_s = jump_s
    one.step()
    assert cache.kv.lookup([key_of(number) for number in range(20)]) == [True] * 20


def test_blocks_from_the_future_are_taken_for_fresh_and_then_age(cache: Cache) -> None:
    cache.fill(minutes=10)
    age(cache.storage, KV, [3], minutes_ago=-60 * 24 * 365)
    before = time.time()
    cache.evict(blocks=19)
    assert abs(block_path(cache.storage, KV, key_of(3)).stat().st_mtime - before) < 60
    assert cache.stored(10)[3] == BOTH


# What cannot be removed, or is no block.


@pytest.fixture
def undeletable() -> Iterator[Callable[[Path], None]]:
    """Make a file undeletable, for root by its attribute, for others by its directory's mode."""
    undo: list[Callable[[], object]] = []

    def protect(path: Path) -> None:
        if os.geteuid():
            path.parent.chmod(0o500)
            undo.append(lambda: path.parent.chmod(0o700))
            return
        command = [shutil.which("chattr") or "false", "+i", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603
            pytest.skip("root can delete every file of this file system")
        undo.append(lambda: subprocess.run([command[0], "-i", str(path)], check=True))  # noqa: S603

    yield protect
    for step in undo:
        step()


def test_an_undeletable_block_does_not_stop_eviction(
    cache: Cache, undeletable: Callable[[Path], None]
) -> None:
    cache.fill(minutes=10)
    path = block_path(cache.storage, KV, key_of(0))
    undeletable(path)
    one = cache.evictor(blocks=19)
    run = one.step()
    assert run is not None
    assert (run.failed, run.problem) == (1, f"{path}: {os.strerror(1 if os.geteuid() == 0 else 13)}")
    # It still takes its space, so that another block has to go.
    assert cache.stored(10) == [(True, False), NONE] + [BOTH] * 8
    assert run.left_bytes == 17 * BLOCK_BYTES
    assert one.step() is None


def test_what_is_gone_already_is_no_problem(cache: Cache) -> None:
    cache.fill(minutes=10)
    one = cache.evictor(blocks=19)
    with mock.patch.object(Evictor, "limit_bytes", return_value=10**9):
        one.step()
    cache.kv.delete([key_of(0)])
    shutil.rmtree(block_path(cache.storage, SWA, key_of(0)).parent)
    run = one.step()
    assert run is not None
    assert run.failed == 0
    assert cache.stored(10)[1:] == [BOTH] * 9


def test_only_blocks_are_touched(cache: Cache) -> None:
    cache.fill(minutes=10)
    others = [
        cache.storage / "notes.txt",
        cache.storage / "sglang_v2" / "readme",
        cache.storage / "abc" / "not a block",
        cache.storage / "abc" / ("d" * 32),  # In the wrong shard.
        cache.storage / ".ucm" / "identity" / "swa.json",
        cache.storage / ".hidden" / "abc" / ("abc" + "0" * 29),
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(BLOCK_BYTES))
        os.utime(path, (0, 0))
    (cache.storage / "abc" / ("abc" + "1" * 29)).mkdir()
    outside = cache.storage.parent / f"{cache.storage.name}-outside"
    (outside / "abc").mkdir(parents=True)
    linked = outside / "abc" / ("abc" + "2" * 29)
    linked.write_bytes(bytes(BLOCK_BYTES))
    os.utime(linked, (0, 0))
    (cache.storage / "linked").symlink_to(outside)
    cache.evict(blocks=1)
    assert cache.stored(10) == [NONE] * 10
    assert all(path.exists() for path in [*others, linked])


def test_a_scan_removes_what_dead_writers_left(cache: Cache) -> None:
    orphan = cache.storage / SWA.namespace / ".tmp" / ("0" * 32 + ".elsewhere-1-2-3")
    cache.swa.dump(outgoing([1], SWA))
    orphan.write_bytes(b"half")
    os.utime(orphan, (0, 0))
    cache.evict(blocks=100)
    assert not orphan.exists()


# How much there may be.


@pytest.mark.parametrize("answer", [(0, 0), (1000, 1000)])
def test_a_file_system_that_does_not_tell_its_size_evicts_by_bytes_only(
    cache: Cache, answer: tuple[int, int]
) -> None:
    cache.fill(minutes=10)
    blocks, free = answer
    found = mock.Mock(f_blocks=blocks, f_bavail=free, f_frsize=10**6)
    with mock.patch.object(os, "statvfs", return_value=found):
        assert (Evictor(str(cache.storage), Capacity(share=0.5)).step() is None) is True
        assert cache.evict(blocks=19) is not None


def in_small_tmpfs(storage: Path, size: str, code: str) -> str:
    """Run Python code below a tmpfs of that size, mounted for it alone."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size={size} small {storage}"
    namespace = [str(unshare), "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not unshare or subprocess.run([*namespace, mount], capture_output=True, check=False).returncode:  # noqa: S603
        pytest.skip("needs a user namespace to mount a small tmpfs in")
    done = subprocess.run(  # noqa: S603 -- our own code in a namespace of its own.
        [*namespace, f'{mount} && exec {sys.executable} -c "$CODE" {storage}'],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CODE": textwrap.dedent(code)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FILL_AND_EVICT = """
import sys
from pathlib import Path
from ucm.store.options import Capacity
from ucm.store.posix.capacity.evictor import Evictor
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.aged_blocks import dump_aged
from ucm.testing.store_conformance import *
spec = StoreSpec("x1", (36_800,), SPEC.identity)  # 9 pages with the footer
store = PosixStore(spec, PosixStoreConfig((sys.argv[1],)))
def fill(first, last):
    for number in range(first, last):
        dump_aged(store, Path(sys.argv[1]), [number], 200 - number)
def stored():
    return sum(store.lookup([key_of(number) for number in range(100)]))
"""


def test_a_share_is_of_the_whole_file_system(tmp_path: Path) -> None:
    said = in_small_tmpfs(
        tmp_path,
        "2M",
        FILL_AND_EVICT
        + """
fill(0, 40)
Evictor(sys.argv[1], Capacity(share=0.5)).step()
print(stored(), store.lookup([key_of(number) for number in range(40)]).index(True))
""",
    )
    # 95% of a MiB hold 27 blocks of 36,864 bytes.
    assert said == "27 13"


def test_a_full_file_system_gives_way_whatever_the_capacity_is_and_dumps_succeed_again(
    tmp_path: Path,
) -> None:
    said = in_small_tmpfs(
        tmp_path,
        "2M",
        FILL_AND_EVICT
        + """
fill(0, 40)
Path(sys.argv[1], "others").write_bytes(bytes(400_000))
try:
    fill(40, 100)
except FileNotFoundError:
    pass  # The block that did not fit.
full = stored()
Evictor(sys.argv[1], Capacity(10**12)).step()
print(full > stored() >= 0.85 * full, store.dump(outgoing([1000], spec))[0].name)
""",
    )
    assert said == "True DONE"


def test_a_million_blocks_need_25_megabytes() -> None:
    index = BlockIndex()
    for number in range(20_000):
        index.add(number % 7, Record("sglang_v2/pool_1x1", key_of(number), BLOCK_BYTES))
    held = sum(sys.getsizeof(records) for records in index._minutes.values())
    assert len(index) == 20_000
    assert held < 25 * 20_000
    assert index.disk_bytes == 20_000 * BLOCK_BYTES
