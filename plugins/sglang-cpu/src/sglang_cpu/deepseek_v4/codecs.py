# SPDX-License-Identifier: MIT
"""The page formats of KV and of index keys, as the CUDA kernels of SGLang 0.5.23 have them.

KV page (`KVLayout.V4`): `page_size` rows of 576 bytes (448 values as float8 e4m3, then 64 rotated values as
bfloat16), followed by `page_size` groups of 8 bytes (7 power-of-two scales, one per 64 float8 values, stored
as biased exponents, and one unused byte). The page is padded to a multiple of 576 bytes.

Index page: `page_size` rows of 128 float8 values, followed by `page_size` float32 scales.
"""

from __future__ import annotations

import torch

NOPE_DIM = 448
ROPE_DIM = 64
TILE = 64
ROW_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = NOPE_DIM // TILE + 1
INDEX_DIM = 128

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_SMALLEST_MAGNITUDE = 1e-4


def store_kv(pages: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor, page_size: int) -> None:
    """Quantise rows into their slots.

    Args:
        pages: `[pages, page_bytes]`, one byte per element. Changed in place.
        slots: `[rows]`, `page * page_size + offset`. Rows with a negative slot are dropped.
        kv: `[rows, 512]`, normalised and rotated.
        page_size: Slots in a page.
    """
    kept = slots >= 0
    slots, kv = slots[kept].long(), kv[kept].float()
    tiles = kv[:, :NOPE_DIM].unflatten(-1, (-1, TILE))
    exponents = _exponents(_magnitude(tiles) / _FP8_MAX)
    scaled = _to_fp8(tiles / _power_of_two(exponents)).flatten(1)
    rope = kv[:, NOPE_DIM:].to(torch.bfloat16)
    page, offset = slots // page_size, slots % page_size
    rows, scales = _kv_views(pages, page_size)
    rows[page, offset] = torch.cat([scaled.view(torch.uint8), rope.view(torch.uint8)], dim=1)
    scales[page, offset, :-1] = exponents.squeeze(-1).to(torch.uint8)


def load_kv(pages: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the exact values of rows as `[rows, 512]` float64."""
    slots = slots.long()
    page, offset = slots // page_size, slots % page_size
    rows, scales = _kv_views(pages, page_size)
    row = rows[page, offset]
    nope = row[:, :NOPE_DIM].contiguous().view(_FP8).double().unflatten(-1, (-1, TILE))
    rope = row[:, NOPE_DIM:].contiguous().view(torch.bfloat16).double()
    scale = _power_of_two(scales[page, offset, :-1].int()).double().unsqueeze(-1)
    return torch.cat([(nope * scale).flatten(1), rope], dim=1)


def store_index(pages: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, page_size: int) -> None:
    """Quantise index keys `[rows, 128]` into their slots, each with a scale of its own."""
    slots = slots.long()
    values, scale = quantize_index(keys)
    page, offset = slots // page_size, slots % page_size
    rows, scales = _index_views(pages, page_size)
    rows[page, offset] = values.view(torch.uint8)
    scales[page, offset] = scale.view(torch.uint8)


def load_index(pages: torch.Tensor, slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unscaled values `[rows, 128]` and the scales `[rows]`, both float64."""
    slots = slots.long()
    page, offset = slots // page_size, slots % page_size
    rows, scales = _index_views(pages, page_size)
    return rows[page, offset].view(_FP8).double(), scales[page, offset].view(torch.float32).squeeze(
        -1
    ).double()


def quantize_index(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` as float8 and the float32 scale per row, with a trailing dimension of one."""
    x = x.float()
    scale = _magnitude(x) / _FP8_MAX
    return _to_fp8(x * (1.0 / scale)), scale


def _kv_views(pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = pages.view(torch.uint8)
    data_bytes = page_size * ROW_BYTES
    rows = pages[:, :data_bytes].unflatten(1, (page_size, ROW_BYTES))
    scales = pages[:, data_bytes : data_bytes + page_size * SCALE_BYTES].unflatten(
        1, (page_size, SCALE_BYTES)
    )
    return rows, scales


def _index_views(pages: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = pages.view(torch.uint8)
    data_bytes = page_size * INDEX_DIM
    rows = pages[:, :data_bytes].unflatten(1, (page_size, INDEX_DIM))
    return rows, pages[:, data_bytes:].unflatten(1, (page_size, 4))


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST_MAGNITUDE)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents of the powers of two at or above `scale`."""
    bits = scale.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents.int() << 23).view(torch.float32)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)
