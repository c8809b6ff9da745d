# SPDX-License-Identifier: MIT
"""SGLang's radix tree, controller and storage threads over real pools, driven as its scheduler drives them.

One `HicacheStack` is what one server process holds below its model. Two of them, one after the other or at
once, are a restart or a replica.
"""

from __future__ import annotations

import itertools
import time
from array import array
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams

from ucm.testing.host_pools import (
    ONE_RANK,
    DevicePools,
    HostPools,
    Model,
    RankGroups,
    attach_host_pools,
    register_draft,
)
from ucm.testing.page_hashes import page_hashes
from ucm.testing.pool_memory import fill_device_random, read_device_page
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

_DEADLINE_S = 60.0
_POLL_S = 0.001


PATIENT: dict[str, Any] = {"lookup_timeout_s": 60, "load_timeout_s": 60, "dump_timeout_s": 60}
"""Store options with deadlines that a busy machine meets, too."""


def dynamic_storage(
    storage_backends: str | Path,
    *,
    module_path: str = "ucm.integration.sglang.unifiedcache_store",
    class_name: str = "UnifiedCacheStore",
    **options: object,
) -> dict[str, Any]:
    """Return the keywords of `HicacheSettings` that select our backend as SGLang's `dynamic` one.

    Args:
        storage_backends: Where to store.
        module_path: Where the backend class is.
        class_name: The backend class.
        options: Further keys of the extra config.
    """
    return {
        "storage_backend": "dynamic",
        "storage_config": {
            "backend_name": "unifiedcache",
            "module_path": module_path,
            "class_name": class_name,
            "interface_v1": 1,
            # SGLang does not ask storage about prompts shorter than this, or than a page.
            "prefetch_threshold": 1,
            "storage_backends": str(storage_backends),
            **options,
        },
    }


def named_storage(storage_backends: str | Path, **options: object) -> dict[str, Any]:
    """Return the keywords of `HicacheSettings` that select our backend by its name, which needs our plugin.

    Args:
        storage_backends: Where to store.
        options: Further keys of the extra config.
    """
    return {
        "storage_backend": "unifiedcache",
        "storage_config": {
            "prefetch_threshold": 1,
            "storage_backends": str(storage_backends),
            **options,
        },
    }


Contents = dict[str, list[bytes]]
"""Per pool, the bytes of a prefix's pages: all of them, or the trailing ones that the pool still holds."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a request found.

    Attributes:
        storage_tokens: Tokens that came from storage.
        contents: What the device now holds of the whole cached prefix.
    """

    storage_tokens: int
    contents: Contents


class HicacheStack:
    """One process's cache tiers, with random bytes in every device page."""

    def __init__(self, device: DevicePools, tree: UnifiedRadixCache, pools: HostPools, seed: int) -> None:
        self.device = device
        self.tree = tree
        self.pools = pools
        self._request_ids = itertools.count()
        sidecars = {spec.pool_name: spec.indices_from_pool for spec in tree.sidecar_pool_specs}
        self._index_source = {name: sidecars.get(PoolName(name), PoolName(name)) for name in pools.names}
        for position, name in enumerate(pools.names):
            fill_device_random(pools[name], seed * len(pools.names) + position)

    @property
    def backend(self) -> HiCacheStorage:
        """The attached storage backend."""
        return self.tree.cache_controller.storage_backend

    def insert(self, tokens: Sequence[int], *, outside_window_tokens: int = 0) -> Contents:
        """Insert a finished prompt, and wait until all tiers have it.

        Args:
            tokens: Whole pages.
            outside_window_tokens: How many leading tokens have already lost their sliding-window state.

        Returns:
            What the device holds of the prompt.
        """
        key = self._key(tokens)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        cached = self.tree.path_device_indices(match.last_device_node)
        indices = torch.cat([cached, self._allocate(len(tokens) - len(cached))])
        params = InsertParams(key=key, value=indices, prev_prefix_len=len(cached))
        if outside_window_tokens:
            self.device.allocator.free_swa(indices[len(cached) : outside_window_tokens])
            params.set_evicted_seqlen(ComponentType.SWA, outside_window_tokens)
        if ComponentType.MAMBA in self.device.components:
            params.mamba_value = self.device.requests.mamba_allocator.alloc(1)
        result = self.tree.insert(params)
        contents = self._contents(result.last_device_node)
        self.settle()
        return contents

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Bring what storage has of a prompt to the host, and return its number of tokens.

        Args:
            tokens: What a prompt may take from the cache, at least one token short of the prompt.
        """
        return self.finish_prefetch(self.begin_prefetch(tokens))

    def begin_prefetch(self, tokens: Sequence[int]) -> CacheRequestHandle:
        """Ask storage for a prompt, as `prefetch` does, and return at once."""
        request = self._request(tokens)
        known = request.prefix_len + request.host_hit_length
        self.tree.prefetch_from_storage(
            request.cache_request_handle,
            request.last_host_node,
            request.full_untruncated_fill_ids[known : len(tokens)],
            self.tree.get_last_hash_value(request.last_host_node),
            self.tree.get_prefix_hash_values(request.last_host_node)
            if self.tree.hicache_storage_pass_prefix_keys
            else None,
            matched_prefix_tokens=request.full_untruncated_fill_ids[:known],
        )
        return request.cache_request_handle

    def finish_prefetch(self, handle: CacheRequestHandle) -> int:
        """Wait for a prefetch that was begun, and return the number of tokens it brought."""
        self._step_until(lambda: self.tree.check_prefetch_progress(handle))
        return int(self.tree.pop_prefetch_loaded_tokens(handle))

    def restore(self, tokens: Sequence[int]) -> Restored:
        """Bring what the host and storage have of a prompt to the device.

        Args:
            tokens: What a prompt may take from the cache, at least one token short of the prompt.
        """
        storage_tokens = self.prefetch(tokens)
        request = self._request(tokens)
        self.tree.init_load_back(
            InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        )
        self.tree.ready_to_load_host_cache()
        self._step_until(lambda: not self.tree.ongoing_load_back)
        return Restored(storage_tokens, self._contents(self._request(tokens).last_node))

    def page_hashes(self, tokens: Sequence[int]) -> list[str]:
        """Return SGLang's storage hash of each page of a prompt."""
        return page_hashes(tokens, self.device.page_tokens)

    def settle(self) -> None:
        """Wait until every backup to host and storage is done."""
        self._step_until(lambda: not (self.tree.ongoing_write_through or self.tree.ongoing_backup))

    def step(self) -> None:
        """Do what the scheduler does for the cache between two batches."""
        self.tree.check_hicache_events()

    def _step_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            self.step()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cache tiers did not settle within {_DEADLINE_S} s")
            time.sleep(_POLL_S)

    def _key(self, tokens: Sequence[int]) -> RadixKey:
        return RadixKey(array("q", tokens)).page_aligned(self.device.page_tokens)

    def _request(self, tokens: Sequence[int]) -> Req:
        """Return a request, matched against the tree, whose prompt is `tokens` and one more."""
        prompt = array("q", [*tokens, 0])
        request = Req(f"request-{next(self._request_ids)}", "", prompt, SamplingParams())
        request.init_next_round_input(self.tree, cow_mamba=False)
        return request

    def _allocate(self, tokens: int) -> torch.Tensor:
        allocator = self.device.allocator
        if ComponentType.SWA not in self.device.components:
            return allocator.alloc(tokens)
        full = allocator.full_attn_allocator.alloc(tokens)
        allocator.set_full_to_swa_mapping(full, allocator.swa_attn_allocator.alloc(tokens))
        return full

    def _contents(self, node: int) -> Contents:
        indices = self.tree.path_device_indices(node)
        pages = {PoolName.KV: self._pages(indices)}
        if ComponentType.SWA in self.device.components:
            window = self.device.allocator.translate_loc_from_full_to_swa(indices)
            pages[PoolName.SWA] = [page for page in self._pages(window) if page]
        if ComponentType.MAMBA in self.device.components:
            slot = self.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
            pages[PoolName.MAMBA] = [] if slot is None else slot.tolist()
        return {
            name: [read_device_page(self.pools[name], page) for page in pages[source]]
            for name, source in self._index_source.items()
        }

    def _pages(self, indices: torch.Tensor) -> list[int]:
        # Page 0 is never allocated: an index without a counterpart maps to it.
        pages: list[int] = (indices[:: self.device.page_tokens] // self.device.page_tokens).tolist()
        return pages


@contextmanager
def hicache_stack(
    model: Model,
    settings: HicacheSettings,
    *,
    pages: int = 16,
    seed: int = 0,
    groups: RankGroups = ONE_RANK,
    draft: Model | None = None,
) -> Iterator[HicacheStack]:
    """Run the cache tiers of one server process, with the storage backend that `settings` names.

    Args:
        model: One of the models of `ucm.testing.host_pools`.
        settings: What the operator would state; contexts with different settings may be open at once.
        pages: Device pages; the host tier is twice as large.
        seed: Of the bytes in the device pages.
        groups: In which the ranks of one server agree, if `settings` states more than one.
        draft: A draft model with pools of its own, whose pages are stored beside the model's.
    """
    guards = HostMemoryGuards()
    with cpu_runtime(settings, guards) as server_args:
        device = model.device_pools(settings.page_tokens, pages)
        tree, host = attach_host_pools(device, server_args, guards, groups)
        try:
            if draft is not None:
                register_draft(tree, draft.device_pools(settings.page_tokens, pages).kv)
            yield HicacheStack(device, tree, host, seed)
        finally:
            tree.shutdown()
