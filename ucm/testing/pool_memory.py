# SPDX-License-Identifier: MIT
"""The bytes of pages in host pools, and in the device tensors behind them.

Host pages are read and written through SGLang's flat page methods. These address the pool's tensors, not the
pointers of `get_page_buffer_meta`, so what a store moved is checked by other code than what moved it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sglang.srt.mem_cache.pool_host import HostKVCache


def page_count(pool: HostKVCache) -> int:
    """Return how many pages `pool` holds."""
    return int(pool.size) // int(pool.page_size)


def page_indices(pool: HostKVCache, pages: Sequence[int]) -> torch.Tensor:
    """Return the host indices of whole pages, as SGLang passes them: `page_size` per page, in order."""
    starts = torch.tensor(pages, dtype=torch.int64)[:, None] * pool.page_size
    return (starts + torch.arange(pool.page_size)).reshape(-1)


def read_page(pool: HostKVCache, page: int) -> bytes:
    """Return the bytes of one page, its components one after the other."""
    flat = pool.get_data_page(page * pool.page_size, flat=True)
    return bytes(flat.contiguous().view(torch.uint8).numpy())


def write_page(pool: HostKVCache, page: int, data: bytes) -> None:
    """Set the bytes of one page; `data` has the length `read_page` returns."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pool.set_from_flat_data_page(page * pool.page_size, flat.view(pool.get_data_page(0, flat=True).dtype))


def read_pages(pool: HostKVCache, pages: Iterable[int] | None = None) -> list[bytes]:
    """Return the bytes of `pages`, or of the whole pool."""
    return [read_page(pool, page) for page in (range(page_count(pool)) if pages is None else pages)]


def fill_random(pool: HostKVCache, seed: int = 0) -> list[bytes]:
    """Overwrite every page of `pool` with random bytes 0..255, and return what each page now holds."""
    generator = torch.Generator().manual_seed(seed)
    length = len(read_page(pool, 0))
    for page in range(page_count(pool)):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        write_page(pool, page, bytes(data.numpy()))
    return read_pages(pool)


def fill_device_random(pool: HostKVCache, seed: int = 0) -> None:
    """Overwrite the device tensors that `pool` mirrors with random bytes 0..255."""
    generator = torch.Generator().manual_seed(seed)
    for tensor, _ in _device_rows(pool):
        tensor.view(-1).view(torch.uint8).random_(0, 256, generator=generator)


def read_device_page(pool: HostKVCache, page: int) -> bytes:
    """Return the bytes of one page in the device tensors that `pool` mirrors."""
    rows = (tensor[page * count : (page + 1) * count] for tensor, count in _device_rows(pool))
    return b"".join(bytes(row.reshape(-1).view(torch.uint8).numpy()) for row in rows)


def _device_rows(pool: HostKVCache) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each device tensor and how many of its rows make a page: a token each, or all of a page."""
    for name in ("device_k_buffers", "device_v_buffers", "device_kv_buffers"):
        yield from ((tensor, pool.page_size) for tensor in getattr(pool, name, ()))
    for name in (
        "packed_device_index_buffers",
        "device_buffers",
        "device_page_views",
        "temporal_device_layers",
    ):
        yield from ((tensor, 1) for tensor in getattr(pool, name, ()))
    for layers in getattr(pool, "conv_device_layers", ()):
        yield from ((tensor, 1) for tensor in layers)
