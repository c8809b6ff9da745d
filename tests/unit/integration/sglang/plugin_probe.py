# SPDX-License-Identifier: MIT
"""What an SGLang makes of the backend's name, printed as JSON; run as a process of its own.

    python plugin_probe.py STORAGE_DIRECTORY

Each observation is a value or, where SGLang refuses, the name of the exception.
"""

# ruff: noqa: T201 # The output is what this is for.

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

# A scheduler process, the one that uses most of what is observed here, loads its plugins from this module.
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.arg_groups.hicache_hook import handle_hicache
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import PoolEntry
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from ucm.testing.host_pools import MhaModel, MlaModel, attach_host_pools, host_pools
from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

BACKEND = "unifiedcache"


def accepted_by_the_command_line(name: str) -> str:
    """Parse the flag; returns its value."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with contextlib.redirect_stderr(io.StringIO()):
        parsed = parser.parse_args(["--model-path", "m", "--hicache-storage-backend", name])
    return str(parsed.hicache_storage_backend)


def resolved_layout(backend: str, io_backend: str) -> str:
    """Resolve server arguments that ask for layer_first; returns the layout they end up with."""
    arguments = ServerArgs(
        model_path="m",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_mem_layout="layer_first",
        hicache_io_backend=io_backend,
        hicache_storage_backend=backend,
    )
    handle_hicache(arguments)
    return str(resolving_view(arguments).hicache_mem_layout)


@contextlib.contextmanager
def attached(backend: str, storage: str, **ranks: int) -> Iterator[HybridCacheController]:
    """Attach a storage backend to a real controller, over an anchor that is the same on all ranks."""
    settings = HicacheSettings(
        storage_backend=backend, storage_config={"storage_backends": storage}, ranks=ranks
    )
    guards = HostMemoryGuards()
    with cpu_runtime(settings, guards) as server_args:
        tree, _ = attach_host_pools(MlaModel().device_pools(64, 4), server_args, guards)
        try:
            yield tree.cache_controller
        finally:
            tree.shutdown()


def constructed(storage: str) -> dict[str, str]:
    """Attach; returns the backend's class and the controller's page functions."""
    with attached(BACKEND, storage) as controller:
        backend = type(controller.storage_backend)
        return {
            "class": f"{backend.__module__}.{backend.__qualname__}",
            "get": controller.page_get_func.__name__,
            "set": controller.page_set_func.__name__,
        }


def written_on_rank_1(backend: str, storage: str) -> dict[str, bool]:
    """Ask the second of two ranks which sidecars it writes: an MHA draft, an MLA draft, and others."""
    drafts = {PoolName.DRAFT: host_pools(MhaModel()), PoolName.DRAFT_SWA: host_pools(MlaModel())}
    topology = {
        "tp_rank": 1,
        "tp_size": 2,
        "attn_tp_rank": 1,
        "attn_tp_size": 2,
        "moe_tp_rank": 1,
        "moe_tp_size": 2,
    }
    with attached(backend, storage, **topology) as controller:
        for name, pools in drafts.items():
            controller.register_host_pool_entry(PoolEntry(name, pools.anchor, None, lambda layer: layer))
        return {
            name.value: controller.should_backup(PoolTransfer(name=name))
            for name in (*drafts, PoolName.INDEXER, PoolName.MAMBA)
        }


def observed(observe: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 # Anything JSON can say.
    try:
        return observe(*arguments)
    except (Exception, SystemExit) as error:
        return type(error).__name__


def main() -> None:
    """Observe and print."""
    storage = sys.argv[1]
    logging.disable(logging.CRITICAL)
    load_plugins()
    hooks = {target: len(registered) for target, registered in HookRegistry._hooks.items()}
    observations = {
        "accepted": observed(accepted_by_the_command_line, BACKEND),
        "file accepted": observed(accepted_by_the_command_line, "file"),
        "unknown accepted": observed(accepted_by_the_command_line, "no-such-backend"),
        "layout": {
            io_backend: observed(resolved_layout, BACKEND, io_backend) for io_backend in ("kernel", "direct")
        },
        "layout of file": observed(resolved_layout, "file", "kernel"),
        "attached": observed(constructed, storage),
        "written on rank 1": observed(written_on_rank_1, BACKEND, storage),
        "written on rank 1 by file": observed(written_on_rank_1, "file", storage),
        "hooks": hooks,
    }
    print(json.dumps(observations))


if __name__ == "__main__":
    main()
