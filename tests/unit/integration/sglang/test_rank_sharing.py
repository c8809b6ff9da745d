# SPDX-License-Identifier: MIT
"""Several ranks on one directory: who shares a page, and who must not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.hicache_stack import dynamic_storage, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, MlaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_page, read_pages
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host import HostKVCache

    from ucm.testing.host_pools import HostPools

    from .conftest import Attach, MakeConfig

KEYS = ["key-a", "key-b", "key-c"]


def move(pools: HostPools, name: str, keys: list[str], pages: list[int]) -> PoolTransfer:
    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=page_indices(pools[name], pages))


# DingoCache #227, vllm #49499
def test_an_indexer_beside_replicated_kv_is_found_by_every_rank(attach: Attach) -> None:
    pools = host_pools(DsaModel())
    before = fill_random(pools["indexer"])
    writer, reader = (attach(pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))

    writer.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
    writer.batch_set_v2([move(pools, "indexer", KEYS, [0, 1, 2])])

    assert reader.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.INDEXER)]).kv_hit_pages == 3
    assert reader.batch_get_v2([move(pools, "indexer", KEYS, [4, 5, 6])]) == {"indexer": [True] * 3}
    assert read_pages(pools["indexer"], [4, 5, 6]) == before[:3]


def test_states_beside_replicated_kv_belong_to_their_rank(attach: Attach) -> None:
    pools = host_pools(MambaModel(anchor=MlaModel()))
    ranks = [attach(pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    before = fill_random(pools["mamba"])
    ranks[0].batch_set_v1(["key"], page_indices(pools["kv"], [0]))

    for rank, backend in enumerate(ranks):
        backend.batch_set_v2([move(pools, "mamba", ["key"], [rank])])
    for rank, backend in enumerate(ranks):
        backend.batch_get_v2([move(pools, "mamba", ["key"], [4 + rank])])

    assert read_pages(pools["mamba"], [4, 5]) == before[:2]


def test_a_state_of_another_rank_is_no_hit(attach: Attach) -> None:
    pools = host_pools(MambaModel(anchor=MlaModel()))
    first, second = (attach(pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))
    first.batch_set_v1(["key"], page_indices(pools["kv"], [0]))
    first.batch_set_v2([move(pools, "mamba", ["key"], [0])])
    state = PoolTransfer(name=PoolName.MAMBA, keys=["_"], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    assert first.batch_exists_v2(["key"], [state]).kv_hit_pages == 1
    assert second.batch_exists_v2(["key"], [state]).kv_hit_pages == 0


def test_states_beside_a_logical_anchor_belong_to_their_rank(attach: Attach) -> None:
    pools = host_pools(DeepSeekV4Model(), page_tokens=256, pages=2)
    states = host_pools(MambaModel())["mamba"]
    before = fill_random(states)
    ranks = [attach(pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]

    for rank, backend in enumerate(ranks):
        backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
        own = PoolTransfer(name=PoolName.MAMBA, keys=["key"], host_indices=torch.tensor([rank]))
        assert backend.batch_set_v2([own]) == {"mamba": [True]}
    for rank, backend in enumerate(ranks):
        own = PoolTransfer(name=PoolName.MAMBA, keys=["key"], host_indices=torch.tensor([4 + rank]))
        assert backend.batch_get_v2([own]) == {"mamba": [True]}

    assert read_pages(states, [4, 5]) == before[:2]


# sglang #38778
def test_eight_ranks_that_write_a_replicated_page_make_one_block(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(DeepSeekV4Model(), page_tokens=256, pages=2)
    before = fill_random(pools["deepseek_v4_c4"])
    ranks = [attach(pools, is_mla_model=True, tp_rank=rank, tp_size=8) for rank in range(8)]

    with ThreadPoolExecutor(8) as executor:
        verdicts = list(
            executor.map(lambda rank: rank.batch_set_v2([move(pools, "deepseek_v4_c4", ["key"], [0])]), ranks)
        )

    assert verdicts == [{"deepseek_v4_c4": [True]}] * 8
    (count,) = StoredBlocks(tmp_path, "test-model").counts().values()
    assert count == 1
    ranks[7].batch_get_v2([move(pools, "deepseek_v4_c4", ["key"], [1])])
    assert read_page(pools["deepseek_v4_c4"], 1) == before[0]


def test_kv_of_attention_heads_belongs_to_its_rank(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    ranks = [attach(pools, tp_rank=rank, tp_size=2) for rank in (0, 1)]

    ranks[0].batch_set_v1(["key"], page_indices(pools.anchor, [0]))

    assert [backend.batch_exists(["key"]) for backend in ranks] == [1, 0]


def test_replicated_kv_is_found_by_every_rank_and_only_if_it_is_there(attach: Attach) -> None:
    pools = host_pools(MlaModel())
    ranks = [attach(pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]

    assert [backend.batch_exists(["key"]) for backend in ranks] == [0, 0]
    ranks[0].batch_set_v1(["key"], page_indices(pools.anchor, [0]))
    assert [backend.batch_exists(["key"]) for backend in ranks] == [1, 1]


# sglang #15175, #37149, #26670
@pytest.mark.parametrize("group", ["pp", "attn_cp"])
@pytest.mark.parametrize("is_mla", [False, True])
def test_ranks_that_split_layers_or_tokens_keep_their_own_bytes(
    attach: Attach, group: str, is_mla: bool
) -> None:
    pools = host_pools(MlaModel() if is_mla else MhaModel())
    before = fill_random(pools.anchor)
    ranks = [
        attach(pools, is_mla_model=is_mla, **{f"{group}_rank": rank, f"{group}_size": 2}) for rank in (0, 1)
    ]

    for rank, backend in enumerate(ranks):
        assert backend.batch_exists(["key"]) == 0
        backend.batch_set_v1(["key"], page_indices(pools.anchor, [rank]))
    for rank, backend in enumerate(ranks):
        backend.batch_get_v1(["key"], page_indices(pools.anchor, [4 + rank]))

    assert read_pages(pools.anchor, [4, 5]) == before[:2]


# sglang #31926
def test_data_parallel_ranks_share_every_page(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    ranks = [attach(pools, dp_rank=rank) for rank in (0, 1)]

    ranks[0].batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))

    assert ranks[1].batch_exists(KEYS) == 3


def dcp_pool(rank: int) -> HostKVCache:
    """SGLang's MLA pool of one of two DCP ranks, which hold every other token of a page of 128."""
    device = MlaModel().device_pools(64, 8).kv
    with cpu_runtime(HicacheSettings(page_tokens=128), HostMemoryGuards()):
        return MLATokenToKVPoolHost(
            device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            128,
            "page_first",
            pin_memory=False,
            override_kv_cache_dim=device.kv_cache_dim,
            dcp_size=2,
            dcp_rank=rank,
            device_capacity_tokens=device.size,
            start_layer=0,
            end_layer=2,
            target_layer_num=3,
        )


# SGLang 0.5.23 itself refuses DCP for our name; its configuration says which ranks hold a page.
# Pools of earlier releases hold parts of pages, too, and nobody says whose.
@pytest.mark.parametrize(
    "ranks", [{"tp_size": 2, "dcp_size": 2, "logical_page_size": 128}, {"tp_size": 2}], ids=["told", "untold"]
)
def test_pages_that_are_spread_over_dcp_ranks_are_refused(
    storage_config: MakeConfig, tmp_path: Path, ranks: dict[str, int]
) -> None:
    with pytest.raises(UnsupportedPoolError, match=r"'kv'.*decode context parallelism.*without --dcp-size"):
        UnifiedCacheStore(storage_config(is_mla_model=True, **ranks), dcp_pool(0))

    assert StoredBlocks(tmp_path, "test-model").counts() == {}


def test_states_beside_pages_that_are_spread_over_dcp_ranks_are_refused(storage_config: MakeConfig) -> None:
    config = storage_config(is_mla_model=True, tp_size=2, dcp_size=2, logical_page_size=128)
    backend = UnifiedCacheStore(config, {})

    with pytest.raises(UnsupportedPoolError, match=r"'mamba'.*decode context parallelism"):
        backend.register_mem_host_pool_v2(host_pools(MambaModel())["mamba"], PoolName.MAMBA)


def test_sglang_refuses_dcp_before_it_asks_us(tmp_path: Path) -> None:
    """If a release lets our name through, it is time to store such pages."""
    settings = HicacheSettings(
        page_tokens=128,
        ranks={"attn_dcp_size": 2, "tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2},
        **dynamic_storage(tmp_path),
    )
    with pytest.raises(NotImplementedError, match="HiCache L3 with DCP"), hicache_stack(MlaModel(), settings):
        pass
