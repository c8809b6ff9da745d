# SPDX-License-Identifier: MIT
"""Real host pools and a real storage controller of whichever supported SGLang this process imports.

`host_pools` and `hicache_stack` drive the whole cache of the newest release; here is the part that all
releases have: host pools in a group, a controller over it with its storage threads, and its queues.
What a release has is told from its types. `release_environment.prepare` comes first.
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from array import array
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang_cpu.hicache import page_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PAGE_TOKENS = 64
V4_PAGE_TOKENS = 256
_PAGES = 6
_POLL_S = 0.002
_TOKENS = PAGE_TOKENS * _PAGES
_V4_TOKENS = V4_PAGE_TOKENS * _PAGES
_V4_ROW_BYTES = {
    "swa": 1024,
    "deepseek_v4_c4": 512,
    "deepseek_v4_c4_indexer": 256,
    "deepseek_v4_c128": 64,
}


def find(*names: str) -> Any:  # noqa: ANN401 # A class or function of SGLang, which has no types.
    """Return the first `module:name` below `sglang.srt` that this release has; None without any."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(import_module(f"sglang.srt.{module}"), attribute)
        except (ModuleNotFoundError, AttributeError):
            continue
    return None


def _accepted(target: Any, arguments: Mapping[str, object]) -> dict[str, Any]:  # noqa: ANN401
    """Return those of the keyword arguments that `target` takes."""
    parameters = inspect.signature(target).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


_MEMORY = "mem_cache.memory_pool"
_HOST = "mem_cache.memory_pool_host"


@dataclass(frozen=True, slots=True)
class ReleasePools:
    """Host pools by name, the anchor first, and the device pool behind the anchor."""

    by_name: dict[str, Any]
    device: Any

    @property
    def anchor(self) -> Any:  # noqa: ANN401
        """The pool that owns the host indices."""
        return next(iter(self.by_name.values()))

    def group(self) -> Any:  # noqa: ANN401
        """Return them as the group that SGLang's controllers hold."""
        group = find("mem_cache.pool_host.group:HostPoolGroup", f"{_HOST}:HostPoolGroup")
        entry = find("mem_cache.pool_host.group:PoolEntry", f"{_HOST}:PoolEntry")
        pool_name = find("mem_cache.hicache_storage:PoolName")
        return group(
            [
                entry(pool_name(name), pool, self.device, lambda layer: layer, name == "kv")
                for name, pool in self.by_name.items()
            ]
        )


def build_pools(kind: str, layout: str) -> ReleasePools | None:
    """Build the pools of one kind of model; None if this release has no such pools, or not in this layout.

    Args:
        kind: mha, mla, mamba, indexer, or deepseek_v4.
        layout: `--hicache-mem-layout`.
    """
    if _takes_device_pools():
        return _BUILDERS[kind](layout)
    # From 0.5.22 host pools are built from descriptions that SGLang's assembler makes.
    from ucm.testing import host_pools

    model = {
        "mha": host_pools.MhaModel,
        "mla": host_pools.MlaModel,
        "mamba": host_pools.MambaModel,
        "indexer": host_pools.DsaModel,
        "deepseek_v4": host_pools.DeepSeekV4Model,
    }[kind]()
    pages = V4_PAGE_TOKENS if kind == "deepseek_v4" else PAGE_TOKENS
    built = host_pools.host_pools(model, layout=layout, page_tokens=pages, pages=_PAGES)
    return ReleasePools({name: built[name] for name in built.names}, _as_device_pool())


def _as_device_pool() -> Any:  # noqa: ANN401
    """Return a device pool, for a controller that only moves between host and storage."""
    return _device(find(f"{_MEMORY}:MHATokenToKVPool"), head_num=2, head_dim=8)


def _takes_device_pools() -> bool:
    pool = find(f"{_HOST}:MambaPoolHost", "mem_cache.pool_host.mamba:MambaPoolHost")
    return pool is None or "device_pool" in inspect.signature(pool).parameters


def _host(cls: Any, device_pool: Any, layout: str, **more: object) -> Any:  # noqa: ANN401
    arguments = {
        "device_pool": device_pool,
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": layout,
        "pin_memory": False,
        **more,
    }
    return cls(**_accepted(cls, arguments))


def _device(cls: Any, **more: object) -> Any:  # noqa: ANN401
    arguments: dict[str, object] = {
        "size": _TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
        **more,
    }
    return cls(**_accepted(cls, arguments))


def _mha(layout: str) -> ReleasePools:
    device = _as_device_pool()
    cls = find("mem_cache.pool_host.mha:MHATokenToKVPoolHost", f"{_HOST}:MHATokenToKVPoolHost")
    return ReleasePools({"kv": _host(cls, device, layout)}, device)


_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}


def _mla_host(device: Any, layout: str) -> Any:  # noqa: ANN401
    cls = find("mem_cache.pool_host.mla:MLATokenToKVPoolHost", f"{_HOST}:MLATokenToKVPoolHost")
    return _host(cls, device, layout)


def _mla(layout: str) -> ReleasePools:
    device = _device(find(f"{_MEMORY}:MLATokenToKVPool"), **_LATENT)
    return ReleasePools({"kv": _mla_host(device, layout)}, device)


def _indexer(layout: str) -> ReleasePools | None:
    cls = find(
        "mem_cache.pool_host.dsa:DSAIndexerPoolHost",
        f"{_HOST}:DSAIndexerPoolHost",
        f"{_HOST}:NSAIndexerPoolHost",
    )
    if cls is None:
        return None
    device_class = find(f"{_MEMORY}:DSATokenToKVPool", f"{_MEMORY}:NSATokenToKVPool")
    device = _device(device_class, kv_cache_dim=24, index_head_dim=128, **_LATENT)
    if "host_pool" in inspect.signature(cls).parameters:
        # 0.5.9, patched: the index is a view of the pool that holds both.
        anchor = _host(find(f"{_HOST}:NSATokenToKVPoolHost"), device, layout)
        return ReleasePools({"kv": anchor, "indexer": cls(anchor)}, device)
    anchor = _mla_host(device, layout)
    return ReleasePools({"kv": anchor, "indexer": _host(cls, device, layout, anchor_host=anchor)}, device)


def _mamba(layout: str) -> ReleasePools | None:
    cls = find("mem_cache.pool_host.mamba:MambaPoolHost", f"{_HOST}:MambaPoolHost")
    if cls is None:
        return None
    state = import_module("sglang.srt.configs.mamba_utils")
    shape = state.Mamba2StateShape(
        conv=[(6, 3), (7, 3)],
        temporal=(2, 4, 5),
        intermediate_size=8,
        conv_dim=6,
        ssm_state_size=5,
        num_heads=2,
        head_dim=4,
        state_size=5,
        conv_kernel=4,
    )
    dtype = state.Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    params = state.Mamba2CacheParams(layers=[3, 4], dtype=dtype, shape=shape)
    states = _device(
        find(f"{_MEMORY}:MambaPool"),
        size=_PAGES,
        spec_state_size=0,
        cache_params=params,
        mamba_layer_ids=[3, 4],
    )
    pools = _mha(layout)
    try:
        return ReleasePools({**pools.by_name, "mamba": _host(cls, states, layout)}, pools.device)
    except ValueError:
        if layout != "page_first":
            raise
        return None  # 0.5.14 and 0.5.15 have them in page_first_direct only.


def _deepseek_v4(layout: str) -> ReleasePools | None:
    paged = find(f"{_HOST}:DeepSeekV4PagedHostPool")
    if paged is None:
        return None
    logical = find(f"{_HOST}:LogicalHostPool")
    anchor = logical(
        **_accepted(logical, {"size": _V4_TOKENS, "page_size": V4_PAGE_TOKENS, "layout": layout})
    )
    pools = {"kv": anchor}
    for name, row_bytes in _V4_ROW_BYTES.items():
        arguments = {
            "pool_name": name,
            "device_buffers": [torch.zeros(_PAGES, row_bytes, dtype=torch.uint8) for _ in range(2)],
            "item_bytes": row_bytes,
            "num_host_pages": _PAGES,
            "slot_page_size": V4_PAGE_TOKENS,
            "layout": layout,
            "pin_memory": False,
        }
        pools[name] = paged(**_accepted(paged, arguments))
    return ReleasePools(pools, _as_device_pool())


_BUILDERS = {
    "mha": _mha,
    "mla": _mla,
    "mamba": _mamba,
    "indexer": _indexer,
    "deepseek_v4": _deepseek_v4,
}


def start_ranks(rendezvous: Path) -> Any:  # noqa: ANN401
    """Set up SGLang's groups of ranks for this process alone; return the one that controllers agree in."""
    state = import_module("sglang.srt.distributed.parallel_state")
    if state._WORLD is None:  # noqa: SLF001 # There is no public way to ask.
        state.init_distributed_environment(1, 0, f"file://{rendezvous}", local_rank=0, backend="gloo")
        for name in ("_TP", "_PP", "_ATTN_TP", "_ATTN_CP"):
            # SGLang would set up NCCL for groups of its own.
            if getattr(state, name, ...) is None:
                setattr(state, name, state.get_world_group())
    parallel = find("runtime_context:get_parallel")
    if hasattr(parallel and parallel(), "override"):
        # What a server publishes at its start; kept until the process ends.
        place = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_dcp_rank": 0,
            "attn_dcp_size": 1,
        }
        for name, value in place.items():
            with suppress(TypeError, ValueError, AttributeError, KeyError):
                _published.enter_context(parallel().override(**{name: value}))
    return state.get_world_group().cpu_group


_published = ExitStack()

_SEVERAL_POOLS = "mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_ANCHOR_ONLY = "managers.cache_controller:HiCacheController"


def has_controller_of_several_pools() -> bool:
    """Tell whether this release has a second controller for models with several pools (from 0.5.10)."""
    return find(_SEVERAL_POOLS) is not None


class ReleaseController:
    """A storage controller of this release over some pools, driven through its queues."""

    def __init__(self, controller: Any, pools: ReleasePools) -> None:  # noqa: ANN401
        self.inner = controller
        self.pools = pools
        self.acknowledgements = 0
        """Of the last prefetch; none where SGLang has no queue for them (until 0.5.18)."""

    @property
    def backend(self) -> Any:  # noqa: ANN401
        """The attached storage backend."""
        return self.inner.storage_backend

    def attach(self, backend: str, extra_config: dict[str, object]) -> None:
        """Attach a storage backend as a server does."""
        arguments = {
            "storage_backend": backend,
            "prefetch_threshold": 1,
            "model_name": "org/model",
            "storage_backend_extra_config": extra_config,
            "host_pools": getattr(self.inner.mem_pool_host, "entries", None),
        }
        attach = self.inner.attach_storage_backend
        attach(**_accepted(attach, arguments))

    def back_up(
        self, hashes: list[str], host_indices: torch.Tensor, sidecars: list[Any] | None = None
    ) -> None:
        """Queue a backup of pages."""
        tokens = list(range(len(host_indices)))
        arguments = {"hash_value": hashes, "extra_pools": sidecars}
        write = self.inner.write_storage
        write(host_indices, tokens, **_accepted(write, arguments))

    def backed_up_tokens(self, timeout_s: float) -> int:
        """Wait for the acknowledgement of a backup, and return its number of tokens.

        Raises:
            TimeoutError: It did not come, or cannot come any more: the thread has died.
        """
        deadline = time.monotonic() + timeout_s
        acknowledged = self.inner.ack_backup_queue
        while acknowledged.empty() and self.inner.backup_thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return int(_next(acknowledged, time.monotonic()).completed_tokens)

    def page_hashes(self, tokens: list[int]) -> list[str]:
        """Return the storage keys of a prompt's pages."""
        return list(page_hash.HASHER.get_hash(tokens, len(tokens), 1, False, None, PAGE_TOKENS))

    def prefetched_tokens(
        self, tokens: list[int], timeout_s: float, sidecars: list[Any] | None = None
    ) -> int:
        """Prefetch a prompt into host pages behind those that `back_up` uses, and return how much of it came.

        Raises:
            TimeoutError: The storage threads did not answer.
        """
        deadline = time.monotonic() + timeout_s
        operation, pages = self._begin(tokens, sidecars)
        if self._queues_hits():
            while self.inner.prefetch_hit_queue.empty() and not self._was_revoked():
                if time.monotonic() > deadline:
                    raise TimeoutError("the storage threads did not answer")
                time.sleep(_POLL_S)
            if self.inner.prefetch_hit_queue.empty():
                return 0
            operation = self.inner.prefetch_hit_queue.get()
            if operation.storage_hit_count == 0:
                return 0
            operation.host_indices = pages[: operation.storage_hit_count]
            self.inner.prefetch_buffer.put(operation)
        if hasattr(self.inner, "ack_prefetch_queue"):
            return self._acknowledged_tokens(deadline)
        while time.monotonic() < deadline:
            if self._was_revoked():
                return 0
            done = operation.completed_tokens
            expected = len(operation.hash_value) * PAGE_TOKENS
            complete = 0 < done == expected and getattr(operation, "pool_transfers_done", True)
            if complete or operation.is_terminated():
                return int(done)
            time.sleep(_POLL_S)
        raise TimeoutError("the prefetch did not end")

    def _begin(self, tokens: list[int], sidecars: list[Any] | None) -> tuple[Any, torch.Tensor]:
        pages = torch.arange(len(tokens), 2 * len(tokens))
        handle = find("mem_cache.base_prefix_cache:CacheRequestHandle")
        arguments = {
            "request_id": "request",
            "handle": handle and handle("request", 0),
            "host_indices": pages,
            "new_input_tokens": array("q", tokens),
            "extra_pools": sidecars,
        }
        return self.inner.prefetch(**_accepted(self.inner.prefetch, arguments)), pages

    def _was_revoked(self) -> bool:
        """Tell whether SGLang found too little in storage; until 0.5.17 a queue of its own says so."""
        revoked = getattr(self.inner, "prefetch_revoke_queue", None)
        if revoked is None or revoked.empty():
            return False
        revoked.get()
        return True

    def _queues_hits(self) -> bool:
        """Tell whether the scheduler hands out host pages after the lookup (from 0.5.16) or before."""
        return "host_indices" not in inspect.signature(self.inner.prefetch).parameters

    def _acknowledged_tokens(self, deadline: float) -> int:
        tokens = self.acknowledgements = 0
        while True:
            ack = _next(self.inner.ack_prefetch_queue, deadline)
            self.acknowledgements += 1
            tokens = max(tokens, ack.completed_tokens or 0)
            if ack.completed_req:
                return tokens


def _next(source: Any, deadline: float) -> Any:  # noqa: ANN401
    try:
        return source.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the storage threads did not answer") from None


@contextmanager
def release_controller(
    pools: ReleasePools, rendezvous: Path, *, several_pools: bool
) -> Iterator[ReleaseController]:
    """Run one of this release's two controllers, without a storage backend yet.

    Args:
        pools: What it moves.
        rendezvous: A file in which the ranks of this process meet.
        several_pools: Run the controller of models with several pools, or the one that moves the anchor only.
    """
    cls = find(_SEVERAL_POOLS if several_pools else _ANCHOR_ONLY)
    arguments = {
        "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: pools.device),
        "mem_pool_host": pools.group() if several_pools else pools.anchor,
        "page_size": pools.anchor.page_size,
        "tp_group": start_ranks(rendezvous),
        "load_cache_event": threading.Event(),
        "write_policy": "write_through",
        "io_backend": "kernel",
    }
    controller = cls(**_accepted(cls, arguments))
    try:
        yield ReleaseController(controller, pools)
    finally:
        if controller.enable_storage:
            controller.detach_storage_backend()
