# SPDX-License-Identifier: MIT
"""Sidecars: transfers and hit queries, on SGLang's real pools and real files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from ucm.testing.block_damage import flip_payload
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, SwaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_count, page_indices, read_page, read_pages, write_page
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host import HostKVCache

    from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
    from ucm.store.interface import StoreStats
    from ucm.testing.host_pools import HostPools, Model

    from .conftest import Attach

KEYS = ["key-a", "key-b", "key-c"]
PLACEHOLDER = "__placeholder__"


def transfer(pools: HostPools, name: str, keys: list[str], pages: list[int]) -> PoolTransfer:
    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=page_indices(pools[name], pages))


def trailing(name: str, window: int = 1) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName(name), keys=[PLACEHOLDER] * window, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


SIDECARS = pytest.mark.parametrize(
    ("model", "pool", "page_tokens"),
    [
        (SwaModel(), "swa", 64),
        (DsaModel(), "indexer", 64),
        (MambaModel(), "mamba", 64),
        (DeepSeekV4Model(), "deepseek_v4_c4", 256),
        (DeepSeekV4Model(), "deepseek_v4_c4_state", 256),
    ],
    ids=["swa", "indexer", "mamba", "c4", "c4_state"],
)


@SIDECARS
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_come_back_byte_for_byte_and_no_other_byte_changes(
    attach: Attach, model: Model, pool: str, page_tokens: int, layout: str
) -> None:
    pools = host_pools(model, layout=layout, page_tokens=page_tokens, pages=4)
    backend = attach(pools)
    before = fill_random(pools[pool])  # Bytes 0..255: whatever numbers they are, they survive. sglang #29191

    written = backend.batch_set_v2([transfer(pools, pool, KEYS, [3, 0, 4])])
    read = backend.batch_get_v2([transfer(pools, pool, KEYS, [1, 2, 5])])

    assert written == read == {pool: [True] * 3}
    after = read_pages(pools[pool])
    assert [after[1], after[2], after[5]] == [before[3], before[0], before[4]]
    assert [page for place, page in enumerate(after) if place not in (1, 2, 5)] == [
        page for place, page in enumerate(before) if place not in (1, 2, 5)
    ]
    assert pools.guards.intact()


def test_results_are_found_by_the_transfer_s_name_as_enum_or_text(attach: Attach) -> None:
    pools = host_pools(SwaModel())
    results = attach(pools).batch_set_v2([transfer(pools, "swa", KEYS, [0, 1, 2])])

    assert results[PoolName.SWA] == results["swa"] == [True] * 3


def test_pools_of_one_batch_have_blocks_and_verdicts_of_their_own(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(SwaModel(full_layers=3, swa_layers=3))  # Pages of equal size.
    backend = attach(pools)
    fill_random(pools["swa"])

    assert backend.batch_set_v2([transfer(pools, "swa", KEYS, [0, 1, 2])]) == {"swa": [True] * 3}
    assert backend.batch_set_v1(KEYS[:1], page_indices(pools["kv"], [0])) == [True]

    assert StoredBlocks(tmp_path, "test-model").counts() == {".": 1, "sglang_v2/swa_6144x2": 3}


# sglang #37690
def test_300_pages_in_one_call(attach: Attach) -> None:
    pools = host_pools(SwaModel(heads=1), page_tokens=16, pages=320)
    backend = attach(pools)
    before = fill_random(pools["swa"])
    keys = [f"key-{page}" for page in range(300)]
    source, target = list(range(300)), list(range(320, 620))

    assert backend.batch_set_v2([transfer(pools, "swa", keys, source)]) == {"swa": [True] * 300}
    assert backend.batch_get_v2([transfer(pools, "swa", keys, target)]) == {"swa": [True] * 300}

    assert read_pages(pools["swa"], target) == before[:300]


# sglang #31679
@pytest.mark.parametrize("pages", [[], [0], [0, 1, 2, 3]])
def test_any_other_number_of_host_pages_fails_every_key(attach: Attach, pages: list[int]) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    before = fill_random(pools["swa"])

    assert backend.batch_set_v2([transfer(pools, "swa", KEYS, pages)]) == {"swa": [False] * 3}
    assert backend.batch_get_v2([transfer(pools, "swa", KEYS, pages)]) == {"swa": [False] * 3}
    assert read_pages(pools["swa"]) == before


@pytest.mark.parametrize("keys", [None, []])
def test_a_transfer_without_keys_has_no_verdicts(attach: Attach, keys: list[str] | None) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    empty = PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=page_indices(pools["swa"], [0]))

    assert backend.batch_set_v2([empty]) == {"swa": []}
    assert backend.batch_get_v2([empty]) == {"swa": []}


def test_a_transfer_without_indices_fails_every_key(attach: Attach) -> None:
    backend = attach(host_pools(SwaModel()))

    assert backend.batch_get_v2([PoolTransfer(name=PoolName.SWA, keys=KEYS)]) == {"swa": [False] * 3}


# Mooncake #2236
def test_a_pool_nobody_registered_is_no_hit_and_no_error(attach: Attach) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
    unknown = PoolTransfer(name=PoolName.INDEXER, keys=KEYS, host_indices=torch.arange(3 * 64))

    assert backend.batch_set_v2([unknown]) == {"indexer": [False] * 3}
    assert backend.batch_get_v2([unknown]) == {"indexer": [False] * 3}
    assert backend.batch_exists_v2(KEYS, [unknown]) == PoolTransferResult(0, {"kv": 3, "indexer": 0}, [])


# sglang #31108, #30057
def test_pages_that_vanish_after_the_lookup_cost_only_themselves(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    keys = [*KEYS, "key-d"]
    before = fill_random(pools["swa"])
    backend.batch_set_v1(keys, page_indices(pools["kv"], [0, 1, 2, 3]))
    backend.batch_set_v2([transfer(pools, "swa", keys, [0, 1, 2, 3])])
    assert backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.SWA)]).kv_hit_pages == 4
    stored = StoredBlocks(tmp_path, "test-model")
    for key in keys[2:]:
        stored.sidecar("swa_6144x2", key).unlink()

    assert backend.batch_get_v2([transfer(pools, "swa", keys, [4, 5, 6, 7])]) == {
        "swa": [True, True, False, False]
    }

    assert read_pages(pools["swa"], [4, 5]) == before[:2]
    assert read_pages(pools["swa"], range(6, page_count(pools["swa"]))) == before[6:]


def test_a_damaged_state_is_not_scattered_into_the_pool(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(MambaModel())
    backend = attach(pools)
    pool = pools["mamba"]
    before = fill_random(pool)
    backend.batch_set_v2([transfer(pools, "mamba", KEYS, [0, 1, 2])])
    namespace = f"mamba_{len(before[0])}x1"
    flip_payload(StoredBlocks(tmp_path, "test-model").sidecar(namespace, "key-b"))

    assert backend.batch_get_v2([transfer(pools, "mamba", KEYS, [4, 5, 6])]) == {"mamba": [True, False, True]}

    assert read_pages(pool, [4, 6]) == [before[0], before[2]]
    assert read_page(pool, 5) == before[5]


# DingoCache #227
@pytest.mark.parametrize(
    ("temporal", "convs"),
    [
        ((0, 4, 4), ((6, 3), (7, 3))),
        ((2, 4, 5), ((6, 3), (0, 3))),
        ((2, 4, 5), ((0, 3), (6, 3))),
    ],
    ids=["no temporal state", "last state empty", "middle state empty"],
)
def test_a_state_of_no_bytes_is_left_out(
    attach: Attach,
    tmp_path: Path,
    temporal: tuple[int, int, int],
    convs: tuple[tuple[int, int], ...],
) -> None:
    pools = host_pools(MambaModel(temporal_shape=temporal, conv_shapes=convs))
    backend = attach(pools)
    before = fill_random(pools["mamba"])

    assert backend.batch_set_v2([transfer(pools, "mamba", KEYS, [0, 1, 2])]) == {"mamba": [True] * 3}
    assert backend.batch_get_v2([transfer(pools, "mamba", KEYS, [4, 5, 6])]) == {"mamba": [True] * 3}

    assert read_pages(pools["mamba"], [4, 5, 6]) == before[:3]
    namespace = f"sglang_v2/mamba_{len(before[0])}x1"
    assert StoredBlocks(tmp_path, "test-model").counts() == {namespace: 3}


def test_a_state_page_is_stored_as_its_states_one_after_the_other(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(MambaModel())
    pool = pools["mamba"]
    (page, *_) = fill_random(pool)
    attach(pools).batch_set_v2([transfer(pools, "mamba", ["key"], [0])])

    states = [pool.temporal_buffer[0], *(conv[0] for conv in pool.conv_buffer)]
    in_order = b"".join(bytes(state.contiguous().view(torch.uint8).numpy()) for state in states)
    stored = StoredBlocks(tmp_path, "test-model").sidecar(f"mamba_{len(page)}x1", "key").read_bytes()
    assert stored[: len(page)] == in_order


def test_prefix_keys_are_neither_changed_nor_kept(attach: Attach) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    keys, info = list(KEYS), HiCacheStorageExtraInfo(prefix_keys=["earlier"])
    move = transfer(pools, "swa", keys, [0, 1, 2])

    backend.batch_set_v2([move], info)
    backend.batch_get_v2([move], info)
    backend.batch_exists_v2(keys, [trailing("swa")], info)

    assert (keys, info.prefix_keys) == (KEYS, ["earlier"])


# sglang #40409
def test_clear_empties_every_pool(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(MambaModel())
    backend = attach(pools)
    backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
    backend.batch_set_v2([transfer(pools, "mamba", KEYS, [0, 1, 2])])

    assert backend.clear() is True

    assert StoredBlocks(tmp_path, "test-model").counts() == {}


class TestHitQuery:
    """Four pages of KV, and sidecars with holes."""

    KEYS = ("h1", "h2", "h3", "h4")

    def store(self, backend: UnifiedCacheStore, pools: HostPools, **pages_by_pool: set[int]) -> None:
        """Store pages, counted from 1."""
        for name, pages in pages_by_pool.items():
            keys = [f"h{page}" for page in sorted(pages)]
            move = transfer(pools, name, keys, [page - 1 for page in sorted(pages)])
            if name == "kv":
                backend.batch_set_v1(keys, move.host_indices)
            else:
                backend.batch_set_v2([move])

    def query(self, backend: UnifiedCacheStore, *transfers: PoolTransfer) -> PoolTransferResult:
        return backend.batch_exists_v2(list(self.KEYS), list(transfers))

    def test_without_sidecars_the_kv_prefix_counts(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 4})

        assert self.query(backend) == PoolTransferResult(2, {"kv": 2}, [1, 2])
        assert backend.batch_exists_v2(list(self.KEYS)) == PoolTransferResult(2, {"kv": 2}, [1, 2])

    def test_a_pool_of_all_pages_cuts_at_its_first_hole(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4}, swa={1, 2, 4})

        result = self.query(backend, PoolTransfer(name=PoolName.SWA))

        assert result == PoolTransferResult(2, {"kv": 4, "swa": 2}, [1, 2])

    # sglang #39147
    @pytest.mark.parametrize(
        ("mamba", "expected"),
        [
            ({1, 3}, PoolTransferResult(3, {"kv": 4, "mamba": 3}, [1, 3])),
            ({4}, PoolTransferResult(4, {"kv": 4, "mamba": 4}, [4])),
            (set(), PoolTransferResult(0, {"kv": 4, "mamba": 0}, [])),
        ],
    )
    def test_a_trailing_pool_is_asked_about_every_length(
        self, attach: Attach, mamba: set[int], expected: PoolTransferResult
    ) -> None:
        pools = host_pools(MambaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4}, mamba=mamba)

        assert self.query(backend, trailing("mamba")) == expected

    def test_a_window_must_be_complete_at_the_end_of_the_prefix(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4}, swa={1, 3, 4})

        assert self.query(backend, trailing("swa", window=2)).restorable_prefix_pages == [1, 4]

    def test_a_window_longer_than_the_prefix_needs_all_of_it(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4}, swa={1, 2})

        assert self.query(backend, trailing("swa", window=9)).restorable_prefix_pages == [1, 2]

    def test_a_stored_page_named_like_a_placeholder_proves_nothing(self, attach: Attach) -> None:
        pools = host_pools(MambaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4})
        backend.batch_set_v2([transfer(pools, "mamba", [PLACEHOLDER], [0])])

        assert self.query(backend, trailing("mamba")).kv_hit_pages == 0

    # sglang #39147
    @pytest.mark.parametrize(
        ("swa", "state", "lengths"), [({1, 3}, {1, 2}, [1]), ({3}, {2}, []), ({2, 3}, {2, 3, 4}, [2, 3])]
    )
    def test_only_lengths_that_all_pools_can_serve_remain(
        self, attach: Attach, swa: set[int], state: set[int], lengths: list[int]
    ) -> None:
        pools = host_pools(DeepSeekV4Model(), page_tokens=256, pages=4)
        backend = attach(pools, is_mla_model=True)
        self.store(backend, pools, swa=swa, deepseek_v4_c4_state=state, deepseek_v4_c4={1, 2, 3, 4})

        result = self.query(
            backend,
            trailing("swa"),
            trailing("deepseek_v4_c4_state"),
            PoolTransfer(name=PoolName.DEEPSEEK_V4_C4),
        )

        assert result.restorable_prefix_pages == lengths
        assert result.kv_hit_pages == max(lengths, default=0)
        assert result.extra_pool_hit_pages == {
            "kv": 4,
            "swa": max(swa),
            "deepseek_v4_c4_state": max(state),
            "deepseek_v4_c4": 4,
        }

    def test_a_logical_anchor_proves_nothing_by_itself(self, attach: Attach) -> None:
        pools = host_pools(DeepSeekV4Model(), page_tokens=256, pages=4)
        backend = attach(pools, is_mla_model=True)

        assert self.query(backend).kv_hit_pages == 0
        assert backend.batch_exists(list(self.KEYS)) == 0
        assert self.query(backend, PoolTransfer(name=PoolName.DEEPSEEK_V4_C4)).kv_hit_pages == 0

    def test_block_groups_report_their_own_pages_and_limit_nothing(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2, 3, 4}, swa={2})
        groups = PoolTransfer(
            name=PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1
        )

        assert self.query(backend, groups) == PoolTransferResult(4, {"kv": 4, "swa": 2}, [1, 2, 3, 4])

    def test_block_groups_with_keys_are_looked_up_under_them(self, attach: Attach) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1, 2})
        backend.batch_set_v2([transfer(pools, "swa", ["g1", "g2"], [0, 1])])
        groups = PoolTransfer(
            name=PoolName.SWA,
            keys=["g1", "g2", "g3", "g4"],
            hit_policy=PoolHitPolicy.BLOCK_GROUPS,
            block_pages=2,
            group_pages=2,
        )

        assert self.query(backend, groups).extra_pool_hit_pages == {"kv": 2, "swa": 2}

    def test_a_long_prefix_costs_one_lookup_a_page_and_pool(self, attach: Attach) -> None:
        pools = host_pools(MambaModel())
        backend = attach(pools)
        self.store(backend, pools, kv={1}, mamba={1})
        before = {name: stats.lookup_hit + stats.lookup_missing for name, stats in _stats(backend).items()}

        backend.batch_exists_v2(["h1", *(f"absent-{page}" for page in range(999))], [trailing("mamba")])

        after = {name: stats.lookup_hit + stats.lookup_missing for name, stats in _stats(backend).items()}
        assert after["kv"] - before["kv"] <= 8
        assert after["mamba"] - before["mamba"] == 1


def _stats(backend: UnifiedCacheStore) -> dict[str, StoreStats]:
    return backend._connector.stats()


def test_a_page_written_over_is_restored_as_it_was_stored(attach: Attach) -> None:
    pools = host_pools(MambaModel())
    backend = attach(pools)
    pool: HostKVCache = pools["mamba"]
    (before, *_) = fill_random(pool)
    backend.batch_set_v2([transfer(pools, "mamba", ["key"], [0])])
    write_page(pool, 0, bytes(len(before)))

    backend.batch_get_v2([transfer(pools, "mamba", ["key"], [0])])

    assert read_page(pool, 0) == before
