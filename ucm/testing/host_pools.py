# SPDX-License-Identifier: MIT
"""SGLang's real device and host pools for every kind of state, small and on a plain CPU.

A *model* states a geometry and builds the device pools as SGLang's model runner would; `host_pools` lets
SGLang's own assembler build the host pools for them.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from ucm.testing.sglang_runtime import HicacheSettings, HostMemoryGuards, cpu_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.pool_host import HostKVCache, HostPoolGroup
    from sglang.srt.server_args import ServerArgs
    from torch.distributed import ProcessGroup

_REQUESTS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The CPU groups in which the ranks of one server agree; None where there is one rank only.

    Attributes:
        tp: Ranks that split heads, or hold the same bytes.
        cp: Ranks that split the tokens of a page.
        pp: Ranks that split the layers.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    pp: ProcessGroup | None = None


ONE_RANK = RankGroups()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePools:
    """What a model runner hands to the radix tree."""

    kv: KVCache
    allocator: BaseTokenToKVPoolAllocator
    requests: ReqToTokenPool
    components: tuple[ComponentType, ...]
    page_tokens: int
    sliding_window_tokens: int | None = None
    drafts: tuple[KVCache, ...] = ()

    def cache_params(self, groups: RankGroups) -> CacheInitParams:
        """Return the radix tree's constructor argument."""
        pipeline = {} if groups.pp is None else {"pp_rank": groups.pp.rank(), "pp_size": groups.pp.size()}
        return CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_tokens,
            tree_components=self.components,
            sliding_window_size=self.sliding_window_tokens,
            mtp_draft_device_pools=self.drafts,
            tp_cache_group=groups.tp,
            attn_cp_cache_group=groups.cp,
            pp_cache_group=groups.pp,
            **pipeline,
            enable_mamba_extra_buffer=ComponentType.MAMBA in self.components,
        )


class Model(Protocol):
    """A geometry that can build its device pools inside `cpu_runtime`."""

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build pools of `pages` device pages of `page_tokens` tokens."""
        ...


def _allocator(kv: KVCache, dtype: torch.dtype, page_tokens: int, tokens: int) -> BaseTokenToKVPoolAllocator:
    if page_tokens == 1:
        return TokenToKVPoolAllocator(tokens, dtype, "cpu", kv, need_sort=False)
    return PagedTokenToKVPoolAllocator(tokens, page_tokens, dtype, "cpu", kv, need_sort=False)


def _requests(tokens: int) -> ReqToTokenPool:
    return ReqToTokenPool(size=_REQUESTS, max_context_len=tokens, device="cpu", enable_memory_saver=False)


def _full_attention_pools(kv: KVCache, dtype: torch.dtype, page_tokens: int, tokens: int) -> DevicePools:
    return DevicePools(
        kv=kv,
        allocator=_allocator(kv, dtype, page_tokens, tokens),
        requests=_requests(tokens),
        components=(ComponentType.FULL,),
        page_tokens=page_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MhaModel:
    """Multi-head attention: K and V, of equal size unless `v_head_dim` differs."""

    layers: int = 3
    heads: int = 2
    head_dim: int = 8
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools."""
        tokens = page_tokens * pages
        kv = MHATokenToKVPool(
            size=tokens,
            page_size=page_tokens,
            dtype=self.dtype,
            head_num=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            layer_num=self.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        return _full_attention_pools(kv, self.dtype, page_tokens, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaModel:
    """Multi-head latent attention: one region, the same on every TP rank."""

    layers: int = 3
    kv_lora_rank: int = 16
    qk_rope_head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools."""
        tokens = page_tokens * pages
        kv = MLATokenToKVPool(
            size=tokens,
            page_size=page_tokens,
            dtype=self.dtype,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            layer_num=self.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        return _full_attention_pools(kv, self.dtype, page_tokens, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DsaModel:
    """DeepSeek sparse attention: latent KV and an INDEXER sidecar. SGLang takes 64-token pages only."""

    layers: int = 3
    kv_lora_rank: int = 16
    qk_rope_head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools."""
        tokens = page_tokens * pages
        kv = DSATokenToKVPool(
            size=tokens,
            page_size=page_tokens,
            dtype=self.dtype,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            kv_cache_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            index_head_dim=128,
            layer_num=self.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        return _full_attention_pools(kv, self.dtype, page_tokens, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaModel:
    """Full and linear attention: KV, and per checkpoint a temporal and several convolution states.

    Attributes:
        anchor: Geometry of the full-attention layers.
        temporal_shape: State of one linear layer; `(0, 4, 4)` is a convolution-only model.
        conv_shapes: Convolution states of one linear layer, usually of different sizes.
    """

    anchor: MhaModel | MlaModel = field(default_factory=MhaModel)
    linear_layers: int = 2
    temporal_shape: tuple[int, int, int] = (2, 4, 5)
    conv_shapes: tuple[tuple[int, int], ...] = ((6, 3), (7, 3))
    temporal_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools; the linear layers follow the full-attention layers."""
        tokens = page_tokens * pages
        full_layers = list(range(self.anchor.layers))
        linear_layers = list(range(self.anchor.layers, self.anchor.layers + self.linear_layers))
        heads, dim, dim_again = self.temporal_shape
        requests = HybridReqToTokenPool(
            size=_REQUESTS,
            mamba_size=pages,
            mamba_spec_state_size=0,
            max_context_len=tokens,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(
                layers=linear_layers,
                dtype=Mamba2StateDType(conv=self.conv_dtype, temporal=self.temporal_dtype),
                # The pools read `conv` and `temporal`; the rest describes the kernels' view.
                shape=Mamba2StateShape(
                    conv=list(self.conv_shapes),
                    temporal=self.temporal_shape,
                    intermediate_size=heads * dim,
                    conv_dim=self.conv_shapes[0][0],
                    ssm_state_size=dim_again,
                    num_heads=heads,
                    head_dim=dim,
                    state_size=dim_again,
                    conv_kernel=self.conv_shapes[0][1] + 1,
                ),
            ),
            mamba_layer_ids=linear_layers,
            enable_mamba_extra_buffer=True,
        )
        kv = HybridLinearKVPool(
            size=tokens,
            dtype=self.anchor.dtype,
            page_size=page_tokens,
            full_attention_layer_ids=full_layers,
            device="cpu",
            mamba_pool=requests.mamba_pool,
            **self._anchor_arguments(),
        )
        return DevicePools(
            kv=kv,
            allocator=_allocator(kv, self.anchor.dtype, page_tokens, tokens),
            requests=requests,
            components=(ComponentType.FULL, ComponentType.MAMBA),
            page_tokens=page_tokens,
        )

    def _anchor_arguments(self) -> dict[str, Any]:
        if isinstance(self.anchor, MhaModel):
            return {"head_num": self.anchor.heads, "head_dim": self.anchor.head_dim}
        return {
            "head_num": 1,
            "head_dim": self.anchor.kv_lora_rank,
            "use_mla": True,
            "kv_lora_rank": self.anchor.kv_lora_rank,
            "qk_rope_head_dim": self.anchor.qk_rope_head_dim,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SwaModel:
    """Full and sliding-window attention, each with its own K and V pool."""

    full_layers: int = 2
    swa_layers: int = 3
    heads: int = 2
    head_dim: int = 8
    window_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools; both hold `pages` pages."""
        tokens = page_tokens * pages
        kv = SWAKVPool(
            size=tokens,
            size_swa=tokens,
            page_size=page_tokens,
            dtype=self.dtype,
            head_num=self.heads,
            head_dim=self.head_dim,
            full_attention_layer_ids=list(range(self.full_layers)),
            swa_attention_layer_ids=list(range(self.full_layers, self.full_layers + self.swa_layers)),
            device="cpu",
        )
        return DevicePools(
            kv=kv,
            allocator=SWATokenToKVPoolAllocator(
                tokens, tokens, page_tokens, self.dtype, "cpu", kv, need_sort=False
            ),
            requests=_requests(tokens),
            components=(ComponentType.FULL, ComponentType.SWA),
            page_tokens=page_tokens,
            sliding_window_tokens=self.window_tokens,
        )


FLASH_COMPRESS_RATIOS = (0, 0, *(4, 128) * 20, 4)
"""DeepSeek V4 Flash: 43 layers, of which 21 compress four tokens and 20 compress 128."""

TINY_COMPRESS_RATIOS = (0, 4, 128, 4, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekV4Model:
    """DeepSeek V4: a logical anchor and six sidecars. SGLang takes 256-token pages only.

    Attributes:
        compress_ratios: One entry per target layer: 0, 4 or 128.
        mtp_layers: Draft layers, whose SWA state is stored in the same pages as the target's.
    """

    compress_ratios: Sequence[int] = TINY_COMPRESS_RATIOS
    mtp_layers: int = 0
    window_tokens: int = 128

    def device_pools(self, page_tokens: int, pages: int) -> DevicePools:
        """Build the pools; speculative decoding must be published when there are MTP layers."""
        tokens = page_tokens * pages
        kv = self._kv_pool(self.compress_ratios, page_tokens, pages)
        drafts = tuple(
            self._kv_pool((0,), page_tokens, pages, is_draft_worker=True) for _ in range(self.mtp_layers)
        )
        return DevicePools(
            kv=kv,
            allocator=SWATokenToKVPoolAllocator(
                tokens, tokens, page_tokens, torch.float8_e4m3fn, "cpu", kv, need_sort=False
            ),
            requests=_requests(tokens),
            components=(ComponentType.FULL, ComponentType.SWA),
            page_tokens=page_tokens,
            sliding_window_tokens=self.window_tokens,
            drafts=drafts,
        )

    def _kv_pool(
        self, compress_ratios: Sequence[int], page_tokens: int, pages: int, *, is_draft_worker: bool = False
    ) -> DeepSeekV4TokenToKVPool:
        tokens = page_tokens * pages
        compressed = any(compress_ratios)
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=_REQUESTS,
            swa_size=tokens,
            c4_size=tokens // 4 if compressed else 0,
            c128_size=tokens // 128 if compressed else 0,
            # One ring of at most 16 rows per SWA page.
            c4_state_pool_size=pages * 16 if compressed else 0,
            c128_state_pool_size=0,
            page_size=page_tokens,
            swa_page_size=page_tokens,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=len(compress_ratios),
            start_layer=0,
            end_layer=len(compress_ratios),
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=list(compress_ratios),
            sliding_window=self.window_tokens,
            full_size=tokens,
            is_draft_worker=is_draft_worker,
        )


@dataclass(frozen=True, slots=True)
class HostPools:
    """The host pools of one model, as SGLang's assembler built them.

    Attributes:
        group: What SGLang's controller holds; its `anchor_entry.host_pool` is the primary.
        guards: The guard bytes around every host buffer.
    """

    group: HostPoolGroup
    guards: HostMemoryGuards

    @property
    def names(self) -> list[str]:
        """Pool names, anchor first."""
        return [entry.name.value for entry in self.group.entries]

    @property
    def anchor(self) -> HostKVCache:
        """The pool that hands out host indices."""
        return self.group.anchor_entry.host_pool

    def __getitem__(self, name: str) -> HostKVCache:
        return next(entry.host_pool for entry in self.group.entries if entry.name.value == name)


def attach_host_pools(
    device: DevicePools,
    server_args: ServerArgs,
    guards: HostMemoryGuards,
    groups: RankGroups = ONE_RANK,
) -> tuple[UnifiedRadixCache, HostPools]:
    """Build a radix tree over `device` with its host pools and controller, inside `cpu_runtime`.

    The caller owns the tree: SGLang would keep it, and its memory, until the interpreter exits.
    """
    params = device.cache_params(groups)
    tree = UnifiedRadixCache(params)
    tree.init_hicache(server_args, params)
    atexit.unregister(tree.shutdown)
    return tree, HostPools(tree.host_pool_group, guards)


def register_draft(tree: UnifiedRadixCache, draft: KVCache) -> None:
    """Give a tree the host pools of a draft model, as SGLang does for drafts with pools of their own."""
    # Not every supported release has it.
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_hicache_draft_sidecars

    specs, entries = build_hicache_draft_sidecars(draft_device_pools=(draft,), tree_cache=tree)
    for spec, entry in zip(specs, entries, strict=True):
        tree.register_sidecar_pool(spec, entry)


def host_pools(
    model: Model, *, layout: str = "page_first", page_tokens: int = 64, pages: int = 8, draft_tokens: int = 0
) -> HostPools:
    """Build the host pools of `model`, twice as large as its `pages` device pages.

    Args:
        model: One of the models of this module.
        layout: `page_first`, `page_first_direct` or `layer_first`.
        page_tokens: Tokens of a page; DSA takes 64 and DeepSeek V4 takes 256.
        pages: Device pages.
        draft_tokens: Tokens drafted per step, for DeepSeek V4 with MTP layers.
    """
    guards = HostMemoryGuards()
    settings = HicacheSettings(layout=layout, page_tokens=page_tokens, draft_tokens=draft_tokens)
    with cpu_runtime(settings, guards) as server_args:
        return attach_host_pools(model.device_pools(page_tokens, pages), server_args, guards)[1]
