# SPDX-License-Identifier: MIT
"""A backend attached to SGLang's real host pools, as its controllers attach it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

from ucm.integration.sglang import registration
from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.store import factory
from ucm.testing.fault_injecting_store import FaultInjectingStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.store.factory import StoreConfig
    from ucm.store.interface import KVStore, StoreSpec
    from ucm.testing.host_pools import HostPools


class MakeConfig(Protocol):
    """Builds SGLang's own configuration; keywords replace single fields."""

    def __call__(self, **fields: object) -> HiCacheStorageConfig: ...


class Attach(Protocol):
    """Attaches a new backend; keywords replace single fields of its configuration."""

    def __call__(self, pools: HostPools, **fields: object) -> UnifiedCacheStore: ...


@pytest.fixture
def storage_config(tmp_path: Path) -> MakeConfig:
    def make(**fields: object) -> HiCacheStorageConfig:
        defaults: dict[str, Any] = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "test-model",
            "extra_config": {"storage_backends": str(tmp_path)},
        }
        return HiCacheStorageConfig(**{**defaults, **fields})

    return make


@pytest.fixture
def attach(storage_config: MakeConfig) -> Iterator[Attach]:
    backends: list[UnifiedCacheStore] = []

    def attach(pools: HostPools, **fields: object) -> UnifiedCacheStore:
        backend = UnifiedCacheStore(storage_config(**fields), {})
        backends.append(backend)
        backend.register_mem_pool_host(pools.anchor)
        for entry in pools.group.entries:
            backend.register_mem_host_pool_v2(entry.host_pool, PoolName(entry.name))
        backend.on_host_pools_registered()
        return backend

    yield attach
    for backend in backends:
        backend.close()


@pytest.fixture
def faulty_stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, FaultInjectingStore]:
    """Every store opened from here on, by its namespace; each can be told to misbehave."""
    opened: dict[str, FaultInjectingStore] = {}

    def open_faulty(spec: StoreSpec, config: StoreConfig) -> KVStore:
        return opened.setdefault(spec.namespace, FaultInjectingStore(factory.open_store(spec, config)))

    monkeypatch.setattr(registration, "open_store", open_faulty)
    return opened
