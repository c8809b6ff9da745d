# SPDX-License-Identifier: MIT
"""Pages of a host pool as the memory segments a store reads from and writes into.

The only module that handles raw addresses. Every address it takes from SGLang
belongs to a page inside the pool, and becomes a `memoryview` of the length that
was fixed when the pool was registered.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

from ucm.integration.sglang.errors import UnsupportedPoolError
from ucm.integration.sglang.sglang_compat import index_limit, indices_per_page, page_parts
from ucm.store.interface import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.integration.sglang.sglang_compat import HostPool

_STAGING_BYTES = 64 << 20


Page = list[memoryview]
"""The segments of one page, in storage order."""


class PageAccess(Protocol):
    """How the pages of one pool meet the store.

    Attributes:
        segment_bytes: Length of each segment of a page; never changes.
        indices_per_page: Host indices that stand for one page.
        batch_pages: Pages that one call may cover; None is any number.
    """

    segment_bytes: tuple[int, ...]
    indices_per_page: int
    batch_pages: int | None

    def outgoing(self, host_indices: torch.Tensor) -> list[Page]:
        """Return the memory to store, one entry per page.

        Args:
            host_indices: All host indices of the pages, page after page.

        Raises:
            ValueError: An index is outside the pool, or the pages no longer have
                the parts that were registered.
        """
        ...

    def incoming(self, host_indices: torch.Tensor) -> list[Page]:
        """Return the memory to load into, one entry per page; raises like `outgoing`."""
        ...

    def publish(
        self, host_indices: torch.Tensor, pages: Sequence[Page], statuses: Sequence[BlockStatus]
    ) -> None:
        """Make the pages that loaded completely visible in the pool, and take the memory back.

        Args:
            host_indices: What `incoming` was called with.
            pages: What `incoming` returned.
            statuses: The verdict on each page.
        """
        ...


class ZeroCopyAccess:
    """The pool's own memory: the store reads and writes host pages in place.

    Raises:
        UnsupportedPoolError: The pool gives no pointers, or parts of different sizes.
    """

    batch_pages: int | None = None

    def __init__(self, pool: str, host_pool: HostPool) -> None:
        self._host_pool = host_pool
        self.indices_per_page = indices_per_page(host_pool)
        self._index_limit = index_limit(host_pool)
        # Sizes of the parts of one page as the pool lists them, empty parts included.
        self._part_bytes = probe_parts(pool, host_pool)
        self.segment_bytes = tuple(size for size in self._part_bytes if size > 0)
        if len(set(self.segment_bytes)) != 1:
            raise UnsupportedPoolError(
                f"host pool {pool!r} ({type(host_pool).__name__}, layout {host_pool.layout!r}) has pages of "
                f"unequal parts {list(self._part_bytes)}; only parts of equal size can be stored. K and V of "
                "different width are not supported: start without --hicache-storage-backend"
            )
        self._kept = [part for part, size in enumerate(self._part_bytes) if size > 0]
        self._segment_type = ctypes.c_char * self.segment_bytes[0]

    def outgoing(self, host_indices: torch.Tensor) -> list[Page]:
        """Return views of the host pages themselves."""
        count = len(page_starts(host_indices, self.indices_per_page, self._index_limit))
        pointers, sizes, width = page_parts(self._host_pool.get_page_buffer_meta(host_indices), count)
        if width != len(self._part_bytes) or list(sizes) != list(self._part_bytes) * count:
            raise ValueError(_changed(sizes[:width], self._part_bytes))
        from_address = self._segment_type.from_address
        return [
            [memoryview(from_address(pointers[first + part])).cast("B") for part in self._kept]
            for first in range(0, count * width, width)
        ]

    incoming = outgoing

    def publish(
        self, host_indices: torch.Tensor, pages: Sequence[Page], statuses: Sequence[BlockStatus]
    ) -> None:
        """Do nothing: the pages lie where they were loaded."""


class StagedAccess:
    """Copies: each page passes through one vector outside the pool.

    For pools whose pages have parts of different sizes, and where a page must be
    restored whole or not at all. Takes at most 64 MiB, or one page, in each direction.

    Raises:
        UnsupportedPoolError: The pool cannot copy pages.
    """

    def __init__(self, pool: str, host_pool: HostPool) -> None:
        probe_parts(pool, host_pool)
        self._host_pool = host_pool
        self.indices_per_page = indices_per_page(host_pool)
        self._index_limit = index_limit(host_pool)
        page = _as_bytes(host_pool.get_dummy_flat_data_page())
        self.segment_bytes: tuple[int, ...] = (page.nbytes,)
        self.batch_pages: int | None = max(1, _STAGING_BYTES // page.nbytes)
        self._spare: deque[memoryview] = deque([page], maxlen=self.batch_pages)

    def outgoing(self, host_indices: torch.Tensor) -> list[Page]:
        """Return copies of the host pages."""
        pages = [
            [_as_bytes(self._host_pool.get_data_page(index, flat=True))]
            for index in self._starts(host_indices)
        ]
        if any(page[0].nbytes != self.segment_bytes[0] for page in pages):
            raise ValueError(
                f"pages have changed: {pages[0][0].nbytes} bytes, registered with {self.segment_bytes[0]}"
            )
        return pages

    def incoming(self, host_indices: torch.Tensor) -> list[Page]:
        """Return vectors outside the pool, one for each page."""
        return [[self._take()] for _ in self._starts(host_indices)]

    def publish(
        self, host_indices: torch.Tensor, pages: Sequence[Page], statuses: Sequence[BlockStatus]
    ) -> None:
        """Copy what loaded completely into the pool."""
        for index, page, status in zip(self._starts(host_indices), pages, statuses, strict=True):
            if status is BlockStatus.DONE:
                self._host_pool.set_from_flat_data_page(index, torch.frombuffer(page[0], dtype=torch.uint8))
        self._spare.extend(page[0] for page in pages)

    def _starts(self, host_indices: torch.Tensor) -> list[int]:
        return page_starts(host_indices, self.indices_per_page, self._index_limit)

    def _take(self) -> memoryview:
        try:
            return self._spare.pop()
        except IndexError:
            page = _as_bytes(self._host_pool.get_dummy_flat_data_page())
        if page.nbytes != self.segment_bytes[0]:
            raise ValueError(
                f"pages have changed: {page.nbytes} bytes, registered with {self.segment_bytes[0]}"
            )
        return page


def probe_parts(pool: str, host_pool: HostPool) -> tuple[int, ...]:
    """Return the sizes of the parts of the pool's first page; empty if the pool has no bytes.

    Raises:
        UnsupportedPoolError: The pool cannot tell.
    """
    indices = torch.arange(indices_per_page(host_pool), dtype=torch.int64)
    try:
        _, sizes, _ = page_parts(host_pool.get_page_buffer_meta(indices), 1)
    except (AttributeError, NotImplementedError, ValueError) as exc:
        raise UnsupportedPoolError(
            f"host pool {pool!r} ({type(host_pool).__name__}, layout {host_pool.layout!r}) gives no page "
            f"pointers ({exc}); such a pool cannot be stored: start without --hicache-storage-backend"
        ) from exc
    return tuple(sizes) if any(sizes) else ()


def page_starts(host_indices: torch.Tensor, indices_per_page: int, index_limit: int) -> list[int]:
    """Return the first host index of each page.

    Raises:
        ValueError: A page reaches out of [0, index_limit).
    """
    starts: list[int] = host_indices[::indices_per_page].tolist()
    if starts and not 0 <= min(starts) <= max(starts) <= index_limit - indices_per_page:
        raise ValueError(
            f"pages start at {min(starts)} to {max(starts)} and have {indices_per_page} indices, "
            f"the pool has [0, {index_limit})"
        )
    return starts


def flat_page(page: torch.Tensor, segment_bytes: Sequence[int]) -> Page:
    """Split a flat page tensor, as SGLang copies them, into segments of the given lengths.

    Raises:
        ValueError: The tensor is not contiguous, or has another size.
    """
    view = _as_bytes(page)
    if view.nbytes != sum(segment_bytes):
        raise ValueError(
            f"a flat page of {view.nbytes} bytes does not hold segments of {list(segment_bytes)}"
        )
    segments = []
    start = 0
    for size in segment_bytes:
        segments.append(view[start : start + size])
        start += size
    return segments


def _changed(now: Sequence[int], registered: Sequence[int]) -> str:
    return f"pages have changed: parts of {list(now)} bytes, registered with {list(registered)}"


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; it stays alive with the view."""
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy())
