# SPDX-License-Identifier: MIT
"""Whatever storage does, SGLang gets one verdict per page and no exception."""

from __future__ import annotations

import errno
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult

from ucm.integration.sglang.namespace import block_keys
from ucm.store.errors import StoreUnavailableError
from ucm.store.interface import BlockStatus
from ucm.testing.block_damage import cut, empty, flip_footer, flip_payload, zero
from ucm.testing.host_pools import MambaModel, MhaModel, SwaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_pages
from ucm.testing.posix_faults import faulty_call, hanging_call
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from ucm.testing.fault_injecting_store import FaultInjectingStore
    from ucm.testing.host_pools import HostPools

    from .conftest import Attach

KEYS = ["key-a", "key-b", "key-c"]
_TIMEOUTS = ("lookup_timeout_s", "load_timeout_s", "dump_timeout_s")
ERRORS = pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ValueError("bad"),
        TimeoutError("late"),
        RuntimeError("broken"),
        StoreUnavailableError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)


def swa(pools: HostPools, pages: list[int], keys: list[str] = KEYS) -> PoolTransfer:
    return PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=page_indices(pools["swa"], pages))


# sglang #38428
class TestAStoreThatRaises:
    @ERRORS
    def test_gives_false_for_every_page(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore], error: Exception
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        indices = page_indices(pools["kv"], [0, 1, 2])
        for store in faulty_stores.values():
            store.fail("load", error)
            store.fail("dump", error)

        assert backend.batch_set_v1(KEYS, indices) == [False] * 3
        assert backend.batch_get_v1(KEYS, indices) == [False] * 3
        assert backend.batch_set_v2([swa(pools, [0, 1, 2])]) == {"swa": [False] * 3}
        assert backend.batch_get_v2([swa(pools, [0, 1, 2])]) == {"swa": [False] * 3}
        assert not backend.set("key", pools["kv"].get_data_page(0))
        assert backend.get("key") is None

    @ERRORS
    def test_has_nothing(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore], error: Exception
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
        for store in faulty_stores.values():
            store.fail("lookup", error)

        assert backend.batch_exists(KEYS) == 0
        assert not backend.exists(KEYS[0])
        assert backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.SWA)]) == PoolTransferResult(
            0, {}, []
        )

    @pytest.mark.parametrize("policy", [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
    def test_is_no_hit_whatever_the_other_pools_have(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore], policy: PoolHitPolicy
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
        backend.batch_set_v2([swa(pools, [0, 1, 2])])
        query = PoolTransfer(name=PoolName.SWA, keys=["_"], hit_policy=policy)
        assert backend.batch_exists_v2(KEYS, [query]).kv_hit_pages == 3

        faulty_stores["sglang_v2/swa_6144x2"].fail("lookup", OSError(5, "Input/output error"))

        assert backend.batch_exists_v2(KEYS, [query]).kv_hit_pages == 0

    def test_costs_no_other_pool_of_the_batch(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore]
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        backend.register_mem_host_pool_v2(host_pools(MhaModel()).anchor, PoolName.DRAFT)
        faulty_stores["sglang_v2/swa_6144x2"].fail("dump", RuntimeError("broken"))
        draft = PoolTransfer(name=PoolName.DRAFT, keys=["key"], host_indices=page_indices(pools["kv"], [0]))

        assert backend.batch_set_v2([swa(pools, [0, 1, 2]), draft]) == {"swa": [False] * 3, "draft": [True]}

    def test_is_told_about_in_one_line_with_pool_and_pages(
        self,
        attach: Attach,
        faulty_stores: dict[str, FaultInjectingStore],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        faulty_stores["sglang_v2/swa_6144x2"].fail("load", OSError(5, "Input/output error"))

        with caplog.at_level(logging.WARNING):
            backend.batch_get_v2([swa(pools, [0, 1, 2])])

        (message,) = caplog.messages
        assert message == "load swa, 3 pages, first key-a: OSError: [Errno 5] Input/output error"

    def test_cannot_be_cleared(self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore]) -> None:
        backend = attach(host_pools(SwaModel()))
        faulty_stores["sglang_v2/swa_6144x2"].fail("scan", OSError(5, "Input/output error"))

        assert backend.clear() is False

    def test_does_not_keep_others_from_closing(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore]
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        faulty_stores[""].fail("close", OSError(5, "Input/output error"))

        backend.close()

        with pytest.raises(StoreUnavailableError):
            faulty_stores["sglang_v2/swa_6144x2"].lookup([])
        faulty_stores[""].heal()

    def test_works_again_once_the_cause_is_gone(
        self, attach: Attach, faulty_stores: dict[str, FaultInjectingStore]
    ) -> None:
        pools = host_pools(SwaModel())
        backend = attach(pools)
        store = faulty_stores["sglang_v2/swa_6144x2"]
        store.fail("dump", OSError(28, "No space left on device"))
        backend.batch_set_v2([swa(pools, [0, 1, 2])])

        store.heal()

        assert backend.batch_set_v2([swa(pools, [0, 1, 2])]) == {"swa": [True] * 3}


@pytest.mark.parametrize("status", [BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.FAILED])
def test_one_bad_page_costs_one_page(
    attach: Attach, faulty_stores: dict[str, FaultInjectingStore], status: BlockStatus
) -> None:
    pools = host_pools(MambaModel())
    backend = attach(pools)
    before = fill_random(pools["mamba"])
    move = PoolTransfer(name=PoolName.MAMBA, keys=KEYS, host_indices=page_indices(pools["mamba"], [0, 1, 2]))
    backend.batch_set_v2([move])
    (key,) = block_keys(KEYS[1:2], "_test-model_0_1__v2_tp_0_1__pool_mamba__component_0")
    (store,) = (store for name, store in faulty_stores.items() if "mamba" in name)
    store.answer("load", key, status)

    move.host_indices = page_indices(pools["mamba"], [4, 5, 6])
    assert backend.batch_get_v2([move]) == {"mamba": [True, False, True]}
    assert read_pages(pools["mamba"], [4, 5, 6]) == [before[0], before[5], before[2]]


def test_pages_that_change_their_shape_are_never_moved(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    before = fill_random(pools["swa"])
    backend.batch_set_v2([swa(pools, [0, 1, 2])])
    meta = pools["swa"].get_page_buffer_meta

    def grown(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = meta(indices)
        return pointers, [size + 64 for size in sizes]

    def split(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = meta(indices)
        return pointers * 2, sizes * 2

    for change in (grown, split, lambda _indices: None):
        monkeypatch.setattr(pools["swa"], "get_page_buffer_meta", change)
        assert backend.batch_get_v2([swa(pools, [4, 5, 6])]) == {"swa": [False] * 3}
        assert backend.batch_set_v2([swa(pools, [4, 5, 6], ["x", "y", "z"])]) == {"swa": [False] * 3}
    assert read_pages(pools["swa"]) == before


def test_states_that_change_their_size_are_never_moved(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = host_pools(MambaModel())
    backend = attach(pools)
    before = fill_random(pools["mamba"])
    move = PoolTransfer(name=PoolName.MAMBA, keys=KEYS, host_indices=page_indices(pools["mamba"], [0, 1, 2]))
    backend.batch_set_v2([move])
    wider = host_pools(MambaModel(linear_layers=3))["mamba"]
    monkeypatch.setattr(pools["mamba"], "get_page_buffer_meta", wider.get_page_buffer_meta)
    move.host_indices = page_indices(pools["mamba"], [4, 5, 6])

    assert backend.batch_get_v2([move]) == {"mamba": [False] * 3}
    move.keys = ["x", "y", "z"]
    assert backend.batch_set_v2([move]) == {"mamba": [False] * 3}
    assert read_pages(pools["mamba"]) == before


def directory(block: Path) -> None:
    block.unlink()
    block.mkdir()


def dangling_link(block: Path) -> None:
    block.unlink()
    block.symlink_to("nowhere")


# sglang #39269, #39550
@pytest.mark.parametrize("damage", [flip_payload, flip_footer, zero, cut, empty, directory, dangling_link])
def test_a_damaged_file_is_a_miss_and_costs_no_other_page(
    attach: Attach, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    before = fill_random(pools.anchor)
    backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
    damage(StoredBlocks(tmp_path, "test-model").primary(KEYS[1]))

    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6])) == [True, False, True]

    assert read_pages(pools.anchor, [4, 6]) == [before[0], before[2]]
    assert read_pages(pools.anchor, [3, 7]) == [before[3], before[7]]
    assert pools.guards.intact()


# sglang #31315
@pytest.mark.parametrize("damage", [flip_payload, flip_footer, zero, cut, empty])
def test_a_damaged_page_is_absent_from_then_on_and_the_next_set_writes_it_anew(
    attach: Attach, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    before = fill_random(pools.anchor)
    backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
    damage(StoredBlocks(tmp_path, "test-model").primary(KEYS[1]))

    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6])) == [True, False, True]
    assert backend.batch_exists(KEYS) == 1
    assert backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2])) == [True] * 3
    assert backend.batch_exists(KEYS) == 3
    assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6])) == [True] * 3
    assert read_pages(pools.anchor, [4, 5, 6]) == before[:3]


# sglang #35231, UCM #1176
@pytest.mark.parametrize("heads", [1, 3])
def test_pages_whose_sizes_and_addresses_are_aligned_to_nothing_are_never_lost(
    attach: Attach, heads: int
) -> None:
    pools = host_pools(MambaModel(anchor=MhaModel(layers=1, heads=heads, head_dim=1), conv_shapes=((5, 3),)))
    backend = attach(pools)
    kept = {name: fill_random(pools[name]) for name in ("kv", "mamba")}
    assert all(len(pages[0]) % 4096 for pages in kept.values())
    states = PoolTransfer(
        name=PoolName.MAMBA, keys=KEYS, host_indices=page_indices(pools["mamba"], [1, 2, 3])
    )
    assert backend.batch_set_v1(KEYS, page_indices(pools["kv"], [1, 2, 3])) == [True] * 3
    assert backend.batch_set_v2([states]) == {"mamba": [True] * 3}

    states.host_indices = page_indices(pools["mamba"], [5, 6, 7])
    assert backend.batch_get_v1(KEYS, page_indices(pools["kv"], [5, 6, 7])) == [True] * 3
    assert backend.batch_get_v2([states]) == {"mamba": [True] * 3}
    for name, pages in kept.items():
        assert read_pages(pools[name], [5, 6, 7]) == pages[1:4]
    assert pools.guards.intact()


# sglang #39269
def test_a_file_that_may_not_be_read_is_a_miss(attach: Attach, tmp_path: Path) -> None:
    pools = host_pools(MhaModel())
    backend = attach(pools)
    before = fill_random(pools.anchor)
    backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
    locked = StoredBlocks(tmp_path, "test-model").primary(KEYS[1]).name

    def refuse(_call: object, path: str, *_args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with faulty_call("open", locked, refuse):
        assert backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6])) == [True, False, True]

    assert read_pages(pools.anchor, [4, 5, 6]) == [before[0], before[5], before[2]]


# sglang #40312, #35181
class TestStorageThatHangs:
    def test_a_load_gives_up_at_its_deadline_and_writes_nothing_afterwards(
        self, attach: Attach, tmp_path: Path
    ) -> None:
        pools = host_pools(MhaModel())
        # Long enough for the pages that do not hang, on a busy machine too.
        backend = attach(pools, extra_config={"storage_backends": str(tmp_path), "load_timeout_s": 3})
        before = fill_random(pools.anchor)
        backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
        stuck = StoredBlocks(tmp_path, "test-model").primary(KEYS[1]).name

        with hanging_call("preadv", stuck) as hanging:
            start = time.monotonic()
            verdicts = backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6]))
            assert time.monotonic() - start < 30
            assert hanging.is_set()
            after = read_pages(pools.anchor)
        backend.close()  # Returns once the stuck read has ended.

        assert verdicts == [True, False, True]
        assert read_pages(pools.anchor) == after
        assert after[5] == before[5]

    @pytest.mark.parametrize("call", ["set", "get", "exists"])
    def test_costs_one_deadline_for_all_pools(self, attach: Attach, tmp_path: Path, call: str) -> None:
        pools = host_pools(SwaModel())
        config = {"storage_backends": str(tmp_path), **dict.fromkeys(_TIMEOUTS, 2.0)}
        backend = attach(pools, extra_config=config)
        for name in (PoolName.DRAFT, PoolName.INDEXER):
            backend.register_mem_host_pool_v2(host_pools(MhaModel()).anchor, name)
        names = [PoolName.SWA, PoolName.DRAFT, PoolName.INDEXER]
        moves = [
            PoolTransfer(name=name, keys=KEYS, host_indices=page_indices(pools["kv"], [0, 1, 2]))
            for name in names
        ]
        backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
        if call != "set":
            backend.batch_set_v2(moves)

        first = {"set": "access", "get": "open", "exists": "stat"}[call]
        with hanging_call(first, "/sglang_v2/"):
            start = time.monotonic()
            if call == "exists":
                assert backend.batch_exists_v2(KEYS, moves).kv_hit_pages == 0
            else:
                move = backend.batch_set_v2 if call == "set" else backend.batch_get_v2
                assert move(moves) == {name: [False] * 3 for name in names}
            assert 2.0 <= time.monotonic() - start < 3.9  # Two of them would be 4.0.
        backend.close()

    def test_close_is_bounded(self, attach: Attach, tmp_path: Path) -> None:
        pools = host_pools(MhaModel())
        backend = attach(pools, extra_config={"storage_backends": str(tmp_path), "load_timeout_s": 0.2})
        backend.batch_set_v1(KEYS, page_indices(pools.anchor, [0, 1, 2]))
        stuck = StoredBlocks(tmp_path, "test-model").primary(KEYS[1]).name

        with hanging_call("preadv", stuck):
            backend.batch_get_v1(KEYS, page_indices(pools.anchor, [4, 5, 6]))
            start = time.monotonic()
            backend.close()
            assert time.monotonic() - start < 30

    def test_a_staged_page_that_hangs_is_not_scattered(self, attach: Attach, tmp_path: Path) -> None:
        pools = host_pools(MambaModel())
        backend = attach(pools, extra_config={"storage_backends": str(tmp_path), "load_timeout_s": 0.3})
        before = fill_random(pools["mamba"])
        move = PoolTransfer(name=PoolName.MAMBA, keys=["key"], host_indices=page_indices(pools["mamba"], [0]))
        backend.batch_set_v2([move])
        stuck = StoredBlocks(tmp_path, "test-model").sidecar(f"mamba_{len(before[0])}x1", "key").name
        move.host_indices = page_indices(pools["mamba"], [5])

        with hanging_call("preadv", stuck):
            assert backend.batch_get_v2([move]) == {"mamba": [False]}
        backend.close()

        assert read_pages(pools["mamba"]) == before


def test_a_transfer_of_garbage_is_false_and_no_exception(attach: Attach) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    garbage: Any = PoolTransfer(name=PoolName.SWA, keys=[None, 3], host_indices="indices")

    assert backend.batch_get_v2([garbage]) == {"swa": [False, False]}
    assert backend.batch_set_v2([garbage]) == {"swa": [False, False]}


def test_a_hit_policy_of_a_later_release_is_the_strictest_one(attach: Attach) -> None:
    pools = host_pools(SwaModel())
    backend = attach(pools)
    backend.batch_set_v1(KEYS, page_indices(pools["kv"], [0, 1, 2]))
    backend.batch_set_v2([swa(pools, [2], KEYS[2:])])
    later: Any = "some_pages"

    result = backend.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.SWA, keys=["_"], hit_policy=later)])

    assert result.kv_hit_pages == 0
