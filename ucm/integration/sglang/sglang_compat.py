# SPDX-License-Identifier: MIT
"""Every difference between the SGLang releases we support, decided by what their types offer.

Read in SGLang 0.5.9 to 0.5.23. Pool names and hit policies are `str` enums, so
the rest of the package compares them with plain text. Nothing of SGLang is imported before it is needed: the
plugin is loaded by processes that do without its memory pools.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from ucm.integration.sglang.namespace import PoolOwnership, RankShard, ServedModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.server_args import ServerArgs

    PageMeta: TypeAlias = tuple[Sequence[int] | None, Sequence[int] | None] | None

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"  # From 0.5.22.

# The one sidecar that every TP rank writes even when the model is rank-replicated
# (0.5.23 `HybridCacheController.should_backup`); its states differ in size.
STATE_POOL = "mamba"

# 0.5.10's pool of linear-attention states has this method in place of `get_page_buffer_meta`.
_STATE_PARTS = "_iter_page_tensors"

_SGLANG = "sglang.srt"
_LAYOUT_HOOKS = f"{_SGLANG}.arg_groups.hicache_hook"
_OVERRIDES = f"{_SGLANG}.arg_groups.overrides"
_METRICS_MODULES = (f"{_SGLANG}.observability.metrics_collector", f"{_SGLANG}.metrics.collector")

_DTYPE_BY_TORCH_NAME = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2",
}


class HostPool(Protocol):
    """The members of SGLang's host pools that we use."""

    page_size: int
    size: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> PageMeta:
        """Return pointers and sizes of the parts of the pages at `indices`."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a copy of the page at `index` as one vector."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a new vector of the size of a page."""
        ...

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy a vector into the page at `index`."""
        ...


def pool_text(pool_name: str) -> str:
    """Return the plain text of a pool name, enum or not."""
    return str(getattr(pool_name, "value", pool_name))


def served_model(config: HiCacheStorageConfig) -> ServedModel:
    """Read who we are from what SGLang tells a backend; older releases know fewer groups of ranks.

    `dp_rank` is left out on purpose: all data-parallel ranks share one cache.
    """
    known = {field.name for field in fields(config)}

    def rank_and_size(prefix: str) -> tuple[int, int]:
        if f"{prefix}_size" not in known:
            return 0, 1
        return getattr(config, f"{prefix}_rank"), getattr(config, f"{prefix}_size")

    tp_rank, tp_size = rank_and_size("tp")
    pp_rank, pp_size = rank_and_size("pp")
    cp_rank, cp_size = rank_and_size("attn_cp")
    dcp_rank, dcp_size = rank_and_size("dcp")
    shard = RankShard(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        cp_rank=cp_rank,
        cp_size=cp_size,
        dcp_rank=dcp_rank,
        dcp_size=dcp_size,
    )
    revision = _published_model_setting("revision")
    name = config.model_name or ""
    return ServedModel(
        name=f"{name}@{revision}" if revision else name, shard=shard, replicated=config.is_mla_model
    )


def wants_metrics(config: HiCacheStorageConfig) -> bool:
    """Tell whether SGLang is going to ask for transfer metrics."""
    return bool(getattr(config, "enable_storage_metrics", False))


def splits_heads(config: HiCacheStorageConfig) -> bool:
    """Tell whether SGLang wants a page stored in pieces for servers of different TP sizes."""
    return bool(getattr(config, "should_split_heads", False))


def as_host_pool(candidate: object) -> HostPool | None:
    """Return the host pool in what SGLang hands over.

    Its `HostPoolGroup` cannot move data; the anchor in it can. `dynamic` loading
    passes a mapping of options to the constructor, which holds no pool.
    """
    entry = getattr(candidate, "anchor_entry", None)
    pool = candidate if entry is None else entry.host_pool
    known = hasattr(pool, "get_page_buffer_meta") or hasattr(pool, _STATE_PARTS)
    return cast("HostPool", pool) if known else None


def has_no_bytes(host_pool: HostPool) -> bool:
    """Tell whether an anchor owns host indices only.

    A pool that only lacks its buffer, because another rank holds the bytes
    (0.5.23 MLA host sharing), still states their size.
    """
    return getattr(host_pool, "kv_buffer", None) is None and not getattr(host_pool, "size_per_token", 0)


def keeps_index_to_itself(host_pool: HostPool) -> bool:
    """Tell whether an anchor holds a sparse-attention index that SGLang moves to no storage.

    Until 0.5.10 the index lies beside the KV, in a pool that moves pages of KV only, and has
    no name of its own. Patches give it one.
    """
    names = getattr(import_module(f"{_SGLANG}.mem_cache.hicache_storage"), "PoolName", None)
    return hasattr(host_pool, "index_k_with_scale_buffer") and not hasattr(names, "INDEXER")


def takes_layout(host_pool: HostPool) -> bool:
    """Tell whether the pool can be built in several layouts; 0.5.12's DeepSeek V4 pools cannot."""
    return "layout" in inspect.signature(type(host_pool)).parameters


def indices_per_page(host_pool: HostPool) -> int:
    """Return how many host indices stand for one page; with DCP (0.5.23) more than its own tokens."""
    return int(getattr(host_pool, "logical_page_size", host_pool.page_size))


def holds_dcp_shard(host_pool: HostPool) -> bool:
    """Tell whether a page is spread over DCP ranks (pools since 0.5.19, storage keys since 0.5.23)."""
    return indices_per_page(host_pool) > host_pool.page_size


def index_limit(host_pool: HostPool) -> int:
    """Return the first host index that is outside the pool."""
    return int(getattr(host_pool, "logical_size", host_pool.size))


def is_slot_sharded(host_pool: HostPool) -> bool:
    """Tell whether host indices name slots of several ranks, as with KV cache sharding (0.5.23)."""
    return bool(getattr(host_pool, "shard_size", 1) > 1)


def holds_heads(host_pool: HostPool) -> bool:
    """Tell whether the pool keeps attention heads, which TP ranks divide among them."""
    return hasattr(host_pool, "head_num")


def pool_ownership(pool: str, host_pool: HostPool, model: ServedModel) -> PoolOwnership:
    """Tell whose bytes this rank holds of a pool.

    Only a rank-replicated model has pools that are the same on every TP rank. Its
    linear-attention states are split all the same, and so is a pool of attention
    heads, as the draft of an MLA model may be.
    """
    replicated = model.replicated and pool != STATE_POOL and not holds_heads(host_pool)
    return PoolOwnership(shard=model.shard, replicated=replicated)


def page_buffer_meta(host_pool: HostPool, indices: torch.Tensor) -> PageMeta:
    """Return pointers and sizes of the parts of the pages at `indices`, page after page.

    0.5.10's pool of linear-attention states gives none, but the tensors themselves; one index is a page.
    """
    if hasattr(host_pool, "get_page_buffer_meta"):
        return host_pool.get_page_buffer_meta(indices)
    parts = [part for index in indices.tolist() for part in getattr(host_pool, _STATE_PARTS)(index)]
    if not all(part.is_contiguous() for part in parts):
        raise ValueError("the parts of a page are not contiguous")
    return [part.data_ptr() for part in parts], [part.nbytes for part in parts]


def page_parts(meta: PageMeta, pages: int) -> tuple[Sequence[int], Sequence[int], int]:
    """Return the pointers and sizes of `pages` pages, page after page, and how many each page has.

    A pool without bytes answers with None, a pair of Nones, or a pair of empty
    lists, depending on the release; it has no parts.

    Raises:
        ValueError: The answer does not divide into that many pages.
    """
    pointers, sizes = meta if meta is not None else (None, None)
    if not pointers or not sizes:
        return [], [], 0
    width, rest = divmod(len(pointers), pages)
    if rest or len(sizes) != len(pointers):
        raise ValueError(f"{len(pointers)} pointers and {len(sizes)} sizes do not make {pages} pages")
    return pointers, sizes, width


def byte_order(host_pool: HostPool) -> str:
    """Name the order of the bytes in a page.

    `page_first` puts all layers of one token together, `page_first_direct` all
    tokens of one layer. Pools that keep a page of one layer as a single row
    (DeepSeek V4, DSA indexer, linear-attention states) store the same in both.
    """
    row_sizes = ("item_bytes", "state_page_bytes", "temporal_dtype")
    # Until 0.5.10 the pool of the KV has the index's sizes as well.
    is_index = hasattr(host_pool, "indexer_page_stride_size") and not hasattr(host_pool, "kv_buffer")
    rows = is_index or any(hasattr(host_pool, size) for size in row_sizes)
    return "rows" if rows else str(host_pool.layout)


def logical_dtype(host_pool: HostPool) -> str:
    """Name the type of a pool's values, as far as this release shows it.

    fp8 values are stored as bytes. Until 0.5.21, and for some pools after it, the
    device pool behind the host pool knows their type; then only the server's
    resolved `--kv-cache-dtype` does.
    """
    states = [getattr(host_pool, f"{state}_dtype", None) for state in ("temporal", "conv")]
    if None not in states:
        return "+".join(map(_dtype_text, states))
    device_dtype = getattr(getattr(host_pool, "device_pool", None), "dtype", None)
    if device_dtype is not None:
        return _dtype_text(device_dtype)
    stored = _dtype_text(host_pool.dtype)
    if stored != "uint8":
        return stored
    return _published_model_setting("kv_cache_dtype") or stored


def hit_result(restorable: list[int], pages_by_pool: dict[str, int]) -> PoolTransferResult:
    """Build SGLang's reply; before 0.5.19 it cannot list all legal lengths."""
    reply = import_module(f"{_SGLANG}.mem_cache.hicache_storage").PoolTransferResult
    lists_lengths = any(field.name == "restorable_prefix_pages" for field in fields(reply))
    extra = {"restorable_prefix_pages": restorable} if lists_lengths else {}
    result: PoolTransferResult = reply(max(restorable, default=0), pages_by_pool, **extra)
    return result


def layout_resolver() -> str:
    """Name SGLang's function that replaces an unsuitable host layout; until 0.5.18 it is a method."""
    if _has_module(_LAYOUT_HOOKS):
        return f"{_LAYOUT_HOOKS}.resolve_storage_layout_compatibility"
    return f"{_SGLANG}.server_args.ServerArgs._resolve_storage_layout_compatibility"


def resolved_arguments(server_args: ServerArgs) -> ServerArgs:
    """Return the server's arguments as SGLang has resolved them so far; from 0.5.15 a view shows that."""
    overrides = _optional_module(_OVERRIDES)
    view = getattr(overrides, "resolving_view", None) or getattr(overrides, "resolved_view", None)
    return server_args if view is None else cast("ServerArgs", view(server_args))


def needs_page_first_direct(settings: ServerArgs) -> bool:
    """Tell whether the model has linear-attention states, and SGLang no other host layout for them.

    That is so in 0.5.14 and 0.5.15. Asked is the constructor of their host pool: it looks at the layout
    before it looks at the device pool, of which there is none here.
    """
    if not getattr(settings, "uses_mamba_radix_cache", False):
        return False
    pools = _optional_module(f"{_SGLANG}.mem_cache.memory_pool_host")
    state_pool = getattr(pools, "MambaPoolHost", None)
    if state_pool is None:
        return False
    try:
        state_pool(None, 1.0, 0, layout="page_first")
    except ValueError:
        return True
    except (AttributeError, TypeError):  # It has come as far as the device pool.
        return False
    return False


def resolve_layout(server_args: ServerArgs, layout: str) -> None:
    """Replace `--hicache-mem-layout`, and `--hicache-io-backend` where that layout has one only."""
    resolved = {"hicache_mem_layout": layout}
    if layout == "page_first_direct":
        resolved["hicache_io_backend"] = "direct"
    if _has_module(_LAYOUT_HOOKS):
        import_module(_OVERRIDES).declare_resolution(server_args, "switch_to_page_first", **resolved)
        return
    for name, value in resolved.items():
        setattr(server_args, name, value)


def draft_registration() -> str | None:
    """Name SGLang's function that gives a draft pool to the storage backend.

    None where there is none, as drafts are not stored apart (until 0.5.12) or are sidecars (from 0.5.19).
    """
    controller = import_module(f"{_SGLANG}.managers.cache_controller").HiCacheController
    return _method(controller, "_maybe_register_draft_with_storage")


def backup_decision() -> str | None:
    """Name SGLang's function that decides which sidecars a rank writes; None until 0.5.17."""
    module = import_module(f"{_SGLANG}.mem_cache.hybrid_cache.hybrid_cache_controller")
    return _method(module.HybridCacheController, "should_backup")


def storage_metrics(
    loads: Sequence[tuple[int, float]], dumps: Sequence[tuple[int, float]]
) -> StorageMetrics | None:
    """Build what SGLang's metrics collector takes.

    Args:
        loads: Pages and GB/s of each v1 load since the last time.
        dumps: The same for v1 dumps.
    """
    module = next(filter(None, map(_optional_module, _METRICS_MODULES)), None)
    if module is None:
        return None
    metrics: StorageMetrics = module.StorageMetrics()
    metrics.prefetch_pgs.extend(pages for pages, _ in loads)
    metrics.prefetch_bandwidth.extend(rate for _, rate in loads)
    metrics.backup_pgs.extend(pages for pages, _ in dumps)
    metrics.backup_bandwidth.extend(rate for _, rate in dumps)
    return metrics


def _dtype_text(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_BY_TORCH_NAME.get(name, name)


def _published_model_setting(name: str) -> str | None:
    """Read a resolved server setting; None where this release or process publishes none."""
    context = _optional_module("sglang.srt.runtime_context")
    if context is None:
        return None
    try:
        value = getattr(context.get_model(), name)
    except (AttributeError, ValueError):
        return None
    return None if value is None else str(value)


def _method(cls: type, name: str) -> str | None:
    return f"{cls.__module__}.{cls.__qualname__}.{name}" if name in vars(cls) else None


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # The package that it would be in.
        return False


def _optional_module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None
