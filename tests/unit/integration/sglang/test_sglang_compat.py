# SPDX-License-Identifier: MIT
from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from ucm.integration.sglang import sglang_compat
from ucm.integration.sglang.namespace import RankShard, ServedModel
from ucm.testing.host_pools import (
    DeepSeekV4Model,
    DsaModel,
    MambaModel,
    MhaModel,
    MlaModel,
    Model,
    host_pools,
)
from ucm.testing.pool_memory import fill_random, read_page, write_page
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

    from .conftest import MakeConfig


def test_pool_names_and_policies_compare_with_plain_text() -> None:
    assert sglang_compat.pool_text(PoolName.SWA) == sglang_compat.pool_text("swa") == "swa"
    assert PoolHitPolicy.TRAILING_PAGES == sglang_compat.TRAILING_PAGES
    assert PoolHitPolicy.ALL_PAGES == sglang_compat.ALL_PAGES
    assert PoolHitPolicy.BLOCK_GROUPS == sglang_compat.BLOCK_GROUPS
    assert PoolName.MAMBA == sglang_compat.STATE_POOL


def test_every_group_of_ranks_is_read(storage_config: MakeConfig) -> None:
    config = storage_config(
        tp_rank=3,
        tp_size=4,
        pp_rank=1,
        pp_size=2,
        attn_cp_rank=1,
        attn_cp_size=3,
        dcp_rank=1,
        dcp_size=2,
        is_mla_model=True,
        logical_page_size=128,
        model_name="org/model",
    )

    assert sglang_compat.served_model(config) == ServedModel(
        name="org/model",
        shard=RankShard(
            tp_rank=3, tp_size=4, pp_rank=1, pp_size=2, cp_rank=1, cp_size=3, dcp_rank=1, dcp_size=2
        ),
        replicated=True,
    )


def test_data_parallel_ranks_share_their_keys(storage_config: MakeConfig) -> None:
    ranks = [sglang_compat.served_model(storage_config(dp_rank=rank)) for rank in (0, 1)]

    assert ranks[0] == ranks[1]


def test_a_release_that_knows_fewer_groups_of_ranks_has_one_of_each() -> None:
    @dataclass
    class OldConfig:  # As in SGLang 0.5.5.
        tp_rank: int = 1
        tp_size: int = 2
        is_mla_model: bool = False
        is_page_first_layout: bool = True
        model_name: str | None = None
        extra_config: dict[str, Any] | None = None

    model = sglang_compat.served_model(OldConfig())

    assert model == ServedModel(name="", shard=RankShard(tp_rank=1, tp_size=2), replicated=False)
    assert not sglang_compat.wants_metrics(OldConfig())
    assert not sglang_compat.splits_heads(OldConfig())


def test_another_revision_of_a_model_is_another_model(storage_config: MakeConfig) -> None:
    with cpu_runtime(HicacheSettings(server_args={"revision": "abc"}), HostMemoryGuards()):
        name = sglang_compat.served_model(storage_config(model_name="m")).name

    assert name == "m@abc"


@pytest.mark.parametrize("meta", [None, (None, None), ([], [])])
def test_a_pool_without_bytes_has_no_parts_whichever_way_a_release_says_so(
    meta: tuple[list[int], list[int]] | tuple[None, None] | None,
) -> None:
    assert sglang_compat.page_parts(meta, 1)[2] == 0


def test_parts_that_do_not_divide_into_pages_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 pointers and 3 sizes do not make 2 pages"):
        sglang_compat.page_parts(([1, 2, 3], [8, 8, 8]), 2)


def test_one_size_for_all_pointers_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 pointers and 1 sizes"):
        sglang_compat.page_parts(([1, 2], [8]), 2)


def test_the_group_s_anchor_is_the_pool() -> None:
    pools = host_pools(MhaModel())

    assert sglang_compat.as_host_pool(pools.group) is pools.anchor
    assert sglang_compat.as_host_pool(pools.anchor) is pools.anchor
    assert sglang_compat.as_host_pool({}) is None


@pytest.mark.parametrize(
    ("model", "pool", "replicated"),
    [
        (MlaModel(), "kv", True),
        (DsaModel(), "indexer", True),
        (MambaModel(anchor=MlaModel()), "mamba", False),
        (DeepSeekV4Model(), "swa", True),
        (DeepSeekV4Model(), "deepseek_v4_c4_state", True),
    ],
)
def test_which_pools_of_a_rank_replicated_model_are_replicated(
    model: Model, pool: str, replicated: bool
) -> None:
    pools = host_pools(model, page_tokens=256 if isinstance(model, DeepSeekV4Model) else 64, pages=4)
    served = ServedModel(name="m", shard=RankShard(tp_rank=1, tp_size=2), replicated=True)

    assert sglang_compat.pool_ownership(pool, pools[pool], served).replicated is replicated


def test_a_draft_with_attention_heads_is_split_even_beside_a_replicated_model() -> None:
    served = ServedModel(name="m", shard=RankShard(), replicated=True)

    assert not sglang_compat.pool_ownership("draft", host_pools(MhaModel()).anchor, served).replicated


def test_nothing_is_replicated_in_a_model_of_attention_heads() -> None:
    served = ServedModel(name="m", shard=RankShard(), replicated=False)

    assert not sglang_compat.pool_ownership("indexer", host_pools(DsaModel())["indexer"], served).replicated


@pytest.mark.parametrize(
    ("model", "pool", "dtype"),
    [
        (MhaModel(), "kv", "bfloat16"),
        (MlaModel(dtype=torch.float16), "kv", "float16"),
        (MambaModel(), "mamba", "float32+bfloat16"),
        (DsaModel(), "indexer", "bfloat16"),
    ],
)
def test_the_type_of_the_values_comes_from_the_pool(model: Model, pool: str, dtype: str) -> None:
    assert sglang_compat.logical_dtype(host_pools(model)[pool]) == dtype


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_the_server_s_setting_tells_fp8_formats_apart(dtype: str) -> None:
    pool = host_pools(MhaModel(dtype=torch.float8_e4m3fn)).anchor

    assert sglang_compat.logical_dtype(pool) == "uint8"
    with cpu_runtime(HicacheSettings(server_args={"kv_cache_dtype": dtype}), HostMemoryGuards()):
        assert sglang_compat.logical_dtype(pool) == dtype


def test_a_release_that_keeps_the_device_pool_shows_its_type() -> None:
    pool = SimpleNamespace(dtype=torch.uint8, device_pool=SimpleNamespace(dtype=torch.float8_e4m3fn))

    assert sglang_compat.logical_dtype(pool) == "fp8_e4m3"  # As in SGLang 0.5.21.


@pytest.mark.parametrize(
    ("model", "pool", "page_tokens", "buffer"),
    [
        (MhaModel(), "kv", 64, "k_buffer"),
        (MlaModel(), "kv", 64, "kv_buffer"),
        (DsaModel(), "indexer", 64, "index_k_with_scale_buffer"),
        (MambaModel(), "mamba", 64, "temporal_buffer"),
        (DeepSeekV4Model(), "swa", 256, "kv_buffer"),
        (DeepSeekV4Model(), "deepseek_v4_c4_state", 256, "kv_buffer"),
    ],
)
def test_two_layouts_have_one_byte_order_exactly_if_a_page_means_the_same_in_both(
    model: Model, pool: str, page_tokens: int, buffer: str
) -> None:
    first, direct = (
        host_pools(model, layout=layout, page_tokens=page_tokens, pages=2)[pool]
        for layout in ("page_first", "page_first_direct")
    )
    fill_random(first)
    write_page(direct, 0, read_page(first, 0))
    same_meaning = second_layer_of_first_page(first, buffer) == second_layer_of_first_page(direct, buffer)

    assert (sglang_compat.byte_order(first) == sglang_compat.byte_order(direct)) is same_meaning


def second_layer_of_first_page(pool: HostKVCache, buffer: str) -> bytes:
    """The values of one layer, token after token, as the device gets them."""
    tensor = getattr(pool, buffer)
    layer = tensor.transpose(0, 1)[1]
    rows = pool.page_size if tensor.shape[0] == pool.size else 1
    return bytes(layer[:rows].contiguous().view(torch.uint8).numpy())


def test_the_reply_lists_all_lengths_and_the_longest() -> None:
    assert sglang_compat.hit_result([1, 3], {"kv": 4}) == PoolTransferResult(3, {"kv": 4}, [1, 3])


def test_a_release_before_0_5_19_gets_the_longest_length_only(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class OldResult:
        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]

    monkeypatch.setattr("sglang.srt.mem_cache.hicache_storage.PoolTransferResult", OldResult)

    assert sglang_compat.hit_result([1, 3], {"kv": 4}) == OldResult(3, {"kv": 4})


def test_transfers_become_sglang_s_metrics() -> None:
    metrics = sglang_compat.storage_metrics([(4, 1.5)], [(2, 0.5), (1, 0.25)])

    assert metrics == StorageMetrics(
        prefetch_pgs=[4], backup_pgs=[2, 1], prefetch_bandwidth=[1.5], backup_bandwidth=[0.5, 0.25]
    )
