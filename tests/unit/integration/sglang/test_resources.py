# SPDX-License-Identifier: MIT
"""Threads, descriptors and memory: what a server pays does not grow with what it does."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.store.posix.engine import THREAD_NAME_PREFIX, SharedEngine, Urgency
from ucm.testing.host_pools import MambaModel, MhaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Attach, MakeConfig

SIDECARS = list(PoolName)[1:8]
PAGES = 10
ROUNDS = 125
MOST_DESCRIPTORS = 256
MOST_GROWTH_BYTES = 8 * 1024 * 1024


class Resources(NamedTuple):
    """What this process has; `threads` without those for I/O, of which more begin when storage is slow."""

    threads: int
    descriptors: int
    resident_bytes: int


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME_PREFIX)]


def start_all_io_threads() -> int:
    """Return how many there may be."""
    engine = SharedEngine.acquire(1)
    engine.run(lambda *_: None, 100, urgency=Urgency.READ, timeout_s=60.0, moved_bytes=1 << 40)
    SharedEngine.release()
    assert len(engine._threads) == engine._limit
    return engine._limit


def resources() -> Resources:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    threads = threading.active_count() - len(io_threads())
    return Resources(threads, sum(1 for _ in Path("/proc/self/fd").iterdir()), resident)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """As after `ulimit -n 256`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resources().descriptors > MOST_DESCRIPTORS - 32:
        pytest.skip("the tests before this one hold too many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# sglang #21078
@pytest.mark.usefixtures("few_descriptors")
def test_10000_pages_in_8_pools_leave_threads_descriptors_and_memory_flat(attach: Attach) -> None:
    pools = host_pools(MhaModel(layers=1, heads=1, head_dim=8))
    fill_random(pools.anchor)
    backend = attach(pools)
    for name in SIDECARS:
        backend.register_mem_host_pool_v2(pools.anchor, name)
    indices = page_indices(pools.anchor, list(range(PAGES)))
    most_io_threads = start_all_io_threads()
    early = None
    for number in range(ROUNDS):
        keys = [f"{number}-{page}" for page in range(PAGES)]
        moves = [PoolTransfer(name=name, keys=keys, host_indices=indices) for name in SIDECARS]
        every_page = {name: [True] * PAGES for name in SIDECARS}
        assert backend.batch_set_v2(moves) == every_page
        assert backend.batch_set_v1(keys, indices) == [True] * PAGES
        assert backend.batch_exists_v2(keys, moves).kv_hit_pages == PAGES
        assert backend.batch_get_v1(keys, indices) == [True] * PAGES
        assert backend.batch_get_v2(moves) == every_page
        if number == ROUNDS // 5:
            early = resources()
    late = resources()

    assert ROUNDS * PAGES * (1 + len(SIDECARS)) == 10_000
    assert early is not None
    assert late.threads <= early.threads
    assert len(io_threads()) <= most_io_threads
    assert late.descriptors <= early.descriptors
    assert late.resident_bytes - early.resident_bytes < MOST_GROWTH_BYTES


# sglang #21078
def test_ten_cycles_of_attaching_and_detaching_end_where_they_began(storage_config: MakeConfig) -> None:
    pools = host_pools(MambaModel())
    fill_random(pools.anchor)
    indices = page_indices(pools.anchor, [0, 1])
    before = resources()
    for number in range(10):
        backend = UnifiedCacheStore(storage_config(), pools.anchor)
        for entry in pools.group.entries:
            backend.register_mem_host_pool_v2(entry.host_pool, PoolName(entry.name))
        keys = [f"{number}-{page}" for page in range(2)]
        assert backend.batch_set_v1(keys, indices) == [True] * 2
        assert backend.batch_get_v1(keys, indices) == [True] * 2
        backend.close()
        del backend  # As SGLang does.
    after = resources()

    for thread in io_threads():
        thread.join(timeout=30)  # Asked to end already; a busy machine may need a moment.
        assert not thread.is_alive()
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors
