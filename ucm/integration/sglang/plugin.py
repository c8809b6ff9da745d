# SPDX-License-Identifier: MIT
"""Make `--hicache-storage-backend unifiedcache` known to an unpatched SGLang.

SGLang calls `register` through the entry point group `sglang.srt.plugins` (0.5.11 and later), early in every
process. Each hook here does what one patch in `patches/sglang` does; on a patched SGLang none is registered.
SGLang is imported by the functions only: whatever imports this module may be without it.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

BACKEND = "unifiedcache"


@functools.cache
def register() -> None:
    """Register the hooks with SGLang, which applies them afterwards."""
    if _is_patched():
        logger.debug("this SGLang knows %s: no hooks needed", BACKEND)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ucm.integration.sglang import sglang_compat

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", accept_on_the_command_line)
    HookRegistry.register(sglang_compat.layout_resolver(), switch_to_page_first)
    # A scheduler process registers from within this module. Applying the hooks below imports controllers and
    # memory pools, which other processes do without.
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        StorageBackendFactory.register_backend(
            BACKEND, "ucm.integration.sglang.unifiedcache_store", "UnifiedCacheStore"
        )
        HookRegistry.register(
            "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._create_builtin_backend",
            construct,
            HookType.AROUND,
        )
        HookRegistry.register(
            "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend",
            use_zero_copy_page_functions,
        )
        if registration := sglang_compat.draft_registration():
            HookRegistry.register(registration, store_draft_pool_apart)
        if decision := sglang_compat.backup_decision():
            HookRegistry.register(decision, write_draft_pools_on_every_rank)


def _is_patched() -> bool:
    """Tell whether SGLang's factory knows the backend by itself, without importing the factory."""
    import sglang.srt.plugins

    factory = Path(sglang.srt.plugins.__file__).parents[1] / "mem_cache" / "storage" / "backend_factory.py"
    return f'"{BACKEND}"' in factory.read_text(encoding="utf-8")


def _harmless(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep SGLang running, and its own result, if a hook fails."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 # Whatever SGLang's function takes and returns.
        try:
            return hook(*args, **kwargs)
        except Exception:
            logger.exception("%s failed; SGLang goes on without it", hook.__name__)
            return None

    return call


# Hooks that run after SGLang's function get its result before its arguments; None keeps the result.


@_harmless
def accept_on_the_command_line(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add our name to the choices of `--hicache-storage-backend`."""
    for action in parser._actions:  # noqa: SLF001 # argparse has no other way to an option.
        if "--hicache-storage-backend" in action.option_strings:
            action.choices = [*(action.choices or ()), BACKEND]


@_harmless
def switch_to_page_first(_result: None, server_args: ServerArgs) -> None:
    """Replace a host layout that the model's pools, or we, do not work with."""
    from ucm.integration.sglang import sglang_compat

    settings = sglang_compat.resolved_arguments(server_args)
    if settings.hicache_storage_backend != BACKEND:
        return
    # Other I/O backends have no such layout; attaching will refuse them.
    layouts = {"direct": "page_first_direct", "kernel": "page_first"}
    unsuitable = ["layer_first"]
    if sglang_compat.needs_page_first_direct(settings):
        layouts["kernel"] = "page_first_direct"
        unsuitable.append("page_first")
    layout = layouts.get(settings.hicache_io_backend)
    if settings.hicache_mem_layout in unsuitable and layout is not None:
        logger.warning(
            "%s does not work with the %s layout of this model's host pools; using %s",
            BACKEND,
            settings.hicache_mem_layout,
            "page_first_direct and direct I/O" if layout == "page_first_direct" else layout,
        )
        sglang_compat.resolve_layout(server_args, layout)


def construct(
    original: Callable[..., HiCacheStorage],
    factory: type[StorageBackendFactory],
    backend_name: str,
    backend_class: type[HiCacheStorage],
    storage_config: HiCacheStorageConfig,
    mem_pool_host: Any,  # noqa: ANN401 # Untyped in SGLang as well.
) -> HiCacheStorage:
    """Construct our store, where SGLang has one branch for every name it knows."""
    if backend_name == BACKEND:
        return backend_class(storage_config, mem_pool_host)
    return original(factory, backend_name, backend_class, storage_config, mem_pool_host)


@_harmless
def use_zero_copy_page_functions(_result: None, controller: HiCacheController, *_: Any, **__: Any) -> None:  # noqa: ANN401
    """Let v1 calls reach our store, which reads and writes host pages in place.

    The I/O threads run by now but have nothing to do: attaching and queueing happen in the same thread.
    """
    if controller.storage_backend_type == BACKEND:
        controller.page_get_func = controller._page_get_zero_copy  # noqa: SLF001 # As SGLang does for its own.
        controller.page_set_func = controller._page_set_zero_copy  # noqa: SLF001


@_harmless
def store_draft_pool_apart(_result: None, controller: HiCacheController) -> None:
    """Store the KV of a draft model in a pool of its own (0.5.13 to 0.5.18).

    SGLang would hand its pages to the calls meant for the primary pool, which have another size.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if controller.storage_backend_type == BACKEND and controller.has_draft and controller.enable_storage:
        controller.storage_backend.register_mem_host_pool_v2(controller.mem_pool_host_draft, PoolName.DRAFT)
        controller.draft_page_get_func = controller._draft_page_get_v2  # noqa: SLF001 # As for SGLang's own.
        controller.draft_page_set_func = controller._draft_page_set_v2  # noqa: SLF001


@_harmless
def write_draft_pools_on_every_rank(
    result: bool, controller: HybridCacheController, transfer: PoolTransfer
) -> bool:
    """Back up draft pools of multi-head attention on every rank: each holds its own heads."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if result or controller.storage_backend_type != BACKEND:
        return result
    if transfer.name not in (PoolName.DRAFT, PoolName.DRAFT_SWA):
        return result
    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    return entry is not None and isinstance(entry.host_pool, MHATokenToKVPoolHost)
