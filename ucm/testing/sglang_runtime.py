# SPDX-License-Identifier: MIT
"""SGLang's process-wide configuration for a test: no server, no model, no accelerator.

SGLang's pools and controllers read what a server publishes at its start. This module publishes the same
records through SGLang's own hook for tests. What needs an accelerator is replaced at that edge only, by the
CPU reference platform: the copies between device and host, pinned memory, and 10 GB of host memory to spare.
"""

from __future__ import annotations

import functools
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.storage.mmap import alloc_mmap
from sglang.srt.runtime_context import get_context, get_parallel
from sglang_cpu import hicache, hooks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sglang.srt.server_args import ServerArgs

IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct", "layer_first": "direct"}
"""The transfer family that a server pairs with each host layout."""

_MAMBA_CHUNK_TOKENS = 64
_GUARD_BYTES = 4096
_GUARD_VALUE = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class HicacheSettings:
    """What an operator would state on the command line.

    Attributes:
        layout: `--hicache-mem-layout`; the I/O backend follows from it.
        page_tokens: `--page-size`.
        model_name: `--served-model-name`, a part of every storage key.
        storage_backend: `--hicache-storage-backend`, None for two tiers only.
        storage_config: `--hicache-storage-backend-extra-config`.
        draft_tokens: Tokens drafted by EAGLE per step; 0 is no speculative decoding.
        ranks: This process's place, as `get_parallel().override` takes it: `tp_rank`, `pp_rank`, ...
        server_args: Any other field of `ServerArgs`.
    """

    layout: str = "page_first"
    page_tokens: int = 64
    model_name: str = "test/model"
    storage_backend: str | None = None
    storage_config: Mapping[str, object] = field(default_factory=dict)
    draft_tokens: int = 0
    ranks: Mapping[str, int] = field(default_factory=dict)
    server_args: Mapping[str, object] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """Return the `ServerArgs` fields these settings stand for."""
        speculative = {
            "speculative_algorithm": "EAGLE" if self.draft_tokens else None,
            "speculative_num_draft_tokens": self.draft_tokens or None,
        }
        return {
            "device": "cpu",
            "served_model_name": self.model_name,
            "page_size": self.page_tokens,
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_write_policy": "write_through",
            "hicache_mem_layout": self.layout,
            "hicache_io_backend": IO_BACKENDS[self.layout],
            "hicache_storage_backend": self.storage_backend,
            "hicache_storage_backend_extra_config": json.dumps(dict(self.storage_config)),
            "hicache_storage_prefetch_policy": "wait_complete",
            # SGLang would otherwise read it from the model's configuration file.
            "_mamba_cache_chunk_size": max(_MAMBA_CHUNK_TOKENS, self.page_tokens),
            **speculative,
            **self.server_args,
        }


class HostMemoryGuards:
    """Host buffers allocated with guard bytes directly before and after each."""

    def __init__(self) -> None:
        self._guards: list[torch.Tensor] = []

    def allocate(
        self,
        dims: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        pin_memory: bool,
        allocator: object,
        registration_granularity_bytes: int | None = None,
    ) -> torch.Tensor:
        """Stand in for SGLang's allocation functions, which register the memory with the device."""
        del device, pin_memory, allocator, registration_granularity_bytes
        end = _GUARD_BYTES + math.prod(dims) * dtype.itemsize
        arena = alloc_mmap((end + _GUARD_BYTES,), torch.uint8)
        for guard in (arena[:_GUARD_BYTES], arena[end:]):
            self._guards.append(guard.fill_(_GUARD_VALUE))
        return arena[_GUARD_BYTES:end].view(dtype).reshape(dims)

    def intact(self) -> bool:
        """Tell whether nobody wrote outside a buffer."""
        return all(bool((guard == _GUARD_VALUE).all()) for guard in self._guards)


@functools.cache
def _replace_device_edges() -> None:
    hicache.install()
    hooks.apply()


@contextmanager
def cpu_runtime(settings: HicacheSettings, guards: HostMemoryGuards) -> Iterator[ServerArgs]:
    """Publish `settings` to SGLang for as long as the context is open, and allocate host pools in `guards`.

    Contexts nest. Host pools built inside stay usable afterwards.
    """
    _replace_device_edges()
    parallel: dict[str, Any] = {"tp_rank": 0, "pp_rank": 0, "attn_dcp_rank": 0, **settings.ranks}
    previous = ALLOC_MEMORY_FUNCS["cpu"]
    ALLOC_MEMORY_FUNCS["cpu"] = guards.allocate
    try:
        with (
            get_context().override_server_args(**settings.fields()) as server_args,
            get_parallel().override(**parallel),
        ):
            yield server_args
    finally:
        ALLOC_MEMORY_FUNCS["cpu"] = previous
