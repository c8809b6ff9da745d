# SPDX-License-Identifier: MIT
"""SGLang's own controller and radix tree on our backend, for every kind of pool but DeepSeek V4's."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.utils import get_storage_hash_str

from ucm.store import StoreUnavailableError
from ucm.testing.block_damage import flip_payload
from ucm.testing.fault_injecting_store import FaultInjectingStore
from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import DsaModel, MambaModel, MhaModel, MlaModel, Model, SwaModel
from ucm.testing.pool_memory import fill_random, page_count, page_indices, read_pages
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from ucm.store import Block, BlockStatus
    from ucm.testing.fault_injecting_store import Operation
    from ucm.testing.hicache_stack import Contents
    from ucm.testing.recording_store import Request

PAGE_TOKENS = 64
MODEL_NAME = "org/model"

PREFIX = list(range(1, 4 * PAGE_TOKENS + 1))
"""A prompt of four pages."""

MODELS = {
    "mha": MhaModel(),
    "mha-fp8": MhaModel(dtype=torch.float8_e4m3fn),
    "mla": MlaModel(),
    "mamba": MambaModel(),
    "mamba-conv-only": MambaModel(temporal_shape=(0, 4, 4)),
    "mamba-beside-mla": MambaModel(anchor=MlaModel()),
    "indexer-beside-mla": DsaModel(),
    "swa": SwaModel(),
}
LAYOUTS = ("page_first", "page_first_direct")


def serve(
    root: Path, model: Model, *, layout: str = "page_first", seed: int = 0, pages: int = 16
) -> AbstractContextManager[HicacheStack]:
    """Run one process's tiers on `root`; a second one with another seed is a restart."""
    storage = dynamic_storage(
        root, module_path="ucm.testing.recording_store", class_name="RecordingStore", **PATIENT
    )
    settings = HicacheSettings(layout=layout, page_tokens=PAGE_TOKENS, model_name=MODEL_NAME, **storage)
    return hicache_stack(model, settings, pages=pages, seed=seed)


def assert_holds(restored: Contents, inserted: Contents, pages: int) -> None:
    """Compare what is on the device with the first `pages` pages that were inserted."""
    assert len(restored["kv"]) == pages
    for pool, found in restored.items():
        expected = inserted[pool][:pages]
        assert bool(found) == bool(expected), pool
        assert found == expected[len(expected) - len(found) :], pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_restart_restores_every_pool_byte_for_byte(tmp_path: Path, model: Model, layout: str) -> None:
    with serve(tmp_path, model, layout=layout, seed=1) as first:
        inserted = first.insert(PREFIX)
    with serve(tmp_path, model, layout=layout, seed=2) as second:
        restored = second.restore(PREFIX)
        assert second.pools.guards.intact()
    assert restored.storage_tokens == len(PREFIX)
    assert all(restored.contents.values())
    assert_holds(restored.contents, inserted, 4)


def test_a_mamba_state_is_written_before_its_kv_and_read_after_it(tmp_path: Path) -> None:
    with serve(tmp_path, MambaModel()) as first:
        first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
        writes = first.backend.requests()
    with serve(tmp_path, MambaModel()) as second:
        second.restore(PREFIX)
        reads = second.backend.requests()
    attach: list[Request] = [
        ("register_mem_pool_host", [], {}),
        ("register_mem_host_pool_v2", [], {"kv": None}),
        ("register_mem_host_pool_v2", [], {"mamba": None}),
    ]
    assert writes == [
        *attach,
        ("batch_set_v2", [], {"mamba": hashes[3:]}),
        ("batch_set_v1", hashes, {}),
    ]
    assert reads == [
        *attach,
        ("batch_exists_v2", hashes, {"mamba": ["__placeholder__"]}),
        ("batch_get_v1", hashes, {}),
        ("batch_get_v2", [], {"mamba": hashes[3:]}),
    ]


def test_an_indexer_is_looked_up_without_keys_and_read_with_all_of_them(tmp_path: Path) -> None:
    with serve(tmp_path, DsaModel()) as first:
        first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
        writes = first.backend.requests("batch_set_v1", "batch_set_v2")
    with serve(tmp_path, DsaModel()) as second:
        second.restore(PREFIX)
        reads = second.backend.requests("batch_exists_v2", "batch_get_v1", "batch_get_v2")
    assert writes == [("batch_set_v2", [], {"indexer": hashes}), ("batch_set_v1", hashes, {})]
    assert reads == [
        ("batch_exists_v2", hashes, {"indexer": None}),
        ("batch_get_v1", hashes, {}),
        ("batch_get_v2", [], {"indexer": hashes}),
        ("batch_get_v2", [], {}),
    ]


def test_only_the_window_of_a_sliding_window_pool_is_read(tmp_path: Path) -> None:
    with serve(tmp_path, SwaModel(window_tokens=2 * PAGE_TOKENS)) as first:
        first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
    with serve(tmp_path, SwaModel(window_tokens=2 * PAGE_TOKENS)) as second:
        second.restore(PREFIX)
        reads = second.backend.requests("batch_exists_v2", "batch_get_v1", "batch_get_v2")
    assert reads == [
        ("batch_exists_v2", hashes, {"swa": ["__placeholder__"] * 2}),
        ("batch_get_v1", hashes, {}),
        ("batch_get_v2", [], {"swa": hashes[2:]}),
    ]


@pytest.mark.parametrize(
    ("model", "replicated", "namespace", "pages"),
    [
        (MhaModel(), False, None, []),
        (MlaModel(), True, None, []),
        (MambaModel(), False, "mamba_476x1", [3]),
        (DsaModel(), True, "indexer_25344x1", [0, 1, 2, 3]),
        (SwaModel(), False, "swa_6144x2", [0, 1, 2, 3]),
    ],
    ids=["mha", "mla", "mamba", "indexer", "swa"],
)
def test_every_page_is_one_file_where_the_format_puts_it(
    tmp_path: Path, model: Model, replicated: bool, namespace: str | None, pages: list[int]
) -> None:
    with serve(tmp_path, model) as stack:
        stack.insert(PREFIX)
        hashes = stack.page_hashes(PREFIX)
    blocks = StoredBlocks(tmp_path, MODEL_NAME, replicated)
    sidecars = {} if namespace is None else {f"sglang_v2/{namespace}": len(pages)}
    assert blocks.counts() == {".": 4, **sidecars}
    assert all(blocks.primary(page_hash).is_file() for page_hash in hashes)
    assert all(blocks.sidecar(str(namespace), hashes[page]).is_file() for page in pages)


@pytest.mark.parametrize("model", [MhaModel(), DsaModel(), SwaModel()], ids=["mha", "indexer", "swa"])
def test_a_prompt_that_leaves_a_stored_one_restores_the_pages_they_share(
    tmp_path: Path, model: Model
) -> None:
    with serve(tmp_path, model, seed=1) as first:
        inserted = first.insert(PREFIX)
    with serve(tmp_path, model, seed=2) as second:
        restored = second.restore([*PREFIX[: 2 * PAGE_TOKENS], *[7] * 2 * PAGE_TOKENS])
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 2)


def test_a_prompt_that_leaves_where_no_state_was_kept_restores_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, MambaModel()) as first:
        first.insert(PREFIX)
    with serve(tmp_path, MambaModel()) as second:
        restored = second.restore(PREFIX[: 2 * PAGE_TOKENS])
        [query] = second.backend.of("batch_exists_v2")
    assert restored.storage_tokens == 0
    assert query.result.restorable_prefix_pages == []


def test_a_prompt_restores_up_to_an_inner_node_that_kept_its_state(tmp_path: Path) -> None:
    with serve(tmp_path, MambaModel(), seed=1) as first:
        inserted = first.insert(PREFIX[: 2 * PAGE_TOKENS])
        first.insert(PREFIX)
    with serve(tmp_path, MambaModel(), seed=2) as second:
        restored = second.restore([*PREFIX[: 3 * PAGE_TOKENS], *[7] * PAGE_TOKENS])
        [query] = second.backend.of("batch_exists_v2")
    assert query.result.restorable_prefix_pages == [2]
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 2)


def test_a_longer_prompt_fetches_only_the_pages_it_adds(tmp_path: Path) -> None:
    with serve(tmp_path, MambaModel(), seed=1) as first:
        first.insert(PREFIX[: 2 * PAGE_TOKENS])
        inserted = first.insert(PREFIX)
        hashes = first.page_hashes(PREFIX)
    with serve(tmp_path, MambaModel(), seed=2) as second:
        second.restore(PREFIX[: 2 * PAGE_TOKENS])
        restored = second.restore(PREFIX)
        reads = second.backend.of("batch_get_v1")
    assert [read.keys for read in reads] == [hashes[:2], hashes[2:]]
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 4)


@pytest.mark.parametrize("model", [MhaModel(), DsaModel(), SwaModel()], ids=["mha", "indexer", "swa"])
def test_a_prompt_longer_than_one_batch_of_the_controller_is_restored_whole(
    tmp_path: Path, model: Model
) -> None:
    prompt = list(range(300 * PAGE_TOKENS))
    with serve(tmp_path, model, seed=1, pages=301) as first:
        inserted = first.insert(prompt)
    with serve(tmp_path, model, seed=2, pages=301) as second:
        restored = second.restore(prompt)
        loads = second.backend.of("batch_get_v1")
    assert [len(load.keys) for load in loads] == [128, 128, 44]
    assert restored.storage_tokens == len(prompt)
    assert_holds(restored.contents, inserted, 300)


@pytest.mark.parametrize("model", [MhaModel(), MambaModel(), DsaModel()], ids=["mha", "mamba", "indexer"])
def test_a_replica_restores_what_another_has_just_written(tmp_path: Path, model: Model) -> None:
    with serve(tmp_path, model, seed=1) as writer, serve(tmp_path, model, seed=2) as reader:
        assert reader.restore(PREFIX).storage_tokens == 0
        inserted = writer.insert(PREFIX)
        restored = reader.restore(PREFIX)
    assert restored.storage_tokens == len(PREFIX)
    assert_holds(restored.contents, inserted, 4)


@pytest.mark.parametrize(
    ("model", "namespace", "page", "pages_without_it"),
    [
        (MhaModel(), None, 0, 0),
        (MhaModel(), None, 3, 3),
        (MambaModel(), None, 0, 0),
        (MambaModel(), None, 3, 0),  # The only state is that of the fourth page.
        (MambaModel(), "mamba_476x1", 3, 0),
        (DsaModel(), None, 3, 3),
        (DsaModel(), "indexer_25344x1", 0, 0),
        (DsaModel(), "indexer_25344x1", 3, 3),
        (SwaModel(), None, 3, 3),
        (SwaModel(), "swa_6144x2", 1, 4),  # Outside the window of two pages.
        (SwaModel(), "swa_6144x2", 2, 2),
        (SwaModel(), "swa_6144x2", 3, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("damage", ["removed", "damaged"])
def test_a_bad_page_is_a_miss_of_what_needs_it_and_of_nothing_else(
    tmp_path: Path, model: Model, namespace: str | None, page: int, pages_without_it: int, damage: str
) -> None:
    with serve(tmp_path, model, seed=1) as first:
        inserted = first.insert(PREFIX)
        page_hash = first.page_hashes(PREFIX)[page]
    blocks = StoredBlocks(tmp_path, MODEL_NAME, replicated=isinstance(model, DsaModel))
    block = blocks.primary(page_hash) if namespace is None else blocks.sidecar(namespace, page_hash)
    if damage == "removed":
        block.unlink()
    else:
        flip_payload(block)
    with serve(tmp_path, model, seed=2) as second:
        if damage == "damaged":
            # The lookup does not read the page. What the load finds out, it leaves for the next lookup.
            second.restore(PREFIX)
        restored = second.restore(PREFIX)
    assert_holds(restored.contents, inserted, pages_without_it)


def test_a_damaged_page_is_written_again_by_the_next_cold_run(tmp_path: Path) -> None:
    with serve(tmp_path, MhaModel(), seed=1) as first:
        first.insert(PREFIX)
        block = StoredBlocks(tmp_path, MODEL_NAME).primary(first.page_hashes(PREFIX)[1])
    flip_payload(block)
    with serve(tmp_path, MhaModel(), seed=2) as second:
        assert second.restore(PREFIX).storage_tokens == PAGE_TOKENS
        recomputed = second.insert(PREFIX)
    with serve(tmp_path, MhaModel(), seed=3) as third:
        restored = third.restore(PREFIX)
    assert restored.storage_tokens == len(PREFIX)
    assert restored.contents["kv"][1] == recomputed["kv"][1]


class VanishingStore(FaultInjectingStore):
    """A store from which another replica's eviction takes the third page and all later ones before a load."""

    def load(self, blocks: Sequence[Block]) -> list[BlockStatus]:
        self.delete([block.key for block in blocks[2:]])
        return super().load(blocks)


def test_pages_that_vanish_between_lookup_and_load_cost_only_themselves(tmp_path: Path) -> None:
    with serve(tmp_path, MhaModel(), seed=1) as first:
        inserted = first.insert(PREFIX)
    with serve(tmp_path, MhaModel(), seed=2) as second:
        host = second.pools["kv"]
        before = fill_random(host)
        wrap_stores(second, VanishingStore)
        restored = second.restore(PREFIX)
        [query], [load] = second.backend.of("batch_exists"), second.backend.of("batch_get_v1")
        untouched = sum(now == then for now, then in zip(read_pages(host), before, strict=True))
    assert query.result == 4
    assert load.result == [True, True, False, False]
    assert restored.storage_tokens == 2 * PAGE_TOKENS
    assert_holds(restored.contents, inserted, 2)
    assert untouched == page_count(host) - 2


LOOKUPS = ["batch_exists", "batch_exists_v2"]
ERRORS = [OSError(5, "I/O error"), ValueError("bad"), TimeoutError("late"), StoreUnavailableError("gone")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("operation", ["lookup", "load"])
@pytest.mark.parametrize("model", [MhaModel(), MambaModel(), DsaModel()], ids=["mha", "mamba", "indexer"])
def test_a_store_that_raises_on_the_way_back_is_a_miss_until_it_heals(
    tmp_path: Path, model: Model, operation: Operation, error: Exception
) -> None:
    with serve(tmp_path, model, seed=1) as first:
        inserted = first.insert(PREFIX)
    with serve(tmp_path, model, seed=2) as second:
        stores = wrap_stores(second)
        for store in stores.values():
            store.fail(operation, error)
        missed = second.restore(PREFIX)
        for store in stores.values():
            store.heal()
        restored = second.restore(PREFIX)
        # A call that raises is not in the list.
        answers = second.backend.of(*(LOOKUPS if operation == "lookup" else ["batch_get_v1"]))
    assert len(answers) == 2
    assert missed.storage_tokens == 0
    assert restored.storage_tokens == len(PREFIX)
    assert_holds(restored.contents, inserted, 4)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("failing", ["kv", "mamba"])
def test_a_store_that_raises_while_writing_costs_that_prompt_only(
    tmp_path: Path, failing: str, error: Exception
) -> None:
    later = [token + 1000 for token in PREFIX]
    with serve(tmp_path, MambaModel(), seed=1) as first:
        store = wrap_stores(first)[failing]
        store.fail("dump", error)
        first.insert(PREFIX)
        store.heal()
        inserted = first.insert(later)
        assert len(first.backend.of("batch_set_v1")) == len(first.backend.of("batch_set_v2")) == 2
    with serve(tmp_path, MambaModel(), seed=2) as second:
        assert second.restore(PREFIX).storage_tokens == 0
        restored = second.restore(later)
    assert restored.storage_tokens == len(later)
    assert_holds(restored.contents, inserted, 4)


def test_a_slow_load_does_not_hold_up_the_scheduler(tmp_path: Path) -> None:
    with serve(tmp_path, MambaModel()) as first:
        first.insert(PREFIX)
    with serve(tmp_path, MambaModel()) as second:
        loads_may_begin = threading.Event()
        wrap_stores(second)["kv"].hold("load", loads_may_begin)
        handle = second.begin_prefetch(PREFIX)
        for _ in range(50):
            second.step()
            assert not second.tree.check_prefetch_progress(handle)
        loads_may_begin.set()
        assert second.finish_prefetch(handle) == len(PREFIX)


@pytest.mark.parametrize("model", [MhaModel(), MambaModel()], ids=["mha", "mamba"])
def test_a_lost_directory_is_a_miss_and_a_new_one_is_used_at_once(tmp_path: Path, model: Model) -> None:
    root = tmp_path / "root"
    later = [token + 1000 for token in PREFIX]
    with serve(root, model, seed=1) as first:
        first.insert(PREFIX)
        shutil.rmtree(root)
        with serve(root, model, seed=2) as second:
            assert second.restore(PREFIX).storage_tokens == 0
        inserted = first.insert(later)
        with serve(root, model, seed=3) as third:
            restored = third.restore(later)
    assert restored.storage_tokens == len(later)
    assert_holds(restored.contents, inserted, 4)


def test_storage_can_be_attached_to_a_running_server_and_detached_again(tmp_path: Path) -> None:
    settings = HicacheSettings(page_tokens=PAGE_TOKENS, model_name=MODEL_NAME)
    storage = dynamic_storage(tmp_path)
    with serve(tmp_path, MambaModel(), seed=1) as first:
        inserted = first.insert(PREFIX)
    threads = threading.active_count()
    with hicache_stack(MambaModel(), settings, seed=2) as stack:
        for _ in range(3):
            attached, message = stack.tree.attach_storage_backend(
                "dynamic",
                storage_backend_extra_config_json=json.dumps(storage["storage_config"]),
                served_model_name=MODEL_NAME,
            )
            assert attached, message
            restored = stack.restore(PREFIX)
            detached, message = stack.tree.detach_storage_backend()
            assert detached, message
        deadline = time.monotonic() + 30  # Asked to end already; a busy machine may need a moment.
        while threading.active_count() > threads:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert_holds(restored.contents, inserted, 4)


def test_the_plain_controller_moves_pages_through_the_v1_interface(tmp_path: Path) -> None:
    """Out-of-tree users still drive `HiCacheController`, which knows no sidecars."""
    settings = HicacheSettings(page_tokens=PAGE_TOKENS, model_name=MODEL_NAME, **dynamic_storage(tmp_path))
    with plain_controller(settings) as (controller, host):
        pages = fill_random(host)
        hashes = get_storage_hash_str(PREFIX, None, PAGE_TOKENS)
        controller.write_storage(page_indices(host, [1, 3, 5, 7]), PREFIX, hashes)
        assert controller.ack_backup_queue.get(timeout=30).completed_tokens == len(PREFIX)
    with plain_controller(settings) as (controller, host):
        operation = controller.prefetch("request", PREFIX)
        assert controller.prefetch_hit_queue.get(timeout=30) is operation
        operation.host_indices = page_indices(host, [2, 4, 6, 8])
        controller.prefetch_buffer.put(operation)
        acks = iter(lambda: controller.ack_prefetch_queue.get(timeout=30), None)
        assert next(ack.completed_tokens for ack in acks if ack.completed_tokens) == len(PREFIX)
        assert read_pages(host, [2, 4, 6, 8]) == [pages[page] for page in (1, 3, 5, 7)]


@contextmanager
def plain_controller(settings: HicacheSettings) -> Iterator[tuple[HiCacheController, MHATokenToKVPoolHost]]:
    with cpu_runtime(settings, HostMemoryGuards()):
        device = MhaModel().device_pools(PAGE_TOKENS, 8)
        host = build_kv_host_pool(kv_pool=device.kv, page_size=PAGE_TOKENS)
        controller = HiCacheController(
            device.allocator,
            host,
            PAGE_TOKENS,
            None,
            threading.Event(),
            io_backend="kernel",
            storage_backend=settings.storage_backend,
            prefetch_threshold=PAGE_TOKENS,
            model_name=MODEL_NAME,
            storage_backend_extra_config=dict(settings.storage_config),
        )
        try:
            yield controller, host
        finally:
            controller.detach_storage_backend()


def wrap_stores(
    stack: HicacheStack, wrapper: type[FaultInjectingStore] = FaultInjectingStore
) -> dict[str, FaultInjectingStore]:
    """Put a wrapper around the store of every pool."""
    stores = {}
    for pool in stack.backend._connector._pools():
        if pool.moves_bytes:
            stores[pool.name] = pool.store = wrapper(pool.store)
    return stores
