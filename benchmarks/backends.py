# SPDX-License-Identifier: MIT
"""Storage backends created, attached and called as SGLang's cache controller does it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory

from benchmarks.block_work import make_shards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from ucm.testing.host_pools import HostPools

TRAILING_POOLS = frozenset(
    {
        PoolName.SWA,
        PoolName.MAMBA,
        PoolName.DEEPSEEK_V4_C4_STATE,
        PoolName.DEEPSEEK_V4_C4_INDEXER_STATE,
    }
)
"""Pools of which only the end of a prefix is needed."""

OURS = "ours"
FILE = "file"


class Backend:
    """One storage backend with all pools of a model registered.

    The primary KV moves through SGLang's own page functions: those of the generic interface for `file`, the
    zero-copy ones for all others.

    Args:
        name: Of the backend.
        pools: Of the model.
        directory: Where it stores.
        is_mla: Whether the primary KV is the same on every rank.
        settings: What selects the backend, see `backend_settings`, which knows `ours` and `file`.
        model_name: Models of different geometry need different names.
    """

    def __init__(
        self,
        name: str,
        pools: HostPools,
        directory: Path,
        *,
        is_mla: bool,
        settings: tuple[str, dict[str, object]] | None = None,
        model_name: str = "benchmark/model",
    ) -> None:
        self.name = name
        self._directory = directory
        self._pools = pools
        registered, extra_config = settings or backend_settings(name, directory)
        self._backend = _create(registered, extra_config, pools, is_mla=is_mla, model_name=model_name)
        self._backend.register_mem_pool_host(pools.anchor)
        for entry in pools.group.entries:
            self._backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
        self._backend.on_host_pools_registered()
        self._controller = SimpleNamespace(
            storage_backend=self._backend, storage_host_pool=pools.anchor, page_size=pools.anchor.page_size
        )
        is_generic = registered == FILE
        self._page_get: Any = (
            HiCacheController._generic_page_get if is_generic else HiCacheController._page_get_zero_copy
        )
        self._page_set: Any = (
            HiCacheController._generic_page_set if is_generic else HiCacheController._page_set_zero_copy
        )

    def register(self, name: str, pool: Any) -> None:
        """Add a pool that arrives later than those of the model."""
        self._backend.register_mem_host_pool_v2(pool, PoolName(name))

    def set_primary(self, keys: Sequence[str], indices: torch.Tensor) -> bool:
        """Back up pages of the primary KV."""
        return bool(self._page_set(self._controller, keys, indices, HiCacheStorageExtraInfo()))

    def get_primary(self, keys: Sequence[str], indices: torch.Tensor) -> int:
        """Restore pages of the primary KV; returns how many leading pages came."""
        operation = SimpleNamespace(request_id="benchmark", is_terminated=lambda: False)
        return int(self._page_get(self._controller, operation, keys, indices, HiCacheStorageExtraInfo()))

    def set_sidecars(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Back up pages of other pools."""
        return dict(self._backend.batch_set_v2(transfers, HiCacheStorageExtraInfo()))

    def get_sidecars(self, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        """Restore pages of other pools."""
        return dict(self._backend.batch_get_v2(transfers, HiCacheStorageExtraInfo()))

    def restorable_pages(self, keys: Sequence[str]) -> int:
        """Ask for the longest restorable prefix, over all pools of the model."""
        queries = [_hit_query(entry.name) for entry in self._pools.group.entries[1:]]
        if not queries:
            return int(self._backend.batch_exists(keys, HiCacheStorageExtraInfo()))
        return int(self._backend.batch_exists_v2(keys, queries, HiCacheStorageExtraInfo()).kv_hit_pages)

    def age(self) -> None:
        """Make the directories that a store of ours has after some thousand blocks."""
        make_shards(self._directory)

    def clear(self) -> None:
        """Remove everything stored."""
        self._backend.clear()

    def close(self) -> None:
        """Release what the backend holds; `file` has nothing to close."""
        if hasattr(self._backend, "close"):
            self._backend.close()


def transfer(name: str, keys: Sequence[str], indices: torch.Tensor) -> PoolTransfer:
    """Describe pages of one pool as the controller does when it reads or writes them."""
    return PoolTransfer(name=PoolName(name), keys=list(keys), host_indices=indices)


def _hit_query(name: PoolName) -> PoolTransfer:
    if name in TRAILING_POOLS:
        return PoolTransfer(name=name, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    return PoolTransfer(name=name, hit_policy=PoolHitPolicy.ALL_PAGES, indices_from_pool=PoolName.KV)


def backend_settings(name: str, directory: Path) -> tuple[str, dict[str, object]]:
    """Return what selects a backend: its registered name and the extra config."""
    if name == FILE:
        return "file", {"file_storage_path": str(directory)}
    return "dynamic", {
        "backend_name": "unifiedcache",
        "module_path": "ucm.integration.sglang.unifiedcache_store",
        "class_name": "UnifiedCacheStore",
        "interface_v1": 1,
        "storage_backends": str(directory),
    }


def _create(
    registered: str, extra_config: dict[str, object], pools: HostPools, *, is_mla: bool, model_name: str
) -> Any:
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model_name,
        extra_config=extra_config,
    )
    return StorageBackendFactory.create_backend(registered, config, pools.anchor)
