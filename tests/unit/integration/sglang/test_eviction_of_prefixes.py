# SPDX-License-Identifier: MIT
"""What is left of conversations after an eviction: SGLang's own tree and controllers over several pools.

Every conversation begins with the same pages and takes a minute of its own; the minutes are made up by the
files' times. An eviction must leave what an eviction of whole conversations would leave: those used last,
restored from their first page to their last, and no block that none of them needs.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer

from ucm.store.options import Capacity
from ucm.store.posix.capacity import service
from ucm.store.posix.capacity.evictor import Evictor
from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DeepSeekV4Model, DsaModel, MambaModel, MhaModel, SwaModel, host_pools
from ucm.testing.pool_memory import page_indices
from ucm.testing.sglang_runtime import HicacheSettings

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ucm.store.posix.store import PosixStore
    from ucm.testing.host_pools import Model

    from .conftest import Attach

PAGE_TOKENS = 64
SHARED_PAGES, OWN_PAGES = 2, 1
# One of them is less than the 5% of the capacity that a run may remove too much.
CONVERSATIONS = 40
MODELS = {
    "mha": MhaModel(),
    "mamba": MambaModel(),
    "swa": SwaModel(),
    "indexer-beside-mla": DsaModel(),
    "deepseek-v4": DeepSeekV4Model(),
}


@pytest.fixture(autouse=True)
def _no_evictor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it to the test what is told, and when somebody evicts."""
    monkeypatch.setattr(service, "_TICK_S", 10_000.0)
    # It would tell what was used when an evictor comes up, too: before the test has asked, or after.
    monkeypatch.setattr(service, "publish", lambda _roots, _logs: [])


class Conversations:
    """A storage root, and prompts that begin alike."""

    def __init__(self, root: Path, model: Model) -> None:
        self.root = root
        self._model = model
        self.page_tokens = 256 if isinstance(model, DeepSeekV4Model) else PAGE_TOKENS
        self._minute = time.time() // 60 * 60 - 36_000

    def serve(self, seed: int, *, tells_prefixes: bool) -> AbstractContextManager[HicacheStack]:
        """Run one process's tiers; it has a capacity that is never reached."""
        storage = dynamic_storage(
            self.root,
            capacity_bytes="1TB",
            hicache_storage_pass_prefix_keys=tells_prefixes,
            **PATIENT,
        )
        settings = HicacheSettings(page_tokens=self.page_tokens, model_name="org/model", **storage)
        return hicache_stack(self._model, settings, pages=48, seed=seed)

    def tokens(self, conversation: int) -> list[int]:
        """Return one prompt."""
        shared, own = SHARED_PAGES * self.page_tokens, OWN_PAGES * self.page_tokens
        return [*range(1, shared + 1), *range(10_000 * (conversation + 1), 10_000 * (conversation + 1) + own)]

    def end_minute(self, stack: HicacheStack) -> set[Path]:
        """Give the blocks that were written and used since the last call their times; return them."""
        self._minute += 60
        touched = set()
        connector = cast("Any", stack.backend)._connector
        connector._touched_minute = 0
        for store in stores(stack):
            assert store.uses
            written, used = store.uses.take()
            for key in written.union(*used.values()):
                path = self.root / store.layout.path(key)
                if path.exists():
                    touched.add(path)
                    os.utime(path, (self._minute, self._minute))
        return touched

    def blocks(self) -> set[Path]:
        """Return all stored blocks."""
        return {path for path in self.root.rglob("?" * 32) if path.is_file()}

    def evict(self, share: float) -> None:
        """Leave no more than this part of what is there."""
        total = sum(path.stat().st_blocks * 512 for path in self.blocks())
        Evictor(str(self.root), Capacity(int(total * share / 0.95))).step()

    def restored_pages(self) -> tuple[list[int], set[Path]]:
        """Restart and restore each conversation, with nothing in memory of the ones before.

        Returns:
            How many pages came back of each, and the blocks that took; also of the beginning alone, as a new
            conversation would share it.
        """
        prompts = [self.tokens(conversation) for conversation in range(CONVERSATIONS)]
        prompts.append(prompts[0][: SHARED_PAGES * self.page_tokens])
        pages = []
        with self.serve(seed=9, tells_prefixes=True) as stack:
            for prompt in prompts:
                stack.tree.reset()
                pages.append(stack.restore(prompt).storage_tokens // self.page_tokens)
            used = self.end_minute(stack)
        return pages[:-1], used


def stores(stack: HicacheStack) -> list[PosixStore]:
    pools = cast("Any", stack.backend)._connector._pools()
    return [pool.store for pool in pools if pool.moves_bytes]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_eviction_leaves_whole_conversations_and_nothing_else(tmp_path: Path, model: Model) -> None:
    cache = Conversations(tmp_path, model)
    with cache.serve(seed=1, tells_prefixes=True) as first:
        for conversation in range(CONVERSATIONS):
            first.insert(cache.tokens(conversation))
            cache.end_minute(first)
    with cache.serve(seed=2, tells_prefixes=True) as second:
        second.restore(cache.tokens(0))  # The oldest has become the one used last.
        cache.end_minute(second)
    before = cache.blocks()
    cache.evict(share=0.6)
    left = cache.blocks()
    assert 0.4 * len(before) < len(left) < 0.65 * len(before)

    pages, used = cache.restored_pages()

    whole = SHARED_PAGES + OWN_PAGES
    survivors = [conversation for conversation in range(CONVERSATIONS) if pages[conversation] == whole]
    assert survivors == [0, *range(CONVERSATIONS - len(survivors) + 1, CONVERSATIONS)]
    assert len(survivors) >= 20
    assert used == left


def test_without_prefixes_told_the_shared_beginning_goes_first_and_that_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Conversations(tmp_path, MhaModel())
    with cache.serve(seed=1, tells_prefixes=False) as first:
        for conversation in range(CONVERSATIONS):
            first.insert(cache.tokens(conversation))
            cache.end_minute(first)
    cache.evict(share=0.6)
    pages, used = cache.restored_pages()
    assert set(pages) == {0}
    assert used == set()
    [warning] = [message for message in caplog.messages if "hicache_storage_pass_prefix_keys" in message]
    assert warning.startswith("a capacity is set, but")


def test_a_prefix_is_touched_once_a_minute_and_only_if_something_evicts(
    tmp_path: Path, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    pools = host_pools(MhaModel())
    info = HiCacheStorageExtraInfo(prefix_keys=["a" * 64, "b" * 64])
    indices = page_indices(pools.anchor, [0])
    plain = attach(pools)
    plain.batch_set_v1(["c" * 64], indices, info)
    evicting = attach(pools, extra_config={"storage_backends": str(tmp_path), "capacity_bytes": "1TB"})
    store = cast("Any", evicting.store)
    for key, touched in (("d", 2), ("e", 0)):
        evicting.batch_set_v1([key * 64], indices, info)
        _, used = store.uses.take()
        assert sum(map(len, used.values())) == touched
    cast("Any", evicting)._connector._touched_minute = 0
    evicting.batch_get_v1(["d" * 64], indices, info)
    _, used = store.uses.take()
    assert sum(map(len, used.values())) == 3


def test_a_prefix_is_touched_where_only_sidecars_have_bytes(tmp_path: Path, attach: Attach) -> None:
    pools = host_pools(DeepSeekV4Model(), page_tokens=256)
    backend = attach(pools, extra_config={"storage_backends": str(tmp_path), "capacity_bytes": "1TB"})
    info = HiCacheStorageExtraInfo(prefix_keys=["a" * 64, "b" * 64])
    move = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C4, keys=["c" * 64], host_indices=page_indices(pools["deepseek_v4_c4"], [0])
    )
    assert backend.batch_set_v2([move], info) == {PoolName.DEEPSEEK_V4_C4: [True]}
    store = cast("Any", backend)._connector._sidecars["deepseek_v4_c4"].store
    _, used = store.uses.take()
    assert sum(map(len, used.values())) == 2


def test_a_prefix_that_cannot_be_told_costs_no_verdict(tmp_path: Path, attach: Attach) -> None:
    class Hostile:
        @property
        def prefix_keys(self) -> list[str]:
            raise RuntimeError("no prefix today")

    pools = host_pools(MhaModel())
    backend = attach(pools, extra_config={"storage_backends": str(tmp_path), "capacity_bytes": "1TB"})
    indices, info = page_indices(pools.anchor, [0]), cast("Any", Hostile())
    assert backend.batch_set_v1(["c" * 64], indices, info) == [True]
    assert backend.batch_get_v1(["c" * 64], indices, info) == [True]


def test_of_a_trailing_pool_only_the_end_of_the_prefix_is_used(tmp_path: Path) -> None:
    cache = Conversations(tmp_path, MambaModel())
    first_turn = cache.tokens(0)
    second_turn = [*first_turn, *range(900_000, 900_000 + PAGE_TOKENS)]
    third_turn = [*second_turn, *range(910_000, 910_000 + PAGE_TOKENS)]
    with cache.serve(seed=1, tells_prefixes=True) as stack:
        for turn in (first_turn, second_turn, third_turn):
            stack.prefetch(turn)  # SGLang asks storage first, and so tells which pools are trailing.
            stack.insert(turn)
            touched = cache.end_minute(stack)
    states = {path for path in touched if "mamba" in str(path)}
    # The state that the third turn went on from, and its own; not that of the first.
    assert len(states) == 2
    assert len([path for path in cache.blocks() if "mamba" in str(path)]) == 3
    assert len(touched - states) == 5
