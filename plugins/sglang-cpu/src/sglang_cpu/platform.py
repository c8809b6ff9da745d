# SPDX-License-Identifier: MIT
"""The platform class that SGLang instantiates when `SGLANG_PLATFORM=cpu_reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_cpu import PLATFORM_NAME, hooks, older_releases

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang has no types.
    """A device without kernels: SGLang takes its torch paths, and `sglang_cpu.families` supplies the rest."""

    _enum = PlatformEnum.OOT
    if hasattr(interface, "PlatformCapabilities"):  # From 0.5.22.
        capabilities = interface.PlatformCapabilities()

    def is_pin_memory_available(self, device: object = None) -> bool:  # noqa: ARG002 - SGLang passes it.
        """Return False: there is no device to pin memory for."""
        return False

    def get_default_attention_backend(self) -> str:
        """Return the only attention backend that needs no kernel."""
        return "torch_native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Return True: the GDN kernels hand out the states that checkpoints are taken from."""
        return True

    def get_mha_kv_pool_cls(self) -> type:
        """Return SGLang's own pool, which 0.5.19 to 0.5.21 ask the platform for."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool: type = MHATokenToKVPool
        return pool

    def get_paged_allocator_cls(self) -> Callable[..., Any]:
        """Return SGLang's own allocator, which 0.5.19 to 0.5.21 ask the platform for, whatever the pool."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        if older_releases.is_older():
            return older_releases.paged_allocator
        allocator: type = PagedTokenToKVPoolAllocator
        return allocator

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether the algorithm's kernels are replaced: those of EAGLE are, which MTP layers use."""
        return algorithm == "EAGLE"

    def get_dispatch_key_name(self) -> str:
        """Return a key no operator knows, so that each one takes `forward_native`.

        `cpu` would select paths written for AMX, some of which end in Triton kernels.
        """
        return PLATFORM_NAME

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Refuse to serve when a replacement is not in place.

        Raises:
            RuntimeError: SGLang no longer has one of the functions that are replaced. SGLang only logs what a
                plugin raises, and the server would fail later, inside a GPU kernel.
        """
        del model
        hooks.verify()
