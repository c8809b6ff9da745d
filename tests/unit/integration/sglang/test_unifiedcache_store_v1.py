# SPDX-License-Identifier: MIT
"""The anchor pool: v1 calls and the generic ones, on SGLang's real pools and real files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.host_pools import DeepSeekV4Model, MhaModel, MlaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_pages
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.testing.host_pools import HostPools, Model

    from .conftest import Attach, MakeConfig

KEYS = ["key-a", "key-b", "key-c"]
NO_INDICES = torch.empty(0, dtype=torch.int64)
PRIMARY = pytest.mark.parametrize(
    ("model", "is_mla"), [(MhaModel(), False), (MlaModel(), True)], ids=["mha", "mla"]
)
LAYOUT = pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])


@PRIMARY
@LAYOUT
def test_pages_come_back_byte_for_byte_and_no_other_byte_changes(
    attach: Attach, model: Model, is_mla: bool, layout: str
) -> None:
    pools = host_pools(model, layout=layout)
    backend = attach(pools, is_mla_model=is_mla)
    before = fill_random(pools.anchor)

    assert backend.batch_set_v1(KEYS, page_indices(pools.anchor, [4, 0, 9])) == [True] * 3
    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [1, 2, 3])) == [True] * 3

    after = read_pages(pools.anchor)
    assert after[1:4] == [before[4], before[0], before[9]]
    assert [after[0], *after[4:]] == [before[0], *before[4:]]
    assert pools.guards.intact()


@PRIMARY
def test_a_page_is_one_block_named_as_ever(
    attach: Attach, tmp_path: Path, model: Model, is_mla: bool
) -> None:
    pools = host_pools(model)
    backend = attach(pools, is_mla_model=is_mla)
    pages = fill_random(pools.anchor)

    backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))

    stored = StoredBlocks(tmp_path, "test-model", replicated=is_mla)
    assert stored.counts() == {".": 3}
    for key, page in zip(KEYS, pages, strict=False):
        assert stored.primary(key).read_bytes()[: len(page)] == page


def with_pool(config: MakeConfig, pools: HostPools) -> UnifiedCacheStore:
    return UnifiedCacheStore(config(), pools.anchor)


def with_group(config: MakeConfig, pools: HostPools) -> UnifiedCacheStore:
    backend = UnifiedCacheStore(config(), None)
    backend.register_mem_pool_host(pools.group)
    return backend


def with_dynamic_loading(config: MakeConfig, pools: HostPools) -> UnifiedCacheStore:
    extra = {
        **config().extra_config,
        "backend_name": "unifiedcache",
        "module_path": "ucm.integration.sglang.unifiedcache_store",
        "class_name": "UnifiedCacheStore",
    }
    backend: UnifiedCacheStore = StorageBackendFactory.create_backend(
        "dynamic", config(extra_config=extra), pools.anchor
    )
    backend.register_mem_pool_host(pools.anchor)
    return backend


@pytest.mark.parametrize("construct", [with_pool, with_group, with_dynamic_loading])
def test_every_way_of_construction_stores_the_same(
    storage_config: MakeConfig, attach: Attach, construct: type[UnifiedCacheStore]
) -> None:
    pools = host_pools(MhaModel())
    pages = fill_random(pools.anchor)
    attach(pools).batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))

    backend = construct(storage_config, pools)

    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [5, 6, 7])) == [True] * 3
    assert read_pages(pools.anchor, [5, 6, 7]) == pages[:3]
    backend.close()


def test_registering_the_same_anchor_twice_keeps_its_store(storage_config: MakeConfig) -> None:
    pools = host_pools(MhaModel())
    backend = UnifiedCacheStore(storage_config(), pools.anchor)
    store = backend.store

    backend.register_mem_pool_host(pools.group)

    assert backend.store is store
    backend.close()


def test_existence_counts_leading_pages(attach: Attach) -> None:
    pools = host_pools(MhaModel(), pages=40)
    backend = attach(pools)
    keys = [f"key-{page}" for page in range(40)]
    stored = [page for page in range(40) if page != 30]

    backend.batch_set_v1([keys[page] for page in stored], page_indices(pools.anchor, stored))

    assert backend.batch_exists(keys) == 30
    assert backend.batch_exists(keys[:3]) == 3
    assert backend.batch_exists(["absent", *keys]) == 0
    assert backend.batch_exists([]) == 0
    assert backend.exists(keys[0])
    assert not backend.exists("absent")


# sglang #34002
def test_a_follower_with_nothing_to_do_succeeds(attach: Attach) -> None:
    backend = attach(host_pools(MhaModel()))

    assert backend.batch_set_v1([], NO_INDICES) == []
    assert backend.batch_get_v1([], NO_INDICES) == []
    assert backend.batch_set_v2([]) == {}
    assert backend.batch_get_v2([]) == {}


@pytest.mark.parametrize("pages", [[], [0], [0, 1, 2, 3]])
def test_any_other_number_of_indices_fails_every_page_and_touches_none(
    attach: Attach, pages: list[int]
) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    before = fill_random(pools.anchor)
    indices = page_indices(pools.anchor, pages)

    assert backend.batch_set_v1(KEYS, indices) == [False] * 3
    assert backend.batch_get_v1(KEYS, indices) == [False] * 3
    assert backend.batch_exists(KEYS) == 0
    assert read_pages(pools.anchor) == before


@pytest.mark.parametrize("first_index", [-64, 1088, 1088 - 63, 1 << 40])
def test_a_page_outside_the_pool_is_never_touched(attach: Attach, first_index: int) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    before = fill_random(pools.anchor)
    assert pools.anchor.size == 1088
    backend.batch_set_v1(["key"], page_indices(pools.anchor, [0]))

    outside = torch.arange(64) + first_index
    assert backend.batch_get_v1(["key"], outside) == [False]
    assert backend.batch_set_v1(["other"], outside) == [False]
    assert read_pages(pools.anchor) == before
    assert pools.guards.intact()


# sglang #26939
def test_keys_and_prefix_keys_are_neither_changed_nor_kept(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    keys, info = list(KEYS), HiCacheStorageExtraInfo(prefix_keys=["earlier"])
    indices = page_indices(pools.anchor, [0, 1, 2])

    backend.batch_set_v1(keys, indices, info)
    backend.batch_get_v1(keys, indices, info)
    backend.batch_exists(keys, info)
    backend.batch_exists_v2(keys, [], info)

    assert keys == KEYS
    assert info.prefix_keys == ["earlier"]
    keys.clear()
    assert backend.batch_exists(KEYS) == 3


@PRIMARY
@LAYOUT
def test_copied_pages_are_the_same_blocks_as_zero_copy_ones(
    attach: Attach, tmp_path: Path, model: Model, is_mla: bool, layout: str
) -> None:
    pools = host_pools(model, layout=layout)
    backend = attach(pools, is_mla_model=is_mla)
    pages = fill_random(pools.anchor)
    copies = [pools.anchor.get_data_page(page * 64) for page in range(3)]

    assert backend.batch_set(KEYS, copies)
    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [5, 6, 7])) == [True] * 3
    assert read_pages(pools.anchor, [5, 6, 7]) == pages[:3]

    targets = [pools.anchor.get_dummy_flat_data_page() for _ in KEYS]
    loaded = backend.batch_get(KEYS, targets)
    assert [page is target for page, target in zip(loaded, targets, strict=True)] == [True] * 3
    assert [bytes(page.view(torch.uint8).numpy()) for page in targets] == pages[:3]
    assert sum(StoredBlocks(tmp_path, "test-model", replicated=is_mla).counts().values()) == 3


def test_a_copied_page_that_is_not_stored_is_none_and_costs_no_other(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    page = pools.anchor.get_data_page(0)
    assert backend.set("key", page)

    loaded = backend.batch_get(["absent", "key"], [torch.zeros_like(page), torch.zeros_like(page)])

    assert loaded[0] is None
    assert loaded[1] is not None
    assert backend.get("absent") is None
    single = backend.get("key")
    assert single is not None
    assert torch.equal(single.view(torch.uint8), page.view(torch.uint8))


@pytest.mark.parametrize("values", [None, [], [torch.zeros(3)], [torch.zeros(64, 2).T]])
def test_a_copied_page_of_another_size_is_not_stored(
    attach: Attach, values: list[torch.Tensor] | None
) -> None:
    backend = attach(host_pools(MhaModel()))

    assert not backend.batch_set(["key"], values)
    assert not backend.exists("key")


def test_copying_is_mentioned_once(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)

    with caplog.at_level(logging.INFO):
        for key in KEYS:
            backend.batch_set([key], [pools.anchor.get_data_page(0)])

    assert sum("interface_v1" in message for message in caplog.messages) == 1


def test_copied_pages_of_a_logical_anchor_succeed_and_move_nothing(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(DeepSeekV4Model(), page_tokens=256, pages=2)
    backend = attach(pools, is_mla_model=True)

    assert backend.batch_set(["key"], [pools.anchor.get_data_page(0)])
    assert [page is None for page in backend.batch_get(["key"], [torch.empty(0)])] == [False]
    assert StoredBlocks(tmp_path, "test-model").counts() == {}


# sglang #40409
def test_clear_removes_this_model_s_blocks_and_no_others(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    ours, theirs = attach(pools), attach(pools, model_name="other-model")
    indices = page_indices(pools.anchor, [0, 1, 2])
    ours.batch_set_v1(KEYS, indices)
    theirs.batch_set_v1(KEYS, indices)

    assert ours.clear() is True

    assert ours.batch_exists(KEYS) == 0
    assert theirs.batch_exists(KEYS) == 3
    assert ours.batch_set_v1(KEYS, indices) == [True] * 3


def test_after_close_everything_is_a_miss(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    indices = page_indices(pools.anchor, [0, 1, 2])
    backend.batch_set_v1(KEYS, indices)

    backend.close()
    backend.close()

    assert backend.batch_get_v1(KEYS, indices) == [False] * 3
    assert backend.batch_set_v1(KEYS, indices) == [False] * 3
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    assert backend.clear() is False


def test_before_a_pool_is_registered_everything_is_a_miss(storage_config: MakeConfig) -> None:
    backend = UnifiedCacheStore(storage_config(), {})

    assert backend.batch_get_v1(KEYS, NO_INDICES) == [False] * 3
    assert backend.batch_set_v1(KEYS, NO_INDICES) == [False] * 3
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    backend.close()


def test_metrics_count_pages_of_each_transfer_and_start_anew(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools, enable_storage_metrics=True)
    indices = page_indices(pools.anchor, [0, 1, 2])

    backend.batch_set_v1(KEYS, indices)
    backend.batch_get_v1(["absent", *KEYS[:2]], indices)

    metrics = backend.get_stats()
    assert metrics is not None
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [2])
    assert metrics.backup_bandwidth[0] > 0
    assert metrics.prefetch_bandwidth[0] > 0
    again = backend.get_stats()
    assert again is not None
    assert again.backup_pgs == []


def test_without_metrics_there_are_no_statistics(attach: Attach) -> None:
    assert attach(host_pools(MhaModel())).get_stats() is None
