# SPDX-License-Identifier: MIT
"""The release's real host pools, moved through its real types by our backend, byte for byte."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from ucm.integration.sglang.unifiedcache_store import UnifiedCacheStore
from ucm.testing.pool_memory import fill_random, page_indices, read_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.testing.release_pools import ReleasePools

LAYOUTS = ["page_first", "page_first_direct"]
KINDS_WITH_BYTES = ["mha", "mla"]
KINDS_WITH_SIDECARS = ["mamba", "indexer", "deepseek_v4"]
HASHES = ["a" * 64, "b" * 64]


@pytest.fixture
def attach(storage: dict[str, Any]) -> Iterator[Callable[[ReleasePools], UnifiedCacheStore]]:
    """Attach our backend to pools as this release's controllers do."""
    backends = []

    def attach(pools: ReleasePools) -> UnifiedCacheStore:
        values = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "org/model",
            "extra_config": dict(storage),
        }
        known = inspect.signature(HiCacheStorageConfig).parameters
        config = HiCacheStorageConfig(**{name: value for name, value in values.items() if name in known})
        backend = UnifiedCacheStore(config, pools.anchor)
        backends.append(backend)
        backend.register_mem_pool_host(pools.anchor)
        for name, pool in pools.by_name.items():
            backend.register_mem_host_pool_v2(pool, PoolName(name))
        return backend

    yield attach
    for backend in backends:
        backend.close()


def transfers(pools: ReleasePools, hashes: list[str], page: int) -> list[PoolTransfer]:
    """Move pages `page`, `page` + 1, ... of each sidecar."""
    return [
        PoolTransfer(
            name=PoolName(name),
            host_indices=page_indices(pool, range(page, page + len(hashes))),
            keys=hashes,
        )
        for name, pool in pools.by_name.items()
        if name != "kv"
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS_WITH_BYTES)
def test_pages_of_the_anchor_come_back_in_other_places(
    kind: str,
    layout: str,
    pools: Callable[..., ReleasePools],
    attach: Any,  # noqa: ANN401 # A fixture.
) -> None:
    built = pools(kind, layout)
    pool = built.anchor
    backend = attach(built)
    before = fill_random(pool)

    assert backend.batch_set_v1(HASHES, page_indices(pool, [0, 1])) == [True, True]
    assert backend.batch_exists([*HASHES, "c"]) == 2
    assert backend.batch_get_v1([*HASHES, "c"], page_indices(pool, [3, 4, 5])) == [True, True, False]

    assert read_pages(pool, range(6)) == [*before[:3], before[0], before[1], before[5]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS_WITH_SIDECARS)
def test_pages_of_sidecars_come_back_in_other_places(
    kind: str,
    layout: str,
    pools: Callable[..., ReleasePools],
    attach: Any,  # noqa: ANN401
) -> None:
    built = pools(kind, layout)
    if any(pool.layout == "layer_first" for name, pool in built.by_name.items() if name != "kv"):
        pytest.skip("this SGLang has these pools in layer_first only")
    backend = attach(built)
    before = {name: fill_random(pool) for name, pool in built.by_name.items() if name != "kv"}
    assert before

    stored = backend.batch_set_v2(transfers(built, HASHES, 0))
    loaded = backend.batch_get_v2(transfers(built, [*HASHES, "c"], 3))

    assert stored == {name: [True, True] for name in before}
    assert loaded == {name: [True, True, False] for name in before}
    for name, pages in before.items():
        assert read_pages(built.by_name[name], range(6)) == [*pages[:3], pages[0], pages[1], pages[5]], name


@pytest.mark.parametrize("kind", KINDS_WITH_SIDECARS)
def test_a_prefix_ends_where_every_pool_can_end(
    kind: str,
    pools: Callable[..., ReleasePools],
    attach: Any,  # noqa: ANN401
) -> None:
    """Trailing pools have the last page only; their keys are placeholders, as SGLang sends them."""
    built = pools(kind)
    if any(pool.layout == "layer_first" for name, pool in built.by_name.items() if name != "kv"):
        pytest.skip("this SGLang has these pools in layer_first only")
    backend = attach(built)
    names = [name for name in built.by_name if name != "kv"]
    backend.batch_set_v1(HASHES, page_indices(built.anchor, [0, 1]))
    query = [
        PoolTransfer(PoolName(name), hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=["?"]) for name in names
    ]

    nothing = backend.batch_exists_v2(HASHES, query)
    backend.batch_set_v2(transfers(built, HASHES[1:], 1))
    both = backend.batch_exists_v2(HASHES, query)

    assert isinstance(both, PoolTransferResult)
    assert (nothing.kv_hit_pages, both.kv_hit_pages) == (0, 2)
    assert both.extra_pool_hit_pages[names[0]] == 2
    if hasattr(both, "restorable_prefix_pages"):
        assert (nothing.restorable_prefix_pages, both.restorable_prefix_pages) == ([], [2])


@pytest.mark.parametrize("kind", KINDS_WITH_BYTES)
def test_a_layout_that_scatters_pages_is_refused_with_the_flag_to_change(
    kind: str,
    pools: Callable[..., ReleasePools],
    attach: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(ValueError, match=r"host pool 'kv'.*'layer_first'.*--hicache-mem-layout page_first"):
        attach(pools(kind, "layer_first"))


def test_pools_that_a_release_has_in_one_layout_only_are_refused_with_the_release_to_use(
    pools: Callable[..., ReleasePools],
    attach: Any,  # noqa: ANN401
) -> None:
    built = pools("deepseek_v4")
    if built.by_name["swa"].layout == "page_first":
        pytest.skip("this SGLang has DeepSeek V4's pools in page_first")
    with pytest.raises(ValueError, match=r"host pool 'swa'.*'layer_first'.*DeepSeek V4 needs 0\.5\.13"):
        attach(built)


def test_our_backend_has_every_method_of_the_release_s_interface() -> None:
    interface = hicache_storage.HiCacheStorage
    missing = [
        name
        for name, member in vars(interface).items()
        if getattr(member, "__isabstractmethod__", False) and name not in vars(UnifiedCacheStore)
    ]

    assert missing == []


@pytest.mark.parametrize(
    "method",
    ["batch_exists_v2", "batch_get_v2", "batch_set_v2", "batch_exists", "batch_get_v1", "batch_set_v1"],
)
def test_our_methods_take_what_the_release_s_interface_takes(method: str) -> None:
    ours = inspect.signature(getattr(UnifiedCacheStore, method)).parameters
    theirs = inspect.signature(getattr(hicache_storage.HiCacheStorage, method)).parameters

    assert list(ours)[: len(theirs)] == list(theirs)
