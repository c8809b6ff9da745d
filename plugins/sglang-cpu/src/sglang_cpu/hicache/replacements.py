# SPDX-License-Identifier: MIT
"""Where HiCache touches a GPU, and what stands there instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_cpu import hooks, older_releases
from sglang_cpu.hicache import page_hash, transfer

if TYPE_CHECKING:
    import torch

_HOST_MEMORY_RESERVE_BYTES = 512 * 1024**2

_POOL_MODULES = (
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.pool_host.dsa",
    "sglang.srt.mem_cache.pool_host.mamba",
    "sglang.srt.mem_cache.pool_host.mha",
    "sglang.srt.mem_cache.pool_host.mla",
    "sglang.srt.mem_cache.pool_host.unified",
)


class _NeverPinned:
    """A `pin_memory` attribute that stays False: host pools ask for pinned pages in many places."""

    def __get__(self, instance: object, owner: type) -> bool:
        return False

    def __set__(self, instance: object, value: bool) -> None:
        pass


def _already_pinned(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    del device
    return tensor


def _nothing_to_register(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    del buffer, registration_granularity_bytes


def _nothing_to_unregister(buffer: torch.Tensor) -> None:
    del buffer


def install() -> None:
    """Register HiCache's replacements.

    SGLang imports the transfer functions on GPU platforms only, so the pool modules lack even the names.
    """
    import torch
    from sglang.srt.mem_cache.pool_host import base

    for module in filter(older_releases.has_module, _POOL_MODULES):
        hooks.define(module, transfer.FUNCTIONS)
    hooks.replace("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _nothing_to_register)
    hooks.replace("sglang.srt.mem_cache.pool_host.common._cuda_host_unregister", _nothing_to_unregister)
    hooks.replace("sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module", page_hash.load)
    base.HostKVCache.pin_memory = _NeverPinned()
    # SGLang leaves 10 GiB of host memory alone: more than small machines have; tiny models need megabytes.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _HOST_MEMORY_RESERVE_BYTES
    # Some callers do not ask the platform first, among them ScheduleBatch for its mask of tracked states.
    torch.Tensor.pin_memory = _already_pinned
