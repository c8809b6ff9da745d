# SPDX-License-Identifier: MIT
"""Radix tree, controller and storage threads of SGLang 0.5.9 and 0.5.10, over real pools, on a plain CPU.

What `hicache_stack` is for the newest release. Import this module in a process of its own, with that SGLang
first on the path. Replaced are what `release_environment` names, and the registering of host memory with the
device.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ucm.testing import release_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

PAGE_TOKENS = 64
MODEL_NAME = "org/model"
STORAGE_THREADS = ("prefetch_thread", "prefetch_io_aux_thread", "backup_thread")

_PATIENCE_S = 60.0
_POLL_S = 0.001
_GUARD_BYTES = 4096
_GUARD_VALUE = 0xA5

release_environment.prepare()

from sglang.srt.distributed import parallel_state  # noqa: E402 # What it imports must be there first.
from sglang.srt.mem_cache import base_prefix_cache, memory_pool_host  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import (  # noqa: E402
    MHATokenToKVPool,
    MLATokenToKVPool,
    NSATokenToKVPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

# 0.5.9 binds the process to the cores near its GPU.
_NO_NUMA = {"disable_hicache_numa_detect": True} if hasattr(ServerArgs, "disable_hicache_numa_detect") else {}


class _NeverPinned:
    """A `pin_memory` attribute that stays False."""

    def __get__(self, instance: object, owner: type) -> bool:
        return False

    def __set__(self, instance: object, value: bool) -> None:
        pass


_guards: list[torch.Tensor] = []


def _allocate_guarded(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: object
) -> torch.Tensor:
    """Stand in for the allocation that registers memory with the device; guard bytes lie around it."""
    del device, pin_memory, allocator
    end = _GUARD_BYTES + math.prod(dims) * dtype.itemsize
    arena = torch.zeros(end + _GUARD_BYTES, dtype=torch.uint8)
    _guards.extend(guard.fill_(_GUARD_VALUE) for guard in (arena[:_GUARD_BYTES], arena[end:]))
    return arena[_GUARD_BYTES:end].view(dtype).reshape(dims)


def host_memory_is_intact() -> bool:
    """Tell whether nobody wrote outside a host pool."""
    return all(bool((guard == _GUARD_VALUE).all()) for guard in _guards)


memory_pool_host.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_guarded
memory_pool_host.HostKVCache.pin_memory = _NeverPinned()


def start_ranks(rank: int, ranks: int, rendezvous: Path) -> None:
    """Set up SGLang's groups of ranks over gloo; once in a process.

    Args:
        rank: Of this process.
        ranks: TP size.
        rendezvous: A file that does not exist, the same for all ranks.
    """
    parallel_state.init_distributed_environment(
        ranks, rank, f"file://{rendezvous}", local_rank=rank, backend="gloo"
    )
    # SGLang would set up NCCL for a group of its own.
    parallel_state._TP = parallel_state.get_world_group()  # noqa: SLF001


def mha_pool(tokens: int) -> KVCache:
    """Build the device pool of a model with multi-head attention."""
    return MHATokenToKVPool(tokens, PAGE_TOKENS, torch.bfloat16, 2, 16, 2, "cpu", False)


def mla_pool(tokens: int) -> KVCache:
    """Build the device pool of a model with latent attention."""
    return MLATokenToKVPool(tokens, PAGE_TOKENS, torch.bfloat16, 16, 8, 3, "cpu", False)


def nsa_pool(tokens: int) -> KVCache:
    """Build the device pool of a model with latent attention and an index; `DsaModel` is the same."""
    return NSATokenToKVPool(tokens, PAGE_TOKENS, 16, torch.bfloat16, 8, 3, "cpu", 128, False, 24)


MODELS: dict[str, Callable[[int], KVCache]] = {"mha": mha_pool, "mla": mla_pool, "nsa": nsa_pool}


@dataclass(frozen=True, slots=True)
class Restored:
    """What a request found.

    Attributes:
        storage_tokens: Tokens that came from storage.
        pages: What the device now holds of each page of the cached prefix, by kind: KV and index.
    """

    storage_tokens: int
    pages: list[dict[str, bytes]]


class HiradixStack:
    """One process's cache tiers, with random bytes in every device page."""

    def __init__(self, tree: HiRadixCache, seed: int) -> None:
        self.tree = tree
        self._requests = itertools.count()
        generator = torch.Generator().manual_seed(seed)
        for tensor in itertools.chain.from_iterable(self._device_tensors().values()):
            tensor.view(-1).view(torch.uint8).random_(0, 256, generator=generator)

    @property
    def backend(self) -> HiCacheStorage:
        """The attached storage backend."""
        return self.tree.cache_controller.storage_backend

    def insert(self, tokens: Sequence[int]) -> list[dict[str, bytes]]:
        """Insert a finished prompt of whole pages, wait until all tiers have it, and return its pages."""
        indices = self.tree.token_to_kv_pool_allocator.alloc(len(tokens))
        self.tree.insert(InsertParams(key=RadixKey(list(tokens)), value=indices))
        self._step_until(lambda: not (self.tree.ongoing_write_through or self.tree.ongoing_backup))
        return self._pages(indices)

    def page_hashes(self) -> list[str]:
        """Return SGLang's storage hash of each page of the only prompt that was inserted."""
        [node] = self.tree.root_node.children.values()
        hashes: list[str] = node.hash_value
        return hashes

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Bring what storage has of a prompt to the host, as the scheduler does; returns its tokens."""
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(list(tokens))))
        known = len(match.device_indices) + match.host_hit_length
        request = f"request-{next(self._requests)}"
        node: TreeNode = match.last_host_node
        self.tree.prefetch_from_storage(request, node, list(tokens[known:]), node.get_last_hash_value())
        self._step_until(lambda: self.tree.check_prefetch_progress(request))
        return int(self.tree.pop_prefetch_loaded_tokens(request))

    def restore(self, tokens: Sequence[int]) -> Restored:
        """Bring what the host and storage have of a prompt to the device."""
        storage_tokens = self.prefetch(tokens)
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(list(tokens))))
        hit = (match.last_host_node, match.host_hit_length)
        # 0.5.10 puts these into one argument.
        in_one = getattr(base_prefix_cache, "InitLoadBackParams", None)
        self.tree.init_load_back(*(hit if in_one is None else [in_one(*hit)]))
        self.tree.ready_to_load_host_cache()
        self._step_until(lambda: not self.tree.ongoing_load_back)
        indices = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(list(tokens)))).device_indices
        return Restored(storage_tokens, self._pages(indices))

    def free_host_tokens(self) -> int:
        """Return how many tokens of the host tier are free, once all that was given back has arrived."""
        self.tree.check_hicache_events()
        return int(self.tree.token_to_kv_pool_host.available_size())

    def dead_threads(self) -> list[str]:
        """Return the storage threads that have been started and run no more."""
        controller = self.tree.cache_controller
        threads = {name: getattr(controller, name, None) for name in STORAGE_THREADS}
        started = {name: thread for name, thread in threads.items() if thread and thread.ident}
        return [name for name, thread in started.items() if not thread.is_alive()]

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Do what the scheduler does between two batches until something is done.

        Raises:
            TimeoutError: It never was, or a storage thread has died.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            self.tree.check_hicache_events()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cache tiers did not settle within {_PATIENCE_S} s")
            if dead := self.dead_threads():
                raise TimeoutError(f"dead: {', '.join(dead)}")
            time.sleep(_POLL_S)

    def _pages(self, indices: torch.Tensor) -> list[dict[str, bytes]]:
        pages = (indices[::PAGE_TOKENS] // PAGE_TOKENS).tolist()
        return [
            {
                kind: b"".join(_page_bytes(tensor, page) for tensor in tensors)
                for kind, tensors in self._device_tensors().items()
            }
            for page in pages
        ]

    def _device_tensors(self) -> Mapping[str, list[torch.Tensor]]:
        pool = self.tree.kv_cache
        if isinstance(pool, MHATokenToKVPool):
            return {"kv": [*pool.k_buffer, *pool.v_buffer]}
        if isinstance(pool, NSATokenToKVPool):
            return {"kv": pool.kv_buffer, "indexer": pool.index_k_with_scale_buffer}
        return {"kv": pool.kv_buffer}


def _page_bytes(tensor: torch.Tensor, page: int) -> bytes:
    """Return a page of a device tensor, whose rows are tokens, or pages of one axis more."""
    rows = 1 if tensor.dim() == 2 else PAGE_TOKENS
    page_rows = tensor[page * rows : (page + 1) * rows]
    return bytes(page_rows.contiguous().view(-1).view(torch.uint8).numpy())


@contextmanager
def hiradix_stack(
    model: str,
    *,
    storage_backend: str | None,
    extra_config: Mapping[str, object] | None = None,
    layout: str = "page_first",
    seed: int = 0,
    pages: int = 8,
    **server_args: Any,  # noqa: ANN401 # Fields of SGLang's class.
) -> Iterator[HiradixStack]:
    """Run the cache tiers of one server process; call `start_ranks` before.

    Args:
        model: One of `MODELS`.
        storage_backend: `--hicache-storage-backend`, None for two tiers only.
        extra_config: `--hicache-storage-backend-extra-config`.
        layout: `--hicache-mem-layout`.
        seed: Of the bytes in the device pages.
        pages: Device pages; the host tier is twice as large.
        server_args: Any other field of `ServerArgs`.
    """
    pool = MODELS[model](pages * PAGE_TOKENS)
    allocator = PagedTokenToKVPoolAllocator(
        pages * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
    )
    arguments = ServerArgs(
        "dummy",  # SGLang then reads no model.
        served_model_name=MODEL_NAME,
        page_size=PAGE_TOKENS,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_write_policy="write_through",
        hicache_mem_layout=layout,
        hicache_io_backend="direct" if layout == "page_first_direct" else "kernel",
        hicache_storage_backend=storage_backend,
        # SGLang does not ask storage about prompts shorter than this, or than a page.
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1, **(extra_config or {})}),
        hicache_storage_prefetch_policy="wait_complete",
        **_NO_NUMA,
        **server_args,
    )
    parameters = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE_TOKENS,
        tp_cache_group=parallel_state.get_tp_group().cpu_group,
    )
    tree = HiRadixCache(parameters, arguments)
    try:
        yield HiradixStack(tree, seed)
    finally:
        tree.shutdown()
