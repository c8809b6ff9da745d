# SPDX-License-Identifier: MIT
"""Which pools are accepted, which are refused, and what a directory is claimed for."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.pool import RegisteredPool
from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.store.errors import StoreConfigError, StoreUnavailableError
from ucm.testing.host_pools import (
    DeepSeekV4Model,
    DsaModel,
    MambaModel,
    MhaModel,
    MlaModel,
    SwaModel,
    host_pools,
)
from ucm.testing.pool_memory import fill_random, page_indices, read_pages
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host import HostKVCache

    from ucm.testing.host_pools import HostPools, Model

    from .conftest import Attach, MakeConfig

KEYS = ["key-a", "key-b", "key-c"]


@pytest.fixture
def backend(storage_config: MakeConfig) -> Iterator[UnifiedCacheStore]:
    """A backend without any pool yet."""
    backend = UnifiedCacheStore(storage_config(), {})
    yield backend
    backend.close()


def k_only_pool(pools: HostPools) -> HostKVCache:
    """SGLang's pool for K without V, of the same slots as the anchor."""
    with cpu_runtime(HicacheSettings(), HostMemoryGuards()):
        device = MHATokenToKOnlyPool(
            size=512,
            page_size=64,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            layer_num=2,
            device="cpu",
            enable_memory_saver=False,
        )
        return MHATokenToKOnlyPoolHost(device, pools.anchor, "page_first", pin_memory=False)


class TestRefusals:
    def test_asymmetric_kv(self, backend: UnifiedCacheStore) -> None:
        pools = host_pools(MhaModel(v_head_dim=4))

        with pytest.raises(UnsupportedPoolError, match=r"'kv'.*'page_first'.*\[6144, 3072\]"):
            backend.register_mem_pool_host(pools.anchor)

    def test_k_without_v(self, backend: UnifiedCacheStore) -> None:
        with pytest.raises(UnsupportedPoolError, match=r"'kv'.*'page_first'.*1 parts"):
            backend.register_mem_pool_host(k_only_pool(host_pools(MhaModel())))

    def test_an_asymmetric_sidecar(self, attach: Attach) -> None:
        backend = attach(host_pools(MhaModel()))
        draft = host_pools(MhaModel(v_head_dim=4)).anchor

        with pytest.raises(UnsupportedPoolError, match="'draft'"):
            backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)

    @pytest.mark.parametrize("model", [MhaModel(), MlaModel()])
    def test_a_layer_first_anchor(self, backend: UnifiedCacheStore, model: Model) -> None:
        pools = host_pools(model, layout="layer_first")

        with pytest.raises(
            UnsupportedPoolError, match=r"'kv'.*'layer_first'.*--hicache-mem-layout page_first"
        ):
            backend.register_mem_pool_host(pools.anchor)

    def test_a_layer_first_sidecar(self, attach: Attach) -> None:
        backend = attach(host_pools(DsaModel()))
        indexer = host_pools(DsaModel(), layout="layer_first")["indexer"]

        with pytest.raises(UnsupportedPoolError, match=r"'indexer'.*'layer_first'.*--hicache-mem-layout"):
            backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)

    # sglang #28873
    @pytest.mark.parametrize("pool", ["mamba", "draft"])
    def test_a_pool_that_gives_no_page_pointers(
        self, attach: Attach, monkeypatch: pytest.MonkeyPatch, pool: str
    ) -> None:
        pools = host_pools(MambaModel())
        backend = attach(host_pools(MhaModel()))
        # Registered side states, as of a model that checkpoints more than SGLang's states.
        monkeypatch.setattr(pools["mamba"], "slot_state_device_tensors", [torch.zeros(1)])

        with pytest.raises(UnsupportedPoolError, match=rf"'{pool}'.*MambaPoolHost.*side states"):
            backend.register_mem_host_pool_v2(pools["mamba"], pool)

    def test_slots_of_several_ranks(
        self, backend: UnifiedCacheStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pools = host_pools(MhaModel())
        monkeypatch.setattr(
            pools.anchor, "shard_size", 2, raising=False
        )  # As `PageInterleaveHostPool` has it.

        with pytest.raises(UnsupportedPoolError, match="--enable-kv-cache-sharding"):
            backend.register_mem_pool_host(pools.anchor)

    def test_pages_in_pieces_for_several_tp_sizes(self, storage_config: MakeConfig) -> None:
        with pytest.raises(UnsupportedPoolError, match="tp_lcm_size"):
            UnifiedCacheStore(storage_config(should_split_heads=True), {})

    def test_something_that_is_no_pool(self, backend: UnifiedCacheStore) -> None:
        with pytest.raises(UnsupportedPoolError, match="'kv'"):
            backend.register_mem_pool_host(object())

    @pytest.mark.parametrize("name", ["a/b", "..x/", "", "a b"])
    def test_a_name_that_is_no_directory(self, attach: Attach, name: str) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)

        with pytest.raises(UnsupportedPoolError, match="cannot name a directory"):
            backend.register_mem_host_pool_v2(pools["swa"], name)

    def test_a_directory_that_cannot_be_used(self, storage_config: MakeConfig, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("not a directory")
        config = storage_config(extra_config={"storage_backends": str(tmp_path / "file" / "below")})

        with pytest.raises(StoreUnavailableError, match="file/below"):
            UnifiedCacheStore(config, host_pools(MhaModel()).anchor)

    def test_a_refused_pool_leaves_the_others_working(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        with pytest.raises(UnsupportedPoolError):
            backend.register_mem_host_pool_v2(host_pools(MhaModel(v_head_dim=4)).anchor, PoolName.DRAFT)

        move = PoolTransfer(name=PoolName.SWA, keys=KEYS, host_indices=page_indices(pools["swa"], [0, 1, 2]))
        assert backend.batch_set_v2([move]) == {"swa": [True] * 3}


def test_a_sidecar_of_k_only_is_stored(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    indexer = k_only_pool(pools)
    indexer.k_buffer.view(torch.uint8).random_()
    before = indexer.k_buffer.view(torch.uint8).clone()
    backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)

    move = PoolTransfer(name=PoolName.INDEXER, keys=["key"], host_indices=torch.arange(64))
    backend.batch_set_v2([move])
    indexer.k_buffer[:64].zero_()

    assert backend.batch_get_v2([move]) == {"indexer": [True]}
    assert torch.equal(indexer.k_buffer.view(torch.uint8), before)


class TestLogicalAnchor:
    """DeepSeek V4's KV pool owns indices only."""

    @pytest.fixture
    def pools(self) -> HostPools:
        return host_pools(DeepSeekV4Model(), page_tokens=256, pages=2)

    # sglang #30762, DingoCache #317
    @pytest.mark.parametrize("meta", [None, (None, None), ([], [])])
    def test_nothing_is_stored_and_everything_succeeds(
        self,
        attach: Attach,
        pools: HostPools,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        meta: object,
    ) -> None:
        monkeypatch.setattr(pools.anchor, "get_page_buffer_meta", lambda _indices: meta)
        backend = attach(pools, is_mla_model=True)
        indices = page_indices(pools.anchor, [0, 1])

        assert backend.store is None
        assert backend.batch_set_v1(KEYS[:2], indices) == [True] * 2
        assert backend.batch_get_v1(KEYS[:2], indices) == [True] * 2
        move = PoolTransfer(name=PoolName.KV, keys=KEYS[:2], host_indices=indices)
        assert backend.batch_set_v2([move]) == {"kv": [True] * 2}
        assert StoredBlocks(tmp_path, "test-model").counts() == {}
        assert not (tmp_path / "sglang_v2" / "kv_0x0").exists()

    def test_a_sidecar_without_bytes_is_logical_too(self, attach: Attach, pools: HostPools) -> None:
        backend = attach(pools, is_mla_model=True)
        backend.register_mem_host_pool_v2(pools.anchor, PoolName.DRAFT)

        move = PoolTransfer(name=PoolName.DRAFT, keys=KEYS, host_indices=torch.arange(3))
        assert backend.batch_set_v2([move]) == {"draft": [True] * 3}

    def test_a_pool_that_only_lacks_its_buffer_is_refused(
        self, backend: UnifiedCacheStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pools = host_pools(MlaModel())
        monkeypatch.setattr(pools.anchor, "kv_buffer", None)  # As of a rank that shares another's memory.

        with pytest.raises(UnsupportedPoolError, match="'kv'"):
            backend.register_mem_pool_host(pools.anchor)

    def test_a_buffer_that_appears_ends_the_pretence(
        self, attach: Attach, pools: HostPools, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = attach(pools, is_mla_model=True)
        monkeypatch.setattr(pools.anchor, "kv_buffer", torch.zeros(1))

        indices = page_indices(pools.anchor, [0, 1])
        assert backend.batch_set_v1(KEYS[:2], indices) == [False] * 2
        assert backend.batch_get_v1(KEYS[:2], indices) == [False] * 2

    def test_a_lost_primary_store_is_no_logical_anchor(self, attach: Attach) -> None:
        pools = host_pools(MhaModel())
        backend = attach(pools)
        primary = backend._connector._primary
        with mock.patch.object(primary, "store", None):
            assert backend.batch_set_v1(KEYS[:1], page_indices(pools.anchor, [0])) == [False]


class TestRegistration:
    def test_the_anchor_is_skipped_under_v2(self, attach: Attach, tmp_path: Path) -> None:
        attach(host_pools(SwaModel()))

        assert [path.name for path in (tmp_path / "sglang_v2").iterdir()] == ["swa_6144x2"]

    def test_a_kv_pool_with_bytes_under_a_logical_anchor_gets_a_store(
        self, attach: Attach, tmp_path: Path
    ) -> None:
        backend = attach(host_pools(DeepSeekV4Model(), page_tokens=256, pages=2), is_mla_model=True)
        backend.register_mem_host_pool_v2(host_pools(MhaModel()).anchor, PoolName.KV)

        assert (tmp_path / "sglang_v2" / "kv_6144x2").is_dir()
        assert backend.batch_set_v1(KEYS, torch.arange(3 * 256)) == [True] * 3

    def test_a_late_pool_is_stored_while_serving(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        draft = host_pools(MhaModel()).anchor
        before = fill_random(draft)
        backend = attach(pools)
        move = PoolTransfer(name=PoolName.SWA, keys=KEYS, host_indices=page_indices(pools["swa"], [0, 1, 2]))
        failures: list[object] = []
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                if backend.batch_set_v2([move]) != {"swa": [True] * 3}:
                    failures.append("swa")

        server = threading.Thread(target=serve)
        server.start()
        try:
            for _ in range(20):
                backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        finally:
            stop.set()
            server.join()

        assert failures == []
        late = PoolTransfer(name=PoolName.DRAFT, keys=["key"], host_indices=page_indices(draft, [0]))
        assert backend.batch_set_v2([late]) == {"draft": [True]}
        late.host_indices = page_indices(draft, [5])
        assert backend.batch_get_v2([late]) == {"draft": [True]}
        assert read_pages(draft, [5]) == before[:1]

    def test_a_pool_registered_again_replaces_and_closes_the_old_one(
        self, attach: Attach, tmp_path: Path
    ) -> None:
        backend = attach(host_pools(SwaModel()))
        old = backend._connector._sidecars["swa"]
        assert isinstance(old, RegisteredPool)
        wider = host_pools(SwaModel(swa_layers=4))["swa"]

        backend.register_mem_host_pool_v2(wider, PoolName.SWA)

        with pytest.raises(StoreUnavailableError):
            old.store.lookup([])
        move = PoolTransfer(name=PoolName.SWA, keys=KEYS, host_indices=page_indices(wider, [0, 1, 2]))
        assert backend.batch_set_v2([move]) == {"swa": [True] * 3}
        assert StoredBlocks(tmp_path, "test-model").counts() == {"sglang_v2/swa_8192x2": 3}

    def test_ten_attaches_leave_no_thread_behind(self, storage_config: MakeConfig) -> None:
        pools = host_pools(SwaModel())
        before = set(threading.enumerate())

        for _ in range(10):
            backend = UnifiedCacheStore(storage_config(), pools.anchor)
            backend.register_mem_host_pool_v2(pools["swa"], PoolName.SWA)
            backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
            backend.close()

        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=30)  # Asked to end already; a busy machine may need a moment.
            assert not thread.is_alive()

    def test_each_pool_is_told_about_once(self, attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="ucm"):
            attach(host_pools(MambaModel()))

        pools = [message for message in caplog.messages if message.startswith("pool ")]
        assert [message.split(":")[0] for message in pools] == ["pool kv", "pool mamba"]


class TestIdentity:
    """A directory belongs to one kind of pages of each model."""

    # sglang #33268
    def test_another_dtype_of_the_same_size_is_refused_with_both_named(self, attach: Attach) -> None:
        attach(host_pools(MhaModel(heads=2, dtype=torch.bfloat16)))

        with pytest.raises(StoreConfigError, match=r"dtype.*'bfloat16'.*'uint8'"):
            attach(host_pools(MhaModel(heads=4, dtype=torch.float8_e4m3fn)))

    def test_two_fp8_formats_are_told_apart(self, attach: Attach) -> None:
        pools = host_pools(MhaModel(dtype=torch.float8_e4m3fn))
        with cpu_runtime(HicacheSettings(server_args={"kv_cache_dtype": "fp8_e4m3"}), HostMemoryGuards()):
            attach(pools)

        with (
            cpu_runtime(HicacheSettings(server_args={"kv_cache_dtype": "fp8_e5m2"}), HostMemoryGuards()),
            pytest.raises(StoreConfigError, match=r"'fp8_e4m3'.*'fp8_e5m2'"),
        ):
            attach(pools)

    def test_another_layout_is_refused_with_both_named(self, attach: Attach) -> None:
        attach(host_pools(MhaModel(), layout="page_first"))

        with pytest.raises(StoreConfigError, match=r"layout.*'page_first'.*'page_first_direct'"):
            attach(host_pools(MhaModel(), layout="page_first_direct"))

    def test_another_page_size_is_refused_with_both_named(self, attach: Attach) -> None:
        attach(host_pools(MhaModel(), page_tokens=64))

        with pytest.raises(StoreConfigError, match=r"page_tokens.*64.*32"):
            attach(host_pools(MhaModel(layers=6), page_tokens=32))

    def test_other_components_are_refused_with_both_named(self, attach: Attach) -> None:
        attach(host_pools(MhaModel(layers=3)))

        with pytest.raises(StoreConfigError, match=r"segment_bytes.*6144.*8192"):
            attach(host_pools(MhaModel(layers=4)))

    def test_states_that_split_a_page_of_the_same_size_otherwise_are_refused(self, attach: Attach) -> None:
        attach(host_pools(MambaModel(conv_shapes=((6, 3), (7, 3)))))

        with pytest.raises(StoreConfigError, match=r"mamba_.*segment_bytes.*72, 84\].*84, 72\]"):
            attach(host_pools(MambaModel(conv_shapes=((7, 3), (6, 3)))))

    def test_a_sidecar_of_another_dtype_and_the_same_size_is_refused(self, attach: Attach) -> None:
        backend = attach(host_pools(SwaModel(heads=2, dtype=torch.bfloat16)))
        other = host_pools(SwaModel(heads=4, dtype=torch.float8_e4m3fn))["swa"]

        with pytest.raises(StoreConfigError, match=r"swa_.*dtype.*'bfloat16'.*'uint8'"):
            backend.register_mem_host_pool_v2(other, PoolName.SWA)

    def test_layouts_that_order_the_bytes_alike_share_a_directory(self, attach: Attach) -> None:
        first = host_pools(DeepSeekV4Model(), page_tokens=256, pages=2, layout="page_first")
        direct = host_pools(DeepSeekV4Model(), page_tokens=256, pages=2, layout="page_first_direct")
        pages = fill_random(first["swa"])
        move = PoolTransfer(name=PoolName.SWA, keys=["key"], host_indices=page_indices(first["swa"], [0]))

        assert attach(first, is_mla_model=True).batch_set_v2([move]) == {"swa": [True]}
        assert attach(direct, is_mla_model=True).batch_get_v2([move]) == {"swa": [True]}
        assert read_pages(direct["swa"], [0]) == pages[:1]

    def test_another_model_in_the_directory_is_no_conflict(self, attach: Attach) -> None:
        first = attach(host_pools(MhaModel(layers=3)), model_name="org/a-b")
        second = attach(host_pools(MhaModel(layers=4)), model_name="org-a/b")

        first.batch_set_v1(["key"], torch.arange(64))
        assert second.batch_exists(["key"]) == 0

    def test_another_tp_size_of_the_model_is_no_conflict(self, attach: Attach) -> None:
        attach(host_pools(MhaModel(heads=2)), tp_size=2)

        attach(host_pools(MhaModel(heads=1)), tp_size=4)
