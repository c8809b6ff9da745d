# SPDX-License-Identifier: MIT
"""SGLang's own file backend is asked the same questions and must give the same answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer

from ucm.testing.host_pools import MambaModel, SwaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_pages

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.testing.host_pools import HostPools

    from .conftest import Attach, MakeConfig

PAGES = 8


@pytest.fixture
def file_backend(storage_config: MakeConfig, tmp_path: Path) -> HiCacheFile:
    return HiCacheFile(storage_config(extra_config={"file_storage_path": str(tmp_path / "file")}))


@pytest.mark.parametrize("seed", range(25))
def test_a_hit_query_has_the_same_answer(attach: Attach, file_backend: HiCacheFile, seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311 -- Not for secrets.
    pools = host_pools(SwaModel(), page_tokens=16, pages=PAGES)
    backend = attach(pools)
    keys = [f"h{page}" for page in range(PAGES)]
    file_backend.registered_pools = {PoolName.SWA: pools["swa"]}
    kv = list(range(choose.choice([0, PAGES // 2, PAGES, PAGES])))
    swa = [page for page in range(PAGES) if choose.random() < 0.7]
    window, policy = choose.choice([1, 2, 3, 99]), choose.choice(list(PoolHitPolicy)[:2])

    for store in (backend, file_backend):
        move = PoolTransfer(
            name=PoolName.SWA,
            keys=[keys[page] for page in swa],
            host_indices=page_indices(pools["swa"], swa),
        )
        assert store.batch_set_v2([move]) == {"swa": [True] * len(swa)}
        for page in kv:
            assert store.set(keys[page], pools["kv"].get_data_page(page * 16))
    query = PoolTransfer(name=PoolName.SWA, keys=["__placeholder__"] * window, hit_policy=policy)
    ours, theirs = (store.batch_exists_v2(keys, [query]) for store in (backend, file_backend))

    assert (ours.kv_hit_pages, ours.restorable_prefix_pages) == (
        theirs.kv_hit_pages,
        theirs.restorable_prefix_pages,
    )
    # SGLang leaves out pools that have nothing.
    assert {name: pages for name, pages in ours.extra_pool_hit_pages.items() if pages} == (
        theirs.extra_pool_hit_pages
    )


@pytest.mark.parametrize("pool", ["kv", "mamba"])
def test_a_restored_page_is_the_same(attach: Attach, file_backend: HiCacheFile, pool: str) -> None:
    def restore(store: HiCacheFile, pools: HostPools) -> list[bytes]:
        source, target = (page_indices(pools[pool], pages) for pages in ([0, 1], [4, 5]))
        fill_random(pools[pool], seed=7)
        move = PoolTransfer(name=PoolName(pool), keys=["a", "b"], host_indices=source)
        assert store.batch_set_v2([move]) == {pool: [True, True]}
        move.host_indices = target
        assert store.batch_get_v2([move]) == {pool: [True, True]}
        return read_pages(pools[pool])

    pools, others = host_pools(MambaModel()), host_pools(MambaModel())
    file_backend.registered_pools = {PoolName(pool): others[pool]}

    assert restore(attach(pools), pools) == restore(file_backend, others)
