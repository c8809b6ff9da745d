# SPDX-License-Identifier: MIT
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ucm.integration.sglang import page_access, rounds
from ucm.integration.sglang.page_access import StagedAccess, ZeroCopyAccess
from ucm.integration.sglang.pool import RegisteredPool
from ucm.store.interface import BlockKey, BlockStatus, StoreSpec
from ucm.store.memory import MemoryStore
from ucm.store.posix.config import PosixStoreConfig
from ucm.store.posix.store import PosixStore
from ucm.testing.host_pools import MambaModel, MhaModel, host_pools
from ucm.testing.pool_memory import fill_random, page_indices, read_pages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host import HostKVCache

DONE, MISSING, CORRUPT, FAILED = (
    BlockStatus.DONE,
    BlockStatus.MISSING,
    BlockStatus.CORRUPT,
    BlockStatus.FAILED,
)


class CountingStore(MemoryStore):
    """Remembers how many keys each lookup asked for."""

    def __init__(self, spec: StoreSpec) -> None:
        super().__init__(spec)
        self.asked: list[int] = []

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.asked.append(len(keys))
        return super().lookup(keys)


def registered(name: str, host_pool: HostKVCache) -> tuple[RegisteredPool, CountingStore]:
    access = (StagedAccess if name == "mamba" else ZeroCopyAccess)(name, host_pool)
    store = CountingStore(StoreSpec("namespace", access.segment_bytes, b"16 bytes of text"))
    pool = RegisteredPool(name=name, host_pool=host_pool, access=access, key_suffix="_m_0_1", store=store)
    return pool, store


def hashes(count: int) -> list[str]:
    return [f"hash-{page}" for page in range(count)]


@pytest.mark.parametrize("staged_pages", [1, 2, 5, 100])
def test_a_load_in_several_batches_is_one_load(monkeypatch: pytest.MonkeyPatch, staged_pages: int) -> None:
    host_pool = host_pools(MambaModel(), pages=16)["mamba"]
    before = fill_random(host_pool)
    monkeypatch.setattr(page_access, "_STAGING_BYTES", staged_pages * len(before[0]))
    pool, _ = registered("mamba", host_pool)
    rounds.dump([pool.dump([*hashes(3), "hash-4"], torch.tensor([0, 1, 2, 4]))])

    [statuses] = rounds.load([pool.load(hashes(5), torch.tensor([10, 11, 12, 13, 14]))])

    assert statuses == [DONE, DONE, DONE, MISSING, DONE]
    assert read_pages(host_pool, [10, 11, 12, 13, 14]) == [*before[:3], before[13], before[4]]


@pytest.mark.parametrize("changed", [0, -1])
def test_only_states_that_loaded_completely_reach_the_pool(tmp_path: Path, changed: int) -> None:
    host_pool = host_pools(MambaModel(), pages=16)["mamba"]
    before = fill_random(host_pool)
    access = StagedAccess("mamba", host_pool)
    spec = StoreSpec("states", access.segment_bytes, b"16 bytes of text")
    store = PosixStore(spec, PosixStoreConfig((str(tmp_path),)))
    pool = RegisteredPool(name="mamba", host_pool=host_pool, access=access, key_suffix="", store=store)
    rounds.dump([pool.dump(hashes(3), torch.tensor([0, 1, 2]))])
    (damaged,) = [path for path in tmp_path.rglob("*") if path.is_file() and before[1] in path.read_bytes()]
    stored = bytearray(damaged.read_bytes())
    stored[changed % spec.block_bytes] ^= 1
    damaged.write_bytes(stored)

    [statuses] = rounds.load([pool.load(hashes(4), torch.tensor([10, 11, 12, 13]))])

    assert statuses == [DONE, CORRUPT, DONE, MISSING]
    assert read_pages(host_pool, [10, 11, 12, 13]) == [before[0], before[11], before[2], before[13]]
    store.close()


def test_a_prefix_that_is_not_there_costs_one_short_lookup() -> None:
    pool, store = registered("kv", host_pools(MhaModel()).anchor)

    assert rounds.look_up([pool.leading_pages(hashes(1000))]) == [0]
    assert store.asked == [8]


@pytest.mark.parametrize("stored", [1, 7, 8, 9, 12])
def test_leading_pages_are_counted_across_lookups(stored: int) -> None:
    host_pool = host_pools(MhaModel(), pages=16).anchor
    pool, store = registered("kv", host_pool)
    rounds.dump([pool.dump(hashes(stored), page_indices(host_pool, range(stored)))])

    assert rounds.look_up([pool.leading_pages(hashes(12))]) == [stored]
    assert len(store.asked) <= 2


def test_nothing_to_move_is_no_call_at_all() -> None:
    pool, store = registered("kv", host_pools(MhaModel()).anchor)
    store.close()

    assert rounds.load([pool.load([], torch.empty(0, dtype=torch.int64))]) == [[]]
    assert rounds.dump([pool.dump([], torch.empty(0, dtype=torch.int64))]) == [[]]


@pytest.mark.parametrize("indices", [None, torch.arange(64), torch.arange(3 * 64 + 1)])
def test_indices_that_do_not_fit_the_pages_fail_every_page(indices: torch.Tensor | None) -> None:
    pool, _ = registered("kv", host_pools(MhaModel()).anchor)

    assert rounds.load([pool.load(hashes(3), indices)]) == [[FAILED] * 3]
    assert rounds.dump([pool.dump(hashes(3), indices)]) == [[FAILED] * 3]
