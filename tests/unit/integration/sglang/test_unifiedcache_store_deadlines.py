# SPDX-License-Identifier: MIT
"""Every call of SGLang's contract while the file system has stopped: each returns at its deadline."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from ucm.store.errors import StoreUnavailableError
from ucm.testing.fuse_mount import FaultyMount, faulty_mount
from ucm.testing.host_pools import HostPools, MambaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore

    from .conftest import Attach

KEYS = ["key-a", "key-b", "key-c"]
DEADLINE_S = 1.0
# What a busy machine may add. Ending the threads of an engine takes two seconds at most.
SLACK_S = 5.0
CLOSE_S = 2.0

# sglang #40312, #35181


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    with faulty_mount(tmp_path / "mount") as mount:
        yield mount


@pytest.fixture
def pools() -> HostPools:
    pools = host_pools(MambaModel())
    fill_random(pools.anchor)
    fill_random(pools["mamba"])
    return pools


def extra_config(mount: FaultyMount, deadline_s: float = DEADLINE_S) -> dict[str, object]:
    timeouts = dict.fromkeys(("load_timeout_s", "dump_timeout_s", "lookup_timeout_s"), deadline_s)
    return {"storage_backends": str(mount.path / "kv"), **timeouts}


def mamba(pools: HostPools, pages: list[int]) -> PoolTransfer:
    return PoolTransfer(name=PoolName.MAMBA, keys=KEYS, host_indices=page_indices(pools["mamba"], pages))


def query(backend: UnifiedCacheStore, policy: PoolHitPolicy) -> int:
    transfer = PoolTransfer(name=PoolName.MAMBA, keys=["_"], hit_policy=policy)
    return int(backend.batch_exists_v2(KEYS, [transfer]).kv_hit_pages)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            lambda backend, pools: backend.batch_set_v1(["x", "y"], page_indices(pools["kv"], [4, 5])),
            [False] * 2,
        ),
        (
            lambda backend, pools: backend.batch_get_v1(KEYS, page_indices(pools["kv"], [4, 5, 6])),
            [False] * 3,
        ),
        (lambda backend, _pools: backend.batch_exists(KEYS), 0),
        (lambda backend, _pools: backend.exists(KEYS[0]), False),
        (lambda backend, pools: backend.batch_get_v2([mamba(pools, [4, 5, 6])]), {"mamba": [False] * 3}),
        (lambda backend, pools: backend.batch_set_v2([mamba(pools, [4, 5, 6])]), {"mamba": [False] * 3}),
        (lambda backend, _pools: query(backend, PoolHitPolicy.ALL_PAGES), 0),
        (lambda backend, _pools: query(backend, PoolHitPolicy.TRAILING_PAGES), 0),
        (lambda backend, _pools: backend.batch_get(KEYS), [None] * 3),
        (lambda backend, pools: backend.batch_set(["x"], [pools["kv"].get_data_page(0)]), False),
        (lambda backend, _pools: backend.clear(), False),
        (lambda backend, _pools: backend.get_stats(), None),
    ],
    ids=[
        "batch_set_v1",
        "batch_get_v1",
        "batch_exists",
        "exists",
        "batch_get_v2",
        "batch_set_v2",
        "batch_exists_v2, all pages",
        "batch_exists_v2, trailing pages",
        "batch_get",
        "batch_set",
        "clear",
        "get_stats",
    ],
)
def test_a_call_returns_at_its_deadline_and_touches_no_page_afterwards(
    attach: Attach,
    mount: FaultyMount,
    pools: HostPools,
    call: Callable[[UnifiedCacheStore, HostPools], object],
    answer: object,
) -> None:
    backend = attach(pools, extra_config=extra_config(mount))
    assert backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2])) == [True] * 3
    assert backend.batch_set_v2([mamba(pools, [0, 1, 2])]) == {"mamba": [True] * 3}

    mount.stop()
    start = time.monotonic()
    assert call(backend, pools) == answer
    assert time.monotonic() - start < DEADLINE_S + SLACK_S
    at_return = read_pages(pools["kv"]), read_pages(pools["mamba"])
    mount.resume()
    backend.close()  # Waits for the workers, which go on now.

    assert (read_pages(pools["kv"]), read_pages(pools["mamba"])) == at_return
    assert pools.guards.intact()


@pytest.mark.parametrize("verb", ["set", "get"])
def test_a_pool_whose_storage_hangs_costs_no_other_pool_of_the_batch(
    attach: Attach, mount: FaultyMount, pools: HostPools, verb: str
) -> None:
    # Long enough for the pool that does not hang, on a busy machine too.
    backend = attach(pools, extra_config=extra_config(mount, 3 * DEADLINE_S))
    backend.register_mem_host_pool_v2(pools["kv"], PoolName.DRAFT)
    keys = [f"key-{n}" for n in range(8)]  # As many as there are threads.
    moves = [
        PoolTransfer(name=name, keys=keys, host_indices=page_indices(pools[pool], list(range(8))))
        for name, pool in ((PoolName.MAMBA, "mamba"), (PoolName.DRAFT, "kv"))
    ]
    if verb == "get":
        assert backend.batch_set_v2(moves) == {"mamba": [True] * 8, "draft": [True] * 8}
    for operation in ("read", "create", "write"):
        mount.hang(operation, "/sglang_v2/draft")  # Its pages are the larger ones, which begin.
    move = backend.batch_set_v2 if verb == "set" else backend.batch_get_v2
    assert move(moves) == {"mamba": [True] * 8, "draft": [False] * 8}
    mount.heal()


def test_hit_queries_and_loads_do_not_queue_behind_writes_that_hang(
    attach: Attach, mount: FaultyMount, pools: HostPools
) -> None:
    patient = {**extra_config(mount, 10 * DEADLINE_S), "dump_timeout_s": 60 * DEADLINE_S}
    backend = attach(pools, extra_config=patient)
    assert backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2])) == [True] * 3
    new = [f"new-{n}" for n in range(8)]  # As many as there are threads.
    mount.hang("write")
    with ThreadPoolExecutor(1) as backup:
        writing = backup.submit(backend.batch_set_v1, new, page_indices(pools["kv"], list(range(8))))
        while backend.batch_exists(new) == 0 and not list((mount.path / "kv/.tmp").iterdir()):
            pass  # Until writes hang.
        for _ in range(20):
            assert backend.batch_exists(KEYS) == 3
            assert backend.batch_get_v1(KEYS, page_indices(pools["kv"], [8, 9, 10])) == [True] * 3
        assert not writing.done()
        mount.heal()
        assert writing.result() == [True] * 8
    assert read_pages(pools["kv"], [8, 9, 10]) == read_pages(pools["kv"], [0, 1, 2])


@pytest.mark.parametrize("options", [{}, {"capacity_bytes": "1GB"}], ids=["plain", "with a capacity"])
def test_closing_is_bounded(
    attach: Attach, mount: FaultyMount, pools: HostPools, options: dict[str, object]
) -> None:
    backend = attach(pools, extra_config={**extra_config(mount), **options})
    backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
    mount.stop()
    backend.batch_get_v1(KEYS, page_indices(pools["kv"], [4, 5, 6]))
    start = time.monotonic()
    backend.close()
    # What looks after the capacity takes as long again.
    assert time.monotonic() - start < (2 if options else 1) * CLOSE_S + SLACK_S
    mount.resume()


def test_attaching_is_refused_at_the_deadline(attach: Attach, mount: FaultyMount, pools: HostPools) -> None:
    mount.stop()
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="no answer within 1 s"):
        attach(pools, extra_config=extra_config(mount))
    assert time.monotonic() - start < DEADLINE_S + CLOSE_S + SLACK_S
    mount.resume()
