# SPDX-License-Identifier: MIT
"""DeepSeek V4 under SGLang's own controller: an anchor without bytes and six pools that must agree."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ucm.testing.block_damage import flip_payload
from ucm.testing.fault_injecting_store import FaultInjectingStore
from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import FLASH_COMPRESS_RATIOS, DeepSeekV4Model, MhaModel, Model
from ucm.testing.sglang_runtime import HicacheSettings
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ucm.testing.fault_injecting_store import Operation
    from ucm.testing.hicache_stack import Contents

PAGE_TOKENS = 256
MODEL_NAME = "deepseek-ai/DeepSeek-V4-Flash"
PREFIX = list(range(1, 4 * PAGE_TOKENS + 1))
"""A prompt of four pages."""

EVERY_PAGE = {
    "deepseek_v4_c4": "deepseek_v4_c4_74880x1",
    "deepseek_v4_c4_indexer": "deepseek_v4_c4_indexer_16896x1",
    "deepseek_v4_c128": "deepseek_v4_c128_1728x1",
}
"""Pools that need all pages of a prefix, and their namespaces."""

LAST_PAGE = {
    "swa": "swa_748800x1",
    "deepseek_v4_c4_state": "deepseek_v4_c4_state_131072x1",
    "deepseek_v4_c4_indexer_state": "deepseek_v4_c4_indexer_state_32768x1",
}
"""Pools that need the page in which a prefix ends, and their namespaces."""


def serve(
    root: Path,
    model: Model | None = None,
    *,
    layout: str = "page_first",
    seed: int = 0,
    draft_tokens: int = 0,
    pages: int = 9,
    **options: object,
) -> AbstractContextManager[HicacheStack]:
    settings = HicacheSettings(
        layout=layout,
        page_tokens=PAGE_TOKENS,
        model_name=MODEL_NAME,
        draft_tokens=draft_tokens,
        **dynamic_storage(
            root,
            module_path="ucm.testing.recording_store",
            class_name="RecordingStore",
            **PATIENT,
            **options,
        ),
    )
    return hicache_stack(model or DeepSeekV4Model(), settings, pages=pages, seed=seed)


def assert_holds(restored: Contents, inserted: Contents, pages: int) -> None:
    """Compare what is on the device with the first `pages` pages that were inserted."""
    for pool in EVERY_PAGE:
        assert restored[pool] == inserted[pool][:pages], pool
    for pool in LAST_PAGE:
        assert restored[pool][-1:] == inserted[pool][:pages][-1:], pool


def restorable(stack: HicacheStack) -> list[int]:
    """Return the backend's answer to the latest hit query."""
    lengths: list[int] = stack.backend.of("batch_exists_v2")[-1].result.restorable_prefix_pages
    return lengths


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_restart_restores_all_six_pools_byte_for_byte(tmp_path: Path, layout: str) -> None:
    with serve(tmp_path, layout=layout, seed=1) as first:
        inserted = first.insert(PREFIX)
    with serve(tmp_path, layout=layout, seed=2) as second:
        restored = second.restore(PREFIX)
        assert second.pools.guards.intact()
    assert restored.storage_tokens == len(PREFIX)
    assert_holds(restored.contents, inserted, 4)


def test_flash_with_its_draft_layer_survives_a_restart(tmp_path: Path) -> None:
    flash = DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=1)
    prefix = PREFIX[: 2 * PAGE_TOKENS]
    with serve(tmp_path, flash, seed=1, draft_tokens=4, pages=2) as first:
        inserted = first.insert(prefix)
    with serve(tmp_path, flash, seed=2, draft_tokens=4, pages=2) as second:
        restored = second.restore(prefix)
    assert restored.storage_tokens == len(prefix)
    assert_holds(restored.contents, inserted, 2)


def test_a_node_is_written_to_its_six_pools_before_the_anchor(tmp_path: Path) -> None:
    with serve(tmp_path) as stack:
        stack.insert(PREFIX)
        hashes = stack.page_hashes(PREFIX)
        writes = stack.backend.requests("batch_set_v1", "batch_set_v2")
    # SGLang splits off the last window, so that it can drop the rest of the sliding-window state.
    assert writes == [
        ("batch_set_v2", [], dict.fromkeys([*LAST_PAGE, *EVERY_PAGE], hashes[:3])),
        ("batch_set_v1", hashes[:3], {}),
        ("batch_set_v2", [], dict.fromkeys([*LAST_PAGE, *EVERY_PAGE], hashes[3:])),
        ("batch_set_v1", hashes[3:], {}),
    ]


def test_a_node_outside_the_window_is_written_to_three_pools(tmp_path: Path) -> None:
    with serve(tmp_path) as stack:
        stack.insert(PREFIX, outside_window_tokens=3 * PAGE_TOKENS)
        hashes = stack.page_hashes(PREFIX)
        writes = stack.backend.requests("batch_set_v2")
    assert writes == [
        ("batch_set_v2", [], dict.fromkeys(EVERY_PAGE, hashes[:3])),
        ("batch_set_v2", [], dict.fromkeys([*LAST_PAGE, *EVERY_PAGE], hashes[3:])),
    ]
    blocks = StoredBlocks(tmp_path, MODEL_NAME, replicated=True)
    counts = dict.fromkeys(EVERY_PAGE.values(), 4) | dict.fromkeys(LAST_PAGE.values(), 1)
    assert blocks.counts() == {f"sglang_v2/{namespace}": count for namespace, count in counts.items()}


def test_a_restore_asks_with_placeholders_and_reads_the_window_last(tmp_path: Path) -> None:
    with serve(tmp_path) as first:
        first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
    with serve(tmp_path) as second:
        second.restore(PREFIX)
        reads = second.backend.requests("batch_exists_v2", "batch_get_v1", "batch_get_v2")
    assert reads == [
        (
            "batch_exists_v2",
            hashes,
            dict.fromkeys(EVERY_PAGE) | {pool: ["__placeholder__"] for pool in LAST_PAGE},
        ),
        ("batch_get_v1", hashes, {}),
        ("batch_get_v2", [], dict.fromkeys(EVERY_PAGE, hashes)),
        ("batch_get_v2", [], dict.fromkeys(LAST_PAGE, hashes[3:])),
    ]


@pytest.mark.parametrize("page", [0, 3], ids=["first-page", "last-page"])
@pytest.mark.parametrize("pool", [*EVERY_PAGE, *LAST_PAGE])
def test_a_removed_page_rules_out_the_prefixes_that_need_it(tmp_path: Path, pool: str, page: int) -> None:
    with serve(tmp_path, seed=1) as first:
        inserted = first.insert(PREFIX)
        page_hash = first.page_hashes(PREFIX)[page]
    block_of(tmp_path, pool, page_hash).unlink()
    with serve(tmp_path, seed=2) as second:
        restored = second.restore(PREFIX)
        lengths = restorable(second)
        boundaries = second.backend.of("batch_exists_v2")[0].result.extra_pool_hit_pages
    assert lengths == lengths_without(pool, page)
    assert restored.storage_tokens == max(lengths, default=0) * PAGE_TOKENS
    assert_holds(restored.contents, inserted, max(lengths, default=0))
    assert boundaries[pool] == max(lengths, default=0)


@pytest.mark.parametrize("page", [0, 3], ids=["first-page", "last-page"])
@pytest.mark.parametrize("pool", [*EVERY_PAGE, *LAST_PAGE])
def test_a_damaged_page_is_never_restored_and_then_no_longer_there(
    tmp_path: Path, pool: str, page: int
) -> None:
    with serve(tmp_path, seed=1) as first:
        inserted = first.insert(PREFIX)
        page_hash = first.page_hashes(PREFIX)[page]
    flip_payload(block_of(tmp_path, pool, page_hash))
    is_read = pool in EVERY_PAGE or page == 3
    with serve(tmp_path, seed=2) as second:
        tried = second.restore(PREFIX)
        assert restorable(second) == [1, 2, 3, 4]
        # SGLang takes a V4 prefix whole or not at all.
        assert tried.storage_tokens == (0 if is_read else len(PREFIX))
    with serve(tmp_path, seed=3) as third:
        restored = third.restore(PREFIX)
        lengths = restorable(third)
    assert lengths == (lengths_without(pool, page) if is_read else [1, 2, 3, 4])
    assert restored.storage_tokens == max(lengths, default=0) * PAGE_TOKENS
    assert_holds(restored.contents, inserted, max(lengths, default=0))


@pytest.mark.parametrize("pool", [*EVERY_PAGE, *LAST_PAGE])
def test_a_prompt_with_one_window_is_lost_with_any_of_its_last_pages(tmp_path: Path, pool: str) -> None:
    with serve(tmp_path) as first:
        first.insert(PREFIX, outside_window_tokens=3 * PAGE_TOKENS)
        last = first.page_hashes(PREFIX)[3]
    with serve(tmp_path) as second:
        assert second.restore(PREFIX).storage_tokens == len(PREFIX)
        assert restorable(second) == [4]
    block_of(tmp_path, pool, last).unlink()
    with serve(tmp_path) as third:
        assert third.restore(PREFIX).storage_tokens == 0
        assert restorable(third) == []


def test_a_prompt_that_leaves_inside_a_node_without_states_restores_nothing(tmp_path: Path) -> None:
    with serve(tmp_path) as first:
        first.insert(PREFIX, outside_window_tokens=3 * PAGE_TOKENS)
    with serve(tmp_path) as second:
        assert second.restore(PREFIX[: 2 * PAGE_TOKENS]).storage_tokens == 0
        assert restorable(second) == []


def test_a_prompt_restores_up_to_the_inner_node_where_another_ended(tmp_path: Path) -> None:
    prompt = [*PREFIX[: 3 * PAGE_TOKENS], *[7] * PAGE_TOKENS]
    with serve(tmp_path, seed=1) as first:
        inserted = first.insert(PREFIX[: 2 * PAGE_TOKENS], outside_window_tokens=PAGE_TOKENS)
        first.insert(PREFIX, outside_window_tokens=3 * PAGE_TOKENS)
    with serve(tmp_path, seed=2) as second:
        restored = second.restore(prompt)
        assert restorable(second) == [2]
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 2)


def test_a_longer_prompt_fetches_only_the_pages_it_adds(tmp_path: Path) -> None:
    with serve(tmp_path, seed=1) as first:
        first.insert(PREFIX[: 2 * PAGE_TOKENS])
        inserted = first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
    with serve(tmp_path, seed=2) as second:
        second.restore(PREFIX[: 2 * PAGE_TOKENS])
        restored = second.restore(PREFIX)
        reads = second.backend.of("batch_get_v1")
    assert [read.keys for read in reads] == [hashes[:2], hashes[2:]]
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 4)


def test_three_prompts_are_restored_at_once(tmp_path: Path) -> None:
    prompts = [[token + shift for token in PREFIX[: 3 * PAGE_TOKENS]] for shift in (0, 5000, 10000)]
    with serve(tmp_path, seed=1) as first:
        inserted = [first.insert(prompt) for prompt in prompts]
    with serve(tmp_path, seed=2) as second:
        handles = [second.begin_prefetch(prompt) for prompt in prompts]
        loaded = [second.finish_prefetch(handle) for handle in handles]
        restored = [second.restore(prompt) for prompt in prompts]
    assert loaded == [3 * PAGE_TOKENS] * 3
    for found, expected in zip(restored, inserted, strict=True):
        assert_holds(found.contents, expected, 3)


def test_a_replica_restores_what_another_has_just_written(tmp_path: Path) -> None:
    with serve(tmp_path, seed=1) as writer, serve(tmp_path, seed=2) as reader:
        assert reader.restore(PREFIX).storage_tokens == 0
        inserted = writer.insert(PREFIX)
        restored = reader.restore(PREFIX)
    assert restored.storage_tokens == len(PREFIX)
    assert_holds(restored.contents, inserted, 4)


@pytest.mark.parametrize("operation", ["lookup", "load", "dump"])
@pytest.mark.parametrize("pool", ["deepseek_v4_c4", "deepseek_v4_c4_state"])
def test_one_failing_store_is_a_miss_until_it_heals(tmp_path: Path, pool: str, operation: Operation) -> None:
    later = [token + 5000 for token in PREFIX]
    with serve(tmp_path, seed=1) as first, serve(tmp_path, seed=2) as second:
        stores = [wrap_store(stack, pool) for stack in (first, second)]
        for store in stores:
            store.fail(operation, OSError(5, "I/O error"))
        first.insert(PREFIX)
        assert second.restore(PREFIX).storage_tokens == 0
        for store in stores:
            store.heal()
        inserted = first.insert(later)
        restored = second.restore(later)
    assert restored.storage_tokens == len(later)
    assert_holds(restored.contents, inserted, 4)


def test_the_anchor_moves_nothing_and_says_so(tmp_path: Path) -> None:
    with serve(tmp_path) as stack:
        stack.insert(PREFIX)
        writes = stack.backend.of("batch_set_v1")
        assert stack.backend.batch_exists(stack.page_hashes(PREFIX)) == 0
    assert [write.result for write in writes] == [[True] * 3, [True]]


def test_an_anchor_that_gets_a_buffer_is_no_longer_believed(tmp_path: Path) -> None:
    with serve(tmp_path) as first:
        first.insert(PREFIX)
    with serve(tmp_path) as second:
        second.pools.anchor.kv_buffer = torch.zeros(1)
        assert second.restore(PREFIX).storage_tokens == 0
        second.insert([token + 5000 for token in PREFIX])
        writes = second.backend.of("batch_set_v1")
    assert writes
    assert not any(any(write.result) for write in writes)


def test_a_primary_pool_that_loses_its_store_or_buffer_fails_instead_of_doing_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, MhaModel()) as stack:
        stack.backend._connector._primary.store.close()
        stack.insert(PREFIX)
        lost_store = stack.backend.of("batch_set_v1")[-1].result
    with serve(tmp_path, MhaModel()) as stack:
        stack.settle()
        stack.pools.anchor.kv_buffer = None
        indices = torch.arange(PAGE_TOKENS)
        lost_buffer = (
            stack.backend.batch_set_v1(["page"], indices),
            stack.backend.batch_get_v1(["page"], indices),
        )
    assert not any(lost_store)
    assert lost_buffer == ([False], [False])


def test_six_pools_share_the_threads_of_one_engine(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serve(tmp_path, io_threads=2) as stack:
        stack.insert(PREFIX)
        stack.prefetch([token + 5000 for token in PREFIX])
        added = [thread for thread in threading.enumerate() if thread not in before]
    controller_threads = 4
    assert len(added) <= controller_threads + 2


def lengths_without(pool: str, page: int) -> list[int]:
    """Return the prefix lengths, of four pages, that do not need one page of a pool."""
    return [n for n in range(1, 5) if (n - 1 != page if pool in LAST_PAGE else n <= page)]


def block_of(root: Path, pool: str, page_hash: str) -> Path:
    return StoredBlocks(root, MODEL_NAME, replicated=True).sidecar((EVERY_PAGE | LAST_PAGE)[pool], page_hash)


def wrap_store(stack: HicacheStack, pool: str) -> FaultInjectingStore:
    sidecar = stack.backend._connector._sidecars[pool]
    store = sidecar.store = FaultInjectingStore(sidecar.store)
    return store
