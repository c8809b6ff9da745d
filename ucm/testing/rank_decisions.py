# SPDX-License-Identifier: MIT
"""Which rank writes which pool: what SGLang's controllers decide, beside what our ownership type says."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.runtime_context import get_flags

from ucm.integration.sglang.sglang_compat import pool_ownership, served_model
from ucm.testing.host_pools import (
    DeepSeekV4Model,
    DsaModel,
    MambaModel,
    MhaModel,
    MlaModel,
    Model,
    SwaModel,
    attach_host_pools,
    register_draft,
)
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

_PAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSet:
    """The pools of one server: a model's own, and those of a draft model beside it.

    Attributes:
        variant_pools: Pools that other variants of the model have, of the same kind as its sidecars.
    """

    model: Model
    draft: Model | None = None
    page_tokens: int = 64
    variant_pools: tuple[PoolName, ...] = ()


POOL_SETS = {
    "mha": PoolSet(model=MhaModel(), draft=MhaModel(layers=1)),
    "mla, mha draft": PoolSet(model=MlaModel(), draft=MhaModel(layers=1)),
    "mla, mla draft": PoolSet(model=MlaModel(), draft=MlaModel(layers=1)),
    "dsa": PoolSet(model=DsaModel(), draft=DsaModel(layers=1)),
    "mamba beside mha": PoolSet(model=MambaModel()),
    "mamba beside mla": PoolSet(model=MambaModel(anchor=MlaModel())),
    "swa": PoolSet(model=SwaModel(), draft=SwaModel(full_layers=1, swa_layers=1)),
    "deepseek v4": PoolSet(
        model=DeepSeekV4Model(),
        draft=DeepSeekV4Model(compress_ratios=(0,)),
        page_tokens=256,
        variant_pools=tuple(name for name in PoolName if name.value.startswith("deepseek_v4")),
    ),
}
"""A server of each kind of model, with each kind of draft that SGLang stores in pools of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """One pool on every rank of many servers.

    Attributes:
        replicated: All TP ranks hold the same bytes, as we see it.
        compared: How many ranks were asked.
        disputed: The ranks for which SGLang and we disagree on who writes.
    """

    replicated: bool
    compared: int
    disputed: list[str]


def compare(pool_set: PoolSet, backend: str, storage: str) -> dict[str, Decisions]:
    """Attach a backend to one server's real pools, and ask on behalf of every rank who writes.

    Returns:
        The decisions for each pool, by its name.
    """
    with _attached(pool_set, backend, storage) as controller:
        config = controller.storage_config
        pools = {entry.name: entry.host_pool for entry in controller.mem_pool_host.entries}
        sidecar = [*pools.values()][-1]
        pools = dict.fromkeys(pool_set.variant_pools, sidecar) | pools
        asked: dict[str, list[tuple[bool, bool, bool, str]]] = {}
        for controller.storage_config in _ranks(config):
            model = served_model(controller.storage_config)
            for name, pool in pools.items():
                ours = pool_ownership(name.value, pool, model)
                asked.setdefault(name.value, []).append(
                    (ours.replicated, ours.writes, _writes(controller, name), str(model.shard))
                )
        return {
            name: Decisions(
                replicated=all(replicated for replicated, *_ in answers),
                compared=len(answers),
                disputed=[rank for _, ours, theirs, rank in answers if ours != theirs],
            )
            for name, answers in asked.items()
        }


def data_parallel_config(storage: str, rank: int) -> HiCacheStorageConfig:
    """Return what SGLang tells the backend on one of two ranks with data-parallel attention."""
    tensor_parallel = {"tp_rank": rank, "tp_size": 2, "moe_tp_rank": rank, "moe_tp_size": 2}
    attention = {"attn_dp_rank": rank, "attn_dp_size": 2, "attn_tp_rank": 0, "attn_tp_size": 1}
    placement = tensor_parallel | attention
    enabled = get_flags().dp.enabled
    get_flags().dp.enabled = True
    try:
        with _attached(PoolSet(model=MhaModel()), "unifiedcache", storage, placement) as controller:
            return controller.storage_config
    finally:
        get_flags().dp.enabled = enabled


@contextmanager
def _attached(
    pool_set: PoolSet, backend: str, storage: str, placement: dict[str, int] | None = None
) -> Iterator[HybridCacheController]:
    settings = HicacheSettings(
        page_tokens=pool_set.page_tokens,
        model_name=str(pool_set),  # Pools of other sizes would be refused in one directory.
        storage_backend=backend,
        storage_config={"storage_backends": storage},
        ranks=placement or {},
    )
    guards = HostMemoryGuards()
    with cpu_runtime(settings, guards) as server_args:
        device = pool_set.model.device_pools(pool_set.page_tokens, _PAGES)
        tree, _ = attach_host_pools(device, server_args, guards)
        try:
            if pool_set.draft is not None:
                register_draft(tree, pool_set.draft.device_pools(pool_set.page_tokens, _PAGES).kv)
            yield tree.cache_controller
        finally:
            tree.shutdown()


def _writes(controller: HybridCacheController, name: PoolName) -> bool:
    if name == PoolName.KV:
        return not controller.backup_skip
    return bool(controller.should_backup(PoolTransfer(name=name)))


def _ranks(config: HiCacheStorageConfig) -> Iterator[HiCacheStorageConfig]:
    """Yield the configuration of every rank of servers with up to 4 TP, 2 PP, 2 CP and 2 DCP ranks."""
    for tp_size, pp_size, cp_size, dcp_size in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2)):
        # SGLang takes DCP for rank-replicated models only, in groups that divide the TP ranks.
        if dcp_size > 1 and (tp_size % dcp_size or not config.is_mla_model):
            continue
        for tp_rank, pp_rank, cp_rank in itertools.product(range(tp_size), range(pp_size), range(cp_size)):
            yield replace(
                config,
                tp_rank=tp_rank,
                tp_size=tp_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
                attn_cp_rank=cp_rank,
                attn_cp_size=cp_size,
                dcp_rank=tp_rank % dcp_size,
                dcp_size=dcp_size,
                logical_page_size=256,
            )
