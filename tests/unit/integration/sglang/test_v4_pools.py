# SPDX-License-Identifier: MIT
"""DeepSeek V4 Flash's real pools, registered by SGLang's controller: a store each, of exactly these pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from ucm.testing.hicache_stack import PATIENT, HicacheStack, dynamic_storage, hicache_stack
from ucm.testing.host_pools import FLASH_COMPRESS_RATIOS, DeepSeekV4Model
from ucm.testing.pool_memory import read_pages
from ucm.testing.sglang_runtime import HicacheSettings
from ucm.testing.stored_blocks import StoredBlocks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

PAGE_TOKENS = 256
MODEL_NAME = "deepseek-ai/DeepSeek-V4-Flash"
DRAFT_TOKENS = 4

# 43 layers: 21 compress four tokens to one, 20 compress 128. The one MTP layer adds a sliding-window layer,
# and speculative decoding doubles the ring of compressor states.
WITH_MTP = {
    "swa": 44 * 149760,
    "deepseek_v4_c4": 21 * 37440,
    "deepseek_v4_c4_indexer": 21 * 8448,
    "deepseek_v4_c4_state": 21 * 131072,
    "deepseek_v4_c4_indexer_state": 21 * 32768,
    "deepseek_v4_c128": 20 * 1728,
}
WITHOUT_MTP = WITH_MTP | {
    "swa": 43 * 149760,
    "deepseek_v4_c4_state": 21 * 65536,
    "deepseek_v4_c4_indexer_state": 21 * 16384,
}


def serve_flash(root: Path, *, mtp: bool, layout: str) -> AbstractContextManager[HicacheStack]:
    settings = HicacheSettings(
        layout=layout,
        page_tokens=PAGE_TOKENS,
        model_name=MODEL_NAME,
        draft_tokens=DRAFT_TOKENS if mtp else 0,
        **dynamic_storage(
            root, module_path="ucm.testing.recording_store", class_name="RecordingStore", **PATIENT
        ),
    )
    model = DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=int(mtp))
    return hicache_stack(model, settings, pages=2)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize(
    ("mtp", "page_bytes"), [(True, WITH_MTP), (False, WITHOUT_MTP)], ids=["mtp", "no-mtp"]
)
def test_flash_keeps_each_of_its_six_pools_in_a_store_of_its_own(
    tmp_path: Path, mtp: bool, page_bytes: dict[str, int], layout: str
) -> None:
    tokens = list(range(PAGE_TOKENS))
    with serve_flash(tmp_path, mtp=mtp, layout=layout) as stack:
        stack.insert(tokens)
        [page_hash] = stack.page_hashes(tokens)
        registered = [pool for call in stack.backend.of("register_mem_host_pool_v2") for pool in call.pools]
        primary = stack.backend.store
        specs = {pool.name: pool.store.spec for pool in stack.backend._connector._pools() if pool.moves_bytes}
        host_pages = {pool: set(read_pages(stack.pools[pool])) for pool in page_bytes}
    assert registered == ["kv", *page_bytes]
    assert primary is None
    namespaces = {pool: f"{pool}_{size}x1" for pool, size in page_bytes.items()}
    assert {pool: (spec.namespace, spec.segment_bytes) for pool, spec in specs.items()} == {
        pool: (f"sglang_v2/{namespaces[pool]}", (size,)) for pool, size in page_bytes.items()
    }
    blocks = StoredBlocks(tmp_path, MODEL_NAME, replicated=True)
    assert blocks.counts() == {f"sglang_v2/{namespace}": 1 for namespace in namespaces.values()}
    for pool, size in page_bytes.items():
        block = blocks.sidecar(namespaces[pool], page_hash).read_bytes()
        assert block[:size] in host_pages[pool], pool


def test_nobody_asks_the_logical_anchor_how_large_a_token_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(LogicalHostPool, "get_size_per_token", lambda self: asked.append(self), raising=False)
    with serve_flash(tmp_path, mtp=False, layout="page_first") as stack:
        tokens = list(range(PAGE_TOKENS))
        stack.insert(tokens)
        stack.prefetch(tokens)
    assert asked == []


def test_pages_scattered_over_layers_are_refused_at_attach(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"host pool 'swa'.*'layer_first'.*--hicache-mem-layout page_first"):
        serve_flash(tmp_path, mtp=False, layout="layer_first").__enter__()
