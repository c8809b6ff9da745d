# SPDX-License-Identifier: MIT
"""The copies between device pools and host pools, as plain torch.

Names, argument names and meanings are those of `sgl_kernel.kvcacheio` (SGLang 0.5.23), because host pools
call them by keyword; arguments that only tune a GPU launch are swallowed. Suffixes: `lf` is layer first
(device pools: one tensor per layer), `pf` page first (host pools: all layers of a page together).

The `kernel` family goes by address: that of a tensor, or a uint64 table with those of all layers. An item is
what one index stands for: `item_size` bytes of one layer (of a token, a page or a state).
The `direct` family takes tensors and whole pages; indices are tokens, `page_size` consecutive ones to a page.

Every function is synchronous: the bytes are in place when it returns.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any


def _copy_items(
    source: int,
    source_indices: torch.Tensor,
    source_stride: int,
    target: int,
    target_indices: torch.Tensor,
    target_stride: int,
    item_bytes: int,
) -> None:
    """Copy items between two arrays in memory, given by address and by bytes from one item to the next."""
    if source_indices.numel() == 0:
        return
    source_rows = _rows(source, source_indices, source_stride, item_bytes)
    target_rows = _rows(target, target_indices, target_stride, item_bytes)
    target_rows[target_indices.long()] = source_rows[source_indices.long()]


def _rows(address: int, indices: torch.Tensor, stride: int, item_bytes: int) -> torch.Tensor:
    count = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * ((count - 1) * stride + item_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).as_strided((count, item_bytes), (stride, 1))


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_launch: object,
) -> None:
    """Copy items of one layer, packed on both sides."""
    _copy_items(src.data_ptr(), src_indices, item_size, dst.data_ptr(), dst_indices, item_size, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_launch: object,
) -> None:
    """Copy items of one layer from a page first host pool, whose items are `src_layout_dim` bytes apart."""
    source = src.data_ptr() + layer_id * item_size
    _copy_items(source, src_indices, src_layout_dim, dst.data_ptr(), dst_indices, item_size, item_size)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """Copy items of all layers, packed on both sides."""
    for source, target in zip(src_layers.tolist()[:num_layers], dst_layers.tolist(), strict=False):
        _copy_items(source, src_indices, item_size, target, dst_indices, item_size, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """Copy items of all layers into a page first host pool, whose items are `dst_layout_dim` bytes apart."""
    for layer, source in enumerate(src_layers.tolist()[:num_layers]):
        target = dst.data_ptr() + layer * item_size
        _copy_items(source, src_indices, item_size, target, dst_indices, dst_layout_dim, item_size)


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_launch: object,
) -> None:
    """Copy K and V items of one layer, packed on both sides."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(source, target, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_launch: object,
) -> None:
    """Copy K and V items of one layer from a page first host pool."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            source, target, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """Copy K and V items of all layers, packed on both sides."""
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(sources, targets, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """Copy K and V items of all layers into a page first host pool."""
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            sources, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy tokens between tensors of equal shape behind the first axis, layer by layer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy pages of one layer from host tensors `[page, layer, ...]` (K, V, or one of both kinds)."""
    pages = _pages(src_indices, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        rows = dst_indices.long()
        target[rows] = source[pages, layer_id].reshape(rows.numel(), *target.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of all layers into host tensors `[page, layer, ...]`.

    Args:
        src_ptrs: All layers for the first host tensor, then all layers for the next one.
        dst_ptrs: Host tensors.
        src_indices: Device tokens.
        dst_indices: Host tokens.
        page_size: Tokens in a page.
    """
    pages = _pages(dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for position, source in enumerate(src_ptrs):
        target = dst_ptrs[position // layers]
        rows = source[src_indices.long()].reshape(pages.numel(), *target.shape[2:])
        target[pages, position % layers] = rows


def _pages(token_indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return token_indices.long()[::page_size] // page_size


def transfer_kv_mamba_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_launch: object,
) -> None:
    """Copy one layer's states from a page first host pool."""
    transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_mamba_lf_pf(
    src_ptrs: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_launch: object,
) -> None:
    """Copy all layers' states into a page first host pool."""
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        transfer_kv_all_layer,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_all_layer_lf_pf,
        transfer_kv_all_layer_mla,
        transfer_kv_all_layer_mla_lf_pf,
        transfer_kv_direct,
        transfer_kv_mamba_lf_pf,
        transfer_kv_mamba_pf_lf,
        transfer_kv_per_layer,
        transfer_kv_per_layer_direct_pf_lf,
        transfer_kv_per_layer_mla,
        transfer_kv_per_layer_mla_pf_lf,
        transfer_kv_per_layer_pf_lf,
    )
}
